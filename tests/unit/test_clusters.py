"""Clusters that share K and V, as an idea: it applies to the kernels as they are now, compiles, and covers the tiles of a
problem. The emulator has no clusters. Here one is a block of twice the threads and twice the shared memory, so that races
and deadlocks between its halves are found as those of any block. The rest a GPU says: see the study's own check."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from everyday import everyday
from fake_gpu import H200

from benchmarks.studies import clusters
from benchmarks.studies.ideas import Edit, ForwardCase, Idea, forward_cases
from strobe.cuda import forward_sm90, jit
from strobe.cuda.forward_sm90 import Tile
from strobe.cuda.kernel import TemplateKernel, TextKernel
from strobe.cuda.plan import Launch, Plan
from strobe.cuda.shared_memory import SharedMemory
from strobe.emulator import backend, compiler
from strobe.emulator.program import EmulatorError
from strobe.mask import Mask, causal, full
from strobe.tools import tune

KERNELS = [f"{dim} {kind}" for dim, _ in clusters.DIMS for kind in clusters.KINDS]


def launch_of(case: ForwardCase, idea: Idea) -> Launch:
    (launch,) = case.plan(idea, H200).launches
    return launch


def launches(name: str) -> tuple[Launch, Launch]:
    """In use, and with clusters."""
    dim, kind = name.split()
    (case,) = forward_cases(int(dim), int(dim), kind, [8192])
    return launch_of(case, Idea("in use")), launch_of(case, clusters.Clusters())


@pytest.mark.parametrize("name", KERNELS)
def test_each_edit_finds_one_place_in_each_kernel(name: str) -> None:
    in_use, shared = launches(name)
    text = jit.flatten(in_use.kernel.source)
    places = {old: text.count(old) for old, _ in clusters.Clusters().edits}
    assert places == {old: 2 if old.startswith(("blocks_of(", ", 4 * kConsumers")) else 1 for old in places}
    changed = shared.kernel.source
    assert len(re.findall(r"mbar_arrive_in_cluster\(released", changed)) == 1
    assert "tma_load_tile<Config::kOneBoxPerTile, kRows" not in changed  # a whole tile of K or V


@pytest.mark.parametrize("name", everyday(KERNELS, ["128 bounded"]))
def test_it_compiles_without_spills(name: str) -> None:
    in_use, shared = launches(name)
    assert tune.compiles(shared.kernel) is None
    logs = [jit.compile(launch.kernel.source, launch.kernel.arch).log for launch in (in_use, shared)]
    before, after = (int(re.findall(r"Used (\d+) registers", log)[0]) for log in logs)
    assert after <= before


@pytest.mark.parametrize("name", KERNELS)
def test_a_block_loads_half_of_each_box(name: str) -> None:
    in_use, shared = launches(name)
    for t in "kv":
        whole, half = (launch.maps[t].box for launch in (in_use, shared))
        assert 2 * torch.Size(half).numel() == torch.Size(whole).numel()
        assert whole[1] == half[1] or whole[2] == half[2] == 1  # so that a half is one piece of shared memory
    assert shared.maps["q"] == in_use.maps["q"]
    assert shared.maps["o"] == in_use.maps["o"]


@pytest.mark.parametrize(("length", "tiles"), [(100, 1), (128, 1), (129, 2), (300, 3), (1000, 8)])
def test_pairs_hold_the_tiles_of_each_head(length: int, tiles: int) -> None:
    case = ForwardCase("", length, 64, batch=2, heads=3, heads_k=3, dim=128, dim_v=128, mask=full, kind="full")
    in_use, shared = (launch_of(case, idea) for idea in (Idea("in use"), clusters.Clusters()))
    assert in_use.values["row_blocks"] == tiles
    assert shared.values["row_blocks"] == -(-tiles // 2)
    assert shared.values["tiles"] == 6 * -(-tiles // 2)
    assert shared.grid % 2 == 0
    assert shared.grid <= 2 * shared.values["tiles"]


def test_other_kernels_are_refused() -> None:
    decode = ForwardCase("", 1, 8192, batch=1, heads=8, heads_k=8, dim=128, dim_v=128, mask=full, kind="full")
    with pytest.raises(ValueError, match="for plain dense kernels, not for forward_sm90.* split"):
        decode.plan(clusters.Clusters(), H200)


@pytest.mark.parametrize("kind", clusters.KINDS)
def test_what_is_checked_has_all_kinds_of_pairs(kind: str) -> None:
    """The machine is taken for a smaller one, so that no plan splits keys."""
    grids = set()
    for case in clusters.cases_to_check(128, kind):
        in_use, *shared = (made.launches[0] for made in clusters.plans_to_check(case, H200))
        assert all(2 * launch.values["row_blocks"] >= in_use.values["row_blocks"] for launch in shared)
        grids |= {launch.grid for launch in shared}
    assert {2, 6, 132} <= grids


# With the switches of the tiles in use, and so few keys that the memory of two blocks is that of one.
SMALL = {
    64: Tile(3, 64, stages=3, exps_before_wait=8, skips_after=True),
    128: Tile(2, 32, exps_before_wait=8, ping_pong=True),
    256: Tile(2, 16, q_slots=1, store_panels=1),
}
_INSTRUCTIONS = """}}  // namespace strobe
namespace strobe::emu {{
void named_barrier(u32, u32, bool, const char*, Site);
void store_shared(u32, const void*, u32, const char*, Site);
}}
namespace strobe {{
inline u32 in_block(u32 rank, u32 address) {{
  return (address - emu::kSharedBase) % {smem} + rank * {smem} + emu::kSharedBase;
}}
inline void sync_cluster() {{ emu::named_barrier(0, 2 * {threads}, true, "sync_cluster", Site::here()); }}
inline void mbar_arrive_in_cluster(u32 bar) {{ mbar_arrive(bar); }}
inline void st_async(u32 address, u32 x, u32 bar) {{
  emu::store_shared(address, &x, 4, "st_async", Site::here());
  mbar_arrive(bar);
}}
inline void tma_load_5d_to_both(u32 to, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4) {{
  for (u32 i = 0; i < 2; ++i) tma_load_5d(in_block(i, to), map, in_block(i, bar), c0, c1, c2, c3, c4);
}}
"""


def as_one_block(launch: Launch, kernel: TemplateKernel, mistakes: Sequence[Edit] = ()) -> Launch:
    """A launch of clusters, for the emulator. `kernel` is the one without them."""
    memory = SharedMemory([*kernel.memory.regions, clusters.MAILBOX])
    threads, smem = kernel.threads, -(-memory.size // 1024) * 1024
    rank = f"inline u32 cluster_rank() {{ return emu::thread_index() / {threads}; }}\n"
    start, commit = "STROBE_DEVICE u32 thread_idx() {", "STROBE_DEVICE void tma_store_commit()"
    edits = [
        (start, rank + start),
        ("return emu::thread_index(); }", f"return emu::thread_index() % {threads}; }}"),
        ("return emu::block_index(); }", "return 2 * emu::block_index() + cluster_rank(); }"),
        ("return emu::grid_size(); }", "return 2 * emu::grid_size(); }"),
        ("return emu::kSharedBase; }", f"return emu::kSharedBase + cluster_rank() * {smem}; }}"),
        ("emu::named_barrier(id,", "emu::named_barrier(id + 8 * cluster_rank(),"),
        (f"STROBE_KERNEL({threads},", f"STROBE_KERNEL({2 * threads},"),
        (commit, _INSTRUCTIONS.format(smem=smem, threads=threads) + commit),
        *clusters.PROTOCOL,
        # st_async arrives instead of counting bytes.
        ("Offset::mailbox, 1)", "Offset::mailbox, 1, 2)"),
        ("mbar_arrive_expect_tx(ring.full, 4)", "mbar_arrive(ring.full)"),
        # Lane 0 arrives at both: the emulator takes it for the only one that has waited for a wgmma.
        (
            "if (thread_idx() % 32 < 2) mbar_arrive_in_cluster(released + 8 * stage);",
            "if (elected())\nfor (u32 i = 0; i < 2; ++i) mbar_arrive(in_block(i, empty + 8 * stage));",
        ),
        *mistakes,
    ]
    text = jit.flatten(replace(kernel, memory=memory).source, "emu")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    doubled = TextKernel(f"{kernel.name} clusters", kernel.arch, kernel.params, 2 * threads, 2 * smem, text=text)
    return replace(launch, kernel=doubled, grid=launch.grid // 2)


def emulated_bits_agree(dim: int, mask: Mask, lengths: tuple[int, int], mistakes: Sequence[Edit] = ()) -> bool:
    """Of the kernel without clusters, and of two clusters that share the tiles of two heads."""
    len_q, len_k = lengths
    case = ForwardCase("", len_q, len_k, batch=1, heads=2, heads_k=2, dim=dim, dim_v=dim, mask=mask, kind="bounded")
    q, k, v, out = case.tensors("cpu")
    lse = torch.empty(1, 2, len_q)
    strides = (len_q * 2 * dim, dim, 2 * dim)
    in_use = forward_sm90.plan(case.problem, strides, replace(H200, sms=1), SMALL[dim])
    shared = clusters.on_clusters(clusters.Clusters().planned(in_use), 2)
    kernel = in_use.launches[0].kernel
    assert isinstance(kernel, TemplateKernel)
    shared = replace(shared, launches=(as_one_block(shared.launches[0], kernel, mistakes),))

    def results(plan: Plan, seed: int) -> list[torch.Tensor]:
        found = [t.fill_(torch.nan) for t in (out, lse)]
        tensors = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "seed": 0}
        backend.launch(plan, tensors, mode="async", seed=seed, workers=1)
        return [t.clone() for t in found]

    expected = results(in_use, 0)
    return all(torch.equal(*pair) for seed in range(3) for pair in zip(results(shared, seed), expected, strict=True))


# One tile; an odd number of them, whose last has a single row; more queries than keys, so that rows see none.
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("lengths", [(70, 200), (385, 385), (385, 100)], ids=str)
@pytest.mark.parametrize("dim", SMALL)
def test_a_cluster_computes_the_same(dim: int, lengths: tuple[int, int]) -> None:
    assert all(emulated_bits_agree(dim, mask, lengths) for mask in (full, causal))


MISTAKES = {
    "one block's arrivals suffice": (", 8 * kConsumers, KeyLoader", ", 4 * kConsumers, KeyLoader"),
    "each releases its own alone": ("mbar_arrive(in_block(i, empty", "mbar_arrive(in_block(cluster_rank(), empty"),
    "the mailbox is overwritten": ("    ring.wait_empty();\n    st_async", "    st_async"),
    "a block visits what its own tile sees": ("tile.row0 - kBlockM * int(cluster_rank()), 2 *", "tile.row0,"),
    "both load the first half": ("+ rank * (bytes / 2), t.map", ", t.map"),
}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("mistake", everyday(list(MISTAKES), ["the mailbox is overwritten"]))
def test_a_mistake_between_the_blocks_is_caught(mistake: str) -> None:
    with pytest.raises(EmulatorError):
        emulated_bits_agree(128, causal, (610, 610), [MISTAKES[mistake]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_that_fails_or_hangs_is_a_reason_against(capfd: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda", 0)
    assert clusters.reasons_against(64, "full", device, limit_s=0) == [
        "full, 128 x 128, 1 heads on 1: no end within 0 s"
    ]
    assert clusters.reasons_against(64, "full", device) == ["full, 128 x 128, 1 heads on 1: the process failed"]
    assert "Traceback" in capfd.readouterr().err


def test_what_is_wrong_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = []

    def sweep(subject: tune.Subject, dims: list[tuple[int, int]], kinds: list[str], *rest: object) -> dict[str, object]:
        timed.append((dims, kinds, rest[-1]))
        row = {"method": rest[-1], "dim": dims[0][0], "case": kinds[0], "tile": "in use", "ms": 2.0, "tflops": 1.0}
        return {"method": rest[-1], "rows": [row], "best": {}, "provenance": {}, "energy": None}

    monkeypatch.setattr(tune, "sweep", sweep)
    monkeypatch.setattr(clusters, "clusters_at_once", lambda dim, device: 66)
    monkeypatch.setattr(clusters, "reasons_against", lambda dim, kind, device: ["wrong"] if dim > 64 else [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    out = tmp_path / "clusters.json"
    assert clusters.main(["-o", str(out)]) == 1
    assert timed == [([(64, 64)], [kind], method) for method in ("turns", "sustained") for kind in ("full", "bounded")]
    found = json.loads(out.read_text())
    assert found["checked"]["128 full"] == ["wrong"]
    assert len(found["rows"]) == 4
    assert "sustained, head dim 64, full: in use: 2.000 ms" in capsys.readouterr().out
    assert clusters.main(["-o", str(out), "--method", "none"]) == 1
    assert len(timed) == 4
