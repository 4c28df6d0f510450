"""Those that flash-attn has in Triton: the one of rotary embedding."""
