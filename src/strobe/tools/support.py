"""The table of features and backends in README.md, made by asking each backend about small problems.

    python -m strobe.tools.support                      print it
    python -m strobe.tools.support --write README.md    put it between the markers there

The table says what the code can do and is the same on every machine: for backends that need a GPU or a compiler,
`feature_limits(problem)` answers as if they had it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from strobe import mask as masks
from strobe.backends import dispatch
from strobe.cuda.backend import feature_limits
from strobe.measure.cases import Case, problem_of
from strobe.measure.generated import replace_between
from strobe.problem import Problem

BEGIN, END = (
    "<!-- support table: begin (python -m strobe.tools.support --write README.md) -->",
    "<!-- support table: end -->",
)
YES, NO = "✓", "–"

_PLAIN = Case("plain", 16, 16, heads=4, heads_k=4, dim=64)
_Changes = dict[str, Any]


def _problem(home: Home, **changes: Any) -> Problem:
    """A backend's home problem with other facts: fields of a case, or the dtype, the device, `needs_grad`,
    `return_lse`."""
    facts: dict[str, Any] = {"dtype": home.dtype, "device": home.device}
    facts |= {name: changes.pop(name) for name in ("dtype", "device", "needs_grad", "return_lse") if name in changes}
    return problem_of(replace(_PLAIN, **changes), **facts)


@dataclass(frozen=True)
class Home:
    dtype: torch.dtype
    device: torch.device


def _home(backend: str) -> Home:
    device = torch.device("cuda", 0) if backend.startswith("sm") else torch.device("cpu")
    return Home(torch.float32 if backend == "aten_cpu" else torch.bfloat16, device)


def home_problem(backend: str) -> Problem:
    """A plain problem of the kind that a backend is there for: if it cannot run this, it cannot run here."""
    return _problem(_home(backend))


# What is asked for each row: changes to a backend's home problem. A row holds if every one of its problems is
# supported.
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
    ("boolean mask tensor", [{"mask_tensor": (1, 1, 16, 16)}]),
    ("bias", [{"bias": (1, 1, 16, 16)}]),
    ("softcap", [{"softcap": 30.0}]),
    ("sinks", [{"sinks": True}]),
    ("dropout", [{"dropout": 0.1}]),
    ("packed sequences (`attention_varlen`)", [{"lengths": ((16, 16), (16, 16))}]),
    ("log-sum-exp", [{"return_lse": True}]),
]  # fmt: skip


def limits(backend: str) -> Callable[[Problem], str | None]:
    """What a backend's code cannot do, whatever the machine lacks. The emulator runs the CUDA kernels."""
    return feature_limits if backend in ("sm80", "sm90", "emulator") else dispatch.get(backend).supports


def answers(backend: str) -> dict[str, str]:
    """The cells of one backend's column."""
    ask, home = limits(backend), _home(backend)

    def holds(*problems: Problem) -> bool:
        return all(ask(p) is None for p in problems)

    def runs_on(device: torch.device) -> bool:
        """Its own kind of device is taken on trust: this machine may not have one."""
        return device == home.device or dispatch.get(backend).supports(_problem(home, device=device)) is None

    kinds = {"CPU": torch.device("cpu"), "CUDA": torch.device("cuda", 0), "others": torch.device("mps", 0)}
    cells = {"devices": ", ".join(name for name, device in kinds.items() if runs_on(device))}
    cells |= {row: YES if holds(*(_problem(home, **changes) for changes in asked)) else NO for row, asked in FEATURES}
    if not holds(_problem(home, needs_grad=True)):
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
