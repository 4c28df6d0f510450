"""The numbers in the documents are those of the committed results, and say no more than they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench_results import synthetic

from benchmarks import committed
from benchmarks.pages import comparisons, documents, figures
from strobe.bench import anchors, claims, results as files
from strobe.bench.figures import unavailable
from strobe.bench.report.page import page_data
from strobe.measure import units
from strobe.measure.method import DO_BENCH, SUSTAINED, TURNS

ROOT = Path(__file__).resolve().parents[2]
needs_matplotlib = pytest.mark.skipif(unavailable() is not None, reason="needs matplotlib")


def test_documents_are_current() -> None:
    late = [str(path.relative_to(ROOT)) for path in documents.outdated(ROOT)]
    assert late == [], "run `make docs`"


def test_committed_results_are_readable() -> None:
    for machine, found in committed.runs(ROOT).items():
        for name, run in found.items():
            assert run.rows, f"{machine}/{name} has no rows"
            assert all(row.timed or row.reason for row in run.rows), f"{machine}/{name}: a row without time and reason"


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    blocks = ((documents.NUMBERS_BEGIN, documents.NUMBERS_END), (documents.BEGIN, documents.END))
    (tmp_path / "README.md").write_text("".join(f"before\n{begin}\nold claims\n{end}\n" for begin, end in blocks))
    assert documents.main(["--write"], tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == "".join(f"before\n{begin}\n{end}\n" for begin, end in blocks)
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "faster" not in text and "×" not in text and "|" not in text
    assert documents.main([], tmp_path) == 0


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
    blocks = (documents.NUMBERS_BEGIN, documents.NUMBERS_END, documents.BEGIN, documents.END)
    (root / "README.md").write_text("\n".join(blocks) + "\n")
    assert documents.main(["--write"], root) == 0
    return root


def mean(run: files.Results, ours: str, direction: str = "forward", method: str = TURNS) -> str:
    found = comparisons.mean_ratio(comparisons.ratios(run, "grid36", ours, "torch-cudnn", direction, method))
    assert found is not None
    return units.faster(found)


@needs_matplotlib
def test_the_page_states_what_the_rows_show(written: Path) -> None:
    text = (written / "docs" / "results.md").read_text()
    run = committed.runs(written)["made-up"]["grid36"]
    for ours in ("strobe-sm90", "strobe-sm80"):
        assert re.search(rf"`{ours}`[^\n]*{re.escape(mean(run, ours))}[^\n]*`torch-cudnn`", text), ours
    assert "| 32K |" in text and "*oom*" in text and "`flash-attn-3`" in text
    assert "| `strobe-sm90` | ours | 1.00 |" in text and "| `torch-math` | standard | 2.00 |" in text


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
    again = "grid36-sustained"
    first, second = (committed.runs(written)["made-up"][name] for name in (again, f"{again}-again"))
    close, of = comparisons.ratio_repeatability(first, second, "grid36", "strobe-sm90", "torch-cudnn")
    assert re.search(rf"`{again}`[^\n]* {close} of {of} ratios", text)


@needs_matplotlib
def test_the_readme_has_three_numbers_one_table_and_one_figure(written: Path) -> None:
    text = (written / "README.md").read_text()
    numbers = text.partition(documents.NUMBERS_BEGIN)[2].partition(documents.NUMBERS_END)[0]
    runs = committed.runs(written)["made-up"]
    for name, direction, method in (
        ("grid36", "forward", TURNS),
        ("grid36-sustained", "forward", SUSTAINED),
        ("grid36-backward", "backward", TURNS),
        ("grid36-backward-sustained", "backward", SUSTAINED),
    ):
        assert f"{mean(runs[name], 'strobe-sm90', direction, method)} {direction}" in numbers, name
    assert numbers.count("\n- ") == 3
    assert text.count("| 128, causal |") == 1 and re.findall(r"!\[.*?\]\((.*?)\)", text) == [
        "docs/figures/made-up-grid36.svg"
    ]
    page = (written / "docs" / "results.md").read_text()  # which has the tables that README has not
    for direction, tables in (("forward", 4), ("backward", 2), ("forward and backward", 1)):
        assert len(re.findall(rf"TFLOP/s [a-z ]+, {direction}, bfloat16", page)) == tables, direction
    assert "docs/results.md" in text and "figures/made-up-grid36-backward.svg" in page


@needs_matplotlib
def test_who_is_fastest_is_said_of_what_ran_together(written: Path) -> None:
    """Every "fastest" names whom it was among."""
    for document in ("README.md", "docs/results.md"):
        for sentence in re.findall(r"[^\n.]*fastest (?:other|standard)[^\n]*", (written / document).read_text()):
            assert re.search(r"that ran beside it \(of [\w, -]+(; mostly [\w-]+)?\)", sentence), sentence
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
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "The runs were not the same" in page and "| FlashAttention-3 | 1.057 | 1.145 |" in page


def test_ours_stands_beside_the_anchors_by_the_same_method_only(tmp_path: Path) -> None:
    elsewhere = committed.anchors(ROOT)["h200"]
    turns, ours = synthetic(("grid36",)), synthetic(("grid36",), methods=(DO_BENCH,))
    assert not [line for line in anchors.comparison(elsewhere, turns.rows) if line.ahead]
    line = next(line for line in anchors.comparison(elsewhere, ours.rows) if line.title == "strobe-sm90")
    ratios = comparisons.ratios(ours, "grid36", "strobe-sm90", "torch-cudnn", "forward", DO_BENCH)
    assert line.means == {"forward": pytest.approx(comparisons.mean_ratio(ratios))}
    best = elsewhere.over_base("forward")[anchors.BEST]
    cells = {
        (c.case.dim, c.case.mask.name, c.case.len_k): ratios[c.case.key] for c in ours.rows if c.case.key in ratios
    }
    assert line.ahead == {"forward": (sum(cells[cell] > best[cell] for cell in cells), 36)}
    report = page_data([ours], elsewhere)["anchors"]
    shown = next(found for found in report["lines"] if found["title"] == "strobe-sm90")
    assert "The runs were not the same" in report["note"]
    assert shown["forward"].startswith(f"{line.means['forward']:.3f} (ahead") and shown["backward"] == "–"


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "strobe anchors", "schema": 2}', "not JSON"])
def test_what_are_no_anchors(text: str, tmp_path: Path) -> None:
    path = tmp_path / "anchors.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"anchors\.json: not a file of anchors"):
        anchors.load(path)


@needs_matplotlib
def test_figures_of_every_method_and_pass(written: Path) -> None:
    names = sorted(path.name for path in (written / "docs" / "figures").iterdir())
    of = ("-backward-sustained", "-backward", "-both", "-sustained", "")
    assert names == sorted(f"made-up-grid36{name}.svg" for name in of)
    backward = (written / "docs" / "figures" / "made-up-grid36-backward.svg").read_text()
    assert "head dim 64, causal, backward" in backward
    shown = (written / "docs" / "figures" / "made-up-grid36.svg").read_text()
    assert "head dim 256, causal" in shown and "strobe-sm90" in shown and "in short turns" in shown
    page = (written / "docs" / "results.md").read_text()
    assert all(f"figures/{name}" in page for name in names)


@needs_matplotlib
def test_a_changed_number_is_noticed(written: Path) -> None:
    page = written / "docs" / "results.md"
    before = page.read_text()
    try:
        page.write_text(before.replace("1.00", "0.90"))
        assert documents.outdated(written) == [page] and documents.main([], written) == 1
    finally:
        page.write_text(before)


@needs_matplotlib
def test_an_old_figure_is_noticed(written: Path) -> None:
    """By the numbers in it; how matplotlib draws them is its own business."""
    figure = written / "docs" / "figures" / "made-up-grid36.svg"
    before = figure.read_text()
    try:
        figure.write_text(before.replace("stroke", "stroke "))
        assert documents.main([], written) == 0
        figure.write_text(before.replace("strobe figure ", "strobe figure 0"))
        stray = figure.with_name("made-up-nobody.svg")
        stray.write_text("<svg/>")
        figure.with_name("nobody.svg").write_text("<svg/>")  # of no machine: not drawn from results
        assert documents.outdated(written) == [figure, stray]
        assert documents.main(["--write"], written) == 0 and not stray.exists() and figure.read_text() == before
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
    training, cut = (committed.study(ROOT, name) for name in ("training", "cut"))
    assert training and cut
    (short,) = (row["forward"] for row in training["rows"] if row["what"] == "context parallel")
    (limit,) = {f"{x:.2f}" for x in cut["speed"]}
    text = " ".join((ROOT / "docs/context-parallel.md").read_text(encoding="utf-8").split())
    assert f"{short:.2f} of the speed" in text and f"{limit} at the power limit" in text
