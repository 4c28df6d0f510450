"""A counter-based generator, a pure function of (seed, batch, head, query, key), decides which entries dropout keeps.

No state is carried along, so the mask depends neither on the tile sizes nor on the order of the tiles nor on the device,
and the backward pass computes it again instead of storing it. A hash serves a cell of four queries and four keys: two
neighbours, and those eight further. A thread of the kernels has half of these entries: two queries with four keys, or
four queries with two keys. In unsigned arithmetic of 32 bits, or of 64 where that is said, as tile/dropout.cuh has it:

    r = mix(high ^ 0x9e3779b9); r = mix(r ^ low)                              the two halves of the 64-bit seed
    r = mix(r ^ batch); r = mix(r + head)
    a = mix(r ^ (query & ~9)); b = mix(a ^ 0x85ebca6b) | 0x80000001           for four queries
    s = (key & ~9) * b + (b * 2^32 + a)                                       64 bits
    z = (s / 2^32 ^ s % 2^32) * 0x9e3779b1                                    64 bits
    w = z % 2^32 * factor + z / 2^32                                          one of eight factors, by query & 9 and key & 8
    x = key odd ? w >> 16 : w & 0xffff

with mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16, a bijection with good avalanche.
Each row has a multiplier of its own: with one for all of them, keys of some distances (6816 was one) would be correlated
in every row. It is odd, so that no bits of a key are lost, and large, so that s / 2^32 changes with it.
The factors are odd, and no two are equal modulo 16: words of a cell are then independent in pairs as far as the halves of
z are, but for their three lowest bits.

An entry is dropped where x, 16 random bits, is one of n = round(p * 2^16) patterns, and else divided by 1 - n / 2^16.
Which patterns is up to the hardware: it compares two fp16 numbers at once, so these are the n least numbers, if the bits
are read as fp16. NaN counts as the largest. For p beyond `LARGEST` that would have to tell NaN from NaN: there, all but
the least patterns are dropped.
"""

from __future__ import annotations

import torch

_MIX = (0x7FEB352D, 0x846CA68B)
_SPREAD = 0x9E3779B1
_ODD_AND_LARGE = 0x80000001
_FACTORS = (  # by query & 1; key & 8; query & 8
    ((0xB5297A4D, 0x68E31DA3), (0x1B56C4E9, 0xC2B2AE3F)),
    ((0x85EBCA6B, 0x27D4EB21), (0xCD9E8D57, 0x165667B5)),
)
_SEED_SALT, _ROW_SALT = 0x9E3779B9, 0x85EBCA6B
_LOW = 0xFFFFFFFF
_INF = 0x7C00  # of fp16
_FINITE_AND_INF = 2 * (_INF + 1)  # patterns that are not NaN
LARGEST = (_FINITE_AND_INF - 1) / (1 << 16)  # p that one comparison can say, which is all that the kernels do


def threshold(p: float) -> int:
    """Return how many of the 2^16 patterns drop an entry. 31745 cannot occur: see `_rank`."""
    n = min(round(p * (1 << 16)), (1 << 16) - 1)
    return n + 1 if n == _INF + 1 else n


def kept_share(p: float) -> float:
    """The share of entries that is really kept. Kept entries are divided by it, so that their expectation does not
    change."""
    return 1 - threshold(p) / (1 << 16)


def _rank(n: int) -> int:
    """The least number that is not among the n least: the bits of an fp16 number, negative if that is. -0 and 0 are one
    number and two patterns, so n = 31745 cannot occur."""
    return n - _INF if n <= _INF else n - _INF - 1


def threshold_bits(p: float) -> int:
    """An entry is kept where its bits are not less than these; both as fp16, for p up to LARGEST."""
    rank = _rank(threshold(p))
    return rank if rank > 0 else 0x8000 - rank


def new_seed(device: torch.device) -> int:
    """A seed that follows torch.manual_seed, for a call on this device."""
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dropout without a seed cannot be captured in a CUDA graph: the seed is drawn on the host, once, and each "
            "replay would drop the same weights. Leave attention out of the graph or, if strobe is called by name and "
            "that is wanted, give it a `seed`"
        )
    return int(torch.randint(1 << 62, (), device="cpu").item())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`mix` of numbers below 2^32 in int64: products wrap around, but their low halves are right."""
    x = x ^ (x >> 16)
    x = (x * _MIX[0]) & _LOW
    x = x ^ (x >> 15)
    x = (x * _MIX[1]) & _LOW
    return x ^ (x >> 16)


def _word(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`w`. In int64 sums and products of 64 bits wrap around as unsigned ones do."""
    s = (keys & ~9) * b + ((b << 32) | a)
    z = ((s ^ (s >> 32)) & _LOW) * _SPREAD
    factor = torch.tensor(_FACTORS, device=keys.device)[rows & 1, (keys >> 3) & 1, (rows >> 3) & 1]
    return ((z & _LOW) * factor + ((z >> 32) & _LOW)) & _LOW


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
    a = _mix(head_key(seed, batch, heads) ^ (rows & ~9))
    b = _mix(a ^ _ROW_SALT) | _ODD_AND_LARGE
    w = _word(a, b, rows, keys)
    x = torch.where(keys % 2 == 1, w >> 16, w & 0xFFFF)
    magnitude = x & 0x7FFF
    number = torch.where(x > 0x7FFF, -magnitude, magnitude)
    dropped = threshold(p)
    if dropped < _FINITE_AND_INF:
        return (number >= _rank(dropped)) | (magnitude > _INF)
    return (number < _rank((1 << 16) - dropped)) & (magnitude <= _INF)
