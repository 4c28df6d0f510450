"""Both notebooks run from top to bottom, and the saved .ipynb files are what the scripts say, with outputs, alternative
text for every picture, and exercises that are the library's."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from strobe.emulator import compiler
from strobe.learn import exercises
from strobe.learn.run import gpu

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))

_spec = importlib.util.spec_from_file_location("notebooks_build", ROOT / "notebooks" / "build.py")
assert _spec and _spec.loader
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)


def saved(notebook: Path) -> nbformat.NotebookNode:
    return nbformat.read(build.saved(notebook), as_version=4)


def code(notebook: Path) -> list[str]:
    return [cell.source for cell in saved(notebook).cells if cell.cell_type == "code"]


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["01_cuda_starter", "02_flash_attention"]
    assert list(build.SCRIPTS) == NOTEBOOKS


@pytest.mark.skipif(gpu() is not None and compiler() is None, reason="needs a GPU or a C++ compiler")
@each
def test_runs_from_top_to_bottom_in_90_seconds(notebook: Path, tmp_path: Path) -> None:
    """The notebook runs as a script, which holds the checks as well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}  # tests run beside this one
    start = time.monotonic()
    command = [sys.executable, str(notebook)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 90
    assert "not yet:" in done.stdout  # the exercises' stubs were tried


@each
def test_the_saved_notebook_is_the_script(notebook: Path) -> None:
    found, wanted = saved(notebook), build.notebook(notebook)
    cells = [[(cell.id, cell.cell_type, cell.source) for cell in made.cells] for made in (found, wanted)]
    assert cells[0] == cells[1], "run `python notebooks/build.py`"
    assert (found.nbformat, found.nbformat_minor) == (4, 5) and found.metadata["colab"]["gpuType"] == "T4"
    assert found.cells[0].source.startswith("# ") and "T4" in found.cells[0].source


@each
def test_it_was_run_and_nothing_failed(notebook: Path) -> None:
    cells = [cell for cell in saved(notebook).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) > 20 and not [output for output in outputs if output.output_type == "error"]


@each
def test_every_picture_has_an_alternative_text(notebook: Path) -> None:
    shown = [o for cell in saved(notebook).cells for o in cell.get("outputs", ()) if o.output_type == "display_data"]
    kinds = [next(kind for kind in output.data if kind.startswith("image/")) for output in shown]
    assert len(shown) >= 7
    for output, kind in zip(shown, kinds, strict=True):
        alt = output.metadata[kind]["alt"]
        assert len(alt) > 20 and "\n" not in alt
    if notebook.stem.startswith("01"):
        assert "image/jpeg" in kinds, "the photograph"


def run_setup(notebook: Path, monkeypatch: pytest.MonkeyPatch, found: object) -> list[str]:
    """The set-up cell where `import strobe` would find this: what pip is asked to install."""
    asked: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(subprocess, "check_call", lambda command: asked.append(command[-1]))
    exec(compile(saved(notebook).cells[2].source, "set-up", "exec"), {})
    return asked


@each
def test_the_setup_installs_what_is_there(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[learn\]'\n.*strobe_attention-\*\.whl"):
        run_setup(notebook, monkeypatch, None)
    wheel = tmp_path / "strobe_attention-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert run_setup(notebook, monkeypatch, None) == [f"{wheel}[learn]"]
    monkeypatch.chdir(ROOT / "notebooks")
    assert run_setup(notebook, monkeypatch, None) == [f"{ROOT}[learn]"]


@each
def test_the_setup_knows_the_other_strobe(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setup does not import it: a stranger's code does not run."""
    ours = importlib.util.find_spec("strobe")
    assert run_setup(notebook, monkeypatch, ours) == []
    stranger = importlib.util.spec_from_file_location("strobe", tmp_path / "strobe" / "__init__.py")
    with pytest.raises(ImportError, match=r"strobe/__init__\.py is another project's package.*pip uninstall strobe"):
        run_setup(notebook, monkeypatch, stranger)


def function(name: str, text: str) -> str:
    (found,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name]
    return ast.dump(found)


def test_exercises_stand_in_the_text_as_the_library_has_them() -> None:
    cells = [cell for notebook in NOTEBOOKS for cell in code(notebook)]
    for exercise in exercises.ALL:
        (cell,) = [cell for cell in cells if f".check({exercise.name})" in cell]
        assert function(exercise.name, cell) == function(exercise.name, exercise.show())
    for exercise in exercises.CUDA:
        (cell,) = [cell for cell in cells if f".check({exercise.name})" in cell]
        assert exercise.stub.strip() in cell, exercise.name


def test_the_link_to_colab() -> None:
    project = (
        '[project]\nname = "x"\n[project.urls]\nHomepage = "https://example.org"\nSource = "https://github.com/a/b"'
    )
    assert build.colab("01_x", project) == "https://colab.research.google.com/github/a/b/blob/main/notebooks/01_x.ipynb"
    assert build.colab("01_x", '[project]\nname = "x"') is None


def test_copies(tmp_path: Path) -> None:
    assert build.main([str(tmp_path / "made")]) == 0
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == [f"{p.stem}.ipynb" for p in NOTEBOOKS]


@each
def test_files_that_are_mentioned_exist(notebook: Path) -> None:
    mentioned = re.findall(r"`((?:docs|src|notebooks|examples)/[\w./-]+)`", notebook.read_text(encoding="utf-8"))
    assert mentioned and all((ROOT / path).exists() for path in mentioned), mentioned
