"""Help for callers who know another library: keywords, the order of axes, the class of errors.

Keywords are looked up after they were refused, and shapes where a call is bound, so a repeated call spends no time here."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from strobe.problem.arguments import DEFAULT_LAYOUT, Arguments

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CAUSAL = "mask=strobe.causal"
_WINDOW = "mask=strobe.window(left, right), with None for a side without bound"
_LSE = (
    "return_lse=True: the weights are never stored, but their log-sum-exp is known, and "
    "strobe.probabilities(q, k, rows=…) computes those of some queries"
)
_VARLEN = "strobe.attention_varlen(q, k, v, cu_q, cu_k, max_q=…, max_k=…)"
_PAGED = "strobe.attention_paged(q, k, v, table, lengths)"
# Keyword of another library -> what to write.
_SPELLINGS = {
    "causal": _CAUSAL,
    "is_causal": f"{_CAUSAL}, or strobe.causal_top_left for PyTorch's alignment where q and k differ in length",
    "attn_mask": "mask= for booleans (True where attention is allowed), bias= for numbers that are added",
    "attention_mask": "mask= for booleans (True where attention is allowed), bias= for numbers that are added",
    "attn_bias": "bias=, or mask=strobe.causal and its like where it hides keys",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None, :], if it is (batch, keys) and True where keys are padding",
    "block_mask": "mask=strobe.causal, strobe.window(…), …, combined with &, a function (b, h, q, k) or a boolean tensor",
    "mask_mod": "mask=, which takes the function as it is",
    "score_mod": "score=, which takes the function as it is",
    "dropout_p": "dropout=",
    "p": "dropout=",
    "window_size": _WINDOW,
    "window": _WINDOW,
    "sliding_window": _WINDOW,
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "logits_soft_cap": "softcap=",
    "alibi_slopes": "score=strobe.alibi(slopes)",
    "enable_gqa": "nothing: fewer key heads than query heads are grouped",
    "return_attn_probs": _LSE,
    "return_softmax_lse": "return_lse=True",
    "need_weights": _LSE,
    "s_aux": "sinks=",
    "learnable_sink": "sinks=",
    "cu_seqlens_q": f"cu_q= of {_VARLEN}",
    "cu_seqlens_k": f"cu_k= of {_VARLEN}",
    "max_seqlen_q": f"max_q= of {_VARLEN}",
    "max_seqlen_k": f"max_k= of {_VARLEN}",
    "block_table": f"table= of {_PAGED}",
    "page_table": f"table= of {_PAGED}",
    "cache_seqlens": f"lengths= of {_PAGED}",
    "seqused_k": f"lengths= of {_PAGED}",
    "tensor_layout": 'layout="bshd" or layout="bhsd"',
}


def shows_known_keywords(function: _Function) -> _Function:
    """The function itself. Its `*more` and `**wrong`, which are there to be refused with a hint, are left out of its
    signature."""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def unknown_arguments(function: Callable[..., Any], more: Sequence[Any], wrong: Iterable[str]) -> TypeError:
    """The error of a call with more arguments by position than the function takes, or with keywords that it does not have."""
    parameters = inspect.signature(function).parameters
    if more:
        taken = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        way_out = "give the others by name, such as mask= (True where attention is allowed) or bias="
        return TypeError(f"{function.__name__}() takes {', '.join(taken)} by position, got {len(more)} more; {way_out}")
    return unknown_keyword(function, wrong)


def unknown_keyword(function: Callable[..., Any], wrong: Iterable[str]) -> TypeError:
    """The error of a call with keywords that the function does not have."""
    names = list(inspect.signature(function).parameters)
    return unknown_word(function.__name__, next(iter(wrong)), names)


def unknown_word(function: str, word: str, names: Iterable[str]) -> TypeError:
    names = list(names)
    if word in _SPELLINGS:
        way_out = f"use {_SPELLINGS[word]}"
    elif close := difflib.get_close_matches(word, names, 1):
        way_out = f"did you mean {close[0]}=?"
    else:
        way_out = f"it takes {', '.join(names)}"
    return TypeError(f"{function}() got an unexpected keyword argument {word!r}; {way_out}")


# ---- the order of axes -----------------------------------------------------------------------------------------------

SILENCE = "STROBE_NO_LAYOUT_WARNING"
_warned = False
# Numbers of heads that models have. A length may be any number.
_HEADS = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128))


def refuse_three_axes(a: Arguments) -> None:
    """Raise for q with three axes where no layout was given: each of the three ways to read them is somebody's habit, and
    each computes something."""
    q = a.q
    if a.layout is DEFAULT_LAYOUT and isinstance(q, torch.Tensor) and q.dim() == 3:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, and three axes need a layout: for (length, heads, dim) pass "
            'layout="bshd"; for (heads, length, dim), or batch and heads in one axis, layout="bhsd"; for (batch, length, dim), '
            "which has one head, pass q[:, :, None], k[:, :, None] and v[:, :, None]"
        )


def warn_of_layout(a: Arguments) -> None:
    """Warn, once per process, if no layout was given and q and k are likelier to be (batch, heads, length, dim)."""
    if a.layout is not DEFAULT_LAYOUT or not _looks_bhsd(a.q) or not _looks_bhsd(a.k):
        return
    global _warned
    if _warned or os.environ.get(SILENCE, "0") not in ("", "0"):
        return
    _warned = True
    _warn(tuple(a.q.shape))


def _looks_bhsd(t: Any) -> bool:
    """The second axis is likelier to be heads than the third. A number that models have as heads decides; if both or
    neither are such a number, the smaller one is the heads."""
    if not isinstance(t, torch.Tensor) or t.dim() != 4:
        return False
    second, third = t.shape[1], t.shape[2]
    if (second in _HEADS) != (third in _HEADS):
        return second in _HEADS
    return second < third


def _warn(shape: tuple[int, ...]) -> None:
    _, length, heads, _ = shape
    warnings.warn(
        f"q has shape {shape}, which is read as (batch, length, heads, dim): {length} tokens and {heads} heads. If it is "
        f'(batch, heads, length, dim), pass layout="bhsd"; layout="bshd" or {SILENCE}=1 silences this warning',
        stacklevel=callers_level(),
    )


def callers_level() -> int:
    """The stack level of the first frame outside this package, as `warnings.warn` counts it for the function that calls
    this."""
    package = str(Path(__file__).parents[1]) + os.sep
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


# ---- errors ----------------------------------------------------------------------------------------------------------


class InvalidArgument(TypeError, ValueError, RuntimeError):
    """An argument that makes no sense. PyTorch's and flash-attn's kernels say so with a RuntimeError, and callers who try
    something else then catch that; ours are TypeErrors and ValueErrors. This is all of them."""


def raises_as_hosts(function: _Function) -> _Function:
    """The function, whose TypeErrors and ValueErrors are RuntimeErrors as well."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which reports errors in its own way
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if isinstance(error, RuntimeError):
                raise
            raise InvalidArgument(str(error)) from error

    return call  # type: ignore[return-value]
