"""The numbers in the documents are those of the committed results, and say no more than they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_results import synthetic

from strobe.bench import docs, figure, results as files

ROOT = Path(__file__).resolve().parents[2]


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
    assert "faster" not in text and "times as" not in text and "|" not in text
    assert docs.main([], tmp_path) == 0


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks" / "results" / "made-up"
    files.save(synthetic(("grid36",)), folder / "grid36.json")
    files.save(synthetic(("grid36",), seed=3), folder / "grid36-again.json")
    files.save(synthetic(("sweep", "overhead")), folder / "sweep.json")
    (tmp_path / "README.md").write_text(f"{docs.BEGIN}\n{docs.END}\n")
    assert docs.main([], tmp_path) == 1, "out of date before it is written"
    assert docs.main(["--write"], tmp_path) == 0
    return tmp_path


def test_the_page_states_what_the_rows_show(written: Path) -> None:
    text = (written / "docs" / "results.md").read_text()
    assert "`strobe-sm90` is 1.1" in text and "as fast as `torch-cudnn` (geometric mean of 36 cells" in text
    assert "| 32K |" in text and "*oom*" in text
    assert "| `strobe-sm90` | ours | 1.00 |" in text and "| `torch-math` | standard | 2.00 |" in text
    assert "`strobe-sm80` is 0.5" in text and "slower in 36" in text
    assert "was run twice: " in text and "What one call costs the CPU" in text
    assert "- not installed: flash-attn 3 is not installed: `flash-attn-3`" in text


def test_the_readme_has_the_grid(written: Path) -> None:
    text = (written / "README.md").read_text()
    assert text.count("| 128, causal |") == 1 and "docs/figures/made-up-grid36" in text
    drawn = (written / "docs" / "figures" / "made-up-grid36.svg").read_text()
    assert drawn.count("<circle") > 36 and "head dim 256, causal" in drawn


def test_a_changed_number_is_noticed(written: Path) -> None:
    page = written / "docs" / "results.md"
    page.write_text(page.read_text().replace("1.00", "0.90"))
    assert docs.outdated(written) == [page] and docs.main([], written) == 1


def test_figures_depend_on_numbers_only() -> None:
    assert figure.speed(synthetic(("grid36",)), "grid36") == figure.speed(synthetic(("grid36",)), "grid36")
    assert figure.speed(synthetic(("grid36",)), "sweep") is None
