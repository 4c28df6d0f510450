"""Our standard attention in CUDA, on the emulator: three kernels, the right answer, and the memory traffic it shows."""

from __future__ import annotations

import pytest
import torch

from strobe import emulator
from strobe.bench import standard_cuda
from strobe.bench.case import BenchCase, case
from strobe.bench.exactness import Judge
from strobe.bench.inputs import Tensors
from strobe.cuda.runtime import jit
from strobe.emulator import Buffer

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="the emulator needs a C++ compiler")

CASES = [
    ("mma", case("t", "full", batch=2, heads=2, length=100, dim=64)),
    ("mma", case("t", "causal-gqa", heads=4, heads_k=2, length=72, len_k=140, dim=48, mask="causal", dtype="float16")),
    ("mma", case("t", "unequal", heads=1, length=130, dim=160, dim_v=96, mask="window(40, 3)")),
    ("naive", case("t", "full", batch=2, heads=2, length=37, dim=24, dtype="float32")),
    ("naive", case("t", "causal-gqa", heads=4, heads_k=2, length=20, len_k=45, dim=40, dim_v=17, mask="causal")),
]


def run(style: str, what: BenchCase, x: Tensors) -> tuple[torch.Tensor, list[emulator.Counters]]:
    problem = what.problem(torch.device("cpu"))
    q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
    o = torch.full((what.batch, what.len_q, what.heads, what.value_dim), float("nan"), dtype=q.dtype)
    s, p = standard_cuda.matrices(problem, style, q.device)
    tensors = {"q": q, "k": k, "v": v, "o": o, "s": s, "p": p}
    strides = {n: (t.stride(0), t.stride(2), t.stride(1)) for n, t in tensors.items() if n in "qkvo"}
    arguments = standard_cuda.values(problem, strides, {n: t.data_ptr() for n, t in tensors.items()})
    buffers = [Buffer(n, t.data_ptr(), t.numel() * t.element_size(), writable=n in "osp") for n, t in tensors.items()]
    counters = []
    for kernel in standard_cuda.kernels(problem, style):
        source = kernel.source.replace(f" standard_{style}_{kernel.step}(STROBE_GRID", " kernel(STROBE_GRID")
        program = emulator.build(source, name=kernel.name)
        params = bytes(kernel.params.pack(arguments))
        grid, threads = kernel.grid(problem), kernel.threads
        counters.append(program.run(params, grid=grid, threads=threads, smem=kernel.smem, buffers=buffers))
    return o.transpose(1, 2), counters


def inputs(what: BenchCase) -> Tensors:
    shapes = (
        (what.heads, what.len_q, what.dim),
        (what.heads_k, what.len_k, what.dim),
        (what.heads_k, what.len_k, what.value_dim),
    )
    return Tensors(*(torch.randn(what.batch, *shape).to(what.torch_dtype) for shape in shapes))


@pytest.mark.parametrize(("style", "what"), CASES, ids=lambda x: x if isinstance(x, str) else x.label)
def test_exact(style: str, what: BenchCase) -> None:
    x = inputs(what)
    out, _ = run(style, what, x)
    error = Judge(what, x).judge(out, None)
    assert error.passed, error


def test_the_matrix_travels_to_memory() -> None:
    """Scores written once, read by the softmax, weights written and read again: four trips, as the lesson says."""
    what = case("t", "full", heads=1, length=128, dim=32)
    _, (scores, softmax, values) = run("mma", what, inputs(what))
    matrix = 128 * 128 * 2
    assert scores.global_bytes_written == matrix
    assert softmax.global_bytes_read == 3 * matrix and softmax.global_bytes_written == matrix
    assert values.global_bytes_read >= matrix and scores.mma > 0 and softmax.mma == 0


@pytest.mark.skipif(jit.nvrtc_status() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("style", ["naive", "mma"])
@pytest.mark.parametrize("dim", [64, 256])
def test_compiles_without_spills(style: str, dim: int) -> None:
    problem = case("t", "x", heads=2, length=256, dim=dim, mask="causal").problem(torch.device("cpu"))
    for kernel in standard_cuda.kernels(problem, style):
        log = jit.compile(kernel.source, "sm_90", name=kernel.name).log
        assert "0 bytes spill stores" in log, f"{kernel.name}: {log}"
