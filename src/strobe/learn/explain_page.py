"""The page on which one watches the algorithm run: one self-contained HTML file, with traces that the library has
recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import strobe
from strobe.learn import worked_example
from strobe.learn.trace import trace

_HERE = Path(__file__).parent / "page"

# Per GPU: multiprocessors, KiB of shared memory and of registers on each, MiB of L2, GB/s of memory, dense TFLOP/s of
# the units that would do the work (matrix units with 32-bit sums for 16 bits; ordinary ones for float32; the better of
# both for float64). From the vendor's data sheets and the CUDA programming guide; for SXM boards where there are
# several.
GPUS: list[dict[str, Any]] = [
    {
        "name": "H200",
        "sms": 132,
        "shared": 228,
        "registers": 256,
        "l2": 60,
        "memory": "HBM3e",
        "bandwidth": 4800,
        "tflops": {"float16": 989, "bfloat16": 989, "float32": 67, "float64": 67},
    },
    {
        "name": "H100",
        "sms": 132,
        "shared": 228,
        "registers": 256,
        "l2": 50,
        "memory": "HBM3",
        "bandwidth": 3350,
        "tflops": {"float16": 989, "bfloat16": 989, "float32": 67, "float64": 67},
    },
    {
        "name": "A100 80 GB",
        "sms": 108,
        "shared": 164,
        "registers": 256,
        "l2": 40,
        "memory": "HBM2e",
        "bandwidth": 2039,
        "tflops": {"float16": 312, "bfloat16": 312, "float32": 19.5, "float64": 19.5},
    },
    {
        "name": "RTX 4090",
        "sms": 128,
        "shared": 100,
        "registers": 256,
        "l2": 72,
        "memory": "GDDR6X",
        "bandwidth": 1008,
        "tflops": {"float16": 165, "bfloat16": 165, "float32": 82.6, "float64": 1.3},
    },
    {
        "name": "T4",
        "sms": 40,
        "shared": 64,
        "registers": 256,
        "l2": 4,
        "memory": "GDDR6",
        "bandwidth": 320,
        "tflops": {"float16": 65, "float32": 8.1, "float64": 0.25},
    },
]

# The second example has scores of about one: its weights can be seen, and some rows need the rescale while others do
# not.
MODERATE = {
    "q": [[1, 0], [0, 1], [1, 1], [-1, 1]],
    "k": [[1, 0], [0, 1], [1, 1], [2, -1]],
    "v": [[1, 0], [0, 1], [2, 1], [1, 3]],
}


def _preset(name: str, about: str, n: int, d: int, block_q: int, block_k: int, **more: Any) -> dict[str, Any]:
    settings = {"mask": "full", "dtype": "float32", "left": 1, "right": 0} | more
    return {"name": name, "about": about, "n": n, "d": d, "blockQ": block_q, "blockK": block_k} | settings


def presets() -> list[dict[str, Any]]:
    worked = {"q": worked_example.Q, "k": worked_example.K, "v": worked_example.V}
    larger = {name: [[30 * x for x in row] for row in MODERATE[name]] for name in "qk"} | {"v": MODERATE["v"]}
    return [
        _preset(
            "Worked example",
            "The one that circulates. Its softmax is almost one-hot: each new tile all but wipes out those before it.",
            4,
            2,
            2,
            2,
            matrices=worked,
        ),
        _preset(
            "Moderate scores",
            "Better to learn from: the weights are of one size, row 0 is rescaled by about a half, row 1 not at all.",
            4,
            2,
            2,
            2,
            matrices=MODERATE,
        ),
        _preset(
            "Scores of a thousand",
            "Nothing overflows, because only differences from the maximum are exponentiated. Then break it.",
            4,
            2,
            2,
            2,
            matrices=larger,
        ),
        _preset(
            "Eight tokens, causal",
            "Tiles above the diagonal are skipped, those on it are masked.",
            8,
            4,
            2,
            2,
            mask="causal",
        ),
        _preset(
            "Window of 128",
            "Each token sees itself and the 127 before it: a band of tiles is left.",
            1024,
            64,
            64,
            64,
            mask="window",
            left=127,
            right=0,
            dtype="bfloat16",
        ),
        _preset(
            "16-row tiles",
            "The first kernel everyone writes. With 16 rows and d = 64 it moves more bytes than standard attention: "
            "flash wins only if the tile has more than d/2 rows.",
            1024,
            64,
            16,
            64,
            dtype="float16",
        ),
        _preset(
            "4096 tokens, 128-row tiles",
            "What a kernel on a data-centre GPU does.",
            4096,
            128,
            128,
            128,
            mask="causal",
            dtype="bfloat16",
        ),
    ]


def traces() -> list[dict[str, Any]]:
    """The small presets as the library runs them; the page shows these until the reader changes something."""
    found = []
    for preset in presets()[:3]:
        for dtype in ("float32", "float64"):
            for mask in ("full", "causal"):
                q, k, v = (torch.tensor(preset["matrices"][name], dtype=getattr(torch, dtype)) for name in "qkv")
                run = trace(q, k, v, block_q=preset["blockQ"], block_k=preset["blockK"], mask=getattr(strobe, mask))
                found.append({"preset": preset["name"]} | run.to_dict())
    return found


def html() -> str:
    data = {"version": strobe.__version__, "gpus": GPUS, "presets": presets(), "traces": traces()}
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    for mark, part in (("STYLE", "page.css"), ("MODEL", "model.js"), ("VIEW", "view.js"), ("SCRIPT", "page.js")):
        text = text.replace(f"/*{mark}*/", (_HERE / part).read_text(encoding="utf-8"))
    return text.replace("/*DATA*/", json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/"))


def build(out: Path) -> Path:
    """Write the page to the file `out`; folders above it are made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html(), encoding="utf-8")
    return out
