"""The names that the command line takes, and what they stand for. No torch here: help and usage errors need them."""

from __future__ import annotations

# Suite -> what it measures, and whether it is sized for a GPU: on a CPU such a suite runs for minutes or hours.
SUITES = {
    "grid36": ("3 head dims x 2 masks x 6 lengths, 16384 tokens", True),
    "sweep": ("length against model dimension, one sequence", True),
    "gqa": ("grouped heads; speculative decode and chunked prefill", True),
    "models": ("attention of models people run, shape by shape; then the suite llama", True),
    "llama": ("steps of a Llama-shaped stack, prefill and training, in tokens/s; needs transformers", False),
    "variants": ("functions of scores and masks, softcap, a bias that learns, a mask of booleans", False),
    "overhead": ("short calls: CPU time, and replays of a CUDA graph", False),
    "quick": ("a look at everything, on a GPU or a CPU", False),
}
# They have rows of their own, and run by themselves: strobe.bench.context_parallel and strobe.bench.decode.
CONTEXT_PARALLEL, DECODE = BY_THEMSELVES = ("context-parallel", "decode")
PASSES = ("forward", "backward", "both")
PASS_TITLES = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
L2 = ("flushed", "warm")
