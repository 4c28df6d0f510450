"""Context parallel attention on torch.distributed: one sequence, or packed documents, shared out among ranks."""

from importlib import import_module

from strobe.distributed.api import attention, unshard
from strobe.distributed.decoding import decode, merge
from strobe.distributed.report import describe
from strobe.distributed.shard_plan import ShardPlan, join, shard
from strobe.distributed.transport import Counted, Transport

__all__ = ["Counted", "ShardPlan", "Transport", "attention", "decode", "describe", "join", "merge", "shard", "unshard"]


def __getattr__(name: str) -> object:
    """Load `strobe.distributed.transformers`, which lives with the other ways into transformers."""
    if name == "transformers":
        return import_module("strobe.compat.transformers.context_parallel")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
