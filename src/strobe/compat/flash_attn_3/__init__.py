"""The other place where FlashAttention 3's functions are found: `flash_attn_3.flash_attn_interface`."""

from strobe.compat import flash_attn_interface

__version__ = "3.0.0"  # of FlashAttention 3, whose functions these are

__all__ = ["flash_attn_interface"]
