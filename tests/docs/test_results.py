"""The numbers in the documents are those of the committed results, and say no more than they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench_results import synthetic

from strobe.bench import docs, figures, results as files, studies
from strobe.measure.method import SUSTAINED, TURNS

ROOT = Path(__file__).resolve().parents[2]
needs_matplotlib = pytest.mark.skipif(figures.unavailable() is not None, reason="needs matplotlib")


def test_documents_are_current() -> None:
    late = [str(path.relative_to(ROOT)) for path in docs.outdated(ROOT)]
    assert late == [], "run `make docs`"


def test_committed_results_are_readable() -> None:
    for machine, found in docs.committed(ROOT).items():
        for name, run in found.items():
            assert run.rows, f"{machine}/{name} has no rows"
            assert all(row.timed or row.reason for row in run.rows), f"{machine}/{name}: a row without time and reason"


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"before\n{docs.BEGIN}\nold claims\n{docs.END}\nafter\n")
    assert docs.main(["--write"], tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == f"before\n{docs.BEGIN}\n{docs.END}\nafter\n"
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "faster" not in text and "×" not in text and "|" not in text
    assert docs.main([], tmp_path) == 0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("documents")
    folder = root / "benchmarks" / "results" / "made-up"
    files.save(synthetic(("grid36",)), folder / "grid36.json")
    files.save(synthetic(("grid36",), seed=3), folder / "grid36-again.json")
    files.save(synthetic(("grid36",), methods=(SUSTAINED,)), folder / "grid36-sustained.json")
    files.save(synthetic(("grid36",), methods=(SUSTAINED,), seed=3), folder / "grid36-sustained-again.json")
    files.save(synthetic(("grid36",), direction="backward"), folder / "grid36-backward.json")
    files.save(
        synthetic(("grid36",), methods=(SUSTAINED,), direction="backward"), folder / "grid36-backward-sustained.json"
    )
    files.save(synthetic(("grid36",), direction="both"), folder / "grid36-both.json")
    files.save(synthetic(("gqa",), methods=(TURNS, SUSTAINED), direction="backward"), folder / "gqa-backward.json")
    files.save(synthetic(("models",), direction="both"), folder / "models-both.json")
    files.save(synthetic(("sweep",), direction="backward"), folder / "sweep-backward.json")
    files.save(synthetic(("sweep", "overhead")), folder / "sweep.json")
    (root / "README.md").write_text(f"{docs.BEGIN}\n{docs.END}\n")
    assert docs.main([], root) == 1, "out of date before it is written"
    assert docs.main(["--write"], root) == 0 and docs.main([], root) == 0
    return root


@needs_matplotlib
def test_the_page_states_what_the_rows_show(written: Path) -> None:
    text = (written / "docs" / "results.md").read_text()
    assert re.search(r"`strobe-sm90` is 1\.1\d? × faster than `torch-cudnn` \(geometric mean of 36 cells\)\.", text)
    assert re.search(r"`strobe-sm80` is 1\.\d+ × slower than `torch-cudnn` \(geometric mean of 36 cells\)", text)
    assert "times as fast" not in text and "| 32K |" in text and "*oom*" in text
    assert "| `strobe-sm90` | ours | 1.00 |" in text and "| `torch-math` | standard | 2.00 |" in text
    assert "What one call costs the CPU" in text
    assert "- not installed: flash-attn 3 is not installed: `flash-attn-3`" in text


@needs_matplotlib
def test_the_page_has_both_methods_and_passes(written: Path) -> None:
    text = (written / "docs" / "results.md").read_text()
    for heading in (
        "### The grid, forward, in short turns (`grid36`)",
        "### The grid, forward, sustained (`grid36-sustained`)",
        "### The grid, backward, in short turns (`grid36-backward`)",
        "### The grid, backward, sustained (`grid36-backward-sustained`)",
        "### The grid, forward and backward, in short turns (`grid36-both`)",
        "### Grouped heads, and few queries against a long cache, backward, in short turns (`gqa`)",
        "### Grouped heads, and few queries against a long cache, backward, sustained (`gqa`)",
        "### Shapes of models, forward and backward, in short turns (`models`)",
        "### Against standard attention: sweep, backward, in short turns",
        "### Whole models, in short turns (`llama`)",
        "### Memory: sweep, forward",
        "### Memory: sweep, backward",
    ):
        assert heading in text
    assert re.search(
        r"\| Llama 3 8B, 8 layers, training step, 2 × 4K tokens \| `model-sdpa` \| 9\d,\d{3} \| .* \| 3 GiB \| 0\.8\d \|",
        text,
    )
    grids = 3  # the run, and again, and backward
    assert text.count("Joules per TFLOP of the same providers (NVML energy counter).") == grids + 1  # gqa
    assert text.count("Joules per 1,000 tokens of the same providers (NVML energy counter).") == grids
    assert re.search(
        r"than `torch-cudnn` \(geometric mean of 36 cells\), and needs 1\.\d+ × less energy per FLOP\.", text
    )
    assert "- Backward: against the fastest other fused attention, torch-cudnn, strobe-sm90 is 1." in text
    assert "- Forward and backward: against the fastest other fused attention" in text
    assert re.search(
        r"- Backward, beyond inputs, output and gradients strobe-sm90 needs at most 0\.\d+ × the size of q", text
    )
    assert "`grid36`, in short turns, was run twice: " in text
    assert (
        "`grid36-sustained`, sustained: 36 of 36 ratios of `strobe-sm90` to `torch-cudnn` differ by at most 3 %."
        in text
    )


@needs_matplotlib
def test_the_readme_has_both_methods_in_its_headline(written: Path) -> None:
    text = (written / "README.md").read_text()
    assert re.search(
        r"- Forward: against .*, torch-cudnn, strobe-sm90 is 1\.\d+ × faster in short turns .* and 1\.\d+ × faster sustained ",
        text,
    )
    assert re.search(r"- Sustained, strobe-sm90 needs 1\.\d+ × less energy per FLOP than torch-cudnn", text)
    for direction, tables in (("forward", 3), ("backward", 3), ("forward and backward", 1)):
        parts = re.findall(rf"TFLOP/s [a-z ]+, {direction}, bfloat16", text)
        assert len(parts) == min(tables, 2), direction  # by either method; joules have a table of their own
    assert text.count("| 128, causal |") == 3 + 3 + 1
    assert "docs/figures/made-up-grid36.svg" in text and "docs/figures/made-up-grid36-backward.svg" in text
    assert "- Sustained, backward, strobe-sm90 needs 1." in text


@needs_matplotlib
def test_figures_of_every_method_and_pass(written: Path) -> None:
    names = sorted(path.name for path in (written / "docs" / "figures").iterdir())
    of = ("-backward-sustained", "-backward", "-both", "-sustained", "")
    assert names == sorted(f"made-up-grid36{name}.svg" for name in of)
    backward = (written / "docs" / "figures" / "made-up-grid36-backward.svg").read_text()
    assert "head dim 64, causal, backward" in backward
    drawn = (written / "docs" / "figures" / "made-up-grid36.svg").read_text()
    assert "head dim 256, causal" in drawn and "strobe-sm90" in drawn and "in short turns" in drawn
    page = (written / "docs" / "results.md").read_text()
    assert all(f"figures/{name}" in page for name in names)


@needs_matplotlib
def test_a_changed_number_is_noticed(written: Path) -> None:
    page = written / "docs" / "results.md"
    before = page.read_text()
    try:
        page.write_text(before.replace("1.00", "0.90"))
        assert docs.outdated(written) == [page] and docs.main([], written) == 1
    finally:
        page.write_text(before)


@needs_matplotlib
def test_an_old_figure_is_noticed(written: Path) -> None:
    """By the numbers in it; how matplotlib draws them is its own business."""
    figure = written / "docs" / "figures" / "made-up-grid36.svg"
    before = figure.read_text()
    try:
        figure.write_text(before.replace("stroke", "stroke "))
        assert docs.outdated(written) == []
        figure.write_text(before.replace("strobe figure ", "strobe figure 0"))
        assert docs.outdated(written) == [figure]
        stray = figure.with_name("made-up-nobody.svg")
        stray.write_text("<svg/>")
        figure.with_name("nobody.svg").write_text("<svg/>")  # of no machine: not drawn from results
        assert docs.outdated(written) == [figure, stray]
        assert docs.main(["--write"], written) == 0 and not stray.exists() and figure.read_text() == before
    finally:
        figure.write_text(before)


def test_a_digest_depends_on_the_numbers() -> None:
    first, same, other = (figures.speed(synthetic(("grid36",), seed=seed), "grid36") for seed in (0, 0, 1))
    assert first is not None and same is not None and other is not None
    assert first.digest == same.digest != other.digest
    assert figures.speed(synthetic(("grid36",)), "sweep") is None
    assert figures.speed(synthetic(("grid36",)), "grid36", method=SUSTAINED) is None
    assert figures.speed(synthetic(("grid36",)), "grid36", "backward", TURNS) is None


def test_cutting_costs_what_the_page_says() -> None:
    training, cut = (studies.load(ROOT, name) for name in ("training", "cut"))
    assert training and cut
    (short,) = (row["forward"] for row in training["rows"] if row["what"] == "context parallel")
    (limit,) = {f"{x:.2f}" for x in cut["speed"]}
    text = " ".join((ROOT / "docs/context-parallel.md").read_text(encoding="utf-8").split())
    assert f"have {short:.2f} of the speed of one call in turns of half a second" in text
    assert f"and {limit} at the power limit" in text
