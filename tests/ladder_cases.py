"""Every rung has to pass these cases, on the emulator and on GPUs alike."""

from __future__ import annotations

from strobe.learn.ladder.rung import Shape

CASES = {
    "ragged": Shape(slices=2, len_q=70, len_k=150, dim=64),
    "causal, more keys": Shape(slices=1, len_q=70, len_k=150, dim=64, causal=True),
    "causal, rows that see nothing": Shape(slices=1, len_q=130, len_k=100, dim=64, causal=True),
    "many tiles of keys": Shape(slices=1, len_q=130, len_k=700, dim=64),
    "one query, one key": Shape(slices=1, len_q=1, len_k=1, dim=64),
}
LARGE_SCORES = Shape(slices=1, len_q=40, len_k=70, dim=64)
GAIN = 300.0  # of the queries: scores of 1000 and more, of which exp would overflow without the maximum
WIDE = Shape(slices=1, len_q=70, len_k=150, dim=128, causal=True)
