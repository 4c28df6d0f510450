"""The words for masks and scores in the names of kernels, as profilers show them: `strobe_forward_sm90_bf16_d128_causal`.

A name is a part of the source. So a word follows from the text that a mask or a score prints, not from what a caller called
it: two of them that print the same text share a cubin.
"""

from __future__ import annotations

import functools

import torch

from strobe.cuda.parts import print_mask
from strobe.cuda.parts.print_score import Entries, printed
from strobe.variants.mask import Mask, causal, causal_top_left, full, used_keys
from strobe.variants.ready_made import cached_window, chunked, prefix, window
from strobe.variants.score import Score, alibi, identity, softcap, tensor_count

_MASKS = {
    "full": (full,),
    "causal": (causal,),
    "top_left": (causal_top_left,),
    "window": (window(1, 1), window(1, None), cached_window(1)),
    "prefix": (prefix(1),),
    "chunked": (chunked(1),),
}
_WORDS = {
    print_mask.struct(m): word for word, masks in _MASKS.items() for mask in masks for m in (mask & used_keys, mask)
}
_SCORES = {
    "": (identity,),
    "softcap": (softcap(1.0),),
    "alibi": tuple(alibi(torch.empty(shape, device="meta")) for shape in ((1,), (1, 1))),
}


def word_for_mask(mask: Mask) -> str:
    """ "interval" for a mask that has no name here."""
    return _WORDS.get(print_mask.struct(mask), "interval")


@functools.lru_cache(maxsize=256)
def words_for_score(score: Score, entries: tuple[Entries, ...]) -> tuple[str, ...]:
    """The names of a bias and a mask tensor, then the word for the score; "function" for one that a user wrote."""
    pairs = tuple(e.name for e in entries if e.pairs)
    text = printed(score, entries).text
    for word, scores in _SCORES.items():
        for plain in scores:
            if tensor_count(plain.expr) + len(pairs) != len(entries):
                continue
            whole = plain.with_pairs("bias" in pairs, "mask_tensor" in pairs)
            if printed(whole, entries).text == text:
                return (*pairs, word) if word else pairs
    return (*pairs, "function")
