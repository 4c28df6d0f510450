"""`strobe tune` without a GPU: which tiles it tries, which it picks, and that the library uses what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import FakeGpu

from strobe.bench import ledger, results, studies, tile_speeds
from strobe.cuda import forward_sm90, jit
from strobe.cuda.plan import Machine
from strobe.measure import sustained
from strobe.measure.sustained import SustainedCall
from strobe.tools import tune

SMEM = forward_sm90.SMEM_BYTES
H200 = Machine("sm_90a", sms=132, l2_bytes=60 << 20, smem_bytes=SMEM)


@pytest.fixture
def no_overrides(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("STROBE_TILES", raising=False)
    forward_sm90._overrides.cache_clear()
    yield monkeypatch
    forward_sm90._overrides.cache_clear()


@pytest.mark.parametrize("dims", forward_sm90.DIMS)
@pytest.mark.parametrize("kind", forward_sm90.KINDS)
def test_candidates_fit_and_begin_with_the_tile_in_use(dims: tuple[int, int], kind: str, no_overrides) -> None:  # type: ignore[no-untyped-def]
    found = tune.candidates(*dims, kind)
    case = tune.cases(*dims, kind, [4096])[0]
    assert case.plan(None, H200) == case.plan(found[0], H200)
    assert len(found) == len(set(found)) > 5
    assert all(tile.smem(*dims) <= SMEM for tile in found)


@pytest.mark.parametrize("dims", forward_sm90.DIMS)
def test_cases_are_of_their_kind_with_every_candidate(dims: tuple[int, int], no_overrides) -> None:  # type: ignore[no-untyped-def]
    for kind in forward_sm90.KINDS:
        cases = tune.cases(*dims, kind, [16, 1024, 1024, 16384])
        assert len(cases) == len({str(case) for case in cases})  # by which their times are kept apart
        for case in cases:
            for tile in tune.candidates(*dims, kind):
                facts = case.plan(tile, H200).launches[0].kernel.facts
                assert facts["tile"] == str(tile)
                assert facts["split"] == (kind in ("split", "softcap-split"))
                assert facts["softcap"] == (kind in ("softcap", "softcap-split"))


def rows(kind: str, speeds: dict[str, list[float]]) -> list[dict]:
    return [
        {"dim": 64, "dim_v": 64, "kind": kind, "case": case, "tile": tile, "ms": 1.0, "tflops": speed}
        for tile, by_case in speeds.items()
        for case, speed in zip(("1024", "4096"), by_case, strict=False)
    ]


def test_best_is_chosen_for_each_kind_and_must_run_in_every_case(no_overrides) -> None:  # type: ignore[no-untyped-def]
    plain, bounded = tune.candidates(64, 64, "full"), tune.candidates(64, 64, "bounded")
    found = tune.best_tiles(
        rows("full", {str(plain[0]): [500.0, 500.0], str(plain[1]): [600.0, 400.0], str(plain[2]): [900.0]})
        + rows("bounded", {str(bounded[0]): [300.0, 400.0], str(bounded[3]): [310.0, 400.0], "cudnn": [999.0, 999.0]})
        + [{"dim": 64, "dim_v": 64, "kind": "bounded", "tile": str(bounded[4]), "reason": "spills"}]
    )
    assert found == {"64/64 full": plain[0].__dict__, "64/64 bounded": bounded[3].__dict__}


def test_the_library_uses_what_was_found(tmp_path: Path, no_overrides) -> None:  # type: ignore[no-untyped-def]
    other = tune.candidates(64, 64, "bounded")[2]
    assert other != forward_sm90.choose_tile(64, 64, True)
    path = tmp_path / "found" / "tiles.json"
    results.write({"rows": [], "best": {"64/64 bounded": other.__dict__}}, path)
    no_overrides.setenv("STROBE_TILES", str(path))
    forward_sm90._overrides.cache_clear()
    assert forward_sm90.choose_tile(64, 64, True) == other
    assert forward_sm90.choose_tile(64, 64) == forward_sm90._TILES[64, 64]
    assert forward_sm90.choose_tile(64, 64, True, softcap=True) != other


def test_a_tile_found_for_split_keys_serves_softcap_too_unless_that_has_its_own(tmp_path: Path, no_overrides) -> None:  # type: ignore[no-untyped-def]
    both = {"softcap": True, "split": True}
    found = tune.candidates(64, 64, "split")[2], tune.candidates(64, 64, "softcap-split")[3]
    path = tmp_path / "tiles.json"
    for kind, tile in zip(("split", "softcap-split"), found, strict=True):
        assert tile != forward_sm90.choose_tile(64, 64, **both)
        results.write({"rows": [], "best": {f"64/64 {kind}": tile.__dict__}}, path)
        no_overrides.setenv("STROBE_TILES", str(path))
        forward_sm90._overrides.cache_clear()
        assert forward_sm90.choose_tile(64, 64, **both) == tile
    assert forward_sm90.choose_tile(64, 64, split=True) == forward_sm90._OTHER_TILES["split"][64, 64]


@pytest.mark.parametrize("content", ["", "{}", '{"best": {"64/64 full": {"no_such": 1}}}'])
def test_a_file_of_something_else_is_named(tmp_path: Path, no_overrides, content: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "tiles.json"
    path.write_text(content)
    no_overrides.setenv("STROBE_TILES", str(path))
    forward_sm90._overrides.cache_clear()
    with pytest.raises(ValueError, match="not a file written by `strobe tune`"):
        forward_sm90.choose_tile(128, 128)


def test_head_dims_are_filtered() -> None:
    assert tune.dims_of([192]) == [(192, 192), (192, 128)]
    assert tune.dims_of(None) == forward_sm90.DIMS
    assert tune.dims_of([7]) == []


def test_a_cached_kernel_that_spills_is_still_out_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = tune.cases(64, 64, "full", [1024])[0].plan(None, H200).launches[0].kernel
    cached = jit.Artifact(b"", "key", "disk", Path("there"), 0.0, "", variant.source)  # the compiler's log is not kept
    monkeypatch.setattr(jit, "get", lambda *_, **__: cached)
    for log, expected in (
        ("ptxas info    : 16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads", "spills"),
        ("ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", None),
    ):
        monkeypatch.setattr(jit, "compile", lambda *_, log=log: jit.Compiled(b"", log, 0.1, (13, 0)))
        assert tune.compiles(variant) == expected


def test_sustained_tiles_have_a_table(tmp_path: Path) -> None:
    """Speed and energy over the tile in use; better only where short turns lose little."""
    folder = tmp_path / "benchmarks" / "results" / "h200" / "studies"

    def file(name: str, speeds: dict[str, float], joules: dict[str, float] | None = None) -> None:
        found = rows("full", {tile: [speed, speed] for tile, speed in speeds.items()})
        for row in found:
            row["joules_per_tflop"] = None if joules is None else joules[row["tile"]]
        results.write({"rows": found, "best": {}}, folder / f"{name}.json")

    assert ledger._sustained_tiles(tmp_path) == []
    file("tiles", {"now": 600.0, "cool": 597.0, "hot": 570.0})
    file("tiles-sustained", {"now": 500.0, "cool": 510.0, "hot": 520.0}, {"now": 1.4, "cool": 1.372, "hot": 1.346})
    *_, first, second, third = ledger._sustained_tiles(tmp_path)
    assert first == "| full | 64 | now | hot | 1.040 | 0.961 | 0.950 |  |"
    assert second == "| full | 64 | now | cool | 1.020 | 0.980 | 0.995 | yes |"
    assert third == "| full | 64 | now | now | 1.000 | 1.000 | 1.000 |  |"


class FakeMonitor:
    instant_power, energy_source = True, "made up"

    def during(self, intervals: object) -> None:
        return None

    def mean_watts(self, begin: float, end: float) -> float:
        return 700.0


@pytest.mark.parametrize("method", ["turns", "sustained"])
def test_both_methods_give_rows(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times from a GPU that is made up; sustained ones have their energy, and whoever fails is left out."""
    gpu = FakeGpu(monkeypatch, cpu_ms=0.001)
    monkeypatch.setattr(sustained.time, "perf_counter", gpu.now)

    def fails() -> None:
        raise RuntimeError("no")

    calls = {
        "a": SustainedCall(lambda: gpu.run(0.5)),
        "b": SustainedCall(fails),
        "cudnn": SustainedCall(lambda: gpu.run(0.6)),
    }
    monkeypatch.setattr(tune, "sustain", lambda c, w, m, s: sustained.sustain(c, w, m, s, gpu.now))
    found = tune._measured(calls, 10**12, gpu.watch(budget_ms=40, rounds=8, graph_below_ms=0), method, FakeMonitor())  # type: ignore[arg-type]
    ours, cudnn = found
    assert [row["tile"] for row in found] == ["a", "cudnn"] and ours["ms"] == pytest.approx(0.5)
    assert ours["tflops"] == pytest.approx(2000) and ours["vs_cudnn"] == pytest.approx(1.2) and cudnn["vs_cudnn"] == 1.0
    assert ("joules_per_tflop" in ours) == (method == "sustained")
    assert method == "turns" or ours["joules_per_tflop"] == pytest.approx(0.35)


def test_the_tables_are_those_of_the_committed_sweep(no_overrides) -> None:  # type: ignore[no-untyped-def]
    """A tile that another beats clearly has no business in the table."""
    found = studies.load(Path(__file__).parents[2], "tiles")
    assert found is not None
    for dim, dim_v in forward_sm90.DIMS:
        for kind in forward_sm90.KINDS:
            speeds = tile_speeds.means(found["rows"], dim, dim_v, kind)
            in_use = str(tune.candidates(dim, dim_v, kind)[0])
            assert speeds[in_use] > 0.98 * max(speeds.values()), (dim, dim_v, kind, in_use)
