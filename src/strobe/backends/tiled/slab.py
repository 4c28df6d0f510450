"""`tiled` cuts a problem up into slabs of (batch, key head) pairs, and each slab into tiles of query rows times keys.

Query heads that share a key head become more rows of the same tile, so that keys and values are never repeated. The
softmax counts in units of log2: on CPUs `exp` becomes ten times slower where its results are 0 or nearly, `exp2` does
not."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from strobe.backends.tiled.captured import Slopes, spread_over
from strobe.backends.tiled.sequences import alike, sequences_differ
from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.variants import dropout
from strobe.variants.expression import WORKING_DTYPE
from strobe.variants.mask import Positions, full
from strobe.variants.score import LOG2E

LN2 = math.log(2)


class Blocks(NamedTuple):
    q: int  # query positions of a tile; its rows are these times the heads of a group
    k: int  # keys of a tile
    pairs: int  # (batch, key head) pairs that are worked on at once
    scores: int  # room for those of a tile of all these pairs


_Sizes = tuple[int | None, int | None]
_forced: contextvars.ContextVar[_Sizes] = contextvars.ContextVar("strobe_block_sizes", default=(None, None))


@contextlib.contextmanager
def block_sizes(block_q: int | None = None, block_k: int | None = None) -> Iterator[None]:
    """Make `tiled` use tiles of this size within the context; `None` leaves the choice to it."""
    for name, value in (("block_q", block_q), ("block_k", block_k)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    token = _forced.set((block_q, block_k))
    try:
        yield
    finally:
        _forced.reset(token)


def choose_blocks(problem: Problem, block_q: int | None = None, block_k: int | None = None) -> Blocks:
    """A tile of scores should stay in the second-level cache of a CPU, and keep a whole GPU busy."""
    on_cpu = problem.device.type == "cpu"
    tile = (1 << 19) if on_cpu else (1 << 24)  # scores
    rows, keys = (256, 512) if on_cpu else (1024, 1024)
    if on_cpu and problem.mask.lo is not None:  # narrower tiles waste less along the two edges of a window
        keys = 256
    group = max(1, problem.group)
    forced_q, forced_k = _forced.get()
    block_q, block_k = block_q or forced_q, block_k or forced_k
    k = min(block_k or keys, max(1, problem.len_k))
    q = min(block_q or max(16, rows // group), max(1, problem.len_q))
    available = max(1, problem.heads_k * (1 if sequences_differ(problem) else problem.batch))
    pairs = max(1, min(available, tile // (group * q * k)))
    if block_q is None and 2 * pairs * group * q * k <= tile:  # too few heads to fill the tile
        q = min(2 * q, max(1, problem.len_q))
        if on_cpu and problem.mask == full and 2 * pairs * group * q * k <= tile:  # tall tiles waste more along edges
            q = min(2 * q, max(1, problem.len_q))
            if (
                block_k is None and problem.dim_v <= 64
            ):  # o is rescaled once per tile, which costs little if it is narrow
                k = min(k, 256)
    scores = pairs * group * q * k
    if sequences_differ(problem):  # those that are alike fill a tile together
        scores = max(scores, min(tile, problem.batch * problem.heads * q * _width(problem, k)))
    return Blocks(q, k, pairs, scores)


def _width(problem: Problem, keys: int) -> int:
    """The width of what is held for a row: its scores in a tile, or its query and its output."""
    return max(keys, problem.dim + problem.dim_v)


@dataclass
class Slab:
    """Some (batch, key head) pairs of a problem, whose sequences have the same lengths and positions. b, hk: how many; g:
    heads per group."""

    problem: Problem
    inputs: Inputs
    batch: range  # as masks, biases and the dropout count sequences
    heads: range  # of k
    rows: slice  # along the query axis of the tensors; of packed sequences those of all, one after the other
    keys: slice
    positions: Positions | None = None

    def __post_init__(self) -> None:
        problem = self.problem
        self.group = problem.group
        packed = len(self.batch) if problem.varlen else 1
        self.len_q, self.len_k = ((axis.stop - axis.start) // packed for axis in (self.rows, self.keys))
        self.pairs = len(self.batch) * len(self.heads)
        self.query_heads = range(self.heads.start * self.group, self.heads.stop * self.group)
        self.accumulate = problem.lse_dtype
        # Tensor cores take 16-bit operands and add up in 32 bits; a CPU has to widen them.
        self.narrow = problem.device.type == "cuda" and problem.dtype.itemsize == 2
        self.operand = problem.dtype if self.narrow else self.accumulate
        form = problem.score.kernel_form(problem.scale)
        self._inner = None if problem.score.is_identity else form.inner
        self._unscale = form.unscale
        self.slope_factor = form.before * form.after  # of the score's derivative
        self.captured_factor = form.after  # of its derivatives by entries of captured tensors
        # Scores are in units of log2, but natural ones beside a bias: finfo.min would overflow in others.
        self.unit = 1.0 if self.inputs.bias is None else LOG2E
        after = form.after * (LOG2E if self.inputs.bias is None else 1.0)
        self._before, self._after = (after, 1.0) if self._inner is None else (form.before, after)
        self.k, self.v = self.of_keys(self.inputs.k), self.of_keys(self.inputs.v)
        self.q = self.of_queries(self.inputs.q)
        self.mask, self.bias = self.of_pairs(self.inputs.mask), self.of_pairs(self.inputs.bias)

    # ---- views of whole tensors
    # ------------------------------------------------------------------------------------------

    def of_queries(self, t: torch.Tensor) -> torch.Tensor:
        """(b, hk, g, len_q, ...) of a tensor (batch, heads, len_q, ...)."""
        t = self._part(t, self.query_heads, self.rows, self.len_q)
        return t.unflatten(1, (len(self.heads), self.group))

    def of_keys(self, t: torch.Tensor) -> torch.Tensor:
        """(b, hk, len_k, ...) of a tensor (batch, heads of k, len_k, ...)."""
        return self._part(t, self.heads, self.keys, self.len_k)

    def _part(self, t: torch.Tensor, heads: range, axis: slice, length: int) -> torch.Tensor:
        """(b, heads, length, ...), a view."""
        if not self.problem.varlen:
            return t[self.batch.start : self.batch.stop, heads.start : heads.stop, axis]
        t = t[0, heads.start : heads.stop, axis]
        return t.unflatten(1, (len(self.batch), length)).transpose(0, 1)

    def of_pairs(self, t: torch.Tensor | None) -> torch.Tensor | None:
        """(b, hk, g, len_q, len_k) of a mask, bias or bias gradient, with 1 where it is to be broadcast."""
        if t is None:
            return None
        t = t if t.shape[0] == 1 else t[self.batch.start : self.batch.stop]
        if t.shape[1] == 1:
            t = t.unsqueeze(2)
        else:
            t = t[:, self.query_heads.start : self.query_heads.stop].unflatten(1, (len(self.heads), self.group))
        return tile_of(t, range(self.len_q), range(self.len_k))

    def sinks(self) -> torch.Tensor:
        """(hk, g, 1)."""
        assert self.inputs.sinks is not None
        sinks = self.inputs.sinks[self.query_heads.start : self.query_heads.stop].to(self.accumulate)
        return sinks.reshape(len(self.heads), self.group, 1)

    # ---- tiles
    # -----------------------------------------------------------------------------------------------------------

    def rows_of(self, t: torch.Tensor, rows: range, dtype: torch.dtype | None = None) -> torch.Tensor:
        """(b*hk, g*rows, dim) of a tensor in the form of `of_queries`."""
        t = t[:, :, :, rows.start : rows.stop].to(dtype or self.operand)
        return t.reshape(self.pairs, self.group * len(rows), t.shape[-1])

    def keys_of(self, t: torch.Tensor, keys: range) -> torch.Tensor:
        """(b*hk, keys, dim) of a tensor in the form of `of_keys`; a view wherever the strides allow it."""
        return t[:, :, keys.start : keys.stop].to(self.operand).flatten(0, 1)

    def spread(self, tile: torch.Tensor, rows: range) -> torch.Tensor:
        """(b*hk, g*rows, n) as (b, hk, g, rows, n)."""
        return tile.view(len(self.batch), len(self.heads), self.group, len(rows), tile.shape[-1])

    def query_tile(self, rows: range) -> torch.Tensor:
        """(b*hk, g*rows, dim), not scaled: that would round every q once more, and every partial sum of q kᵀ differently
        from PyTorch's. Most of the error arises in those sums, so a row with a small error there could have a large one
        here."""
        return self.rows_of(self.q, rows).contiguous()

    def environment(self, rows: range, keys: range) -> dict[Any, Any]:
        """Return the positions and captured tensors that a score may look at besides its value, to be broadcast to (b,
        hk, g, rows, keys)."""
        score = self.problem.score
        if score.pointwise:
            return {WORKING_DTYPE: self.accumulate}
        offset_q, whole_q, offset_k, whole_k = self.positions or (0, self.len_q, 0, self.len_k)
        env: dict[Any, Any] = {"len_q": whole_q, "len_k": whole_k, WORKING_DTYPE: self.accumulate}

        def count(r: range, offset: int = 0) -> torch.Tensor:
            return torch.arange(r.start + offset, r.stop + offset, device=self.problem.device)

        env |= {"q": count(rows, offset_q)[:, None], "k": count(keys, offset_k)}
        env["b"] = count(self.batch)[:, None, None, None, None]
        env["h"] = count(self.query_heads).unflatten(0, (len(self.heads), self.group))[..., None, None]
        return env | dict(enumerate(self.inputs.score_tensors))

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, rows: range, keys: range, whole: bool, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, Slopes | None]:
        """A tile of scores, -inf where masked, and what computes the derivatives of the score there, if it is a function.
        `whole`: the interval mask lets every pair of this tile through."""
        s, slopes = product(q, k.mT, buffer, self._before), None
        if self._inner is not None:
            s, slopes = self._scored(s, rows, keys)
        if self.bias is not None:
            into = self.spread(s, rows)
            hidden = into == -torch.inf if self.problem.score.may_hide else None
            torch.add(into, tile_of(self.bias, rows, keys).to(self.accumulate), out=into)
            if hidden is not None:  # whatever the bias says there, even NaN
                into.masked_fill_(hidden, -torch.inf)
            s = into.view_as(s)
        if not whole:
            s = self._within_bounds(s, rows, keys)
        if self.mask is not None:
            s = self._hide(s, tile_of(self.mask, rows, keys), rows)
        return s, slopes

    def _scored(self, s: torch.Tensor, rows: range, keys: range) -> tuple[torch.Tensor, Slopes]:
        assert self._inner is not None
        slopes = Slopes(
            self._inner, {**self.environment(rows, keys), "s": self.spread(s, rows), "unscale": self._unscale}
        )
        # In memory of its own: `slopes` may need the value.
        return spread_over(slopes.value() * self._after, slopes.env["s"]).reshape(s.shape), slopes

    def _within_bounds(self, s: torch.Tensor, rows: range, keys: range) -> torch.Tensor:
        """-inf where the interval mask hides a key."""
        mask = self.problem.mask
        row, key = (torch.arange(r.start, r.stop, device=s.device) for r in (rows, keys))
        if s.device.type != "cpu" or not torch.isfinite(s.sum()):
            return self._hide(s, mask.block(row, key, self.len_q, self.len_k, self.positions), rows)
        # A CPU takes a minimum several times faster than it compares and selects; NaN would get through, but there is
        # none.
        bounds = mask.bounds(row, self.len_q, self.len_k, self.positions)
        lo, hi = ((bound - keys.start).to(s.dtype)[:, None] for bound in bounds)
        key = (key - keys.start).to(s.dtype)
        inside = hi - 0.5 - key  # greater than 0 where visible
        if mask.lo is not None:
            inside = torch.minimum(inside, key - (lo - 0.5))
        tile = self.spread(s, rows)
        return torch.minimum(tile, inside.mul_(torch.inf), out=tile).view_as(s)

    def in_units(self, logits: torch.Tensor) -> torch.Tensor:
        """Natural logarithms in the units of the scores."""
        return logits * LOG2E if self.unit == 1.0 else logits

    def exponentials(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """exp(s - m), over `s`. The difference is taken first: it is small where the result is not 0."""
        return self.exponential(s.sub_(m))

    def exponential(self, difference: torch.Tensor) -> torch.Tensor:
        """exp, over `difference`, which is in the units of the scores."""
        return difference.exp2_() if self.unit == 1.0 else difference.mul_(self.unit).exp2_()

    def softmax_step(
        self, s: torch.Tensor, m: torch.Tensor, ell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One more tile of scores: its exponentials, over `s`, the factor for what was summed before, and the new row
        maxima and sums."""
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p = self.exponentials(s, m_new)
        difference = m - m_new
        if self.inputs.sinks is not None:  # 0 for an infinite sink
            difference = torch.where(m == m_new, 0, difference)
        rescale = self.exponential(difference)
        return p, rescale, m_new, torch.addcmul(p.sum(-1, keepdim=True), ell, rescale)

    def before_the_first_tile(self, rows: range, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """m and ell, (b*hk, g*rows, 1). The sink is a key already seen whose value is 0. Without one m is the least
        finite number and not -inf: masked scores, which are -inf, can then be compared with it and subtracted from it
        without NaN."""
        least = torch.finfo(self.accumulate).min
        m = like.new_full((*like.shape[:2], 1), least, dtype=self.accumulate)
        if self.inputs.sinks is None:
            return m, torch.zeros_like(m)
        sink = self.sinks().expand(len(self.batch), len(self.heads), self.group, len(rows)).reshape(m.shape)
        sink = self.in_units(sink)
        return sink.clamp(min=least), (sink != -torch.inf).to(m.dtype)

    def _hide(self, s: torch.Tensor, visible: torch.Tensor, rows: range) -> torch.Tensor:
        # On CPUs `where` into fresh memory is several times faster than `masked_fill_`.
        return torch.where(visible, self.spread(s, rows), -torch.inf).view_as(s)

    def kept(self, rows: range, keys: range) -> torch.Tensor:
        """Return the mask of the entries of a tile that dropout keeps, (b*hk, g*rows, keys)."""
        offset_q, _, offset_k, _ = self.positions or (0, 0, 0, 0)
        rows_at, keys_at = (range(r.start + n, r.stop + n) for r, n in ((rows, offset_q), (keys, offset_k)))
        heads = range(self.query_heads.start + self.problem.first_head, self.query_heads.stop + self.problem.first_head)
        p, seed = self.problem.dropout, self.inputs.seed
        kept = dropout.keep(seed, self.batch, heads, rows_at, keys_at, p, self.problem.device)
        return kept.view(self.pairs, self.group * len(rows), len(keys))

    def key_tiles(self, rows: range, block_k: int) -> Iterator[tuple[range, bool]]:
        """The keys of each tile that these rows can see, and whether they see all of it. Keys at the ends that none of
        the rows sees are cut off."""
        mask = self.problem.mask
        where = (self.len_q, self.len_k, self.positions)
        first, end, first_full, end_full = mask.tiles(rows.start, rows.stop, block_k, *where)
        lowest, _ = mask.bounds(rows.start, *where)
        _, highest = mask.bounds(rows.stop - 1, *where)
        unmasked = mask.lo is None and mask.hi is None  # even the ragged tile at the end is whole
        for t in range(first, end):
            keys = range(max(t * block_k, lowest), min((t + 1) * block_k, highest))
            if keys:
                yield keys, unmasked or first_full <= t < end_full

    def row_blocks(self, block_q: int) -> Iterator[range]:
        for start in range(0, self.len_q, block_q):
            yield range(start, min(start + block_q, self.len_q))


def tile_of(t: torch.Tensor, rows: range, keys: range) -> torch.Tensor:
    """The part of a (…, len_q, len_k) tensor, either of which may be 1, that belongs to these rows and keys."""
    t = t if t.shape[-2] == 1 else t[..., rows.start : rows.stop, :]
    return t if t.shape[-1] == 1 else t[..., keys.start : keys.stop]


def slabs(problem: Problem, inputs: Inputs, blocks: Blocks) -> Iterator[Slab]:
    """Every (batch, key head) pair once, as many at a time as there is room for."""
    for batch, rows, keys, at in alike(problem, inputs):
        pairs = blocks.pairs
        if sequences_differ(problem):
            len_q, len_k = ((axis.stop - axis.start) // len(batch) for axis in (rows, keys))
            if not problem.varlen:
                len_q, len_k = problem.len_q, problem.len_k
            row = max(1, min(blocks.q, len_q)) * _width(problem, min(blocks.k, len_k))
            pairs = max(min(blocks.pairs, problem.heads_k), blocks.scores // (max(1, problem.group) * row))
        step = max(1, pairs // max(1, problem.heads_k))
        for b in range(0, len(batch), step):
            some = batch[b : b + step]
            part_q, part_k = rows, keys
            if problem.varlen:
                part_q, part_k = (
                    slice(axis.start + b * length, axis.start + (b + len(some)) * length)
                    for axis, length in ((rows, len_q), (keys, len_k))
                )
            for h in range(0, problem.heads_k, pairs):
                yield Slab(problem, inputs, some, range(h, min(h + pairs, problem.heads_k)), part_q, part_k, at)


def product(a: torch.Tensor, b: torch.Tensor, buffer: torch.Tensor | None = None, factor: float = 1.0) -> torch.Tensor:
    """Batched factor * (a @ b) in 32 bits at least; the beginning of the flat `buffer` takes the result where
    possible."""
    if a.dtype.itemsize == 2:
        result = torch.bmm(a, b, out_dtype=torch.float32)
        return result if factor == 1.0 else result.mul_(factor)
    if buffer is None:
        return torch.bmm(a, b) if factor == 1.0 else torch.bmm(a, b).mul_(factor)
    shape = (a.shape[0], a.shape[1], b.shape[2])
    into = buffer[: math.prod(shape)].view(shape)
    if into.is_cpu:  # not by alpha: MKL multiplies `a` by it, which rounds, and on Arm 0 writes nothing
        result = torch.bmm(a, b, out=into)
        return result if factor == 1.0 else result.mul_(factor)
    return torch.baddbmm(into, a, b, beta=0, alpha=factor, out=into)


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b."""
    if a.dtype.itemsize == 2:
        total += product(a, b)
    else:
        total.baddbmm_(a, b)
