"""Small expressions, written once: evaluated with numbers or tensors, differentiated, and printed as C++ elsewhere.

The ends of masks are integer expressions (`mask.py`), what happens to a score is a floating-point one (`score.py`). Each
operation is one row of `OPERATIONS`. `text.py` sends expressions as text, `cuda/parts/print_*.py` write their C++.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Value = Any  # a number, or a tensor evaluated element by element
PLACEHOLDER = "?"  # in a text, for a number that travels beside it
WORKING_DTYPE = "float"  # in an environment: the dtype that `float` converts to

BOOL, INT, LONG, FLOAT = range(4)  # kinds of values, each wider than the one before
CTYPES = ("bool", "int", "i64", "float")
# The place of a score: its batch and head, its query and its key in the whole sequence, and the sequence's lengths. All
# are integers; arithmetic with scores converts them (the operation `float`).
PLACE = ("b", "h", "q", "k", "len_q", "len_k")


def on_device(value: Value, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the value as a tensor there. A number is filled in, since nothing may be copied from the host while a CUDA
    graph is captured."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype or value.dtype)
    return torch.full((), value, device=device, dtype=dtype)


def _minmax(of_numbers: Any, of_tensors: Any, a: Value, b: Value) -> Value:
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        return of_numbers(a, b)
    like = a if isinstance(a, torch.Tensor) else b
    return of_tensors(on_device(a, like.device), on_device(b, like.device))


def _of_tensor(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Value], Value]:
    """Wraps a function of torch that takes tensors only, so that it takes numbers."""
    return lambda a: function(a if isinstance(a, torch.Tensor) else torch.as_tensor(a, dtype=torch.float64))


@dataclass(frozen=True)
class Operation:
    evaluate: Callable[..., Value]
    cpp: str  # with {0}, {1} and {2} for the operands
    # The partial derivatives by each operand, from the operands and the result; None: a constant, or not differentiable.
    partials: Callable[..., tuple[Expr, ...]] | None = None
    # Used instead where an operand's derivative may be infinite but unused: from operands and their derivatives.
    chain: Callable[..., Expr] | None = None
    kind: int | None = None  # of the result; None: the widest of its operands
    flat: bool = False  # its derivative is 0 wherever there is one

    @property
    def operands(self) -> int:
        return 3 if "{2}" in self.cpp else 2 if "{1}" in self.cpp else 1


def _select(c: Expr, a: Expr, b: Expr) -> Expr:
    return a if a == b else Expr("select", (c, a, b))


def _function(function: Any, cpp: str, partial: Callable[[Expr, Expr], Expr]) -> Operation:
    return Operation(_of_tensor(function), cpp, lambda a, y: (partial(a, y),), kind=FLOAT)


def _comparison(sign: str, function: Callable[[Value, Value], Value]) -> Operation:
    return Operation(function, f"({{0}} {sign} {{1}})", kind=BOOL, flat=True)


OPERATIONS: dict[str, Operation] = {
    "+": Operation(lambda a, b: a + b, "({0} + {1})", lambda a, b, y: (_ONE, _ONE)),
    "-": Operation(lambda a, b: a - b, "({0} - {1})", lambda a, b, y: (_ONE, _MINUS_ONE)),
    "*": Operation(lambda a, b: a * b, "({0} * {1})", lambda a, b, y: (b, a)),
    "/": Operation(lambda a, b: a / b, "divide({0}, {1})", lambda a, b, y: (_ONE / b, _MINUS_ONE * y / b), kind=FLOAT),
    "//": Operation(lambda a, b: a // b, "floor_div({0}, {1})", flat=True),  # of integers
    "min": Operation(
        functools.partial(_minmax, min, torch.minimum), "min({0}, {1})", chain=lambda a, b, da, db: _select(a <= b, da, db)
    ),
    "max": Operation(
        functools.partial(_minmax, max, torch.maximum), "max({0}, {1})", chain=lambda a, b, da, db: _select(a >= b, da, db)
    ),
    "abs": Operation(abs, "fabs({0})", chain=lambda a, da: _select(a > _ZERO, da, _select(a < _ZERO, _MINUS_ONE * da, _ZERO))),
    "tanh": Operation(torch.tanh, "tanh_fast({0})", lambda a, y: (_ONE - y * y,), kind=FLOAT),
    "tanh_near": Operation(torch.tanh, "tanh_near({0}, 1.f)", kind=FLOAT),  # for kernels: near 0
    # A score and its bias, for kernels: see biased() in pipeline/scores.cuh.
    "biased": Operation(lambda a, b: a + b, "biased({0}, {1})", lambda a, b, y: (_ONE, _ONE)),
    "biased_if_seen": Operation(lambda a, b: a + b, "biased_if_seen({0}, {1})", lambda a, b, y: (_ONE, _ONE)),
    # A score where the second operand is true; elsewhere -inf.
    "where": Operation(
        lambda a, b: _selected(b, a, -math.inf), "({1} ? {0} : neg_inf())",
        chain=lambda a, b, da, db: da if da == _ONE else _select(b, da, _ZERO), kind=FLOAT,
    ),
    # ---- of users' functions
    "select": Operation(
        lambda c, a, b: _selected(c, a, b), "({0} ? {1} : {2})", chain=lambda c, a, b, dc, da, db: _select(c, da, db)
    ),
    "mod": Operation(lambda a, b: a % b, "floor_mod({0}, {1})", lambda a, b, y: (_ONE, _ZERO)),
    "iabs": Operation(abs, "absolute({0})", kind=None, flat=True),
    "exp": _function(torch.exp, "exp_fast({0})", lambda a, y: y),
    "log": _function(torch.log, "log_fast({0})", lambda a, y: _ONE / a),
    "sqrt": _function(torch.sqrt, "sqrt_approx({0})", lambda a, y: Expr("literal", (0.5,)) / y),
    "sin": _function(torch.sin, "sine({0})", lambda a, y: Expr("cos", (a,))),
    "cos": _function(torch.cos, "cosine({0})", lambda a, y: _MINUS_ONE * Expr("sin", (a,))),
    "erf": _function(
        torch.erf, "error_function({0})",
        lambda a, y: Expr("literal", (2 / math.sqrt(math.pi),)) * Expr("exp", (_MINUS_ONE * a * a,)),
    ),
    "sigmoid": _function(torch.sigmoid, "sigmoid_fast({0})", lambda a, y: y * (_ONE - y)),
    "pow": Operation(
        lambda a, b: a**b, "pow_fast({0}, {1})",
        lambda a, b, y: (
            b * Expr("min", (Expr("pow", (a, b - _ONE)), _LARGEST)),  # finite, where b may be 0
            _select(Expr("==", (a, _ZERO)), _ZERO, y * Expr("log", (a,))),
        ),
        kind=FLOAT,
    ),
    "floor": Operation(_of_tensor(torch.floor), "round_down({0})", kind=FLOAT, flat=True),
    "ceil": Operation(_of_tensor(torch.ceil), "round_up({0})", kind=FLOAT, flat=True),
    "trunc": Operation(_of_tensor(torch.trunc), "round_to_zero({0})", kind=FLOAT, flat=True),
    "round": Operation(_of_tensor(torch.round), "round_to_even({0})", kind=FLOAT, flat=True),
    "<": _comparison("<", lambda a, b: a < b),
    "<=": _comparison("<=", lambda a, b: a <= b),
    ">": _comparison(">", lambda a, b: a > b),
    ">=": _comparison(">=", lambda a, b: a >= b),
    "==": _comparison("==", lambda a, b: a == b),
    "!=": _comparison("!=", lambda a, b: a != b),
    "&": Operation(lambda a, b: a & b, "({0} & {1})", flat=True),
    "|": Operation(lambda a, b: a | b, "({0} | {1})", flat=True),
    "^": Operation(lambda a, b: a ^ b, "({0} ^ {1})", flat=True),
    "<<": Operation(lambda a, b: a << b, "({0} << {1})", flat=True),
    ">>": Operation(lambda a, b: a >> b, "({0} >> {1})", flat=True),
    "not": Operation(lambda a: not a if isinstance(a, bool) else ~a, "(!{0})", kind=BOOL, flat=True),
    "invert": Operation(lambda a: ~a, "(~{0})", flat=True),
    "int": Operation(lambda a: a.long() if isinstance(a, torch.Tensor) else int(a), "int({0})", kind=INT, flat=True),
    "long": Operation(lambda a: a.long() if isinstance(a, torch.Tensor) else int(a), "i64({0})", kind=LONG, flat=True),
    "float": Operation(lambda a: a, "float({0})", kind=FLOAT, flat=True),  # to the working dtype: see `evaluate`
}  # fmt: skip


def _selected(c: Value, a: Value, b: Value) -> Value:
    if not isinstance(c, torch.Tensor):
        return a if c else b
    if isinstance(a, float) and isinstance(b, float):
        a = torch.tensor(a, dtype=torch.float64)  # two numbers would become float32
    return torch.where(c, a, b)


@dataclass(frozen=True)
class Expr:
    """`op` is "var" (a name), "const" (a user's number, which kernels get as an argument), "literal" (a number of ours,
    which is part of their text), "load" (a captured tensor's number, the kind of its elements, and an index for each of
    its axes, which is clamped to it), "tensor" (an entry of a bias or a mask: its number) or a key of OPERATIONS."""

    op: str
    args: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        """1, 1.0 and True are different numbers here: kernels compute with them in different types. So are 0.0 and -0.0."""
        if self is other:
            return True
        if not isinstance(other, Expr) or self.op != other.op or self.args != other.args:
            return False
        return self.op not in ("const", "literal") or _same_number(self.args[0], other.args[0])

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args))

    @staticmethod
    def of(x: Expr | float) -> Expr:
        return x if isinstance(x, Expr) else Expr("const", (x,))

    def __add__(self, other: Expr | float) -> Expr:
        return Expr("+", (self, Expr.of(other)))

    def __sub__(self, other: Expr | float) -> Expr:
        return Expr("-", (self, Expr.of(other)))

    def __mul__(self, other: Expr | float) -> Expr:
        return Expr("*", (self, Expr.of(other)))

    def __truediv__(self, other: Expr | float) -> Expr:
        return Expr("/", (self, Expr.of(other)))

    def __floordiv__(self, other: Expr | float) -> Expr:
        return Expr("//", (self, Expr.of(other)))

    def __le__(self, other: Expr | float) -> Expr:
        return Expr("<=", (self, Expr.of(other)))

    def __lt__(self, other: Expr | float) -> Expr:
        return Expr("<", (self, Expr.of(other)))

    def __ge__(self, other: Expr | float) -> Expr:
        return Expr(">=", (self, Expr.of(other)))

    @property
    def is_one(self) -> bool:
        return self == _ONE

    @property
    def is_zero(self) -> bool:
        return self == _ZERO

    @property
    def operands(self) -> tuple[Expr, ...]:
        """The expressions in it: of a load, its indices."""
        if self.op in OPERATIONS:
            return self.args
        return self.args[2:] if self.op == "load" else ()

    @functools.cached_property
    def kind(self) -> int:
        """The kind of its values, as a score has them."""
        if self.op == "var":
            return INT if self.args[0] in PLACE else FLOAT
        if self.op == "load":
            return self.args[1]
        if self.op in ("const", "literal"):
            return kind_of_number(self.args[0])
        if self.op == "tensor":
            return FLOAT
        kind = OPERATIONS[self.op].kind
        operands = self.args[1:] if self.op == "select" else self.args
        return max(a.kind for a in operands) if kind is None else kind

    def evaluate(self, env: Mapping[Any, Value], memo: dict[Expr, Value] | None = None) -> Value:
        """`env` maps names, and the numbers of captured tensors, to values. `memo` collects the values of operations:
        pass it on, and a second expression does not compute again what it shares with this one."""
        if self.op in ("const", "literal"):
            return self.args[0]
        if self.op in ("var", "tensor"):
            return env[self.args[0]]
        memo = {} if memo is None else memo
        if self not in memo:
            values = [a.evaluate(env, memo) for a in self.operands]
            if self.op == "load":
                memo[self] = _of_kind(env[self.args[0]][places(env[self.args[0]], values)], self.kind, env)
            else:
                if any(a.kind == LONG for a in self.operands):
                    values = [_of_kind(v, LONG, env) for v in values]
                value = OPERATIONS[self.op].evaluate(*values)
                converts = self.kind == INT or (self.kind == FLOAT and self.op in ("float", "select"))
                memo[self] = _of_kind(value, self.kind, env) if converts else value
        return memo[self]

    @functools.cached_property
    def _variables(self) -> frozenset[str]:
        here = {self.args[0]} if self.op == "var" else {"tensor"} if self.op in ("tensor", "load") else set()
        return frozenset(here).union(*(a._variables for a in self.operands))

    def variables(self) -> frozenset[str]:
        """The names in it; "tensor" if it has captured tensors."""
        return self._variables

    def nodes(self) -> Iterator[Expr]:
        """It and all expressions in it, each once, operands first."""
        yield from dict.fromkeys(self._walk(set()))

    def _walk(self, seen: set[Expr]) -> Iterator[Expr]:
        if self in seen:
            return
        seen.add(self)
        for a in self.operands:
            yield from a._walk(seen)
        yield self

    def loads(self) -> tuple[Expr, ...]:
        """The entries of captured tensors in it."""
        return self._loads

    @functools.cached_property
    def _loads(self) -> tuple[Expr, ...]:
        return tuple(node for node in self.nodes() if node.op == "load")

    def derivative(self, name: str | Expr) -> Expr:
        """The derivative by the variable `name`, or by a load. It shares its subexpressions with this one."""
        return self._derivative(Expr("var", (name,)) if isinstance(name, str) else name, {})

    def _derivative(self, by: Expr, memo: dict[Expr, Expr]) -> Expr:
        if self == by:
            return _ONE
        if self.op not in OPERATIONS or OPERATIONS[self.op].flat:
            return _ZERO
        if self in memo:
            return memo[self]
        of_args = [a._derivative(by, memo) for a in self.args]
        operation = OPERATIONS[self.op]
        if all(d == _ZERO for d in of_args):
            derivative = _ZERO
        elif operation.chain is not None:
            derivative = operation.chain(*self.args, *of_args)
        elif operation.partials is None:
            raise ValueError(f"{self.op!r} of {by.args[0]!r} has no derivative here")
        else:
            terms = [
                _product(partial, d)
                for partial, d in zip(operation.partials(*self.args, self), of_args, strict=True)
                if d != _ZERO and partial != _ZERO
            ]
            derivative = functools.reduce(lambda a, b: a + b, terms) if terms else _ZERO
        memo[self] = derivative
        return derivative

    def replaced(self, old: Expr, new: Expr) -> Expr:
        return self.mapped(lambda e: new if e == old else None)

    def mapped(self, change: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None) -> Expr:
        """The expression, with each one replaced for which `change` returns another. `memo` collects operations, so that
        one that occurs twice is entered once."""
        changed = change(self)
        if changed is not None or not self.operands:
            return self if changed is None else changed
        memo = {} if memo is None else memo
        if self not in memo:
            kept = self.args[: len(self.args) - len(self.operands)]
            memo[self] = Expr(self.op, (*kept, *(a.mapped(change, memo) for a in self.operands)))
        return memo[self]

    def with_later_tensors(self, first: int) -> Expr:
        """The expression for tensors that begin with number `first`."""

        def moved(e: Expr) -> Expr | None:
            indices = (i.mapped(moved) for i in e.operands)
            return Expr("load", (e.args[0] + first, e.kind, *indices)) if e.op == "load" else None

        return self.mapped(moved) if first else self

    def text(self, numbers: list[Any] | None = None) -> str:
        """The whole expression, as `text.parse` reads it; given `numbers`, the user's are appended there and a
        `?` stands for each, since a number that PyTorch's compiler traces has no text. Only f-strings: it can follow
        them."""
        if self.op == "const":
            if numbers is None:
                return f"{self.args[0]!r}"
            numbers.append(self.args[0])
            return f"{PLACEHOLDER}i" if isinstance(self.args[0], (int, torch.SymInt)) else PLACEHOLDER
        if self.op == "literal":
            return f"'{self.args[0]!r}"
        if self.op == "var":
            return f"{self.args[0]}"
        if self.op == "load":
            inner = " ".join([a.text(numbers) for a in self.args[2:]])
            return f"(load {self.args[0]} {self.args[1]} {inner})"
        if len(self.args) == 1:
            return f"({self.op} {self.args[0].text(numbers)})"
        if len(self.args) == 2:
            return f"({self.op} {self.args[0].text(numbers)} {self.args[1].text(numbers)})"
        return f"({self.op} {self.args[0].text(numbers)} {self.args[1].text(numbers)} {self.args[2].text(numbers)})"


_ZERO: Expr = Expr("literal", (0.0,))
_ONE: Expr = Expr("literal", (1.0,))
_MINUS_ONE: Expr = Expr("literal", (-1.0,))
_LARGEST: Expr = Expr("literal", (3e38,))

S = Expr("var", ("s",))  # the score itself
B, H, Q, K, LEN_Q, LEN_K = (Expr("var", (name,)) for name in PLACE)
DIAGONAL = Q + (LEN_K - LEN_Q)  # the key that stands opposite query `q`: the last query stands opposite the last key


def _same_number(a: Value, b: Value) -> bool:
    return type(a) is type(b) and (not isinstance(a, float) or math.copysign(1.0, a) == math.copysign(1.0, b))


def kind_of_number(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INT if -(1 << 31) <= value < 1 << 31 else LONG
    return INT if isinstance(value, torch.SymInt) else FLOAT


def places(tensor: torch.Tensor, index: list[Value]) -> tuple[torch.Tensor, ...]:
    """The indices, clamped to the axes of the tensor."""
    return tuple(
        on_device(i, tensor.device).long().clamp(0, max(n - 1, 0)) for i, n in zip(index, tensor.shape, strict=True)
    )


def _of_kind(value: Value, kind: int, env: Mapping[Any, Value]) -> Value:
    """The value as kernels hold it: an integer of a score has 32 bits, unless something with 64 takes part."""
    if not isinstance(value, torch.Tensor) or WORKING_DTYPE not in env or kind == BOOL:
        return value
    if kind != FLOAT and (value.is_floating_point() or value.dtype == torch.bool):
        return value
    return value.to({INT: torch.int32, LONG: torch.int64, FLOAT: env[WORKING_DTYPE]}[kind])


def _product(a: Expr, b: Expr) -> Expr:
    return b if a == _ONE else a if b == _ONE else a * b
