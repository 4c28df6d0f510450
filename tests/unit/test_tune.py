"""`strobe tune` without a GPU: which tiles it tries, which it picks, and that the library uses what it wrote."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import H200, FakeGpu
from rich.console import Console
from typer.testing import CliRunner

import strobe
from strobe.bench import results
from strobe.cuda.launch import addresses_of
from strobe.cuda.parts import tuned
from strobe.cuda.parts.plan import Machine, Plan
from strobe.cuda.plans import backward_sm80, backward_sm90, backward_wide_sm90, forward_sm90
from strobe.cuda.plans.plan_work import MOST_CONSUMERS
from strobe.cuda.runtime import jit
from strobe.emulator import backend as emulated, compiler
from strobe.measure import sustained
from strobe.measure.sustained import SustainedCall
from strobe.tools import cli, tune, tune_backward, tune_forward, tune_table

SMEM = forward_sm90.SMEM_BYTES


@pytest.fixture
def no_overrides(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("STROBE_TILES", raising=False)
    tuned.best.cache_clear()
    yield monkeypatch
    tuned.best.cache_clear()


@pytest.mark.parametrize("dims", forward_sm90.DIMS)
@pytest.mark.parametrize("kind", forward_sm90.KINDS)
def test_candidates_fit_and_begin_with_the_tile_in_use(dims: tuple[int, int], kind: str, no_overrides) -> None:  # type: ignore[no-untyped-def]
    found = tune_forward.candidates(*dims, kind)
    case = tune_forward.cases(*dims, kind, [4096])[0]
    assert case.plan(None, H200) == case.plan(found[0], H200)
    assert len(found) == len(set(found)) > 5
    assert all(tile.smem(*dims) <= SMEM for tile in found)
    if "split" in kind:  # an invariant call must compile
        assert all(tile.consumers <= MOST_CONSUMERS for tile in found)


@pytest.mark.parametrize("dims", forward_sm90.DIMS)
def test_cases_are_of_their_kind_with_every_candidate(dims: tuple[int, int], no_overrides) -> None:  # type: ignore[no-untyped-def]
    for kind in forward_sm90.KINDS:
        cases = tune_forward.cases(*dims, kind, [16, 1024, 1024, 16384])
        assert len(cases) == len({str(case) for case in cases})  # by which their times are kept apart
        for case in cases:
            for tile in tune_forward.candidates(*dims, kind):
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
    plain, bounded = tune_forward.candidates(64, 64, "full"), tune_forward.candidates(64, 64, "bounded")
    found = tune.best_tiles(
        rows("full", {str(plain[0]): [500.0, 500.0], str(plain[1]): [600.0, 400.0], str(plain[2]): [900.0]})
        + rows("bounded", {str(bounded[0]): [300.0, 400.0], str(bounded[3]): [310.0, 400.0], "cudnn": [999.0, 999.0]})
        + [{"dim": 64, "dim_v": 64, "kind": "bounded", "tile": str(bounded[4]), "reason": "spills"}],
        tune_forward.candidates,
    )
    assert found == {"64/64 full": plain[0].__dict__, "64/64 bounded": bounded[3].__dict__}


def test_the_library_uses_what_was_found(tmp_path: Path, no_overrides) -> None:  # type: ignore[no-untyped-def]
    other = tune_forward.candidates(64, 64, "bounded")[2]
    assert other != forward_sm90.table_tile(64, 64, True)
    path = tmp_path / "found" / "tiles.json"
    results.write({"rows": [], "best": {"64/64 bounded": other.__dict__}}, path)
    no_overrides.setenv("STROBE_TILES", str(path))
    tuned.best.cache_clear()
    assert forward_sm90.table_tile(64, 64, True) == other
    assert forward_sm90.table_tile(64, 64) == forward_sm90._TILES[64, 64]
    assert forward_sm90.table_tile(64, 64, True, softcap=True) != other


def test_a_tile_found_for_split_keys_serves_softcap_too_unless_that_has_its_own(tmp_path: Path, no_overrides) -> None:  # type: ignore[no-untyped-def]
    both = {"softcap": True, "split": True}
    found = tune_forward.candidates(64, 64, "split")[2], tune_forward.candidates(64, 64, "softcap-split")[3]
    path = tmp_path / "tiles.json"
    for kind, tile in zip(("split", "softcap-split"), found, strict=True):
        assert tile != forward_sm90.table_tile(64, 64, **both)
        results.write({"rows": [], "best": {f"64/64 {kind}": tile.__dict__}}, path)
        no_overrides.setenv("STROBE_TILES", str(path))
        tuned.best.cache_clear()
        assert forward_sm90.table_tile(64, 64, **both) == tile
    assert forward_sm90.table_tile(64, 64, split=True) == forward_sm90._OTHER_TILES["split"][64, 64]


@pytest.mark.parametrize("content", ["", "{}", '{"best": {"64/64 full": {"no_such": 1}}}'])
def test_a_file_of_something_else_is_named(tmp_path: Path, no_overrides, content: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "tiles.json"
    path.write_text(content)
    no_overrides.setenv("STROBE_TILES", str(path))
    tuned.best.cache_clear()
    with pytest.raises(ValueError, match="not a file written by `strobe tune`"):
        forward_sm90.table_tile(64, 64)


def test_head_dims_are_filtered() -> None:
    assert tune_forward.FORWARD.dims_of([192]) == [(192, 192), (192, 128)]
    assert tune_forward.FORWARD.dims_of(None) == forward_sm90.DIMS
    assert tune_forward.FORWARD.dims_of([7]) == []


def test_the_tile_in_use_may_spill_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compiles", lambda kernel: "spills")
    tiles = tune_forward.candidates(64, 64, "full")[:3]
    group = tune_forward.cases(64, 64, "full", [4096])
    assert tune.unable(tiles, group, H200) == dict.fromkeys(tiles[1:], "spills")


def test_a_cached_kernel_that_spills_is_still_out_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = tune_forward.cases(64, 64, "full", [1024])[0].plan(None, H200).launches[0].kernel
    cached = jit.Artifact(b"", "key", "disk", Path("there"), 0.0, "", variant.source)  # the compiler's log is not kept
    monkeypatch.setattr(jit, "get", lambda *_, **__: cached)
    for log, expected in (
        ("ptxas info    : 16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads", "spills"),
        ("ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", None),
    ):
        monkeypatch.setattr(jit, "compile", lambda *_, log=log: jit.Compiled(b"", log, 0.1, (13, 0)))
        assert tune.compiles(variant) == expected


class FakeMonitor:
    instant_power, energy_source = True, "made up"

    def during(self, intervals: object) -> None:
        return None

    def close(self) -> None:
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


# ---- the backward

FAMILY = {"sm90": "sm_90a", "sm80": "sm_90"}
PLAIN = {"sm90": "backward sm_90a", "sm80": "backward sm_90"}


@pytest.mark.parametrize("family", FAMILY)
def test_backward_candidates_fit_and_begin_with_the_tile_in_use(family: str, no_overrides) -> None:  # type: ignore[no-untyped-def]
    subject = tune_backward.subject(family, FAMILY[family])
    for dims in subject.dims:
        for kind in subject.kinds:
            found = subject.candidates(*dims, kind)
            full, masked = subject.cases(*dims, kind, [1024])
            assert (full.softcap is not None) == ("softcap" in kind) and full.kind == kind
            assert full.plan(None, H200) == full.plan(found[0], H200)
            assert len(found) == len({str(tile) for tile in found})  # rows are told apart by it
            for tile in found:
                for case in (full, masked):
                    kernels = [launch.kernel for launch in case.plan(tile, H200).launches]
                    assert max(kernel.smem for kernel in kernels) <= SMEM
                    assert str(tile) in {kernel.facts.get("tile") for kernel in kernels}


def test_what_does_not_fit_is_no_candidate() -> None:
    assert not backward_sm90.fits(backward_sm90.Tile(128), 128, 128)  # dQ's sums have 64 columns
    assert not backward_wide_sm90.fits(backward_wide_sm90.DqTile(64, 3, 2), 256, 256)  # shared memory
    assert not backward_wide_sm90.fits(backward_wide_sm90.DqTile(128, 1, 1), 256, 256)  # registers
    able = backward_sm80.Tile(64, 64, 4, 2, 2, 2, 2, 1, blocks_per_sm=2)
    assert backward_sm80.fits(able, 128, 128, "sm_90") and not backward_sm80.fits(able, 128, 128, "sm_86")
    assert not backward_sm80.fits(replace(able, block_n=128), 128, 128, "sm_90")  # registers
    assert not backward_sm80.fits(replace(able, warps_s=4, block_m=32), 64, 64, "sm_90")  # half a tile for a warp
    assert not backward_sm80.fits(replace(able, early=True, stages_q=1), 64, 64, "sm_90")


@pytest.mark.parametrize("family", FAMILY)
def test_the_planner_takes_what_was_found(family: str, tmp_path: Path, no_overrides) -> None:  # type: ignore[no-untyped-def]
    """Beside the forward's tile in the same file, and for its own kind alone."""
    subject, dims = tune_backward.subject(family, FAMILY[family]), (192, 128)
    plain, softcap = (subject.cases(*dims, kind, [1024])[0] for kind in subject.kinds)
    before = plain.plan(None, H200), softcap.plan(None, H200)
    other = subject.candidates(*dims, PLAIN[family])[1]
    forward = tune_forward.candidates(64, 64, "full")[2]
    best = {f"192/128 {PLAIN[family]}": other.__dict__, "64/64 full": forward.__dict__}
    results.write({"rows": [], "best": best}, tmp_path / "tiles.json")
    no_overrides.setenv("STROBE_TILES", str(tmp_path / "tiles.json"))
    tuned.best.cache_clear()
    assert plain.plan(None, H200) == plain.plan(other, H200) != before[0]
    assert softcap.plan(None, H200) == before[1] and forward_sm90.table_tile(64, 64) == forward
    assert subject.candidates(*dims, PLAIN[family])[0] == other


def test_a_backward_tile_of_another_gpu_is_refused(tmp_path: Path, no_overrides) -> None:  # type: ignore[no-untyped-def]
    large = backward_sm80.Tile(128, 128, 8, 4, 4, 4).__dict__
    results.write({"rows": [], "best": {"64/64 backward sm_86": large}}, tmp_path / "tiles.json")
    no_overrides.setenv("STROBE_TILES", str(tmp_path / "tiles.json"))
    tuned.best.cache_clear()
    case = tune_backward.cases("sm80", 64, 64, "backward sm_86", [1024])[0]
    with pytest.raises(ValueError, match="STROBE_TILES=.*128x128.*does not fit on this GPU"):
        case.plan(None, Machine("sm_86", sms=80, l2_bytes=6 << 20, smem_bytes=99 << 10))


def test_a_second_run_keeps_other_kinds_in_the_file(tmp_path: Path) -> None:
    path, device = tmp_path / "tiles.json", {"device": {"name": "a GPU"}}

    def run(kind: str, tile: str, speed: float) -> dict[str, Any]:
        best = {f"64/64 {kind}": {"block_m": 64}}
        return {"provenance": device, "rows": rows(kind, {tile: [speed, speed]}), "best": best}

    assert tune.merged(run("full", "a", 1.0), path)["rows"][0]["tile"] == "a"
    results.write(run("full", "a", 1.0), path)
    results.write(tune.merged(run("backward sm_90a", "b", 2.0), path), path)
    found = tune.merged(run("full", "c", 3.0), path)
    assert [row["tile"] for row in found["rows"]] == ["b", "b", "c", "c"]
    assert sorted(found["best"]) == ["64/64 backward sm_90a", "64/64 full"]
    with pytest.raises(ValueError, match="another GPU, a GPU"):
        tune.merged({**found, "provenance": {"device": {"name": "other"}}}, path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not written by `strobe tune`"):
        tune.merged(found, path)


def small(family: str, monkeypatch: pytest.MonkeyPatch) -> tune_backward.BackwardCase:
    monkeypatch.setattr(tune_backward, "TOKENS", 70)
    monkeypatch.setattr(tune_backward, "HIDDEN", 64)
    return tune_backward.cases(family, 64, 64, PLAIN[family], [70])[1]


def test_gradients_are_judged_before_a_tile_is_timed(monkeypatch: pytest.MonkeyPatch, no_overrides) -> None:  # type: ignore[no-untyped-def]
    """Kernels that autograd stands in for: one forgets a key, one leaves rows as they were."""
    case = small("sm80", monkeypatch)
    right, forgetful, lazy = tune_backward.candidates("sm80", "sm_90", 64, 64, PLAIN["sm80"])[:3]

    def ready(plan: Plan, x: dict[str, Any]) -> Any:
        tile = next(
            t for t in (right, forgetful, lazy) if str(t) in {k.kernel.facts.get("tile") for k in plan.launches}
        )

        def call() -> None:
            leaves = [x[n].double().requires_grad_() for n in "qkv"]
            out = strobe.attention(*leaves, mask=strobe.causal)
            found = torch.autograd.grad(out, leaves, x["d_o"].double())
            for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
                x[name][:, (1 if tile is lazy else 0) :] = gradient[:, (1 if tile is lazy else 0) :].to(x[name].dtype)
            if tile is forgetful:
                x["dk"][:, 33] = 0

        return call

    calls, wrong = tune_backward.calls([right, forgetful, lazy], case, torch.device("cpu"), H200, ready)
    assert list(calls) == [str(right)] and list(wrong) == [str(forgetful), str(lazy)]
    assert "dk" in wrong[str(forgetful)] and "NaN" in wrong[str(lazy)]


def test_a_sweep_of_the_backward(monkeypatch: pytest.MonkeyPatch, no_overrides) -> None:  # type: ignore[no-untyped-def]
    """The sweep goes from candidates to the table and the file, with times that are made up: what spills is not timed,
    what is wrong in one case does not win."""
    gpu = FakeGpu(monkeypatch, cpu_ms=0.001)
    subject = tune_backward.subject("sm80", "sm_90")
    used, fast, wrong, slow, spilling = subject.candidates(64, 64, PLAIN["sm80"])[:5]
    times = {str(used): 0.5, str(fast): 0.4, str(wrong): 0.1, str(slow): 0.7, tune.CUDNN: 0.6}
    flops = subject.cases(64, 64, PLAIN["sm80"], [512])[0].tuned_flops

    def calls(tiles: list[Any], case: Any, device: torch.device, machine: Machine) -> Any:
        names = [str(tile) for tile in tiles if tile != wrong or case.mask == strobe.full] + [tune.CUDNN]
        made = {name: SustainedCall(lambda name=name: gpu.run(times[name])) for name in names}
        return made, {} if str(wrong) in names else {str(wrong): "wrong: dq"}

    monkeypatch.setattr(tune, "unable", lambda tiles, group, machine: {spilling: "spills"})
    monkeypatch.setattr(tune, "Stopwatch", lambda device, settings: gpu.watch(budget_ms=40, rounds=8, graph_below_ms=0))
    monkeypatch.setattr(tune, "Monitor", lambda device, energy: FakeMonitor())
    monkeypatch.setattr(tune.backend, "machine_of", lambda device: H200)
    monkeypatch.setattr(tune.provenance, "collect", lambda device, seed: {"device": {"name": "made up"}})
    tiles = [used, fast, wrong, slow, spilling]
    subject = replace(subject, calls=calls, candidates=lambda *_: tiles)
    steps: list[tuple[str, int, int]] = []
    found = tune.sweep(
        subject, [(64, 64)], [PLAIN["sm80"]], [512], torch.device("cuda", 0), lambda *step: steps.append(step)
    )
    assert found["best"] == {"64/64 backward sm_90": fast.__dict__}
    assert [step[1:] for step in steps] == [(0, 2), (0, 2), (1, 2)] and "compiling 5 tiles" in steps[0][0]
    first = next(row for row in found["rows"] if row.get("tile") == str(used) and "ms" in row)
    assert first["tflops"] == pytest.approx(flops / 0.5e9) and first["vs_cudnn"] == pytest.approx(1.2)
    out = io.StringIO()
    tune_table.show(found, Console(file=out, width=160))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert lines[0].startswith("head dim 64/64 backward sm_90") and lines[2].startswith(str(fast))
    assert re.search(r"1\.250 +1\.500", lines[2]) and "in use" in next(
        line for line in lines if line.startswith(str(used))
    )
    assert any(line.startswith(str(spilling)) and line.rstrip().endswith("spills") for line in lines)
    assert any(line.startswith(str(wrong)) and "wrong: dq" in line for line in lines)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("family", FAMILY)
def test_tiles_are_right_on_the_emulator(family: str, monkeypatch: pytest.MonkeyPatch, no_overrides) -> None:  # type: ignore[no-untyped-def]
    case = small(family, monkeypatch)
    tiles = tune_backward.candidates(family, FAMILY[family], 64, 64, PLAIN[family])[:2]

    def ready(plan: Plan, x: dict[str, Any]) -> Any:
        return lambda: emulated.launch(plan, {name: x.get(name) for name in plan.tensors})

    calls, wrong = tune_backward.calls(tiles, case, torch.device("cpu"), H200, ready)
    assert wrong == {} and list(calls) == [str(tile) for tile in tiles] and len(calls) == 2


def test_the_command_names_what_is_wrong() -> None:
    for arguments, says in (
        (["--pass", "both"], "forward, backward"),
        (["--pass", "backward", "--kind", "split"], "backward-softcap"),
        (["--pass", "backward", "--head-dim", "7"], "--head-dim 7"),
        (["--backend", "sm80"], "no forward tiles"),
        (["--pass", "backward", "--backend", "sm90", "--head-dim", "64"], "nothing to tune here"),
    ):
        done = CliRunner().invoke(cli.app, ["tune", *arguments])
        said = f"{done.output} {done.exception}"
        assert done.exit_code != 0 and says in " ".join(said.replace("│", " ").split()), (arguments, said)


def test_every_tensor_of_a_plan_has_an_address() -> None:
    """A launcher puts its counter and its workspace behind them."""
    plan = tune_forward.cases(64, 64, "full", [1024])[0].plan(None, H200)
    q = torch.empty(1)
    found = addresses_of(plan, {"q": q, "seed": 7})
    assert len(found) == len(plan.tensors) and found[0] == q.data_ptr()
    assert dict(zip(plan.tensors, found, strict=True)) == dict.fromkeys(plan.tensors, 0) | {
        "q": q.data_ptr(),
        "seed": 7,
    }
