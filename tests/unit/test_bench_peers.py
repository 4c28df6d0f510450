"""Other people's packages as providers, with stand-ins that compute in their layouts: what they are asked is right, and
what cannot be imported is a reason."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from strobe.bench import installed, megatron, peers, registry
from strobe.bench.case import BenchCase, case
from strobe.bench.exactness import Judge
from strobe.bench.inputs import make_tensors
from strobe.bench.provider import Refusal, from_layout, to_layout

CPU = torch.device("cpu")
SHAPE = {"batch": 2, "heads": 4, "heads_k": 2, "length": 40, "dim": 16}
FULL = case("t", "full", **SHAPE)
CAUSAL = case("t", "causal", **SHAPE, mask="causal")
WINDOW = case("t", "window", **SHAPE, mask="window(9, 0)")
CAPPED = case("t", "softcap", **SHAPE, mask="causal", softcap=5.0)
GRADIENTS = case("t", "gradients", **SHAPE, mask="causal", direction="both")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, left: int, softcap: float, scale: float
) -> torch.Tensor:
    """Compute attention on (batch, heads, length, dim)."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s = q @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if causal or left >= 0:
        s = s.masked_fill(keys > rows, -torch.inf)
    if left >= 0:
        s = s.masked_fill(keys < rows - left, -torch.inf)
    return torch.softmax(s, -1) @ v


def flash(returns: Any, absent: Any) -> Any:
    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        window_size: tuple[Any, Any],
        softcap: float,
        softmax_scale: float,
    ) -> Any:
        left, right = window_size
        assert right in (0, absent)
        out = attend(
            *(t.transpose(1, 2) for t in (q, k, v)), causal, -1 if left == absent else left, softcap, softmax_scale
        )
        return returns(out.transpose(1, 2))

    return types.SimpleNamespace(flash_attn_func=flash_attn_func)


class LowerTriangularMask:
    pass


def memory_efficient_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_bias: LowerTriangularMask | None, scale: float
) -> torch.Tensor:
    assert q.shape == k.shape  # grouped heads would need five axes
    views = (t.transpose(1, 2) for t in (q, k, v))
    return attend(*views, attn_bias is not None, -1, 0.0, scale).transpose(1, 2)


PACKAGES = {
    "flash-attn-2": ("flash_attn", flash(lambda out: out, -1)),
    "flash-attn-3": ("flash_attn_interface", flash(lambda out: (out, None), -1)),
    "flash-attn-4": ("flash_attn.cute", flash(lambda out: (out, None), None)),
    "xformers": (
        "xformers.ops",
        types.SimpleNamespace(
            memory_efficient_attention=memory_efficient_attention, LowerTriangularMask=LowerTriangularMask
        ),
    ),
}


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are welcome."""
    for module in (peers, megatron):
        monkeypatch.setattr(module, "needs_gpu", lambda x: None)


def verdict(name: str, what: BenchCase) -> Any:
    (provider,) = registry.select([name])
    x = make_tensors(what, CPU, 0)
    prepared = provider.prepare(what, x)
    gradients = what.direction != "forward"
    inputs = [to_layout(t, prepared.layout).requires_grad_(gradients) for t in (x.q, x.k, x.v)]
    with prepared.scope():
        out = prepared.forward(*inputs)
        found = None
        if gradients:
            assert x.do is not None
            found = torch.autograd.grad(out, inputs, to_layout(x.do, prepared.layout))
    back = None if found is None else tuple(from_layout(g, prepared.layout) for g in found)
    return Judge(what, x).judge(from_layout(out.detach(), prepared.layout), back)


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, fake = PACKAGES[name]
    for part in {module.split(".")[0], module}:
        monkeypatch.setitem(sys.modules, part, fake)


@pytest.mark.parametrize("name", ["flash-attn-2", "flash-attn-3", "flash-attn-4"])
@pytest.mark.parametrize("what", [FULL, CAUSAL, WINDOW, CAPPED, GRADIENTS], ids=str)
def test_flash_attn(name: str, what: BenchCase, anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(name, monkeypatch)
    found = verdict(name, what)
    assert found.passed, found


@pytest.mark.parametrize("what", [FULL, CAUSAL, GRADIENTS], ids=str)
def test_xformers(what: BenchCase, anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install("xformers", monkeypatch)
    found = verdict("xformers", dataclasses.replace(what, heads_k=4))
    assert found.passed, found
    with pytest.raises(Refusal, match="grouped heads"):
        verdict("xformers", what)


@pytest.mark.parametrize("name", [*PACKAGES, "flashinfer", "megatron-local", "megatron-fused-softmax"])
def test_what_is_not_installed_says_so(name: str, anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "flash_attn_interface", "flash_attn.cute", "xformers", "flashinfer", "megatron"):
        monkeypatch.setitem(sys.modules, module, None)
    (provider,) = registry.select([name])
    with pytest.raises(Refusal) as refused:
        provider.prepare(case("t", "x", heads=2, length=32, dim=16), make_tensors(FULL, CPU, 0))
    assert refused.value.status == "not installed" and "install" in refused.value.reason


def test_whatever_an_import_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "needs_another.py").write_text("import not_there\n")
    (tmp_path / "other_abi.py").write_text("raise OSError('undefined symbol: _ZN3c10\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, reason in (
        ("needs_another", "a package needs not_there, which is not installed"),
        ("other_abi", "a package cannot be imported: undefined symbol: _ZN3c10"),
        ("nobody_has_it", "a package is not installed"),
    ):
        with pytest.raises(Refusal, match=reason) as refused:
            installed.imported(module, "a package")
        assert refused.value.status == "not installed"


# ---- Megatron-LM


class FakeMegatron:
    """The parts of megatron-core 0.16 that are used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[str] = []
        self.config: dict[str, Any] = {}
        self.fused = False
        fake = self

        class AttnMaskType(enum.Enum):
            causal = 1
            no_mask = 2

        def transformer_config(**facts: Any) -> types.SimpleNamespace:
            fake.config = facts
            return types.SimpleNamespace(**facts)

        class DotProductAttention:
            def __init__(self, config: Any, layer: int, mask: AttnMaskType, kind: str, pg_collection: Any) -> None:
                assert pg_collection.tp.size() == 1 and kind == "self"
                self.causal = mask is AttnMaskType.causal
                self.scale_mask_softmax = types.SimpleNamespace(
                    is_kernel_available=lambda mask, b, np, sq, sk: fake.fused and 16 < sk <= 4096
                )

            def eval(self) -> Any:
                return self

            def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None) -> torch.Tensor:
                assert fake.buffers[-1] == "set"  # the score matrix has its buffer
                views = (t.permute(1, 2, 0, 3) for t in (q, k, v))
                out = attend(*views, self.causal, -1, 0.0, q.shape[-1] ** -0.5)
                return out.permute(2, 0, 1, 3).flatten(2)

        tracker = types.SimpleNamespace(get_states=dict, add=lambda name, seed: None)
        parallel_state = types.SimpleNamespace(
            destroy_global_memory_buffer=lambda: self.buffers.append("destroyed"),
            _set_global_memory_buffer=lambda: self.buffers.append("set"),
        )
        modules = {
            "transformer.dot_product_attention": {"DotProductAttention": DotProductAttention},
            "transformer.enums": {"AttnMaskType": AttnMaskType},
            "transformer.transformer_config": {"TransformerConfig": transformer_config},
            "tensor_parallel.random": {"get_cuda_rng_tracker": lambda: tracker},
            "parallel_state": vars(parallel_state),
        }
        for parent in ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.tensor_parallel"):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        for name, content in modules.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, f"megatron.core.{name}", module)


@pytest.fixture
def fake_megatron(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMegatron]:
    yield FakeMegatron(monkeypatch)


@pytest.mark.parametrize("what", [FULL, CAUSAL, GRADIENTS], ids=str)
def test_megatrons_local_attention(what: BenchCase, fake_megatron: FakeMegatron) -> None:
    found = verdict("megatron-local", what)
    assert found.passed, found
    assert fake_megatron.config["num_query_groups"] == 2 and fake_megatron.config["bf16"]
    assert fake_megatron.config["masked_softmax_fusion"] is False
    assert fake_megatron.buffers[-1] == "destroyed"  # nothing of the score matrix stays


def test_apexs_softmax_is_used_or_the_row_says_so(fake_megatron: FakeMegatron, monkeypatch: pytest.MonkeyPatch) -> None:
    (provider,) = registry.select(["megatron-fused-softmax"])
    with pytest.raises(Refusal, match="Apex's fused softmax is not installed"):
        provider.prepare(CAUSAL, make_tensors(CAUSAL, CPU, 0))
    for name in megatron._APEX:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    fake_megatron.fused = True
    assert provider.prepare(CAUSAL, make_tensors(CAUSAL, CPU, 0)).note == "path taken: fused softmax kernel of Apex"
    short = case("t", "short", **SHAPE | {"length": 16})
    with pytest.raises(Refusal) as refused:
        provider.prepare(short, make_tensors(short, CPU, 0))
    assert refused.value.status == "fell back" and "up to 4096" in refused.value.reason


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (WINDOW, "not measured with a window"),
        (CAPPED, "no softcap"),
        (case("t", "unequal", **SHAPE, dim_v=32), "key and value dims differ"),
        (case("t", "queries", **SHAPE, len_k=80, mask="causal"), "self attention only"),
    ],
    ids=str,
)
def test_what_megatron_cannot_do(what: BenchCase, reason: str, fake_megatron: FakeMegatron) -> None:
    with pytest.raises(Refusal, match=reason):
        verdict("megatron-local", what)
