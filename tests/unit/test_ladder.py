"""The ladder as a text: one idea a file, headers that say what and why, predictions, diffs, the document made from
them."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import io
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.pages import generated, ladder_chart, ladder_page
from strobe.emulator import Counters
from strobe.learn import measured
from strobe.learn.ladder import measure, rungs, show
from strobe.learn.ladder.measure import Row
from strobe.learn.ladder.rung import KERNELS, PARAMS, Rung, Shape
from strobe.measure.tolerance import Verdict
from strobe.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
every_rung = pytest.mark.parametrize("rung", rungs.RUNGS, ids=lambda rung: rung.number)


def code(rung: Rung) -> list[str]:
    return [line for line in rung.text.splitlines() if not line.startswith("//")]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_file_is_a_rung() -> None:
    assert sorted(path.name for path in KERNELS.glob("*.cu")) == sorted(rung.file for rung in rungs.RUNGS)
    assert all(rung.file.startswith(f"{rung.number}_") for rung in rungs.RUNGS)


@every_rung
def test_header_says_what_why_and_how_much(rung: Rung) -> None:
    assert list(rung.header) == ["What changed", "Why it should help", "Predicted", "Measured", "What limits it now"]
    assert all(len(text) > 20 for text in rung.header.values()), rung.header
    assert rung.predicted > 0
    assert 5 <= len(rung.title) <= 70
    before = rungs.before(rung)
    if before is not None:
        assert f"the speed of {before.number}" in rung.header["Predicted"]


@every_rung
def test_a_rung_is_short(rung: Rung) -> None:
    assert rung.text.count("\n") <= 300
    assert all(len(line) <= 120 for line in rung.text.splitlines())


STEPS = [*itertools.pairwise(rungs.FORWARD[:-1]), (rungs.get("b1"), rungs.get("b2"))]


@pytest.mark.parametrize(("old", "new"), STEPS, ids=lambda rung: rung.number)
def test_a_step_is_small(old: Rung, new: Rung) -> None:
    """A step has at most 60 lines, header and lone braces not counted. The last step of a flight is not one: it is the
    library's kernel. Nor is that to b3, which starts from 09 as much as from b2."""
    changed = difflib.unified_diff(code(old), code(new), n=0, lineterm="")
    added = [line for line in changed if line.startswith("+") and not line.startswith("+++")]
    said = [line for line in added if line.strip("+ ") not in ("", "}", "};")]
    assert 0 < len(said) <= 60, len(said)


def test_flights() -> None:
    assert (*rungs.FORWARD, *rungs.BACKWARD) == rungs.RUNGS
    assert not any(rung.backward for rung in rungs.FORWARD) and all(rung.backward for rung in rungs.BACKWARD)
    assert [flight[-1].library for flight in (rungs.FORWARD, rungs.BACKWARD)] == [
        "forward_sm90.cuh",
        "backward_sm90.cuh",
    ]
    for rung in rungs.BACKWARD:
        forward = rungs.get(rung.forward)
        assert not forward.backward and forward.dtype == rung.dtype and bool(forward.library) == bool(rung.library)


def test_swizzle_is_one_line() -> None:
    old, new = code(rungs.get("06")), code(rungs.get("07"))
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 1


@every_rung
def test_source_has_one_kernel_and_one_argument_struct(rung: Rung) -> None:
    if rung.library:
        assert f"#include <strobe/kernels/{rung.library}>" in rung.text and rung.library_kernel.is_file()
        return
    source = rung.source(64)
    assert source.count("STROBE_KERNEL(") == 1
    assert source.count(PARAMS.cpp()) == 1
    assert "kDim = 64" in source and f"kSmem = {rung.smem(64)}" in source
    assert not re.search(r"\basm\b", source.split('"ladder.cuh"')[1])


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_get() -> None:
    assert rungs.get("5") is rungs.get("05")
    with pytest.raises(ValueError, match=r"no rung '99'; there are 01, 02"):
        rungs.get("99")


def test_shape_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"dim: 80.*64 and 128"):
        Shape(1, 8, 8, 80)
    with pytest.raises(ValueError, match="len_k: 0"):
        Shape(1, 8, 0, 64)


def test_work() -> None:
    shape = Shape(slices=3, len_q=4, len_k=6, dim=64)
    assert shape.flops() == 4 * 64 * 3 * 24 and shape.flops(backward=True) == 10 * 64 * 3 * 24
    assert dataclasses.replace(shape, causal=True).pairs == 3 * (3 + 4 + 5 + 6)
    assert Shape(1, 6, 4, 64, causal=True).pairs == 0 + 0 + 1 + 2 + 3 + 4


def test_why_tiles_must_be_bigger_than_half_the_head_dim() -> None:
    """2 N^2 d / B numbers for K and V against 4 N^2 for S and P."""
    shape = Shape(slices=1, len_q=4096, len_k=4096, dim=128)
    standard = 4 * shape.len_q * shape.len_k
    once = 2 * shape.len_q * shape.dim
    five = rungs.get("05").predicted_bytes(shape)
    assert five is not None and five / 4 - once == pytest.approx(standard)  # B = 64 = d / 2: a draw
    three = rungs.get("03").predicted_bytes(shape)
    assert three is not None and three / 4 > 5 * standard  # B = 16
    assert rungs.get("05").predicted_bytes(dataclasses.replace(shape, causal=True)) is None


def test_recomputation_moves_less_than_storing() -> None:
    """The shape is the one that is timed: N x N matrices against tiles, then fewer sums of dQ with every rung."""
    found = [rung.predicted_bytes(measure.GPU_SHAPE) for rung in rungs.BACKWARD]
    assert all(b is not None for b in found)
    assert all(after < 0.8 * before for before, after in itertools.pairwise(found))  # type: ignore[operator]
    matrices = 4 * rungs.get("b0").workspace(measure.GPU_SHAPE)
    assert matrices == 2 << 30  # as its header says
    assert all(4 * rung.workspace(measure.GPU_SHAPE) < matrices / 50 for rung in rungs.BACKWARD[1:])


def rows_of(times: dict[str, float]) -> list[Row]:
    made = []
    for number, ms in times.items():
        rung = rungs.get(number)
        before = rungs.before(rung)
        against = before.number if before else None
        made.append(
            Row(number, rung.title, "float32", against, rung.predicted, 1e6, Verdict("o", 1e-7, 1e-6), ms, 3, 10 / ms)
        )
    return made


def test_speed_ups_compare_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(slices=1, len_q=64, len_k=64, dim=64)
    found = {row.number: row for row in rows_of({"04": 8.0, "05": 2.0, "b1": 10.0})}
    monkeypatch.setattr(measure, "build_all", lambda *a: None)
    monkeypatch.setattr(measure, "_count", lambda rung, shape: found[rung.number])
    rows = measure.run(shape, [rungs.get(n) for n in found], torch.device("cpu"))
    assert [row.speed_up for row in rows] == [
        None,
        4.0,
        pytest.approx(0.5),
    ]  # b1: 2.5 times the work in 5 times the time


def test_a_rung_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("an illegal instruction\nmore")

    monkeypatch.setattr(measure.execute, "cannot_run", lambda rung, device: "no wgmma" if rung.hopper else None)
    monkeypatch.setattr(measure.execute, "make", explode)
    monkeypatch.setattr(measure, "build_all", lambda *a: None)
    failed, impossible = measure.run(Shape(1, 8, 8, 64), [rungs.get("05"), rungs.get("12")], torch.device("cuda"))
    assert (failed.skipped, failed.failed, failed.passed) == ("an illegal instruction", True, False)
    assert (impossible.skipped, impossible.failed) == ("no wgmma", False)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def shown(rows: list[Row]) -> str:
    console = Console(file=io.StringIO(), width=140)
    show.show(rows, Shape(1, 64, 64, 64), "a GPU", console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_times_stand_beside_predictions() -> None:
    rows = rows_of({"04": 8.0, "05": 2.0})
    rows[1].speed_up = 4.0
    text = shown(rows)
    assert "8.000 ms" in text and "x 4.00" in text and "x 8" in text and "█" in text


def test_without_a_gpu_measurements_of_another_machine_stand_beside_the_counts() -> None:
    text = " ".join(shown([counted("05")]).split())
    known = next(r for r in measured.load()["ladder"]["rungs"] if r["number"] == "05")
    assert f"x {known['speed_up']:.2f}" in text and f"{known['tflops']:.3g}" in text and "x 8" in text
    assert "not here, but on an NVIDIA H200" in text and "benchmarks/results/h200/ladder.json" in text


def counted(number: str) -> Row:
    (row,) = rows_of({number: 1.0})
    row.ms = row.tflops = None
    row.counters = dict.fromkeys((f.name for f in dataclasses.fields(Counters)), 7)
    return row


def test_flights_have_headings_and_what_was_not_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy.deepcopy(measured.load())
    found["ladder"]["rungs"] = [r for r in found["ladder"]["rungs"] if r["number"] not in ("b2", "b4")]
    monkeypatch.setattr(measured, "load", lambda: found)
    text = " ".join(shown([counted(n) for n in ("05", "b2", "b4")]).split())
    forward, gradient = text.index("The forward pass: O and the LSE"), text.index("The gradient: dQ, dK and dV")
    assert forward < text.index("│ 05 │") < gradient < text.index("│ b2 │") < text.index("│ b4 │")
    assert text.count("not yet") == 2
    assert "The gradient" not in shown([counted("05")])


def test_an_interrupted_run_shows_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(rung: Rung, shape: Shape) -> Row:
        if rung.number == "02":
            raise KeyboardInterrupt
        (row,) = rows_of({rung.number: 1.0})
        return row

    monkeypatch.setattr(measure, "build_all", lambda *a: None)
    monkeypatch.setattr(measure, "_count", count)
    result = CliRunner().invoke(app, ["ladder", "--device", "cpu", "--rung", "01", "--rung", "02", "--rung", "03"])
    assert result.exit_code == 1
    assert "interrupted: 1 of 3 rungs are shown; not run: 02, 03" in result.output and "1.000 ms" in result.output


def test_a_wrong_rung_and_one_that_cannot_run_are_said() -> None:
    wrong, missing = rows_of({"04": 8.0, "12": 1.0})
    wrong.error = Verdict("o", float("nan"), 1e-6)
    missing.error = missing.ms = missing.tflops = None
    missing.skipped = "wgmma exists on Hopper alone"
    text = shown([wrong, missing])
    assert "04 is wrong: o: error nan, allowed 1.000e-06" in text and "12 not run: wgmma exists on Hopper alone" in text


def test_diff_command() -> None:
    result = CliRunner().invoke(app, ["ladder", "diff", "04", "5"])
    assert result.exit_code == 0, result.output
    assert "What changed:" in result.output and "the loops are swapped" in result.output
    assert "--- 04_bigger_tiles.cu" in result.output and "+++ 05_queries_outside.cu" in result.output
    against_library = CliRunner().invoke(app, ["ladder", "diff", "12", "13"])
    assert (
        "+template <class Config, class Mask, class Score, class Params> struct ForwardSm90" in against_library.output
    )
    backward = CliRunner().invoke(app, ["ladder", "diff", "b3", "b4"])
    assert "+template <class Config, class Mask, class Score, class Params> struct BackwardSm90" in backward.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rung", "99"], "no rung '99'"), (["--head-dim", "80"], "64 and 128"), (["diff", "04", "xx"], "no rung 'xx'")],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["ladder", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(re.sub(r"[│╭╰╮╯─]", " ", result.output).split())


# ---- the document ----------------------------------------------------------------------------------------------------


def test_documents_are_up_to_date() -> None:
    assert generated.outdated(ladder_page.texts(ROOT)) == {}, "run `make docs`"
    assert len(ladder_page.headers(ROOT)) == len(ladder_page.pages(ROOT)) == len(rungs.RUNGS)


@every_rung
def test_a_page_has_the_header_the_diff_and_the_file(rung: Rung) -> None:
    text = (ROOT / "docs" / "ladder" / f"{rung.number}.md").read_text(encoding="utf-8")
    assert text.count("**") == 2 * len(rung.header)
    (included,) = re.findall(r"literalinclude\} (\S+)", text)
    assert (ROOT / "docs" / "ladder" / included).is_file()
    before = rungs.before(rung)
    drawn = ladder_page.with_diffs(text)
    if rung.library or before is None:
        assert drawn == text
        return
    diff = re.search(r"````diff\n(.*?)````", drawn, re.DOTALL)
    assert diff and diff[1].startswith(f"--- {before.file}\n+++ {rung.file}\n@@") and "What changed" not in diff[1]
    assert show.unified(before, rung).count("\n") > diff[1].count("\n")


def test_the_figure_has_every_measurement_and_prediction() -> None:
    found = ladder_page.measurements(ROOT)["h200"]
    drawn = (ROOT / ladder_page.FIGURE).read_text(encoding="utf-8")
    for row in found["rungs"]:
        assert f"{row['number']}  {row['title']}".replace("'", "&apos;") in drawn.replace("'", "&apos;")
        assert f">{row['tflops']:.3g}<" in drawn, "make docs"
    assert found["provenance"]["device"]["name"] in drawn
    second = found["rungs"][1]
    assert ladder_chart.predicted_rate(second, found["rungs"]) == second["predicted"] * found["rungs"][0]["tflops"]
    assert ladder_chart.predicted_rate(found["rungs"][0], found["rungs"]) is None
    complete = ladder_page.completed(found)
    for row in complete["rungs"]:
        assert f"{row['number']}  {row['title']}".replace("'", "&apos;") in drawn.replace("'", "&apos;")
    assert drawn.count(">not measured yet<") == sum(row["tflops"] is None for row in complete["rungs"])
    assert ">Forward<" in drawn and ">Gradient<" in drawn
    again = ladder_chart.svg(complete)
    assert set(re.findall(r">([\d.]+)<", again)) == set(re.findall(r">([\d.]+)<", drawn))


def test_a_prediction_may_build_on_a_prediction() -> None:
    rows = [
        {"number": "b2", "against": None, "predicted": 1.3, "tflops": 10.0},
        {"number": "b3", "against": "b2", "predicted": 7.0, "tflops": None},
        {"number": "b4", "against": "b3", "predicted": 5.0, "tflops": None},
    ]
    assert ladder_chart.predicted_rate(rows[2], rows) == 5 * 7 * 10.0
    rows[1]["tflops"] = 80.0
    assert ladder_chart.predicted_rate(rows[2], rows) == 5 * 80.0


def test_a_measurement_takes_the_place_of_the_last_one() -> None:
    text = "// 01  Title\n//\n// Predicted: x 2.\n//   Because.\n// What limits it now: time.\n"
    row = {"number": "01", "ms": 1.0, "tflops": 5.111, "speed_up": 1.5}
    first = ladder_page.with_measurement(text, row, "A GPU")
    assert "//   Because.\n// Measured: x 1.50, 5.11 TFLOP/s (A GPU; docs/ladder.md says how)\n// What limits" in first
    assert ladder_page.with_measurement(first, row, "A GPU") == first
    missing = ladder_page.with_measurement(first, row | {"ms": None}, "A GPU")
    assert "// Measured: not yet; `strobe ladder` measures it on a GPU\n// What limits" in missing
    assert ladder_page.with_measurement(missing, row, "A GPU") == first
    assert "Measured: 5.11" in ladder_page.with_measurement(first, row | {"speed_up": None}, "A GPU")


def test_document_has_measurements_beside_predictions(tmp_path: Path) -> None:
    rows = rows_of({"04": 8.0, "05": 2.0})
    rows[1].speed_up = 4.0
    written = measure.as_json(Shape(16, 4096, 4096, 128), rows, torch.device("cpu"))
    folder = tmp_path / "benchmarks" / "results" / "h200"
    folder.mkdir(parents=True)
    (folder / "ladder.json").write_text(json.dumps(written), encoding="utf-8")
    block = ladder_page.block(tmp_path)
    title = "FlashAttention-2: queries outside, one division at the end"
    assert f"| [05](ladder/05.md) | {title} | 2.000 ms | 5 | x 4.00 | x 8 |" in block
    assert "`benchmarks/results/h200/ladder.json`" in block and "No measurements" not in block
    assert (
        "| [b2](ladder/b2.md) | One pass: five products, dQ by atomic sums | not measured yet |  |  | x 1.3 |" in block
    )
    assert block.count("| rung |") == 2 and "not run" not in block
    assert "- [b1 The backward pass, by recomputation](ladder/b1.md)" in ladder_page.block(tmp_path / "empty")
