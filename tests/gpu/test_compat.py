"""strobe under PyTorch's SDPA and under transformers, on a GPU: that our kernels run there, and what they compute."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tolerance
import torch

import strobe
from strobe.call import attend, piece
from strobe.compat import sdpa as ours

F = torch.nn.functional
FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)
FASTEST = "sm90" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "sm80"
needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch 2.11 has the registry"
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the backends that ran forward passes, one for each call."""
    names: list[str] = []
    original = piece.lookup

    def lookup(a: Any) -> Any:
        bound = original(a)
        names.append(bound.backend.name)
        return bound

    monkeypatch.setattr(piece, "lookup", lookup)
    monkeypatch.setattr(attend, "lookup", lookup)
    monkeypatch.setattr(attend, "signature", lambda a: None)  # so that it looks up every call
    return names


@pytest.fixture
def active() -> Iterator[None]:
    ours.activate()
    yield
    ours.restore()


def qkv(requires_grad: bool = False, heads_k: int = 8, length: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, h, length, 64) for h in (8, heads_k, heads_k)]
    return [
        torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_(requires_grad)
        for s in shapes
    ]


def math(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def check(found: torch.Tensor, x: list[torch.Tensor], **options: Any) -> None:
    exact, plain = math(*(t.detach().double() for t in x), **options), math(*(t.detach() for t in x), **options)
    tolerance.check("out", found.detach(), exact, plain)


# ---- SDPA ------------------------------------------------------------------------------------------------------------


@needs_registry
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_k", [8, 2])
def test_sdpa_runs_our_kernel(is_causal: bool, heads_k: int, ran: list[str]) -> None:
    x, options = qkv(heads_k=heads_k), {"is_causal": is_causal, "enable_gqa": heads_k < 8}
    found = F.scaled_dot_product_attention(*x, **options)
    assert ran == [FASTEST]
    check(found, x, **options)
    assert ran == [FASTEST]  # the math backend is PyTorch's


@needs_registry
def test_flash_is_first_while_active_and_everything_comes_back(ran: list[str]) -> None:
    x = qkv()
    F.scaled_dot_product_attention(*x)
    before = torch._C._get_sdp_priority_order()
    ours.activate()
    try:
        order = torch._C._get_sdp_priority_order()
        assert order[0] == FLASH and sorted(order) == sorted(before)
        F.scaled_dot_product_attention(*x)
        assert len(ran) == 1
    finally:
        ours.restore()
    assert torch._C._get_sdp_priority_order() == before
    F.scaled_dot_product_attention(*x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(*x)
    assert len(ran) == 1


@needs_registry
def test_activation_does_not_start_the_gpu() -> None:
    code = f"""
        import torch, strobe
        from strobe.call import piece

        strobe.compat.sdpa.activate()
        assert not torch.cuda.is_initialized()
        q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
        assert torch._C._get_sdp_priority_order()[0] == {FLASH}
        names, lookup = [], piece.lookup
        piece.lookup = lambda a: names.append(lookup(a).backend.name) or lookup(a)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert names == ["{FASTEST}"], names
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=_environment()
    )
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    source = str(Path(strobe.__file__).resolve().parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))}


@needs_registry
@pytest.mark.usefixtures("active")
def test_gradients_through_sdpa(ran: list[str]) -> None:
    gradients = []
    dout = torch.randn(2, 8, 300, 64, device="cuda", dtype=torch.bfloat16)
    for function, dtype in ((math, torch.float64), (math, torch.bfloat16), (F.scaled_dot_product_attention, None)):
        x = [t.to(dtype or t.dtype).detach().requires_grad_() for t in qkv()]
        function(*x, is_causal=True).backward(dout.to(dtype or dout.dtype))
        gradients.append([t.grad for t in x])
    assert ran == [FASTEST] * 2  # forward and backward
    for name, exact, plain, found in zip("qkv", *gradients, strict=True):
        tolerance.check(f"d{name}", found, exact, plain, tolerance.GRADIENTS)


@needs_registry
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("training", [True, False])
def test_modules_of_torch(training: bool, ran: list[str]) -> None:
    """PyTorch's fused path ends in the same operator in evaluation."""
    layer = torch.nn.TransformerEncoderLayer(128, 2, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda", torch.bfloat16)
    encoder.train(training)
    with torch.no_grad():
        out = encoder(torch.randn(2, 200, 128, device="cuda", dtype=torch.bfloat16))
    assert out.isfinite().all() and ran == [FASTEST] * 2


@needs_registry
@pytest.mark.usefixtures("active")
def test_varlen_attn(ran: list[str]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    x = [t[0].transpose(0, 1).contiguous() for t in qkv()]  # (total, heads, dim)
    cu = torch.tensor([0, 120, 300], dtype=torch.int32, device="cuda")
    found = varlen_attn(*x, cu, cu, 180, 180)
    assert ran == [FASTEST]
    for a, b in ((0, 120), (120, 300)):
        part = [t[a:b].transpose(0, 1)[None] for t in x]
        check(found[a:b].transpose(0, 1)[None], part)


@needs_registry
@pytest.mark.usefixtures("active")
def test_compiled_sdpa() -> None:
    torch._dynamo.reset()
    x = qkv(requires_grad=True)

    def f(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True).float().sin()

    expected = f(*x)
    found = torch.compile(f, fullgraph=True)(*x)
    assert torch.allclose(found, expected, atol=1e-2)
    gradients = [torch.autograd.grad(out.sum(), x) for out in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=2e-2, rtol=2e-2)


def test_the_patch_takes_masks(ran: list[str]) -> None:
    x = qkv()
    visible = torch.rand(300, 300, device="cuda") < 0.5
    with ours.patched():
        found = F.scaled_dot_product_attention(*x, attn_mask=visible)
    assert len(ran) == 1
    check(found, x, attn_mask=visible)


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def models() -> Iterator[Any]:
    pytest.importorskip("transformers")
    from compat import models as tiny

    from strobe.compat import transformers

    transformers.register()
    yield tiny
    transformers.unregister()


NAMES = ["llama", "mistral", "gemma2", "gemma3", "gpt-oss", "qwen3", "deepseek-v3", "phi", "gpt2"]


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_decoders(name: str, padding: str | None, models: Any, ran: list[str]) -> None:
    x = models.inputs(name, padding=padding, device="cuda")
    tokens = x["attention_mask"].bool() if padding else slice(None)
    found = []
    for implementation, dtype in (("eager", torch.float64), ("eager", torch.bfloat16), ("strobe", torch.bfloat16)):
        with torch.no_grad(), models.finite_masks():
            found.append(models.model(name, implementation, dtype, "cuda")(**x).logits[tokens])
    exact, plain, logits = found
    assert ran and (padding is not None or set(ran) == {FASTEST}), ran  # first: which kernel explains which numbers
    tolerance.check("logits", logits, exact, plain)


def test_a_layer_waits_for_nothing(models: Any) -> None:
    from strobe.compat.transformers import masks
    from strobe.compat.transformers.attention import attention

    q, k, v = qkv()
    mask = masks.mask(2, 300, 300, device="cuda")
    expected = attention(torch.nn.Module(), q, k, v, mask)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = attention(torch.nn.Module(), q, k, v, mask)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, strobe.attention(q, k, v, mask=strobe.causal, layout="bhsd").transpose(1, 2))
