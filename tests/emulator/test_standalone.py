"""The stand-alone program: compiled by nvcc where there is one, and always run, on the CPU: arguments, kernel,
printing."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from strobe.emulator import compiler

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "standalone"
SOURCE = (FOLDER / "flash_attention.cu").read_text(encoding="utf-8")
NVCC = shutil.which("nvcc")

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def build(source: str, folder: Path) -> Path:
    file, program = folder / "flash_attention.cu", folder / "flash_attention"
    file.write_text(source, encoding="utf-8")
    command = [
        *shlex.split(compiler() or ""),
        *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    ]
    subprocess.run([*command, "-I", FOLDER, "-x", "c++", "-DON_CPU", file, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(SOURCE, tmp_path_factory.mktemp("standalone"))


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600)


def matrices(output: str) -> dict[str, torch.Tensor]:
    """Return the matrices that were printed, by name."""
    found = {}
    for block in output.split("\n\n"):
        if match := re.match(r"(\w+), (\d+) x (\d+)\n", block):
            numbers = [[float(x) for x in line.split()] for line in block.splitlines()[1:]]
            found[match[1]] = torch.tensor(numbers, dtype=torch.float64)
            assert tuple(found[match[1]].shape) == (int(match[2]), int(match[3]))
    return found


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    s = q @ k.T * q.shape[1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v


@needs_compiler
@pytest.mark.parametrize("init", ["uniform", "normal", "ones", "ramp"])
@pytest.mark.parametrize("causal", [False, True])
def test_prints_inputs_and_attention(program: Path, init: str, causal: bool) -> None:
    sizes = ("--seq-len", "37", "--head-dim", "5", "--block-q", "4", "--block-k", "8", "--print")
    done = run(program, *sizes, "--init", init, *(["--causal"] if causal else []))
    assert done.returncode == 0, done.stdout + done.stderr
    found = matrices(done.stdout)
    q, k, v, o = (found[name] for name in ("Query", "Key", "Value", "Output"))
    assert (o - attention(q, k, v, causal)).abs().max() < 1e-5  # six digits are printed
    assert "right" in done.stdout and "WRONG" not in done.stdout
    if init in ("uniform", "normal"):
        assert not torch.equal(q, k) and not torch.equal(k, v) and q.std() > 0.3
    else:
        assert torch.equal(q, k) and q.max() == 1


@needs_compiler
def test_default_output_is_short_and_timed(program: Path) -> None:
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("Query", "Key", "Value", "Output"))] == [
        "Query, 256 x 64",
        "Key, 256 x 64",
        "Value, 256 x 64",
        "Output, 256 x 64",
    ]
    assert len(done.stdout.splitlines()) < 50 and "..." in done.stdout
    assert re.search(r"time: \d+\.\d+ ms a launch", done.stdout)
    assert "would take 262144 bytes" in done.stdout


@needs_compiler
@pytest.mark.parametrize("blocks", [(1, 16), (64, 3), (3, 64), (100, 100)])
def test_any_tile_size_gives_the_same(program: Path, blocks: tuple[int, int]) -> None:
    fixed = ("--seq-len", "50", "--head-dim", "8", "--print")
    tiles = ("--block-q", str(blocks[0]), "--block-k", str(blocks[1]))
    mine, usual = (matrices(run(program, *fixed, *extra).stdout)["Output"] for extra in (tiles, ()))
    assert torch.allclose(mine, usual, atol=3e-6)


@needs_compiler
def test_seed(program: Path) -> None:
    one, same, other = (run(program, "--seq-len", "4", "--head-dim", "4", "--seed", s).stdout for s in ("1", "1", "2"))
    assert matrices(one)["Query"].equal(matrices(same)["Query"]) and not matrices(one)["Query"].equal(
        matrices(other)["Query"]
    )


@needs_compiler
def test_input_from_a_file(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "numbers.csv"
    file.write_text("1, 2  # the first token\n\n3 4\n-5,6\n", encoding="utf-8")
    found = matrices(run(program, "--init", str(file), "--block-q", "2", "--block-k", "2").stdout)
    x = torch.tensor([[1.0, 2], [3, 4], [-5, 6]], dtype=torch.float64)
    assert torch.equal(found["Value"], x)
    assert torch.allclose(found["Output"], attention(x, x, x, False), atol=1e-5)


@needs_compiler
def test_help(program: Path) -> None:
    done = run(program, "--help")
    assert done.returncode == 0
    flags = set(re.findall(r'flag == "(--[a-z-]+)"', SOURCE))
    assert len(flags) >= 9 and all(flag in done.stdout for flag in flags)


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-q", "0"], "--block-q must be a whole number from 1 to 1024, got 0"),
        (["--seq-len", "many"], "--seq-len must be a whole number from 1 to 1048576, got many"),
        (["--seq-len"], "got nothing"),
        (["--wrong"], "unknown option --wrong"),
        (["--init", "no-such-file"], "a file that can be read, got no-such-file"),
        (["--block-q", "512", "--block-k", "512"], "make --block-q or --block-k smaller"),
    ],
)
def test_mistakes_are_explained(program: Path, arguments: list[str], message: str) -> None:
    done = run(program, *arguments)
    assert done.returncode == 2 and message in done.stderr


@needs_compiler
@pytest.mark.parametrize("contents", ["1 2\n3\n", "1 x\n", "\n"])
def test_a_bad_file_is_explained(program: Path, tmp_path: Path, contents: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_text(contents, encoding="utf-8")
    done = run(program, "--init", str(file))
    assert done.returncode == 2 and "bad.txt" in done.stderr


def broken(*edits: tuple[str, str, int]) -> str:
    """The source with the n-th occurrence of a text replaced."""
    text = SOURCE
    for old, new, which in edits:
        starts = [match.start() for match in re.finditer(re.escape(old), text)]
        text = text[: starts[which]] + new + text[starts[which] + len(old) :]
    return text


@needs_compiler
@pytest.mark.parametrize(
    "source",
    [
        broken(("__syncthreads();", "", 0)),  # the tiles are complete
        broken(("__syncthreads();", "", 3)),  # nobody reads them any more
        broken(("o_tile[i] * alpha[row]", "o_tile[i]", 0)),  # no rescaling
        broken(("key0 + key <= row0 + row", "key0 + key < row0 + row + 2", 0)),  # one key too many
    ],
    ids=["no barrier after the copy", "no barrier at the end", "no rescaling", "wrong mask"],
)
def test_the_check_notices_what_is_broken(source: str, tmp_path: Path) -> None:
    done = run(build(source, tmp_path), "--seq-len", "70", "--causal", "--block-q", "16", "--block-k", "16")
    assert done.returncode == 1 and "WRONG" in done.stdout


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_nvcc_compiles_it(tmp_path: Path) -> None:
    """The command is that of its first lines, for whatever GPU this nvcc takes by default."""
    command = [str(NVCC), "flash_attention.cu", "-o", str(tmp_path / "flash_attention")]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    if torch.cuda.is_available():
        ran = run(tmp_path / "flash_attention", "--seq-len", "1000", "--causal")
        assert ran.returncode == 0, ran.stdout + ran.stderr
