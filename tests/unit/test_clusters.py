"""Clusters that share K and V, as an idea: it applies to the kernels as they are now, compiles, and covers the tiles of a
problem. Whether it is right, a GPU says: a process of its own checks it there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from everyday import everyday
from fake_gpu import H200

from benchmarks.studies import clusters
from benchmarks.studies.ideas import ForwardCase, Idea, forward_cases
from strobe.cuda import jit
from strobe.cuda.plan import Launch
from strobe.mask import full
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
    places = {old: text.count(old) for old, _ in clusters.EDITS}
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
