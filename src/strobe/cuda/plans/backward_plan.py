"""Parts that plans of backward kernels share: what is wanted, the statistics of rows and the launch that prepares them, and
the launches of kernels of which one computes dK and dV and another dQ."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from strobe.cuda.parts import tuned
from strobe.cuda.parts.architecture import Architecture
from strobe.cuda.parts.blocks import key_tiles, query_tiles
from strobe.cuda.parts.element import CONST_TENSOR, TENSOR
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel, flags, template_kernel
from strobe.cuda.parts.output import lse_values
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import Launch, Machine
from strobe.cuda.parts.rows import KINDS as ROWS, stride_fields, stride_values
from strobe.cuda.parts.scores import Scores
from strobe.cuda.parts.shared_memory import Region, SharedMemory
from strobe.cuda.runtime.driver import TensorMapSpec
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
    """Return where dK and dV go. On Hopper that is for fp32; else tensor maps say it."""
    return [*(Field(t, ctype) for t in ("dk", "dv")), *stride_fields("dk", "dv")]


@dataclass(frozen=True)
class Wanted:
    """The gradients to be computed, and how."""

    dq: bool = True
    dkv: bool = True
    sinks: bool = False
    deterministic: bool = False

    @property
    def turns(self) -> bool:
        """Blocks of keys add to dQ in a fixed order."""
        return self.deterministic and self.dq

    def flags(self, **more: bool) -> str:
        """The end of a kernel's name. `more`: switches besides what is wanted."""
        dq, dkv = self.dq and not self.dkv, self.dkv and not self.dq
        return flags(dq=dq, dkv=dkv, deterministic=self.turns, **more)

    @staticmethod
    def of(problem: Problem) -> Wanted:
        names = problem.gradients
        dq = "q" in names or "bias" in names or bool(problem.learnt)  # what those get is found on the way to dQ
        return Wanted(dq, "k" in names or "v" in names, "sinks" in names, problem.deterministic)


def gradient_strides(strides: Mapping[str, Strides], *names: str) -> dict[str, int]:
    """Stride fields of the named gradients; zeros for those not computed."""
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


def values_of(
    problem: Problem,
    indexed: Problem,
    features: Features,
    statistics: Statistics,
    strides: Mapping[str, Any],
    gradients: Sequence[str],
    schedule: Mapping[str, int],
    *,
    tma: bool,
) -> dict[str, Any]:
    """The values of a kernel that computes `gradients`. `indexed`: the problem as the kernel indexes it."""
    return {
        **features.rows.values(indexed, tma=tma),
        **Scores.values(problem),
        "scale_grad": grad_scale(problem),
        **({"dbias_strides": strides["dbias"]} if features.scores.bias_gradient else {}),
        **statistics.values(),
        **gradient_strides(strides, *gradients),
        **schedule,
    }


def tuned_name(features: Features, architecture: Architecture, arch: str) -> str:
    """The key of a tile in the file of `strobe tune`."""
    kind = f"{KINDS[features.scores.is_function]} {architecture.tiles_of(arch)}"
    return tuned.tile_name(features.dim, features.dim_v, kind)


def grad_scale(problem: Problem) -> float:
    """The factor of the derivative of a score by q.k, which the kernels leave out."""
    form = problem.logit.kernel_form(problem.scale)
    return form.before * form.after


LONG_LOOP = 64  # blocks of queries; an estimate: shorter loops are not worth the launches that sum up the parts


def group_parts(problem: Problem, sms: int) -> int:
    """Return into how many parts the query heads of a group are divided. Where there are few key heads, there are few
    blocks of keys, and each loops over the queries of many heads. Each part has blocks of its own, and its dK and dV in
    fp32, which are summed up afterwards and take as much memory as q, at most. 1 if whole groups occupy the GPU, or if
    their loops are short."""
    blocks, steps = problem.batch * problem.heads_k * -(-problem.len_k // 128), problem.group * -(-problem.len_q // 64)
    if blocks >= sms or steps < LONG_LOOP:
        return 1
    divisors = [n for n in range(1, max(problem.group // 4, 1) + 1) if problem.group % n == 0]
    return next((n for n in divisors if n * blocks >= 2 * sms), divisors[-1])


def in_parts(problem: Problem) -> Problem:
    """The problem with heads_k * group_parts key heads, as the kernels of dK and dV index it."""
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
    features: Features,
    arch: str,
    params: Struct,
    config: dict[str, int | bool | str],
    smem: int = 0,
    header: str = "",
) -> TemplateKernel:
    """A small kernel of 256 threads a block, one block for each block of the statistics."""
    switches = {name[1:]: value is True for name, value in config.items()}
    end = flags(Varlen=features.rows.queries == "varlen", **switches)
    numbers = "/".join(str(value) for value in config.values() if not isinstance(value, bool))
    config = {"Queries": ROWS[features.rows.queries], **config}
    return template_kernel(
        template,
        f"{features.element} {numbers}{end}",
        arch=arch,
        params=params,
        threads=256,
        header=header,
        element=features.element.name,
        config=config,
        memory=SharedMemory([Region("tile", smem)]),
        blocks_per_sm=4,
        facts={"inputs": features.inputs} if features.inputs else {},
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
    return side_kernel("backward_delta", features, arch, struct, config, header="delta")


def delta_launch(
    problem: Problem, kernel: TemplateKernel, statistics: Statistics, strides: Mapping[str, Strides]
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


def convert_values(problem: Problem, statistics: Statistics, strides: Mapping[str, Strides]) -> dict[str, Any]:
    """The values of CONVERT_DQ."""
    return {
        **stride_values({"dq": strides["dq"]}),
        **statistics.values(),
        "heads": problem.heads,
        "len_q": problem.len_q,
        "dim": problem.dim,
        "scale_grad": grad_scale(problem),
    }


# ---- dK and dV by one kernel, dQ by another --------------------------------------------------------------------------


class Half(NamedTuple):
    """One of two kernels that compute S and P each for themselves."""

    kernel: TemplateKernel
    block: int  # rows of a tile
    maps: Mapping[str, TensorMapSpec]
    column_parts: int = 1  # blocks of the GPU for a tile, each with some of the columns


def dkv_then_dq(
    problem: Problem,
    features: Features,
    statistics: Statistics,
    strides: Mapping[str, Strides],
    machine: Machine,
    dkv: Half | None,
    dq: Half | None,
    *,
    tma: bool,
) -> tuple[list[Launch], dict[str, object]]:
    """The launches of those kernels that are wanted, and their details. The second waits for nothing but what the first
    waited for."""
    launches: list[Launch] = []
    details: dict[str, object] = {}
    if dkv is not None:
        indexed, plain = in_parts(problem), without_bias_gradient(features)
        schedule = key_tiles(indexed, dkv.block, machine.sms)
        values = values_of(problem, indexed, plain, statistics, strides, ("dk", "dv"), schedule, tma=tma)
        grid = schedule["key_blocks"] * problem.batch * indexed.heads_k * dkv.column_parts
        launches.append(Launch(dkv.kernel, grid, values, dkv.maps, overlaps=True))
        details["backward kernel for dK, dV"] = dkv.kernel.name
    if dq is not None:
        schedule = query_tiles(problem, dq.block, machine.l2_bytes)
        values = values_of(problem, problem, features, statistics, strides, ("dq",), schedule, tma=tma)
        launches.append(Launch(dq.kernel, schedule["tiles"], values, dq.maps, overlaps=dkv is None))
        details["backward kernel for dQ"] = dq.kernel.name
    return launches, details


def without_bias_gradient(features: Features) -> Features:
    """The features of the kernel of dK and dV: that of dQ computes the gradient of a bias."""
    return replace(features, scores=replace(features.scores, bias_gradient=""))
