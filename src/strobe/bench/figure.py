"""One figure for the documents, as SVG text that depends on the numbers and nothing else: the same results give the
same bytes."""

from __future__ import annotations

import math

from strobe.bench.results import KINDS, Results, Row

_COLOURS = {
    "ours": ("#d1495b", "#e07a3f", "#b8336a"),
    "ladder": ("#fbb03b", "#e8793a", "#c94c4c", "#9b3a6b", "#6b3a8a", "#3f3a8f", "#22577a"),
    "peer": ("#2f6fb3", "#2a9d8f", "#6a5acd", "#4f9d3a"),
    "standard": ("#8a8d93", "#a67c52", "#6f7d5c", "#9a7aa0"),
}
_W, _H, _LEFT, _TOP, _BOTTOM = 300, 210, 40, 26, 34


def speed(results: Results, suite: str, direction: str = "forward") -> str | None:
    """TFLOP/s against length, one panel per head dim and mask; None without such rows."""
    rows = [
        r
        for r in results.rows
        if r.case.suite == suite and r.case.direction == direction and r.case.measure == "time" and r.case.tile is None
    ]
    rows = [r for r in rows if r.timed and r.tflops]
    panels = list(dict.fromkeys((r.case.dim, r.case.mask) for r in rows))
    if not panels:
        return None
    providers = sorted({(KINDS.index(r.kind), r.kind, r.provider) for r in rows})
    colours: dict[str, str] = {}
    for _, kind, name in providers:
        used = sum(1 for k, n in ((k, n) for _, k, n in providers) if k == kind and n in colours)
        colours[name] = _COLOURS[kind][used % len(_COLOURS[kind])]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    legend_lines = -(-len(providers) // 4)
    width, height = columns * _W, lines * _H + 18 * legend_lines + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="11">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="#ffffff"/>')
    top = max(r.tflops or 0 for r in rows) * 1.05
    for i, (dim, mask) in enumerate(panels):
        own = [r for r in rows if (r.case.dim, r.case.mask) == (dim, mask)]
        parts.append(
            f'<g transform="translate({i % columns * _W},{i // columns * _H})">'
            + _panel(own, f"head dim {dim}, {mask}", top, colours)
            + "</g>"
        )
    for i, (_, _, name) in enumerate(providers):
        x, y = 12 + i % 4 * (width // 4), lines * _H + 14 + 18 * (i // 4)
        parts.append(
            f'<rect x="{x}" y="{y - 8}" width="14" height="8" fill="{colours[name]}"/>'
            f'<text x="{x + 19}" y="{y}" fill="#333">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 else str(n)


def _panel(rows: list[Row], title: str, top: float, colours: dict[str, str]) -> str:
    lengths = sorted({r.case.len_k for r in rows})
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])

    def x(n: int) -> float:
        return _LEFT + 8 + (_W - _LEFT - 26) * ((math.log2(n) - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return _TOP + (_H - _TOP - _BOTTOM) * (1 - value / top)

    step = 10 ** math.floor(math.log10(top / 2))
    step = next(step * m for m in (1, 2, 5, 10) if top / (step * m) <= 5)
    parts = [f'<text x="{_LEFT}" y="14" fill="#111" font-weight="bold">{title}</text>']
    value = 0.0
    while value <= top:
        parts.append(
            f'<path d="M{_LEFT} {y(value):.1f}H{_W - 10}" stroke="#e4e4e0"/>'
            f'<text x="{_LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>'
        )
        value += step
    for n in lengths:
        parts.append(
            f'<text x="{x(n):.1f}" y="{_H - _BOTTOM + 15}" text-anchor="middle" fill="#555">{_short(n)}</text>'
        )
    for name, colour in colours.items():
        points = sorted((r.case.len_k, r.tflops or 0.0) for r in rows if r.provider == name)
        if points:
            line = "L".join(f"{x(n):.1f} {y(v):.1f}" for n, v in points)
            parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            parts += [f'<circle cx="{x(n):.1f}" cy="{y(v):.1f}" r="2.4" fill="{colour}"/>' for n, v in points]
    return "".join(parts)
