"""The notebooks as .ipynb files, from the scripts beside this file (jupytext's percent format).

    python notebooks/build.py                 run both and save them beside the scripts, with their outputs
    python notebooks/build.py DIRECTORY       copy them there, as they were saved

Cells tagged `check` hold the assertions of a lesson: they are run with the script, and are not part of the notebook."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SCRIPTS = tuple(sorted(HERE.glob("[0-9]*.py")))
_LIMIT_S = 300  # for one cell


def notebook(script: Path) -> nbformat.NotebookNode:
    """Without outputs. Cell ids depend on the position only, so that two builds are equal; Colab is asked for a T4."""
    made = jupytext.read(script)
    made.cells = [cell for cell in made.cells if "check" not in cell.metadata.get("tags", ())]
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
        cell.metadata = nbformat.from_dict(
            {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
        )
    if (address := colab(script.stem)) is not None:
        badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address})"
        title, _, rest = made.cells[0].source.partition("\n")
        made.cells[0].source = f"{title}\n\n{badge}\n{rest}"
    made.nbformat, made.nbformat_minor = 4, 5
    nbformat.validate(made)
    return made


def colab(stem: str, project: str | None = None) -> str | None:
    """The link that opens a notebook in Colab; None as long as the project names no repository on GitHub."""
    text = (
        (HERE.parent / "pyproject.toml").read_text(encoding="utf-8") if project is None else project
    )
    urls = tomllib.loads(text)["project"].get("urls", {})
    for address in urls.values():
        if found := re.match(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?$", address):
            return f"https://colab.research.google.com/github/{found[1]}/blob/main/notebooks/{stem}.ipynb"
    return None


def executed(script: Path) -> nbformat.NotebookNode:
    """With the outputs of a run on this machine; no time stamps are stored."""
    made = notebook(script)
    client = NotebookClient(
        made, timeout=_LIMIT_S, record_timing=False, resources={"metadata": {"path": str(HERE)}}
    )
    client.execute()
    for cell in made.cells:
        alternatives = [text["alt"] for text in _pictures(cell)]
        if alternatives:  # where the site's builder looks for it
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(alternatives)}}
    made.metadata["language_info"] = nbformat.from_dict({"name": "python"})
    return made


def _pictures(cell: nbformat.NotebookNode) -> list[dict[str, str]]:
    """What is stored about each picture that a cell has shown."""
    shown = [output for output in cell.get("outputs", ()) if output.output_type == "display_data"]
    return [
        text
        for output in shown
        for kind, text in output.metadata.items()
        if kind.startswith("image/")
    ]


def saved(script: Path) -> Path:
    return script.with_suffix(".ipynb")


def copy(directory: Path) -> list[Path]:
    """The saved notebooks into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for script in SCRIPTS:
        path = directory / saved(script).name
        path.write_bytes(saved(script).read_bytes())
        written.append(path)
    return written


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    if arguments:
        for path in copy(Path(arguments[0])):
            print(path)
        return 0
    for script in SCRIPTS:
        print(f"running {script.name}", file=sys.stderr)
        nbformat.write(executed(script), saved(script))
        print(saved(script))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
