"""Another project has the name `strobe` on the package index, and the same import name: nothing here may install it, or
advise to, and what imports it by mistake says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

_NAME = r"(?<![\w.\-/:@])strobe"  # not strobe-attention, src/strobe, strobe.compat
_BARE = [
    re.compile(rf"\bpip\b\W+.*\binstall\b.*?['\"=\s]{_NAME}(?=$|[\s'\"`\\\[=<>~!;,])"),
    re.compile(rf"\binstalls?\s+{_NAME}\b.*\bindex\b"),
    re.compile(rf"{_NAME}\W{{0,3}}\[(?:{'|'.join(EXTRAS)})\]"),
    re.compile(r"(?<![\w-])strobe-[\d*]\S*\.(?:whl|tar\.gz)"),
    re.compile(r"""\bversion\(\\?["']strobe\\?["']\)"""),
    re.compile(rf"""["']{_NAME}\s*(?:==|>=|~=|@)"""),
]


def bare(line: str) -> bool:
    return any(pattern.search(line) for pattern in _BARE)


@pytest.mark.parametrize(
    "line",
    [
        "pip install strobe",
        "!pip install --quiet strobe",
        "message = 'figures need matplotlib: pip install \"strobe[learn]\"'",
        "uv pip install 'strobe[cu13]'",
        "pip install --no-index --find-links carry strobe",
        "    wanted = f\"{wheels[-1].resolve() if wheels else 'strobe'}[learn]\"",
        '[sys.executable, "-m", "pip", "install", "strobe"]',
        "COPY dist/strobe-*.whl /wheels/",
        "metadata.version('strobe')",
        'dependencies = ["strobe>=0.1"]',
        '    "strobe[docs]",',
        "cell installs strobe from the package index",
    ],
)
def test_what_is_looked_for(line: str) -> None:
    assert bare(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install .",
        'pip install "strobe-attention[cu13]"',
        "strobe.compat.install()",
        "pip uninstall strobe",
        'f["strobe"]',
    ],
)
def test_what_is_allowed(line: str) -> None:
    assert not bare(line)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.strip("\0").split("\0") if (path := ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_nothing_installs_the_other_strobe() -> None:
    guilty = []
    for path in tracked():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture, a cubin
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) < 2000 and bare(line):
                guilty.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not guilty, "\n".join(guilty)


@pytest.mark.parametrize(
    "command",
    [["examples/train_gpt.py"], ["examples/long_context.py"], ["-c", "import strobe.compat"]],
    ids=lambda command: command[-1],
)
def test_the_other_strobe_is_recognised(command: list[str], tmp_path: Path) -> None:
    """Its `__init__.py` lies where ours should; the rest of our files may be there."""
    package = tmp_path / "strobe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "compat").symlink_to(ROOT / "src" / "strobe" / "compat")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1 and f"{package / '__init__.py'} is another project's package" in done.stderr, (
        done.stderr
    )
    assert "pip uninstall strobe" in done.stderr
