"""The table of features and backends in README.md, made by asking each backend about small problems.

    python -m strobe.tools.support                      print it
    python -m strobe.tools.support --write README.md    put it between the markers there

The table says what the code can do and is the same on every machine: backends that need a GPU or a compiler have a
function `feature_limits(problem)` in their module, which answers as if they had it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from strobe import mask as masks
from strobe.backends import dispatch
from strobe.measure.generated import replace_between
from strobe.problem import Problem

BEGIN, END = (
    "<!-- support table: begin (python -m strobe.tools.support --write README.md) -->",
    "<!-- support table: end -->",
)
YES, NO = "✓", "–"

_PLAIN = Problem(
    dtype=torch.bfloat16, device=torch.device("cpu"), batch=2, heads=4, heads_k=4, len_q=16, len_k=16, dim=64, dim_v=64,
    mask=masks.full, scale=0.125, softcap=None, dropout=0.0, has_mask_tensor=False, has_bias=False, has_sinks=False,
    packed=False, total_q=32, total_k=32, needs_grad=False, return_lse=False, deterministic=False, strides=(),
)  # fmt: skip


def _changed(problem: Problem, **changes: Any) -> Problem:
    """The problem with other facts, its tensors still contiguous in (batch, length, heads, dim) order."""
    p = replace(problem, **changes)
    widths = ((p.len_q, p.heads, p.dim), (p.len_k, p.heads_k, p.dim), (p.len_k, p.heads_k, p.dim_v))
    return replace(p, strides=tuple((length * heads * dim, dim, heads * dim) for length, heads, dim in widths))


def home_problem(backend: str) -> Problem:
    """A plain problem of the kind that a backend is there for: if it cannot run this, it cannot run here."""
    device = torch.device("cuda", 0) if backend.startswith("sm") else torch.device("cpu")
    return _changed(_PLAIN, device=device, dtype=torch.float32 if backend == "aten_cpu" else torch.bfloat16)


# What is asked for each row: changes to a backend's home problem. A row holds if every one of its problems is
# supported.
_Changes = dict[str, Any]
FEATURES: list[tuple[str, list[_Changes]]] = [
    ("float16, bfloat16", [{"dtype": torch.float16}, {"dtype": torch.bfloat16}]),
    ("float32", [{"dtype": torch.float32}]),
    ("float64", [{"dtype": torch.float64}]),
    ("head dims: multiples of 8 up to 256", [{"dim": d, "dim_v": d} for d in range(8, 257, 8)]),
    ("any other head dim", [{"dim": d, "dim_v": d} for d in (1, 33, 100, 320)]),
    ("key and value dims differ", [{"dim": 192, "dim_v": 128}, {"dim": 64, "dim_v": 256}]),
    ("grouped heads (fewer key heads)", [{"heads_k": 2}, {"heads_k": 1}]),
    ("`causal`, `causal_top_left`", [{"mask": masks.causal}, {"mask": masks.causal_top_left}]),
    ("`window`, `prefix`, `chunked`, `&`",
     [{"mask": m} for m in (masks.window(4, 2), masks.prefix(3), masks.chunked(8), masks.causal & masks.window(4, None))]),
    ("boolean mask tensor", [{"has_mask_tensor": True}]),
    ("bias", [{"has_bias": True}]),
    ("softcap", [{"softcap": 30.0}]),
    ("sinks", [{"has_sinks": True}]),
    ("dropout", [{"dropout": 0.1}]),
    ("packed sequences (`attention_varlen`)", [{"packed": True, "batch": 2, "total_q": 32, "total_k": 32}]),
    ("log-sum-exp", [{"return_lse": True}]),
]  # fmt: skip


def limits(backend: str) -> Callable[[Problem], str | None]:
    """What a backend's code cannot do, whatever the machine lacks."""
    found = dispatch.get(backend)
    module = importlib.import_module(dispatch._MODULES[backend])
    return getattr(module, "feature_limits", found.supports)


def answers(backend: str) -> dict[str, str]:
    """The cells of one backend's column."""
    ask, home = limits(backend), home_problem(backend)

    def holds(*problems: Problem) -> bool:
        return all(ask(p) is None for p in problems)

    def runs_on(
        device: torch.device,
    ) -> bool:  # its own kind of device is taken on trust: this machine may not have one
        return device == home.device or dispatch.get(backend).supports(_changed(home, device=device)) is None

    kinds = {"CPU": torch.device("cpu"), "CUDA": torch.device("cuda", 0), "others": torch.device("mps", 0)}
    cells = {"devices": ", ".join(name for name, device in kinds.items() if runs_on(device))}
    cells |= {row: YES if holds(*(_changed(home, **changes) for changes in asked)) else NO for row, asked in FEATURES}
    if not holds(_changed(home, needs_grad=True)):
        cells["gradients"] = NO
    else:
        own = backend == "tiled" or dispatch.get(backend).backward is not None
        cells["gradients"] = YES if own else "by `tiled`"
    cells["chosen by itself"] = YES if dispatch.get(backend).automatic else "when named"
    return cells


def table() -> str:
    """GitHub-flavoured Markdown, one column per backend, fastest first."""
    columns = {name: answers(name) for name in dispatch.NAMES}
    lines = ["| | " + " | ".join(f"`{name}`" for name in columns) + " |", "|---|" + "---|" * len(columns)]
    for row in next(iter(columns.values())):
        lines.append(f"| {row} | " + " | ".join(cells[row] for cells in columns.values()) + " |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The text with a fresh table between its markers."""
    return replace_between(text, BEGIN, END, f"{table()}\n")


def main(arguments: list[str]) -> None:
    if not arguments:
        print(table())
    elif len(arguments) == 2 and arguments[0] == "--write":
        path = Path(arguments[1])
        path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        raise SystemExit("usage: python -m strobe.tools.support [--write FILE]")


if __name__ == "__main__":
    main(sys.argv[1:])
