"""A document's names of ours in backticks exist: constants of kernels, functions, files, modules."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("src", "tests", "benchmarks", "examples", "notebooks")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
SOURCES += [ROOT / "Makefile", ROOT / "pyproject.toml"]
# Names of others that no code of ours uses.
FOREIGN = {"AutoModel", "Dockerfile", "kv_idx", "mask_mod", "memory_efficient_attention_forward", "q_idx"}
_CODE = {".py", ".cuh", ".cu", ".h", ".cpp", ".js", ".html", ".css", ".toml", ""}
_NAME = re.compile(
    r"\bk[A-Z]\w*"  # a constant of a kernel
    r"|(?<![\w.-])_?[a-z]\w*_\w+"  # a function, an argument, a module
    r"|(?<![\w.-])[A-Z][A-Z0-9]*_\w+"  # a constant, a variable of the environment
    r"|^[A-Z][a-z]\w*(?=\W|$)"  # a class
)
_FILE = re.compile(r"[\w/-]+\.(?:py|cuh|cu)\b")
_DOTTED = re.compile(r"\bstrobe(?:\.[A-Za-z_]\w*)+")


def quoted(document: Path) -> list[str]:
    """Return what stands in backticks, blocks of code aside: those are run."""
    text = re.sub(r"^(`{3,}).*?^\1", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Return the words of everything that is code, and the names of the files themselves."""
    paths = [path for path in SOURCES if path.suffix in _CODE and path.is_file() and path != Path(__file__)]
    found = {word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return found | {path.stem for path in paths}


def exists(dotted: str) -> bool:
    """Return whether `strobe.a.b` is a module, or something in one."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for name in parts[n:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def unknown(document: Path, words: set[str]) -> list[str]:
    gone = []
    for span in quoted(document):
        dotted, files = _DOTTED.findall(span), _FILE.findall(span)
        gone += [name for name in dotted if not exists(name)]
        gone += [name for name in files if not any(path.match(f"*{name}") for path in SOURCES)]
        rest = _FILE.sub(" ", _DOTTED.sub(" ", span))
        gone += [name for name in _NAME.findall(rest) if name not in words | FOREIGN]
    return gone


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_backticks_exist(document: Path, words: set[str]) -> None:
    gone = dict.fromkeys(unknown(document, words))
    where = document.relative_to(ROOT)
    assert not gone, f"{where} names what no source has: {', '.join(gone)}. Say what it is called now, or leave it out."


def test_the_layers_that_contributing_names_are_there() -> None:
    package = ROOT / "src" / "strobe"
    rooms = {path.stem for path in package.rglob("*") if path.is_dir() or path.suffix == ".py"}
    lines = [line for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines() if " → " in line]
    named = {word for line in lines for word in re.findall(r"`(\w+)`", line)}
    assert len(named) > 10 and named - rooms <= {"asm"}, f"CONTRIBUTING.md names {sorted(named - rooms)}"


def test_a_name_that_is_gone_is_found(tmp_path: Path, words: set[str]) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "`kNobody` `Nonesuch` `gone_since_long(1)` `strobe.nobody` `cuda/nobody.py`, not `strobe.sdpa(q)`, `cuda/launch.py`\n"
        "```python\nnot_quoted_here()\n```\n"
    )
    gone = {"kNobody", "Nonesuch", "gone_since_long", "strobe.nobody", "cuda/nobody.py"}
    assert set(unknown(document, words)) == gone
