"""`install()` and `uninstall()`: what others import, what they learn of versions, and that everything comes back."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

import strobe
from strobe import compat
from strobe.compat.installation import STANDS_IN

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(autouse=True)
def _not_installed() -> Iterator[None]:
    compat.uninstall()
    yield
    compat.uninstall()


def test_nothing_is_active_by_import() -> None:
    code = """
        import sys, strobe
        assert "strobe.compat" not in sys.modules and "strobe.nn" not in sys.modules
        strobe.compat.status, strobe.nn.rotary
        assert strobe.compat.status() == {}
        assert not [m for m in sys.modules if m.startswith("flash_attn") or m == "transformers"]
    """
    run(code)


def run(code: str) -> None:
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_imports_find_strobe() -> None:
    compat.install()
    compat.install()  # twice is like once
    for name, module in STANDS_IN.items():
        assert importlib.import_module(name) is importlib.import_module(module)
        assert importlib.util.find_spec(name) is not None
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]
    from flash_attn.bert_padding import pad_input, unpad_input  # type: ignore[import-not-found]
    from flash_attn.layers.rotary import apply_rotary_emb  # type: ignore[import-not-found]
    from flash_attn.ops.triton.rotary import apply_rotary  # type: ignore[import-not-found]
    from flash_attn_2_cuda import varlen_bwd  # type: ignore[import-not-found]
    from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]

    found = (
        flash_attn_func,
        pad_input,
        unpad_input,
        apply_rotary_emb,
        apply_rotary,
        varlen_bwd,
        flash_attn_varlen_func,
    )
    assert all(f.__module__.startswith("strobe.compat") for f in found)
    assert compat.status() == {
        "flash_attn": "strobe stands in for it",
        "flash_attn_interface": "strobe stands in for it",
    }
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.losses")


def test_versions_are_found() -> None:
    assert "flash_attn" not in metadata.packages_distributions()
    compat.install()
    assert metadata.version("flash-attn") == metadata.version("flash_attn") == "2.8.4"
    assert metadata.version("flash_attn_3") == "3.0.0"
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    assert metadata.version("pytest")  # others are found as ever
    compat.uninstall()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash-attn")


def test_uninstall_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.losses", "flash_attn_interface")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in (*STANDS_IN.values(), "strobe.compat.flash_attn_3.operators"):
        importlib.import_module(module)  # our own modules may stay
    modules, finders = dict(sys.modules), list(sys.meta_path)
    compat.install()
    assert sys.modules["flash_attn"] is not theirs["flash_attn"] and "flash_attn.losses" not in sys.modules
    compat.uninstall()
    assert sys.modules == modules and sys.meta_path == finders
    assert compat.status() == {}
    compat.uninstall()  # without an installation nothing happens
    assert sys.modules == modules and sys.meta_path == finders


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_takes_it_for_flash_attn() -> None:
    """Transformers asks for nothing else but a GPU."""
    code = """
        import strobe, torch
        strobe.compat.install()
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_capability = lambda *a: (9, 0)
        from transformers.utils import import_utils
        assert import_utils.is_flash_attn_2_available() and import_utils.is_flash_attn_3_available()
        assert not import_utils.is_flash_attn_4_available()
        from transformers import modeling_flash_attention_utils as utils
        utils.lazy_import_flash_attention("flash_attention_2")
        assert utils._flash_varlen_fn is strobe.compat.flash_attn.flash_attn_varlen_func
    """
    run(code)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_generates_and_trains_with_it() -> None:
    """A padded batch, which it unpads with int32 indices, and sequences packed by position_ids, whose lengths it passes
    as tensors."""
    code = """
        import strobe, torch
        strobe.compat.install()
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        torch.cuda.get_device_capability = lambda *a: (9, 0)
        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(0)
        sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=0)).eval()
        model.set_attn_implementation("flash_attention_2")
        torch.cuda.is_available = available
        tokens, there = torch.randint(3, 64, (2, 9)), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
        length = dict(min_new_tokens=3, max_new_tokens=3, do_sample=False)
        found = model.generate(tokens, attention_mask=there, **length)
        alone = model.generate(tokens[:1, 4:], **length)
        assert found[0, 4:].tolist() == alone[0].tolist(), (found, alone)
        positions = torch.cat((torch.arange(4), torch.arange(5)))[None]
        packed = model(tokens[:1], position_ids=positions).logits
        for part in (slice(0, 4), slice(4, 9)):
            torch.testing.assert_close(packed[:, part], model(tokens[:1, part]).logits, atol=1e-5, rtol=1e-5)
        model.train()(tokens[:1], position_ids=positions, labels=tokens[:1]).loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    """
    run(code)


def test_doctor_shows_it() -> None:
    from strobe.tools import doctor

    assert doctor.hosts()["flash_attn"]["strobe"] == "not active"
    compat.install()
    assert doctor.hosts()["flash_attn"] == {"version": "2.8.4", "strobe": "strobe stands in for it"}
    assert strobe.compat is compat


def test_what_else_a_flash_attn_on_the_machine_has_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own package is not loaded: its compiled part may be missing, or for another torch."""
    files = {
        "__init__.py": "raise ImportError('not to be loaded')",
        "losses/__init__.py": "",
        "losses/cross_entropy.py": "from flash_attn import flash_attn_func\nname = __name__",
        "layers/__init__.py": "raise ImportError('not to be loaded')",
        "layers/rotary.py": "raise ImportError('not to be loaded')",
        "layers/patch_embed.py": "name = __name__",
        "ops/triton/layer_norm.py": "name = __name__",
    }
    for name, text in files.items():
        path = tmp_path / "flash_attn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    compat.install()
    for name in ("losses.cross_entropy", "layers.patch_embed", "ops.triton.layer_norm"):
        assert importlib.import_module(f"flash_attn.{name}").name == f"flash_attn.{name}"
    theirs = sys.modules["flash_attn.losses.cross_entropy"]
    assert theirs.flash_attn_func is compat.flash_attn.flash_attn_func
    assert importlib.import_module("flash_attn.layers.rotary").__name__ == "strobe.compat.flash_attn.layers.rotary"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.modules")
    compat.uninstall()
    assert not [m for m in sys.modules if m.split(".")[0] == "flash_attn"]
    assert not hasattr(compat.flash_attn, "losses")


# ---- torch.ops.flash_attn_3 ------------------------------------------------------------------------------------------

WINDOW = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
LENGTHS = "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None"
SCHEMAS = {  # as FlashAttention 3 has promised to keep them
    "fwd": "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    + LENGTHS
    + ", Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    f"Tensor? v_descale=None, float? softmax_scale=None, {WINDOW}, int attention_chunk=0, float softcap=0., bool "
    "is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0"
    ") -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    f"{LENGTHS}, float? softmax_scale=None, {WINDOW}, float softcap=0., bool deterministic=False, int sm_margin=0"
    ") -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_operators_have_the_schemas_of_flash_attention_3(name: str) -> None:
    assert not hasattr(torch.ops.flash_attn_3, name)
    compat.install()
    theirs = torch._C.parse_schema(f"flash_attn_3::{name}({SCHEMAS[name]}")
    assert getattr(torch.ops.flash_attn_3, name).default._schema.is_backward_compatible_with(theirs)
    compat.uninstall()
    assert not hasattr(torch.ops.flash_attn_3, name)
    compat.install()  # and once more
    assert hasattr(torch.ops.flash_attn_3, name)


def test_the_operators_attend() -> None:
    compat.install()
    ops = torch.ops.flash_attn_3
    q, k, v = (torch.randn(2, 9, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    expected, expected_lse = strobe.attention(q, k, v, mask=strobe.window(3, 1), scale=0.3, return_lse=True)
    into = torch.empty_like(expected)
    options = {"softmax_scale": 0.3, "window_size_left": 3, "window_size_right": 1}
    out, lse, *_ = ops.fwd(q, k, v, out=into, **options)
    torch.testing.assert_close((out, lse), (expected.detach(), expected_lse.detach()))
    assert out.data_ptr() == into.data_ptr()
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    dk = torch.empty_like(k)
    found = ops.bwd(dout, q, k, v, out, lse, dk=dk, **options)
    assert len(found) == 8
    torch.testing.assert_close(found[:3], wanted)
    torch.testing.assert_close(dk, wanted[1])
    combined, _ = ops.fwd_combine(out[None].float(), lse[None].transpose(2, 3).float())
    torch.testing.assert_close(combined, out.float())
    used = torch.tensor([9, 4], dtype=torch.int32)
    assert ops.get_scheduler_metadata(2, 9, 9, 4, 2, 8, 8, torch.bfloat16, used).dtype == torch.int32
    with pytest.raises(RuntimeError, match="disagree in batch size"):
        ops.fwd(q, k[:1], v[:1])


def test_the_operators_know_caches() -> None:
    compat.install()
    q, new = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 2, 16)
    caches = torch.randn(2, 2, 9, 2, 16)
    ours, used = caches.clone(), torch.tensor([3, 5], dtype=torch.int32)
    cos, sin = torch.randn(2, 20, 8)
    expected = compat.flash_attn_interface.flash_attn_with_kvcache(
        q, *ours, new, new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=used, causal=True, rotary_interleaved=False
    )
    out, *_ = torch.ops.flash_attn_3.fwd(
        q, *caches, new, new, seqused_k=used, rotary_cos=cos, rotary_sin=sin, is_causal=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(caches, ours)
