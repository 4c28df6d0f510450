"""strobe under SDPA: PyTorch's flash operators, the registry, and the patch. A CPU has no flash operators of PyTorch's, so
ours are registered for it here; what a GPU chooses is tested in tests/gpu."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import strobe
from strobe.compat import aten_flash, sdpa as ours

F = torch.nn.functional
aten = torch.ops.aten
SOURCE = Path(__file__).resolve().parents[2] / "src"
FLASH = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    ours.restore()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    library = aten_flash.library("CPU")
    yield
    library._destroy()


def qkv(
    *lead: int, len_q: int = 17, len_k: int = 17, heads_k: int = 4, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    shapes = ((4, len_q), (heads_k, len_k), (heads_k, len_k))
    return [torch.randn(*(lead or (2,)), h, n, 16, dtype=dtype, requires_grad=True) for h, n in shapes]


def gradients(out: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.arange(out.numel()).view(out.shape).sin()
    return torch.autograd.grad((out * weights).sum(), tensors, retain_graph=True)


def same(found: torch.Tensor, expected: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, tensors), gradients(expected, tensors))


# ---- the flash operators ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_the_dense_operator(is_causal: bool, heads_k: int) -> None:
    x = qkv(heads_k=heads_k)
    out, lse, cu_q, cu_k, max_q, max_k, _, _, _ = aten._scaled_dot_product_flash_attention(
        *x, 0.0, is_causal, scale=0.3
    )
    assert cu_q is None and cu_k is None and (max_q, max_k) == (17, 17) and lse.shape == (2, 4, 17)
    same(out, F.scaled_dot_product_attention(*x, is_causal=is_causal, scale=0.3, enable_gqa=heads_k < 4), x)


@pytest.mark.usefixtures("on_cpu")
def test_causal_ends_at_the_last_query_and_the_last_key() -> None:
    x = qkv(len_q=5, len_k=12)
    out = aten._scaled_dot_product_flash_attention(*x, 0.0, True)[0]
    same(out, strobe.attention(*x, mask=strobe.causal, layout="bhsd"), x)


@pytest.mark.usefixtures("on_cpu")
def test_outputs_and_gradients_lie_in_memory_as_tracers_expect() -> None:
    whole = torch.randn(2, 17, 3, 4, 16, dtype=torch.float64, requires_grad=True)  # a fused projection
    length_first = [
        t.transpose(0, 1).contiguous().transpose(0, 1) for t in whole.unbind(2)
    ]  # as in (length, batch, dim)
    for q, k, v in (whole.unbind(2), [t.contiguous() for t in whole.unbind(2)], length_first):
        x = [t.transpose(1, 2) for t in (q, k, v)]
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*x)
        assert out.stride() == torch.empty_like(x[0]).stride()
        found = aten._scaled_dot_product_flash_attention_backward(
            out, *x, out, lse, None, None, 17, 17, 0.0, False, torch.empty(2), torch.empty(0)
        )
        assert [t.stride() for t in found] == [torch.empty_like(t).stride() for t in x]


@pytest.mark.usefixtures("on_cpu")
def test_dropout_is_the_same_in_both_passes() -> None:
    """The output is linear in v: its derivative in the direction of v is the output itself, if the same weights were
    dropped."""
    q, k, v = qkv()
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0]
    assert not torch.equal(out, aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0])
    weights = torch.randn_like(out)
    (dv,) = torch.autograd.grad((out * weights).sum(), v)
    torch.testing.assert_close((dv * v).sum(), (out * weights).sum())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
def test_varlen_attn(window: tuple[int, int]) -> None:
    x = [torch.randn(17, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 4, 4)]
    cu = torch.tensor([0, 5, 17], dtype=torch.int32)
    found = varlen_attn(*x, cu, cu, 12, 12, window_size=window)
    left, right = (None if n < 0 else n for n in window)
    same(found, strobe.attention_varlen(*x, cu, cu, mask=strobe.window(left, right)), x)


@pytest.mark.usefixtures("on_cpu")
def test_keys_in_use_and_outputs_in_place() -> None:
    q, k, v = (torch.randn(2 * n, 4, 16) for n in (3, 9, 9))
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (3, 9))
    used = torch.tensor([4, 7], dtype=torch.int32)
    arguments = (q, k, v, cu_q, cu_k, 3, 9, 0.0, False, False)
    options: dict[str, Any] = {"seqused_k": used, "window_size_left": -1, "window_size_right": 0}
    found, lse, *_ = aten._flash_attention_forward(*arguments, **options)
    for i, n in enumerate(used.tolist()):
        rows, keys = slice(3 * i, 3 * i + 3), slice(9 * i, 9 * i + n)
        torch.testing.assert_close(
            found[rows], strobe.attention(q[rows], k[keys], v[keys], mask=strobe.causal, layout="bshd")
        )
    if hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):  # torch 2.13 has it, 2.11 has not
        into = torch.empty_like(q)
        rows = aten._flash_attention_forward_no_dropout_inplace(into, *arguments, **options)
        torch.testing.assert_close((into, rows), (found, lse))


@pytest.mark.usefixtures("on_cpu")
def test_slopes_arrive() -> None:
    x = [t.transpose(1, 2) for t in qkv()]
    slopes = torch.rand(4)
    found = aten._flash_attention_forward(*x, None, None, 17, 17, 0.0, False, False, alibi_slopes=slopes)[0]
    torch.testing.assert_close(found, strobe.attention(*x, score=strobe.alibi(slopes)))


@pytest.mark.usefixtures("on_cpu")
def test_what_is_not_built_is_refused() -> None:
    x = qkv()
    with pytest.raises(strobe.Unsupported, match="return_debug_mask"):
        aten._scaled_dot_product_flash_attention(*x, 0.1, False, True)
    packed = [torch.randn(17, 4, 16) for _ in range(3)]
    cu = torch.tensor([0, 17], dtype=torch.int32)
    with pytest.raises(strobe.Unsupported, match="neither seqused_k nor cum_seq_k says how many keys"):
        aten_flash._flash_forward(*packed, cu, None, 17, 17, 0.0, False, False, block_table=torch.zeros(1, 1).int())
    with pytest.raises(strobe.Unsupported, match="cum_seq_k is missing"):
        aten._flash_attention_forward(*packed, cu, None, 17, 17, 0.0, False, False)


@pytest.mark.usefixtures("on_cpu")
def test_compiled() -> None:
    x = [t.transpose(1, 2) for t in torch.randn(3, 2, 17, 4, 16, requires_grad=True)]

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0].sin()

    same(torch.compile(f, fullgraph=True, backend="aot_eager")(*x), f(*x), x)


# ---- the registry ----------------------------------------------------------------------------------------------------


def state() -> tuple[Any, ...]:
    attention = torch.nn.attention
    return (
        attention.list_flash_attention_impls(),
        attention.current_flash_attention_impl(),
        torch._C._get_sdp_priority_order(),
        torch._C._dispatch_dump(FLASH),
        F.scaled_dot_product_attention,
    )


def test_activate_and_restore() -> None:
    before = state()
    assert not ours.active() and ours.status() is None
    ours.activate()
    ours.activate()  # twice is like once
    assert torch.nn.attention.current_flash_attention_impl() == "strobe" and ours.active()
    assert strobe.compat.status() == {"torch": "strobe is SDPA's flash backend"}
    assert "aten_flash" in torch._C._dispatch_dump(FLASH) or torch._C._dispatch_dump(FLASH) != before[3]
    ours.restore()
    assert state() == before and strobe.compat.status() == {}
    ours.restore()
    assert state() == before


def test_another_implementation_may_follow_or_have_been_there() -> None:
    removed: list[str] = []

    class Other:
        def remove(self) -> None:
            removed.append("other")

    attention = torch.nn.attention
    attention.register_flash_attention_impl("other", register_fn=Other)
    try:
        attention.activate_flash_attention_impl("other")
        ours.activate()
        assert removed == ["other"]
        ours.restore()
        assert attention.current_flash_attention_impl() == "other"
        ours.activate()
        attention.activate_flash_attention_impl("other")  # takes our place
        assert not ours.active() and ours.status() is None
        ours.restore()
        assert attention.current_flash_attention_impl() == "other"
    finally:
        attention.restore_flash_attention_impl()
        del ours._implementations()["other"]


def test_flash_comes_first_once_the_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sets its order when it first chooses: ours must come later, but not start the GPU."""
    waiting: list[Any] = []
    order = [3, 0, 1, 2, 4]
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **more: empty(*shape, **more))
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: list(order))
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda new: order.__setitem__(slice(None), new))
    ours.activate()
    assert order == [3, 0, 1, 2, 4]
    waiting.pop()()
    assert order == [1, 3, 0, 2, 4]
    ours.restore()
    assert order == [3, 0, 1, 2, 4]
    ours.activate()
    ours.restore()
    waiting.pop()()  # the GPU starts only now: nothing is to be done
    assert order == [3, 0, 1, 2, 4]


def test_an_older_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("register_flash_attention_impl", "current_flash_attention_impl", "_registry"):
        monkeypatch.delattr(torch.nn.attention, name)
    with pytest.raises(strobe.Unsupported, match="use patched"):
        ours.activate()
    ours.restore()
    assert ours.status() is None


# ---- the patch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call that strobe runs."""
    found: list[str] = []
    original = strobe.sdpa

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append("sdpa")
        return original(*args, **kwargs)

    monkeypatch.setattr(ours, "sdpa", counted)
    return found


def test_patched_takes_every_call_and_ends(calls: list[str]) -> None:
    x, before = qkv(), state()
    mask = torch.rand(2, 1, 17, 17) < 0.7
    expected = F.scaled_dot_product_attention(*x, attn_mask=mask)
    with ours.patched():
        assert strobe.compat.status() == {"torch": "SDPA is patched"}
        with ours.patched():
            same(F.scaled_dot_product_attention(*x, attn_mask=mask), expected, x)
        same(imported_by_name(*x, mask), expected, x)
        assert calls == ["sdpa"] * 2
    with pytest.raises(ZeroDivisionError), ours.patched():
        raise ZeroDivisionError
    assert state() == before and ours.status() is None
    F.scaled_dot_product_attention(*x)
    imported_by_name(*x)
    assert calls == ["sdpa"] * 2


def test_patched_reaches_other_threads(calls: list[str]) -> None:
    """Autograd recomputes checkpoints in another thread, for one."""
    x = qkv()
    with ours.patched():
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(*x))
        thread.start()
        thread.join()
    assert calls == ["sdpa"]


def test_dropout_is_honoured() -> None:
    q, k, _ = (t.detach() for t in qkv(8, len_q=64, len_k=64))
    v = torch.eye(64, dtype=torch.float64).expand(8, 4, 64, 64)
    with ours.patched():
        weights = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    assert abs((weights == 0).double().mean() - 0.25) < 0.01


@pytest.mark.parametrize("training", [True, False])
def test_modules_of_torch(training: bool, calls: list[str]) -> None:
    """Modules have fused paths in evaluation that never call SDPA: they must be left."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = torch.nn.TransformerEncoder(layer, 2).train(training)
    x = torch.randn(3, 9, 32, dtype=torch.float64)
    padding = torch.arange(9) >= torch.tensor([9, 7, 4])[:, None]
    with torch.no_grad():
        expected = encoder.train()(x, src_key_padding_mask=padding)  # without the fused path
        encoder.train(training)
        with ours.patched():
            found = encoder(x, src_key_padding_mask=padding)
    assert len(calls) == 2
    torch.testing.assert_close(found.masked_fill(padding[..., None], 0), expected.masked_fill(padding[..., None], 0))


def test_patched_and_compiled() -> None:
    x = [t.detach() for t in qkv()]
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def f(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True)

    expected = f(*x)
    with ours.patched():
        torch.testing.assert_close(torch.compile(f, fullgraph=True, backend=keep)(*x), expected)
    assert "strobe" in graphs[0].code and "scaled_dot_product" not in graphs[0].code


@pytest.mark.parametrize("lengths", [(17, 17), (5, 17)])
def test_patched_and_causal_biases(lengths: tuple[int, int], calls: list[str]) -> None:
    x = [t.detach() for t in qkv(len_q=lengths[0], len_k=lengths[1])]
    for bias in (causal_lower_right(*lengths), causal_upper_left(*lengths)):
        expected = F.scaled_dot_product_attention(*x, attn_mask=bias)
        with ours.patched():
            for function in (F.scaled_dot_product_attention, imported_by_name):
                found = function(*x, attn_mask=bias)
                assert type(found) is torch.Tensor
                torch.testing.assert_close(found, expected)
    assert calls == ["sdpa"] * 4


def test_patched_errors_are_those_that_callers_catch() -> None:
    q, k, _ = qkv()
    with ours.patched(), pytest.raises(RuntimeError, match="query has 4 heads"):
        F.scaled_dot_product_attention(q, k[:, :3], k[:, :3])


@pytest.mark.usefixtures("on_cpu")
def test_errors_of_the_operators_are_runtime_errors() -> None:
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="disagree in length"):
        aten._scaled_dot_product_flash_attention(q, k, v[:, :, :5])


def test_patched_and_scripted() -> None:
    """The code runs in a process of its own: TorchScript remembers a class that it could not compile."""
    code = """
        import torch
        from strobe.compat import sdpa
        layer, x = torch.nn.MultiheadAttention(16, 2).eval(), torch.randn(3, 2, 16)
        expected = layer(x, x, x)[0]
        with sdpa.patched():
            scripted = torch.jit.script(layer)
            torch.testing.assert_close(scripted(x, x, x)[0], expected)
        torch.testing.assert_close(torch.jit.script(layer)(x, x, x)[0], expected)
    """
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
