"""The cases that the CUDA kernels take, for the emulator and for GPUs: those of `cases` that they support, and more
that their tiles, rings and rounds need."""

from __future__ import annotations

import functools

import torch
from cases import CASES, Case
from oracle import prepare

from strobe.cuda.plans.families import FAMILIES
from strobe.variants.mask import causal, causal_top_left
from strobe.variants.ready_made import chunked, prefix, window

# Lengths cross several key blocks and query tiles, whatever the tile table says; heads times rows make a persistent
# kernel on three multiprocessors (as emulated) go several rounds.
KERNEL_CASES = [
    Case("k_64_rounds", 390, 300, heads=3, heads_k=1, dim=64),
    Case("k_64_causal_rounds", 390, 390, batch=1, heads=8, heads_k=1, dim=64, mask=causal),
    Case("k_64_softcap_sinks", 70, 300, batch=1, heads=3, heads_k=1, dim=64, softcap=3.0, sinks=True, mask=causal),
    Case(
        "k_64_packed",
        0,
        0,
        heads=3,
        heads_k=1,
        dim=64,
        mask=causal,
        lengths=((0, 0), (130, 261), (0, 40), (65, 0), (1, 128), (200, 129), (64, 64), (0, 0)),
    ),
    Case("k_96", 130, 300, batch=1, heads=3, heads_k=1, dim=96, mask=causal),
    Case("k_96_window_packed", 0, 0, dim=96, mask=window(40, 7), lengths=((70, 300), (0, 3), (129, 90), (65, 1))),
    Case("k_128_rounds", 300, 400, dim=128),
    Case("k_128_causal", 260, 520, batch=1, dim=128, heads=8, heads_k=1, mask=causal),
    Case("k_128_more_queries", 400, 140, batch=1, dim=128, heads=3, heads_k=3, mask=causal),
    Case("k_128_window", 300, 400, batch=1, dim=128, mask=window(150, 20)),
    Case("k_128_sliced", 131, 259, dim=128, memory="sliced", mask=causal),
    Case("k_128_packed", 0, 0, dim=128, heads=8, heads_k=1, lengths=((128, 129), (0, 7), (3, 0), (257, 130), (1, 1))),
    Case("k_128_rising", 64, 520, batch=1, dim=128, scores="rising"),
    Case("k_128_falling", 64, 520, batch=1, dim=128, scores="falling"),  # kernels go from the last key to the first
    # exp overflows under a maximum of a block ago
    Case("k_128_steep", 64, 520, batch=1, dim=128, scores="falling", scale=0.5),
    # no key of the first block it meets
    Case("k_128_first_row_late", 64, 319, batch=1, dim=128, scores="low", mask=causal),
    Case("k_64_falling", 200, 300, batch=1, dim=64, scores="falling", mask=causal),
    Case("k_128_huge", 64, 260, batch=1, dim=128, scores="huge", mask=causal),
    Case("k_192", 130, 200, batch=1, dim=192, mask=causal),
    Case("k_192_128", 130, 260, batch=1, heads=3, heads_k=1, dim=192, dim_v=128, mask=causal),
    Case("k_192_128_packed", 0, 0, heads=2, dim=192, dim_v=128, lengths=((100, 140), (0, 0), (33, 270))),
    Case("k_256", 130, 170, batch=1, dim=256, mask=causal),
    Case("k_256_rounds", 260, 90, batch=2, heads=3, heads_k=3, dim=256),
    Case("k_40", 140, 200, batch=1, heads=3, heads_k=1, dim=40, mask=causal),
    Case("k_72", 70, 140, batch=1, dim=72, memory="sliced"),
    Case("k_72_packed", 0, 0, dim=72, dim_v=40, lengths=((65, 140), (3, 129), (0, 2))),
    Case("k_prefix", 200, 300, batch=1, dim=64, mask=prefix(150)),
    Case("k_chunked", 260, 260, batch=1, dim=64, mask=chunked(70) & causal),
    Case("k_top_left", 300, 200, batch=1, dim=64, mask=causal_top_left),
    Case("k_window_right", 200, 300, batch=1, dim=64, mask=window(None, 30)),
    Case("k_window_left", 200, 300, batch=1, dim=64, mask=window(30, None)),
    Case("k_rows_without_keys", 400, 60, batch=1, dim=64, mask=window(20, 10)),
    Case("k_scale", 70, 140, batch=1, dim=64, scale=0.7),
    Case("k_64_dropout", 70, 300, batch=1, heads=3, heads_k=1, dim=64, mask=causal, dropout=0.3),
    Case("k_128_dropout", 140, 400, batch=1, dim=128, mask=causal, dropout=0.3),  # sm90 decides early what it drops
    Case("k_192_dropout_packed", 0, 0, dim=192, dropout=0.2, lengths=((70, 200), (0, 3), (65, 129))),
    Case("k_softcap", 70, 140, batch=1, dim=64, softcap=20.0, scores="huge"),
]

# Head dims above 256, for Hopper's kernels alone.
_LENGTHS = ((70, 130), (0, 3), (65, 0), (129, 90))
WIDE_CASES = [
    Case("w_512", 300, 90, batch=1, heads=3, heads_k=3, dim=512),
    Case("w_512_causal", 140, 140, batch=1, heads=4, heads_k=2, dim=512, mask=causal),
    Case("w_512_sliced", 70, 100, batch=2, dim=512, mask=causal, memory="sliced"),
    Case("w_512_everything", 0, 0, heads=4, heads_k=2, dim=512, mask=window(40, 7), softcap=3.0, sinks=True,
         dropout=0.2, lengths=_LENGTHS),
    Case("w_264", 70, 140, batch=2, heads=2, heads_k=1, dim=264, mask=window(50, None)),
    Case("w_320_causal", 140, 170, batch=1, heads=4, heads_k=2, dim=320, mask=causal),
    Case("w_320_packed", 0, 0, heads=4, heads_k=2, dim=320, mask=causal, lengths=_LENGTHS),
    Case("w_384_softcap", 130, 100, batch=1, dim=384, mask=causal, softcap=3.0),
    Case("w_512_64", 70, 140, batch=1, dim=512, dim_v=64, mask=causal),
    Case("w_128_320", 70, 140, batch=1, dim=128, dim_v=320, mask=causal),
]  # fmt: skip

_PAIRS = ((70, 130), (0, 3), (65, 0), (129, 90), (1, 1))
# fp32 inputs, for Hopper's kernels alone.
FP32_CASES = [
    Case("f_128", 130, 200, batch=1, heads=2, heads_k=1, dim=128),
    Case("f_128_causal", 150, 150, batch=1, heads=4, heads_k=2, dim=128, mask=causal),
    Case("f_128_window", 130, 260, batch=1, dim=128, mask=window(70, 20)),
    Case("f_128_packed", 0, 0, heads=4, heads_k=1, dim=128, lengths=_PAIRS),
    Case("f_128_sliced", 131, 100, dim=128, memory="sliced", mask=causal),
    Case("f_128_huge", 64, 260, batch=1, dim=128, scores="huge", mask=causal),
    Case("f_128_rising", 64, 200, batch=1, dim=128, scores="rising"),
    Case("f_72_causal", 130, 200, batch=1, heads=2, heads_k=1, dim=72, mask=causal),
    Case("f_64", 300, 200, heads=3, heads_k=3, dim=64),
    Case("f_64_causal", 150, 100, batch=1, dim=64, mask=causal),  # the first rows see nothing
    Case("f_64_window_packed", 0, 0, dim=64, mask=window(40, 7), lengths=_PAIRS),
    Case("f_64_prefix", 100, 150, batch=1, dim=64, mask=prefix(90)),
    Case("f_64_falling", 100, 300, batch=1, dim=64, scores="falling"),
    Case("f_64_sinks", 70, 140, batch=1, dim=64, sinks=True, mask=causal),
    Case("f_64_softcap", 70, 140, batch=1, dim=64, softcap=3.0),
    Case("f_40_pair", 1, 1, batch=1, heads=1, heads_k=1, dim=40),
    Case("f_40_decode", 1, 150, heads=4, heads_k=2, dim=40),
    Case("f_64_128", 70, 100, batch=1, dim=64, dim_v=128),
]


@functools.cache
def limits(case: Case, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return why the kernels do not compute this case; None if they do."""
    problem, _ = prepare(case, dtype)
    return "nothing to attend" if problem.empty else FAMILIES["sm80"].limits(problem)


SUPPORTED = [case for case in (*CASES, *KERNEL_CASES) if limits(case) is None]
