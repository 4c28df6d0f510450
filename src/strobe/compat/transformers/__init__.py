"""strobe as an attention implementation of transformers 5:

strobe.compat.transformers.register()
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="strobe")
"""

from __future__ import annotations

from typing import Any

from strobe.problem import Unsupported

NAME = "strobe"
_opened: Any = None  # the gate of continuous batching and the entries in tables, while registered


def register(mesh: Any = None) -> None:
    """Makes "strobe", and "paged|strobe" for continuous batching, an attention implementation, with its mask function.
    A second call changes nothing. With a `mesh`, "strobe_context_parallel" is one, too: each rank of the mesh has a
    shard of the sequence, see `strobe.compat.transformers.context_parallel`."""
    global _opened
    if mesh is not None:
        from strobe.compat.transformers import context_parallel as context_parallel

        context_parallel.register(mesh)
    if _opened is not None:
        return
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise Unsupported(
            f"transformers {transformers.__version__} is too old: version 5 is needed, 5.17 or later is tested"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    from strobe.compat.transformers import attention, lookup, masks, paged

    AttentionInterface.register(NAME, attention.attention)
    AttentionInterface.register(f"paged|{NAME}", attention.attention)
    AttentionMaskInterface.register(NAME, masks.mask)
    _opened = paged.open_gate(NAME), lookup.Entries(NAME)


def unregister() -> None:
    """Restores transformers as it was. Models that use the implementation must be given another."""
    global _opened
    if _opened is None:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    from strobe.compat.transformers import paged

    for name in (NAME, f"paged|{NAME}"):
        AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)
    gate, entries = _opened
    paged.close_gate(gate)
    entries.close()
    _opened = None


def status() -> str | None:
    return None if _opened is None else f'attn_implementation="{NAME}" is registered'
