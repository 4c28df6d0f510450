"""strobe: exact attention in tiles that fit on-chip. See `strobe.attention`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING

__version__ = "0.1.0"


def _is_command() -> bool:
    """Return whether this is `strobe` or `python -m strobe`, whose help and usage errors shall not wait for torch.
    Then, and only then, the public names are loaded when they are first used."""
    program = PurePath(sys.argv[0]).name if sys.argv else ""
    if program == "-m":  # what argv[0] is until `python -m` has found the module
        program = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv[:-1] else ""
    return program in ("strobe", "strobe.exe")


if TYPE_CHECKING:
    from strobe import compat as compat, nn as nn, paged as paged  # loaded when they are asked for

if TYPE_CHECKING or not _is_command():
    from strobe.api import attention, attention_varlen, backends, flash_attention
    from strobe.explain import explain
    from strobe.merging import merge
    from strobe.paged.attention import attention_paged
    from strobe.probabilities import probabilities
    from strobe.problem import Unsupported
    from strobe.scaled_dot_product import sdpa
    from strobe.variants.block_mask import block_mask
    from strobe.variants.mask import Mask, causal, causal_top_left, full
    from strobe.variants.ready_made import (
        chunked,
        documents,
        neighbourhood,
        prefix,
        relative_bias,
        t5_bias,
        tree,
        window,
    )
    from strobe.variants.score import Score, alibi
    from strobe.variants.user_function import mask_function, score_function

__all__ = [
    "Mask",
    "Score",
    "Unsupported",
    "alibi",
    "attention",
    "attention_paged",
    "attention_varlen",
    "backends",
    "block_mask",
    "causal",
    "causal_top_left",
    "chunked",
    "documents",
    "explain",
    "flash_attention",
    "full",
    "mask_function",
    "merge",
    "neighbourhood",
    "prefix",
    "probabilities",
    "relative_bias",
    "score_function",
    "sdpa",
    "t5_bias",
    "tree",
    "window",
]


_HOMES = (  # of the public names
    "api explain merging paged.attention probabilities problem scaled_dot_product variants.block_mask variants.mask "
    "variants.ready_made variants.score variants.user_function"
).split()


def __getattr__(name: str) -> object:
    """`strobe.compat`, `strobe.nn`, `strobe.distributed` and, for lessons, `strobe.trace` are loaded when they are asked for:
    `import strobe` stays light. In the command, so are all other names, and `strobe.paged`."""
    if name in ("compat", "distributed", "nn", "paged"):
        return import_module(f"strobe.{name}")
    if name == "trace":
        from strobe.tile_trace import trace

        return trace
    if name in __all__:
        homes = [import_module(f"strobe.{home}") for home in _HOMES]
        globals().update({n: next(getattr(home, n) for home in homes if hasattr(home, n)) for n in __all__})
        return globals()[name]
    way_out = "; strobe.compat.flash_attn has the functions of flash-attn" if name.startswith("flash_attn") else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{way_out}")
