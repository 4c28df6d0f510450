"""The lessons' CUDA C++ kernels: right on the emulator (or the GPU, if there is one), and compiled for a T4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strobe.cuda.runtime import jit
from strobe.emulator import EmulatorError, compiler
from strobe.learn.run import KERNELS, gpu, params_of, run_kernel, source

runs = pytest.mark.skipif(gpu() is not None and compiler() is None, reason="needs a GPU or a C++ compiler")
NAMES = sorted(path.stem for path in KERNELS.glob("*.cu"))


@runs
@pytest.mark.parametrize("pixels", [1, 256, 1000])
def test_grayscale(pixels: int) -> None:
    rgb, gray = torch.rand(pixels, 3), torch.full((pixels,), torch.nan)
    ran = run_kernel("grayscale", grid=-(-pixels // 128), threads=128, rgb=rgb, gray=gray, pixels=pixels, block_dim=128)
    torch.testing.assert_close(gray, rgb @ torch.tensor([0.299, 0.587, 0.114]))
    if ran.counters:
        assert (ran.counters.global_bytes_read, ran.counters.global_bytes_written) == (12 * pixels, 4 * pixels)
        assert "on the emulator" in str(ran)


@runs
@pytest.mark.parametrize("name", ["matmul", "matmul_tiled"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (1, 1, 1), (33, 20, 50)])
def test_matmul(name: str, m: int, n: int, k: int) -> None:
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.full((m, n), torch.nan)
    ran = run_kernel(name, grid=-(-m // 16) * -(-n // 16), threads=256, smem=2048, a=a, b=b, c=c, m=m, n=n, k=k)
    torch.testing.assert_close(c, a @ b, atol=1e-4, rtol=1e-4)
    if ran.counters:
        columns, rows = -(-n // 16), -(-m // 16)
        numbers = m * k * columns + k * n * rows if name == "matmul_tiled" else 2 * m * n * k
        assert ran.counters.global_bytes_read == 4 * numbers and ran.counters.bank_conflicts == 0


@runs
@pytest.mark.skipif(gpu() is None, reason="a GPU would not notice")
def test_the_emulator_notices_what_the_lesson_says_it_does() -> None:
    rgb, gray = torch.rand(10, 3), torch.empty(10)
    with pytest.raises(EmulatorError, match=r"out of bounds.*`rgb`[\s\S]*at grayscale.cu:\d+"):
        run_kernel("grayscale", grid=1, threads=32, rgb=rgb, gray=gray, pixels=32, block_dim=32)


@pytest.mark.skipif(jit.nvrtc_status() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_a_t4_and_later(name: str, arch: str) -> None:
    struct = params_of(source(name))
    text = f'{source(name)}\nstatic_assert(sizeof(Params) == {struct.size}, "differs");\n'
    assert name.encode() in jit.compile(jit.flatten(text), arch, name=name).cubin


def test_params_are_read_from_the_source() -> None:
    struct = params_of(source("matmul"))
    assert [(f.name, f.ctype) for f in struct.fields] == [
        ("a", "const float*"),
        ("b", "const float*"),
        ("c", "float*"),
        ("m", "int"),
        ("n", "int"),
        ("k", "int"),
    ]


def test_a_kernel_is_named_and_no_path_is_followed(tmp_path: Path) -> None:
    (tmp_path / "mine.cu").write_text("secret")
    for name in (str(tmp_path / "mine"), "../kernels/matmul", "./matmul", "matmul.cu", ""):
        with pytest.raises(ValueError, match="the kernels are grayscale, matmul"):
            source(name)


def test_wrong_arguments_are_refused() -> None:
    rgb, gray = torch.rand(4, 3), torch.empty(4)
    common = {"grid": 1, "threads": 32, "pixels": 4, "block_dim": 32}
    with pytest.raises(ValueError, match="the kernels are grayscale, matmul"):
        run_kernel("greyscale", grid=1, threads=32)
    with pytest.raises(TypeError, match=r"rgb: torch.float64; the kernel takes a pointer to float"):
        run_kernel("grayscale", rgb=rgb.double(), gray=gray, **common)
    with pytest.raises(ValueError, match=r"rgb: strides \(1, 4\)"):
        run_kernel("grayscale", rgb=torch.rand(3, 4).T, gray=gray, **common)
    with pytest.raises(TypeError, match="rgb must be a tensor, got int"):
        run_kernel("grayscale", rgb=3, gray=gray, **common)
    if gpu() is not None and compiler() is not None:
        with pytest.raises(KeyError, match="fields missing: \\['gray'\\]"):
            run_kernel("grayscale", rgb=rgb, **common)
