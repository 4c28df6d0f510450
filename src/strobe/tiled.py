"""The knob of the `tiled` backend, at the import path that the documents name."""

from strobe.backends.tiled.slab import block_sizes

__all__ = ["block_sizes"]
