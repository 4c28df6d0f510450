"""The features of a problem that change the code of our attention kernels, whatever the architecture and direction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from strobe.cuda.plan import ELEMENTS, Dims
from strobe.mask import Mask, causal, full, used_keys, window
from strobe.problem import Problem
from strobe.score import Score, identity, softcap

_FLAGS = ("varlen", "sinks", "positions", "partial_out", "dropout", "finishes")


@dataclass(frozen=True)
class Features:
    element: str
    dim: int  # rounded up to what there is a kernel for
    dim_v: int
    mask: Mask
    score: Score = identity
    varlen: bool = False
    sinks: bool = False
    positions: bool = False
    partial_out: bool = False
    dropout: bool = False
    finishes: bool = False  # merges with an earlier result in fp32, and rounds

    @staticmethod
    def of(problem: Problem, dims: Dims) -> Features:
        return Features(
            ELEMENTS[problem.dtype],
            *dims,
            problem.mask,
            problem.score,
            problem.varlen,
            problem.has_sinks,
            problem.positions,
            problem.partial,
            problem.dropout > 0,
            problem.earlier_out is not None,
        )

    @property
    def name(self) -> str:
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        flags = [flag for flag in _FLAGS if getattr(self, flag)]
        score = [] if self.score.is_identity else [self.score.name.split("(")[0]]
        return " ".join([self.element, dims, self.mask.name, *score, *flags])

    def facts(self) -> dict[str, Any]:
        """For tables."""
        mask = self.mask.name if self.mask.name in ("full", "causal") else "window"
        flags = {name: getattr(self, name) for name in _FLAGS}
        return {"dim": self.dim, "dim_v": self.dim_v, "mask": mask, "softcap": not self.score.is_identity, **flags}

    def config(self) -> dict[str, int | bool]:
        return {
            "kDim": self.dim,
            "kDimV": self.dim_v,
            "kVarlen": self.varlen,
            "kSinks": self.sinks,
            "kPositions": self.positions,
            "kPartialOut": self.partial_out,
            "kDropout": self.dropout,
        }

    def types(self) -> tuple[tuple[str, str], ...]:
        return ("Mask", self.mask.cpp(self.positions)), ("Score", self.score.cpp())


def common_features(
    dims: list[Dims], exhaustive: bool, backward: bool = False, finishes: bool = False
) -> Iterator[Features]:
    """Those that calls have, for compiling ahead of time and for tests. Masks have infinitely many shapes; these are the
    common ones. `exhaustive` adds every combination. `finishes`: there are kernels that do."""
    every = list(itertools.product((False, True), (False, True), (False, True)))
    flags = every if exhaustive else [every[0], every[-1]]
    for element, (dim, dim_v), mask in itertools.product(ELEMENTS.values(), dims, (full, causal, window(1, 1))):
        plain = Features(element, dim, dim_v, mask)
        for varlen, capped, sinks in flags:
            score = softcap(30.0) if capped else identity
            yield replace(plain, score=score, varlen=varlen, sinks=sinks)
            if exhaustive and not sinks:
                yield replace(plain, score=score, varlen=varlen, dropout=True)
        if not exhaustive:
            yield replace(plain, dropout=True)
        for varlen in (False, True) if exhaustive else (True,):  # shards of a sequence, whose results are merged
            if exhaustive or not backward or mask is causal:
                yield replace(plain, varlen=varlen, positions=True, partial_out=True)
        if finishes:  # the last of those merges: rows and keys of a shard that all see each other, or packed documents
            if exhaustive or mask is full:
                yield replace(plain, finishes=True)
            for varlen in (False, True) if exhaustive else (True,):
                if exhaustive or mask is not full:
                    yield replace(plain, varlen=varlen, positions=True, finishes=True)
        if not backward and (exhaustive or mask is causal):  # buffers of which sequences fill a part
            yield replace(plain, mask=mask & used_keys, positions=True)
