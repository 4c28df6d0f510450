"""Ideas for the Hopper kernels, timed beside the kernels in use. Each is an edit of a kernel's source, so that it needs
no switch for what is not kept:
`python -m benchmarks.studies.ideas --method sustained -o benchmarks/results/MACHINE/studies/ideas-sustained.json`
`python -m benchmarks.studies.ideas --pass backward -o benchmarks/results/MACHINE/studies/ideas-backward.json`

In short turns those for the forward bring nothing. They may save power, and at the power limit speed is energy per
FLOP. Those for the backward come from its SASS."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from strobe.bench import results
from strobe.cuda.parts.kernel import KernelSpec, TemplateKernel, TextKernel
from strobe.cuda.parts.plan import Dims, Machine, Plan
from strobe.cuda.plans import backward_sm90
from strobe.cuda.runtime import jit
from strobe.measure.method import SUSTAINED, TURNS
from strobe.tools import tune, tune_backward, tune_forward
from strobe.tools.tune_backward import BackwardCase
from strobe.tools.tune_forward import TileCase

BOUND = "bound: "  # before the name of an idea with wrong results, which shows what something could bring at most
Edit = tuple[str, str]  # what stands in the flattened source, each time it does, and what takes its place


@dataclass(frozen=True)
class Idea:
    name: str
    edits: tuple[Edit, ...] = ()
    part_of_q: int = 0  # one of so many parts of Q is in registers
    producer: int | None = None  # registers of a thread of the producer; consumers get what that leaves
    header: str = "forward_sm90"  # of the kernels that are edited

    def __str__(self) -> str:
        return self.name

    @property
    def is_bound(self) -> bool:
        return self.name.startswith(BOUND)

    def applied(self, kernel: TemplateKernel, target: jit.Target = "ptx") -> KernelSpec:
        if self.part_of_q:
            ((_, _, steps), *_) = kernel.products
            chains = {"rs_zero": steps // self.part_of_q, "ss": steps - steps // self.part_of_q}
            products = [(n, form, count) for n, _, _ in kernel.products for form, count in chains.items() if count]
            kernel = replace(kernel, products=tuple(products))
        if self.producer is not None:
            consumers = int(kernel.member("kConsumers"))
            registers = {"kRegsProducer": self.producer, "kRegsConsumer": (512 - self.producer) // consumers // 8 * 8}
            kernel = replace(kernel, config=tuple((name, registers.get(name, x)) for name, x in kernel.config))
        edits = _q_in_registers(self.part_of_q) if self.part_of_q else self.edits
        if not edits:
            return kernel
        text = jit.flatten(kernel.source, target)
        for old, new in edits:
            if old not in text:
                raise ValueError(f"{self.name}: {kernel.name} has no {old!r}")
            text = text.replace(old, new)
        return TextKernel(
            f"{kernel.name} {self.name}", kernel.arch, kernel.params, kernel.threads, kernel.smem, text, kernel.entry
        )

    def planned(self, made: Plan, target: jit.Target = "ptx") -> Plan:
        launches = []
        for launch in made.launches:
            kernel = launch.kernel
            assert isinstance(kernel, TemplateKernel)
            edited = self.applied(kernel, target) if kernel.header == self.header else kernel
            launches.append(replace(launch, kernel=edited))
        return replace(made, launches=tuple(launches))


# ---- Q in registers: S = Q K^T reads half as much shared memory ------------------------------------------------------
_LOAD_Q = """  static constexpr int kSteps = kDim / 16 / %d;  // products whose Q is in registers
  struct Queries {
    u32 first[4 * kSteps];
    u64 others;
  };
  STROBE_DEVICE Queries load_fragments() const {
    const int warp = thread_idx() %% 128 / 32, lane = thread_idx() %% 32;
    const u32 from = q_tile(consumer) + chunk_offset(64, 16 * warp + lane %% 16, lane / 16);
    Queries q;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      ldmatrix_x4(step_columns(from, 64, i), q.first[4 * i], q.first[4 * i + 1], q.first[4 * i + 2], q.first[4 * i + 3]);
    q.others = k_major(q_tile(consumer)) + AlongK<64>::step(kSteps);
    return q;
  }
"""
_QK = """const u64 keys = k_major(smem + Offset::k) + u64(k.stage * (Bytes::k / 16));
    Wgmma<T, kKeys>::template rs_zero<kSteps, AlongK<kBlockN>>(s, q_desc.first, keys);
"""
_QK_OTHERS = """    Wgmma<T, kKeys>::template ss<kDim / 16 - kSteps, AlongK<64>, AlongK<kBlockN>>(
        s, q_desc.others, keys + AlongK<kBlockN>::step(kSteps));
"""


def _q_in_registers(one_of: int) -> tuple[Edit, ...]:
    """The first of so many parts of Q."""
    product = (
        "gemm_qk<T, kKeys, kDim, kBlockN>(s, q_desc, k_major(smem + Offset::k) + u64(k.stage * (Bytes::k / 16)));\n"
    )
    before = "  // S_n = Q K_n^T of the first kKeys keys.\n"
    return (
        ("const u64 q_desc = k_major(q_tile(consumer));", "Queries q_desc = load_fragments();"),
        ("u64 q_desc", "Queries& q_desc"),
        (product, _QK if one_of == 1 else _QK + _QK_OTHERS),
        (before, _LOAD_Q % one_of + before),
    )


# ---- what clusters that share K and V could save at most: two blocks would load half of them each --------------------
def _without_loads(left_out: str) -> tuple[Edit, ...]:
    """Where `left_out` holds, a buffer keeps what it has: keys and values, since power depends on the numbers."""
    begin, member = "const u32 full = ring.begin_load(bytes);\n", "u32 stage = 0, parity;"
    keep = "ring.wait_empty(); mbar_arrive(ring.full_barrier()); ring.next(); return;"
    counted = f"if (ring.so_far++ >= 2 * Config::kStages && {left_out}) {{ {keep} }}\n      {begin}"
    return (member, "u32 stage = 0, so_far = 0, parity;"), (begin, counted)


# ---- exponentials of the backward: ptxas moves most of them behind the wait for dP -----------------------------------
_EXPONENTIALS = {
    "backward_sm90": "if constexpr (Score::kCheapSum) exponentials(score, s, rows, load_next);\n",
    "dq_sm90": "exponentials(s, slope, r, n, masked);\n",
}


def _exponentials_above(name: str, header: str, count: str = "kScores") -> Idea:
    """So many of them stay above the wait."""
    collect = f"u32 any = 0;\n#pragma unroll\n    for (int i = 0; i < {count}; ++i) any |= as_bits(s[i]);\n"
    after = _EXPONENTIALS[header]
    return Idea(
        name, ((after, f"{after}    {{ {collect} keep_above(smem_base(), as_float(any)); }}\n"),), header=header
    )


FORWARD = [
    Idea("in use"),
    Idea("Q in registers, 24 for the producer", part_of_q=1, producer=24),
    Idea("half of Q in registers", part_of_q=2),
    Idea("24 registers for the producer", producer=24),
    Idea(f"{BOUND}half the loads of K and V", _without_loads("row / kRows % 2")),
    Idea(f"{BOUND}no loads of K and V", _without_loads("true")),
]
BACKWARD = [
    Idea("in use"),
    _exponentials_above("exponentials above the wait for dP", "backward_sm90"),
    _exponentials_above("half of the exponentials above the wait for dP", "backward_sm90", "kScores / 2"),
]
WIDE_BACKWARD = [Idea("in use"), _exponentials_above("exponentials above the wait for dP, for dQ", "dq_sm90")]


@dataclass(frozen=True, kw_only=True)
class ForwardCase(TileCase):
    def plan(self, idea: Any, machine: Machine) -> Plan:
        return idea.planned(super().plan(None, machine))


@dataclass(frozen=True, kw_only=True)
class GradientCase(BackwardCase):
    def plan(self, idea: Any, machine: Machine) -> Plan:
        return idea.planned(super().plan(None, machine))


def forward_cases(dim: int, dim_v: int, kind: str, lengths: Sequence[int]) -> list[ForwardCase]:
    return [ForwardCase(**vars(case)) for case in tune_forward.cases(dim, dim_v, kind, lengths)]


def backward_cases(dim: int, dim_v: int, kind: str, lengths: Sequence[int]) -> list[GradientCase]:
    return [GradientCase(**vars(case)) for case in tune_backward.cases("sm90", dim, dim_v, kind, lengths)]


def forward_ideas(dim: int, dim_v: int, kind: str) -> list[Idea]:
    """A quarter of Q would end within a panel of wider tiles, where the others of its products would begin."""
    return [*FORWARD, Idea("a quarter of Q in registers", part_of_q=4)] if dim == 64 else FORWARD


def backward_ideas(dim: int, dim_v: int, kind: str) -> list[Idea]:
    return WIDE_BACKWARD if dim > 128 else BACKWARD  # two kernels, or one


_bounds = {idea.name for idea in FORWARD if idea.is_bound}
DIMS: list[Dims] = [(64, 64), (128, 128), (256, 256)]
PASSES: dict[str, tuple[tune.Subject, tuple[int, ...]]] = {  # and the lengths
    "forward": (
        tune.Subject(
            DIMS,
            ("full", "bounded"),
            forward_cases,
            forward_ideas,
            functools.partial(tune_forward.calls, bounds=_bounds),
        ),
        (8192,),
    ),
    "backward": (
        tune.Subject(
            DIMS,
            tune_backward.kinds("sm90", backward_sm90.ARCH)[:1],
            backward_cases,
            backward_ideas,
            tune_backward.calls,
        ),
        (512, 1024, 4096, 16384),
    ),
}


def the_gpu(parser: argparse.ArgumentParser) -> torch.device:
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def report(what: str, done: int, of: int) -> None:
    print(f"{done}/{of} {what}", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.ideas",
        description="Ideas for the Hopper kernels, beside the kernels in use.",
    )
    parser.add_argument("--pass", dest="direction", choices=PASSES, default="forward")
    parser.add_argument("--method", choices=[TURNS, SUSTAINED], default=TURNS)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args(arguments)
    device = the_gpu(parser)
    subject, lengths = PASSES[chosen.direction]

    found = tune.sweep(subject, subject.dims, subject.kinds, lengths, device, report, chosen.method)
    del found["best"]  # whether one is kept is not a matter of speed alone
    results.write({"kind": "ideas", **found}, chosen.out)
    print(f"wrote {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
