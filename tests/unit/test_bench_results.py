"""Files of results, comparisons, the command line on them, figures, clocks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from bench_results import synthetic
from typer.testing import CliRunner

from strobe.bench import ceilings, claims, plots, results as files
from strobe.bench.compare import comparable, compare, other_company
from strobe.bench.report import page
from strobe.bench.results import Results
from strobe.measure import clocks, provenance
from strobe.measure.clocks import Monitor, Sample
from strobe.tools import cli

SMALL = ("sweep", "tiles")


def terminal(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, list(arguments))
    return done.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", done.output)


@pytest.fixture(scope="module")
def made() -> Results:
    return synthetic(SMALL)


def test_a_file_holds_everything(made: Results, tmp_path: Path) -> None:
    path = tmp_path / "a" / "r.json"
    files.save(made, path)
    again = files.load(path)
    assert [(r.case, r.provider, r.status, r.reason, r.kernels) for r in again.rows] == [
        (r.case, r.provider, r.status, r.reason, r.kernels) for r in made.rows
    ]
    for before, after in zip(made.rows, again.rows, strict=True):
        assert (before.timing is None) == (after.timing is None)
        if before.timing is not None and after.timing is not None:
            assert after.timing.summary.median == pytest.approx(before.timing.summary.median, rel=1e-5)
            assert len(after.timing.samples_ms) == len(before.timing.samples_ms)
    assert again.provenance == made.provenance and not list(tmp_path.glob("a/.tmp*"))


def test_not_a_number_survives(tmp_path: Path) -> None:
    """JSON has no NaN, and results that are wrong have little else."""
    run = synthetic(("tiles",))
    row = run.rows[0]
    row.status, row.reason, row.timing = "wrong", "NaN", None
    row.error = files.Error(float("nan"), float("nan"), 1.0, 1.0, "every head")
    files.save(run, tmp_path / "r.json")
    json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = files.load(tmp_path / "r.json").rows[0]
    assert again.error is not None and not again.error.passed
    assert "Attention on" in page.html([run])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "strobe bench", "schema": 99}'])
def test_other_files_are_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="other.json"):
        files.load(path)


def test_regressions_are_found_and_noise_is_not(made: Results) -> None:
    same = compare(made, synthetic(SMALL, seed=5))
    assert not any(c.bad for c in same)
    slower = compare(made, synthetic(SMALL, faster=0.9, seed=5))
    assert {c.provider for c in slower if c.kind == "regression"} == {"strobe-sm90", "strobe-sm80"}
    faster = compare(made, synthetic(SMALL, faster=1.2, seed=5))
    assert any(c.kind == "improvement" for c in faster) and not any(c.bad for c in faster)


def test_what_stops_working_is_a_regression(made: Results) -> None:
    now = synthetic(SMALL)
    row = next(r for r in now.rows if r.provider == "strobe-sm90")
    row.status, row.reason, row.timing = "failed", "broken", None
    bad = [c for c in compare(made, now) if c.bad]
    assert [(c.provider, c.kind) for c in bad] == [("strobe-sm90", "broken")]


def test_the_command_exits_accordingly(made: Results, tmp_path: Path) -> None:
    for name, run in (("old", made), ("same", synthetic(SMALL, seed=9)), ("slow", synthetic(SMALL, faster=0.8))):
        files.save(run, tmp_path / f"{name}.json")
    old, same, slow = (str(tmp_path / f"{name}.json") for name in ("old", "same", "slow"))
    assert terminal("bench", "--result", same, "--compare", old)[0] == 0
    code, output = terminal("bench", "--result", slow, "--compare", old)
    assert code == 1 and "regression" in output and "strobe-sm90" in output
    other = synthetic(SMALL)
    other.provenance["device"] = {**other.provenance["device"], "name": "Another GPU"}
    files.save(other, tmp_path / "other.json")
    code, output = terminal("bench", "--result", str(tmp_path / "other.json"), "--compare", old)
    assert code == 2 and "different devices" in " ".join(output.split()) and comparable(made, other) is not None


def test_other_providers_in_turn_are_noted(made: Results, tmp_path: Path) -> None:
    """On a GPU, whose clock follows what ran before."""
    fewer = synthetic(SMALL)
    fewer.rows = [row for row in fewer.rows if row.provider != "torch-cudnn"]
    assert other_company(made, made) is None and "torch-cudnn took turns" in str(other_company(made, fewer))
    files.save(made, tmp_path / "old.json")
    files.save(fewer, tmp_path / "fewer.json")
    code, output = terminal("bench", "--result", str(tmp_path / "fewer.json"), "--compare", str(tmp_path / "old.json"))
    assert code == 0 and "note: torch-cudnn took turns in only one" in " ".join(output.split())
    fewer.provenance["device"] = {**fewer.provenance["device"], "kind": "cpu"}
    assert other_company(made, fewer) is None


def test_the_command_names_what_is_wrong() -> None:
    code, output = terminal("bench", "--suite", "grid37", "--device", "cpu")
    assert code == 2 and "grid36" in output and "grid37" in output
    assert terminal("report", "no-such-file.json")[0] == 2
    code, output = terminal("bench", "--list", "--suite", "models")
    assert code == 0 and "models/gpt-oss-local" in output and "torch-math-half" in output


def test_the_page_is_one_file_that_asks_for_nothing(made: Results, tmp_path: Path) -> None:
    text = page.write([made, synthetic(SMALL, faster=0.9)], tmp_path).read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"'\s)<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "@import" not in text and "fetch(" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1].replace("<\\/", "</"))  # type: ignore[index]
    assert len(data["run"]["rows"]) == len(made.rows) and "samples_ms" not in text
    kinds = {change["kind"] for change in data["compared"][0]["changes"]}
    assert "regression" in kinds
    assert any(row["status"] == "out of memory" for row in data["run"]["rows"])


def test_text_from_results_cannot_break_the_page(tmp_path: Path) -> None:
    run = synthetic(("tiles",))
    run.rows[0].reason = "</script><b>&"
    run.provenance["device"] = {**run.provenance["device"], "name": "<i>GPU</i>"}
    text = page.write([run], tmp_path).read_text(encoding="utf-8")
    assert text.count("</script>") == 3 and "<title>Attention on &lt;i>GPU" in text


@pytest.mark.skipif(plots.unavailable() is not None, reason="needs matplotlib")
def test_figures(made: Results, tmp_path: Path) -> None:
    written = {path.name for path in plots.write([made], tmp_path)}
    for name in ("sweep-speed", "sweep-speed-up", "sweep-memory", "sweep-error", "sweep-roofline", "tiles-tiles"):
        assert {f"{name}.png", f"{name}.svg"} <= written
    assert all((tmp_path / name).stat().st_size > 2000 for name in written)


def test_claims(made: Results) -> None:
    exponents = claims.memory_exponents(made, "sweep")
    assert exponents["strobe-sm90"] == pytest.approx(1.0, abs=0.01) and exponents["torch-math"] == pytest.approx(
        2.0, abs=0.01
    )
    found = claims.speed_ups(made, "sweep")
    assert any(s.times is None and s.reason == "out of memory" for s in found)
    assert all(s.times > 1 for s in found if s.times is not None)
    ratio = claims.mean_ratio(claims.ratios(made, "sweep", "strobe-sm90", "torch-cudnn"))
    assert ratio is not None and 1.0 < ratio < 1.3
    assert claims.repeatability(made, made) == (sum(r.timed for r in made.rows),) * 2


# ---- clocks
# ------------------------------------------------------------------------------------------------------------


def test_clocks_without_a_gpu() -> None:
    monitor = Monitor(torch.device("cpu"))
    assert monitor.unavailable and monitor.now() is None and monitor.during([(0, 1e9)]) is None
    with monitor.paused():
        pass
    monitor.close()


def test_medians_over_intervals() -> None:
    monitor = Monitor(torch.device("cpu"))
    for second, mhz in enumerate((1000, 1900, 1800, 1700, 500)):
        monitor._samples.append(
            Sample(float(second), mhz, 100.0 + second, 50.0, ("power cap (software)",) if second == 2 else ())
        )
    seen = monitor.during([(0.5, 1.5), (1.9, 3.1)])
    assert seen is not None and (seen.sm_mhz, seen.n, seen.throttle) == (1800, 3, ["power cap (software)"])
    assert monitor.during([(10, 11)]) is None


def test_nvidia_smi_lines() -> None:
    sample = clocks.parse_smi("1755, 612.31, 56, 0x0000000000000004")
    assert (sample.sm_mhz, sample.power_w, sample.temperature_c, sample.throttle) == (
        1755,
        612.31,
        56,
        ("power cap (software)",),
    )
    assert clocks.parse_smi("[N/A], [N/A], 40, [N/A]").sm_mhz is None


def test_cycles_of_the_matrix_units() -> None:
    """132 multiprocessors at 1 GHz: 4096 FLOP each per clock, 540 672 per clock together."""
    flops = 132 * 4096 * 1_000_000
    assert ceilings.matrix_unit_use(flops, 1.0, 1000, "sm_90", "bfloat16", 132) == pytest.approx(1.0)
    assert ceilings.matrix_unit_use(flops, 2.0, 1000, "sm_90", "float16", 132) == pytest.approx(0.5)
    for unknown in (("sm_89", "bfloat16", 1000), ("sm_90", "float32", 1000), ("sm_90", "bfloat16", None)):
        arch, dtype, mhz = unknown
        assert ceilings.matrix_unit_use(flops, 1.0, mhz, arch, dtype, 132) is None


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023", "535.54.03"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)",
            "580.159.04",
        ),
        ("GCC version: 12.2.0", None),
    ],
)
def test_driver_version(line: str, version: str | None) -> None:
    assert provenance.driver_version(line) == version


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: A CPU @ 2.0GHz: fast\nmodel name\t: A CPU @ 2.0GHz: fast\n",
            "A CPU @ 2.0GHz: fast",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "a machine, implementer 0x41, part 0xd0c"),
        ("", "a machine"),
    ],
)
def test_the_name_of_a_cpu(cpuinfo: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.platform, "processor", lambda: "")
    monkeypatch.setattr(provenance.platform, "machine", lambda: "a machine")
    assert provenance.cpu_name_in(cpuinfo) == name
