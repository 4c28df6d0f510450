"""`Scores`, one of the four parts of a kernel: what becomes of q.k before and after the softmax, given where it is.

The C++ half is pipeline/scores.cuh. A mask and a score function print their structs themselves (`mask.py`, `score.py`); their
numbers are arguments, so another window or softcap never compiles anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strobe import dropout
from strobe.cuda.params import Field
from strobe.mask import MAX_CONSTANTS, Mask, full
from strobe.problem import Problem
from strobe.score import LOG2E, MAX_CONSTANTS as MAX_SCORE_CONSTANTS, Score, identity, softcap

_SOFTCAP = softcap(1.0).cpp()


@dataclass(frozen=True)
class Scores:
    mask: Mask = full
    score: Score = identity
    dropout: bool = False
    sinks: bool = False  # one more logit per head in the softmax's denominator

    @staticmethod
    def of(problem: Problem) -> Scores:
        return Scores(problem.mask, problem.score, problem.dropout > 0, problem.has_sinks)

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
        return self.is_function and self.score.cpp() != _SOFTCAP

    def config(self) -> dict[str, int | bool | str]:
        return {"kSinks": self.sinks, "kDropout": self.dropout}

    def types(self, positions: bool) -> tuple[tuple[str, str], ...]:
        return ("Mask", self.mask.cpp(positions)), ("Score", self.score.cpp())

    FIELDS = (
        Field("score", "float", MAX_SCORE_CONSTANTS),  # numbers of the printed Score
        Field("scale_log2", "float"),  # of its result, in units of log 2
        Field("dropout_scale", "float"),  # of the weights that are kept
        Field("dropout_threshold", "u32"),  # see tile/dropout.cuh
        Field("mask", "int", MAX_CONSTANTS),  # numbers of the printed Mask
    )

    @staticmethod
    def values(problem: Problem) -> dict[str, Any]:
        constants, numbers = problem.mask.constants, problem.score.constants(problem.scale)
        return {
            "score": numbers + (0.0,) * (MAX_SCORE_CONSTANTS - len(numbers)),
            "scale_log2": problem.score.kernel_form(problem.scale).after * LOG2E,
            "dropout_scale": 1 / dropout.kept_share(problem.dropout),
            "dropout_threshold": 0x10001
            * dropout.threshold_bits(problem.dropout),  # the same in both halves of 32 bits
            "mask": constants + (0,) * (MAX_CONSTANTS - len(constants)),
        }

    @staticmethod
    def limits(problem: Problem) -> str | None:
        """Which scores no kernel computes."""
        if problem.has_mask_tensor:
            return "a mask tensor; the kernels take interval masks (strobe.causal, strobe.window, …)"
        if problem.has_bias:
            return "a bias; the kernels have none"
        if problem.dropout > dropout.LARGEST:
            return f"dropout {problem.dropout}; the kernels drop up to {dropout.LARGEST:.3f}"
        if problem.dropout and (problem.positions or problem.first_head):
            return "dropout of a part of a sequence or of its heads; the kernels count from the first"
        if problem.score.captures:
            return f"{problem.score!r}; the kernels take scores without captured tensors"
        if problem.score.kernel_form(problem.scale).after <= 0:
            return f"scale {problem.scale}; the kernels' running maximum needs a scale greater than 0"
        return None
