"""`tiled` against the oracle, for every case and dtype, and the properties that tiling must have."""

from __future__ import annotations

import itertools
import weakref

import pytest
import tolerance
import torch
from cases import CASES, Case
from hypothesis import given, settings, strategies as st
from oracle import check, cotangents, expected, expected_gradients, prepare, with_leaves
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strobe.backends import dispatch, reference
from strobe.backends.tiled import forward as tiled
from strobe.backends.tiled.backward import backward
from strobe.backends.tiled.slab import choose_blocks, product
from strobe.problem import Problem
from strobe.problem.arguments import Arguments, Inputs
from strobe.tiled import block_sizes
from strobe.variants import mask as masks
from strobe.variants.ready_made import chunked, prefix, window

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BLOCKS = {"block_q": 24, "block_k": 40}  # small and unequal, so that the cases have many tiles and ragged ones
by_name = {case.name: case for case in CASES}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    p, inputs = prepare(case, dtype)
    poisoned = torch.full((*inputs.q.shape[:3], p.dim_v), torch.nan, dtype=dtype)
    out, lse = tiled.forward(p, inputs, poisoned, **BLOCKS)
    assert out is poisoned
    assert lse.dtype == p.lse_dtype
    exact, same = expected(case, dtype)
    tolerance.check("out", out, exact[0], same[0])
    tolerance.check("lse", lse, exact[1], same[1], floor=tolerance.lse_floor(lse))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    p, inputs = prepare(case, dtype)
    out, lse = tiled.forward(p, inputs, **BLOCKS)
    before = [t.clone() for t in (inputs.q, inputs.k, inputs.v, out, lse)]
    dout, dlse = cotangents(p, inputs)
    found = backward(p, inputs, out, lse, dout, dlse, **BLOCKS)
    for had, have in zip(before, (inputs.q, inputs.k, inputs.v, out, lse), strict=True):
        assert torch.equal(had, have), "an input was changed"
    present = [(name, g) for name, g in zip(found._fields, found, strict=True) if g is not None]
    exact, same = expected_gradients(case, dtype)
    for (name, gradient), e, s in zip(present, exact, same, strict=True):
        assert gradient.dtype == dtype
        floor = tolerance.gradient_floor(name, p, inputs, lse, dout, e)
        tolerance.check(f"d{name}", gradient, e, s, tolerance.GRADIENTS, floor)


@pytest.mark.parametrize("mask", [masks.full, masks.causal], ids=str)
def test_thousands_of_keys(mask: masks.Mask) -> None:
    """The tiles are those it chooses. All of q kᵀ is exact in fp32, in any order: integers whose sums stay below 2²⁴.
    In (c q) kᵀ large products that cancel are rounded before they do, and the error is more than ten times what is
    allowed: whoever scales the queries first is out of bounds."""
    torch.manual_seed(0)

    def integers(most: int, dim: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, (1, 4096, 1, dim)).float()

    a, b, large = integers(256, 21), integers(256, 21), integers(512, 21)
    q = torch.cat([a, b, a + b, integers(256, 1)], -1)
    cancels = torch.cat([large, large, -large, torch.zeros(1, 4096, 1, 1)], -1)
    k = cancels + integers(1, 64)
    p, inputs = check(q, k, torch.randn(1, 4096, 1, 64), mask=mask, scale=2e-3)
    out, lse = tiled.forward(p, inputs)
    exact, same = reference.attention(p, inputs), reference.attention(p, inputs, torch.float32)
    tolerance.check("out", out, exact[0], same[0])
    tolerance.check("lse", lse, exact[1], same[1], floor=tolerance.lse_floor(lse))


@pytest.mark.parametrize("scale", [1e-50, 0.0, -0.3])
def test_scales_that_cannot_wait_for_the_softmax(scale: float) -> None:
    """0 in fp32, or negative: masked scores are -inf and must not be multiplied by it."""
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    p, inputs = check(q, k, v, mask=masks.causal, scale=scale)
    out, _ = tiled.forward(p, inputs, **BLOCKS)
    exact, _ = reference.attention(p, inputs)
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=0)


def test_rows_without_keys() -> None:
    p, inputs = prepare(by_name["empty_rows"], torch.float32)
    out, lse = tiled.forward(p, inputs)
    assert (out[:, :, :70] == 0).all() and (lse[:, :, :70] == -torch.inf).all() and torch.isfinite(lse[:, :, 70:]).all()
    dout, dlse = cotangents(p, inputs)
    dlse[:, :, :70] = torch.nan  # whatever became of -inf further up
    gradients = backward(p, inputs, out, lse, dout, dlse)
    assert (gradients.q[:, :, :70] == 0).all() and torch.isfinite(gradients.k).all()


def test_worked_example() -> None:
    q = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.float64)
    k, v = q - 0.5, torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]], dtype=torch.float64)
    first = torch.tensor([0.697084216, 0.699989959, 0.699999965, 0.7], dtype=torch.float64)
    lse = torch.tensor([15.217269591, 35.001835870, 54.800775717, 74.599765416], dtype=torch.float64)
    causal = torch.tensor([0.1, 0.299989960, 0.499999965, 0.7], dtype=torch.float64)
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        for mask, golden in ((None, first), (masks.causal, causal)):
            p, inputs = check(q.to(dtype), k.to(dtype), v.to(dtype), mask=mask)
            out, found_lse = tiled.forward(p, inputs, block_q=2, block_k=2)
            torch.testing.assert_close(out[0, 0].double(), torch.stack([golden, golden + 0.1], 1), atol=bound, rtol=0)
            if mask is None:
                torch.testing.assert_close(found_lse[0, 0].double(), lse, atol=bound, rtol=1e-7 if bound > 1e-9 else 0)


# ---- properties ------------------------------------------------------------------------------------------------------

lengths = st.integers(1, 40)
mask_kinds = st.sampled_from([masks.full, masks.causal, window(5, 3), prefix(7), chunked(8) & masks.causal])


def some_inputs(len_q: int, len_k: int) -> list[torch.Tensor]:
    return [torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (len_q, len_k, len_k)]


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_q: int = 7, block_k: int = 9, **kwargs: object
) -> tuple:
    p, inputs = check(q, k, v, **kwargs)  # type: ignore[arg-type]
    return tiled.forward(p, inputs, block_q=block_q, block_k=block_k)


def same(a: tuple, b: tuple) -> None:
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@settings(max_examples=25)
@given(lengths, lengths, mask_kinds, *[st.integers(1, 50)] * 2)
def test_tile_sizes_do_not_matter(len_q: int, len_k: int, mask: masks.Mask, block_q: int, block_k: int) -> None:
    q, k, v = some_inputs(len_q, len_k)
    added = {"bias": torch.randn(len_q, len_k).double(), "sinks": torch.randn(2).double()}
    p, inputs = check(q, k, v, mask=mask, dropout=0.3, seed=7, **added)
    sizes = [{"block_q": block_q, "block_k": block_k}, {"block_q": 100, "block_k": 100}]
    results = [tiled.forward(p, inputs, **blocks) for blocks in sizes]
    same(results[0], results[1])
    directions = cotangents(p, inputs)
    gradients = [backward(p, inputs, *results[1], *directions, **blocks) for blocks in sizes]
    same(tuple(gradients[0]), tuple(gradients[1]))


@settings(max_examples=25)
@given(lengths, st.integers(2, 40), st.data())
def test_split_keys_and_merge_by_lse(len_q: int, len_k: int, data: st.DataObject) -> None:
    q, k, v = some_inputs(len_q, len_k)
    at = data.draw(st.integers(1, len_k - 1))
    (o1, l1), (o2, l2) = run(q, k[:, :at], v[:, :at]), run(q, k[:, at:], v[:, at:])
    lse = torch.logaddexp(l1, l2)
    merged = o1 * (l1 - lse).exp().unsqueeze(-1) + o2 * (l2 - lse).exp().unsqueeze(-1)
    same(run(q, k, v), (merged, lse))


@settings(max_examples=15)
@given(lengths, lengths, st.floats(-50, 50))
def test_permuted_keys_and_shifted_scores(len_q: int, len_k: int, shift: float) -> None:
    q, k, v = some_inputs(len_q, len_k)
    out, lse = run(q, k, v)
    order = torch.randperm(len_k)
    same((out, lse), run(q, k[:, order], v[:, order]))
    same((out, lse + shift), run(q, k, v, bias=torch.full((1, 1), shift, dtype=torch.float64)))


# ---- memory and masks that skip --------------------------------------------------------------------------------------


class LiveMemory(TorchDispatchMode):
    """Bytes of all storages that operations have made and that are still alive; `peak` is the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.live = self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given_storages = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self._add(t.untyped_storage(), given_storages)
        return result

    def _add(self, storage: torch.UntypedStorage, given_storages: set[int]) -> None:
        key = storage._cdata
        if key in given_storages or key in self.known:
            return
        size = storage.nbytes()
        self.known[key] = size
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)

        def gone() -> None:
            self.live -= self.known.pop(key)

        weakref.finalize(storage, gone)


def test_memory_grows_with_the_length_and_not_its_square() -> None:
    """Grouped heads, both passes: neither the scores nor repeated keys are ever there."""
    peaks = []
    for length in (2048, 8192):
        q, k, v = (torch.randn(1, length, h, 16) for h in (4, 1, 1))
        p, inputs = check(q, k, v, mask=window(200, 0))
        with LiveMemory() as memory:
            out, lse = tiled.forward(p, inputs)
            backward(p, inputs, out, lse, out, lse)
        results = sum(t.numel() * 4 for t in (out, lse, q, k, v))
        assert memory.largest <= max(2 * results, 8 << 20)
        peaks.append(memory.peak - results)
    assert peaks[1] < 20 << 20
    assert peaks[1] - peaks[0] < 6 << 20


def test_keys_outside_the_mask_are_not_read() -> None:
    q, k, v = (torch.randn(1, 64, 1, 8) for _ in range(3))
    k[:, 32:], v[:, 32:] = torch.nan, torch.nan
    p, inputs = check(q, k, v, mask=masks.causal)
    out, lse = tiled.forward(p, inputs, block_q=16, block_k=16)
    assert torch.isfinite(out[:, :, :32]).all() and torch.isfinite(lse[:, :, :32]).all()


def test_block_sizes_can_be_set_and_are_told() -> None:
    p, inputs = prepare(by_name["plain"], torch.float32)
    with block_sizes(8, 40):
        assert dispatch.get("tiled").details(p) == {"block_q": 8, "block_k": 40}
        tiled.forward(p, inputs)
    assert choose_blocks(p).q > 8
    for bad in (0, -3, True, 2.5):
        with pytest.raises(ValueError, match="block_k must be"), block_sizes(block_k=bad):  # type: ignore[arg-type]
            pass


def test_extra_bytes_covers_what_is_really_allocated() -> None:
    q, k, v = (torch.randn(1, 2048, 4, 64) for _ in range(3))
    p, inputs = check(q, k, v)
    with LiveMemory() as memory:
        out, lse = tiled.forward(p, inputs)
    results = 4 * (out.numel() + lse.numel())
    assert memory.peak - results <= 1.5 * dispatch.get("tiled").extra_bytes(p)


def test_the_constant_bias_costs_no_gradient() -> None:
    p, inputs = prepare(by_name["bias"], torch.float32)
    out, lse = tiled.forward(p, inputs)
    assert backward(p.backward(("q", "k")), inputs, out, lse, out).bias is None


def test_infinite_bias_hides_like_a_mask() -> None:
    p, inputs = prepare(by_name["bias"], torch.float64)
    inputs.bias[:, :, 3] = -torch.inf
    inputs.bias[:, :, 5, :50] = -torch.inf
    out, lse = tiled.forward(p, inputs, **BLOCKS)
    exact = reference.attention(p, inputs)
    torch.testing.assert_close((out, lse), exact, atol=1e-12, rtol=1e-12)
    assert (lse[:, :, 3] == -torch.inf).all()
    assert all(torch.isfinite(g).all() for g in backward(p, inputs, out, lse, *cotangents(p, inputs), **BLOCKS)[:3])


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_product_overwrites_its_buffer(dtype: torch.dtype, factor: float) -> None:
    """Whatever lay there before: with a scale of 0 old scores stayed in place, and gradients were made of them."""
    a, b = (torch.randn(4, 40, 32, dtype=dtype) for _ in range(2))
    found = product(a, b.mT, torch.full((8000,), torch.nan, dtype=dtype), factor)
    torch.testing.assert_close(found, factor * (a @ b.mT))


@pytest.mark.parametrize("factor", [1e-46, -1e-46, 1e-40])
def test_a_factor_that_is_nothing_in_fp32(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`baddbmm` on Arm leaves its output alone where alpha and beta are 0, as 1e-46 is in fp32, and with denormals
    flushed also 1e-40."""
    baddbmm = torch.baddbmm

    def on_arm(into: torch.Tensor, *args: object, alpha: float, **more: object) -> torch.Tensor:
        return into if abs(alpha) < 2**-126 else baddbmm(into, *args, alpha=alpha, **more)

    monkeypatch.setattr(torch, "baddbmm", on_arm)
    a, b = (torch.randn(1, 4, 8) for _ in range(2))
    torch.testing.assert_close(product(a, b.mT, torch.full((16,), torch.nan), factor), torch.zeros(1, 4, 4))


# ---- packed sequences that are alike ---------------------------------------------------------------------------------

ALIKE = ((7, 7), (7, 7), (3, 5), (7, 7), (3, 5), (0, 2), (3, 5), (7, 7), (4, 0), (3, 5), (7, 7), (0, 2), (7, 7), (4, 0))


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", 0, 0, heads=4, heads_k=2, dim=8, lengths=ALIKE),
        Case("causal", 0, 0, heads=2, dim=8, mask=masks.causal, softcap=2.0, sinks=True, lengths=ALIKE),
        Case("dropout", 0, 0, heads=2, dim=8, dropout=0.3, lengths=ALIKE),
        Case("bias", 0, 0, heads=2, dim=8, bias=(len(ALIKE), 2, 7, 7), lengths=ALIKE),
        Case("mask", 0, 0, heads=2, dim=8, mask_tensor=(len(ALIKE), 1, 7, 7), lengths=ALIKE),
    ],
    ids=lambda case: case.name,
)
def test_packed_sequences_that_are_alike(case: Case) -> None:
    p, inputs = prepare(case, torch.float64)
    held, leaves = with_leaves(inputs)
    exact = reference.attention(p, held)
    out, lse = tiled.forward(p, inputs)
    torch.testing.assert_close((out, lse), exact, atol=1e-12, rtol=1e-10)
    dout, dlse = torch.randn_like(out), torch.where(lse.isfinite(), torch.randn_like(lse), 0)
    finite = torch.where(exact[1].isfinite(), exact[1], 0)
    gradients = torch.autograd.grad((exact[0] * dout).sum() + (finite * dlse).sum(), leaves)
    found = [g for g in backward(p, inputs, out, lse, dout, dlse) if g is not None]
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("mask", [masks.full, masks.causal], ids=repr)
def test_parts_of_packed_sequences_that_are_alike(mask: masks.Mask) -> None:
    """Alike are those that also stand at the same positions."""
    cu = torch.arange(0, 41, 4, dtype=torch.int32)
    q, k, v = torch.randn(3, 40, 2, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 8, 0, 8], [4, 8, 0, 8]] * 5, dtype=torch.int32)
    a = Arguments(q, k, v, cu_q=cu, cu_k=cu, max_q=4, max_k=4, mask=mask, positions=positions, return_lse=True)
    p, layout = Problem.of(a)
    inputs = Inputs.of(a, layout)
    torch.testing.assert_close(tiled.forward(p, inputs), reference.attention(p, inputs), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("lengths", [[7] * 300, [3, 7, 5] * 100], ids=["equal", "three lengths"])
def test_short_packed_sequences_are_worked_on_together(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """300 products of their own took 100 times as long as the same sequences in a batch."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = torch.randn(3, sum(lengths), 4, 32)
    a = Arguments(q, k, v, cu_q=cu, cu_k=cu, max_q=7, max_k=7, return_lse=True)
    p, layout = Problem.of(a)
    inputs = Inputs.of(a, layout)
    products, bmm = [], torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *a, **b: products.append(1) or bmm(*a, **b))
    out, lse = tiled.forward(p, inputs)
    assert len(products) <= 6
    backward(p, inputs, out, lse, out)
    assert len(products) <= 18
