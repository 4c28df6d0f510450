"""The notebooks as .ipynb files, from the scripts beside this file (jupytext's percent format).

python notebooks/build.py build/learn
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
SCRIPTS = tuple(sorted(HERE.glob("[0-9]*.py")))


def notebook(script: Path) -> nbformat.NotebookNode:
    """Without outputs. Cell ids depend on the position only, so that two builds are equal; Colab is asked for a T4."""
    made = jupytext.read(script)
    made.metadata = nbformat.from_dict(
        {
            "accelerator": "GPU",
            "colab": {"gpuType": "T4", "name": f"{script.stem}.ipynb", "provenance": []},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for index, cell in enumerate(made.cells):
        cell.id = f"{script.stem[:2]}-{index:03d}"
        cell.metadata = nbformat.from_dict({})
    made.nbformat, made.nbformat_minor = 4, 5
    nbformat.validate(made)
    return made


def build(directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for script in SCRIPTS:
        path = directory / f"{script.stem}.ipynb"
        nbformat.write(notebook(script), path)
        written.append(path)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python notebooks/build.py DIRECTORY")
    for path in build(Path(sys.argv[1])):
        print(path)
