"""Keys and values in pages: `attention_paged` reads them, `append` writes new ones, `Plan` shares a step's work."""

from strobe.paged.pool import Level, Rotary, append, check, slots
from strobe.problem.work_list import Plan

__all__ = ["Level", "Plan", "Rotary", "append", "check", "slots"]
