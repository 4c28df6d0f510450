"""A model, not a kernel: tokens per second of a Llama-shaped stack of 8 layers with strobe's attention, PyTorch's and
FlexAttention, in prefill and in a training step (forward and backward, without an optimiser).

    PYTHONPATH=src python3 benchmarks/models.py --out report/models.json

Everything but the attention is the same, and runs as PyTorch runs it. All providers have the same weights; what they
compute is compared by the tolerance rule before anything is timed, in short turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import strobe
from strobe.measure import provenance, tolerance
from strobe.measure.statistics import summarise_turns
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.turns import interleave
from strobe.nn import rotary

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (batch, length, heads, dim) each, causal


class Shape(NamedTuple):
    layers: int
    dim: int
    heads: int
    heads_k: int
    hidden: int  # of the feed-forward
    prefill: tuple[int, int]  # (batch, length)
    training: tuple[int, int]


SHAPES = {
    "8b": Shape(8, 4096, 32, 8, 14336, (1, 16384), (2, 4096)),  # eight of the layers of Llama 3 8B
    "tiny": Shape(2, 64, 4, 2, 96, (1, 48), (2, 24)),  # for tests
}


# ---- the model -------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, head_dim = shape, shape.dim // shape.heads
        self.norm, self.norm_2 = torch.nn.RMSNorm(shape.dim), torch.nn.RMSNorm(shape.dim)
        self.qkv = torch.nn.Linear(shape.dim, (shape.heads + 2 * shape.heads_k) * head_dim, bias=False)
        self.o = torch.nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate_up = torch.nn.Linear(shape.dim, 2 * shape.hidden, bias=False)
        self.down = torch.nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        shape = self.shape
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, shape.dim // shape.heads))
        q, k, v = qkv.split((shape.heads, shape.heads_k, shape.heads_k), dim=-2)
        q, k = (rotary.rotate(t, cos, sin) for t in (q, k))
        x = x + self.o(attend(q, k, v).flatten(-2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Stack(torch.nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head_dim = shape.dim // shape.heads

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        cos, sin = rotary.angles(torch.arange(x.shape[1], device=x.device), self.head_dim, 500000.0)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x


# ---- providers -------------------------------------------------------------------------------------------------------


def attend_strobe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return strobe.attention(q, k, v, mask=strobe.causal)


def attend_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def flex() -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[1]
        if length not in masks:  # once for a length, as a model would
            masks[length] = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=q.device)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(q, k, v, block_mask=masks[length], enable_gqa=True).transpose(1, 2)

    return attend


PROVIDERS: dict[str, Callable[[], Attend]] = {
    "strobe": lambda: attend_strobe,
    "sdpa": lambda: attend_sdpa,
    "flex": flex,
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(
    shape: Shape, names: list[str], device: torch.device, dtype: torch.dtype, settings: Settings
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    stack = Stack(shape).to(device, dtype)
    watch, rows = Stopwatch(device, settings), []
    attends = {name: PROVIDERS[name]() for name in names}
    for what, (batch, length) in (("prefill", shape.prefill), ("training step", shape.training)):
        x = torch.randn(batch, length, shape.dim, device=device, dtype=dtype)
        check(attends, x, shape)
        calls = {name: TimedCall(_call(stack, x, attend, what)) for name, attend in attends.items()}
        interleave(list(calls.values()), watch)
        for name, call in calls.items():
            row: dict[str, Any] = {"what": what, "provider": name, "batch": batch, "length": length}
            if call.problem is None:
                time = summarise_turns(call.turns_ms)
                row |= {"ms": time.median, "tokens_per_s": batch * length / time.median * 1e3}
            else:
                row["problem"] = str(call.problem)
            rows.append(row)
    return rows


def _call(stack: Stack, x: torch.Tensor, attend: Attend, what: str) -> Callable[[], Any]:
    def prefill() -> None:
        with torch.no_grad():
            stack(x, attend)

    def training_step() -> None:
        stack(x, attend).float().square().mean().backward()
        for p in stack.parameters():
            p.grad = None

    call = prefill if what == "prefill" else training_step
    call()  # what there is to compile is not timed
    return call


def check(attends: dict[str, Attend], x: torch.Tensor, shape: Shape) -> None:
    """Each provider's attention, on inputs of the stack's shape but at most 512 long, by the tolerance rule."""
    length = min(x.shape[1], 512)
    heads = (shape.heads, shape.heads_k, shape.heads_k)
    q, k, v = (torch.randn(1, length, h, shape.dim // shape.heads, device=x.device, dtype=x.dtype) for h in heads)
    exact = strobe.attention(*(t.double() for t in (q, k, v)), mask=strobe.causal, backend="reference")
    plain = strobe.attention(q, k, v, mask=strobe.causal, backend="reference")
    for name, attend in attends.items():
        verdict = tolerance.compare(name, attend(q, k, v), exact, plain)
        if not verdict.passed:
            raise SystemExit(f"{name} is not right, so it is not timed: {verdict}")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-ms", type=float, default=3000.0, help="of timed calls, per row")
    parser.add_argument("--out", type=Path, help="write a JSON file with the rows and where they come from")
    options = parser.parse_args(arguments)
    device, settings = torch.device(options.device), Settings(budget_ms=options.budget_ms, l2="warm")
    rows = measure(SHAPES[options.shape], options.providers, device, torch.bfloat16, settings)
    for row in rows:
        found = f"{row['tokens_per_s']:,.0f} tokens/s" if "ms" in row else row["problem"]
        print(f"{row['what']:14} {row['batch']} x {row['length']:<6} {row['provider']:8} {found}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"shape": SHAPES[options.shape]._asdict(), "rows": rows, "provenance": provenance.collect(device, 0)}
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
