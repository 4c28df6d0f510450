"""The operations that flash-attn has in Triton: rotary embedding."""
