"""`strobe.compat.xformers`: what xformers' documentation says of `memory_efficient_attention` and its biases, written out
with dense matrices. Biases are stand-ins, and xformers' own classes where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compat import xformers_classes

import strobe
from strobe import compat as plug_ins
from strobe.compat import xformers as ours
from strobe.compat.xformers import memory_efficient_attention, memory_efficient_attention_forward

LEN_Q, LEN_K, HEADS, DIM = 14, 18, 4, 8


@pytest.fixture(params=["stand-ins", "xformers"])
def classes(request: pytest.FixtureRequest) -> Any:
    if request.param == "stand-ins":
        return xformers_classes
    return pytest.importorskip("xformers.ops.fmha.attn_bias")


def tensors(batch: int = 1, len_q: int = LEN_Q, len_k: int = LEN_K, **options: Any) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(batch, n, HEADS, DIM, generator=made, **options) for n in (len_q, len_k, len_k)]


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """Compute attention as the documentation of xformers has it. Rows that see nothing are 0."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1).nan_to_num(), v)


# ---- masks -----------------------------------------------------------------------------------------------------------


def band(len_q: int, len_k: int, left: int | None, right: int | None, bottom_right: bool) -> torch.Tensor:
    distance = torch.arange(len_k) - torch.arange(len_q)[:, None] - (len_k - len_q if bottom_right else 0)
    seen = torch.ones(len_q, len_k, dtype=torch.bool)
    seen = seen if left is None else seen & (distance >= -left)
    return seen if right is None else seen & (distance <= right)


Q, K = [3, 6, 5], [5, 6, 7]  # lengths of three sequences; 14 queries, 18 keys
STARTS, USED, PADDING = [0, 6, 12, 18], [4, 6, 5], 6  # keys of which some are in use
GAPPY, FEW = [1, 6, 12, 18], [4, 6, 3]
Band = tuple[int | None, int | None, bool]
DENSE: dict[str, tuple[Callable[[Any], Any], Band]] = {
    "LowerTriangularMask": (lambda c: c.LowerTriangularMask(), (None, 0, False)),
    "LowerTriangularFromBottomRightMask": (lambda c: c.LowerTriangularFromBottomRightMask(), (None, 0, True)),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        lambda c: c.LowerTriangularFromBottomRightLocalAttentionMask(_window_size=3),
        (2, 0, True),
    ),
    "LocalAttentionFromBottomRightMask": (lambda c: c.LocalAttentionFromBottomRightMask(3, 2), (3, 2, True)),
}
PACKED: dict[str, tuple[Callable[[Any], Any], Band, list[int], list[int]]] = {
    "BlockDiagonalMask": (lambda c: c.BlockDiagonalMask.from_seqlens(Q, K), (None, None, True), [0, 5, 11, 18], K),
    "BlockDiagonalCausalMask": (
        lambda c: c.BlockDiagonalMask.from_seqlens(Q, K).make_causal(),
        (None, 0, False),
        [0, 5, 11, 18],
        K,
    ),
    "BlockDiagonalCausalFromBottomRightMask": (
        lambda c: c.BlockDiagonalMask.from_seqlens(Q, K).make_causal_from_bottomright(),
        (None, 0, True),
        [0, 5, 11, 18],
        K,
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        lambda c: c.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention(3),
        (2, 0, False),
        [0, 5, 11, 18],
        K,
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        lambda c: c.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention_from_bottomright(3),
        (2, 0, True),
        [0, 5, 11, 18],
        K,
    ),
    "BlockDiagonalPaddedKeysMask": (
        lambda c: c.BlockDiagonalPaddedKeysMask.from_seqlens(Q, PADDING, USED),
        (None, None, True),
        STARTS,
        USED,
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        lambda c: c.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, PADDING, USED),
        (None, 0, True),
        STARTS,
        USED,
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        lambda c: c.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, PADDING, USED, 2, 1),
        (2, 1, True),
        STARTS,
        USED,
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        lambda c: c.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, PADDING, USED, 3),
        (2, 0, True),
        STARTS,
        USED,
    ),
    "BlockDiagonalGappyKeysMask": (
        lambda c: c.BlockDiagonalGappyKeysMask.from_seqlens(Q, GAPPY, FEW),
        (None, None, True),
        GAPPY,
        FEW,
    ),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        lambda c: c.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, GAPPY, FEW),
        (None, 0, True),
        GAPPY,
        FEW,
    ),
    "unsorted": (
        lambda c: c.BlockDiagonalGappyKeysMask.from_seqlens(Q, [12, 1, 6, 18], [5, 4, 6]),
        (None, None, True),
        [12, 1, 6],
        [5, 4, 6],
    ),
    "shared": (
        lambda c: c.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, [2, 4, 2, 18], [5, 8, 6]),
        (None, 0, True),
        [2, 4, 2],
        [5, 8, 6],
    ),
}


def blocks(found: Band, starts: list[int], used: list[int]) -> torch.Tensor:
    seen, row = torch.zeros(LEN_Q, LEN_K, dtype=torch.bool), 0
    for n, start, m in zip(Q, starts, used, strict=False):
        seen[row : row + n, start : start + m] = band(n, m, *found)
        row += n
    return seen


def theirs(bias: Any) -> torch.Tensor | None:
    """Return the pairs that xformers itself shows, by its own objects; None for those that cannot say."""
    if not hasattr(bias, "materialize"):
        return None
    return bias.materialize((LEN_Q, LEN_K)) > -torch.inf


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("batch", [1, 2])
def test_dense_masks(name: str, batch: int, classes: Any) -> None:
    make, found = DENSE[name]
    bias, seen, (q, k, v) = make(classes), band(LEN_Q, LEN_K, *found), tensors(batch)
    assert type(bias).__name__ == name
    if (known := theirs(bias)) is not None:
        assert torch.equal(known, seen)
    wanted = by_hand(q, k, v, torch.where(seen, 0.0, -torch.inf))
    torch.testing.assert_close(memory_efficient_attention(q, k, v, bias), wanted)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_forward_and_backward(name: str, classes: Any) -> None:
    make, found, starts, used = PACKED[name]
    bias, seen = make(classes), blocks(found, starts, used)
    assert type(bias).__name__ == name or name in ("unsorted", "shared")
    if (known := theirs(bias)) is not None:
        assert torch.equal(known, seen)
    q, k, v = tensors(requires_grad=True)
    out = memory_efficient_attention(q, k, v, bias)
    wanted = by_hand(q, k, v, torch.where(seen, 0.0, torch.finfo(torch.float32).min)) * seen.any(1)[:, None, None]
    torch.testing.assert_close(out, wanted)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for mine, dense in zip(
        torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(wanted, (q, k, v), do), strict=True
    ):
        torch.testing.assert_close(mine, dense)


def test_a_causal_mask_with_a_tensor(classes: Any) -> None:
    q, k, v = tensors(2)
    bias = torch.randn(2, HEADS, LEN_Q, LEN_K, requires_grad=True)
    out = memory_efficient_attention(q, k, v, classes.LowerTriangularMaskWithTensorBias(bias))
    wanted = by_hand(q, k, v, bias.masked_fill(~band(LEN_Q, LEN_K, None, 0, False), -torch.inf))
    torch.testing.assert_close(out, wanted)
    (mine,), (dense,) = torch.autograd.grad(out.sum(), bias), torch.autograd.grad(wanted.sum(), bias)
    torch.testing.assert_close(mine, dense)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_a_tensor_is_added_and_has_a_gradient() -> None:
    q, k, v = tensors(2)
    bias = torch.randn(2, HEADS, LEN_Q, LEN_K, requires_grad=True)
    out, wanted = memory_efficient_attention(q, k, v, bias, scale=0.3), by_hand(q, k, v, bias, 0.3)
    torch.testing.assert_close(out, wanted)
    do = torch.randn(out.shape)
    (mine,), (dense,) = torch.autograd.grad(out, bias, do), torch.autograd.grad(wanted, bias, do)
    torch.testing.assert_close(mine, dense)


def test_three_axes_are_one_head() -> None:
    """Diffusers passes batch and heads in one axis."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in tensors(2))
    bias = torch.randn(2 * HEADS, LEN_Q, LEN_K)
    wanted = by_hand(*(t[:, :, None] for t in (q, k, v)), bias[:, None])[:, :, 0]
    torch.testing.assert_close(memory_efficient_attention(q, k, v, bias), wanted)
    assert memory_efficient_attention(q, k, v).shape == q.shape


@pytest.mark.parametrize("expanded", [True, False])
def test_five_axes_are_groups(expanded: bool) -> None:
    """k and v (batch, length, groups, 1, dim), expanded along the heads of a group, are read once; copies may differ."""
    groups, each = 2, 3
    q = torch.randn(2, LEN_Q, groups, each, DIM)
    if expanded:
        leaves = [torch.randn(2, LEN_K, groups, 1, DIM, requires_grad=True) for _ in range(2)]
        k, v = (t.expand(-1, -1, -1, each, -1) for t in leaves)
    else:
        leaves = [torch.randn(2, LEN_K, groups, each, DIM, requires_grad=True) for _ in range(2)]
        k, v = leaves
    bias = torch.randn(2, groups, each, LEN_Q, LEN_K)
    out = memory_efficient_attention(q, k, v, bias)
    wanted = by_hand(*(t.flatten(2, 3) for t in (q, k, v)), bias.flatten(1, 2))
    torch.testing.assert_close(out, wanted.unflatten(2, (groups, each)))
    do = torch.randn(out.shape)
    for mine, dense in zip(
        torch.autograd.grad(out, leaves, do), torch.autograd.grad(wanted, leaves, do.flatten(2, 3)), strict=True
    ):
        torch.testing.assert_close(mine, dense)


def test_one_expanded_head_is_read_once() -> None:
    q, k, v = tensors(2)
    k, v = (t[:, :, :1].expand(-1, -1, HEADS, -1) for t in (k, v))
    torch.testing.assert_close(memory_efficient_attention(q, k, v), by_hand(q, k, v))


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("axes", [4, 5])
def test_each_expanded_head_has_its_own_gradient(axes: int, leaf: bool) -> None:
    """Asked for of the expanded tensors themselves."""
    lead, heads = ((), HEADS) if axes == 4 else ((2,), 3)
    q = torch.randn(2, LEN_Q, *lead, heads, DIM)
    narrow = [torch.randn(2, LEN_K, *lead, 1, DIM, requires_grad=not leaf) for _ in range(2)]
    k, v = (t.expand(*t.shape[:-2], heads, DIM) for t in narrow)
    wide = [t.detach().clone().requires_grad_() for t in (k, v)]
    if leaf:
        k, v = k.requires_grad_(), v.requires_grad_()
    found = torch.autograd.grad(memory_efficient_attention(q, k, v).sin().sum(), (k, v))
    flat = [t if axes == 4 else t.flatten(2, 3) for t in (q, *wide)]
    for mine, dense in zip(found, torch.autograd.grad(by_hand(*flat).sin().sum(), wide), strict=True):
        torch.testing.assert_close(mine, dense)


def test_values_of_another_dim_and_any_strides() -> None:
    q, k, v = tensors(2)
    v = torch.randn(2, LEN_K, DIM + 3, HEADS).transpose(2, 3)
    torch.testing.assert_close(memory_efficient_attention(q, k, v), by_hand(q, k, v))


def test_dropout() -> None:
    q, k, v = tensors(2)
    assert (memory_efficient_attention(q, k, v, p=1.0) == 0).all()
    torch.manual_seed(3)
    first = memory_efficient_attention(q, k, v, p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, memory_efficient_attention(q, k, v, None, 0.5))
    assert not torch.equal(first, memory_efficient_attention(q, k, v, None, 0.5))


def with_axes(axes: int, x: list[torch.Tensor]) -> list[torch.Tensor]:
    """Batches, or heads of batches, or groups of heads."""
    if axes == 3:
        return [t.transpose(1, 2).flatten(0, 1).contiguous() for t in x]
    return [t.unflatten(2, (2, HEADS // 2)) for t in x] if axes == 5 else x


@pytest.mark.parametrize("axes", [3, 4, 5])
def test_parts_merge_and_have_gradients(axes: int) -> None:
    """Two parts of the keys, of which one hides some rows whole. Over all keys, by autograd and without it."""
    x = [t.requires_grad_() for t in with_axes(axes, tensors(2))]
    q, k, v = x
    lead = {3: (2 * HEADS,), 4: (2, HEADS), 5: (2, 2, HEADS // 2)}[axes]
    bias = torch.zeros(*lead, LEN_Q, LEN_K)
    bias[..., 3:6, 10:] = -torch.inf  # the second part
    expected = memory_efficient_attention(q, k, v, bias)
    do = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(expected, x, do)
    cuts = [(slice(0, 10), bias[..., :10]), (slice(10, LEN_K), bias[..., 10:])]
    parts = [ours.memory_efficient_attention_partial(q, k[:, at], v[:, at], b) for at, b in cuts]
    assert parts[0][1].shape == ((2 * HEADS, 1, LEN_Q) if axes == 3 else (*lead, LEN_Q))
    outs, lses = zip(*parts, strict=True)
    for stack in (list, torch.stack):
        if axes == 3:
            break
        out, lse = ours.merge_attentions(stack(outs), stack(lses))
        torch.testing.assert_close(out, expected)
        for mine, whole in zip(torch.autograd.grad(out, x, do, retain_graph=True), gradients, strict=True):
            torch.testing.assert_close(mine, whole)
        detached = [t.detach() for t in outs], [t.detach() for t in lses]
        again, none = ours.merge_attentions(*detached, write_lse=False)
        assert none is None and not again.requires_grad
        torch.testing.assert_close(again, expected.detach())
    out, lse = ours.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    assert not out.requires_grad and not lse.requires_grad
    whole = ours.memory_efficient_attention_backward(do, out, lse, q, k, v, bias)
    for mine, theirs in zip(whole, gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    of_parts = [ours.memory_efficient_attention_backward(do, out, lse, q, k[:, at], v[:, at], b) for at, b in cuts]
    torch.testing.assert_close(of_parts[0][0] + of_parts[1][0], gradients[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in of_parts], 1), gradients[i])


@pytest.mark.parametrize("name", ["BlockDiagonalCausalMask", "BlockDiagonalPaddedKeysMask", "unsorted", "shared"])
def test_gradients_of_packed_sequences_by_hand(name: str, classes: Any) -> None:
    bias, x = PACKED[name][0](classes), tensors(requires_grad=True)
    expected = memory_efficient_attention(*x, bias)
    do = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    out, lse = ours.memory_efficient_attention_forward_requires_grad(*x, bias)
    torch.testing.assert_close(out, expected.detach())
    assert lse.shape == (1, HEADS, LEN_Q)
    found = ours.memory_efficient_attention_backward(do, out, lse, *x, bias)
    for mine, theirs in zip(found, torch.autograd.grad(expected, x, do), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_parts_have_no_dropout() -> None:
    q, k, v = tensors()
    with pytest.raises(strobe.Unsupported, match="p is 0.5; only memory_efficient_attention drops weights"):
        ours.memory_efficient_attention_partial(q, k, v, None, 0.5)
    with pytest.raises(ValueError, match="attn_split and lse_split must be as many, at least one; got 1, 0"):
        ours.merge_attentions([q], [])


def test_the_forward_alone_has_no_gradient() -> None:
    q, k, v = tensors(requires_grad=True)
    out = memory_efficient_attention_forward(q, k, v)
    assert not out.requires_grad
    torch.testing.assert_close(out, by_hand(q, k, v).detach())


COMPILED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "causal": lambda classes, _: classes.LowerTriangularMask(),
    "bottom right": lambda classes, _: classes.LowerTriangularFromBottomRightMask(),
    "tensor": lambda classes, bias: classes.LowerTriangularMaskWithTensorBias(bias),
}


@pytest.mark.parametrize("name", COMPILED)
def test_it_is_one_operation_of_a_compiled_graph(name: str, classes: Any) -> None:
    """Its bias is made inside of the compiled function, as models do, or before."""
    x, values = tensors(2), torch.randn(2, HEADS, LEN_Q, LEN_K)
    made = COMPILED[name](classes, values)
    expected = memory_efficient_attention(*x, made)
    for bias in (lambda: COMPILED[name](classes, values), lambda: made):
        if name == "tensor" and bias() is made:
            continue  # PyTorch's compiler cannot take it as an input
        torch._dynamo.reset()
        function = lambda *t, bias=bias: memory_efficient_attention(*t, bias())  # noqa: E731
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*x), expected)


# ---- what is not there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"attn_bias": xformers_classes.PagedBlockDiagonalPaddedKeysMask()}, "strobe.attention_paged takes paged keys"),
        ({"attn_bias": SimpleNamespace()}, "attn_bias is a SimpleNamespace"),
        ({"op": object()}, "op was given"),
        ({"output_dtype": torch.float64}, "output_dtype is torch.float64"),
    ],
)
def test_what_is_not_there_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(strobe.Unsupported) as raised:
        memory_efficient_attention(*tensors(), **wrong)
    assert says in str(raised.value)


def test_a_subclass_may_mean_something_else() -> None:
    class Mine(xformers_classes.LowerTriangularMask):
        pass

    with pytest.raises(strobe.Unsupported, match="Mine"):
        memory_efficient_attention(*tensors(), Mine())


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_shapes_that_do_not_agree(error: type) -> None:
    q, k, v = tensors(2)
    block = xformers_classes.BlockDiagonalMask.from_seqlens(Q, K)
    for wrong in ((q, k[:, :, :2], v[:, :, :2]), (q[0, 0], k[0, 0], v[0, 0]), (q, k, v[:, 1:]), (q[:1], k, v)):
        with pytest.raises(error, match="query, key and value must"):
            memory_efficient_attention(*wrong)
    with pytest.raises(error, match="batch 1"):
        memory_efficient_attention(q, k, v, block)
    with pytest.raises(error, match="attn_bias must have 4 axes"):
        memory_efficient_attention(q, k, v, torch.zeros(LEN_Q, LEN_K))
    with pytest.raises(error, match="p must be from 0 to 1"):
        memory_efficient_attention(q, k, v, p=1.5)


# ---- the plug-in -----------------------------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of that name with the functions that are replaced."""
    made = {name: ModuleType(name) for name in ("xformers", "xformers.ops", "xformers.ops.fmha")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
        if name != "xformers":
            module.memory_efficient_attention = lambda *args: "theirs"  # type: ignore[attr-defined]
    yield made["xformers.ops"]
    plug_ins.xformers.uninstall()


def test_install_and_uninstall(host: Any) -> None:
    theirs = host.memory_efficient_attention
    plug_ins.xformers.install()
    plug_ins.xformers.install()
    assert host.memory_efficient_attention is memory_efficient_attention
    assert sys.modules["xformers.ops.fmha"].memory_efficient_attention is memory_efficient_attention
    assert plug_ins.status()["xformers"] == "memory_efficient_attention is strobe's"
    plug_ins.xformers.uninstall()
    assert host.memory_efficient_attention is theirs and "xformers" not in plug_ins.status()


def test_without_xformers_install_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(strobe.Unsupported, match="xformers cannot be imported"):
        plug_ins.xformers.install()
