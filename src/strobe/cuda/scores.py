"""`Scores`, one of the four parts of a kernel: what becomes of q.k before and after the softmax, given where it is.

The C++ half is pipeline/scores.cuh. A mask and a score function print their structs themselves (`mask.py`, `score.py`); their
numbers are arguments, so another window or softcap never compiles anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from strobe import dropout
from strobe.cuda.params import Field
from strobe.mask import MAX_CONSTANTS, Mask, full
from strobe.problem import Load, Problem
from strobe.score import LOG2E, MAX_CONSTANTS as MAX_SCORE_CONSTANTS, Entries, Score, identity, softcap

_SOFTCAP = softcap(1.0).cpp()
_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16", torch.bool: "bool"}
MOST_SCORE_TENSORS = 3  # as many have a place in params.ORDER


def _entries(load: Load) -> Entries:
    pairs = load.name in ("bias", "mask_tensor")
    return Entries(load.name, _ELEMENTS.get(load.dtype, ""), pairs, pairs and load.strides[3] == 1)


@dataclass(frozen=True)
class Scores:
    mask: Mask = full
    score: Score = identity  # with bias and mask tensor in it
    entries: tuple[Entries, ...] = ()  # of the tensors that it reads
    dropout: bool = False
    sinks: bool = False  # one more logit per head in the softmax's denominator
    bias_gradient: str = ""  # the element type of the bias' gradient, "sum" where pairs share an entry; "": none

    @staticmethod
    def of(problem: Problem) -> Scores:
        entries = tuple(map(_entries, problem.loads))
        gradient = ""
        if "bias" in problem.gradients:
            bias = next(load for load in problem.loads if load.name == "bias")
            gradient = "sum" if bias.shared else _ELEMENTS.get(bias.dtype, "")
        return Scores(problem.mask, problem.logit, entries, problem.dropout > 0, "sinks" in problem.per_head, gradient)

    @property
    def bounded(self) -> bool:
        """Whether the mask hides keys from the right."""
        return self.mask.hi is not None

    @property
    def is_function(self) -> bool:
        """Whether a score becomes another number."""
        return not self.score.is_identity

    @property
    def is_unknown(self) -> bool:
        """Whether tables of tiles know nothing of it: a function other than softcap."""
        return self.is_function and (bool(self.entries) or self.score.cpp() != _SOFTCAP)

    @property
    def name(self) -> str:
        """Of the score; empty if there is none."""
        own = [] if self.score.name == identity.name else [self.score.name.split("(")[0]]
        gradient = [f"dbias_{self.bias_gradient}"] if self.bias_gradient else []
        return " ".join([*own, *(f"{e.name}_{e.element}" for e in self.entries if e.pairs), *gradient])

    def config(self) -> dict[str, int | bool | str]:
        gradient = {"": "NoBiasGradient", "sum": "SummedBiasGradient"}.get(
            self.bias_gradient, f"BiasGradientOf<{self.bias_gradient}>"
        )
        return {"kSinks": self.sinks, "kDropout": self.dropout, "BiasGradient": gradient}

    def types(self, positions: bool) -> tuple[tuple[str, str], ...]:
        return ("Mask", self.mask.cpp(positions)), ("Score", self.score.cpp(self.entries))

    def fields(self) -> tuple[Field, ...]:
        tensors = [
            f for e in self.entries for f in (Field(e.name, "const void*"), Field(f"{e.name}_strides", "i64", 4))
        ]
        gradient = [Field("dbias", "void*"), Field("dbias_strides", "i64", 4)] if self.bias_gradient else []
        return *self.FIELDS, *tensors, *gradient

    FIELDS = (
        Field("score", "float", MAX_SCORE_CONSTANTS),  # numbers of the printed Score
        Field("scale_log2", "float"),  # of its result, in units of log 2
        Field("dropout_scale", "float"),  # of the weights that are kept
        Field("dropout_threshold", "u32"),  # see tile/dropout.cuh
        Field("mask", "int", MAX_CONSTANTS),  # numbers of the printed Mask
    )

    @staticmethod
    def values(problem: Problem) -> dict[str, Any]:
        constants, numbers = problem.mask.constants, problem.logit.constants(problem.scale)
        found: dict[str, Any] = {
            "score": numbers + (0.0,) * (MAX_SCORE_CONSTANTS - len(numbers)),
            "scale_log2": problem.logit.kernel_form(problem.scale).after * LOG2E,
            "dropout_scale": 1 / dropout.kept_share(problem.dropout),
            "dropout_threshold": 0x10001
            * dropout.threshold_bits(problem.dropout),  # the same in both halves of 32 bits
            "mask": constants + (0,) * (MAX_CONSTANTS - len(constants)),
        }
        return found | {f"{load.name}_strides": load.strides for load in problem.loads}

    @staticmethod
    def limits(problem: Problem) -> str | None:
        """Which scores no kernel computes."""
        for load in problem.loads:
            name = load.name.replace("_", " ")
            if load.dtype not in _ELEMENTS:
                return f"a {name} of {str(load.dtype).removeprefix('torch.')}"
            if load.negated:
                return f"a {name} that is a negated view"
            if load.name in ("bias", "mask_tensor") and (problem.positions or problem.first_head):
                return f"a {name} of a part of a sequence or of its heads"
            if load.name == "bias" and "bias" in problem.gradients and load.shared and problem.deterministic:
                return "a deterministic gradient of a bias that heads, sequences or rows share; the kernels add it up"
        if (captured := len(problem.score.expr.tensors())) > MOST_SCORE_TENSORS:
            return f"{captured} captured tensors; the kernels take {MOST_SCORE_TENSORS}"
        if problem.dropout > dropout.LARGEST:
            return f"dropout {problem.dropout}; the kernels drop up to {dropout.LARGEST:.3f}"
        if problem.dropout and (problem.positions or problem.first_head):
            return "dropout of a part of a sequence or of its heads; the kernels count from the first"
        if problem.logit.kernel_form(problem.scale).after <= 0:
            return f"scale {problem.scale}; the kernels' running maximum needs a scale greater than 0"
        return None
