"""Formulas as inline SVG, drawn by matplotlib's mathtext while the site is built: readers need no network for them, and
no script."""

from __future__ import annotations

import html
import re

from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.textpath import TextPath

_SIZE = 100  # of the font, in the units of the drawing
_FONT = FontProperties(family="DejaVu Sans", math_fontfamily="cm")
# What TeX has and mathtext has not.
_INSTEAD = (
    (r"\\mathrel\{(.)\}=", r"\\,\1\\!\\!=\\,"),
    (r"\\bmod", r"\\ \\mathrm{mod}\\ "),
    (r"\\text\{([^}]*)\}", lambda found: r"\mathrm{" + found[1].replace(" ", r"\ ") + "}"),
    (
        r"\\(sqrt|frac) (\w)(\w)?(?![\w{])",
        lambda found: rf"\{found[1]}{{{found[2]}}}" + (f"{{{found[3]}}}" if found[3] else ""),
    ),
)


def svg(formula: str, display: bool = False) -> str:
    """As high as its text, on the line of the text, in the text's colour. On a line of its own, fractions are larger."""
    text = formula.strip().replace("\n", " ")
    for pattern, instead in _INSTEAD:
        text = re.sub(pattern, instead, text)
    if display:
        text = text.replace(r"\frac", r"\dfrac")
    width, height, depth, _, _ = MathTextParser("path").parse(f"${text}$", dpi=72, prop=_sized())
    path = TextPath((0, 0), f"${text}$", size=_SIZE, prop=_FONT)
    steps = {1: ("M", 1), 2: ("L", 1), 3: ("Q", 2), 4: ("C", 3), 79: ("Z", 0)}
    drawn = []
    for points, code in path.iter_segments(curves=True, simplify=False):
        letter, count = steps[int(code)]
        pairs = (f"{x:.1f} {-y:.1f}" for x, y in points.reshape(-1, 2)[:count])
        drawn.append(letter + " ".join(pairs))
    em = 1 / _SIZE
    style = f"width:{width * em:.3f}em;height:{height * em:.3f}em;vertical-align:{-depth * em:.3f}em"
    box = f"0 {depth - height:.1f} {width:.1f} {height:.1f}"
    label = html.escape(formula.strip(), quote=True)
    return (
        f'<svg class="formula" role="img" aria-label="{label}" viewBox="{box}" style="{style};overflow:visible">'
        f'<path fill="currentColor" d="{"".join(drawn)}"/></svg>'
    )


def _sized() -> FontProperties:
    sized = _FONT.copy()
    sized.set_size(_SIZE)
    return sized


def _inline(self, node):
    from docutils import nodes

    self.body.append(svg(node.astext()))
    raise nodes.SkipNode


def _block(self, node):
    from docutils import nodes

    lines = [line for line in re.split(r"\\\\", node.astext()) if line.strip()]
    self.body.append('<div class="math">' + "<br>".join(svg(line, display=True) for line in lines) + "</div>")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathtext", (_inline, None), (_block, None))
    return {"parallel_read_safe": True}
