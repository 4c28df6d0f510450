"""Train a small GPT on the bytes of a book, with strobe's attention or PyTorch's.

    python examples/train_gpt.py --sample            # minutes on a CPU; on a GPU a larger model, in bfloat16
    python examples/train_gpt.py --compare           # does strobe's loss curve agree with PyTorch's math attention?

Weights and batches depend on --seed alone, so runs that differ in --attention differ in nothing else.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe

if not hasattr(strobe, "attention"):
    sys.exit(
        f"{strobe.__file__} is another project's package of the same name: pip uninstall strobe, then pip install ."
    )

from strobe.measure import provenance
from strobe.nn import rotary

TEXT = Path(__file__).with_name("text") / "moby-dick.txt"
VOCABULARY = 256  # a token is a byte: no tokeniser to explain
DEFAULTS = {  # contexts are longer than a tile, so that attention has to merge several
    "cpu": {"steps": 300, "batch": 2, "context": 640, "layers": 3, "width": 96, "heads": 3, "dtype": "float32"},
    "cuda": {"steps": 500, "batch": 16, "context": 1024, "layers": 6, "width": 384, "heads": 6, "dtype": "bfloat16"},
}
SIZES = {
    "steps": "optimiser steps",
    "batch": "sequences in a step",
    "context": "bytes in a sequence",
    "layers": "transformer blocks",
    "width": "numbers that stand for a byte, a multiple of twice the heads",
    "heads": "attention heads of a block",
}
FACTOR = 3.0  # the tests allow gradients three times the error of PyTorch's own; a curve is made of gradients
FLOOR = 1e-6  # a loss is an fp32 number near 3, whose last bit is 2.4e-7

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (batch, length, heads, dim) each, causal


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_named(name: str) -> Attend:
    """strobe or strobe:BACKEND, math, shuffled:N (math with the keys in another order), sdpa."""
    kind, _, detail = name.partition(":")
    if kind == "strobe":
        return lambda q, k, v: strobe.attention(q, k, v, mask=strobe.causal, backend=detail or None)
    if kind == "sdpa":
        return lambda q, k, v: torch_attention(q, k, v, is_causal=True)
    return functools.partial(math_attention, shuffle=int(detail or 0))


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **mask).transpose(1, 2)


def math_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shuffle: int) -> torch.Tensor:
    """PyTorch's textbook attention. With `shuffle`, keys and values come in another order, and the mask with them: the
    same sums with their terms in another order, which changes the rounding and nothing else."""
    with sdpa_kernel(SDPBackend.MATH):
        if not shuffle:
            return torch_attention(q, k, v, is_causal=True)
        order, mask = shuffled_keys(q.shape[1], shuffle, q.device)
        return torch_attention(q, k[:, order], v[:, order], attn_mask=mask)


@functools.cache
def shuffled_keys(length: int, shuffle: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(shuffle)).to(device)
    return order, order[None] <= torch.arange(length, device=device)[:, None]  # mask: (length_q, length_k)


def backends_of(name: str, o: argparse.Namespace) -> tuple[str, str | None]:
    """Return which backend computes attention, and which its gradients."""
    kind, _, backend = name.partition(":")
    if kind != "strobe":
        return "PyTorch", "PyTorch"
    shape = (o.batch, o.context, o.heads, o.width // o.heads)
    q = torch.empty(shape, device=o.device, dtype=getattr(torch, o.dtype), requires_grad=True)
    found = strobe.explain(q, q, q, mask=strobe.causal, backend=backend or None)
    return found.backend, found.backward


# ---- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # (batch, length, heads, dim)
        q, k = (rotary.rotate(t, cos, sin) for t in (q, k))
        x = x + self.out(attend(q, k, v).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.dim, self.attend = width // heads, attend
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # what adds to the residual stream begins smaller, the more layers there are
                last = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) -> logits (batch, length, VOCABULARY)."""
        cos, sin = rotary.angles(torch.arange(tokens.shape[1], device=tokens.device), self.dim)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, self.attend)
        return F.linear(self.norm(x), self.embedding.weight)  # tied


@torch.no_grad()
def generate(model: GPT, o: argparse.Namespace) -> str:
    torch.manual_seed(o.seed)
    tokens = torch.tensor([list(b"\n\n")], device=o.device)
    for _ in range(o.sample):
        with autocast(o):
            logits = model(tokens[:, -o.context :])[0, -1]
        p = (logits.float() / 0.8).softmax(-1)  # a little less daring than what was learnt
        tokens = torch.cat([tokens, torch.multinomial(p, 1)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace").strip()


def autocast(o: argparse.Namespace) -> torch.autocast:
    return torch.autocast(o.device, getattr(torch, o.dtype), enabled=o.dtype != "float32")


# ---- training --------------------------------------------------------------------------------------------------------


def loss_of(model: GPT, window: torch.Tensor) -> torch.Tensor:
    """window (batch, context + 1): each byte is the label of the one before."""
    return F.cross_entropy(model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())


def train(o: argparse.Namespace, name: str, seed: int) -> tuple[dict[str, Any], GPT]:
    """One run: its losses, and the model."""
    device = torch.device(o.device)
    text = torch.tensor(list(o.text.read_bytes()), device=device)
    cut = len(text) * 9 // 10
    learnt, kept = text[:cut], text[cut:].unfold(0, o.context + 1, o.context + 1)
    kept = kept[:: max(1, len(kept) // o.batch)][: o.batch]  # windows from all over the last tenth
    torch.manual_seed(seed)
    model = GPT(o.layers, o.width, o.heads, attention_named(name)).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, o.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda n: min((n + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * n / o.steps))
    )
    draw = torch.Generator().manual_seed(seed)
    forward, backward = backends_of(name, o)
    run: dict[str, Any] = {"attention": name, "seed": seed, "forward": forward, "backward": backward}
    run |= {"complete": False, "loss": [], "validation_steps": [], "validation": []}
    losses, start, tokens = [], time.perf_counter(), o.batch * o.context
    try:
        print(
            f"{name}, seed {seed}: attention on {forward}, gradients on {backward}; {o.dtype} on {device}", flush=True
        )
        for step in range(1, o.steps + 1):
            places = torch.randint(len(learnt) - o.context, (o.batch, 1), generator=draw) + torch.arange(o.context + 1)
            with autocast(o):
                loss = loss_of(model, learnt[places.to(device)])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
            losses.append(loss.detach())
            if step % max(1, o.steps // 20) == 0 or step == o.steps:
                with torch.no_grad(), autocast(o):
                    run["validation"].append(loss_of(model, kept).item())
                run["validation_steps"].append(step)
                rate = step / (time.perf_counter() - start)
                shown = f"loss {loss.item():.4f}  validation {run['validation'][-1]:.4f}  {rate * tokens:,.0f} tokens/s"
                print(f"step {step}/{o.steps}  {shown}  {(o.steps - step) / rate:.0f} s left", flush=True)
        run["complete"] = True
    except KeyboardInterrupt:
        print(f"stopped after step {len(losses)}", flush=True)
    run["loss"] = [round(x, 7) for x in torch.stack(losses).tolist()] if losses else []
    run["seconds"] = max(0.01, round(time.perf_counter() - start, 2))
    run["tokens_per_s"] = round(len(losses) * tokens / run["seconds"])
    return run, model


# ---- comparing -------------------------------------------------------------------------------------------------------


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Root mean square of the difference between two loss curves, training and validation."""
    pairs = zip(a["loss"] + a["validation"], b["loss"] + b["validation"], strict=True)
    squares = [(x - y) ** 2 for x, y in pairs]
    return math.sqrt(sum(squares) / len(squares))


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Is each run of strobe as close to the math run as math runs are to each other?

    The noise is the largest distance between runs of math attention whose keys come in different orders: what rounding
    alone does to the curve, after all the steps that amplify it. A run with another seed is there for scale."""
    seed = runs[0]["seed"]
    same = [r for r in runs if r["seed"] == seed]
    maths = [r for r in same if r["attention"].startswith(("math", "shuffled"))]
    exact = next(r for r in maths if r["attention"] == "math")
    noise = max(distance(a, b) for a, b in itertools.combinations(maths, 2))
    found = {r["attention"]: distance(r, exact) for r in same if r not in maths}
    other = max(distance(r, exact) for r in runs if r not in same)
    allowed = FACTOR * noise + FLOOR
    agrees = all(d <= allowed for d in found.values())  # and a NaN is not <= anything
    return {"noise": noise, "allowed": allowed, "distance": found, "another_seed": other, "agrees": agrees}


# ---- the command line ------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the bytes of a book. Ctrl-C ends the training and keeps what there is.",
        epilog="ATTENTION is strobe (the fastest backend that can run it), strobe:BACKEND (that one), math (PyTorch's "
        "textbook attention), shuffled:N (math with the keys in another order: only the rounding differs) or sdpa (what "
        "PyTorch chooses by itself).",
    )
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--attention", default="strobe", help="what computes attention (default: strobe)")
    compare = (
        "train with each of these (default: strobe) and with math attention from the same seed; exit status 1 if a "
    )
    add("--compare", nargs="*", metavar="ATTENTION", help=f"{compare}loss curve leaves the noise of the math runs")
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu", help="default: cuda if there is one")
    for name, what in SIZES.items():
        each = ", ".join(f"{defaults[name]} on {kind}" for kind, defaults in DEFAULTS.items())
        add(f"--{name}", type=positive, metavar="N", help=f"{what} (default: {each})")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="bfloat16 is autocast (default: float32 on cpu, bfloat16 on cuda)",
    )
    add("--lr", type=float, default=2e-3, help="the largest learning rate of AdamW (default: 0.002)")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    add("--text", type=Path, default=TEXT, help="the file to learn (default: the book beside this program)")
    add("--sample", type=positive, nargs="?", const=400, metavar="BYTES", help="write a text at the end (400 bytes)")
    add("--out", type=Path, help="write the loss curves to this JSON file")
    o = parser.parse_args(arguments)
    if o.device == "cuda" and not cuda:
        parser.error("--device cuda needs an NVIDIA GPU and a CUDA build of PyTorch; cpu works everywhere")
    for name, value in DEFAULTS[o.device].items():
        setattr(o, name, getattr(o, name) or value)
    if o.width % (2 * o.heads):
        parser.error(f"--width must be a multiple of 2 * heads = {2 * o.heads}, got {o.width}")
    least = 20 * (o.context + 1)  # so that the tenth that is kept back holds a window
    if not o.text.is_file() or o.text.stat().st_size < least:
        parser.error(f"--text must be a file of at least {least} bytes, got {o.text}")
    for name in [o.attention] if o.compare is None else o.compare:
        try:
            if not re.fullmatch(r"strobe(:\w+)?|math|shuffled:\d+|sdpa", name):
                raise ValueError("must be strobe, strobe:BACKEND, math, shuffled:N or sdpa")
            if o.compare and name.startswith(("math", "shuffled")):
                raise ValueError("is what the others are compared with; name strobe, strobe:BACKEND or sdpa")
            backends_of(name, o)
        except (ValueError, strobe.Unsupported) as error:
            parser.error(f"attention {name!r}: {error}")
    return o


def main(arguments: list[str] | None = None) -> int:
    o = options_of(arguments)
    plan = [(o.attention, o.seed)]
    if o.compare is not None:
        names = dict.fromkeys([*(o.compare or ["strobe"]), "math", "shuffled:1", "shuffled:2"])
        plan = [*((name, o.seed) for name in names), ("math", o.seed + 1)]
    text = {"name": o.text.name, "sha256": hashlib.sha256(o.text.read_bytes()).hexdigest()}
    found = {"kind": "train gpt", "provenance": provenance.collect(torch.device(o.device), o.seed), "text": text}
    found |= {"settings": {name: getattr(o, name) for name in (*DEFAULTS["cpu"], "lr")}, "runs": [], "verdict": None}
    for name, seed in plan:
        run, model = train(o, name, seed)
        found["runs"].append(run)
        if not run["complete"]:
            break
    complete = run["complete"]
    if complete and o.compare is not None:
        found["verdict"] = verdict = judge(found["runs"])
        for name, far in verdict["distance"].items():
            word = "agrees" if far <= verdict["allowed"] else "DOES NOT AGREE"
            noise = f"noise of math {verdict['noise']:.2g}, allowed {verdict['allowed']:.2g}"
            print(f"{name} {word} with math: distance {far:.2g}, {noise}; another seed: {verdict['another_seed']:.2g}")
    if o.out:
        o.out.parent.mkdir(parents=True, exist_ok=True)
        o.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {o.out}")
    if o.sample:
        print(f"\n{generate(model, o)}")
    if not complete:
        return 130  # what a shell reports of a program that Ctrl-C ended
    return 0 if found["verdict"] is None or found["verdict"]["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
