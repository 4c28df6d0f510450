"""Context parallel attention on torch.distributed: one sequence, or packed documents, shared out among ranks."""

from strobe.distributed.api import attention, unshard
from strobe.distributed.decoding import decode, merge
from strobe.distributed.report import describe
from strobe.distributed.shard_plan import ShardPlan, join, shard
from strobe.distributed.transport import Counted, Transport

__all__ = ["Counted", "ShardPlan", "Transport", "attention", "decode", "describe", "join", "merge", "shard", "unshard"]
