"""Which entries dropout keeps: a counter-based generator, a pure function of (seed, batch, head, query, key).

No state is carried along, so the mask depends neither on the tile sizes nor on the order of the tiles nor on the device,
and the backward pass computes it again instead of storing it. A hash serves a cell of two queries and two keys, since the
forward kernel has neighbouring keys in a thread and the backward kernel neighbouring queries. In unsigned 32-bit
arithmetic, as tile/dropout.cuh has it:

    r = mix(high ^ 0x9e3779b9); r = mix(r ^ low)                              the two halves of the 64-bit seed
    r = mix(r ^ batch); r = mix(r + head)
    a = mix(r ^ query / 2); b = mix(a ^ 0x85ebca6b)                           two keys for the pair of queries
    y = fold(a + key / 2, 0xd2511f53) ^ b
    w = fold(y, query odd ? 0xcd9e8d57 : 0x9e3779b1)
    kept where (key odd ? w >> 16 : w & 0xffff) >= threshold                  threshold = round(p * 2^16)

with mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16, a bijection with good avalanche,
and fold(x, m): the exclusive or of the two halves of the 64-bit product.
"""

from __future__ import annotations

import torch

_MIX = (0x7FEB352D, 0x846CA68B)
_FOLD, _FOLD_EVEN, _FOLD_ODD = 0xD2511F53, 0x9E3779B1, 0xCD9E8D57
_SEED_SALT, _ROW_SALT = 0x9E3779B9, 0x85EBCA6B
_LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """An entry is dropped when its 16 random bits are below this."""
    return min(round(p * (1 << 16)), (1 << 16) - 1)


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
    y = _fold((a + (keys >> 1)) & _LOW, _FOLD) ^ b
    w = _fold(y, torch.where(rows % 2 == 1, _FOLD_ODD, _FOLD_EVEN))
    return torch.where(keys % 2 == 1, w >> 16, w & 0xFFFF) >= threshold(p)
