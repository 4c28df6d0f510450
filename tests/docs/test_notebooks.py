"""Both notebooks run from top to bottom, and the .ipynb files are what Jupyter expects."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strobe.emulator import compiler
from strobe.learn.run import gpu

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))

_spec = importlib.util.spec_from_file_location("notebooks_build", ROOT / "notebooks" / "build.py")
assert _spec and _spec.loader
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["01_cuda_starter", "02_flash_attention"]
    assert list(build.SCRIPTS) == NOTEBOOKS


@pytest.mark.skipif(gpu() is not None and compiler() is None, reason="needs a GPU or a C++ compiler")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_top_to_bottom_in_a_minute(notebook: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}  # tests run beside this one
    start = time.monotonic()
    command = [sys.executable, str(notebook)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 60
    assert "not yet:" in done.stdout  # the exercises' stubs were tried


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_ipynb_has_the_script_in_it(notebook: Path, tmp_path: Path) -> None:
    (path,) = (p for p in build.build(tmp_path) if p.stem == notebook.stem)
    made = json.loads(path.read_text(encoding="utf-8"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5) and made["metadata"]["colab"]["gpuType"] == "T4"
    ids = [cell["id"] for cell in made["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", i) for i in ids)
    code = "\n".join("".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code")
    assert all(cell["outputs"] == [] for cell in made["cells"] if cell["cell_type"] == "code")
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(notebook.read_text(encoding="utf-8")))
    prose = "\n".join("".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "markdown")
    assert prose.startswith("# ") and "T4" in prose and "\n# %%" not in prose
    assert "pip" in "".join(made["cells"][2]["source"])  # the cell that installs


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_files_that_are_mentioned_exist(notebook: Path) -> None:
    mentioned = re.findall(r"`((?:docs|src|notebooks|examples)/[\w./-]+)`", notebook.read_text(encoding="utf-8"))
    assert mentioned and all((ROOT / path).exists() for path in mentioned), mentioned
