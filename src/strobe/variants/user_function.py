"""Users' functions of a score and of its place, `f(score, b, h, q, k)` and `g(b, h, q, k) -> bool`, as scores and masks.

A function is called once, with symbols in the place of numbers. What it does to them becomes an `Expr`, which the backends
evaluate, differentiate and print. Whatever torch computes without a symbol is not traced: it runs, and its result is captured.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from strobe.variants.expression import (
    BOOL,
    CTYPES,
    DIAGONAL,
    FLOAT,
    INT,
    LEN_K,
    LEN_Q,
    LONG,
    OPERATIONS,
    B,
    Expr,
    H,
    K,
    Q,
    S,
)
from strobe.variants.kept_function import NothingDerived
from strobe.variants.mask import Mask, of_condition
from strobe.variants.score import ELEMENT_KINDS, Score
from strobe.variants.text import MOST_AXES, MOST_INTEGER, MOST_TENSORS
from strobe.variants.unsupported import Unsupported


class CannotTrace(Unsupported, TypeError):
    """The function does what no kernel can. The message names the operation and the user's line."""


def _literal(value: Any) -> Expr:
    return Expr("literal", (value,))


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "mod", "pow": "pow", "and": "&",
    "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# Names of functions and methods of torch -> operation.
_NAMES = {
    **_BINARY, **_COMPARE,
    "subtract": "-", "multiply": "*", "div": "/", "divide": "/", "true_divide": "/", "floor_divide": "//",
    "remainder": "mod", "minimum": "min", "maximum": "max", "fmin": "min", "fmax": "max", "less": "<", "less_equal": "<=",
    "greater": ">", "greater_equal": ">=", "not_equal": "!=", "logical_and": "&", "logical_or": "|", "logical_xor": "^",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "neg": "neg", "negative": "neg", "abs": "abs", "absolute": "abs", "invert": "invert", "bitwise_not": "invert",
    "logical_not": "not",
    **{name: name for name in ("exp", "log", "sqrt", "sin", "cos", "erf", "sigmoid", "tanh")},
    **{name: name for name in ("floor", "ceil", "trunc", "round")},
}  # fmt: skip
_COMPOSED = ("square", "rsqrt", "reciprocal", "exp2", "log2", "log1p", "sign", "relu", "softplus", "silu")
_LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")
_CASTS = {"int": INT, "long": LONG, "float": FLOAT, "bool": BOOL, "double": FLOAT}
_TRUTH = "Python asks whether a value is true (if, and, or, not, min, max); use torch.where, &, |, ~, torch.minimum"
_NUMBER = "Python asks for a number; use torch functions, .int() or .float(), and a tensor for a list"


class Symbol:
    """A value of a traced function. To the user's function it is a number of torch that writes down what is done to it."""

    __array_ufunc__ = None  # numpy's numbers leave `x * symbol` to us
    __hash__ = object.__hash__  # `==` is an operation
    shape, ndim, requires_grad = torch.Size(()), 0, False

    def __init__(self, tracer: Tracer, expr: Expr) -> None:
        self._tracer, self._expr, self.device = tracer, expr, tracer.device
        self.dtype = (torch.bool, torch.int32, torch.int64, torch.float32)[expr.kind]

    @classmethod  # functions of torch with a symbol among their arguments come here, and so does `tensor[symbol]`
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.where:
            args = (args[1], args[0], *args[2:])
        return next(_symbols((args, kwargs)))._tracer.call(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":  # its condition comes second, torch.where's comes first
            return lambda c, *other: self._tracer.call(name, (c, self, *other), {})
        return lambda *args, **kwargs: self._tracer.call(name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise self._tracer.error(_TRUTH)


class Partial:
    """A captured tensor of which some axes are still to be indexed."""

    def __init__(self, tracer: Tracer, tensor: torch.Tensor, index: tuple[Expr, ...]) -> None:
        self._tracer, self._tensor, self._index = tracer, tensor, index

    def __getitem__(self, index: Any) -> Any:
        return self._tracer.load(self._tensor, self._index, index)

    def __getattr__(self, name: str) -> Any:
        shape, indices = tuple(self._tensor.shape), len(self._index)
        raise self._tracer.error(f"a tensor of shape {shape} has {indices} indices; index it down to one number")


def _operator(name: str) -> Callable:
    return lambda self, *others: self._tracer.call(name, (self, *others), {})


def _refused(what: str) -> Callable:
    def method(self: Symbol, *_: Any) -> Any:
        raise self._tracer.error(what)

    return method


for _name in (*_BINARY, *("r" + name for name in _BINARY), *_COMPARE, "neg", "abs", "invert", "getitem"):
    setattr(Symbol, f"__{_name}__", _operator(f"__{_name}__"))
_CONVERSIONS = "__int__ __float__ __index__ __iter__ __len__ __contains__ __setitem__ item tolist"
for _name in _CONVERSIONS.split():
    setattr(Symbol, _name, _refused(_NUMBER))


def _symbols(x: Any) -> Iterator[Symbol]:
    if isinstance(x, Symbol):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _symbols(item)


_NOT_THE_USER = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))


class Tracer:
    """One call of a user's function: the tensors that it captures, and what its operations mean."""

    def __init__(self, name: str, device: torch.device | None) -> None:
        self.name, self.device = name, device
        self.tensors: list[torch.Tensor] = []
        self.kept: NothingDerived | None = None  # while a function runs whose trace is kept

    def error(self, what: str) -> CannotTrace:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
            frame = frame.f_back
        file, line = frame.f_code.co_filename, frame.f_lineno
        return CannotTrace(f"{self.name}: {what}\n  {file}:{line}: {linecache.getline(file, line).strip()}")

    # ---- what a function calls
    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = name.strip("_") if name.startswith("__") else name
        if name in ("getitem", "get"):
            if isinstance(args[0], Symbol):
                raise self.error("a single number is indexed")
            return self.load(args[0], (), args[1])
        if name in ("to", "type"):
            return self._to(args, kwargs)
        if name == "where" and len(args) == 3 and not kwargs:
            return Symbol(self, self.select(*map(self.operand, args)))
        if name in ("clamp", "clip", "clamp_min", "clamp_max"):
            return self._clamp(name, args, kwargs)
        if kwargs.get("inplace") is False:
            kwargs = {n: value for n, value in kwargs.items() if n != "inplace"}
        if kwargs:
            raise self.error(f"{name} with {', '.join(kwargs)}=")
        if name == "masked_fill" and len(args) == 3:
            return Symbol(self, self.select(self.operand(args[1]), self.operand(args[2]), self.operand(args[0])))
        if name in ("zeros_like", "ones_like"):
            return Symbol(self, self.cast(_literal(int(name == "ones_like")), self.operand(args[0]).kind))
        if name in _CASTS and len(args) == 1:
            return Symbol(self, self.cast(self.operand(args[0]), _CASTS[name]))
        if name in _COMPOSED and len(args) == 1:
            return self._composed(name, Symbol(self, self.operand(args[0])))
        swapped = name.startswith("r") and name[1:] in _BINARY
        op = _BINARY[name[1:]] if swapped else name if name in ("min", "max") and len(args) == 2 else _NAMES.get(name)
        if op is None:
            raise self.error(f"the operation {name!r} cannot be part of a kernel")
        if len(args) != (1 if op == "neg" else OPERATIONS[op].operands):
            raise self.error(f"{name} of {len(args)} operands")
        operands = [self.operand(x) for x in args]
        if name in _LOGICAL:
            operands = [self.cast(x, BOOL) for x in operands]
        return Symbol(self, self.apply(op, *(reversed(operands) if swapped else operands)))

    def _to(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        kind = ELEMENT_KINDS.get(dtype) if isinstance(dtype, torch.dtype) else None
        if kind is None or len(args) + len(kwargs) != 2:
            raise self.error("to() takes a dtype here, and nothing else")
        return Symbol(self, self.cast(self.operand(args[0]), kind))

    def _clamp(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
        given = dict(zip(("max",) if name == "clamp_max" else ("min", "max"), args[1:], strict=False)) | kwargs
        x = self.operand(args[0])
        for bound, op in (("min", "max"), ("max", "min")):
            if given.get(bound) is not None:
                x = self.apply(op, x, self.operand(given[bound]))
        return Symbol(self, x)

    def _composed(self, name: str, x: Any) -> Any:
        x = x * 1.0 if name in ("reciprocal", "rsqrt", "exp2") and x._expr.kind != FLOAT else x
        if name == "square":
            return x * x
        if name == "rsqrt":
            return 1.0 / x.sqrt()
        if name == "reciprocal":
            return 1.0 / x
        if name == "exp2":
            return (x * 0.6931471805599453).exp()
        if name == "log2":
            return x.log() * 1.4426950408889634
        if name == "log1p":
            return (x + 1.0).log()
        if name == "silu":
            return x * x.sigmoid()
        if name == "softplus":  # without overflow
            return x.clamp(min=0) + (-x.abs()).exp().log1p()
        if name == "relu":
            return Symbol(self, self.apply("max", self.operand(0), x._expr))  # at 0 its slope is that of the 0
        return Symbol(self, self.apply("-", self.cast(self.apply(">", x._expr, _literal(0)), x._expr.kind),
                                       self.cast(self.apply("<", x._expr, _literal(0)), x._expr.kind)))  # fmt: skip

    # ---- operands
    def operand(self, x: Any) -> Expr:
        if isinstance(x, torch.Tensor):
            changes = self.kept is not None and self.kept.is_captured(x)
            is_number = x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad and not changes
            x = x.item() if is_number else self.load(x, (), ())
        if isinstance(x, (Symbol, Partial)) and x._tracer is not self:
            raise self.error("a value of another call of a function takes part: its tensors are not those of this one")
        if isinstance(x, Symbol):
            return x._expr
        if isinstance(x, Partial):
            x.shape  # raises  # noqa: B018
        if isinstance(x, bool):
            return _literal(x)
        if isinstance(x, numbers.Integral):
            if abs(int(x)) > MOST_INTEGER:
                raise self.error(f"the integer {x} has more than 64 bits")
            return Expr.of(int(x))
        if isinstance(x, numbers.Real):
            return Expr.of(float(x))
        raise self.error(f"a {type(x).__name__} takes part; numbers, tensors and what the function is given can")

    def load(self, tensor: torch.Tensor, before: tuple[Expr, ...], index: Any) -> Any:
        indices = before + tuple(map(self._index, index if isinstance(index, tuple) else (index,)))
        if tensor.dtype not in ELEMENT_KINDS or tensor.layout != torch.strided:
            raise self.error(f"a captured tensor of {tensor.dtype}, {tensor.layout}; kernels do not read such elements")
        if self.device is not None and tensor.device != self.device:
            places = f"is on {tensor.device}, q is on {self.device}"
            raise self.error(f"a captured tensor of shape {tuple(tensor.shape)} {places}")
        if len(indices) > tensor.ndim or tensor.ndim > MOST_AXES:
            raise self.error(f"a tensor of {tensor.ndim} axes has {len(indices)} indices; at most {MOST_AXES} axes")
        if len(indices) < tensor.ndim:
            return Partial(self, tensor, indices)
        number = next((i for i, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        if number == MOST_TENSORS:
            raise self.error(f"more than {MOST_TENSORS} tensors are captured")
        return Symbol(self, Expr("load", (number, ELEMENT_KINDS[tensor.dtype], *indices)))

    def _index(self, x: Any) -> Expr:
        if isinstance(x, (slice, type(None), type(Ellipsis))) or (isinstance(x, torch.Tensor) and x.ndim):
            raise self.error("a captured tensor is indexed with numbers alone: no slices, None or tensors")
        e = self.operand(x)
        if e.kind not in (INT, LONG):
            raise self.error(f"an index is {CTYPES[e.kind]}; it must be an integer: .int()")
        return e

    # ---- operations
    def cast(self, e: Expr, kind: int) -> Expr:
        if e.kind == kind:
            return e
        if e.op in ("const", "literal") and kind != BOOL:
            return Expr(e.op, ((bool, int, int, float)[kind](e.args[0]),))
        if kind == BOOL:
            return self.apply("!=", e, _literal(0.0 if e.kind == FLOAT else 0))
        if kind == FLOAT and _is_position(e):  # float(q) - float(k): one is of a row, the other of a column
            if e.op == "var":
                return Expr("float", (e,))
            return Expr("abs" if e.op == "iabs" else e.op, tuple(self.cast(a, FLOAT) for a in e.args))
        return Expr({INT: "int", LONG: "long", FLOAT: "float"}[kind], (e,))

    def select(self, c: Expr, a: Expr, b: Expr) -> Expr:
        kind = max(a.kind, b.kind)
        return Expr("select", (self.cast(c, BOOL), self.cast(a, kind), self.cast(b, kind)))

    def apply(self, op: str, *operands: Expr) -> Expr:
        """The operation with the type promotions of torch: all floats are float32."""
        kind = max(e.kind for e in operands)
        if op in ("invert", "not") and (kind == BOOL or op == "not"):
            return Expr("not", (self.cast(operands[0], BOOL),))
        if op in ("&", "|", "^", "<<", ">>", "invert") and kind == FLOAT:
            raise self.error(f"{op!r} of a float")
        if op not in ("&", "|", "^", "min", "max", "==", "!="):
            kind = max(kind, INT)
        if op in ("/", "pow") or OPERATIONS.get(op, OPERATIONS["+"]).kind == FLOAT:
            kind = FLOAT
        if op == "pow":
            return self._power(self.cast(operands[0], FLOAT), operands[1])
        args = tuple(self.cast(e, kind) for e in operands)
        if op == "neg":
            return Expr("-", (_literal(0.0 if kind == FLOAT else 0), *args))
        if op in ("//", "mod") and kind == FLOAT:
            quotient = Expr("floor", (args[0] / args[1],))
            return quotient if op == "//" else args[0] - quotient * args[1]
        if op in ("//", "mod") and args[1].op in ("const", "literal") and not args[1].args[0]:
            raise self.error("an integer is divided by 0")
        return Expr("iabs" if op == "abs" and kind != FLOAT else op, args)

    def _power(self, base: Expr, exponent: Expr) -> Expr:
        """Common exponents are part of the text: they choose the instructions. Others are for a base that is not negative:
        kernels take its logarithm."""
        number = exponent.args[0] if exponent.op == "const" else None
        if number == 0.5:
            return Expr("sqrt", (base,))
        if number in (-1, -2):
            return _literal(1.0) / (base if number == -1 else base * base)
        if number is not None and number in range(1, 9):
            half = self._power(base, Expr.of(number // 2)) if number > 1 else base
            return half if number == 1 else half * half * base if number % 2 else half * half
        return Expr("pow", (base, self.cast(exponent, FLOAT)))


def _is_position(e: Expr) -> bool:
    """Sums of positions and small numbers, which float32 holds exactly below 2^24."""
    if e.op == "var":
        return e in (Q, K, LEN_Q, LEN_K)
    if e.op in ("const", "literal"):
        return e.kind == INT and abs(e.args[0]) < 1 << 22
    return e.op in ("+", "-", "iabs") and all(map(_is_position, e.args))


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
    """What a function of these values computes, the tensors it captures, and its name."""
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
        with tracer.kept or contextlib.nullcontext():
            result = function(*(Symbol(tracer, e) for e in given))
            found = None if result is None else tracer.operand(result)
    except Exception as error:
        if not isinstance(error, CannotTrace):
            note = f"{name} was called with symbols for ({takes}): they index tensors, but neither arrays nor lists"
            error.add_note(note)
        raise
    if found is None or (kind == BOOL) != (found.kind == BOOL):
        wanted = "a bool" if kind == BOOL else "a number (a condition goes in mask=)"
        returned = "None" if found is None else CTYPES[found.kind]
        raise tracer.error(f"a {what} function must return {wanted}, this one returns {returned}")
    return tracer.cast(found, kind), tuple(tracer.tensors), name
