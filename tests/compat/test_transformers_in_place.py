"""Reading a paged cache in place, against all keys of each request in one piece: random steps, both kinds of layers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("psutil")  # transformers asks it for the memory of a CPU
import strobe  # noqa: E402
from strobe.compat.transformers import in_place  # noqa: E402
from strobe.problem.arguments import Arguments  # noqa: E402

HEADS, HEADS_K, DIM, REQUESTS, BLOCKS = 4, 2, 8, 4, 40


class Layer:
    """A layer's part of a cache as transformers keeps it: lists of rows to read and to write for each step."""

    def __init__(self, page: int, window: int | None, old: bool) -> None:
        self.page, self.window, self.old = page, window, old
        k, v = torch.full((2, BLOCKS * page, HEADS_K, DIM), torch.nan, dtype=torch.float64)
        self.sentinel, order = 1, random.sample(range(1, BLOCKS - 1), BLOCKS - 2)  # rows of block 0 belong to nobody
        self.blocks = [order[i::REQUESTS] for i in range(REQUESTS)]
        if old:  # 5.17
            self.cache = SimpleNamespace(
                layer_index_to_group_indices={7: (1, 0)}, key_cache=[k], value_cache=[v], block_size=page,
                sentinel_index=self.sentinel, sliding_windows={7: window or 1},
            )  # fmt: skip
        else:
            allocator = SimpleNamespace(
                _kv_token_views={7: (k, v[:-page])}, index=1, tokens_per_page=page, sentinel_index=self.sentinel
            )
            if window is not None:
                allocator.sliding_window = window
            self.cache = SimpleNamespace(layer_to_allocator={7: allocator})

    def row(self, request: int, position: int) -> int:
        at = position if self.window is None else position % self.window
        return self.blocks[request][at // self.page] * self.page + at % self.page

    def lists(self, past: list[int], counts: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Rows to read, rows to write, and how many keys each request has."""
        read: list[int] = []
        write: list[int] = []
        keys = []
        for i, (done, count) in enumerate(zip(past, counts, strict=True)):
            kept = done if self.window is None else min(done, self.window - 1)
            if not count:  # a request that pads the batch
                keys.append(0)
                continue
            read += [self.row(i, p) for p in range(done - kept, done)]
            new = [self.row(i, p) for p in range(done, done + count)]
            if self.window is not None:
                new[: max(0, count - self.window)] = [0] * max(
                    0, count - self.window
                )  # overwritten anyway: to the trash
            read += new if self.window is None else [self.sentinel] * count
            write += new
            keys.append(kept + count)
        return (read if any(past) else []), write, keys


@pytest.mark.parametrize("old", (False, True))
@pytest.mark.parametrize("page", (4, 8))
@pytest.mark.parametrize("window", (None, 5, 8, 11))
def test_steps(window: int | None, page: int, old: bool) -> None:
    random.seed(window or 0)
    torch.manual_seed(page)
    layer, past = Layer(page, window, old), [0] * REQUESTS
    keys = torch.randn(2, REQUESTS, 64, HEADS_K, DIM, dtype=torch.float64)
    sinks = torch.randn(HEADS, dtype=torch.float64)
    steps = (
        [[6, 3, 13, 1], [1, 9, 1, 12], [1, 1, 1, 1], [1, 2, 0, 1]] + [[1] * REQUESTS, [1, 0, 1, 1]] * 6 + [[7, 1, 4, 1]]
    )
    for counts in steps:
        used = [a + b for a, b in zip(past, counts, strict=True)]
        read, write, lengths = layer.lists(past, counts)
        new = [torch.cat([t[i, a:b] for i, (a, b) in enumerate(zip(past, used, strict=True))]) for t in keys]
        q = torch.randn(sum(counts), HEADS, DIM, dtype=torch.float64)
        cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (counts, lengths))
        kwargs: dict[str, Any] = {
            "cu_seq_lens_k": {"full_attention" if window is None else "sliding_attention": cu_k, "other": None},
            "read_index": [None, torch.tensor(read, dtype=torch.int64)], "write_index": [None, torch.tensor(write)],
            "position_ids": torch.cat([torch.arange(a, b) for a, b in zip(past, used, strict=True)])[None],
        }  # fmt: skip
        a = Arguments(
            q, *new, cu_q, cu_k, max(counts), max(lengths), mask=strobe.causal, scale=0.4, sinks=sinks,
            score=strobe.variants.score.softcap(5.0),
        )  # fmt: skip
        found = in_place.attend(a, layer.cache, 7, kwargs)
        assert found is not None
        mask = strobe.causal if window is None else strobe.window(window - 1, 0)
        for i, (at, count) in enumerate(zip(cu_q.tolist(), counts, strict=False)):
            if count:
                k, v = keys[:, i : i + 1, : used[i]]
                want = strobe.attention(q[None, at : at + count], k, v, mask=mask, scale=0.4, softcap=5.0, sinks=sinks)
                torch.testing.assert_close(found[at : at + count], want[0], atol=1e-12, rtol=1e-10)
        past = used


def test_a_table_of_blocks_is_refused() -> None:
    a = Arguments(torch.zeros(1, HEADS, DIM), *torch.zeros(2, 1, HEADS_K, DIM))
    with pytest.raises(strobe.Unsupported, match="block_table"):
        in_place.attend(a, None, 7, {"block_table": torch.zeros(1)})


def test_another_cache_is_not_touched() -> None:
    a = Arguments(torch.zeros(1, HEADS, DIM), *torch.zeros(2, 1, HEADS_K, DIM), max_k=1)
    assert in_place.attend(a, SimpleNamespace(layer_to_allocator={}), 7, {}) is None
    assert in_place.attend(a, SimpleNamespace(), 7, {}) is None
