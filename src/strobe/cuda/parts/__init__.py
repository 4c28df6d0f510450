"""Kernels are composed of these parts. Each prints its C++, owns its fields of `Params` and computes their values."""
