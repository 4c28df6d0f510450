"""`Scores`, one of the four parts of a kernel: what becomes of q.k before and after the softmax, given where it is.

The C++ half is pipeline/scores.cuh. `print_mask.py` and `print_score.py` print the structs of a mask and a score function;
their numbers are arguments, so another window or softcap never compiles anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from strobe.cuda.parts import print_mask, print_score
from strobe.cuda.parts.params import Field
from strobe.cuda.parts.print_expression import Numbers, Values
from strobe.cuda.parts.print_score import Entries, PrintedScore
from strobe.problem import Load, Problem
from strobe.variants import dropout
from strobe.variants.expression import LONG
from strobe.variants.mask import MAX_CONSTANTS, Mask, full
from strobe.variants.score import ELEMENT_KINDS, LOG2E, Score, identity, softcap, tensor_count
from strobe.variants.text import MOST_TENSORS

_SOFTCAP = print_score.printed(softcap(1.0))
_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16", torch.bool: "bool"}
_CAPTURED = {  # what a score may capture besides _ELEMENTS
    torch.float64: "double", torch.int64: "i64", torch.int32: "int", torch.int16: "short", torch.int8: "signed char",
    torch.uint8: "u8",
}  # fmt: skip
ROOM, MORE_ROOM = 8, 32  # for the numbers of a score in the arguments


def _entries(load: Load, learnt: bool) -> Entries:
    pairs = load.name in ("bias", "mask_tensor")
    element = _ELEMENTS.get(load.dtype, "") if pairs else (_ELEMENTS | _CAPTURED)[load.dtype]
    unit = pairs and load.strides[3] == 1
    staged = load.name == "bias" and unit and load.dtype.itemsize == 2
    prefetched = unit and load.strides[1] != 0
    return Entries(load.name, element, pairs, unit, load.dtype.itemsize, staged, prefetched, learnt)


# Where the bits of a tile's blocks lie (pipeline/block_bits.cuh).
MAP_FIELDS = (Field("block_map", "const int*"), *(Field(n, "int") for n in ("map_batch", "map_head", "map_words")))


def number_fields(numbers: Numbers) -> list[Field]:
    """The fields for the numbers of a printed struct."""
    floats = Field("score", "float", ROOM if len(numbers.floats) <= ROOM else MORE_ROOM)
    return [floats, Field("score_integers", "int", MORE_ROOM)] if numbers.integers else [floats]


def number_values(numbers: Values) -> dict[str, Any]:
    room = ROOM if len(numbers.floats) <= ROOM else MORE_ROOM
    floats = (*map(_as_float, numbers.floats), *(0.0,) * (room - len(numbers.floats)))
    integers = (*numbers.integers, *(0,) * (MORE_ROOM - len(numbers.integers)))
    return {"score": floats, "score_integers": integers} if numbers.integers else {"score": floats}


def mask_values(mask: Mask) -> tuple[int, ...]:
    return mask.constants + (0,) * (MAX_CONSTANTS - len(mask.constants))


def entry_fields(entries: Iterable[Entries]) -> list[Field]:
    return [
        field
        for e in entries
        for field in (Field(e.name, "const void*"), Field(f"{e.name}_strides", "i64", 4 if e.pairs else 8))
    ]


def _as_float(x: float) -> float:
    """The number as fp32 holds it: infinite beyond its range."""
    return x if abs(x) < 3.4028235e38 else math.copysign(math.inf, x)


@dataclass(frozen=True)
class Scores:
    mask: Mask = full
    score: Score = identity  # with bias and mask tensor in it
    entries: tuple[Entries, ...] = ()  # of the tensors that it reads
    dropout: bool = False
    sinks: bool = False  # one more logit per head in the softmax's denominator
    sparse: bool = False  # blocks that the score's condition hides are left out
    bias_gradient: str = ""  # the element type of the bias' gradient, "sum" where pairs share an entry; "": none

    @staticmethod
    def of(problem: Problem) -> Scores:
        entries = tuple(_entries(load, i in problem.learnt) for i, load in enumerate(problem.loads))
        gradient = ""
        if "bias" in problem.gradients:
            bias = next(load for load in problem.loads if load.name == "bias")
            gradient = "sum" if bias.shared else _ELEMENTS.get(bias.dtype, "")
        return Scores(
            problem.mask,
            problem.logit,
            entries,
            problem.dropout > 0,
            "sinks" in problem.per_head,
            bias_gradient=gradient,
        )

    @property
    def bounded(self) -> bool:
        """Return whether the mask hides keys from the right."""
        return self.mask.hi is not None

    @property
    def is_function(self) -> bool:
        """Return whether a score becomes another number."""
        return not self.score.is_identity

    @property
    def is_unknown(self) -> bool:
        """Return whether tables of tiles know nothing of it: a function other than softcap."""
        return self.is_function and (bool(self.entries) or self.printed.text != _SOFTCAP.text)

    @property
    def printed(self) -> PrintedScore:
        return print_score.printed(self.score, self.entries)

    @property
    def name(self) -> str:
        """The name of the score; empty if there is none."""
        parts = [] if self.score.name == identity.name else [self.score.name.split("(")[0]]
        gradient = [f"dbias_{self.bias_gradient}"] if self.bias_gradient else []
        gradient += [f"d{e.name}" for e in self.entries if e.learnt]
        parts += ["sparse"] if self.sparse else []
        return " ".join([*parts, *(f"{e.name}_{e.element}" for e in self.entries if e.pairs), *gradient])

    def config(self) -> dict[str, int | bool | str]:
        gradient = {"": "NoBiasGradient", "sum": "SummedBiasGradient"}.get(
            self.bias_gradient, f"BiasGradientOf<{self.bias_gradient}>"
        )
        return {"kSinks": self.sinks, "kDropout": self.dropout, "kSparse": self.sparse, "BiasGradient": gradient}

    def types(self, positions: bool) -> tuple[tuple[str, str], ...]:
        return ("Mask", print_mask.struct(self.mask, positions)), ("Score", self.printed.text)

    def fields(self) -> tuple[Field, ...]:
        gradient = [Field("dbias", "void*"), Field("dbias_strides", "i64", 4)] if self.bias_gradient else []
        gradient += [Field(f"d{e.name}", "float*") for e in self.entries if e.learnt]
        room = number_fields(self.printed.fields)
        sparse = MAP_FIELDS if self.sparse else ()
        return *room, *self.FIELDS, *entry_fields(self.entries), *gradient, *sparse

    FIELDS = (
        Field("scale_log2", "float"),  # of its result, in units of log 2
        Field("dropout_scale", "float"),  # of the weights that are kept
        Field("dropout_threshold", "u32"),  # see tile/dropout.cuh
        Field("mask", "int", MAX_CONSTANTS),  # numbers of the printed Mask
    )

    @staticmethod
    def values(problem: Problem) -> dict[str, Any]:
        fields: dict[str, Any] = {
            **number_values(Scores.of(problem).printed.numbers(problem.scale)),
            "scale_log2": problem.logit.kernel_form(problem.scale).after * LOG2E,
            "dropout_scale": 1 / dropout.kept_share(problem.dropout),
            "dropout_threshold": 0x10001
            * dropout.threshold_bits(problem.dropout),  # the same in both halves of 32 bits
            "mask": mask_values(problem.mask),
        }
        return fields | {f"{load.name}_strides": load.strides for load in problem.loads}

    @staticmethod
    def limits(problem: Problem) -> str | None:
        """Return why no kernel computes the scores of this problem, if so."""
        for load in problem.loads:
            name = load.name.replace("_", " ")
            captured = load.name not in ("bias", "mask_tensor")
            if load.dtype not in (ELEMENT_KINDS if captured else _ELEMENTS):
                return f"a {name} of {str(load.dtype).removeprefix('torch.')}"
            if load.negated:
                return f"a {name} that is a negated view"
            if not captured and (problem.positions or problem.first_head):
                return f"a {name} of a part of a sequence or of its heads"
            if load.name == "bias" and "bias" in problem.gradients and load.shared and problem.deterministic:
                return "a deterministic gradient of a bias that heads, sequences or rows share; the kernels add it up"
        if (count := tensor_count(problem.score.expr)) > MOST_TENSORS:
            return f"{count} captured tensors; the kernels take {MOST_TENSORS}"
        if problem.learnt and problem.deterministic:
            return "deterministic gradients of tensors that a score function captures; the kernels add them up"
        if any(math.prod(n for n in problem.loads[i].strides[4:] if n) >= 1 << 31 for i in problem.learnt):
            return "the gradient of a captured tensor of 2^31 numbers or more"
        numbers = Scores.of(problem).printed.fields
        if (count := max(len(numbers.floats), len(numbers.integers))) > MORE_ROOM:
            return f"{count} numbers in a score function; the kernels take {MORE_ROOM}"
        if any(e.kind == LONG for e in numbers.integers):
            return "an integer of more than 32 bits in a score function"
        if problem.dropout > dropout.LARGEST:
            return f"dropout {problem.dropout}; the kernels drop up to {dropout.LARGEST:.3f}"
        if problem.dropout and (problem.positions or problem.first_head):
            return "dropout of a part of a sequence or of its heads; the kernels count from the first"
        if problem.logit.form.at(problem.scale) is None or problem.scale == 0:
            return f"scale {problem.scale}; the kernels' running maximum needs a scale greater than 0"
        return None
