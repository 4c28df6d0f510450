"""Which entries dropout keeps: a counter-based generator, a pure function of (seed, batch, head, query, key).

No state is carried along, so the mask depends neither on the tile sizes nor on the order of the tiles nor on the device,
and the backward pass computes it again instead of storing it. A hash serves a cell of two neighbouring queries and the
keys k, k + 1, k + 8 and k + 9: those that a thread of the forward and of the backward kernels has. In unsigned 32-bit
arithmetic, as tile/dropout.cuh has it:

    r = mix(high ^ 0x9e3779b9); r = mix(r ^ low)                              the two halves of the 64-bit seed
    r = mix(r ^ batch); r = mix(r + head)
    a = mix(r ^ query / 2); b = mix(a ^ 0x85ebca6b)                           two keys for the pair of queries
    y = fold(a + k, 0xd2511f53) ^ b                                           k: the key without its bits 0 and 3
    w = fold(y, one of four factors, by query & 1 and key & 8)
    x = key odd ? w >> 16 : w & 0xffff

with mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16, a bijection with good avalanche,
and fold(x, m): the exclusive or of the two halves of the 64-bit product.

An entry is dropped where x, 16 random bits, is one of n = round(p * 2^16) patterns. Which ones is up to the hardware: it
compares two fp16 numbers at once, so these are the n least numbers, if the bits are read as fp16. NaN counts as the
largest. For p beyond `LARGEST` that would have to tell NaN from NaN: there, all but the least patterns are dropped.
"""

from __future__ import annotations

import torch

_MIX = (0x7FEB352D, 0x846CA68B)
_FOLD = 0xD2511F53
_FOLDS = ((0x9E3779B1, 0xB5297A4D), (0xCD9E8D57, 0xC2B2AE3D))  # by query & 1 and key & 8
_SEED_SALT, _ROW_SALT = 0x9E3779B9, 0x85EBCA6B
_LOW = 0xFFFFFFFF
_INF = 0x7C00  # of fp16
_FINITE_AND_INF = 2 * (_INF + 1)  # patterns that are not NaN
LARGEST = (_FINITE_AND_INF - 1) / (1 << 16)  # p that one comparison can say, which is all that the kernels do


def threshold(p: float) -> int:
    """How many of the 2^16 patterns drop an entry."""
    return min(round(p * (1 << 16)), (1 << 16) - 1)


def _rank(n: int) -> int:
    """The least number that is not among the n least: the bits of an fp16 number, negative if that is. -0 and 0 are one
    number and two patterns, so n = 31745 is not to be had: one more it is."""
    return n - _INF if n <= _INF else max(n - _INF - 1, 1)


def threshold_bits(p: float) -> int:
    """An entry is kept where its bits are not less than these; both as fp16, for p up to LARGEST."""
    rank = _rank(threshold(p))
    return rank if rank > 0 else 0x8000 - rank


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Of numbers below 2^32 in int64: products wrap around, but their low halves are right."""
    x = x ^ (x >> 16)
    x = (x * _MIX[0]) & _LOW
    x = x ^ (x >> 15)
    x = (x * _MIX[1]) & _LOW
    return x ^ (x >> 16)


def _fold(x: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    product = x * by
    return (product ^ (product >> 32)) & _LOW


def _axis(index: torch.Tensor | range, device: torch.device | str | None, axis: int) -> torch.Tensor:
    if isinstance(index, range):
        values = torch.arange(index.start, index.stop, index.step, device=device)
    else:
        values = index.to(device=device, dtype=torch.int64)
    return values.view([-1 if i == axis else 1 for i in range(4)])


def head_key(seed: int, batch: torch.Tensor | int, head: torch.Tensor | int) -> torch.Tensor:
    """`r`, of one sequence and head or of a tensor of them."""
    r = _mix(torch.as_tensor(((seed >> 32) ^ _SEED_SALT) & _LOW, device=getattr(batch, "device", "cpu")))
    r = _mix(r ^ (seed & _LOW))
    return _mix((_mix(r ^ batch) + head) & _LOW)


def keep(
    seed: int,
    batch: torch.Tensor | range,
    heads: torch.Tensor | range,
    rows: torch.Tensor | range,
    keys: torch.Tensor | range,
    p: float,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """True where an entry survives: (batch, heads, rows, keys) for the given indices along each axis."""
    if device is None:
        device = next((x.device for x in (batch, heads, rows, keys) if isinstance(x, torch.Tensor)), "cpu")
    batch, heads, rows, keys = (_axis(index, device, axis) for axis, index in enumerate((batch, heads, rows, keys)))
    a = _mix(head_key(seed, batch, heads) ^ (rows >> 1))
    b = _mix(a ^ _ROW_SALT)
    y = _fold((a + (keys & ~9)) & _LOW, _FOLD) ^ b
    by = torch.tensor(_FOLDS, device=device)[rows & 1, (keys >> 3) & 1]
    w = _fold(y, by)
    x = torch.where(keys % 2 == 1, w >> 16, w & 0xFFFF)
    magnitude = x & 0x7FFF
    number = torch.where(x > 0x7FFF, -magnitude, magnitude)
    dropped = threshold(p)
    if dropped < _FINITE_AND_INF:
        return (number >= _rank(dropped)) | (magnitude > _INF)
    return (number < _rank((1 << 16) - dropped)) & (magnitude <= _INF)
