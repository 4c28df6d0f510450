"""strobe: exact attention in tiles that fit on-chip. See `strobe.attention`."""

from strobe.api import attention, attention_varlen, backends, flash_attention
from strobe.drop_in import sdpa
from strobe.explain import explain
from strobe.mask import Mask, causal, causal_top_left, chunked, full, prefix, window
from strobe.problem import Unsupported
from strobe.score import Score, alibi

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`strobe.compat`, `strobe.nn` and, for lessons, `strobe.trace` are loaded when they are asked for: `import strobe`
    stays light."""
    if name in ("compat", "nn"):
        from importlib import import_module

        return import_module(f"strobe.{name}")
    if name == "trace":
        from strobe.learn.trace import trace

        return trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Mask",
    "Score",
    "Unsupported",
    "alibi",
    "attention",
    "attention_varlen",
    "backends",
    "causal",
    "causal_top_left",
    "chunked",
    "explain",
    "flash_attention",
    "full",
    "prefix",
    "sdpa",
    "window",
]
