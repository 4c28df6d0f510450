"""The page that explains FlashAttention: one self-contained HTML file, with numbers that the library has recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import strobe
from strobe.learn import measured, story, worked_example
from strobe.learn.gpus import GPUS
from strobe.tile_trace import Trace, trace

_HERE = Path(__file__).parent / "page"
_STYLES = {"BASE": "base.css", "STORY-STYLE": "story.css", "PLAY-STYLE": "play.css"}
_SCRIPTS = (
    *("draw.js", "model.js", "example.js", "matrices.js", "memory.js", "row.js", "race.js", "charts.js"),
    *("story.js", "play_view.js", "play_cost.js", "play.js"),
)

# Scores of about one: its weights can be seen, and some rows need the rescale while others do not.
MODERATE = {
    "q": [[1, 0], [0, 1], [1, 1], [-1, 1]],
    "k": [[1, 0], [0, 1], [1, 1], [2, -1]],
    "v": [[1, 0], [0, 1], [2, 1], [1, 3]],
}
OPENING = {"preset": 0, "index": 10}  # moderate scores, in the middle of the rescale of the second tile


def _preset(name: str, about: str, n: int, d: int, block_q: int, block_k: int, **more: Any) -> dict[str, Any]:
    settings = {"mask": "full", "dtype": "float32", "left": 1, "right": 0, "cached": False} | more
    return {"name": name, "about": about, "n": n, "d": d, "blockQ": block_q, "blockK": block_k} | settings


def presets() -> list[dict[str, Any]]:
    worked = {"q": worked_example.Q, "k": worked_example.K, "v": worked_example.V}
    larger = {name: [[30 * x for x in row] for row in MODERATE[name]] for name in "qk"} | {"v": MODERATE["v"]}
    words = {"q": story.Q, "k": story.K, "v": story.V}
    case = measured.load()["attention"]["case"]
    return [
        _preset(
            "Moderate scores",
            "Good to learn from: the weights are of one size, row 0 is rescaled by about a half, row 1 not at all.",
            *(4, 2, 2, 2),
            matrices=MODERATE,
        ),
        _preset(
            "The six words",
            "The example of the chapters above.",
            *(6, 4, story.BLOCK_Q, story.BLOCK_K),
            matrices=words,
        ),
        _preset(
            "The worked example",
            "The one that circulates, with the right numbers. Its softmax is almost one-hot: each new tile all but wipes "
            "out those before it.",
            *(4, 2, 2, 2),
            matrices=worked,
        ),
        _preset(
            "Scores of a thousand",
            "Nothing overflows, because only differences from the maximum are exponentiated. Then break it.",
            *(4, 2, 2, 2),
            matrices=larger,
        ),
        _preset(
            "Eight tokens, causal",
            "Tiles above the diagonal are skipped, those on it are masked.",
            *(8, 4, 2, 2),
            mask="causal",
        ),
        _preset(
            "Window of 128",
            "Each token sees itself and the 127 before it: a band of tiles is left.",
            *(1024, 64, 64, 64),
            mask="window",
            left=127,
            dtype="bfloat16",
        ),
        _preset(
            "16-row tiles",
            "The first kernel everyone writes. With 16 rows and d = 64 it moves more bytes than standard attention: "
            "flash moves less only if the tile has more than d/2 rows.",
            *(1024, 64, 16, 64),
            dtype="float16",
        ),
        _preset(
            "4,096 tokens, 128-row tiles",
            "What a kernel on a data-centre GPU does. This one was measured.",
            *(case["len_q"], case["dim"], 128, 128),
            mask=case["mask"],
            dtype=case["dtype"],
            cached=True,
        ),
    ]


def traces() -> list[dict[str, Any]]:
    """The small presets as the library runs them; the page shows these until the reader changes something."""
    recorded_runs = []
    for preset in (p for p in presets() if "matrices" in p):
        for dtype in ("float32", "float64"):
            for mask in ("full", "causal"):
                q, k, v = (torch.tensor(preset["matrices"][name], dtype=getattr(torch, dtype)) for name in "qkv")
                run = trace(q, k, v, block_q=preset["blockQ"], block_k=preset["blockK"], mask=getattr(strobe, mask))
                recorded_runs.append({"preset": preset["name"]} | recorded(run))
    return recorded_runs


def recorded(run: Trace) -> dict[str, Any]:
    """A trace as the page holds it: without the steps, which the page derives from the sizes and the mask, and with no
    more digits than its type has."""
    digits = 9 if run.dtype == "float32" else 13

    def rounded(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: rounded(value) for key, value in x.items()}
        if isinstance(x, (list, tuple)):
            return [rounded(value) for value in x]
        return float(f"{x:.{digits}g}") if isinstance(x, float) else x

    return rounded({key: value for key, value in run.to_dict().items() if key != "steps"})


def data() -> dict[str, Any]:
    return {
        "version": strobe.__version__,
        "gpus": GPUS,
        "story": (told := story.story()) | {"trace": recorded(told["trace"])},
        "measured": measured.load(),
        "presets": presets(),
        "traces": traces(),
        "opening": OPENING,
    }


_ROOT = Path(__file__).resolve().parents[3]  # of a checkout


def _address(target: str) -> str | None:
    """Return the address of a file of the checkout or of the installed package, on this machine; None if it is not
    here."""
    package = Path(strobe.__file__).parent / target.removeprefix("src/strobe/")
    path = package if target.startswith("src/") else _ROOT / target
    return path.as_uri() if path.is_file() else None


def html(address: Callable[[str], str | None] = _address) -> str:
    """`address` says where a file of the project can be read; what it does not know is named without a link."""

    def link(match: re.Match[str]) -> str:
        to = address(match[1])
        return match[2] if to is None else f'<a href="{to}">{match[2]}</a>'

    def part(name: str) -> str:
        return (_HERE / name).read_text(encoding="utf-8")

    text = part("page.html")
    for mark, name in _STYLES.items():
        text = text.replace(f"/*{mark}*/", part(name))
    text = text.replace("<!--STORY-->", part("story.html")).replace("<!--PLAY-->", part("play.html"))
    text = re.sub(r'<a data-to="([^"]+)">(.*?)</a>', link, text)
    text = text.replace("/*SCRIPTS*/", "\n".join(part(name).removeprefix('"use strict";\n') for name in _SCRIPTS))
    return text.replace("/*DATA*/", json.dumps(data(), separators=(",", ":"), allow_nan=False).replace("</", "<\\/"))


def build(out: Path, address: Callable[[str], str | None] = _address) -> Path:
    """Write the page to the file `out`; folders above it are made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html(address), encoding="utf-8")
    return out
