"""Modules of attention, and rotary position embedding."""

from strobe.nn import rotary
from strobe.nn.attention import Attention
from strobe.nn.multihead import MultiheadAttention

__all__ = ["Attention", "MultiheadAttention", "rotary"]
