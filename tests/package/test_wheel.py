"""People install the wheel: the sdist builds it, it holds everything, and it works outside the checkout.

Nothing is downloaded. The fresh environment sees the torch of this one through a path file.
"""

from __future__ import annotations

import email
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import strobe
from strobe import emulator

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "strobe"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("build", "hatchling", "pip")),
    reason="needs build, hatchling and pip: the extra `dev`",
)


def call(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    call(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `python -m build`: it makes an sdist from the checkout, and a wheel from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(files.read(name).decode())


# ---- what is inside --------------------------------------------------------------------------------------------------
def test_the_wheel_is_for_every_platform(wheel: Path) -> None:
    assert wheel.name == f"strobe_attention-{strobe.__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_whole_package(wheel: Path) -> None:
    sources = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(wheel) as files:
        packed = {name for name in files.namelist() if ".dist-info/" not in name}
    assert packed == {path.relative_to(PACKAGE.parent).as_posix() for path in sources}
    for needed in (
        "py.typed",
        "cuda/include/strobe/ptx/mma.cuh",
        "cuda/include/strobe/emu/driver.cuh",
        "cuda/include/strobe/tile/softmax.cuh",
        "cuda/include/strobe/kernels/forward_sm80.cuh",
        "cuda/include/strobe/kernels/forward_sm90.cuh",
        "learn/kernels/matmul.cu",
        "learn/page/page.html",
        "learn/ladder/kernels/01_standard.cu",
        "learn/ladder/kernels/13_overlap.cu",
        "bench/report/page.html",
    ):
        assert f"strobe/{needed}" in packed


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_sdist_holds_every_tracked_file(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    tracked = set(call("git", "ls-files", "-z", cwd=ROOT).strip("\0").split("\0"))
    present = {name for name in tracked if (ROOT / name).exists()}
    assert len(present) > 100 and present - packed == set()


def test_the_checkout_and_the_sdist_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    build(ROOT, tmp_path, "--wheel")
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_metadata(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("strobe-attention", strobe.__version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Summary"] and metadata["Author"] and metadata["Keywords"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "text/markdown" in metadata["Description-Content-Type"]
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    classifiers = metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers and "Programming Language :: Python :: 3.11" in classifiers
    assert not any(c.startswith("License ::") for c in classifiers)  # the expression above says it


def test_the_library_needs_three_packages(metadata: Message) -> None:
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.partition(">")[0] for line in always) == ["rich", "torch", "typer"]


# ---- outside the checkout --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel in it."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    install = ("install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", wheel)
    call(sys.executable, "-m", "pip", "--python", home / "bin" / "python", *install)
    # Only now: pip must not see, and try to replace, the strobe of this environment.
    (packages,) = (home / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others))
    return home / "bin"


def elsewhere() -> dict[str, str]:
    """An environment that does not lead to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "160"}


@pytest.fixture
def run(installed: Path, tmp_path: Path):
    """A command of that environment, in an empty directory."""

    def command(name: str, *arguments: str) -> str:
        return call(installed / name, *arguments, cwd=tmp_path, env=elsewhere())

    return command


def test_the_demo_runs(run) -> None:
    shown = run("strobe", "demo", "--seq-len", "256", "--head-dim", "32", "--device", "cpu", "--causal")
    assert "256" in shown and "standard" in shown and "causal" in shown


def test_the_installed_package_is_the_wheel(run, installed: Path) -> None:
    script = (
        "import json, strobe, torch; from importlib import metadata; from strobe.cuda.runtime import jit;"
        "jit.flatten('#include <strobe/kernels/forward_sm90.cuh>');"
        "print(json.dumps([strobe.__file__, metadata.version('strobe-attention'), torch.__version__]))"
    )
    where, version, torch_version = json.loads(run("python", "-c", script))
    assert Path(where).is_relative_to(installed.parent) and version == strobe.__version__
    found = json.loads(run("strobe", "doctor", "--json"))
    assert (found["strobe"], found["torch"]["version"]) == (version, torch_version)
    assert found["backends"]["tiled"] is None


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler")
def test_the_kernels_run_on_the_emulator(run) -> None:
    size = ("--seq-len", "64", "--head-dim", "64", "--dtype", "bfloat16", "--device", "cpu")
    assert "emulator" in run("strobe", "demo", *size, "--backend", "emulator")


def test_the_lessons_are_there(run, tmp_path: Path) -> None:
    run("strobe", "explain-page", "-o", "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert "wgmma" in run("strobe", "ladder", "diff", "12", "13")


def test_type_checkers_see_the_types(installed: Path, tmp_path: Path) -> None:
    """mypy ignores the annotations of a package without `py.typed`. torch is left out: reading it takes half a minute."""
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = True\n")
    (tmp_path / "caller.py").write_text(
        "import strobe\nmask: strobe.Mask = strobe.causal\nwrong: int = strobe.causal\n"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed / "python"), "caller.py"]
    done = subprocess.run(command, cwd=tmp_path, env=elsewhere(), capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[0].startswith("caller.py:3: error: Incompatible types"), done.stdout + done.stderr
