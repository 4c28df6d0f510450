"""Never silently wrong: scales, infinities and NaN, rows and tensors without keys, memory that overlaps or changes."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import strobe
from strobe.call.bound_call import bind
from strobe.problem.arguments import Arguments

BACKENDS = ["reference", "tiled", None]


def same_as_reference(*tensors: torch.Tensor, atol: float = 1e-5, **arguments: object) -> None:
    expected, expected_lse = strobe.attention(*tensors, **arguments, backend="reference", return_lse=True)
    for backend in ("tiled", None):
        out, lse = strobe.attention(*tensors, **arguments, backend=backend, return_lse=True)
        torch.testing.assert_close(out, expected, atol=atol, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(lse, expected_lse, atol=atol, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("scale", [-1.0, 0.0, -0.0, 1e-46, 1e-30, 1e30])
@pytest.mark.parametrize("mask", [strobe.full, strobe.causal, strobe.window(2, 0)], ids=str)
def test_any_scale(mask: strobe.Mask, scale: float) -> None:
    q = torch.randn(2, 20, 2, 8)
    same_as_reference(q, q, q, mask=mask, scale=scale, atol=1e-5 if abs(scale) < 1e3 else 1e-3 * abs(scale))


@pytest.mark.parametrize("backend", [None, "reference", "tiled"])
@pytest.mark.parametrize(
    "dtype, arguments",
    [
        (torch.float32, {"scale": 3.4e38}),
        (torch.float32, {"scale": -3e38}),
        (torch.bfloat16, {"scale": 1e300}),
        (torch.float64, {"scale": 1.7e308}),
        (torch.float32, {"scale": 1e30, "softcap": 1e-15}),
        (torch.float32, {"softcap": 3e38}),
    ],
)
def test_scales_that_scores_cannot_have(dtype: torch.dtype, arguments: dict[str, float], backend: str | None) -> None:
    q = torch.randn(1, 4, 1, 8, dtype=dtype)
    with pytest.raises(ValueError, match="scale is .* too large"):
        strobe.attention(q, q, q, **arguments, backend=backend)


def test_the_largest_scales() -> None:
    q = torch.randn(1, 4, 1, 8)
    for scale, dtype in ((2e38, torch.float32), (1e308, torch.float64)):
        same_as_reference(*(3 * [0 * q.to(dtype)]), scale=scale)


# ---- no keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [60000.0, math.inf, math.nan])
def test_without_keys_everything_is_attached_and_zero(value: float) -> None:
    q = torch.full((1, 3, 2, 4), value, dtype=torch.float16, requires_grad=True)
    k = torch.randn(1, 0, 2, 4, dtype=torch.float16, requires_grad=True)
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    out, lse = strobe.attention(q, k, k, sinks=sinks, return_lse=True)
    assert (out == 0).all() and torch.equal(lse, sinks.detach()[None, :, None].expand(1, 2, 3))
    dq, dk, dsinks = torch.autograd.grad(out.sum() + lse.sum(), (q, k, sinks))
    assert (dq == 0).all() and dk.shape == k.shape and torch.equal(dsinks, torch.full((2,), 3.0))


@pytest.mark.parametrize("which", ["bias", "sinks", "q"])
def test_without_keys_results_hang_on_whatever_needs_gradients(which: str) -> None:
    tensors = {"q": torch.randn(1, 3, 2, 4), "bias": torch.zeros(3, 0), "sinks": torch.zeros(2)}
    tensors[which].requires_grad_()
    k = torch.randn(1, 0, 2, 4)
    out, lse = strobe.attention(tensors["q"], k, k, bias=tensors["bias"], sinks=tensors["sinks"], return_lse=True)
    assert out.requires_grad and lse.requires_grad
    (out.sum() + lse.sum()).backward()
    assert torch.isfinite(tensors[which].grad).all()  # type: ignore[arg-type]


def test_packed_sequences_without_any_key() -> None:
    q, k = torch.randn(3, 2, 4, requires_grad=True), torch.randn(0, 2, 4)
    cu_q, cu_k = torch.tensor([0, 2, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out, lse = strobe.attention_varlen(q, k, k, cu_q, cu_k, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all() and lse.shape == (2, 3)
    out.sum().backward()
    assert (q.grad == 0).all()  # type: ignore[union-attr]


def test_values_of_no_width_still_have_an_lse() -> None:
    q, v = torch.randn(1, 5, 2, 8), torch.empty(1, 5, 2, 0)
    out, lse = strobe.attention(q, q, v, return_lse=True)
    assert out.shape == (1, 5, 2, 0)
    torch.testing.assert_close(lse, strobe.attention(q, q, q, return_lse=True)[1])


# ---- infinities and NaN ----------------------------------------------------------------------------------------------


FILLS = [torch.finfo(torch.float32).min, -1e20, -1e4]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("what", ["plain", "lse", "sinks", "bias", "grouped", "packed"])
@pytest.mark.parametrize("backend", [*BACKENDS, "aten_cpu"])
def test_gradients_of_rows_whose_scores_are_all_huge(backend: str | None, what: str, fill: float) -> None:
    """The LSE has no bits left for the logarithm of the sum; the probabilities are 1/n all the same."""
    if backend == "aten_cpu" and what in ("sinks", "bias", "packed"):
        pytest.skip("it has none")
    if backend == "reference" and fill == -1e4:
        pytest.skip("its forward pass, in float64, sees more of the scores than the gradients, in fp32")
    len_k, heads_k = 6, 1 if what == "grouped" else 2
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    k, v = (torch.randn(1, len_k, heads_k, 8, requires_grad=True) for _ in range(2))
    bias = torch.randn(4, len_k)
    bias[1:3] = fill
    bias.requires_grad_(what == "bias")
    sinks = torch.tensor([fill, 0.5]).requires_grad_() if what == "sinks" else None
    leaves = [t for t in (q, k, v, bias, sinks) if t is not None and t.requires_grad]
    if what == "packed":
        cu_q, cu_k = torch.tensor([[0, 4], [0, len_k]], dtype=torch.int32)
        given = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k)
        out, lse = strobe.attention_varlen(*given, bias=bias[None, None], return_lse=True, backend=backend)
        out, lse = out[None], lse[None]
    else:
        out, lse = strobe.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) * (what == "lse")
    found = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves)

    # The textbook in fp32; the gradient of an LSE by a score is its probability.
    one, two, three = (t.transpose(1, 2).repeat_interleave(2 // t.shape[2], 1) for t in (q, k, v))
    s = one @ two.mT * 8**-0.5 + bias
    s = s if sinks is None else torch.cat([s, sinks[:, None, None].expand(1, 2, 4, 1)], -1)
    p = s.softmax(-1)
    through_lse = (p.detach() * s * dlse[..., None]).sum()
    scalar = ((p[..., :len_k] @ three).transpose(1, 2) * dout).sum() + through_lse
    for mine, expected in zip(found, torch.autograd.grad(scalar, leaves), strict=True):
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("fill", FILLS)
def test_second_derivatives_of_rows_whose_scores_are_all_huge(fill: float) -> None:
    """The gradient of the LSE by q is the mean of the keys if they are equal, whatever q is: its derivative is 0."""
    q = torch.randn(1, 3, 1, 4, requires_grad=True)
    k = torch.randn(1, 1, 1, 4).expand(1, 5, 1, 4).clone().requires_grad_()
    _, lse = strobe.attention(q, k, k, bias=torch.full((3, 5), fill), scale=1.0, return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), q, create_graph=True)
    torch.testing.assert_close(dq, k.mean(1, keepdim=True).expand_as(dq).detach())
    (dk,) = torch.autograd.grad(dq.sum(), k)
    torch.testing.assert_close(dk, torch.full_like(dk, 3 / 5))


def test_an_lse_over_more_keys_than_those_at_hand() -> None:
    """Shards of a sequence are differentiated with the LSE of all of it, which is no reason to compute it again."""
    q, k, v = torch.randn(3, 1, 8, 2, 8)
    q, k = 100 * q, 100 * k
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = strobe.attention(*whole, scale=1.0, return_lse=True, backend="tiled")
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, whole, dout)
    assert lse.abs().max() > 1e4
    parts = []
    for keys in (slice(0, 4), slice(4, 8)):
        a = Arguments(q, k[:, keys], v[:, keys], scale=1.0, return_lse=True, backend="tiled")
        parts.append(bind(a, needs_grad=True).backward(("q", "k", "v"), a, out.detach(), lse.detach(), dout, None))
    torch.testing.assert_close(parts[0].q + parts[1].q, expected[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(torch.cat([part.v for part in parts], 1), expected[2], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("backend", [*BACKENDS, "aten_cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_the_least_number_is_the_mean_of_v(dtype: torch.dtype, backend: str | None, needs_grad: bool) -> None:
    """PyTorch does the same: finfo.min is a number, and equal scores give equal weights."""
    q, k, v = torch.randn(3, 1, 5, 2, 8).to(dtype)
    bias = torch.zeros(5, 5, dtype=dtype)
    bias[1] = torch.finfo(dtype).min
    bias[2, :3] = torch.finfo(dtype).min
    bias.requires_grad_(needs_grad and backend != "aten_cpu")
    out, lse = strobe.attention(q, k, v, bias=bias, backend=backend, return_lse=True)
    torch.testing.assert_close(out[0, 1].float(), v[0].float().mean(0), atol=2e-2, rtol=0)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("len_k", [1, 3, 15, 40])
@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "sinks"])
def test_nan_that_is_read_comes_out(which: str, len_k: int, backend: str | None) -> None:
    """NaN comes out in the output and, but for v, in the LSE; rows and heads that do not read it stay clean."""
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, len_k, 2, 8), torch.randn(1, len_k, 2, 8)
    extra = {"bias": torch.zeros(2, 4, len_k), "sinks": torch.zeros(2)}
    at = {"q": q[0, 1, 0], "k": k[0, 0, 0], "v": v[0, 0, 0], "bias": extra["bias"][0, 1], "sinks": extra["sinks"][:1]}
    at[which].fill_(math.nan)
    given = {which: extra[which]} if which in extra else {}
    out, lse = strobe.attention(q, k, v, backend=backend, return_lse=True, **given)
    rows = [1] if which in ("q", "bias") else list(range(4))
    others = [r for r in range(4) if r not in rows]
    assert out[0, rows, 0].isnan().all() and not out[0, others, 0].isnan().any() and not out[0, :, 1].isnan().any()
    if which != "v":
        assert lse[0, 0, rows].isnan().all() and not lse[0, 0, others].isnan().any() and not lse[0, 1].isnan().any()


@pytest.mark.parametrize("backend", [*BACKENDS, "aten_cpu"])
@pytest.mark.parametrize("sign", [1, -1])
def test_finite_inputs_have_a_finite_answer(sign: int, backend: str | None) -> None:
    """Scores of 3e10: what a softmax subtracts must be rounded as what it is subtracted from."""
    q = torch.full((1, 3, 1, 64), 60000.0, dtype=torch.float16)
    v = torch.randn(1, 3, 1, 64, dtype=torch.float16)
    out, lse = strobe.attention(q, sign * q, v, backend=backend, return_lse=True)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), atol=1e-3, rtol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, sign * 60000.0**2 * 8))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_infinite_sinks(backend: str) -> None:
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    sinks = torch.tensor([math.inf, -math.inf])
    out, lse = strobe.attention(q, q, q, sinks=sinks, backend=backend, return_lse=True)
    expected, expected_lse = strobe.attention(q, q, q, return_lse=True)
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == math.inf).all()
    torch.testing.assert_close(out[:, :, 1], expected[:, :, 1])
    torch.testing.assert_close(lse[:, 1], expected_lse[:, 1])
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert torch.isfinite(gradient).all() and (gradient[:, :, 0] == 0).all()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["mask", "cu"])
def test_what_is_changed_between_forward_and_backward_is_noticed(which: str) -> None:
    q = torch.randn(4, 2, 8, requires_grad=True)
    if which == "mask":
        changed = torch.rand(4, 4) > 0.3
        out = strobe.attention(q[None], q[None], q[None], mask=changed)
    else:
        changed = torch.tensor([0, 1, 4], dtype=torch.int32)
        out = strobe.attention_varlen(q, q, q, changed, changed.clone())
    changed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("which", ["k", "v", "part of q", "bias"])
def test_out_must_not_share_memory_with_what_is_read(which: str, repeat: int) -> None:
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    larger = torch.randn(1, 5, 2, 8)
    bias = torch.randn(64)[:16].view(4, 4)
    out = {"k": k, "v": v, "part of q": larger[:, :4], "bias": bias.as_strided((1, 4, 2, 8), (64, 16, 8, 1))}[which]
    q = larger[:, 1:] if which == "part of q" else q
    for _ in range(repeat):
        with pytest.raises(ValueError, match="out shares memory"):
            strobe.attention(q, k, v, bias=bias if which == "bias" else None, out=out)


def test_out_beside_the_inputs_in_one_tensor_is_fine() -> None:
    together = torch.randn(1, 4, 4, 2, 8)  # q, k, v and the output interleaved row by row
    q, k, v, out = together.unbind(2)
    expected = strobe.attention(q, k, v)
    for _ in range(2):
        assert strobe.attention(q, k, v, out=out) is out
        torch.testing.assert_close(out, expected)
    queries = torch.randn(1, 4, 2, 8)
    expected = strobe.attention(queries, k, v)
    torch.testing.assert_close(strobe.attention(queries, k, v, out=queries), expected)  # q itself may be replaced


def test_out_whose_elements_overlap_is_refused() -> None:
    q = torch.randn(1, 4, 2, 8)
    for strides in ((0, 8, 4, 1), (64, 16, 4, 1), (0, 0, 0, 1)):
        out = torch.zeros(200).as_strided((1, 4, 2, 8), strides)
        with pytest.raises(ValueError, match="share memory"):
            strobe.attention(q, q, q, out=out)


@pytest.mark.parametrize("backend", ["reference", "tiled", "aten_cpu"])
def test_inputs_whose_elements_overlap_are_right_each_time(backend: str) -> None:
    base = torch.randn(400)
    q = base.as_strided((2, 20, 2, 8), (20, 8, 4, 1))
    expected = strobe.attention(*(q.contiguous() for _ in range(3)))
    for _ in range(3):
        torch.testing.assert_close(strobe.attention(q, q, q, backend=backend), expected)
    leaf = base.clone().requires_grad_()
    q = leaf.as_strided((2, 20, 2, 8), (20, 8, 4, 1))
    dense = q.detach().contiguous().requires_grad_()
    (found,) = torch.autograd.grad(strobe.attention(q, q, q, backend=backend).square().sum(), q)
    (expected,) = torch.autograd.grad(strobe.attention(dense, dense, dense).square().sum(), dense)
    torch.testing.assert_close(found, expected)


def test_conjugate_and_negative_views_are_what_they_mean() -> None:
    q = torch.randn(1, 20, 2, 8)
    view = torch._neg_view(q)
    torch.testing.assert_close(strobe.attention(view, q, q), strobe.attention(-q, q, q))


# ---- repeatable ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tiled", "aten_cpu"])
def test_repeatable_in_any_thread_with_as_many_threads(backend: str) -> None:
    """`deterministic` promises this on a CPU."""
    q, k, v = (torch.randn(2, 300, 4, 64, requires_grad=True) for _ in range(3))
    found: list[tuple[torch.Tensor, ...]] = []

    def run(threads: int) -> None:
        torch.set_num_threads(threads)
        out = strobe.attention(q, k, v, deterministic=True, backend=backend)
        found.append((out.detach(), *torch.autograd.grad(out.sin().sum(), (q, k, v))))

    usual = torch.get_num_threads()
    try:
        for threads in (1, 2):
            run(threads)
            other = threading.Thread(target=run, args=(threads,))
            other.start()
            other.join()
    finally:
        torch.set_num_threads(usual)
    for here, there in (found[:2], found[2:]):
        assert all(map(torch.equal, here, there))
