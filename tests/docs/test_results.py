"""The numbers in the documents are those of the committed results, and say no more than they do."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from bench_results import synthetic

from benchmarks import anchors, committed
from benchmarks.pages import documents, figures
from benchmarks.pages.generated import marks
from benchmarks.pages.tables import table
from strobe.bench import claims, results as files
from strobe.measure.method import DO_BENCH, SUSTAINED, TURNS
from strobe.measure.statistics import geometric_mean

ROOT = Path(__file__).resolve().parents[2]
needs_matplotlib = pytest.mark.skipif(figures.unavailable() is not None, reason="needs matplotlib")


def test_documents_are_current() -> None:
    late = [str(path.relative_to(ROOT)) for path in documents.outdated(ROOT)]
    assert late == [], "run `make docs`"


def test_committed_results_are_readable() -> None:
    for machine, found in committed.runs(ROOT).items():
        for name, run in found.items():
            assert run.rows, f"{machine}/{name} has no rows"
            assert all(row.timed or row.reason for row in run.rows), f"{machine}/{name}: a row without time and reason"


def test_a_table_keeps_the_order_of_its_cells() -> None:
    cells = [("b", "x", "1"), ("a", "y", "2"), ("b", "y", "3")]
    assert table("c", cells) == ["| c | x | y |", "|---|---|---|", "| b | 1 | 3 |", "| a | – | 2 |"]


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    blocks = [marks(name) for name in ("numbers", "results")]
    (tmp_path / "README.md").write_text("".join(f"{begin}\nold claims\n{end}\n" for begin, end in [*blocks, _SUPPORT]))
    assert documents.main(["--write"], tmp_path) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("".join(f"{begin}\n{end}\n" for begin, end in blocks)) and "old claims" not in text
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "faster" not in text and "×" not in text and "|" not in text
    assert documents.main([], tmp_path) == 0


_SUPPORT = marks("support table")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("documents")
    for name, run in {
        "grid36": synthetic(("grid36",)),
        "grid36-backward": synthetic(("grid36",), direction="backward"),
        "grid36-sustained": synthetic(("grid36",), methods=(SUSTAINED,)),
        "grid36-sustained-again": synthetic(("grid36",), methods=(SUSTAINED,), seed=3),
        "models-both": synthetic(("models",), direction="both"),
        "sweep": synthetic(("sweep", "overhead")),
    }.items():
        files.save(run, root / "benchmarks" / "results" / "made-up" / f"{name}.json")
    (root / "README.md").write_text("\n".join([*marks("numbers"), *marks("results"), *_SUPPORT]) + "\n")
    assert documents.main(["--write"], root) == 0
    return root


def over_ours(run: files.Results, provider: str) -> float:
    """Time over that of our fastest, geometric mean."""
    cases = claims.selected(run.rows, "grid36", method=run.methods()[0]).values()
    pairs = [(claims.fastest(rows, "ours"), next(r for r in rows if r.provider == provider)) for rows in cases]
    return geometric_mean([other.ms / ours.ms for ours, other in pairs if ours and ours.ms and other.ms])


@needs_matplotlib
def test_the_page_states_what_the_rows_show(written: Path) -> None:
    text = (written / "docs" / "results.md").read_text()
    runs = committed.runs(written)["made-up"]
    for name, title in (("grid36", "in short turns"), ("grid36-sustained", "sustained")):
        section = text.split(f"### `grid36`, forward, {title} (`{name}`)")[1].split("###")[0]
        lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
        means = next(line for line in lines if line[0].startswith("time over our fastest"))
        shown = {head.strip("`"): text for head, text in zip(lines[0], means, strict=True)}
        for provider in ("torch-cudnn", "torch-math-half"):
            assert float(shown[provider]) == pytest.approx(over_ours(runs[name], provider), abs=0.006)
    row = runs["grid36"].find("strobe-sm90", "grid36/d128-causal-4k/bfloat16/forward")
    assert row is not None and f"| d128-causal-4k | {row.tflops:.3g} |" in text
    assert text.count("joules per TFLOP (NVML energy counter)") == 2 and "*oom*" in text and "`flash-attn-3`" in text
    assert "### `llama`, forward and backward, in short turns (`models-both`): tokens/s" in text
    assert re.search(r"- `grid36-sustained-again`: \d+ of \d+ times differ from the first run's by at most 3 %", text)


def test_who_is_fastest_is_said_of_what_ran_together() -> None:
    first, second = synthetic(("grid36",)), synthetic(("grid36",))
    first.rows = [row for row in first.rows if row.kind != "standard"]
    second.rows = [row for row in second.rows if row.kind == "standard"]
    whole = claims.merged([first, second])
    assert claims.duels(claims.selected(whole.rows, "grid36"), "peer")
    assert not claims.duels(claims.selected(whole.rows, "grid36"), "standard"), "it ran without ours"


# ---- what others reached in other runs


def test_the_committed_anchors_give_the_known_means() -> None:
    elsewhere = committed.anchors(ROOT)["h200"]
    found = {line.title: line.means for line in anchors.comparison(elsewhere, [])}
    known = {"FlashAttention-3": (1.057, 1.145), "FlashAttention-4": (0.983, 1.086), anchors.BEST: (1.083, 1.161)}
    for title, means in known.items():
        assert tuple(round(found[title][d], 3) for d in ("forward", "backward")) == means, title
    assert len(elsewhere.tflops["forward"]) == len(elsewhere.tflops["backward"]) == 36


def test_ours_stands_beside_the_anchors_by_the_same_method_only() -> None:
    elsewhere = committed.anchors(ROOT)["h200"]
    turns, ours = synthetic(("grid36",)), synthetic(("grid36",), methods=(DO_BENCH,))
    assert not [line for line in anchors.comparison(elsewhere, turns.rows) if line.ahead]
    line = next(line for line in anchors.comparison(elsewhere, ours.rows) if line.title == "strobe-sm90")
    ms = {(row.case.dim, row.case.mask.name, row.case.len_k, row.provider): row.ms for row in ours.rows if row.ms}
    ratios = {cell[:3]: ms[(*cell[:3], "torch-cudnn")] / t for cell, t in ms.items() if cell[3] == "strobe-sm90"}
    assert line.means == {"forward": pytest.approx(geometric_mean(list(ratios.values())))}
    best = elsewhere.over_base("forward")[anchors.BEST]
    assert line.ahead == {"forward": (sum(ratio > best[cell] for cell, ratio in ratios.items()), 36)}


# ---- what is out of date


@needs_matplotlib
def test_a_changed_number_and_an_old_figure_are_noticed(written: Path) -> None:
    """A figure by the numbers in it; how matplotlib draws them is its own business."""
    page, figure = written / "docs" / "results.md", written / "docs" / "figures" / "made-up-grid36.svg"
    text, drawn = page.read_text(), figure.read_text()
    page.write_text(text.replace("1.00", "0.90"))
    assert documents.outdated(written) == [page] and documents.main([], written) == 1
    page.write_text(text)
    figure.write_text(drawn.replace("stroke", "stroke "))
    assert documents.main([], written) == 0
    figure.write_text(drawn.replace("strobe figure ", "strobe figure 0"))
    stray = figure.with_name("made-up-nobody.svg")
    stray.write_text("<svg/>")
    figure.with_name("nobody.svg").write_text("<svg/>")  # of no machine: not drawn from results
    assert documents.outdated(written) == [figure, stray]
    assert documents.main(["--write"], written) == 0 and not stray.exists() and figure.read_text() == drawn


def test_a_digest_depends_on_the_numbers() -> None:
    first, same, other = (figures.speed(synthetic(("grid36",), seed=seed), "grid36") for seed in (0, 0, 1))
    assert first is not None and same is not None and other is not None
    assert first.digest == same.digest != other.digest
    for absent in ({"suite": "sweep"}, {"method": SUSTAINED}, {"direction": "backward", "method": TURNS}):
        assert figures.speed(synthetic(("grid36",)), **{"suite": "grid36", **absent}) is None


# ---- numbers in sentences


def study(name: str) -> dict[str, Any]:
    return json.loads((ROOT / committed.RESULTS / "studies" / f"{name}.json").read_text(encoding="utf-8"))


def test_cutting_and_a_fixed_order_cost_what_the_pages_say() -> None:
    rows, cut = study("training")["rows"], study("cut")
    (short,) = (row["forward"] for row in rows if row["what"] == "context parallel")
    (limit,) = {f"{x:.2f}" for x in cut["speed"]}
    text = " ".join((ROOT / "docs/context-parallel.md").read_text(encoding="utf-8").split())
    assert f"{short:.2f} of the speed" in text and f"{limit} at the power limit" in text
    slower = 1 - min(r["ms"]["plain"] / r["ms"]["deterministic"] for r in rows if "deterministic" in r.get("ms", ()))
    assert f"up to {math.ceil(100 * slower)} %" in (ROOT / "docs/use.md").read_text(encoding="utf-8")
