"""The public calls on CUDA tensors: what is chosen and why, where results go, streams, threads, synchronisation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tolerance
import torch
from cases import Case, make
from gpu.kernels import KERNELS, check, fastest, hopper, kernels_here, references
from oracle import prepare

import strobe
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=() if k in kernels_here() else pytest.mark.skip("no Hopper GPU")) for k in KERNELS]
)
SMALL = Case("small", 200, 300, heads=4, heads_k=2, dim=64, mask=causal)


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


# ---- which backend ---------------------------------------------------------------------------------------------------
def test_explain_names_the_kernel() -> None:
    q = some(1, 256, 4, 128)
    told = strobe.explain(q, q, q, mask=causal)
    assert told.backend == fastest()
    assert f"forward_{fastest()}" in str(told.details["kernel"]) and "256 x 256" in told.problem
    assert "the CPU" in told.rejected["emulator"] or "cpu" in told.rejected["emulator"].lower()
    assert set(told.slower) >= {"tiled", "reference"} | set(kernels_here()[:-1])
    assert told.backend in str(told) and told.flops == 2 * 4 * 128 * 2 * 256 * 257 // 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"dim": 20}, "head dim 20"),
        ({"dim": 520}, "head dim 520"),
        ({"scale": -1.0}, "scale -1.0"),
    ],
)
@each_kernel
def test_a_named_kernel_raises_with_the_reason(kernel: str, change: dict[str, Any], reason: str) -> None:
    change = dict(change)
    q = some(1, 64, 2, change.pop("dim", 64), dtype=change.pop("dtype", torch.bfloat16))
    with pytest.raises(strobe.Unsupported, match=reason):
        strobe.attention(q, q, q, **change, backend=kernel)
    assert strobe.explain(q, q, q, **change).backend not in KERNELS  # visibly another
    assert torch.isfinite(strobe.attention(q, q, q, **change)).all()


def test_cpu_tensors_are_refused_by_name() -> None:
    q = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(strobe.Unsupported, match="cpu"):
        strobe.attention(q, q, q, backend="sm80")


@pytest.mark.skipif(not hopper(), reason="no Hopper GPU")
def test_what_bulk_copies_cannot_do_goes_to_sm80() -> None:
    q, k = some(1, 64, 4, 64), some(1, 64, 1, 64).expand(1, 64, 4, 64)  # heads share memory: stride 0
    with pytest.raises(strobe.Unsupported, match="stride"):
        strobe.attention(q, k, k, backend="sm90")
    assert strobe.explain(q, k, k).backend == "sm80"
    assert torch.equal(strobe.attention(q, k, k), strobe.attention(q, k.contiguous(), k.contiguous(), backend="sm80"))


# ---- where inputs lie and results go ---------------------------------------------------------------------------------
def odd_address(t: torch.Tensor) -> torch.Tensor:
    return t.new_full((t.numel() + 2,), 7.0)[1:-1].view(t.shape).copy_(t)


@each_kernel
@pytest.mark.parametrize("odd", ["q", "k", "v", "out", "all"])
def test_misaligned_tensors(odd: str, kernel: str) -> None:
    q, k, v, kwargs = make(SMALL, torch.bfloat16, "cuda")
    tensors = {"q": q, "k": k, "v": v, "out": torch.full_like(q, torch.nan)}
    for name in tensors if odd == "all" else [odd]:
        tensors[name] = odd_address(tensors[name])
    out = tensors.pop("out")
    result, lse = strobe.attention(**tensors, **kwargs, out=out, return_lse=True, backend=kernel)
    assert result is out
    check(out.transpose(1, 2), lse, references(*prepare(SMALL, torch.bfloat16, "cuda")))
    if odd in ("out", "all"):
        around = torch.as_strided(out, (out.numel() + 2,), (1,), 0)
        assert around[0] == 7 and around[-1] == 7


@each_kernel
def test_out_inside_a_larger_tensor(kernel: str) -> None:
    """Nothing beside it is written: rows, heads and columns around it keep their values."""
    q, k, v, kwargs = make(SMALL, torch.bfloat16, "cuda")
    around = torch.full((2, 207, 6, 80), 7.0, device="cuda", dtype=torch.bfloat16)
    out = around[:, 3:203, 1:5, 8:72]
    strobe.attention(q, k, v, **kwargs, out=out, backend=kernel)
    (exact, _), (same, _) = references(*prepare(SMALL, torch.bfloat16, "cuda"))
    tolerance.check("out", out.transpose(1, 2), exact, same)
    out.fill_(7.0)
    assert (around == 7.0).all()


@each_kernel
def test_repeated_calls_follow_their_tensors(kernel: str) -> None:
    """Plans are kept and pointed to new memory: alternate between two sets of equal shape."""
    sets = [[some(2, 150, 4, 128) for _ in range(3)] for _ in range(2)]
    first = [strobe.attention(*s, backend=kernel) for s in sets]
    assert not torch.equal(*first)
    for _ in range(3):
        for s, want in zip(sets, first, strict=True):
            assert torch.equal(strobe.attention(*s, backend=kernel), want)


@each_kernel
@pytest.mark.parametrize("length", [1, 31, 64, 100, 129, 255, 300])
def test_nan_beyond_the_end_never_reaches_the_output(length: int, kernel: str) -> None:
    memory = [torch.full((2, 1024, 4, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (t[:, 200 : 200 + length] for t in memory)
    for t in (q, k, v):
        t.copy_(some(*t.shape))
    out, lse = strobe.attention(q, k, v, mask=causal, return_lse=True, backend=kernel)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    dense = strobe.attention(*(t.contiguous() for t in (q, k, v)), mask=causal, backend=kernel)
    assert torch.equal(out, dense)


@each_kernel
def test_nan_of_a_packed_neighbour_stays_there(kernel: str) -> None:
    lengths = [70, 0, 129, 1, 200, 64]
    cu = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    q, k, v = (some(sum(lengths), 4, 128) for _ in range(3))
    clean = strobe.attention_varlen(q, k, v, cu, cu, mask=causal, backend=kernel)
    bounds = cu.tolist()
    for spoilt in (0, 2, 4):
        a, b = bounds[spoilt], bounds[spoilt + 1]
        dirty = [t.clone() for t in (q, k, v)]
        for t in dirty:
            t[a:b] = torch.nan
        out = strobe.attention_varlen(*dirty, cu, cu, mask=causal, backend=kernel)
        assert torch.equal(out[:a], clean[:a]) and torch.equal(out[b:], clean[b:]) and out[a:b].isnan().all()


# ---- streams, threads, devices, synchronisation ----------------------------------------------------------------------
@each_kernel
def test_runs_on_the_current_stream(kernel: str) -> None:
    q, k, v = (some(1, 500, 4, 64) for _ in range(3))
    want = strobe.attention(q * 2, k, v, backend=kernel)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 30 ms: whoever does not wait reads q too early
        late = q * 2
        out = strobe.attention(late, k, v, backend=kernel)
        total = out.float().sum()
    side.synchronize()
    assert torch.equal(out, want) and torch.equal(total, want.float().sum())


@each_kernel
def test_threads_do_not_disturb_each_other(kernel: str) -> None:
    sets = [[some(1, 100 + 10 * i, 4, 64) for _ in range(3)] for i in range(4)]
    want = [strobe.attention(*s, mask=causal, backend=kernel) for s in sets]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(100):
                    j = (i + n) % len(sets)
                    if not torch.equal(strobe.attention(*sets[j], mask=causal, backend=kernel), want[j]):
                        wrong.append(f"thread {i}, call {n}")
        except Exception as error:
            wrong.append(f"thread {i}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[:5]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@each_kernel
def test_tensors_on_another_than_the_current_device(kernel: str) -> None:
    q, k, v = (some(1, 200, 4, 64) for _ in range(3))
    want = strobe.attention(q, k, v, backend=kernel)
    there = strobe.attention(*(t.to("cuda:1") for t in (q, k, v)), backend=kernel)
    assert there.device.index == 1 and torch.cuda.current_device() == 0 and torch.equal(there.cpu(), want.cpu())


@each_kernel
def test_nothing_waits_for_the_gpu(kernel: str) -> None:
    q, k, v = (some(600, 4, 64) for _ in range(3))
    cu = torch.tensor([0, 100, 100, 600], device="cuda", dtype=torch.int32)
    sinks = some(4)

    def calls() -> None:
        for n in (500, 600):  # the second time nothing new has to be planned, the first time it has
            options: dict[str, Any] = {"max_q": n, "max_k": n, "mask": window(n, 3), "sinks": sinks, "return_lse": True}
            strobe.attention_varlen(q, k, v, cu, cu, **options, backend=kernel)
            strobe.attention(q[None, :n], k[None], v[None], mask=causal, backend=kernel)

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
        strobe.attention(q[None, :77], k[None], v[None], mask=causal, backend=kernel)
        strobe.attention_varlen(q, k, v, cu, cu, max_q=555, max_k=555, mask=window(9, 3), sinks=sinks, backend=kernel)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- more than 2^31 elements -----------------------------------------------------------------------------------------
def enough_memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB, {free:.0f} are free")


@each_kernel
def test_tensors_of_more_than_2_to_the_31_elements(kernel: str) -> None:
    enough_memory(40)
    heads, dim, left = 64, 128, 100
    length = 2**31 // (heads * dim) + 300
    q, k, v = (some(1, length, heads, dim) for _ in range(3))
    assert min(t.numel() for t in (q, k, v)) > 2**31
    out = torch.full_like(q, torch.nan)
    strobe.attention(q, k, v, mask=window(left, 0), out=out, backend=kernel)
    assert not torch.stack([out[:, i : i + 4096].isnan().any() for i in range(0, length, 4096)]).any()
    for first in (0, length // 2, length - 200):  # windows are short, so a few rows can be had without the rest
        keys = slice(max(0, first - left), first + 200)
        part = [q[:, first : first + 200], k[:, keys], v[:, keys]]
        for h in (0, heads - 1):
            one = [t[:, :, h : h + 1].contiguous() for t in part]
            exact = strobe.attention(*(t.double() for t in one), mask=window(left, 0), backend="reference")
            same = strobe.attention(*one, mask=window(left, 0), backend="tiled")
            tolerance.check("out", out[:, first : first + 200, h : h + 1], exact, same, factor=4)


@each_kernel
def test_strides_beyond_2_to_the_31_elements(kernel: str) -> None:
    enough_memory(20)
    memory = torch.empty(2**31 + 2**20, device="cuda", dtype=torch.bfloat16)
    shape = (2, 300, 4, 64)
    far = torch.as_strided(memory, shape, (2**31, 256, 64, 1))
    near = some(*shape)
    far.copy_(near)
    q = some(*shape)
    assert torch.equal(strobe.attention(q, far, far, backend=kernel), strobe.attention(q, near, near, backend=kernel))
    assert torch.equal(strobe.attention(far, q, q, backend=kernel), strobe.attention(near, q, q, backend=kernel))
    want = strobe.attention(q, near, near, backend=kernel)
    far.fill_(torch.nan)
    strobe.attention(q, near, near, out=far, backend=kernel)
    assert torch.equal(far, want)


@pytest.mark.parametrize("mask", [None, causal, window(5, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_what_pytorch_computes_can_be_captured(backend: str, mask: strobe.Mask | None) -> None:
    """Numbers of masks are filled in on the device: a capture allows no copies from the host."""
    q, k, v = (torch.randn(2, 60, 4, 32, device="cuda") for _ in "qkv")
    strobe.attention(q, k, v, mask=mask, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = strobe.attention(q, k, v, mask=mask, backend=backend)
    q.normal_()
    graph.replay()
    assert torch.equal(out, strobe.attention(q, k, v, mask=mask, backend=backend))
