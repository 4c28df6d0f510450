"""strobe as an attention backend of vLLM 0.32 or later, on Hopper GPUs:

vllm serve … --attention-backend STROBE

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. The name means nothing until
somebody asks for it.
"""

from __future__ import annotations

from strobe.problem import Unsupported

NAME = "STROBE"
CLASS = "strobe.compat.vllm.backend.Backend"
_registered = False


def register() -> None:
    """Makes "STROBE" an attention backend of vLLM in this process. Twice is like once. vLLM has no way to take it back."""
    global _registered
    from vllm.v1.attention.backends import registry

    names = registry.AttentionBackendEnum
    if NAME in names.__members__:
        _registered = True
        return
    if not hasattr(names, "register"):
        raise Unsupported("this vLLM is too old: version 0.32 is needed, which takes attention backends by name")
    registry.register_backend(NAME, CLASS)
    _registered = True


def status() -> str | None:
    return f"attention backend {NAME} is registered" if _registered else None
