"""Clusters of two blocks that share K and V by TMA multicast in Hopper's forward kernel, beside the kernel in use. It is
an idea as those of `ideas.py`, for the plain dense kernels: edits of the source, and a plan with pairs of tiles.
`python -m benchmarks.studies.clusters -o benchmarks/results/MACHINE/studies/clusters.json` checks it, each case under a
time limit, and then times it in turns and sustained.

The two blocks of a cluster work on two neighbouring tiles of queries of one head, a pair. Both visit the key blocks that
some row of the pair sees, in the same order; consumers skip those that their own rows do not see. Of each tile of K and
of V a block loads half, into the shared memory of both. One block takes pair after pair from the counter, and tells the
other which comes next. The last pair of a head may have a tile without rows: its block loads and releases as any other.

Why nobody waits for ever. Both producers issue the same sequence of loads: K of the first block, Q, the number of the
next pair, then K and V by turns. Whoever waits, waits for what comes earlier in it:
- Loading a buffer waits until both blocks' consumers have released what it held. For that they need loads in front of
  this one alone. So it is in the kernel in use, and consumers are the same; skipped blocks are released as others are.
- A consumer waits for both halves of a tile, so for the same place in both producers' sequences. Q, and turns between
  consumers, are matters of one block.
- The number of the next pair is sent behind Q of a pair and received behind its last load. Sending waits until the
  number before was received, behind the last load of the pair before.
By induction over the sequence each step is reached.

Why no phase is missed and no buffer overwritten. `empty` counts all consumer warps of both blocks, once for each time a
buffer is filled: a warp cannot release it again before it is filled again, and this takes a half from the producer that
waits here. `full` counts its own producer, who announces the whole tile. The other's half may land before that, but not
in the phase before: it was sent when all consumers had released the buffer, so that phase had been complete. Bytes that
land early cannot complete the phase, since the announcement is still to come. No block ends before the other is done
(the last `sync_cluster`), so no arrival or copy goes to a block that has left."""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.ideas import BOUND, DIMS, FORWARD, Edit, ForwardCase, Idea, forward_cases, report, the_gpu
from strobe.bench import results
from strobe.cuda import backend, driver, jit, launch
from strobe.cuda.driver import TensorMapSpec
from strobe.cuda.kernel import KernelSpec, TemplateKernel
from strobe.cuda.plan import Machine, Plan
from strobe.cuda.shared_memory import Region, SharedMemory, ring_bytes
from strobe.mask import causal, full
from strobe.measure.method import SUSTAINED, TURNS
from strobe.tools import tune, tune_forward

_INSTRUCTIONS = """
STROBE_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
STROBE_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same address in the shared memory of a block of the cluster.
STROBE_DEVICE u32 in_block(u32 rank, u32 address) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Neither this nor a wait names the scope of the cluster: with it ptxas puts a fence of the whole GPU before each arrival,
// and invalidates the L1 cache behind each wait. Buffers are read and written by the tensor cores and by copies alone,
// which the barriers count and the wait for a wgmma orders.
STROBE_DEVICE void mbar_arrive_in_cluster(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
// As a copy does: its bytes count on the barrier there.
STROBE_DEVICE void st_async(u32 address, u32 x, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address), "r"(x),
               "r"(bar)
               : "memory");
}
// To the same place in both blocks; each half counts on the barrier at the same place there.
STROBE_DEVICE void tma_load_5d_to_both(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(u16(3))
      : "memory");
}
"""
_MAILBOX = """// The number of the next pair, from the producer of the block that leads to that of the other.
struct Mailbox {
  bool leads;
  u32 number;
  Ring<1> ring;

  STROBE_DEVICE explicit Mailbox(u32 at) : leads(cluster_rank() == 0), number(at + Ring<1>::kBytes), ring(at, leads) {}
  STROBE_DEVICE void send(u32 pair) {
    ring.wait_empty();
    st_async(in_block(1, number), pair, in_block(1, ring.full));
    ring.next();
  }
  STROBE_DEVICE u32 receive() {
    mbar_arrive_expect_tx(ring.full, 4);
    ring.wait_full();
    const u32 pair = ld_shared(number);
    mbar_arrive_in_cluster(in_block(0, ring.empty));
    ring.next();
    return pair;
  }
};
"""
_LOAD_HALF = """const u32 rank = cluster_rank();
      Box half = Keys::template box<kRows>(s.k, head, row, t.batch_rows);
      if constexpr (panels(kColumns) == 1) half.c1 += rank * (kRows / 2);
      else half.c2 += rank * (panels(kColumns) / 2);
      tma_load_5d_to_both(buffers + ring.stage * bytes + rank * (bytes / 2), t.map, full, 0, half.c1, half.c2, half.c3,
                          half.c4);"""
_NEXT = """if (mailbox.leads) next = take_tile(p);  // early: its latency passes during the copies
      load_tile(decode_tile<Config>(index, p), [&] { if (mailbox.leads) mailbox.send(next); });
      if (!mailbox.leads) next = mailbox.receive();
"""


def _before(anchor: str, text: str) -> Edit:
    return anchor, text + anchor


_LOAD_TILE = """tma_load_tile<Config::kOneBoxPerTile, kRows, kColumns>(buffers + ring.stage * bytes, t.map, full,
                                                             Keys::template box<kRows>(s.k, head, row, t.batch_rows));"""
_TAKE_NEXT = """next = Work::next(p, index);  // early: its latency passes during the copies
      const Tile tile = Work::tile(index, p);
      if (tile.row0 < tile.q.length) load_tile(tile);
"""
_HARDWARE: tuple[Edit, ...] = (
    ('extern "C" __global__ void', 'extern "C" __global__ void __cluster_dims__(2, 1, 1)'),
    _before("STROBE_DEVICE void tma_store_commit()", _INSTRUCTIONS),
)
PROTOCOL: tuple[Edit, ...] = (
    # A buffer of K or V is released to both producers, by two lanes.
    (
        "if (elected()) release();\n",
        "if (thread_idx() % 32 < 2) mbar_arrive_in_cluster(released + 8 * stage);\n",
    ),
    ("parity(producer) {}", "parity(producer), released(in_block(thread_idx() % 2, empty)) {}"),
    ("u32 stage = 0, parity;\n", "u32 stage = 0, parity, released;\n"),
    (", 4 * kConsumers, KeyLoader", ", 8 * kConsumers, KeyLoader"),
    (_LOAD_TILE, _LOAD_HALF),
    # Pairs are numbered as tiles are. A block has one tile of its pair, and visits the key blocks of both.
    ("first(const Params&) { return block_idx(); }", "first(const Params&) { return block_idx() / 2; }"),
    ("return grid_dim() + atomic_inc_wrap", "return grid_dim() / 2 + atomic_inc_wrap"),
    ("(p.row_blocks - 1 - block) * Config", "(2 * (p.row_blocks - 1 - block) + int(cluster_rank())) * Config"),
    ("blocks_of(tile, tile.row0, kBlockM)", "blocks_of(tile, tile.row0 - kBlockM * int(cluster_rank()), 2 * kBlockM)"),
    # One producer takes pairs and tells the other.
    _before("template <class Config, class Mask, class Score, class Params> struct ForwardSm90 {", _MAILBOX),
    _before("    Parts::init(", "    Ring<1>::init(smem_base() + Offset::mailbox, 1);\n"),
    _before("    using Work = ", "    Mailbox mailbox(smem + Offset::mailbox);\n"),
    (_TAKE_NEXT, _NEXT),
    (
        "STROBE_DEVICE void load_tile(const Tile& tile) {",
        "template <class Tell> STROBE_DEVICE void load_tile(const Tile& tile, Tell tell) {",
    ),
    _before("    if (parts.merge) parts.load(", "    tell();\n"),
    # Nobody uses the other block before it is there, or after it has left.
    ("  sync_block();\n  const u32 warpgroup", "  sync_cluster();\n  const u32 warpgroup"),
    ("- 1).consume();\n  }\n", "- 1).consume();\n  }\n  sync_cluster();\n"),
)
MAILBOX = Region("mailbox", ring_bytes(1) + 16)


@dataclass(frozen=True)
class Clusters(Idea):
    """For one head dim of Q, K and V, a multiple of 64."""

    name: str = "clusters of two share K and V"
    edits: tuple[Edit, ...] = _HARDWARE + PROTOCOL

    def applied(self, kernel: TemplateKernel, target: jit.Target = "ptx") -> KernelSpec:
        facts = kernel.facts
        if facts["split"] or facts["pack_gqa"] > 1 or not facts["one_box"]:
            raise ValueError(f"{self.name}: for plain dense kernels, not for {kernel.name}")
        memory = SharedMemory([*kernel.memory.regions, MAILBOX])
        return super().applied(replace(kernel, memory=memory, smem=memory.size), target)

    def planned(self, made: Plan, target: jit.Target = "ptx") -> Plan:
        (launch,) = super().planned(made, target).launches
        tiles, rows = launch.values["tiles"], launch.values["row_blocks"]
        pairs = -(-rows // 2)
        values = {**launch.values, "row_blocks": pairs, "tiles": tiles // rows * pairs}
        maps = {t: _half(found) if t in "kv" else found for t, found in launch.maps.items()}
        made = replace(made, launches=(replace(launch, values=values, maps=maps),))
        return on_clusters(made, (launch.grid + 1) // 2)


def _half(keys: TensorMapSpec) -> TensorMapSpec:
    """The map of a tensor whose box is half as large: half of the panels or, of a single one, half of the rows."""
    columns, rows, panels, *others = keys.box
    if panels % 2 and panels > 1:
        raise ValueError(f"{panels} panels have no half")
    return replace(keys, box=(columns, rows if panels > 1 else rows // 2, max(1, panels // 2), *others))


def on_clusters(made: Plan, clusters: int) -> Plan:
    """Launched with so many clusters at most."""
    (launch,) = made.launches
    return replace(made, launches=(replace(launch, grid=2 * min(clusters, launch.values["tiles"])),))


# ---- whether it is right ---------------------------------------------------------------------------------------------
LENGTHS = [(n, n) for n in (128, 200, 1024, 4096, 4224)] + [(200, 1000), (1000, 200), (150, 4096)]
HEADS = [(1, 1), (3, 3), (16, 16), (16, 4)]  # of queries, of keys
LIMIT_S = 60  # for one case; the first of a process compiles its kernels


def cases_to_check(dim: int, kind: str) -> list[ForwardCase]:
    mask = {"full": full, "bounded": causal}[kind]
    return [
        ForwardCase(
            f"{mask.name}, {len_q} x {len_k}, {heads} heads on {heads_k}",
            len_q,
            len_k,
            batch=2,
            heads=heads,
            heads_k=heads_k,
            dim=dim,
            dim_v=dim,
            mask=mask,
            kind=kind,
        )
        for (len_q, len_k), (heads, heads_k) in itertools.product(LENGTHS, HEADS)
    ]


def plans_to_check(case: ForwardCase, machine: Machine) -> list[Plan]:
    """The kernel in use, and the clusters on some parts of the machine: a cluster works on one pair or on many. As if
    there were a single multiprocessor, since for more of them the keys of a few rows would be split."""
    plain, shared = (case.plan(idea, replace(machine, sms=1)) for idea in (Idea("in use"), Clusters()))
    return [plain, *(on_clusters(shared, clusters) for clusters in (1, 3, machine.sms // 2))]


def differences(case: ForwardCase, device: torch.device, machine: Machine) -> str | None:
    """None if O and LSE have the same bits each time."""
    q, k, v, out = case.tensors(device)
    lse = torch.empty(case.batch, case.heads, case.len_q, device=device)
    expected: list[torch.Tensor] = []
    for made in plans_to_check(case, machine):
        call = functools.partial(
            launch.Launcher(made, device.index or 0),
            *launch.addresses_of(made, {"q": q, "k": k, "v": v, "o": out, "lse": lse, "seed": 0}),
        )
        for _ in range(2):  # the second one finds the counter as the first has left it
            found = [t.fill_(torch.nan) for t in (out, lse)]
            call()
            torch.cuda.synchronize(device)
            expected = expected or [t.clone() for t in found]
            for name, t, wanted in zip(("o", "lse"), found, expected, strict=True):
                if (other := t != wanted).any():
                    furthest = (t[other].double() - wanted[other].double()).abs().max()
                    where = f"{int(other.sum())} of {t.numel()} numbers of {name}, by up to {furthest:.2g}"
                    return f"with {made.launches[0].grid} blocks other bits in {where}"
    return None


def _check(dim: int, kind: str, device: torch.device, answers: Connection) -> None:
    """In a process of its own: sends what it finds of each case."""
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    machine = backend.machine_of(device)
    for case in cases_to_check(dim, kind):
        answers.send(differences(case, device, machine))


def reasons_against(dim: int, kind: str, device: torch.device, limit_s: float = LIMIT_S) -> list[str]:
    """What is wrong for this head dim and mask. A launch that does not end, or fails, ends the check."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(dim, kind, device, there), daemon=True)
    process.start()
    there.close()  # so that the end of the process ends the pipe
    found: list[str] = []
    try:
        for case in cases_to_check(dim, kind):
            if not here.poll(limit_s):
                return [*found, f"{case}: no end within {limit_s:g} s"]
            if (difference := here.recv()) is not None:
                found.append(f"{case}: {difference}")
    except EOFError:
        return [*found, f"{case}: the process failed"]
    finally:
        process.kill()
        process.join(10)  # a driver that does not let go of it is not waited for
    return found


# ---- how fast it is --------------------------------------------------------------------------------------------------
KINDS = ("full", "bounded")
METHODS: dict[str, tuple[str, ...]] = {
    "both": (TURNS, SUSTAINED),
    TURNS: (TURNS,),
    SUSTAINED: (SUSTAINED,),
    "none": (),
}
LENGTHS_TIMED = (4096, 8192, 16384)
HALF = next(idea for idea in FORWARD if idea.name.startswith(f"{BOUND}half"))


def ideas(dim: int, dim_v: int, kind: str) -> list[Idea]:
    """The kernel in use comes twice, before and behind the clusters: what lies between its times is noise."""
    return [Idea("in use"), Clusters(), Idea("in use, again"), HALF]


SUBJECT = tune.Subject(DIMS, KINDS, forward_cases, ideas, functools.partial(tune_forward.calls, bounds={HALF.name}))


def clusters_at_once(dim: int, device: torch.device) -> int | str:
    """How many the GPU holds: where a part of it has an odd number of multiprocessors, one of those stays idle."""
    (case,) = forward_cases(dim, dim, "full", LENGTHS_TIMED[:1])
    (found,) = case.plan(Clusters(), backend.machine_of(device)).launches
    cuda, kernel = driver.bindings(), found.kernel
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = found.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.smem
    driver.have_context(device.index)
    function = launch.kernel(kernel).function(device.index)
    try:
        asked = cuda.cuOccupancyMaxActiveClusters(function, config)
        return int(driver.check("cuOccupancyMaxActiveClusters", asked))
    except driver.CudaError as error:
        return str(error)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.clusters",
        description="Clusters that share keys and values, checked and timed beside the kernel in use.",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--method", choices=METHODS, default="both", help="how to time; none: only check")
    chosen = parser.parse_args(arguments)
    device = the_gpu(parser)
    found: dict[str, Any] = {"kind": "clusters", "checked": {}, "clusters_at_once": {}, "rows": []}
    right = []
    for (dim, _), kind in itertools.product(DIMS, KINDS):
        reasons = reasons_against(dim, kind, device)
        print(f"head dim {dim}, {kind}: {'; '.join(reasons) or 'the same bits in all cases'}", flush=True)
        found["checked"][f"{dim} {kind}"] = reasons
        right += [] if reasons else [(dim, kind)]
    results.write(found, chosen.out)  # should what follows not end
    for method in METHODS[chosen.method]:
        for dim, kind in right:
            found["clusters_at_once"][dim] = clusters_at_once(dim, device)
            swept = tune.sweep(SUBJECT, [(dim, dim)], [kind], LENGTHS_TIMED, device, report, method)
            found["rows"] += swept["rows"]
            found |= {"provenance": swept["provenance"], "energy": swept["energy"]}
            results.write(found, chosen.out)
    for row in found["rows"]:
        if "tflops" in row:
            what = f"{row['method']}, head dim {row['dim']}, {row['case']}: {row['tile']}"
            print(f"{what}: {row['ms']:.3f} ms, {row['tflops']:.0f} TFLOP/s")
    print(f"wrote {chosen.out}")
    return 0 if len(right) == len(found["checked"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
