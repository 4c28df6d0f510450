"""`strobe bench --suite decode` measures these cases: batches of sequences whose keys lie in a cache, and calls that
attend to them. Each call has the keys in its own way, over the same bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe
from strobe.backends import dispatch
from strobe.bench.installed import imported
from strobe.bench.provider import Refusal
from strobe.paged import Level, Plan

PAGES = (1, 16, 64, 256)
PAGE = 64  # of batches that are there for something else


@dataclass(frozen=True)
class Size:
    heads: int
    heads_k: int
    dim: int
    dtype: torch.dtype
    divisor: int = 1  # of all lengths and batches' sizes
    rotated: int = 0  # bytes of caches that a graph goes through, at least: several times the L2

    @property
    def row_bytes(self) -> int:
        """The bytes of a token: its key and its value."""
        return 2 * self.heads_k * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class Batch:
    """Sequences with so many queries and keys; the last query of each stands opposite its last key."""

    name: str
    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    pages: tuple[int, ...] = (PAGE,)
    shared: int = 0  # keys in front that all sequences have in common, not counted in `lengths`

    @property
    def dense(self) -> bool:
        return len({*self.queries}) == 1

    @property
    def uniform(self) -> bool:
        return self.dense and len({*self.lengths}) == 1

    @property
    def rows(self) -> int:
        """The rows of the cache: whole pages of the largest size."""
        most = max(self.pages)
        return sum(-(-n // most) * most for n in (*self.lengths, self.shared))

    def keys(self) -> int:
        return sum(self.lengths) + self.shared


def batches(divisor: int = 1) -> list[Batch]:
    """`divisor`: 1 for a GPU; with a larger one all of them are smaller."""

    def short(n: int) -> int:
        return max(3, n // divisor)

    few = max(2, 64 // divisor)
    listed = [
        Batch(f"b{b}-{n // 1024}k", (1,) * min(b, few * 2), (short(n),) * min(b, few * 2), PAGES)
        for b, n in ((1, 32768), (16, 8192), (128, 4096))
    ]
    listed += [
        Batch(f"b{b}-{n // 1024}k-4-queries", (4,) * min(b, few), (short(n),) * min(b, few))
        for b, n in ((1, 32768), (16, 8192))
    ]
    lengths = [round(128 * 256 ** (i / (few - 1))) for i in range(few)]  # log-uniform, 128 to 32k
    skewed = tuple(short(lengths[(i * 37) % few]) for i in range(few))  # 37: in no order
    listed.append(Batch("skewed", (1,) * few, skewed))
    listed.append(Batch("uniform", (1,) * few, (sum(skewed) // few,) * few))
    listed.append(Batch("mixed", (short(2048), *(1,) * few), (short(8192), *(short(4096),) * few)))
    listed.append(Batch("cascade", (1,) * few, (short(1024),) * few, shared=short(8192)))
    return listed


@dataclass
class Cache:
    """A cache of a batch: the same rows, whatever the size of pages is."""

    kv: torch.Tensor  # (2, rows, heads_k, dim)
    q: torch.Tensor  # (total, heads, dim)
    cu_q: torch.Tensor
    tables: dict[int, tuple[torch.Tensor, torch.Tensor]]  # page -> (own, shared): pages in random order

    @staticmethod
    def of(batch: Batch, size: Size, device: torch.device, seed: int) -> Cache:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=size.dtype)

        tables = {}
        for page in batch.pages:
            order = torch.randperm(batch.rows // page, generator=generator, device=device).to(torch.int32)
            counts = [-(-n // page) for n in (*batch.lengths, batch.shared)]
            own = torch.full((len(batch.lengths), max(counts[:-1])), -1, dtype=torch.int32, device=device)
            for i, part in enumerate(order[: sum(counts)].split(counts)):
                if i < len(own):
                    own[i, : len(part)] = part
            tables[page] = own, order[sum(counts[:-1]) : sum(counts)][None]
        cu = torch.tensor([0, *batch.queries], device=device).cumsum(0).to(torch.int32)
        rows = normal(2, batch.rows, size.heads_k, size.dim)
        return Cache(rows, normal(sum(batch.queries), size.heads, size.dim), cu, tables)

    def pool(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.kv.unflatten(1, (-1, page)).unbind(0)
        return k, v

    def keys(self, batch: Batch, page: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, heads_k, dim) of sequence i, copied; page 0: of a cache in one piece."""
        if not page:
            n = batch.lengths[i]
            return self.kv[0, i * n : (i + 1) * n], self.kv[1, i * n : (i + 1) * n]
        own, shared = (t.clamp(min=0).long() for t in self.tables[page])
        k, v = (
            torch.cat((t[shared[0]].flatten(0, 1)[: batch.shared], t[own[i]].flatten(0, 1)[: batch.lengths[i]]))
            for t in self.pool(page)
        )
        return k, v


@dataclass(frozen=True)
class Way:
    """A way to have the keys and to attend to them. `call` prepares a cache, untimed, and returns what is timed, which
    gives (total, heads, dim)."""

    name: str
    page: int  # 0: one piece
    read: int  # keys that it reads
    call: Callable[[Cache], Callable[[], torch.Tensor]]


def ways(batch: Batch, size: Size) -> list[Way]:
    """The first is what the others are compared with."""

    def way(name: str, make: Callable[..., Callable[[], torch.Tensor]], page: int = 0, read: int = batch.keys()) -> Way:
        text = f"{name}, page {page}" if page and name else name or f"page {page}"
        return Way(text, page, read, functools.partial(make, batch=batch, size=size, page=page))

    if batch.shared:
        each = sum(batch.lengths) + batch.shared * len(batch.lengths)
        apart = [way("in each table", _apart, PAGE, each), way("a copy for each", _copied, PAGE, each)]
        return [way("shared", _shared, PAGE), *apart]
    paged = [way("", _paged, page) for page in batch.pages]
    paged.append(way("invariant", functools.partial(_paged, invariant=True), PAGE))
    if not batch.dense:
        return [*paged, way("two calls", _two_calls, PAGE)]
    largest = max(batch.pages)
    two, three = (functools.partial(_flash_attn, three=third) for third in (False, True))
    peers = [way("flash-attn", two, largest), way("flash-attn 3", three, largest)]
    if set(batch.queries) == {1}:
        peers.append(way("flashinfer", _flashinfer, largest))
    one_piece = [way("contiguous", _contiguous), way("cuDNN, contiguous", _cudnn)] if batch.uniform else []
    return [*one_piece, *paged, *peers]


def _lengths(batch: Batch, like: torch.Tensor, more: int = 0) -> torch.Tensor:
    return torch.tensor([n + more for n in batch.lengths], dtype=torch.int32, device=like.device)


def _planned(lengths: torch.Tensor, cu_q: torch.Tensor | None = None, shared: Sequence[Level] = ()) -> Plan:
    """Layers share a list of work, so it is made before the clock runs, by the first call."""
    plan = Plan()
    plan.update(lengths, cu_q, shared=shared)
    return plan


def _by_sequence(c: Cache, batch: Batch) -> torch.Tensor:
    return c.q.unflatten(0, (len(batch.queries), -1))


def _pieces(c: Cache, batch: Batch) -> list[torch.Tensor]:
    """k and v as (batch, keys, heads_k, dim)."""
    b, n = len(batch.lengths), batch.lengths[0]
    return [t[: b * n].unflatten(0, (b, n)) for t in c.kv]


def _contiguous(c: Cache, batch: Batch, size: Size, page: int) -> Callable[[], torch.Tensor]:
    q, (k, v) = _by_sequence(c, batch), _pieces(c, batch)
    return lambda: strobe.attention(q, k, v, mask=strobe.causal).flatten(0, 1)


def _paged(c: Cache, batch: Batch, size: Size, page: int, *, invariant: bool = False) -> Callable[[], torch.Tensor]:
    if invariant and (missing := dispatch.get("sm90").machine(c.q.device)) is not None:
        raise Refusal("unsupported", missing)
    attend = functools.partial(strobe.attention_paged, invariant=invariant)
    (k, v), (table, _), lengths = c.pool(page), c.tables[page], _lengths(batch, c.q)
    if batch.dense:
        q, plan = _by_sequence(c, batch), _planned(lengths)
        return lambda: attend(q, k, v, table, lengths, plan=plan).flatten(0, 1)
    plan, longest = _planned(lengths, c.cu_q), max(batch.queries)
    return lambda: attend(c.q, k, v, table, lengths, c.cu_q, max_q=longest, plan=plan)


def _two_calls(c: Cache, batch: Batch, size: Size, page: int) -> Callable[[], torch.Tensor]:
    """The prompt, which stands first, and the decodes."""
    (k, v), (table, _), lengths, first = c.pool(page), c.tables[page], _lengths(batch, c.q), batch.queries[0]
    plans = _planned(lengths[:1]), _planned(lengths[1:])

    def call() -> torch.Tensor:
        prompt = strobe.attention_paged(c.q[None, :first], k, v, table[:1], lengths[:1], plan=plans[0])
        decodes = strobe.attention_paged(c.q[first:, None], k, v, table[1:], lengths[1:], plan=plans[1])
        return torch.cat((prompt[0], decodes[:, 0]))

    return call


def _shared(c: Cache, batch: Batch, size: Size, page: int) -> Callable[[], torch.Tensor]:
    (k, v), (own, front), lengths = c.pool(page), c.tables[page], _lengths(batch, c.q)
    length = torch.tensor([batch.shared], dtype=torch.int32, device=own.device)
    level = Level(front, length, torch.tensor([0, len(c.q)], dtype=torch.int32, device=own.device))
    q, plan = _by_sequence(c, batch), _planned(lengths, shared=[level])
    return lambda: strobe.attention_paged(q, k, v, own, lengths, shared=[level], plan=plan).flatten(0, 1)


def _apart(c: Cache, batch: Batch, size: Size, page: int) -> Callable[[], torch.Tensor]:
    """The shared pages stand in each sequence's table."""
    if batch.shared % page:
        raise Refusal("unsupported", f"{batch.shared} shared keys are no whole pages of {page}")
    (k, v), (own, front), lengths = c.pool(page), c.tables[page], _lengths(batch, c.q, batch.shared)
    table, q, plan = torch.cat((front.expand(len(own), -1), own), 1), _by_sequence(c, batch), _planned(lengths)
    return lambda: strobe.attention_paged(q, k, v, table, lengths, plan=plan).flatten(0, 1)


def _copied(c: Cache, batch: Batch, size: Size, page: int) -> Callable[[], torch.Tensor]:
    """Each sequence has pages of its own for all of its keys, as without sharing."""
    keys = [c.keys(batch, page, i) for i in range(len(batch.lengths))]
    k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 0, -len(t) % page)) for t in ts]) for ts in zip(*keys, strict=True))
    longest, total = max(-(-len(t) // page) for t, _ in keys), len(k) // page
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).to(torch.int32).to(c.q.device)
    table, first = torch.full((len(keys), longest), -1, dtype=torch.int32, device=c.q.device), 0
    for i, (own, _) in enumerate(keys):
        pages = -(-len(own) // page)
        table[i, :pages] = order[first : first + pages]
        first += pages
    places = order.long()
    k, v = (torch.empty_like(t).index_copy_(0, places, t) for t in (x.unflatten(0, (-1, page)) for x in (k, v)))
    lengths = _lengths(batch, c.q, batch.shared)
    q, plan = _by_sequence(c, batch), _planned(lengths)
    return lambda: strobe.attention_paged(q, k, v, table, lengths, plan=plan).flatten(0, 1)


# ---- peers: those that are installed


def _needs_gpu(c: Cache) -> None:
    if c.q.device.type != "cuda":
        raise Refusal("unsupported", "needs an NVIDIA GPU")


def _cudnn(c: Cache, batch: Batch, size: Size, page: int) -> Callable[[], torch.Tensor]:
    _needs_gpu(c)
    q, k, v = (t.transpose(1, 2) for t in (_by_sequence(c, batch), *_pieces(c, batch)))
    mask = None
    if q.shape[2] > 1:  # the last query stands opposite the last key
        mask = strobe.causal.dense(q.shape[2], k.shape[2], device=q.device)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return (
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)
            )

    return call


def _flash_attn(c: Cache, batch: Batch, size: Size, page: int, *, three: bool) -> Callable[[], torch.Tensor]:
    """Versions 2 and 3."""
    _needs_gpu(c)
    module, package = ("flash_attn_interface", "flash-attn 3") if three else ("flash_attn", "flash-attn")
    function = imported(module, package, "flash_attn_with_kvcache")
    (k, v), (table, _), lengths, q = c.pool(page), c.tables[page], _lengths(batch, c.q), _by_sequence(c, batch)
    tables = {"page_table" if three else "block_table": table.clamp(min=0)}
    return lambda: function(q, k, v, cache_seqlens=lengths, **tables, causal=True).flatten(0, 1)


def _flashinfer(c: Cache, batch: Batch, size: Size, page: int) -> Callable[[], torch.Tensor]:
    """Its plan is made on the host, before the graph."""
    _needs_gpu(c)
    flashinfer = imported("flashinfer", "flashinfer")
    counts = torch.tensor([-(-n // page) for n in batch.lengths])
    indptr = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32).to(c.q.device)
    indices = torch.cat([row[:n] for row, n in zip(c.tables[page][0], counts.tolist(), strict=True)])
    last = torch.tensor([(n - 1) % page + 1 for n in batch.lengths], dtype=torch.int32, device=c.q.device)
    workspace = torch.empty(384 << 20, dtype=torch.uint8, device=c.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last,
    )  # fmt: skip
    wrapper.plan(
        indptr, indices, last, size.heads, size.heads_k, size.dim, page, q_data_type=size.dtype, kv_data_type=size.dtype,
        sm_scale=1 / math.sqrt(size.dim),
    )  # fmt: skip
    pool = c.pool(page)
    return lambda: wrapper.run(c.q, pool)
