"""Finding a compiler, keeping what it made, and the promise that every PTX wrapper has an emulated twin."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from emulator.toy_kernels import Toy, aligned

import strobe
import strobe.cuda.runtime.jit as jit
from strobe import emulator
from strobe.emulator.program import mode_and_seed

INCLUDE = Path(jit.__file__).parent / "include" / "strobe"
COUNT = Toy(
    """
STROBE_KERNEL(32, 1) kernel(STROBE_GRID_CONSTANT Params p) {  // a persistent kernel that takes tiles from a counter
  for (;;) {
    u32 tile = 0;
    if (thread_idx() == 0) tile = atomic_inc_wrap(p.counter, p.tiles + grid_dim() - 1);
    tile = shfl(tile, 0);
    if (tile >= u32(p.tiles)) break;
    if (thread_idx() == 0) st_global(p.done + tile, block_idx() + 1);
  }
}
""",
    {"counter": "uint32", "done": "uint32"},
    ("tiles",),
)


def wrapper_names(header: Path) -> set[str]:
    text = re.sub(r"//[^\n]*", "", header.read_text())
    text = re.sub(r"namespace emu \{.*?\n\}  // namespace emu\n", "", text, flags=re.DOTALL)
    functions = re.findall(r"STROBE_DEVICE\s+(?:[\w:]+[\s&*]+)+?(\w+)\s*(?:<[^<>]*>)?\(", text)
    return (
        set(functions)
        | set(re.findall(r"^#define (STROBE_\w+)", text, re.MULTILINE))
        | set(re.findall(r"\bstruct (?:alignas\(\d+\) )?(\w+)", text))
    )


@pytest.mark.parametrize("header", sorted(path.name for path in (INCLUDE / "ptx").glob("*.cuh")))
def test_every_ptx_wrapper_has_an_emulated_twin(header: str) -> None:
    real = wrapper_names(INCLUDE / "ptx" / header)
    assert len(real) > 1 or header == "mma.cuh"
    assert real <= wrapper_names(INCLUDE / "emu" / header), "missing in emu"


def test_emulated_wrappers_hold_no_assembly_but_the_fiber_switch() -> None:
    for header in (INCLUDE / "emu").rglob("*.cuh"):
        assert "asm volatile" not in header.read_text()
        assert ("__asm__" in header.read_text()) == (header.name == "fiber.cuh")


def test_missing_compiler_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert emulator.compiler() is None
    with pytest.raises(emulator.CompilerMissing, match=r"none of c\+\+, g\+\+, clang\+\+ is on the path") as caught:
        emulator.build(COUNT.source())
    for word in ("apt install g++", "dnf install gcc-c++", "xcode-select --install", "WSL"):
        assert word in str(caught.value)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(emulator.CompilerMissing, match=r"CXX is ./nowhere/c\+\+., which cannot be found"):
        emulator.build(COUNT.source())


@pytest.mark.parametrize(
    "cxx, says",
    [
        ('"g++', "which is not a command line: No closing quotation"),
        ("''", "which cannot be found"),
        ("/etc/passwd", "which cannot be found"),
        ("true", "made nothing of the engine: is it a C\\+\\+ compiler"),
        ("false", "cannot compile the engine for the emulator"),
        ("{here}/text", "cannot be run: Exec format error"),
        ("{here}/garbage", "made a library that cannot be loaded"),
    ],
)
def test_a_bad_compiler_is_named_with_its_variable(
    cxx: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("no program\n")
    (tmp_path / "garbage").write_text(
        '#!/bin/sh\nfor last; do :; done\ncase "$last" in *.so|*.o) echo > "$last";; esac\n'
    )
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "cache"))
    cxx = cxx.format(here=tmp_path)
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(RuntimeError, match=rf"CXX(=| is ['\"]){re.escape(cxx)}.*{says}"):
        emulator.build(COUNT.source())


def test_a_compiler_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow").write_text('#!/bin/sh\ncase "$1" in --version) ;; *) exec sleep 60;; esac\n')
    (tmp_path / "slow").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "slow"))
    monkeypatch.setattr(
        sys.modules["strobe.emulator.compiler"], "_LIMIT_S", 0.2
    )  # the package has a function of that name
    with pytest.raises(RuntimeError, match=f"CXX={tmp_path}/slow did not finish within 0.2 s"):
        emulator.build(COUNT.source())


def test_the_environment_chooses_mode_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODE", "SEED"):
        monkeypatch.delenv(f"STROBE_EMULATOR_{name}", raising=False)
    assert mode_and_seed() == ("sync", 0)
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    monkeypatch.setenv("STROBE_EMULATOR_SEED", "4294967295")
    assert mode_and_seed() == ("async", 2**32 - 1)
    for name in ("MODE", "SEED"):
        monkeypatch.setenv(f"STROBE_EMULATOR_{name}", "")  # as good as not set
    assert mode_and_seed() == ("sync", 0)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        *[("STROBE_EMULATOR_MODE", value, '"sync" and "async"') for value in ("Async", "1", "late")],
        *[("STROBE_EMULATOR_SEED", value, "from 0 to 4294967295") for value in ("-1", "4294967296", "1.5", "x", "²")],
    ],
)
def test_a_bad_setting_is_named_by_a_call(name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    q = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}; allowed are .*{allowed}"):
        strobe.attention(q, q, q, backend="emulator")


def test_a_bad_seed_of_a_run_is_named() -> None:
    with pytest.raises(ValueError, match=r"seed: -1; must be from 0 to 2\^32-1"):
        COUNT.run(counter=aligned(1, "uint32"), done=aligned(1, "uint32"), tiles=1, seed=-1)


def test_compile_error_shows_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)cannot compile broken for the emulator:.*toy\.cu:1:.*no_such_name"):
        emulator.build(Toy("int x = no_such_name;", {}).source(), name="broken")


def test_flattened_source_builds_to_the_same_library() -> None:
    source = COUNT.source()
    assert emulator.build(jit.flatten(source, "emu")).library == emulator.build(source).library


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_share_an_atomic_counter(workers: int) -> None:
    counter, done = aligned(1, "uint32"), aligned(40, "uint32")
    for _ in range(2):  # the counter has wrapped to 0: a second launch works
        done[:] = 0
        COUNT.run(counter=counter, done=done, tiles=40, grid=5, workers=workers)
        assert ((done >= 1) & (done <= 5)).all()
        assert counter[0] == 0


@pytest.fixture
def copying_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A "compiler" that always delivers COUNT's library: these tests are about files."""
    script = tmp_path / "fake-c++"
    library = emulator.build(COUNT.source()).library
    script.write_text(
        f'#!/bin/sh\nfor last; do :; done\ncase "$last" in *.so) cp {library} "$last";; *.o) echo > "$last";; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def test_unwritable_cache_is_survived(copying_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("STROBE_CACHE_DIR", str(blocked))
    program = emulator.build(COUNT.source())
    assert str(blocked) not in str(program.library) and program.library.exists()


def test_cache_holds_source_beside_library(
    copying_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "cache"))
    program = emulator.build(COUNT.source())
    names = sorted(path.suffix for path in program.library.parent.iterdir())
    assert names == [".cpp", ".o", ".so"]
    assert program.library.is_relative_to(tmp_path) and os.stat(program.library.parent).st_mode & 0o077 == 0
