"""Models that choose a class of attention layers by the name of the implementation, instead of a function.

They look into a table, `SAM_VISION_ATTENTION_CLASSES` is one, and an implementation that is not in it is a bare KeyError.
Our entry there says what can be done.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from strobe.problem import Unsupported


class Entries:
    """Our entries in the tables of models that are made while this is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tables: list[dict[str, Any]] = []
        owner: Any = PreTrainedModel
        self._original = original = owner.get_correct_attn_implementation

        # The one function that every model calls with the name that it was given, before its layers are made.
        @functools.wraps(original)
        def get_correct_attn_implementation(
            model: Any, requested_attention: str | None, *args: Any, **kwargs: Any
        ) -> str:
            if requested_attention == name:
                self.enter(type(model))
            return original(model, requested_attention, *args, **kwargs)

        owner.get_correct_attn_implementation = get_correct_attn_implementation

    def enter(self, kind: type) -> None:
        for module in {sys.modules.get(base.__module__) for base in kind.__mro__ if issubclass(base, PreTrainedModel)}:
            for table in list(vars(module).values()):
                if _is_table(table) and self.name not in table:
                    table[self.name] = functools.partial(_refuse, dict(table), self.name)
                    self.tables.append(table)

    def close(self) -> None:
        owner: Any = PreTrainedModel
        owner.get_correct_attn_implementation = self._original
        for table in self.tables:
            del table[self.name]


def _is_table(x: Any) -> bool:
    if not isinstance(x, dict) or "eager" not in x:
        return False
    return isinstance(x["eager"], type) and issubclass(x["eager"], torch.nn.Module)


def _refuse(table: dict[str, type], name: str, *args: Any, **kwargs: Any) -> None:
    allowed = ", ".join(f'"{key}"' for key in table)
    more = "; after strobe.compat.sdpa.activate() SDPA is strobe's" if "sdpa" in table else ""
    raise Unsupported(
        f'{table["eager"].__name__} computes attention by itself: attn_implementation="{name}" is not for it, allowed are '
        f"{allowed}{more}. The rest of a model can have another implementation than this part: pass a dict by sub-config"
    )
