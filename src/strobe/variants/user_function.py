"""Users' functions of a score and of its place, `f(score, b, h, q, k)` and `g(b, h, q, k) -> bool`, as scores and masks.

A function is called once, with symbols in the place of numbers. What it does to them becomes an `Expr`, which the backends
evaluate, differentiate and print. Whatever torch computes without a symbol is not traced: it runs, and its result is captured.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strobe.variants.expression import BOOL, CTYPES, DIAGONAL, FLOAT, B, Expr, H, K, Q, S
from strobe.variants.kept_function import NothingDerived
from strobe.variants.mask import Mask, of_condition
from strobe.variants.score import Score
from strobe.variants.symbols import Symbol, SymbolsAsTensors
from strobe.variants.tracer import CannotTrace, Tracer


def mask_function(function: Callable[..., Any], *, rows: bool = False) -> Mask:
    """A mask from `function(b, h, q, k) -> bool`, plain Python over torch operations, traced once. It may close over tensors
    and index them: what they hold is read in every call. q and k are positions: the last query stands opposite the last
    key. `rows`: q counts query rows from 0 instead, as FlexAttention does."""
    return traced_mask(function, rows=rows, kept=True)


def score_function(function: Callable[..., Any], *, rows: bool = False) -> Score:
    """A score from `function(score, b, h, q, k)`, traced once: see `mask_function`. Its derivative follows from the
    trace."""
    return traced_score(function, rows=rows, kept=True)


def traced_mask(function: Callable[..., Any], *, rows: bool = False, kept: bool = False) -> Mask:
    """`mask_function`, for one call unless it is `kept`: the function may derive tensors from those that it captures."""
    return of_condition(*trace(function, (B, H, Q if rows else DIAGONAL, K), BOOL, None, kept))


def traced_score(function: Callable[..., Any], *, rows: bool = False, kept: bool = False) -> Score:
    """`score_function`, for one call unless it is `kept`."""
    expr, tensors, name = trace(function, (S, B, H, Q if rows else DIAGONAL, K), FLOAT, None, kept)
    return Score(expr, name, tensors)


@getattr(torch, "_disable_dynamo", torch.compiler.disable)
def trace(
    function: Callable, given: Sequence[Expr], kind: int, device: torch.device | None, kept: bool = False
) -> tuple[Expr, tuple[torch.Tensor, ...], str]:
    """Return the expression that a function of these values computes, the tensors it captures, and its name."""
    name = getattr(function, "__name__", type(function).__name__).replace("<lambda>", "function")
    tracer = Tracer(name, device)
    what, takes = ("mask", "b, h, q, k") if kind == BOOL else ("score", "score, b, h, q, k")
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        raise CannotTrace(f"a {what} function takes ({takes}); {name} does not: {error}") from None
    except ValueError:  # one without a signature
        pass
    tracer.kept = NothingDerived(tracer.error) if kept else None
    try:
        with SymbolsAsTensors(), tracer.kept or contextlib.nullcontext():
            result = function(*(Symbol(tracer, e) for e in given))
            found = None if result is None else tracer.operand(result)
    except CannotTrace:
        raise
    except Exception as error:
        if tracer.refusal is not None:
            raise tracer.refusal from error
        symbols = f"{name} was called with symbols for ({takes}): they index tensors, but neither arrays nor lists"
        if isinstance(error, TypeError):
            raise tracer.error(f"{error}; {symbols}", error.__traceback__) from error
        error.add_note(symbols)
        raise
    if found is None or (kind == BOOL) != (found.kind == BOOL):
        wanted = "a bool" if kind == BOOL else "a number (a condition goes in mask=)"
        returned = "None" if found is None else CTYPES[found.kind]
        raise tracer.error(f"a {what} function must return {wanted}, this one returns {returned}")
    return tracer.cast(found, kind), tuple(tracer.tensors), name
