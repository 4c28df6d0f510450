"""A cache cannot hurt: whatever lies where the emulator keeps its libraries, the right kernel runs.

A damaged library kills the process that loads it, so each case runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import strobe.cuda.runtime.jit as jit
from strobe import emulator

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler")

SOURCE = """#include <strobe/ptx/base.cuh>
#include <strobe/ptx/memory.cuh>
struct Params { unsigned* out; };
STROBE_KERNEL(32, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  if (strobe::thread_idx() == 0) strobe::st_global(p.out, 42u);
}
"""
OTHER = SOURCE.replace("42u", "13u")

# The emulator alone: it needs no torch, which is slow to import.
SCRIPT = """
import ctypes, json, sys, types
sys.modules["strobe"] = types.ModuleType("strobe")
sys.modules["strobe"].__path__ = [sys.argv[1]]
from strobe import emulator
out = ctypes.c_uint32(0)
program = emulator.build(sys.argv[2])
buffer = emulator.Buffer("out", ctypes.addressof(out), 4)
program.run(buffer.address.to_bytes(8, "little"), grid=1, threads=32, smem=0, buffers=[buffer])
assert "torch" not in sys.modules
print(json.dumps({"out": out.value, "library": str(program.library)}))
"""


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    """Return what the compiler makes of SOURCE, and of another kernel."""
    return {"right": emulator.build(SOURCE).library, "other": emulator.build(OTHER).library}


class Runs:
    """Processes that share a cache and a compiler that only copies: these tests are about files."""

    def __init__(self, tmp_path: Path, library: Path) -> None:
        self.cache, self.log = tmp_path / "cache", tmp_path / "compiled"
        self.compiler = tmp_path / "copying-c++"
        self.compiler.write_text(
            "#!/bin/sh\nfor last; do :; done\n"
            f'case "$last" in *.so) echo >> {self.log}; cp {library} "$last";; *.o) echo > "$last";; esac\n'
        )
        self.compiler.chmod(0o755)

    def __call__(self) -> Path:
        """The kernel is right. Returns the library that was loaded."""
        environment = os.environ | {"STROBE_CACHE_DIR": str(self.cache), "CXX": str(self.compiler)}
        command = [sys.executable, "-c", SCRIPT, str(Path(jit.__file__).parents[2]), SOURCE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"status {done.returncode}\n{done.stderr}"
        self.warned = done.stderr
        answer = json.loads(done.stdout)
        assert answer["out"] == 42
        return Path(answer["library"])

    @property
    def compiled(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def run(tmp_path: Path, libraries: dict[str, Path]) -> Runs:
    return Runs(tmp_path, libraries["right"])


def flipped(content: bytes) -> bytes:
    """Every byte of the middle half: the headers stay as they were."""
    quarter = len(content) // 4
    return content[:quarter] + bytes(b ^ 0xFF for b in content[quarter:-quarter]) + content[-quarter:]


def one_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"not a library\n" * 100,
    "half": lambda content: content[: len(content) // 2],
    "one page": lambda content: content[:4096],
    "last byte gone": lambda content: content[:-1],
    "bytes flipped": flipped,
    "one bit flipped": one_bit,
    "zeros after the headers": lambda content: content[:1024] + bytes(len(content) - 1024),
}


@pytest.mark.parametrize("damage", CONTENTS)
def test_a_damaged_library_is_made_again(run: Runs, damage: str) -> None:
    library = run()
    assert run() == library and run.compiled == 1  # a hit
    content = library.read_bytes()
    library.write_bytes(CONTENTS[damage](content))
    assert run() == library and run.compiled == 2
    assert library.read_bytes() == content
    assert run() == library and run.compiled == 2  # a hit again


def put_directory(path: Path) -> None:
    path.mkdir()


def put_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "someone's").write_text("kept")


def put_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("put", [put_directory, put_full_directory, put_dangling_link, put_pipe])
def test_what_is_no_file_is_replaced(run: Runs, put: Callable[[Path], None]) -> None:
    library = run()
    library.unlink()
    put(library)
    assert run() == library and run.compiled == 2
    assert library.is_file() and not library.is_symlink()
    assert run() == library and run.compiled == 2
    if put is put_full_directory:  # nothing of anybody's is deleted
        assert [path.read_text() for path in library.parent.rglob("someone's")] == ["kept"]


@pytest.mark.parametrize(
    "foreign", ["other kernel", "executable", "other library", "link to other kernel", "link to the right one"]
)
def test_a_foreign_library_is_replaced(run: Runs, libraries: dict[str, Path], foreign: str) -> None:
    """Also a link to the right content: whoever owns its target could change it while the library is in use."""
    library = run()
    library.unlink()
    if foreign == "link to other kernel":
        library.symlink_to(libraries["other"])
    elif foreign == "link to the right one":
        library.symlink_to(libraries["right"])
    else:
        files = {"executable": sys.executable, "other library": torch._C.__file__, "other kernel": libraries["other"]}
        shutil.copyfile(files[foreign], library)
    assert run() == library and run.compiled == 2 and not library.is_symlink()
    assert emulator.Program(libraries["other"], "kept").library.exists()  # not written through the link


def test_a_library_that_others_may_write_is_replaced(run: Runs) -> None:
    library = run()
    library.chmod(0o666)
    assert run() == library and run.compiled == 2
    assert library.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("kind", ["world-writable", "group-writable", "link to a world-writable one"])
def test_a_directory_that_others_may_write_is_not_used(run: Runs, libraries: dict[str, Path], kind: str) -> None:
    library = run()
    kept = library.parent
    assert kept.parent == run.cache
    if kind == "link to a world-writable one":
        kept.rename(run.cache.parent / "elsewhere")
        kept.symlink_to(run.cache.parent / "elsewhere")
    kept.chmod(0o770 if kind == "group-writable" else 0o777)
    library.unlink()
    shutil.copyfile(libraries["other"], library)  # planted
    used = run()
    assert not used.is_relative_to(run.cache) and run.compiled == 2
    assert "others may write to it" in run.warned and str(kept) in run.warned
    assert library.read_bytes() == libraries["other"].read_bytes()  # nothing was written there


def test_a_link_to_a_private_directory_is_used(run: Runs) -> None:
    """People whose home is small use such links."""
    kept = run().parent
    kept.rename(run.cache.parent / "elsewhere")
    kept.symlink_to(run.cache.parent / "elsewhere")
    assert run().parent == kept and run.compiled == 1 and run.warned == ""


def test_a_file_in_place_of_the_directory_is_survived(run: Runs) -> None:
    kept = run().parent
    shutil.rmtree(kept)
    kept.write_text("not a directory")
    assert not run().is_relative_to(run.cache)
