"""A table of what each backend can run, made by asking it about small problems: for `strobe doctor`, and in README.md.

The table says what the code can do and is the same on every machine: it asks for the limits of backends, not for what
they lack here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from strobe.backends import dispatch
from strobe.problem import Problem, supposed
from strobe.variants import mask as masks
from strobe.variants.ready_made import chunked, prefix, window
from strobe.variants.score import alibi, softcap

YES, NO = "✓", "–"


@dataclass(frozen=True)
class Question:
    """A small call, contiguous in (batch, length, heads, dim) order, on a device that need not be there."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.bfloat16
    heads_k: int = 4
    dim: int = 64
    dim_v: int = 64
    gradients: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()  # further arguments; tuples among them are shapes

    def problem(self) -> Problem:
        q, k, v = (2, 16, 4, self.dim), (2, 16, self.heads_k, self.dim), (2, 16, self.heads_k, self.dim_v)
        options = dict(self.options)
        if "cu_q" in options:
            q, k, v = (32, *q[2:]), (32, *k[2:]), (32, *v[2:])  # type: ignore[assignment]
        if "lengths" in options:
            k, v = (4, 8, *k[2:]), (4, 8, *v[2:])
        return supposed(self.device, self.dtype, q, k, v, self.gradients, **options)


def home(backend: str) -> Question:
    """A plain call of the kind that a backend is there for: if it cannot run this, it cannot run here."""
    asked = dispatch.get(backend)
    device = torch.device("cuda", 0) if asked.device_type == "cuda" else torch.device(asked.device_type)
    questions = [Question(device, dtype) for dtype in (torch.bfloat16, torch.float32)]
    return next(question for question in questions if asked.lacks(question.problem()) is None)


def home_problem(backend: str) -> Problem:
    return home(backend).problem()


def _options(**options: Any) -> dict[str, Any]:
    return {"options": tuple(options.items())}


# What is asked for each row: changes to a backend's home question. A row holds if every one of its problems is
# supported.
_MASKS = (window(4, 2), prefix(3), chunked(8), masks.causal & window(4, None))
FEATURES: list[tuple[str, list[dict[str, Any]]]] = [
    ("float16, bfloat16", [{"dtype": torch.float16}, {"dtype": torch.bfloat16}]),
    ("float32, head dims up to 128", [{"dtype": torch.float32, "dim": d, "dim_v": d} for d in range(8, 129, 8)]),
    ("float32, head dims above 128", [{"dtype": torch.float32, "dim": d, "dim_v": d} for d in range(136, 257, 8)]),
    ("float64", [{"dtype": torch.float64}]),
    ("head dims: multiples of 8 up to 256", [{"dim": d, "dim_v": d} for d in range(8, 257, 8)]),
    ("head dims: multiples of 8 up to 512", [{"dim": d, "dim_v": d} for d in range(264, 513, 8)]),
    ("any other head dim", [{"dim": d, "dim_v": d} for d in (1, 33, 100, 520)]),
    ("key and value dims differ", [{"dim": 192, "dim_v": 128}, {"dim": 64, "dim_v": 256}]),
    ("grouped heads (fewer key heads)", [{"heads_k": 2}, {"heads_k": 1}]),
    ("`causal`, `causal_top_left`", [_options(mask=m) for m in (masks.causal, masks.causal_top_left)]),
    ("`window`, `prefix`, `chunked`, `&`", [_options(mask=m) for m in _MASKS]),
    ("boolean mask tensor", [_options(mask=(2, 1, 16, 16))]),
    ("bias", [_options(bias=(1, 4, 16, 16))]),
    ("softcap", [_options(score=softcap(30.0))]),
    ("ALiBi", [_options(score=alibi(torch.ones(4, device="meta")))]),
    ("sinks", [_options(sinks=(4,))]),
    ("dropout", [_options(dropout=0.1)]),
    ("packed sequences (`attention_varlen`)", [_options(cu_q=(3,), cu_k=(3,), max_q=16, max_k=16)]),
    ("paged keys (`attention_paged`)", [_options(table=(2, 2), lengths=(2,))]),
    ("log-sum-exp", [_options(return_lse=True)]),
]


def answers(backend: str) -> dict[str, str]:
    """The cells of one backend's column. They say what its code can do, whatever this machine lacks."""
    implementation, plain = dispatch.get(backend), home(backend)

    def holds(*questions: Question) -> bool:
        return all(implementation.lacks(q.problem()) is None for q in questions)

    def runs_on(device: torch.device) -> bool:  # its own kind of device is taken on trust: this machine may have none
        return device == plain.device or implementation.machine(device) is None

    kinds = {"CPU": torch.device("cpu"), "CUDA": torch.device("cuda", 0), "others": torch.device("mps", 0)}
    cells = {"devices": ", ".join(name for name, device in kinds.items() if runs_on(device))}
    cells |= {row: YES if holds(*(replace(plain, **changes) for changes in asked)) else NO for row, asked in FEATURES}
    cells["gradients"] = YES if holds(replace(plain, gradients=("q", "k", "v"))) else "by `tiled`"
    cells["chosen by itself"] = YES if implementation.automatic else "when named"
    return cells


def table() -> str:
    """GitHub-flavoured Markdown, one column per backend, fastest first."""
    columns = {name: answers(name) for name in dispatch.NAMES}
    lines = ["| | " + " | ".join(f"`{name}`" for name in columns) + " |", "|---|" + "---|" * len(columns)]
    for row in next(iter(columns.values())):
        lines.append(f"| {row} | " + " | ".join(cells[row] for cells in columns.values()) + " |")
    return "\n".join(lines)
