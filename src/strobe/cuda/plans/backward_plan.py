"""What the plans of the backward kernels share: what is wanted, the statistics of rows, and the launch that prepares them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strobe.cuda.parts import tuned
from strobe.cuda.parts.element import CONST_TENSOR, TENSOR
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.output import lse_values
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import Launch
from strobe.cuda.parts.rows import KINDS as ROWS, stride_fields, stride_values
from strobe.cuda.parts.scores import Scores
from strobe.cuda.parts.shared_memory import Region, SharedMemory
from strobe.problem import Problem, Strides

REGISTERS = (24, 240)  # of a thread of the producer and of each of two consumers: they fill 384 times 168
OTHER_REGISTERS = 16  # at least, beside accumulators: addresses, statistics, the mask
KINDS = ("backward", "backward-softcap")  # kernels that may want tiles of their own

# Statistics of rows, in whole blocks of each sequence, and where they lie; see first_stat in schedule.cuh.
STATISTICS = [
    *(Field(t, "float*") for t in ("lse2", "delta")),
    Field("dropout_rows", "u32*"),
    Field("stat_rows", "i64"),  # of a head
    Field("stat_blocks", "int"),  # of a sequence, unless varlen
]
SCALE_GRAD = Field("scale_grad", "float")  # of dQ and dK
SUMS_OF_DQ = [Field("dq_sum", "float*"), Field("turns", "u32*")]  # the latter for deterministic sums


def gradients_of_keys(ctype: str) -> list[Field]:
    """Where dK and dV go. On Hopper that is for fp32; else tensor maps say it."""
    return [*(Field(t, ctype) for t in ("dk", "dv")), *stride_fields("dk", "dv")]


@dataclass(frozen=True)
class Wanted:
    """What is to be computed, and how."""

    dq: bool = True
    dkv: bool = True
    sinks: bool = False
    deterministic: bool = False

    @property
    def turns(self) -> bool:
        """Blocks of keys add to dQ in a fixed order."""
        return self.deterministic and self.dq

    @staticmethod
    def of(problem: Problem) -> Wanted:
        names = problem.gradients
        dq = "q" in names or "bias" in names or bool(problem.learnt)  # what those get is found on the way to dQ
        return Wanted(dq, "k" in names or "v" in names, "sinks" in names, problem.deterministic)


def gradient_strides(strides: dict[str, Strides], *names: str) -> dict[str, int]:
    """Of those gradients that are computed."""
    return stride_values({name: strides.get(name, (0, 0, 0)) for name in names})


@dataclass(frozen=True)
class Statistics:
    """Room for the statistics of rows."""

    block: int  # rows come in whole blocks of so many
    rows: int  # of a head
    blocks: int  # of the longest sequence
    workspace: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, block: int) -> Statistics:
        blocks = -(-problem.len_q // block)
        rows = problem.batch * blocks * block
        if problem.q.varlen:
            rows = -(-(problem.q.total + problem.batch * block) // block) * block
        size = 4 * problem.heads * rows
        workspace = {"lse2": size, "delta": size, **({"dropout_rows": size} if problem.dropout else {})}
        return Statistics(block, rows, blocks, workspace)

    def values(self) -> dict[str, Any]:
        return {"stat_rows": self.rows, "stat_blocks": self.blocks}


def score_values(problem: Problem) -> dict[str, Any]:
    """Of SCALE_GRAD and the fields of `Scores`, but for the gradient of a bias."""
    return {**Scores.values(problem), "scale_grad": grad_scale(problem)}


def bias_gradient_values(problem: Problem, strides: Mapping[str, Any]) -> dict[str, Any]:
    return {"dbias_strides": strides["dbias"]} if "bias" in problem.gradients else {}


def tuned_name(features: Features, arch: str) -> str:
    """The key of a tile in the file of `strobe tune`. Hopper's own kernels have the architecture "sm_90a"."""
    return tuned.tile_name(features.dim, features.dim_v, f"{KINDS[features.scores.is_function]} {arch}")


def grad_scale(problem: Problem) -> float:
    """Of the derivative of a score by q.k, which the kernels leave out."""
    form = problem.logit.kernel_form(problem.scale)
    return form.before * form.after


LONG_LOOP = 64  # blocks of queries; an estimate: shorter loops are not worth the launches that sum up the parts


def group_parts(problem: Problem, sms: int) -> int:
    """Into how many parts the query heads of a group are divided. Where there are few key heads, there are few blocks of
    keys, and each loops over the queries of many heads. Each part has blocks of its own, and its dK and dV in fp32, which
    are summed up afterwards and take as much memory as q, at most. 1 if whole groups occupy the GPU, or if their loops are
    short."""
    blocks, steps = problem.batch * problem.heads_k * -(-problem.len_k // 128), problem.group * -(-problem.len_q // 64)
    if blocks >= sms or steps < LONG_LOOP:
        return 1
    able = [n for n in range(1, max(problem.group // 4, 1) + 1) if problem.group % n == 0]
    return next((n for n in able if n * blocks >= 2 * sms), able[-1])


def in_parts(problem: Problem) -> Problem:
    """With a key head for each part of a group: what the kernels that compute dK and dV see."""
    return replace(problem, k=replace(problem.k, heads=problem.heads_k * problem.group_parts))


# ---- delta -----------------------------------------------------------------------------------------------------------


@functools.cache
def _delta_params() -> Struct:
    return params(
        [
            *(Field(t, CONST_TENSOR) for t in ("o", "d_o")),
            *(Field(t, "const float*") for t in ("lse", "dlse", "sinks")),
            Field("cu_q", "const int*"),
            Field("dsink", "float*"),
            Field("seed", "u64"),
            Field("dq", TENSOR),
            Field("lse_batch", "i64"),
            Field("lse_head", "i64"),
            *(Field(n, "int") for n in ("heads", "len_q", "dim_v", "dim")),
        ],
        SUMS_OF_DQ,
        STATISTICS,
        stride_fields("o", "do", "dq"),
    )


def side_kernel(
    template: str,
    header: str,
    features: Features,
    arch: str,
    params: Struct,
    config: dict[str, int | bool | str],
    smem: int = 0,
) -> TemplateKernel:
    """A small kernel of 256 threads a block, one block for each block of the statistics."""
    varlen = " Varlen" if features.rows.queries == "varlen" else ""
    flags = varlen + "".join(f" {name[1:]}" for name, value in config.items() if value is True)
    numbers = "/".join(str(value) for value in config.values() if not isinstance(value, bool))
    config = {"Queries": ROWS[features.rows.queries], **config}
    return TemplateKernel(
        name=f"{template}[{features.element} {numbers}{flags}]",
        arch=arch,
        params=params,
        threads=256,
        smem=smem,
        header=header,
        template=template,
        element=features.element.name,
        config=tuple(config.items()),
        memory=SharedMemory([Region("tile", smem)]),
        types=(),
        blocks_per_sm=4,
    )


def delta_kernel(
    features: Features,
    wanted: Wanted,
    arch: str,
    block: int,
    dq_floats: int,
    *,
    turns: bool = False,
    clear_dq: bool = False,
) -> TemplateKernel:
    """`dq_floats`: of a block of the sums of dQ, which it sets to zero; 0: there are none, or they need no zeros.
    `turns`: the counters of turns are set to zero; `clear_dq`: dQ is, because of rows that see no key."""
    config: dict[str, int | bool | str] = {
        "kStatBlock": block,
        "kDimV": features.dim_v,
        "kDqFloats": dq_floats,
        "kSinks": wanted.sinks,
        "kDropout": features.scores.dropout,
        "kTurns": turns,
        "kClearDq": clear_dq,
        "kPartialOut": clear_dq and features.output.partial,
    }
    struct = _delta_params()
    return side_kernel("backward_delta", "delta", features, arch, struct, config)


def delta_launch(
    problem: Problem, kernel: TemplateKernel, statistics: Statistics, strides: dict[str, Strides]
) -> Launch:
    values = {
        **stride_values({"o": strides["o"], "do": strides["d_o"]}),
        **gradient_strides(strides, "dq"),
        **statistics.values(),
        **lse_values(problem),
        "heads": problem.heads,
        "len_q": problem.len_q,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
    }
    return Launch(kernel, statistics.blocks * problem.batch * problem.heads, values)


# ---- dQ from its sums ------------------------------------------------------------------------------------------------

CONVERT_DQ = params(
    [
        Field("dq", TENSOR),
        Field("cu_q", "const int*"),
        Field("dq_sum", "const float*"),
        Field("stat_rows", "i64"),
        *(Field(n, "int") for n in ("stat_blocks", "heads", "len_q", "dim")),
        Field("scale_grad", "float"),
    ],
    stride_fields("dq"),
)


def convert_values(problem: Problem, statistics: Statistics, strides: dict[str, Strides]) -> dict[str, Any]:
    """The values of CONVERT_DQ."""
    return {
        **stride_values({"dq": strides["dq"]}),
        **statistics.values(),
        "heads": problem.heads,
        "len_q": problem.len_q,
        "dim": problem.dim,
        "scale_grad": grad_scale(problem),
    }
