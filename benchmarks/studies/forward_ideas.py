"""Ideas for the Hopper forward, timed beside the kernels in use: what dropout costs, row sums, tiles that `strobe tune` does
not try. Results are compared with those of the kernel in use first.
`python -m benchmarks.studies.forward_ideas --method sustained -o benchmarks/results/MACHINE/studies/forward-ideas.json`

Dropout. ptxas moves all hashes of a block behind its vote on the maximum, where the warpgroup has no product in flight.
What is to be dropped depends on no score, so it can be found while the tensor cores compute S. The hash itself takes
fewer instructions if its wide products are said in PTX: else ptxas adds a zero to the upper half of each.

Tiles. With 192 queries a key is loaded for half as many rows again, and at the power limit loads cost most. Tiles with
more keys have fewer and longer products. Other tiles of 192 queries spill (96 keys at head dim 128, 144 at 64), and at head
dim 256 ptxas has no registers for their O.

Row sums. With head dim 64 the product P V can have eight columns more, in which V is 1. They come from a buffer of their own,
because the panels of V's tile may lie anywhere; at other head dims a panel follows the one before. Then nothing is added up
beside the exponentials: the vote needs the weights' top bits alone.

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

from benchmarks.studies.ideas import BOUND, Edit, Idea, report, the_gpu
from strobe.bench import results
from strobe.cuda import jit
from strobe.cuda.forward_sm90 import Tile, table_tile
from strobe.cuda.kernel import KernelSpec, TemplateKernel
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


# ---- row sums by the tensor cores ------------------------------------------------------------------------------------
_ACCEPTED = "    for (int i = 0; i < N / 2; ++i) weights[i] = packed[i];\n"
_BITS = """    u32 all = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) all |= packed[i];
    if (any((all & 0x40004000u) != 0)) {  // 2 or more, or NaN
"""
_DESC = "mn_major(smem + Offset::v, kBlockN) + u64(v.stage * (Bytes::v / 16))"
_DESC_ONES = """wgmma_desc(smem + Offset::v, %d - Offset::v, kGroupBytes) +
                                             v.stage * (Bytes::v / 16) * (1ll - 65536)"""  # their distance shrinks
_FILL = """  if (thread_idx() < 128) {
    const u32 ones = 0x3f803f80u;
    st_shared(smem_base() + %d + 16 * thread_idx(), u32x4{ones, ones, ones, ones});
    fence_proxy_async();
  }
  sync_block();
  const u32 warpgroup"""
# Weights are 2^-8 of what they were: 2 is too large where 2^9 was, in their sums or alone.
_ROW_SUMS: tuple[Edit, ...] = (
    ("i * (16 * int(kPanelRowBytes) / 16)", "i * int(kPanelRowBytes) * (1 - 65536)"),
    ("    if (any(!(sum[0] <= 256.f && sum[1] <= 256.f))) {\n", _BITS),
    ("    past.l[0] += sum[0];\n    past.l[1] += sum[1];\n", ""),
    (_ACCEPTED, f"{_ACCEPTED}    pin(weights);  // else ptxas packs into the operand of the product before\n"),
    (
        "usable(-past.m[0] * past.scale), usable(-past.m[1] * past.scale)",
        "usable(-past.m[0] * past.scale) - 8.f, usable(-past.m[1] * past.scale) - 8.f",
    ),
    ("      shift[row] = -safe * scale;\n", "      shift[row] = -safe * scale - 8.f;\n"),
    ("if (is_meant(row)) shift[row] = 0.f;", "if (is_meant(row)) shift[row] = -8.f;"),
    (": m[row] * scale;\n    return normaliser", ": m[row] * scale + 8.f;\n    return normaliser"),
    (
        "      store(f, tile, row);\n",
        "      for (int r = 0; r < 2; ++r) f.softmax.l[r] = 0.25f * f.o.row_sum(r);  // four threads have it\n"
        "      store(f, tile, row);\n",
    ),
)
# Every eighth exponential by FMAs, which have time for it where nothing is added up: 2^n in the exponent, the rest a cubic
# that is off by 1e-4 at most.
_EXP2 = "exp2_approx(fma(s[i + 1], scale, shift[row]));\n"
_STRUCT = "template <class T, int N> struct SpeculativeSoftmax {\n"
_CUBIC = """STROBE_DEVICE float exp2_fma(float x) {
  x = fmax(x, -126.f);
  const float whole = add_rn(x, 12582912.f), rest = x - add_rn(whole, -12582912.f);
  const float y = fma(fma(fma(rest, 0.05517111f, 0.24260981f), rest, 0.69326096f), rest, 0.99992816f);
  return as_float(as_bits(y) + (as_bits(whole) << 23));
}
"""
_EIGHTH: tuple[Edit, ...] = (
    (_STRUCT, _CUBIC + _STRUCT),
    (_EXP2, f"i % 8 == 6 ? exp2_fma(fma(s[i + 1], scale, shift[row])) : {_EXP2}"),
)
_ROW_SUMS_EMULATED: tuple[Edit, ...] = (
    (
        "  float sum[N / 2];\n  Accu",
        "  float row_sum(int row) const { return sum[N / 2 + 2 * row]; }\n  float sum[N / 2 + 4];\n  Accu",
    ),
    ("i < N / 2; ++i) sum[i] *=", "i < N / 2 + 4; ++i) sum[i] *="),
    ("Wgmma<T, N>::template rs_t<kSteps, B>(sum,", "Wgmma<T, N + 8>::template rs_t<kSteps, B>(sum,"),
)


def _row_sums_printed(dim: int) -> tuple[Edit, ...]:
    """In the text of Accumulators."""
    o, sums = ([f"d{i}" for i in range(begin, end)] for begin, end in ((0, dim // 2), (dim // 2, dim // 2 + 4)))
    last, product = o[-1], f'm64n%dk16.f32.bf16.bf16\\n"\n{" " * 17}"{{%s}}'
    zeros = "".join(f" mov.f32 {d}, 0f00000000;" for d in sums)
    scaled = "".join(f" mul.ftz.f32 {d}, {d}, %{i // 2};" for i, d in enumerate(sums))
    row_sum = f"""  static STROBE_DEVICE float row_sum(int row) {{
    float x[2];
    asm volatile("mov.f32 %0, {sums[0]}; mov.f32 %1, {sums[2]};" : "=f"(x[0]), "=f"(x[1]));
    return x[row];
  }}
"""
    return (
        (f".reg .f32 d<{len(o)}>;", f".reg .f32 d<{len(o) + 4}>;"),
        (f"mov.f32 {last}, 0f00000000;", f"mov.f32 {last}, 0f00000000;{zeros}"),
        (f"mul.ftz.f32 {last}, {last}, %1;", f"mul.ftz.f32 {last}, {last}, %1;{scaled}"),
        (product % (dim, ", ".join(o)), product % (dim + 8, ", ".join(o + sums))),
        ("  static STROBE_DEVICE void zero()", f"{row_sum}  static STROBE_DEVICE void zero()"),
    )


@dataclass(frozen=True)
class RowSums(Candidate):
    def applied(self, kernel: TemplateKernel, target: jit.Target = "ptx") -> KernelSpec:
        ones = -(-kernel.smem // 1024) * 1024
        edits = _ROW_SUMS_EMULATED if target == "emu" else _row_sums_printed(int(kernel.member("kDimV")))
        edits += (
            *_ROW_SUMS,
            *self.edits,
            (_DESC, _DESC_ONES % ones),
            ("  sync_block();\n  const u32 warpgroup", _FILL % ones),
        )
        return replace(Idea(self.name, edits).applied(kernel, target), smem=ones + 16 * 128)


def row_sum_ideas(dim: int, dim_v: int, kind: str) -> list[Candidate]:
    plain = table_tile(dim, dim_v, kind == "bounded")
    held = (replace(plain, exps_before_wait=n) for n in (plain.exps_before_wait, 24))
    found = [RowSums(f"row sums by products, {tile}", tile=tile) for tile in held]
    return [Candidate("in use"), *found, RowSums("and an eighth of the exponentials by FMAs", _EIGHTH, tile=plain)]


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
    "row sums": tune.Subject([(64, 64)], KINDS, cases, row_sum_ideas, calls),
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
    device = the_gpu(parser)
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
