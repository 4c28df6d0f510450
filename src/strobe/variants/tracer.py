"""One call of a user's function: the symbols that stand for its values, and what torch's operations do to them."""

from __future__ import annotations

import inspect
import linecache
import numbers
import os
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch

from strobe.variants.composed import COMPOSED
from strobe.variants.expression import BOOL, CTYPES, FLOAT, INT, LEN_K, LEN_Q, LONG, OPERATIONS, Expr, K, Q
from strobe.variants.indices import counted_from_zero
from strobe.variants.kept_function import NothingDerived
from strobe.variants.reductions import REDUCTIONS, of_the_row
from strobe.variants.score import ELEMENT_KINDS
from strobe.variants.symbols import Partial, Row, Symbol
from strobe.variants.text import MOST_AXES, MOST_INTEGER, MOST_TENSORS
from strobe.variants.torch_names import BINARY, CASTS, DTYPES, FILLED, LOGICAL, NAMES
from strobe.variants.unsupported import Unsupported

MOST_ENTRIES = 32  # of a tensor's axis that a function takes as a whole
_NOT_OF_BOOLS = {"neg", "pos", "abs", "//", "mod", "pow", "<<", ">>", "floor", "ceil", "trunc", "round"}


class CannotTrace(Unsupported, TypeError):
    """The function does what no kernel can. The message names the operation and the user's line."""


def _literal(value: Any) -> Expr:
    return Expr("literal", (value,))


_NOT_THE_USER = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))


def _frame_of_the_user(frame: FrameType) -> FrameType:
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame = frame.f_back
    return frame


def _has_items(x: Any) -> bool:
    return isinstance(x, (Row, Partial)) or (isinstance(x, torch.Tensor) and x.ndim == 1)


class Tracer:
    """One call of a user's function: the tensors that it captures, and what its operations mean."""

    def __init__(self, name: str, device: torch.device | None) -> None:
        self.name, self.device = name, device
        self.tensors: list[torch.Tensor] = []
        self.kept: NothingDerived | None = None  # while a function runs whose trace is kept
        self.refusal: CannotTrace | None = None  # the last one: numpy and lists put errors of their own in its place

    def error(self, what: str, traceback: TracebackType | None = None) -> CannotTrace:
        """`traceback`: of the error that torch or Python raised; else the operation is under way."""
        frame, line = _frame_of_the_user(sys._getframe(1)), None
        while traceback is not None:
            if not traceback.tb_frame.f_code.co_filename.startswith(_NOT_THE_USER):
                frame, line = traceback.tb_frame, traceback.tb_lineno
            traceback = traceback.tb_next
        file, line = frame.f_code.co_filename, line or frame.f_lineno
        self.refusal = CannotTrace(f"{self.name}: {what}\n  {file}:{line}: {linecache.getline(file, line).strip()}")
        return self.refusal

    # ---- what a function calls
    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = name.strip("_") if name.startswith("__") else name
        if name in ("getitem", "get"):
            if isinstance(args[0], Symbol):
                raise self.error("a single number is indexed")
            return self.load(args[0], (), args[1])
        if any(isinstance(x, (Row, Partial)) for x in (*args, *kwargs.values())):
            return self._of_rows(name, args, kwargs)
        if name in ("to", "type"):
            return self._to(args, kwargs)
        if name == "where" and len(args) == 3 and not kwargs:
            return Symbol(self, self.select(*map(self.operand, args)))
        if name in ("clamp", "clip", "clamp_min", "clamp_max"):
            return self._clamp(name, args, kwargs)
        if name in FILLED:
            return self._filled(name, args, kwargs)
        if name in COMPOSED:
            return self._composed(name, args, kwargs)
        if kwargs:
            raise self.error(f"{name} with {', '.join(kwargs)}=")
        if name == "masked_fill" and len(args) == 3:
            return Symbol(self, self.select(self.operand(args[1]), self.operand(args[2]), self.operand(args[0])))
        if name in CASTS and len(args) == 1:
            return Symbol(self, self.cast(self.operand(args[0]), CASTS[name]))
        swapped = name.startswith("r") and name[1:] in BINARY
        op = BINARY[name[1:]] if swapped else name if name in ("min", "max") and len(args) == 2 else NAMES.get(name)
        if op is None:
            raise self.error(f"the operation {name!r} cannot be part of a kernel")
        if len(args) != (1 if op in ("neg", "pos") else OPERATIONS[op].operands):
            raise self.error(f"{name} of {len(args)} operands")
        operands = [self.operand(x) for x in args]
        if name in LOGICAL:
            operands = [self.cast(x, BOOL) for x in operands]
        return Symbol(self, self.apply(op, *(reversed(operands) if swapped else operands)))

    def _to(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        kind = DTYPES.get(dtype) if isinstance(dtype, torch.dtype) else None
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

    def _filled(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
        """One number, as `new_ones((), dtype=torch.bool)` makes it: whatever has a shape is no part of a kernel."""
        names = (["size"] if name.startswith("new") else []) + (["fill_value"] if FILLED[name] is None else [])
        given = dict(zip(names, args[1:], strict=False)) | kwargs
        others = given.keys() - {*names, "dtype", "device"}
        if others or len(args) > 1 + len(names) or not given.keys() >= set(names):
            raise self.error(f"{name} takes {', '.join([*names, 'dtype', 'device'])} here")
        if names[:1] == ["size"] and given["size"] not in ((), []):
            raise self.error(f"{name} makes a tensor of shape {given['size']!r}; in a function it makes one number: ()")
        value = FILLED[name]
        number = self.operand(given["fill_value"]) if value is None else _literal(value)
        dtype = given.get("dtype")
        if dtype is not None and dtype not in DTYPES:
            raise self.error(f"{name} makes a tensor of {dtype}; kernels do not compute with such numbers")
        return Symbol(self, self.cast(number, self.operand(args[0]).kind if dtype is None else DTYPES[dtype]))

    def _composed(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        function = COMPOSED[name]
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise self.error(f"{name} is called as it cannot be in a kernel: {error}") from None
        return function(Symbol(self, self.operand(args[0])), *args[1:], **kwargs)

    def _of_rows(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operation of each number of a row, or of all of them."""
        if name in REDUCTIONS:
            operands, axis = args[: REDUCTIONS[name].operands], args[REDUCTIONS[name].operands :]
            if not all(of_the_row(*item) for item in (*(("dim", x) for x in axis), *kwargs.items())):
                raise self.error(f"{name} of a row takes nothing but dim=-1")
            return REDUCTIONS[name].of(*(self._items(x) for x in operands))
        rows = [self._items(x) if _has_items(x) else None for x in args]
        lengths = {len(row) for row in rows if row is not None}
        if len(lengths) != 1 or any(map(_has_items, kwargs.values())):
            raise self.error(f"{name} of rows of {' and '.join(map(str, sorted(lengths)))} numbers")
        return Row(self, [
            self.call(name, [x if row is None else row[i] for x, row in zip(args, rows, strict=True)], kwargs)
            for i in range(*lengths)
        ])  # fmt: skip

    def _items(self, x: Any) -> list[Symbol]:
        return self.entries(x) if isinstance(x, torch.Tensor) else x.items

    def entries(self, tensor: Any, before: tuple[Expr, ...] = ()) -> list[Symbol]:
        """The numbers along the last axis of a tensor, of which the axes before it have their indices."""
        if not isinstance(tensor, torch.Tensor):
            raise self.error(f"a {type(tensor).__name__} takes part where torch takes a tensor of one axis")
        if tensor.ndim != len(before) + 1 or tensor.shape[-1] > MOST_ENTRIES:
            raise self.error(
                f"a tensor of shape {tuple(tensor.shape)} has {len(before)} indices; index it down to one number, "
                f"or to a last axis of {MOST_ENTRIES} numbers at most"
            )
        return [self.load(tensor, before, Symbol(self, _literal(i))) for i in range(tensor.shape[-1])]

    # ---- operands
    def operand(self, x: Any) -> Expr:
        if isinstance(x, torch.Tensor):
            changes = self.kept is not None and self.kept.is_captured(x)
            is_number = x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad and not changes
            x = x.item() if is_number else self.load(x, (), ())
        if isinstance(x, (Symbol, Row, Partial)) and x._tracer is not self:
            raise self.error("a value of another call of a function takes part: its tensors are not those of this one")
        if isinstance(x, Symbol):
            return x._expr
        if isinstance(x, (Row, Partial)):
            raise self.error(
                f"a row of {len(x.items)} numbers stands where one number is needed: .sum(-1), or index it"
            )
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
        index = index if isinstance(index, tuple) else (index,)
        while index and (index[-1] is Ellipsis or (isinstance(index[-1], slice) and index[-1] == slice(None))):
            index = index[:-1]  # T[i, :] is T[i]
        indices = before + tuple(map(self._index, index))
        if tensor.dtype not in ELEMENT_KINDS or tensor.layout != torch.strided:
            raise self.error(f"a captured tensor of {tensor.dtype}, {tensor.layout}; kernels do not read such elements")
        if self.device is not None and tensor.device != self.device:
            raise self.error(
                f"a captured tensor of shape {tuple(tensor.shape)} is on {tensor.device}, q is on {self.device}"
            )
        if len(indices) > tensor.ndim or tensor.ndim > MOST_AXES:
            raise self.error(f"a tensor of {tensor.ndim} axes has {len(indices)} indices; at most {MOST_AXES} axes")
        if len(indices) < tensor.ndim:
            return Partial(self, tensor, indices)
        number = next((i for i, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        if number == MOST_TENSORS:
            raise self.error(f"more than {MOST_TENSORS} tensors are captured")
        places = [self._place(index, tensor, axis) for axis, index in enumerate(indices)]
        return Symbol(self, Expr("load", (number, ELEMENT_KINDS[tensor.dtype], *places)))

    def _place(self, index: Expr, tensor: torch.Tensor, axis: int) -> Expr:
        place = counted_from_zero(index, tensor.shape[axis])
        if place is None:
            raise self.error(f"index {index.args[0]} is out of bounds for axis {axis} of {tensor.shape[axis]} entries")
        return place

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
        if e.op == "literal" and kind == BOOL:
            return _literal(bool(e.args[0]))
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
        if kind == BOOL:
            op = {"+": "|", "*": "&"}.get(op, op)
        if (kind == BOOL and op in _NOT_OF_BOOLS) or (op == "-" and BOOL in (e.kind for e in operands)):
            raise self.error(f"{op!r} of a bool, which torch does not compute: .int()")
        if op == "pos" or (op in ("floor", "ceil", "trunc", "round") and kind in (INT, LONG)):
            return operands[0]
        if op not in ("&", "|", "^", "min", "max", "==", "!="):
            kind = max(kind, INT)
        if op in ("/", "pow") or OPERATIONS.get(op, OPERATIONS["+"]).kind == FLOAT:
            kind = FLOAT
        if op == "pow":
            return self._power(self.cast(operands[0], FLOAT), operands[1])
        if kind == BOOL and op in ("&", "|"):
            for a, b in (operands, operands[::-1]):
                if a.op == "literal":
                    return b if a.args[0] == (op == "&") else a
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
        if number == 0:
            return _literal(1.0)  # of 0, too
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
