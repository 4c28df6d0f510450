"""Ideas for the Hopper forward, timed beside the kernels in use: what dropout costs, and tiles that `strobe tune` does not
try. Results are compared with those of the kernel in use first.
`python -m benchmarks.studies.forward_ideas --method sustained -o benchmarks/results/MACHINE/studies/forward-ideas.json`

Dropout. ptxas moves all hashes of a block behind its vote on the maximum, where the warpgroup has no product in flight.
What is to be dropped depends on no score, so it can be found while the tensor cores compute S. The hash itself takes
fewer instructions if its wide products are said in PTX: else ptxas adds a zero to the upper half of each.

Tiles. With 192 queries a key is loaded for half as many rows again, and at the power limit loads cost most. Tiles with
more keys have fewer and longer products. Other tiles of 192 queries (96 keys at head dim 128, 144 at 64, any at 256) spill.

Not here: exponentials in pairs (`ex2.approx.ftz.bf16x2`, `f16x2`). ptxas makes two MUFU.EX2 and a PRMT of each."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.ideas import BOUND, Edit, Idea
from strobe.bench import results
from strobe.cuda.forward_sm90 import Tile, table_tile
from strobe.cuda.plan import Machine, Plan
from strobe.measure.method import METHODS, TURNS
from strobe.measure.stopwatch import Call
from strobe.measure.sustained import SustainedCall
from strobe.tools import tune, tune_forward
from strobe.tools.tune_backward import on_gpu
from strobe.tools.tune_forward import TileCase

DROPOUT = 0.1


@dataclass(frozen=True)
class Candidate(Idea):
    tile: Tile | None = None  # that of the tables


# ---- dropout: fewer instructions for the same bits -------------------------------------------------------------------
_CELL = "STROBE_DEVICE DropoutCell dropout_cell("
_MAD_WIDE = """STROBE_DEVICE u64 mad_wide(u32 a, u32 b, u64 c) {
#ifdef __CUDA_ARCH__
  u64 x;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(x) : "r"(a), "r"(b), "l"(c));
  return x;
#else
  return u64(a) * b + c;
#endif
}
"""
_KEPT = "    return not_less_f16x2(dropout_cell(row, column + 16 * (i >> 2)).bits(factors[i & 3]), threshold);\n"
_KEPT_LEAN = """    const u64 first = mad_wide(u32(column & ~9), row.b, u64(row.b) << 32 | row.a);
    const u64 sum = first + u64(row.b) * u32(16 * (i >> 2));  // one instruction, without the key
    const u64 product = mad_wide(u32(sum) ^ u32(sum >> 32), 0x9e3779b1u, 0);
    return not_less_f16x2(DropoutCell{u32(product), u32(product >> 32)}.bits(factors[i & 3]), threshold);
"""
_FACTOR = "factors[place] = dropout_factor(query % 2, place);"
_LEAN_CELLS: tuple[Edit, ...] = ((_CELL, _MAD_WIDE + _CELL), (_KEPT, _KEPT_LEAN))
# Kept in registers, of which not every tile has enough: else factors are chosen again in every block.
_LEAN = (*_LEAN_CELLS, (_FACTOR, "factors[place] = u32(opaque(int(dropout_factor(query % 2, place))));"))

# ---- dropout: P is thinned out between the issue of the next S and that of P V ---------------------------------------
_DROP = "    f.dropout.drop(f.weights, first_key(n));\n"
_MEMBER = "    Dropout<Config::kDropout> dropout;\n"
_ISSUE_QK, _WAIT_V = "    issue_qk<kBlockN>(s, q_desc);\n    v.wait_full();\n", "    v.wait_full();\n    issue_pv(f);\n"
_WAIT = "    wgmma_wait<0>();\n    v.release_and_advance();\n"
# ptxas would move the hashes above S, but not a shuffle.
_LATE = "    f.dropout.drop(f.weights, int(as_bits(shfl_xor(as_float(f.held), 0))));\n"
_BESIDE_QK: tuple[Edit, ...] = (
    (_DROP, "    f.held = first_key(n);\n"),
    (_MEMBER, f"{_MEMBER}    int held;  // the key of its first weight\n"),
    (_WAIT_V + _WAIT, f"    v.wait_full();\n    f.dropout.drop(f.weights, f.held);\n    issue_pv(f);\n{_WAIT}"),
    (_ISSUE_QK, _ISSUE_QK + _LATE),
)

# ---- dropout: among the exponentials, for which the vote has to depend on what is left -------------------------------
_ACCEPT = "    if (!softmax.accept(f.softmax, f.weights, s)) f.o.scale(f.softmax.alpha);\n"
_AMONG_EXPONENTIALS: tuple[Edit, ...] = (
    (
        _ACCEPT + _DROP,
        """    f.dropout.drop(softmax.packed, first_key(n));
    u32 all = 0;  // no weight has a sign
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) all |= softmax.packed[i];
    if (int(all) < 0) softmax.sum[0] = -neg_inf();
    if (!softmax.accept(f.softmax, f.weights, s)) {
      f.dropout.drop(f.weights, n * kBlockN + 2 * int(thread_idx_again() % 4));
      f.o.scale(f.softmax.alpha);
    }
""",
    ),
)


def dropout_ideas(dim: int, dim_v: int, kind: str) -> list[Candidate]:
    """Those that spill registers at a head dim are left out."""
    plain = table_tile(dim, dim_v, kind == "bounded")
    found = [
        Candidate("in use"),
        Candidate(f"{BOUND}nothing is dropped", ((_DROP, ""),), tile=plain),
        Candidate("fewer instructions", _LEAN),
    ]
    if dim <= 128:
        found += [
            Candidate("beside Q K^T", _BESIDE_QK),
            Candidate("beside Q K^T, fewer instructions", _BESIDE_QK + _LEAN),
            Candidate("beside Q K^T, fewer instructions, the tile of no dropout", _BESIDE_QK + _LEAN_CELLS, tile=plain),
        ]
    if dim == 64:
        two = replace(plain, consumers=2)
        found += [Candidate("beside Q K^T, fewer instructions, two consumers", _BESIDE_QK + _LEAN, tile=two)]
    if dim == 128:
        found += [Candidate("among the exponentials, fewer instructions", _AMONG_EXPONENTIALS + _LEAN_CELLS)]
    return found


# ---- tiles -----------------------------------------------------------------------------------------------------------
_WIDE = functools.partial(Tile, 3, stages=3, q_slots=1, store_panels=1)
_LONG = functools.partial(Tile, 2, skips_after=True)
TILES = {
    64: [
        _LONG(144, stages=3, exps_before_wait=16),
        _LONG(160, stages=3, exps_before_wait=16),
        _LONG(160, stages=3, exps_before_wait=16, ping_pong=True),
        _LONG(176, exps_before_wait=16, ping_pong=True),
        _LONG(192, ping_pong=True),
    ],
    128: [
        _WIDE(64, exps_before_wait=8),
        _WIDE(64, exps_before_wait=8, ping_pong=True),
        _WIDE(80),
        _WIDE(80, exps_before_wait=8),
        _WIDE(80, exps_before_wait=8, ping_pong=True),
        Tile(3, 80, exps_before_wait=8),
        Tile(2, 176, q_slots=1, store_panels=1, exps_before_wait=16),
        Tile(2, 176, q_slots=1, store_panels=1, ping_pong=True),
    ],
}


def tile_ideas(dim: int, dim_v: int, kind: str) -> list[Candidate]:
    return [Candidate("in use"), *(Candidate(str(tile), tile=tile) for tile in TILES[dim])]


# ---- how they are timed ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Case(TileCase):
    def plan(self, idea: Any, machine: Machine) -> Plan:
        return idea.planned(super().plan(idea.tile, machine))


def cases(dim: int, dim_v: int, kind: str, lengths: Sequence[int], dropout: float = 0.0) -> list[Case]:
    return [Case(**{**vars(case), "dropout": dropout}) for case in tune_forward.cases(dim, dim_v, kind, lengths)]


def calls(
    candidates: list[Any],
    case: Case,
    device: torch.device,
    machine: Machine,
    ready: Callable[[Plan, dict[str, Any]], Call] = on_gpu,
) -> tune.Calls:
    """Each candidate's call. The first is in use: with its tile an idea gives the same bits, with others as good as the
    same. Outputs are small where keys are many, so the whole counts, not the largest difference."""
    q, k, v, out = case.tensors(device)
    found: dict[str, SustainedCall] = {}
    wrong: dict[str, str] = {}
    expected: torch.Tensor | None = None
    for candidate in candidates:
        call = ready(case.plan(candidate, machine), {"q": q, "k": k, "v": v, "o": out, "seed": 7})
        out.fill_(torch.nan)
        call()
        expected = out.clone() if expected is None else expected
        off = ((out - expected).float().norm() / expected.float().norm()).item()
        if candidate.is_bound or off == 0 or (candidate.tile is not None and off < 0.01):  # NaN is none of these
            found[str(candidate)] = SustainedCall(call)
        else:
            wrong[str(candidate)] = f"wrong: {case}, off by {off:.1e}"
    return found, wrong


_cases_with_dropout = functools.partial(cases, dropout=DROPOUT)
KINDS = ("full", "bounded")
SUBJECTS = {
    "dropout": tune.Subject([(64, 64), (128, 128), (256, 256)], KINDS, _cases_with_dropout, dropout_ideas, calls),
    "tiles": tune.Subject([(64, 64), (128, 128)], KINDS, cases, tile_ideas, calls),
}
LENGTHS = (4096, 16384)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.forward_ideas",
        description="Ideas for the Hopper forward, beside the kernels in use.",
    )
    parser.add_argument("--of", choices=SUBJECTS, nargs="+", default=list(SUBJECTS))
    parser.add_argument("--method", choices=METHODS, default=TURNS)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    device = torch.device("cuda", torch.cuda.current_device())

    def report(what: str, done: int, of: int) -> None:
        print(f"{done}/{of} {what}", flush=True)

    rows: list[dict[str, Any]] = []
    for name in chosen.of:
        subject = SUBJECTS[name]
        found = tune.sweep(subject, subject.dims, subject.kinds, LENGTHS, device, report, chosen.method)
        del found["best"]  # whether one is kept is not a matter of speed alone
        rows += [{"of": name, **row} for row in found["rows"]]
        results.write({"kind": "ideas", **found, "rows": rows}, chosen.out)
    print(f"wrote {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
