"""Ideas for sums of dQ on Hopper, timed beside the kernels in use, and the cycles of each stage of their main loop:
`python -m benchmarks.studies.backward_ideas -o benchmarks/results/MACHINE/studies/backward-ideas.json`
`python -m benchmarks.studies.backward_ideas --stamps -o benchmarks/results/MACHINE/studies/backward-stages.json`

Before anything is timed, each idea computes gradients in a process of its own, beside the kernels in use: an idea that
waits for ever is reported, and left out."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.studies.backward_stamps import EDITS as STAMPS, ROLES, WORDS, stages, table
from benchmarks.studies.ideas import Edit, GradientCase, Idea, backward_cases, report, the_gpu
from strobe.bench import results
from strobe.bench.inputs import make_tensors
from strobe.cuda import backend, backward_sm90, jit, ptxas_log
from strobe.cuda.kernel import KernelSpec, TemplateKernel
from strobe.cuda.plan import Dims, Launch, Machine, Plan
from strobe.mask import Mask, causal, full
from strobe.measure import provenance
from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.turns import medians
from strobe.tools import tune, tune_backward
from strobe.tools.tune_backward import kernel_tensors, on_gpu

KIND = tune_backward.kinds("sm90", backward_sm90.ARCH)[0]
DIMS: list[Dims] = [(64, 64), (128, 128)]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class BackwardIdea(Idea):
    header: str = "backward_sm90"
    turns: bool | None = None  # whether blocks of keys take turns; None: as the planner says
    last_rounds: bool = False  # counters in place of the kernel that rounds
    more_smem: int = 0

    def planned(self, made: Plan, target: jit.Target = "ptx") -> Plan:
        made = replace(made, launches=tuple(map(self._with_memory, made.launches)))
        return super().planned(_without_rounding(made) if self.last_rounds else made, target)

    def _with_memory(self, launch: Launch) -> Launch:
        kernel = launch.kernel
        if not isinstance(kernel, TemplateKernel) or kernel.header != self.header:
            return launch
        return replace(launch, kernel=replace(kernel, smem=kernel.smem + self.more_smem))


_WARPS = "    else if (Config::kWantQ && (warp == 1 || warp == 2)) work.add_dq();\n"


# A thread of the producer has 24 registers. So loops of its warps keep a count alone, and work out from that where they are.
_PLACES = """  STROBE_DEVICE static int own_consumer() { return thread_idx_again() / 32 - 1; }
  // Where a consumer is when `left` blocks are left, that one included.
  struct Place {
    KeyTile tile;
    int head, m, part;
  };
  STROBE_DEVICE Place at(int left, int consumer, const KeyTile& tile) const {
    static_assert(!Config::kSparse);
    const int count = blocks.count(), head = head_at(left, tile.head_k);
    int m = (Config::kRotate ? start() + count : blocks.end) - 1 - remainder(left - 1, count);
    if (Config::kRotate && m >= blocks.end) m -= count;
    return Place{tile, head, m, int(dq_part<Config>(p, tile, head, m, consumer))};
  }
  STROBE_DEVICE int all_blocks() const { return blocks.any() ? blocks.count() * p.group : 0; }
"""


# ---- the last block of keys that adds to a sum rounds it -------------------------------------------------------------
# Each consumer's part of a sum has a counter of blocks of keys. A bulk sum is complete, for everybody who learns of it, once
# the thread that issued it has waited for the writes and released. So the adding warp counts a block two blocks late, when
# there is nothing left to wait for. Whoever counts last has acquired all others' releases. It reads the sums as ordinary
# memory: completion is also a fence between the copy engine and ordinary accesses. The sums land in shared memory behind
# everything else, and the consumer goes on meanwhile.
_ADD_DQ = """  STROBE_DEVICE void add_dq() const {
    [[maybe_unused]] int sent = -1;
"""
_COUNTED_ADD = """  STROBE_DEVICE void add_and_count() const {
    const int last_part = opaque(int(dq_part<Config>(p, tile, (tile.head_k + 1) * p.group - 1, 0, own_consumer())));
    wait_for_previous_grid();  // the sums and the counters are zero now
#pragma unroll 1
    for (int left = all_blocks(); left > -2; --left) {
      if (left > 0) dq_sum(own_consumer()).offer();
      // While the consumer computes this block: the sums of two blocks before have been written by now.
      if (left + 2 <= all_blocks()) count_in(left + 2, last_part, left > 0);
      if (left <= 0) continue;
      const int part = step(left, last_part).part;
      dq_sum(own_consumer()).await_full();
      if (elected()) {
        bulk_add(p.dq_sum + i64(part) * kDqFloats, dq_sum(own_consumer()).buffer, kDqBytes);
        tma_store_commit();
        tma_store_wait_read<0>();
      }
      sync_warp();
    }
  }
  struct Step {
    int m, part;
  };
  STROBE_DEVICE Step step(int left, int last_part) const {
    static_assert(!Config::kSparse && !Config::kRotate && !Config::kPartialDq);
    const int heads = quotient(left - 1, blocks.count()), m = blocks.end - left + heads * blocks.count();
    return Step{m, last_part - heads * (int(p.stat_rows) / kBlockM * 2) + 2 * m};
  }
  // How many blocks of keys add to block m of the queries.
  STROBE_DEVICE u32 adders(const Step& to) const {
    const Mask seen = mask();
    const int last_query = min((to.m + 1) * kBlockM, tile.q.length) - 1;
    return u32((seen.hi(last_query) + kBlockN - 1) / kBlockN - seen.lo(to.m * kBlockM) / kBlockN);
  }
  // Counts this block of keys once its sums are written. The last to be counted rounds them. `more`: a group behind them may
  // still be on its way.
  STROBE_DEVICE void count_in(int left, int last_part, bool more) const {
    bool last = false;
    if (elected()) {
      const Step to = step(left, last_part);
      const u32 others = adders(to) - 1;
      if (more) wait_written<1>();
      else wait_written<0>();
      fence_device();
      last = atomic_inc_wrap(p.turns + to.part, others) == others;
      if (last) fence_device();
    }
    last = any(last);
    sync_warp();
    if (last) round_dq(opaque(left));
  }
  template <int kPending> STROBE_DEVICE static void wait_written() {
#if __CUDA_ARCH__
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#else
    bulk_wait_written();
#endif
  }
  // 32 columns at a time. A chunk of eight columns lies in four pieces of 16 bytes, those of a quad of threads, each with
  // two rows. Pieces are spread over the banks by the number of their chunk.
  STROBE_DEVICE void round_dq(int left) const {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      fetch_half(p.dq_sum + i64(at(left, own_consumer(), tile_again<Config>(p)).part) * kDqFloats + half * (kDqFloats / 2));
      const Place to = at(left, own_consumer(), tile_again<Config>(p));
      const int lane = thread_idx_again() % 32, chunk = lane % 4, from = opaque(int(landing()) + 2064 * chunk + lane / 4 * 64),
                column = DqRows<kBlockM>::column(own_consumer()) + 32 * half + 8 * chunk;
      const int row = DqRows<kBlockM>::first(to.m, own_consumer()) + lane / 4;
      u16* dq = to.tile.q.rows(reinterpret_cast<u16*>(p.dq), p.dq_batch, p.dq_head, p.dq_row, to.head, row) + column;
      const int steps = column < p.dim ? min(8, (to.tile.q.length - row + 7) / 8) : 0;
#pragma unroll 1
      for (int i = 0; i < steps; ++i, dq += 8 * p.dq_row) {
        const u32 pieces = u32(from) + 512 * u32(i / 2) + 8 * u32(i % 2);
#pragma unroll
        for (u32 j = 0; j < 4; j += 2) {  // eight bytes at a time: registers are few
          float a, b, c, d;
          ld_shared_x2(pieces ^ 16 * j, a, b);
          ld_shared_x2(pieces ^ 16 * (j + 1), c, d);
          st_global_x2(reinterpret_cast<float*>(dq + 2 * j), as_float(pack2<T>(a * p.scale_grad, b * p.scale_grad)),
                       as_float(pack2<T>(c * p.scale_grad, d * p.scale_grad)));
        }
      }
      sync_warp();  // all have read the buffer
    }
  }
  STROBE_DEVICE u32 landing() const {
    return smem + (Offset::ring_ds + Pair::kBytes + 127) / 128 * 128 + own_consumer() * (kDqBytes / 2);
  }
  STROBE_DEVICE void fetch_half(const float* sums) const {
    const u32 lane = thread_idx_again() % 32;
#pragma unroll
    for (u32 i = 0; i < kDqBytes / 1024; ++i)
      cp_async_16(landing() + 512 * i + 16 * (lane ^ i / 4), sums + 4 * lane + 128 * i);
    cp_async_commit();
    cp_async_wait<0>();
    sync_warp();
  }
"""
_COUNTED: tuple[Edit, ...] = (
    (_ADD_DQ, f"{_PLACES}{_COUNTED_ADD}{_ADD_DQ}"),
    (_WARPS, _WARPS.replace("add_dq", "add_and_count")),
)


def _without_rounding(made: Plan) -> Plan:
    """`delta` sets the counters to zero, too. Rows that see no key would stay as they are."""
    delta, main, _ = made.launches
    kernel = delta.kernel
    assert isinstance(kernel, TemplateKernel)
    counts = replace(kernel, config=tuple((name, name == "kTurns" or x) for name, x in kernel.config))
    block = kernel.member("kStatBlock")
    assert isinstance(block, int)
    workspace = {**made.workspace, "turns": 2 * made.workspace["delta"] // block}
    return replace(made, launches=(replace(delta, kernel=counts), main), workspace=workspace)


# ---- the last warp of the producer waits for turns -------------------------------------------------------------------
# Adding warps wait for their own writes, and then for a turn. Here another warp has begun to wait for that turn one block
# earlier, for both of them. It meets each behind a turn, so it is never more than one block ahead.
_WAITING = """  STROBE_DEVICE Turn turn(const Place& at) const {
    return turn_of<Config>(mask(), at.tile, blocks.end, p.key_blocks, at.m);
  }
  STROBE_DEVICE void await_turns() const {
    wait_for_previous_grid();  // the turns are zero now
#pragma unroll 1
    for (int left = 2 * all_blocks(); left > 0; --left) {
      const int consumer = left % 2;
      const Place to = at((left + 1) / 2, consumer, tile);
      const u32 number = turn(to).number;
      if (number == 0) continue;
      if (elected()) await_turn(p.turns + to.part, number);
      sync_warp();
      bar_sync(kBarrierConsumers + 1 + left % 2, 64);  // the first two that nobody uses
    }
  }
  STROBE_DEVICE void add_in_turns() const {
    int sent = -1;
    wait_for_previous_grid();
#pragma unroll 1
    for (int left = all_blocks(); left > 0; --left) {
      const Place to = at(left, own_consumer(), tile);
      add_in_turn<Config>(p, to.tile, dq_sum(own_consumer()), to.head, to.m, turn(to), sent);
    }
    pass_turn(p, sent);
  }
"""
_LOOK = """  const bool waits = thread_idx() % 32 == 0 && turn.number > 0;
  const bool came = kLooks && waits && acquire_turn(p.turns + part) == turn.number;
"""
_AWAITED: tuple[Edit, ...] = (
    (_ADD_DQ, f"{_PLACES}{_WAITING}{_ADD_DQ}"),
    (_WARPS, _WARPS.replace("add_dq", "add_in_turns") + "    else if (warp == 3) work.await_turns();\n"),
    (_LOOK, ""),
    (
        "if (waits && !came) await_turn(p.turns + part, turn.number);",
        "if (turn.number > 0) bar_sync(kBarrierConsumers + 1 + sum.consumer, 64);",
    ),
)

IN_USE = BackwardIdea("in use")
IDEAS = [
    IN_USE,
    BackwardIdea("sums in any order", turns=False),
    BackwardIdea("the last block rounds", _COUNTED, turns=False, last_rounds=True, more_smem=16 * 1024 + 128),
    BackwardIdea("by turns", turns=True),
    BackwardIdea("by turns, another warp waits for them", _AWAITED, turns=True),
]
ROUNDS = next(idea for idea in IDEAS if idea.last_rounds)
STAMPED = [
    BackwardIdea("stamped", STAMPS, turns=False),
    replace(ROUNDS, name=f"stamped, {ROUNDS.name}", edits=STAMPS + _COUNTED),
    BackwardIdea("stamped, by turns", STAMPS, turns=True),
]


# ---- what is run -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class OrderedCase(GradientCase):
    def plan(self, idea: Any, machine: Machine) -> Plan:
        """An idea says in which order sums are taken."""
        most = {None: backward_sm90.TURNS_UP_TO, False: 0, True: 1 << 30}[idea.turns]
        with mock.patch.object(backward_sm90, "TURNS_UP_TO", most):
            return super().plan(idea, machine)


def cases(dim: int, dim_v: int, kind: str, lengths: Sequence[int]) -> list[OrderedCase]:
    return [OrderedCase(**vars(case)) for case in backward_cases(dim, dim_v, kind, lengths)]


def case_of(dim: int, mask: Mask, length: int, batch: int, heads: int, heads_k: int) -> OrderedCase:
    (case, *_) = cases(dim, dim, KIND, [length])
    name = f"{mask.name}, {length}, head dim {dim}, {heads} heads on {heads_k}"
    return replace(case, name=name, mask=mask, batch=batch, heads=heads, heads_k=heads_k)


CHECKED = [
    case_of(dim, mask, length, 2, *heads)
    for dim, _ in DIMS
    for mask in (full, causal)
    for length, heads in ((1000, (8, 2)), (4096, (4, 4)))
]
STAMPED_CASES = [
    case_of(128, causal, length, batch, *heads)
    for heads, batches in (((16, 16), (4, 1)), ((64, 8), (2, 1)), ((32, 8), (2, 1)))
    for length, batch in zip((4096, 16384), batches, strict=True)
]
CHECK_S, REPEATS = 300, 20


def compiles(variant: KernelSpec) -> str | None:
    """As `tune.compiles`, but a register of the producer may be spilled: under a causal mask the kernel in use does that,
    by turns."""
    reason = tune.compiles(variant)
    few = reason == "spills" and ptxas_log.spills(jit.compile(variant.source, variant.arch).log) <= 16
    return None if few else reason


def check(idea: BackwardIdea, device: torch.device) -> str:
    """What is wrong with its gradients, several times over, beside those of the kernels in use; "" if nothing."""
    machine = backend.machine_of(device)
    for case in CHECKED:
        tensors = kernel_tensors(case, make_tensors(case, device, seed=0))
        gradients = [tensors[name] for name in ("dq", "dk", "dv")]
        on_gpu(case.plan(IN_USE, machine), tensors)()
        expected = [t.clone() for t in gradients]
        call = on_gpu(case.plan(idea, machine), tensors)
        for repeat in range(REPEATS):
            for t in gradients:
                t.fill_(torch.nan)
            call()
            for name, t, e in zip(("dQ", "dK", "dV"), gradients, expected, strict=True):
                error = ((t - e).abs().max() / e.abs().max()).item()
                if not error <= 0.01:  # or NaN
                    return f"{case}, run {repeat}: {name} is off by {error:.3g} of its largest number"
    return ""


def checked_alone(idea: BackwardIdea) -> str:
    """The same in a process of its own."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--check", idea.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        return f"did not end within {CHECK_S} s"
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-2000:]


def timed_ideas(device: torch.device, method: str) -> dict[str, Any]:
    wrong = {}
    for idea in IDEAS[1:]:
        if reason := checked_alone(idea):
            wrong[idea.name] = reason
        print(f"{idea}: {reason or 'right'}", flush=True)

    able = [idea for idea in IDEAS if idea.name not in wrong]
    subject = tune.Subject(DIMS, (KIND,), cases, lambda *_: able, tune_backward.calls, compiles)
    found = tune.sweep(subject, DIMS, (KIND,), LENGTHS, device, report, method)
    del found["best"]
    refused = [{"tile": name, "reason": reason} for name, reason in wrong.items()]
    return {"kind": "backward-ideas", **found, "rows": refused + found["rows"]}


def stamped(device: torch.device) -> dict[str, Any]:
    machine, rows = backend.machine_of(device), []
    watch = Stopwatch(device, Settings(budget_ms=40, rounds=8, graph_below_ms=0))
    for idea in STAMPED:
        for case in STAMPED_CASES if idea is STAMPED[0] else STAMPED_CASES[:2]:
            tensors = kernel_tensors(case, make_tensors(case, device, seed=0))
            plan = case.plan(idea, machine)
            block_m = int(str(plan.details["backward tile"]).split()[0])
            room = plan.launches[1].grid, len(ROLES), case.group * -(-case.len_q // block_m) + 1, WORDS
            words = torch.zeros(room, dtype=torch.int32, device=device)
            call = on_gpu(plan, tensors | {"dropout_rows": words})
            plain = on_gpu(case.plan(replace(IN_USE, turns=idea.turns), machine), tensors)
            timed = {"in use": TimedCall(plain), "stamped": TimedCall(call)}
            for one in timed.values():
                one.call()
            ms = medians(timed, watch)
            words.zero_()
            call()
            row: dict[str, Any] = {"case": str(case), "idea": idea.name, "ms": ms, "cycles": stages(words)}
            print(f"{case}, {idea}: {ms}\n{table(row['cycles'])}", flush=True)
            rows.append(row)
    return {"kind": "backward-stages", "provenance": provenance.collect(device, seed=0), "rows": rows}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.backward_ideas",
        description="Ideas for sums of dQ on Hopper, beside the kernels in use; or the cycles of each stage.",
    )
    parser.add_argument("--method", choices=[TURNS, SUSTAINED], default=TURNS)
    parser.add_argument("--stamps", action="store_true", help="the cycles of each stage of the main loop")
    parser.add_argument("--check", choices=[idea.name for idea in IDEAS], help="only whether its gradients are right")
    parser.add_argument("-o", "--out", type=Path, help="the JSON file to write")
    chosen = parser.parse_args(arguments)
    if chosen.out is None and chosen.check is None:
        parser.error("-o says which file to write")
    device = the_gpu(parser)
    if chosen.check:
        reason = check(next(idea for idea in IDEAS if idea.name == chosen.check), device)
        print(reason)
        return int(bool(reason))
    results.write(stamped(device) if chosen.stamps else timed_ideas(device, chosen.method), chosen.out)
    print(f"wrote {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
