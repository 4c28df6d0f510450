"""The compile key of an attention kernel: dtype, head dims, `Scores`, `Rows`, `Output`. `Blocks`, the fourth part, only
sets values of a launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from strobe.cuda.parts.element import ELEMENTS, Element
from strobe.cuda.parts.kernel import TemplateKernel, template_kernel
from strobe.cuda.parts.names import word_for_mask, words_for_score
from strobe.cuda.parts.output import Output
from strobe.cuda.parts.plan import Dims
from strobe.cuda.parts.rows import Rows, stride_values
from strobe.cuda.parts.scores import Scores
from strobe.problem import Problem, Strides
from strobe.variants.mask import causal, full, used_keys
from strobe.variants.ready_made import window
from strobe.variants.score import identity, softcap


@dataclass(frozen=True)
class Features:
    element: Element
    dim: int  # rounded up to what there is a kernel for
    dim_v: int
    scores: Scores
    rows: Rows = Rows()
    output: Output = Output()
    inputs: str = ""  # the type of q, k and v, where kernels read them as `element`s

    @staticmethod
    def of(problem: Problem, dims: Dims) -> Features:
        return Features(ELEMENTS[problem.dtype], *dims, Scores.of(problem), Rows.of(problem), Output.of(problem))

    @property
    def flags(self) -> dict[str, bool]:
        return {
            "varlen": self.rows.varlen,
            "sinks": self.scores.sinks,
            "positions": self.rows.positions,
            "partial_out": self.output.partial,
            "dropout": self.scores.dropout,
            "rounds_state": self.output.rounds_state,
        }

    @property
    def name(self) -> str:
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        score = [self.scores.name] if self.scores.is_function else []
        flags = [name for name, flag in self.flags.items() if flag]
        flags += [f"page{self.rows.page}"] if self.rows.page else []
        flags += ["invariant"] if self.output.invariant else []
        return " ".join([self.inputs or self.element.name, dims, self.scores.mask.name, *score, *flags])

    def label(self, **others: bool) -> str:
        """The end of a kernel's `entry`. `others`: flags of its plan. It says nothing that the source does not say."""
        dims = f"d{self.dim}" if self.dim == self.dim_v else f"d{self.dim}x{self.dim_v}"
        output = {"split": self.output.split, "invariant": self.output.invariant, "sparse": self.scores.sparse}
        flags = [name.removesuffix("_out") for name, flag in (self.flags | output | others).items() if flag]
        if self.rows.page:  # whose keys have positions, and whose work is split
            flags = [flag for flag in flags if flag not in ("positions", "split")] + [f"page{self.rows.page}"]
        flags += ["dbias"] if self.scores.bias_gradient else []
        mask, score = word_for_mask(self.scores.mask), words_for_score(self.scores.score, self.scores.entries)
        masks = [] if mask == "full" and "function" in score else [mask]  # a mask that is a function is no full mask
        return "_".join([self.inputs or self.element.name, dims, *masks, *flags, *score])

    def facts(self) -> dict[str, Any]:
        """The features by name, for tables."""
        mask = self.scores.mask.name if self.scores.mask.name in ("full", "causal") else "window"
        facts = {"dim": self.dim, "dim_v": self.dim_v, "mask": mask, "softcap": self.scores.is_function, **self.flags}
        return facts | ({"inputs": self.inputs} if self.inputs else {})

    def config(self, pack_gqa: int = 1) -> dict[str, int | bool | str]:
        parts = self.rows.config(pack_gqa) | self.scores.config() | self.output.config()
        return {"kDim": self.dim, "kDimV": self.dim_v, **parts}

    def types(self) -> tuple[tuple[str, str], ...]:
        return self.scores.types(self.rows.positions)

    def kernel(
        self,
        template: str,
        tile: object,
        end: str = "",
        *,
        facts: Mapping[str, Any],
        label: Mapping[str, bool] = MappingProxyType({}),
        **settings: Any,
    ) -> TemplateKernel:
        """The kernel with these features. `end`: the end of its name; `label`: further flags of its entry; `settings`:
        further ones of `template_kernel`."""
        return template_kernel(
            template,
            f"{self.name} {tile}{end}",
            element=self.element.name,
            types=self.types(),
            label=self.label(**label),
            facts={**self.facts(), "tile": str(tile), **facts},
            **settings,
        )

    def values(
        self, problem: Problem, strides: Mapping[str, Strides], schedule: Mapping[str, int], *, tma: bool, pack: int = 1
    ) -> dict[str, Any]:
        """The values of a forward kernel. `schedule`: those of `query_tiles`."""
        return {
            **self.rows.values(problem, tma=tma),
            **Scores.values(problem),
            **schedule,
            **self.output.values(problem, pack),
            **stride_values(strides),
        }

    def one_box(self, problem: Problem | None = None) -> bool:
        """Return whether one TMA box may hold a tile: the head dims (those of a problem, or of the kernel) are whole
        panels, and no rows are clipped."""
        dims = (self.dim, self.dim_v) if problem is None else (problem.dim, problem.dim_v)
        return self.element.fills_panels(*dims) and not self.rows.clipped

    def without_sinks(self) -> Features:
        """The features as the backward sees them: sinks are in the LSE."""
        return replace(self, scores=replace(self.scores, sinks=False))


_VARLEN = Rows("varlen", "varlen")
_MASKS = (full, causal, window(1, 1))  # they have infinitely many shapes; these are the common ones
_SHARDS = {False: Rows("dense", "buffer", True), True: Rows("varlen", "varlen", True)}  # by whether they are varlen


def common_features(
    dims: list[Dims], exhaustive: bool, backward: bool = False, states: bool = False
) -> Iterator[Features]:
    """The features that calls have, for compiling ahead of time and for tests. `exhaustive` adds every combination.
    `states`: there are kernels that merge a state and round."""
    every = list(itertools.product((False, True), (False, True), (False, True)))
    flags = every if exhaustive else [every[0], every[-1]]
    for element, (dim, dim_v), mask in itertools.product(ELEMENTS.values(), dims, _MASKS):
        plain = Features(element, dim, dim_v, Scores(mask))
        dropped = replace(plain, scores=Scores(mask, dropout=True))
        for varlen, capped, sinks in flags:
            score, rows = softcap(30.0) if capped else identity, _VARLEN if varlen else Rows()
            yield replace(plain, scores=Scores(mask, score, sinks=sinks), rows=rows)
            if exhaustive and not sinks:
                yield replace(plain, scores=Scores(mask, score, dropout=True), rows=rows)
        if not exhaustive:
            yield dropped
        for varlen in (False, True) if exhaustive else (True,):  # shards of a sequence, whose results are merged
            if exhaustive or not backward or mask is causal:
                yield replace(plain, rows=_SHARDS[varlen], output=Output(partial=True))
        if states:  # the last of those merges: rows and keys of a shard that all see each other, or packed documents
            rounds = Output(rounds_state=True)
            if exhaustive or mask is full:
                yield replace(plain, output=rounds)
            for varlen in (False, True) if exhaustive else (True,):
                if exhaustive or mask is not full:
                    yield replace(plain, rows=_SHARDS[varlen], output=rounds)
        if not backward and (exhaustive or mask is causal):  # buffers of which sequences fill a part
            yield replace(plain, scores=Scores(mask & used_keys), rows=_SHARDS[False])


def wide_features(dims: list[Dims], exhaustive: bool) -> Iterator[Features]:
    """The features of calls with head dims above 256, which are few: plain, and under a window with all that takes
    registers."""
    for element, (dim, dim_v), mask in itertools.product(ELEMENTS.values(), dims, _MASKS):
        plain = Features(element, dim, dim_v, Scores(mask))
        yield plain
        if exhaustive or mask is _MASKS[-1]:
            yield replace(plain, scores=Scores(mask, softcap(30.0), sinks=True), rows=_VARLEN)
