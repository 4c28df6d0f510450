"""Random problems against float64 on the GPU. STROBE_FUZZ: how many (2000, half as many with gradients);
STROBE_FUZZ_SEED: which.

Every problem is a function of its number. What changes the code of a kernel comes from a limited set of shapes, so that
compiling takes seconds; lengths, heads, strides, constants of masks are free.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import tolerance
import torch
from gpu.kernels import check, compile_together, kernels_here, references
from oracle import checked, cotangents, finite_part, gradients

import strobe
from strobe.backends import dispatch
from strobe.variants.mask import Mask, causal, causal_top_left, full
from strobe.variants.ready_made import chunked, prefix, window

COUNT = int(os.environ.get("STROBE_FUZZ", "2000"))
SEED = int(os.environ.get("STROBE_FUZZ_SEED", "0"))
LONGEST = 600
EDGES = (1, 2, 8, 16, 63, 64, 65, 79, 80, 81, 96, 127, 128, 129, 191, 192, 193, 255, 256, 257, 384, 511, 512, 513)

MASKS = {
    "full": lambda r: full,
    "causal": lambda r: causal,
    "top_left": lambda r: causal_top_left,
    "window": lambda r: window(r.randint(0, 300), r.randint(0, 300)),
    "window_left": lambda r: window(r.randint(0, 300), None),
    "window_causal": lambda r: window(r.randint(0, 300), None) & causal,
    "prefix": lambda r: prefix(r.randint(0, LONGEST)),
    "chunked": lambda r: chunked(r.randint(1, 300)) & causal,
}


@dataclass(frozen=True)
class Shape:
    """The facts that choose the code: head dims are those of one padded size."""

    dtype: torch.dtype
    dims: tuple[tuple[int, int], ...]  # (dim, dim_v), any of them
    mask: str
    packed: bool
    softcap: bool
    sinks: bool


def shapes(count: int = 40) -> list[Shape]:
    """Every padded head dim, rounded up or not, with masks and features in turn."""
    r = random.Random(2024)
    whole = [((d, d),) for d in (32, 64, 96, 128, 160, 192, 224, 256)] + [((192, 128),)]
    rounded = [
        tuple((d, dv) for d in range(limit - 24, limit, 8) for dv in range(limit - 24, limit, 8))
        for limit in (32, 64, 96, 128, 192, 256)
    ]
    common = [((64, 64),), ((128, 128),)]
    dims = [*whole, *rounded, *(common * count)][:count]
    kinds = list(MASKS)
    found = []
    for i, pairs in enumerate(dims):
        dtype = torch.float16 if r.random() < 0.3 else torch.bfloat16
        found.append(
            Shape(dtype, pairs, kinds[i % len(kinds)], r.random() < 0.35, r.random() < 0.25, r.random() < 0.25)
        )
    return found


SHAPES = shapes()


@dataclass
class Drawn:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kwargs: dict[str, Any]  # of strobe.attention, or attention_varlen if it has cu_q
    out: torch.Tensor | None
    described: str

    @property
    def packed(self) -> bool:
        return "cu_q" in self.kwargs


def _length(r: random.Random) -> int:
    chance = r.random()
    return 0 if chance < 0.02 else r.choice(EDGES) if chance < 0.4 else r.randint(1, LONGEST)


def _placed(r: random.Random, t: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Place the same numbers somewhere else in memory. `t`: (…, length, heads, dim)"""
    how = r.choice(["dense", "dense", "heads_first", "sliced", "sliced", "fused", "odd_address"])
    if how == "heads_first":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2), how
    if how == "sliced":  # NaN before, behind and between
        rows, columns = r.randint(0, 9), 8 * r.randint(0, 3)
        larger = (*t.shape[:-3], t.shape[-3] + rows + 4, t.shape[-2] + r.randint(0, 2), t.shape[-1] + columns)
        around = t.new_full(larger, torch.nan)
        return around[..., rows : rows + t.shape[-3], : t.shape[-2], : t.shape[-1]].copy_(t), how
    if how == "fused":  # one of three that lie side by side, as a projection to q, k and v leaves them
        return torch.stack([torch.full_like(t, torch.nan), t, t], -3).select(-3, 1), how
    if how == "odd_address":
        return t.new_full((t.numel() + 1,), torch.nan)[1:].view(t.shape).copy_(t), how
    return t, how


def draw(number: int, device: torch.device | str = "cuda") -> Drawn:
    r = random.Random(SEED * 1_000_003 + number)
    generator = torch.Generator(device).manual_seed(number)
    shape = r.choice(SHAPES)
    dim, dim_v = r.choice(shape.dims)
    heads_k = r.randint(1, 3)
    heads = heads_k * r.choice([1, 1, 2, 3, 8])
    mask: Mask = MASKS[shape.mask](r)
    kwargs: dict[str, Any] = {"mask": mask}
    if shape.packed:
        sequences = [(_length(r) // 2, _length(r) // 2) for _ in range(r.randint(1, 6))]
        lead: tuple[int, ...] = ()
        len_q, len_k = (sum(column) for column in zip(*sequences, strict=True))
        for name, column in zip(("cu_q", "cu_k"), zip(*sequences, strict=True), strict=True):
            kwargs[name] = torch.tensor([0, *column]).cumsum(0).to(device=device, dtype=torch.int32)
        if r.random() < 0.5:  # no need to be exact
            kwargs |= {
                "max_q": max(n for n, _ in sequences) + r.choice([0, 100]),
                "max_k": max(n for _, n in sequences),
            }
        lengths: Any = sequences
    else:
        lead, len_q, len_k = (r.randint(1, 3),), _length(r), _length(r)
        if r.random() < 0.08:  # as in decoding: heads become rows, keys are split
            len_q, len_k = r.randint(1, 40), r.randint(LONGEST, 4000)
        lengths = (*lead, len_q, len_k)

    def tensor(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(*lead, length, heads, dim, generator=generator, device=device).to(shape.dtype)

    q, how_q = _placed(r, tensor(len_q, heads, dim) * r.choice([1.0, 1.0, 1.0, 6.0]))
    k, how_k = _placed(r, tensor(len_k, heads_k, dim))
    v, how_v = _placed(r, tensor(len_k, heads_k, dim_v))
    if shape.softcap:
        kwargs["softcap"] = r.uniform(0.5, 30)
    if shape.sinks:
        kwargs["sinks"] = torch.randn(heads, generator=generator, device=device).to(shape.dtype)
    if r.random() < 0.2:
        kwargs["scale"] = r.uniform(0.01, 1.0)
    out = None
    if r.random() < 0.8:
        out, _ = _placed(r, q.new_full((*lead, len_q, heads, dim_v), torch.nan))
    sizes = f"dims {dim}/{dim_v} heads {heads}/{heads_k} lengths {lengths}"
    described = f"number {number}: {shape} {sizes} {mask!r} {how_q} {how_k} {how_v}"
    return Drawn(q, k, v, kwargs, out, described)


def failures(drawn: Drawn, backends: list[str]) -> list[str]:
    problem, inputs = checked(drawn.q, drawn.k, drawn.v, drawn.kwargs)
    expected = references(problem, inputs)
    found = []
    for backend in backends:
        reason = None if problem.empty else dispatch.get(backend).supports(problem)
        try:
            assert reason is None, reason
            if drawn.out is not None:
                drawn.out.fill_(torch.nan)
            call = strobe.attention_varlen if drawn.packed else strobe.attention
            out, lse = call(drawn.q, drawn.k, drawn.v, **drawn.kwargs, out=drawn.out, return_lse=True, backend=backend)
            if drawn.packed:
                out, lse = out[None], lse[None]
            check(out.transpose(1, 2), lse, expected)
        except Exception as error:
            found.append(f"{backend}, {drawn.described}:\n    {type(error).__name__}: {error}")
    return found


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every variant that may come: found by drawing, which costs little."""
    drawn = (draw(number) for number in range(COUNT))
    problems = [checked(one.q, one.k, one.v, one.kwargs)[0] for one in drawn]
    compile_together((kernel, problem) for problem in problems for kernel in kernels_here())


PARTS = 10  # so that progress shows


@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems(part: int, compiled: None) -> None:
    wrong: list[str] = []
    for number in range(part, COUNT, PARTS):
        wrong += failures(draw(number), kernels_here())
        assert len(wrong) < 10, "\n".join(wrong)
    assert not wrong, "\n".join(wrong)


def gradients_of(drawn: Drawn, backend: str) -> list[str]:
    """Return what is wrong with the gradients of one problem."""
    problem, inputs = checked(drawn.q, drawn.k, drawn.v, drawn.kwargs)
    names = [name for name in ("q", "k", "v", "sinks") if getattr(inputs, name) is not None]
    assert dispatch.get(backend).supports(problem.backward(tuple(names))) is None
    leaves = {"q": drawn.q, "k": drawn.k, "v": drawn.v} | ({"sinks": drawn.kwargs["sinks"]} if "sinks" in names else {})
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    call = strobe.attention_varlen if drawn.packed else strobe.attention
    out, lse = call(**drawn.kwargs | leaves, return_lse=True, backend=backend)
    dout, dlse = cotangents(problem, inputs)
    inside = (dout[0] if drawn.packed else dout).transpose(-3, -2), dlse[0] if drawn.packed else dlse
    found = torch.autograd.grad((out * inside[0]).sum() + (finite_part(lse) * inside[1]).sum(), list(leaves.values()))
    exact, same = (gradients(problem, inputs, dtype, True) for dtype in (torch.float64, problem.dtype))
    rows, wrong = lse.detach()[None] if drawn.packed else lse.detach(), []
    for name, gradient, e, s in zip(names, found, exact, same, strict=True):
        if name != "sinks":
            gradient = (gradient[None] if drawn.packed else gradient).transpose(1, 2)
        floor = tolerance.gradient_floor(name, problem, inputs, rows, dout, e)
        try:
            tolerance.check(f"d{name}", gradient, e, s, tolerance.GRADIENTS, floor)
        except AssertionError as error:
            wrong.append(f"{backend}, {drawn.described}:\n    {error}")
    return wrong


@pytest.fixture(scope="module")
def compiled_backward() -> None:
    problems = []
    for number in range(COUNT // 2):
        one = draw(number)
        problem, inputs = checked(one.q, one.k, one.v, one.kwargs)
        problems.append(problem.backward(("q", "k", "v", *(["sinks"] if inputs.sinks is not None else []))))
    compile_together((kernel, problem) for problem in problems for kernel in kernels_here())


@pytest.mark.parametrize("part", range(PARTS))
def test_random_gradients(part: int, compiled: None, compiled_backward: None) -> None:
    wrong: list[str] = []
    for number in range(part, COUNT // 2, PARTS):
        drawn = draw(number)
        if 0 in (drawn.q.numel(), drawn.k.numel()):
            continue
        for kernel in kernels_here():
            wrong += gradients_of(drawn, kernel)
        assert len(wrong) < 10, "\n".join(wrong)
    assert not wrong, "\n".join(wrong)
