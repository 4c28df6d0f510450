"""strobe as an attention backend of vLLM 0.32 or later, on GPUs of the Ampere generation or later:

vllm serve … --attention-backend STROBE

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. The name means nothing until
somebody asks for it.
"""

from __future__ import annotations

import importlib
import sys

from strobe.problem import Unsupported

NAME = "STROBE"
CLASS = "strobe.compat.vllm.backend.Backend"
_REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """Makes "STROBE" an attention backend of vLLM in this process. A second call changes nothing. vLLM has no way to
    take it back."""
    registry = importlib.import_module(_REGISTRY)
    names = registry.AttentionBackendEnum
    if NAME in names.__members__:
        return
    if not hasattr(names, "register"):
        raise Unsupported("this vLLM is too old: version 0.32 is needed, which takes attention backends by name")
    registry.register_backend(NAME, CLASS)


def status() -> str | None:
    registry = sys.modules.get(_REGISTRY)
    known = registry is not None and NAME in registry.AttentionBackendEnum.__members__
    return f"attention backend {NAME} is registered" if known else None
