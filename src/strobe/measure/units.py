"""Numbers with their units, as every table, message and document writes them."""

from __future__ import annotations

MISSING = "–"
_SAME = 0.005  # ratios closer to 1 than this are "as fast"


def size(value: float | None) -> str:
    """Bytes of memory, in powers of 1024."""
    if value is None:
        return MISSING
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def traffic(value: float | None) -> str:
    """Bytes that move, in powers of 1000, as bandwidths are."""
    if value is None:
        return MISSING
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def milliseconds(ms: float | None) -> str:
    if ms is None:
        return MISSING
    if ms < 0.1:
        return f"{ms * 1e3:.1f} µs"
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"


def seconds(value: float | None) -> str:
    return milliseconds(None if value is None else value * 1e3)


def rate(tflops: float | None) -> str:
    """FLOP per second with three digits at least: 0.3 GFLOP/s never becomes 0."""
    if tflops is None:
        return MISSING
    for unit, scale in (("TFLOP/s", 1.0), ("GFLOP/s", 1e-3), ("MFLOP/s", 1e-6)):
        if tflops >= scale or unit == "MFLOP/s":
            value = tflops / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError("the last unit takes everything")


def bandwidth(gbytes_per_s: float | None) -> str:
    return (
        MISSING
        if gbytes_per_s is None
        else f"{gbytes_per_s:.3g} GB/s"
        if gbytes_per_s < 100
        else f"{gbytes_per_s:.0f} GB/s"
    )


def times(ratio: float) -> str:
    """Three digits, and no exponent for large ones: "1.24 ×", "1645 ×"."""
    return f"{ratio:.0f} ×" if ratio >= 100 else f"{ratio:.3g} ×"


def faster(ratio: float | None) -> str:
    """Say in words how fast we are, from another's time / ours: "1.24 × faster", "1.7 × slower", "as fast"."""
    return _in_words(ratio, "faster", "slower", "as fast")


def less(ratio: float | None) -> str:
    """Say in words how little we need, from what another needs / what we need: "5.9 × less", "1.2 × more", "as
    much"."""
    return _in_words(ratio, "less", "more", "as much")


def _in_words(ratio: float | None, better: str, worse: str, same: str) -> str:
    if ratio is None or ratio <= 0:
        return MISSING
    if abs(ratio - 1) < _SAME:
        return same
    return f"{times(ratio)} {better}" if ratio > 1 else f"{times(1 / ratio)} {worse}"


def percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.0%}"


def length(n: int) -> str:
    """Write the length of a sequence: 16384 is "16K"."""
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)
