"""FlashAttention in PyTorch tiles: `slab` cuts a problem up, `forward` and `backward` walk the tiles."""
