"""The cycles of each stage of the main loop of Hopper's backward, by stamps that are edits of its source:
`python -m benchmarks.studies.backward_stamps -o benchmarks/results/MACHINE/studies/backward-stages.json`

One thread of each role writes down the clock at the end of each stage: a row of 32 words for each block of queries, and a
row in front of them for what happens once. They lie where the keys of the dropout's rows would. The stores have no branch,
and no clock is read between the exponentials, so that ptxas keeps its order."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.studies.ideas import Edit, GradientCase, Idea, backward_cases, the_gpu
from strobe.bench import results
from strobe.bench.inputs import make_tensors
from strobe.cuda import backend
from strobe.cuda.parts.plan import Machine, Plan
from strobe.cuda.plans import backward_sm90
from strobe.measure import provenance
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.turns import medians
from strobe.tools import tune_backward
from strobe.tools.tune_backward import kernel_tensors, on_gpu
from strobe.variants.mask import Mask, causal

WORDS = 32
CONSUMER = [  # the stages of a block of queries, in their order; the first ends where the loop begins
    "",
    "wait for Q",
    "issue S",
    "wait for dO",
    "issue dP",
    "S lands",
    "dP lands, P and dS",
    "room for dS",
    "store dS",
    "wait for the other's dS",
    "issue dQ",
    "issue dV",
    "issue dK",
    "dQ and dV land",
    "hand dQ over",
    "dK lands",
    "give Q back",
]
ADDER = ["", "the turn before is passed on", "the turn comes", "wait for dQ", "send dQ"]
LOADER = ["", "room for Q", "load Q", "room for dO"]
ROLES = {"consumer 0": CONSUMER, "consumer 1": CONSUMER, "adding warp": ADDER, "producer": LOADER}
ROOM = 24  # in a consumer's rows: cycles of "hand dQ over" that it waited for room
ENTERED, BEGUN, LOOPED, ADDED, ENDED, SM = range(6)  # in its first row
_STAMPS = """// The next row of one thread of each role.
struct Stamps {
  u32* words;
  u32 row;     // where it begins, in words
  u32 others;  // 0 for the thread that writes

  template <class Config, class Params> STROBE_DEVICE static Stamps of(const Params& p) {
    const u32 thread = thread_idx_again(), role = thread >= 128 ? thread / 128 - 1 : thread < 32 ? 3 : 2;
    const int rows = p.group * ((p.len_q + Config::kBlockM - 1) / Config::kBlockM) + 1;
    return Stamps{p.dropout_rows, (u32(opaque(int(block_idx()))) * 4 + role) * rows * 32,
                  thread >= 128 ? thread % 128 : thread & ~32};
  }
  STROBE_DEVICE static u32 now() {
    u32 x = 0;
#if __CUDA_ARCH__
    asm volatile("mov.u32 %0, %clock;" : "=r"(x)::"memory");
#endif
    return x;
  }
  STROBE_DEVICE static u32 multiprocessor() {
    u32 x = 0;
#if __CUDA_ARCH__
    asm volatile("mov.u32 %0, %smid;" : "=r"(x));
#endif
    return x;
  }
  STROBE_DEVICE void put(int word, u32 x) const {
#if __CUDA_ARCH__
    asm volatile("{ .reg .pred writes; setp.eq.u32 writes, %2, 0; @writes st.global.u32 [%0], %1; }"
                 :: "l"(words + row + word), "r"(x), "r"(others) : "memory");
#endif
  }
  STROBE_DEVICE void at(int word) const { put(word, now()); }
  STROBE_DEVICE void next() { row += 32; }
};
"""
_SM = f"Stamps::of<Config>(p).put({SM}, Stamps::multiprocessor());"


def _once(word: int) -> str:
    return f"Stamps::of<Config>(p).at({word});"


def _at(stage: str, stages: Sequence[str] = CONSUMER) -> str:
    return f"stamps.at({stages.index(stage)});"


_ADD = "else sum.add(p.dq_sum + dq_part<Config>(p, tile, head, m, sum.consumer) * kDqFloats);\n"
_FLOATS = "constexpr int kDqFloats = 64 * 64;  // of one consumer\n"
_FIRST_PRODUCTS = """    issue_s(s, consumer);
    issue_dp(dp, consumer);
    wgmma_wait<1>();
    pin(s);
"""
_DQ = "    if (kHasDq) issue_dq(dq, consumer);\n"
_DV, _DK = "      issue_dv(f.dv, weights);\n", "      issue_dk(f.dk, slopes);\n"
_END = """      put_dq(dq, consumer, blocks.previous(m), left + 1);
    }
    wgmma_wait<0>();
    pin(f.dk);
    q.release_and_advance();
"""
_BEGIN = "      int block = start(), left = blocks.count() * p.group;\n"
_LAST_DQ = "      if (Config::kWantQ) {\n        float dq[32];\n"
_STORE = "    if (Config::kWantKV) store(f, consumer);\n"
_LOAD_Q = "    const u32 full = q.begin_load("
_LOAD_DO = "    const u32 full = d_o.begin_load("
_TURN_COME = """  sent = turn.last ? -1 : part;
  if (waits && !came) await_turn(p.turns + part, turn.number);
"""
_ADD_IN_TURN = "add_in_turn<Config>(p, tile, sum, head, m, turn(m), sent);"
_SEND = """  sum.await_full();
  if (!turn.last) send_sums(p, sum, part, turn.number);
"""
EDITS: tuple[Edit, ...] = (
    # Where stamps are kept, and how others reach them.
    (_FLOATS, _STAMPS + _FLOATS),
    ("  Pair ds_in, ds_out;  //", "  mutable Stamps stamps = Stamps::of<Config>(p);\n  Pair ds_in, ds_out;  //"),
    # A consumer's block of queries. Its waits stand in front of what they are part of.
    ("    q.wait_full();\n    wgmma_fence();\n", "    wgmma_fence();\n"),
    ("    d_o.wait_full();\n    wgmma_fence();\n", "    wgmma_fence();\n"),
    ("    ds_out.wait_full();\n    wgmma_fence();\n", "    wgmma_fence();\n"),
    ("    ds_in.wait_empty();\n#pragma unroll\n", "#pragma unroll\n"),
    ("128 * 16;\n    await_empty();\n", "128 * 16;\n"),
    (_FIRST_PRODUCTS,
     f"""    stamps.next();
    {_at("")}
    q.wait_full();
    {_at("wait for Q")}
    issue_s(s, consumer);
    {_at("issue S")}
    d_o.wait_full();
    {_at("wait for dO")}
    issue_dp(dp, consumer);
    {_at("issue dP")}
    wgmma_wait<1>();
    pin(s);
    {_at("S lands")}
"""),
    ("    if (Config::kWantQ) store_ds(slopes, consumer);\n",
     f"""    {_at("dP lands, P and dS")}
    if (Config::kWantQ) {{
      ds_in.wait_empty();
      {_at("room for dS")}
      store_ds(slopes, consumer);
      {_at("store dS")}
    }}
"""),
    (_DQ, f"    if (kHasDq) ds_out.wait_full();\n    {_at(CONSUMER[9])}\n{_DQ}    {_at('issue dQ')}\n"),
    (_DV, f"{_DV}      {_at('issue dV')}\n"),
    (_DK, f"{_DK}      {_at('issue dK')}\n"),
    ("      pin(f.dv);\n", f"      pin(f.dv);\n      {_at('dQ and dV land')}\n"),
    (_END, _END.replace("    }\n", f"    }}\n    {_at('hand dQ over')}\n")
               .replace("    q.", f"    {_at('dK lands')}\n    q.") + f"    {_at('give Q back')}\n"),
    ("    } else dq_sum(consumer).put(dq);\n",
     f"""    }} else {{
      const u32 since = Stamps::now();
      dq_sum(consumer).await_empty();
      stamps.put({ROOM}, Stamps::now() - since);
      dq_sum(consumer).put(dq);
    }}
"""),
    # Around its loop.
    ("  const KeyTile tile = decode_key_tile<Config>(block_idx(), p);\n  if (",
     f"  {_once(ENTERED)}\n  const KeyTile tile = decode_key_tile<Config>(block_idx(), p);\n  if ("),
    (_BEGIN, f"{_BEGIN}      {_once(BEGUN)}\n"),
    (_LAST_DQ, f"      {_once(LOOPED)}\n{_LAST_DQ}        ds_out.wait_full();\n"),
    (_STORE, f"    {_once(ADDED)}\n{_STORE}    {_once(ENDED)}\n    {_SM}\n"),
    # The producer, and the adding warp of the first consumer.
    (_LOAD_Q, f"    stamps.next();\n    {_at('', LOADER)}\n    q.wait_empty();\n    {_at('room for Q', LOADER)}\n{_LOAD_Q}"),
    (_LOAD_DO,
     f"    {_at('load Q', LOADER)}\n    d_o.wait_empty();\n    {_at('room for dO', LOADER)}\n{_LOAD_DO}"),
    (_ADD, f"""else {{
        stamps.next();
        {_at("", ADDER)}
        sum.offer();
        {_at("the turn before is passed on", ADDER)}
        {_at("the turn comes", ADDER)}
        sum.await_full();
        {_at("wait for dQ", ADDER)}
        if (elected()) {{
          bulk_add(p.dq_sum + dq_part<Config>(p, tile, head, m, sum.consumer) * kDqFloats, sum.buffer, kDqBytes);
          tma_store_commit();
          tma_store_wait_read<0>();
        }}
        sync_warp();
        {_at("send dQ", ADDER)}
      }}
"""),
    (_ADD_IN_TURN,
     f"{{ stamps.next(); {_at('', ADDER)} {_ADD_IN_TURN.replace('sent', 'sent, stamps')} {_at('send dQ', ADDER)} }}"),
    ("Turn turn,\n                                                                     int& sent) {",
     "Turn turn, int& sent,\n                                                                     const Stamps& stamps) {"),
    (_TURN_COME, f"  {_at(ADDER[1], ADDER)}\n{_TURN_COME}"),
    (_SEND, f"  {_at(ADDER[2], ADDER)}\n{_SEND.replace(chr(10), f'{chr(10)}  {_at(ADDER[3], ADDER)}{chr(10)}', 1)}"),
)  # fmt: skip


def stages(words: torch.Tensor) -> dict[str, Any]:
    """Mean cycles of what the stamps of a launch tell: [block of threads, role, row, word], int32. The first block of
    queries has no dQ to hand over, so it does not count."""
    found: dict[str, Any] = {}
    for role, (name, of_role) in enumerate(ROLES.items()):
        rows = words[:, role, 2:]
        there = rows[..., 0] != 0
        whole, after = there[:, :-1] & there[:, 1:], rows[:, 1:, 0]
        means = {stage: _mean((rows[..., i] - rows[..., i - 1])[there]) for i, stage in enumerate(of_role) if stage}
        means["until the next"] = _mean((after - rows[:, :-1, len(of_role) - 1])[whole])
        found[name] = {"a block of queries": _mean((after - rows[:, :-1, 0])[whole]), **means}
        if of_role is CONSUMER:
            found[name]["of hand dQ over: wait for room"] = _mean(rows[..., ROOM][there])
    lag = (words[:, 1, 2:, 0] - words[:, 0, 2:, 0])[words[:, 0, 2:, 0] != 0].double()
    found["consumer 1 behind consumer 0"] = {"mean": lag.mean().item(), "deviation": lag.std().item()}
    once = words[:, 0, 0][words[:, 0, 0, ENDED] != 0]
    times = {"before the first block of queries": (ENTERED, BEGUN), "all blocks of queries": (BEGUN, LOOPED),
             "the last dQ": (LOOPED, ADDED), "dK and dV": (ADDED, ENDED), "in all": (ENTERED, ENDED)}  # fmt: skip
    found["a block of threads"] = {what: _mean(once[:, to] - once[:, start]) for what, (start, to) in times.items()}
    found["a multiprocessor"] = _multiprocessors(once)
    return found


def _mean(x: torch.Tensor) -> float:
    return x.double().mean().item()


def _multiprocessors(once: torch.Tensor) -> dict[str, float]:
    """Each has a clock of its own. What is not busy before the longest one has ended is idle, between blocks of threads or
    at the end."""
    busy, spans = [], []
    for sm in once[:, SM].unique():
        here = once[once[:, SM] == sm]
        since = here - here[0, ENTERED]  # modulo 2^32
        busy.append((since[:, ENDED] - since[:, ENTERED]).double().sum().item())
        spans.append((since[:, ENDED].max() - since[:, ENTERED].min()).item())
    whole = max(spans) * len(spans)
    return {"cycles": max(spans), "busy": sum(busy) / whole, "between blocks of threads": (sum(spans) - sum(busy)) / whole,
            "at the end": 1 - sum(spans) / whole}  # fmt: skip


def table(found: dict[str, Any]) -> str:
    return "\n".join(
        f"  {what}\n" + "\n".join(f"    {x:12,.{0 if abs(x) > 9 else 3}f}  {name}" for name, x in values.items())
        for what, values in found.items()
    )


# ---- what is run -----------------------------------------------------------------------------------------------------
IN_USE = Idea("in use", header="backward_sm90")
STAMPED = replace(IN_USE, name="stamped", edits=EDITS)
ORDERS = {"stamped": 0, "stamped, by turns": 1 << 30}  # of the sums of dQ; up to so many keys they are taken by turns
KIND = tune_backward.kinds("sm90", backward_sm90.ARCH)[0]


def case_of(dim: int, mask: Mask, length: int, batch: int, heads: int, heads_k: int) -> GradientCase:
    (case, *_) = backward_cases(dim, dim, KIND, [length])
    name = f"{mask.name}, {length}, head dim {dim}, {heads} heads on {heads_k}"
    return replace(case, name=name, mask=mask, batch=batch, heads=heads, heads_k=heads_k)


CASES = [
    case_of(128, causal, length, batch, *heads)
    for heads, batches in (((16, 16), (4, 1)), ((64, 8), (2, 1)), ((32, 8), (2, 1)))
    for length, batch in zip((4096, 16384), batches, strict=True)
]


def planned(case: GradientCase, idea: Idea, order: str, machine: Machine) -> Plan:
    with mock.patch.object(backward_sm90, "TURNS_UP_TO", ORDERS[order]):
        return case.plan(idea, machine)


def stamped(device: torch.device) -> dict[str, Any]:
    machine, rows = backend.machine_of(device), []
    watch = Stopwatch(device, Settings(budget_ms=40, rounds=8, graph_below_ms=0))
    for order in ORDERS:
        for case in CASES if order == "stamped" else CASES[:2]:
            tensors = kernel_tensors(case, make_tensors(case, device, seed=0))
            plan = planned(case, STAMPED, order, machine)
            block_m = int(str(plan.details["backward tile"]).split()[0])
            room = plan.launches[1].grid, len(ROLES), case.group * -(-case.len_q // block_m) + 1, WORDS
            words = torch.zeros(room, dtype=torch.int32, device=device)
            call = on_gpu(plan, tensors | {"dropout_rows": words})
            plain = on_gpu(planned(case, IN_USE, order, machine), tensors)
            timed = {"in use": TimedCall(plain), "stamped": TimedCall(call)}
            for one in timed.values():
                one.call()
            ms = medians(timed, watch)
            words.zero_()
            call()
            row: dict[str, Any] = {"case": str(case), "idea": order, "ms": ms, "cycles": stages(words)}
            print(f"{case}, {order}: {ms}\n{table(row['cycles'])}", flush=True)
            rows.append(row)
    return {"kind": "backward-stages", "provenance": provenance.collect(device, seed=0), "rows": rows}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.backward_stamps",
        description="The cycles of each stage of the main loop of Hopper's backward.",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args(arguments)
    results.write(stamped(the_gpu(parser)), chosen.out)
    print(f"wrote {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
