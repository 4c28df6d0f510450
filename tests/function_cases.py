"""Users' score and mask functions, each with the tensors that it captures. A backend is compared with the same functions in
plain torch, in fp64: evaluated for every pair, and differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

import strobe
from strobe.variants import dropout

Tensors = dict[str, torch.Tensor]
Made = Callable[..., Any]  # from captured tensors to the user's function


@dataclass(frozen=True)
class FunctionCase:
    len_q: int
    len_k: int
    score: Made | None = None
    mask: Made | None = None
    captured: Callable[..., Tensors] | None = None  # from (batch, heads, len_k, generator)
    combined: str = ""  # with strobe.causal, by "&" or "|"; or "~"
    dim: int = 64
    batch: int = 2
    heads: int = 4
    heads_k: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()  # varlen
    sinks: bool = False

    def tensors(self, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensors, Tensors]:
        """q, k, v and perhaps sinks; and what the functions capture."""
        generator = torch.Generator().manual_seed(self.len_q + 7 * self.len_k)
        lead_q, lead_k = (self.batch, self.len_q), (self.batch, self.len_k)
        if self.lengths:
            lead_q, lead_k = ((sum(n),) for n in zip(*self.lengths, strict=True))  # type: ignore[assignment]
        shapes = {"q": (*lead_q, self.heads), "k": (*lead_k, self.heads_k), "v": (*lead_k, self.heads_k)}
        found = {n: torch.randn(*shape, self.dim, generator=generator).to(dtype) for n, shape in shapes.items()}
        if self.sinks:
            found["sinks"] = torch.randn(self.heads, generator=generator)
        sequences = len(self.lengths) or self.batch
        captured = {} if self.captured is None else self.captured(sequences, self.heads, self.len_k, generator)
        return {n: t.to(device) for n, t in found.items()}, {n: t.to(device) for n, t in captured.items()}


def results(case: FunctionCase, x: Tensors, captured: Tensors, backend: str | None) -> Tensors:
    """The output, the LSE, and the gradients of q, k, v, sinks and of the captured tensors that require one."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    options: dict[str, Any] = dict(case.options)
    given = SimpleNamespace(**captured)
    if case.score is not None:
        options["score"] = case.score(given)
    if case.mask is not None:
        options["mask"] = _combined(case, case.mask(given))
    if case.sinks:
        options["sinks"] = leaves["sinks"]
    call = strobe.attention
    if case.lengths:
        call = strobe.attention_varlen
        for name, lengths in zip(("cu_q", "cu_k"), zip(*case.lengths, strict=True), strict=True):
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            options[name] = ends.to(x["q"].device)
    out, lse = call(leaves["q"], leaves["k"], leaves["v"], backend=backend, return_lse=True, **options)
    return {"out": out, "lse": lse, **gradients(out, lse, leaves | _learnt(captured))}


def _combined(case: FunctionCase, function: Any) -> Any:
    if not case.combined:
        return function
    traced = strobe.mask_function(function)
    return {"&": lambda: strobe.causal & traced, "|": lambda: traced | strobe.causal, "~": lambda: ~traced}[
        case.combined
    ]()


def _learnt(captured: Tensors) -> Tensors:
    return {n: t for n, t in captured.items() if t.requires_grad}


def gradients(out: torch.Tensor, lse: torch.Tensor, leaves: Tensors) -> Tensors:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device)
    seen = torch.where(lse > -1e30, lse, 0)
    total = (out.double() * weights).sum() + 0.1 * seen.double().sum()
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip((f"d{n}" for n in leaves), found, strict=True))


# ---- plain torch -----------------------------------------------------------------------------------------------------


class Clamped:
    """A captured tensor, read beyond the ends of its axes as the library reads it: there, its last entries."""

    def __init__(self, tensor: torch.Tensor) -> None:
        wide = (
            torch.float64 if tensor.is_floating_point() else torch.bool if tensor.dtype == torch.bool else torch.int64
        )
        self.tensor = tensor.to(wide)
        self.shape, self.device = tensor.shape, tensor.device

    def __getitem__(self, index: Any) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        places = (torch.as_tensor(i, device=self.device) for i in index)
        return self.tensor[tuple(p.clamp(0, n - 1) for p, n in zip(places, self.shape, strict=True))]


def plain(case: FunctionCase, x: Tensors, captured: Tensors) -> Tensors:
    leaves = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    given = SimpleNamespace(**{n: Clamped(t) for n, t in captured.items()})
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # that is what whole numbers become beside floats
    try:
        parts = [_plain(case, given, leaves, *part) for part in _sequences(case, leaves)]
    finally:
        torch.set_default_dtype(default)
    outs, lses = zip(*parts, strict=True)
    out, lse = (torch.cat([o[0] for o in outs]), torch.cat([e[0] for e in lses], 1)) if case.lengths else parts[0]
    return {"out": out, "lse": lse, **gradients(out, lse, leaves | _learnt(captured))}


def _sequences(case: FunctionCase, x: Tensors) -> Iterator[tuple[range, torch.Tensor, torch.Tensor, torch.Tensor]]:
    if not case.lengths:
        yield range(case.batch), x["q"], x["k"], x["v"]
        return
    at_q = at_k = 0
    for i, (n, m) in enumerate(case.lengths):
        k, v = (x[name][None, at_k : at_k + m] for name in ("k", "v"))
        yield range(i, i + 1), x["q"][None, at_q : at_q + n], k, v
        at_q, at_k = at_q + n, at_k + m


def _plain(case: FunctionCase, given: Any, x: Tensors, batch: range, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(batch, len_q, heads, dim) and (batch, heads, len_q)."""
    device = qkv[0].device
    q, k, v = (t.transpose(1, 2) for t in qkv)
    k, v = (t.repeat_interleave(case.heads // case.heads_k, 1) for t in (k, v))
    (n, m), heads = (q.shape[2], k.shape[2]), case.heads
    b = torch.arange(batch.start, batch.stop, device=device).view(-1, 1, 1, 1)
    h, rows = torch.arange(heads, device=device).view(-1, 1, 1), torch.arange(n, device=device).view(-1, 1)
    at_q, at_k = rows + (m - n), torch.arange(m, device=device)
    options = dict(case.options)
    s = q @ k.mT * options.get("scale", 1 / math.sqrt(q.shape[-1]))
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if case.score is not None:
        s = case.score(given)(s, b, h, at_q, at_k).expand(s.shape)
    visible = s > -math.inf
    if case.mask is not None:
        own, causal = case.mask(given)(b, h, at_q, at_k), at_k <= at_q
        own = {"": own, "&": own & causal, "|": own | causal, "~": ~own}[case.combined]
        visible = visible & own
    if options.get("mask") is not None:
        visible = visible & options["mask"].dense(n, m, device=device)
    s = torch.where(visible, s, -math.inf)
    if case.sinks:
        s = torch.cat([s, x["sinks"].view(-1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    seen = (s > -math.inf).any(-1, keepdim=True)
    s = torch.where(seen, s, 0.0)
    p = torch.where(seen, s.softmax(-1), 0.0)[..., :m]
    lse = torch.where(seen[..., 0], s.logsumexp(-1), -math.inf)
    if rate := options.get("dropout"):
        kept = dropout.keep(options["seed"], batch, range(heads), range(n), range(m), rate, device)
        p = p * kept / dropout.kept_share(rate)
    return (p @ v).transpose(1, 2), lse


def check(case: FunctionCase, x: tuple[Tensors, Tensors], backend: str | None, share: float = 0.02) -> None:
    found, exact = results(case, *x, backend), plain(case, *x)
    for name, e in exact.items():
        f, seen = found[name].double(), e > -1e30
        assert f.shape == e.shape, name
        assert (f[~seen] == -math.inf).all(), f"{name}: rows that see nothing"
        assert f.isfinite().logical_or(~seen).all(), f"{name} is not finite"
        worst = (f - e)[seen].abs().max() if seen.any() else torch.zeros(())
        largest = e[seen].abs().max().clamp_min(0.05) if seen.any() else torch.ones(())
        assert worst <= share * largest, f"{name}: off by {worst}, largest {largest}"


# ---- what they capture -----------------------------------------------------------------------------------------------


def slopes(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    return {"slope": 0.1 * torch.rand(h, generator=g), "sigma": 5 + 9 * torch.rand(h, generator=g)}


def table_of_heads(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    return {"table": torch.randn(h, 63, generator=g).bfloat16()}


def buckets(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    return {"buckets": torch.randn(32, h, generator=g).half()}


def by_batch(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    return {"temperature": 0.5 + torch.rand(b, generator=g).half(), "slope": 0.1 * torch.rand(b, h, generator=g)}


def weights(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    return {"weight": torch.randn(b, k, generator=g), "gate": torch.randn(h, generator=g).bfloat16()}


def positions(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    """int64, one of them not contiguous; booleans; small integers."""
    at = torch.randint(0, 40, (k, b), generator=g).t()
    return {
        "position": at,
        "flag": torch.rand(b, k, generator=g) > 0.5,
        "small": torch.randint(-9, 9, (k,), generator=g, dtype=torch.int8),
    }


def documents(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    ids = torch.sort(torch.randint(0, 4, (b, k), generator=g))[0]
    return {"ids": ids, "ids32": ids.int(), "length": torch.randint(1, k, (b,), generator=g)}


def pictures(b: int, h: int, k: int, g: torch.Generator) -> Tensors:
    return {
        "swin": torch.randn(2 * WIDTH - 1, 2 * WIDTH - 1, h, generator=g).bfloat16(),
        "picked": torch.rand(h, 8, 8, generator=g) > 0.5,
        "dense": torch.rand(k, k, generator=g) > 0.3,
        "end": torch.randint(0, k, (k,), generator=g),
    }


WIDTH = 12


# ---- scores ----------------------------------------------------------------------------------------------------------


def alibi(t: Any) -> Made:
    return lambda s, b, h, q, k: s - t.slope[h] * (q - k).abs()


def relative(t: Any) -> Made:
    return lambda s, b, h, q, k: s + t.table[h, k - q + 31]


def t5(t: Any) -> Made:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = (q - k).abs()
        far = 8 + (torch.log((distance.clamp(min=1) + 0.001) / 8) / math.log(16) * 8).to(torch.int64)
        return s + t.buckets[torch.where(k > q, 16, 0) + torch.where(distance < 8, distance, far.clamp(max=15)), h]

    return score


def checkerboard(t: Any) -> Made:
    return lambda s, b, h, q, k: s * torch.where((q + k) % 2 == 0, 1.0, 0.5)


def tempered(t: Any) -> Made:
    return lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0) * t.temperature[b] - t.slope[b, h] * (q - k).abs()


def several(t: Any) -> Made:
    """Several entries of one tensor, some of them at one place for all pairs of a head."""
    return lambda s, b, h, q, k: (
        2.0 * (s * torch.sigmoid(t.gate[h]) + t.weight[b, k] * t.gate[h // 2] - 0.5 * t.weight[b, q])
    )


def piecewise(t: Any) -> Made:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = (q - k).abs()
        return torch.where(distance < 4, s, torch.where(distance < 12, s * 0.5, s - 2))

    return score


def rounding(t: Any) -> Made:
    """Integers below 0, divided by positive and negative ones, and floats."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        d = k - q
        whole = d // 3 * 0.1 + d % 5 * 0.1 + d % -3 * 0.1 + d // -7 * 0.1 + (h - 2) // 2 + d % (h + 3) * 0.1
        return s + whole + (0.375 * d + 0.01) // 0.5 * 0.1

    return score


def packed(t: Any) -> Made:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = (t.position[b, q] - t.position[b, k]).abs()
        nearest = torch.minimum(distance, t.position[b, k] // 3)
        return s - 0.05 * nearest + torch.where(t.flag[b, k], 0.5, 0.0) + 0.1 * t.small[k]

    return score


def smooth(t: Any) -> Made:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x = s - torch.log1p(torch.exp(s - 1.0))
        x = x * torch.rsqrt(1.0 + x * x) + s * torch.sigmoid(s) * t.slope[h] - torch.erf(s).square()
        return x + torch.cos(0.3 * (q - k)) + torch.sqrt((q - k).abs() + 1.0) * 0.1

    return score


def log_n(t: Any) -> Made:
    return lambda s, b, h, q, k: s * (t.slope[h] * torch.log(k + 2.0) + 0.5)


def gaussian(t: Any) -> Made:
    return lambda s, b, h, q, k: s - (q - k) ** 2 / (2 * t.sigma[h] ** 2)


def clamped(t: Any) -> Made:
    return lambda s, b, h, q, k: torch.clamp(s, -1.5, 1.5) + torch.maximum(t.slope[h] * s, s.sin())


def swin(t: Any) -> Made:
    return lambda s, b, h, q, k: s + t.swin[q // WIDTH - k // WIDTH + WIDTH - 1, q % WIDTH - k % WIDTH + WIDTH - 1, h]


def retention(t: Any) -> Made:
    """Its slope is a number that is not 1 where it depends on nothing else."""
    return lambda s, b, h, q, k: 0.5 * s + s * (1 - 2.0 ** (-3.0 - h)) ** (q - k).abs() + s


def hidden(t: Any) -> Made:
    return lambda s, b, h, q, k: torch.where(t.ids32[b, q] == t.ids32[b, k], s, -math.inf)


# ---- masks -----------------------------------------------------------------------------------------------------------


def document(t: Any) -> Made:
    return lambda b, h, q, k: t.ids[b, q] == t.ids[b, k]


def causal_document(t: Any) -> Made:
    return lambda b, h, q, k: (q >= k) & (t.ids32[b, q] == t.ids32[b, k])


def padding(t: Any) -> Made:
    return lambda b, h, q, k: k < t.length[b]


def prefixes(t: Any) -> Made:
    return lambda b, h, q, k: (k <= q) | (k < t.length[b] // 2)


def global_and_local(t: Any) -> Made:
    return lambda b, h, q, k: ((q - k).abs() <= 9) | (k < 8) | (q < 8)


def dilated(t: Any) -> Made:
    return lambda b, h, q, k: ((q - k) % 4 == 0) & (q >= k) & (q - k < 60)


def tree(t: Any) -> Made:
    return lambda b, h, q, k: (k <= q) & (q < t.end[k])


def neighbourhood(t: Any) -> Made:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        across, down = q % WIDTH - k % WIDTH, q // WIDTH - k // WIDTH
        return torch.maximum(across.abs(), down.abs()) <= 3

    return mask


def block_table(t: Any) -> Made:
    """Hide pairs by a table of blocks; beyond its last block, by that block."""
    return lambda b, h, q, k: t.picked[h, q // 16, k // 16]


def dense(t: Any) -> Made:
    return lambda b, h, q, k: t.dense[q, k]


def by_head(t: Any) -> Made:
    return lambda b, h, q, k: (h % 2 == 0) | (q - k < 16)


def late(t: Any) -> Made:
    """Rows that see nothing."""
    return lambda b, h, q, k: (q > 85) & (k % 3 != b)


def window(t: Any) -> Made:
    return lambda b, h, q, k: (q - k).abs() < 20


SCORES: dict[str, FunctionCase] = {
    "alibi": FunctionCase(70, 150, alibi, captured=slopes, options=(("mask", strobe.causal),)),
    "relative": FunctionCase(70, 150, relative, captured=table_of_heads),
    "t5": FunctionCase(60, 100, t5, captured=buckets, dim=128),
    "checkerboard": FunctionCase(33, 65, checkerboard),
    "tempered": FunctionCase(40, 100, tempered, captured=by_batch, sinks=True),
    "tempered_varlen": FunctionCase(
        40, 60, tempered, captured=by_batch, lengths=((17, 33), (40, 60), (0, 3), (17, 33), (5, 9))
    ),
    "several": FunctionCase(70, 90, several, captured=weights, options=(("mask", strobe.causal),)),
    "piecewise": FunctionCase(70, 70, piecewise, heads_k=4),
    "rounding": FunctionCase(70, 90, rounding),
    "packed": FunctionCase(60, 90, packed, captured=positions),
    "smooth": FunctionCase(40, 70, smooth, captured=slopes),
    "log_n": FunctionCase(40, 100, log_n, captured=slopes, options=(("mask", strobe.window(40, 10)),)),
    "gaussian": FunctionCase(70, 100, gaussian, captured=slopes, options=(("dropout", 0.2), ("seed", 5))),
    "clamped": FunctionCase(33, 65, clamped, captured=slopes),
    "swin": FunctionCase(144, 144, swin, captured=pictures),
    "retention": FunctionCase(40, 60, retention),
    "hidden": FunctionCase(70, 90, hidden, captured=documents),
    "one_query": FunctionCase(1, 300, relative, captured=table_of_heads, heads=8, heads_k=1),
}
MASKS: dict[str, FunctionCase] = {
    "document": FunctionCase(70, 150, mask=document, captured=documents),
    "causal_document": FunctionCase(100, 100, mask=causal_document, captured=documents, dim=128),
    "causal_and_document": FunctionCase(70, 100, mask=document, captured=documents, combined="&"),
    "padding": FunctionCase(70, 90, mask=padding, captured=documents, combined="&"),
    "prefixes": FunctionCase(40, 100, mask=prefixes, captured=documents),
    "global_and_local": FunctionCase(70, 100, mask=global_and_local),
    "dilated_or_causal": FunctionCase(40, 100, mask=dilated, combined="|"),
    "not_dilated": FunctionCase(40, 100, mask=dilated, combined="~", options=(("softcap", 3.0),)),
    "tree": FunctionCase(60, 60, mask=tree, captured=pictures),
    "neighbourhood": FunctionCase(144, 144, mask=neighbourhood),
    "block_table": FunctionCase(150, 150, mask=block_table, captured=pictures),
    "dense": FunctionCase(70, 90, mask=dense, captured=pictures, sinks=True),
    "by_head": FunctionCase(70, 90, mask=by_head, options=(("dropout", 0.2), ("seed", 3))),
    "late": FunctionCase(40, 100, mask=late),
    "window": FunctionCase(70, 90, mask=window),
    "varlen": FunctionCase(
        40, 60, mask=causal_document, captured=documents, lengths=((40, 60), (0, 3), (17, 33), (40, 60), (17, 33))
    ),
    "both": FunctionCase(70, 100, relative, document, lambda *a: documents(*a) | table_of_heads(*a), "&"),
}
CASES = {**SCORES, **{f"mask_{name}": case for name, case in MASKS.items()}}


# Cases with captured tensors that may learn -> those that their functions read.
_READ = {
    "relative": ("table",),
    "t5": ("buckets",),
    "tempered": ("slope", "temperature"),
    "tempered_varlen": ("slope", "temperature"),
    "several": ("weight", "gate"),
    "gaussian": ("sigma",),
    "swin": ("swin",),
    "one_query": ("table",),
    "mask_both": ("table",),
}
LEARNING = {**dict.fromkeys(("alibi", "smooth", "log_n", "clamped"), ("slope",)), **_READ}


def learning(name: str, captured: Tensors) -> Tensors:
    """Return what a case of LEARNING captures; the tensors that its function reads learn. Others would stay without a
    gradient, as in torch."""
    return {n: t.detach().requires_grad_() if n in LEARNING[name] else t for n, t in captured.items()}


def small(case: FunctionCase) -> FunctionCase:
    """Return the case with a head dim for which fp64 takes no time."""
    return replace(case, dim=8)
