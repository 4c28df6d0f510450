"""The documents are true: code blocks run, generated tables are current, files that are mentioned exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pages.generated import marks, replace_between
from strobe.tools import support

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, in one namespace, as a reader would type them."""
    namespace: dict[str, object] = {}
    for code in blocks(README, "python"):
        assert "help(" not in code, "waits for a key on a terminal"
        exec(compile(code, str(README), "exec"), namespace)
    assert tuple(namespace["out"].shape) == (2, 1024, 8, 64) and bool(namespace["out"].isfinite().all())
    assert tuple(namespace["lse"].shape) == (2, 8, 1024)
    assert "runs on" in capsys.readouterr().out


def test_the_example_has_six_lines() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line]
    assert len(lines) <= 6


def test_support_table_differs_between_backends() -> None:
    """A table of ticks only would mean that nobody was asked."""
    cells = {name: support.answers(name) for name in ("sm80", "aten_cpu", "tiled", "emulator")}
    assert support.NO not in cells["tiled"].values()
    assert cells["sm80"]["float64"] == support.NO and cells["sm80"]["float16, bfloat16"] == support.YES
    assert cells["aten_cpu"]["sinks"] == support.NO
    assert [cells[name]["devices"] for name in ("sm80", "emulator", "aten_cpu")] == ["CUDA", "CPU", "CPU"]


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="support table"):
        replace_between("# no table here", *marks("support table"), "a table")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_exist(document: Path) -> None:
    """Whatever stands in backticks and looks like a file or a directory of ours, and every relative link."""
    text = document.read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    tops = {p.name for p in ROOT.iterdir()}
    paths = [
        q for q in quoted if re.fullmatch(r"[\w./-]+", q) and (q.split("/")[0] in tops and not q.startswith(".venv"))
    ]
    gone = [p for p in paths if not (ROOT / p).exists()] + [t for t in links if not target(document, t).exists()]
    assert gone == []


def target(document: Path, link: str) -> Path:
    """The site has copies of the notebooks among its pages, which are made when it is built."""
    where = document.parent / link
    return ROOT / "notebooks" / where.name if where.parent == ROOT / "docs" / "notebooks" else where


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_and_commands_exist(document: Path) -> None:
    from strobe.tools import cli

    text = document.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    named = (command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback)
    commands = {name.replace("_", "-") for name in named} | {group.name for group in cli.app.registered_groups}
    assert set(re.findall(r"`strobe ([a-z-]+)", text)) <= commands
