"""strobe under the code that people have. Nothing is active by import.

`install()` makes `import flash_attn` find strobe, `sdpa.activate()` makes it PyTorch's flash backend, `flex.patched()`
sends FlexAttention's calls to it, `transformers.register()` makes it an attention implementation of transformers,
`xformers.install()` puts it into xformers. Each has an inverse. vLLM finds `vllm.register()` by itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import strobe

if "attention" not in getattr(
    strobe, "__all__", ()
):  # both projects are installed, and the other's files lie over ours
    raise ImportError(
        f"{strobe.__file__} is another project's package of the same name. Run: pip uninstall strobe, and install "
        "strobe-attention again"
    )

from strobe.compat.installation import install, installed, uninstall

if TYPE_CHECKING:
    from strobe.compat import flash_attn, flash_attn_interface, flex, sdpa, transformers, vllm, xformers

__all__ = [
    "flash_attn",
    "flash_attn_interface",
    "flex",
    "install",
    "sdpa",
    "status",
    "transformers",
    "uninstall",
    "vllm",
    "xformers",
]
_MODULES = ("flash_attn", "flash_attn_interface", "flex", "sdpa", "transformers", "vllm", "xformers")


def __getattr__(name: str) -> Any:
    """The modules are loaded when they are asked for."""
    if name in _MODULES:
        return import_module(f"strobe.compat.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def status() -> dict[str, str]:
    """Import name of a library -> how strobe takes part in it in this process. Libraries without us are missing."""
    hosts: dict[str, str] = {}
    if installed():
        hosts |= {name: "strobe stands in for it" for name in ("flash_attn", "flash_attn_interface")}
    for name, host in (
        ("sdpa", "torch"),
        ("flex", "torch.nn.attention.flex_attention"),
        ("transformers", "transformers"),
        ("vllm", "vllm"),
        ("xformers", "xformers"),
    ):
        module = sys.modules.get(f"strobe.compat.{name}")  # one that was never loaded is not active
        text = None if module is None else module.status()
        if text is not None:
            hosts[host] = text
    return hosts
