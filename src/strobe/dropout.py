"""Which entries dropout keeps: a counter-based generator, a pure function of (seed, batch, head, query, key).

No state is carried along, so the mask depends neither on the tile sizes nor on the order of the tiles nor on the
device, and the backward pass computes it again instead of storing it. In unsigned 32-bit arithmetic, as a kernel would
write it:

    r = mix(high ^ 0x9e3779b9); r = mix(r ^ low)                              the two halves of the 64-bit seed
    r = mix(r ^ batch); r = mix(r + head)
    a = mix(r ^ query); b = mix(a ^ 0x85ebca6b)                               two keys for the row
    u = mix(mix(key ^ a) + b)
    kept where (u >> 8) >= threshold                                          threshold = round(p * 2^24)

with mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16, a bijection with good
avalanche."""

from __future__ import annotations

import torch

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SEED_SALT, _ROW_SALT = 0x9E3779B9, 0x85EBCA6B


def threshold(p: float) -> int:
    """An entry is dropped when its 24 random bits are below this."""
    return round(p * (1 << 24))


def _signed(x: int) -> int:
    """The 32 bits of `x` as the signed int32 that torch wants; its arithmetic wraps, so the bits come out as in
    unsigned."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _xor_shift_(x: torch.Tensor, by: int, scratch: torch.Tensor) -> None:
    torch.bitwise_right_shift(x, by, out=scratch)
    x ^= scratch.bitwise_and_((1 << (32 - by)) - 1)  # torch shifts in the sign, the kernels shift in zeros


def _mix_(x: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    scratch = torch.empty_like(x) if scratch is None else scratch
    _xor_shift_(x, 16, scratch)
    x *= _signed(_MULTIPLIERS[0])
    _xor_shift_(x, 15, scratch)
    x *= _signed(_MULTIPLIERS[1])
    _xor_shift_(x, 16, scratch)
    return x


def _axis(index: torch.Tensor | range, device: torch.device | str | None, axis: int) -> torch.Tensor:
    if isinstance(index, range):
        values = torch.arange(index.start, index.stop, index.step, dtype=torch.int32, device=device)
    else:
        values = index.to(device=device, dtype=torch.int32)
    return values.view([-1 if i == axis else 1 for i in range(4)])


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
    r = _mix_(torch.full((1, 1, 1, 1), _signed((seed >> 32) ^ _SEED_SALT), dtype=torch.int32, device=device))
    r = _mix_(r ^ _signed(seed))
    r = _mix_(_mix_(r ^ batch) + heads)
    a = _mix_(r ^ rows)
    b = _mix_(a ^ _signed(_ROW_SALT))
    u = keys ^ a
    scratch = torch.empty_like(u)
    _mix_(_mix_(u, scratch).add_(b), scratch)
    return u.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF) >= threshold(p)
