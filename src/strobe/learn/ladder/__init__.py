"""FlashAttention as a ladder of kernels: from naive ones to the library's own, one idea a rung (`strobe ladder`). There
are two flights: the forward pass, and the gradient.

The rungs are `kernels/*.cu`. They use the library's wrappers, so that each runs on a GPU and, unchanged, on the
emulator."""
