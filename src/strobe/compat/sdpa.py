"""strobe under torch.nn.functional.scaled_dot_product_attention (SDPA).

`activate()` makes strobe SDPA's flash backend for CUDA tensors, through PyTorch's own registry. Flash takes no mask
tensors, and there is no such registry for the CPU: `with patched():` sends every call to `strobe.sdpa`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from strobe.compat import aten_flash
from strobe.compat.patch import Patch
from strobe.problem import Unsupported
from strobe.scaled_dot_product import sdpa

NAME = "strobe"
_FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)
_before: str | None = None  # the flash implementation that was active before ours


# ---- the flash backend -----------------------------------------------------------------------------------------------


class _Handle:
    """An object that PyTorch's registry holds while strobe is active, and removes when another implementation is
    activated."""

    def __init__(self) -> None:
        self._library: Any = aten_flash.library("CUDA")
        self._order: list[int] | None = None  # of SDPA's backends, as it was
        torch.cuda._lazy_call(self._prefer_flash)  # now, or when the GPU is first used: this function shall not do that

    def _prefer_flash(self) -> None:
        """PyTorch puts cuDNN first on Hopper, when SDPA first chooses a backend. Let it choose, then put flash first."""
        if self._library is None:
            return
        q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(q, q, q)
        self._order = list(torch._C._get_sdp_priority_order())
        torch._C._set_sdp_priority_order([_FLASH, *(n for n in self._order if n != _FLASH)])

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
        if self._order is not None:
            torch._C._set_sdp_priority_order(self._order)
            self._order = None


def activate() -> None:
    """Make strobe SDPA's flash backend, and flash the first that SDPA tries: nn.MultiheadAttention,
    nn.TransformerEncoder, diffusers, torchtitan and `varlen_attn` use it with nothing changed. A second call changes
    nothing."""
    global _before
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise Unsupported(
            f"torch {torch.__version__} has no register_flash_attention_impl; use patched(), or torch 2.11"
        )
    if active():
        return
    _before = attention.current_flash_attention_impl()
    attention.register_flash_attention_impl(NAME, register_fn=_Handle)
    attention.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Restores PyTorch as it was before `activate()`."""
    global _before
    if NAME not in _implementations():
        return
    if active():
        torch.nn.attention.restore_flash_attention_impl()
        if _before is not None:
            torch.nn.attention.activate_flash_attention_impl(_before)
    del _implementations()[NAME]
    _before = None


def active() -> bool:
    """Return whether SDPA's flash backend is strobe."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() == NAME


def _implementations() -> dict[str, Any]:
    registry = getattr(torch.nn.attention, "_registry", None)
    return {} if registry is None else registry._FLASH_ATTENTION_IMPLS


# ---- every call ------------------------------------------------------------------------------------------------------

_original = torch._C._nn.scaled_dot_product_attention


class _Mode(TorchFunctionMode):
    """A mode for those who imported the function by name before. PyTorch's modules see the mode, and leave their fused
    paths, which would not call SDPA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (sdpa if func is _original else func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Make every call of SDPA in this block a call of `strobe.sdpa`, on any device, with mask tensors and dropout: in
    this thread, however the function was imported; in other threads, where it is called as
    `torch.nn.functional.scaled_dot_product_attention`. What `torch.jit.script` compiles calls PyTorch's own, here as
    elsewhere."""
    torch.jit._builtins._register_builtin(sdpa, "aten::scaled_dot_product_attention")  # else it would compile ours
    with _patch, _Mode():
        yield


def _put(ours: bool) -> None:
    torch.nn.functional.scaled_dot_product_attention = sdpa if ours else _original  # type: ignore[assignment]


_patch = Patch(_put)


def status() -> str | None:
    parts = ["strobe is SDPA's flash backend"] if active() else []
    parts += ["SDPA is patched"] if _patch.active else []
    return "; ".join(parts) or None
