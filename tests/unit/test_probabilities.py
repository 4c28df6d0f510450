"""`strobe.probabilities`: the rows of the softmax that attention computes, with their positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe
from strobe.measure.memory import with_peak_memory

BATCH, LEN_Q, LEN_K, HEADS, HEADS_K, DIM = 2, 20, 33, 4, 2, 8


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(BATCH, LEN_Q, HEADS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def k() -> torch.Tensor:
    return torch.randn(BATCH, LEN_K, HEADS_K, DIM, generator=torch.Generator().manual_seed(1))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def of_attention(q: torch.Tensor, k: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Attention to the rows of the identity matrix returns its weights: (batch, heads, len_q, len_k), by the reference."""
    one_hot = torch.eye(LEN_K, dtype=q.dtype)[:, None].expand(BATCH, LEN_K, HEADS_K, LEN_K)
    return strobe.attention(q, k, one_hot, backend="reference", **arguments).transpose(1, 2)


def by_hand(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Logits (batch, heads, len_q, len_k) in float64."""
    grouped = k.double().repeat_interleave(HEADS // HEADS_K, 2)
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), grouped) / DIM**0.5


TABLE, DOCUMENT = random(HEADS, 2 * LEN_K), (torch.arange(LEN_K) // 7 + torch.arange(BATCH)[:, None]) // 2
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain, grouped heads": {},
    "causal": {"mask": strobe.causal},
    "window": {"mask": strobe.causal & strobe.window(5, 0)},
    "top left": {"mask": strobe.causal_top_left},
    "booleans": {"mask": random(BATCH, 1, LEN_Q, LEN_K) > 0},
    "booleans of keys": {"mask": random(BATCH, 1, 1, LEN_K) > 0},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.5, "mask": strobe.causal},
    "alibi": {"score": strobe.alibi(torch.tensor([0.5, 0.25, 0.1, 0.01])), "mask": strobe.causal},
    "alibi of sequences": {"score": strobe.alibi(torch.rand(BATCH, HEADS))},
    "bias": {"bias": random(HEADS, LEN_Q, LEN_K)},
    "bias with -inf": {"bias": torch.where(random(LEN_Q, LEN_K) > 0.5, -torch.inf, random(LEN_Q, LEN_K))},
    "a score of one's own": {"score": lambda s, b, h, q, k: s - TABLE[h, q - k + LEN_K] * 0.5, "mask": strobe.causal},
    "a mask of one's own": {"mask": lambda b, h, q, k: (DOCUMENT[b, q] == DOCUMENT[b, k]) & (q >= k)},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -torch.inf, 3.0]), "mask": strobe.causal},
}
ROWS = [slice(None), slice(7, 12), slice(-3, None), slice(2, 18, 5), 4, -1, [3, 4, 5, 11, 0], torch.tensor([19, 2])]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_rows_are_those_of_the_whole_call(name: str, q: torch.Tensor, k: torch.Tensor) -> None:
    whole = of_attention(q, k, **ARGUMENTS[name])
    for rows in ROWS:
        found = strobe.probabilities(q, k, rows=rows, **ARGUMENTS[name])
        wanted = whole[:, :, [rows] if isinstance(rows, int) else rows]
        torch.testing.assert_close(found, wanted, msg=lambda text, rows=rows: f"{name}, {rows}: {text}")


def test_the_softmax_by_hand(q: torch.Tensor, k: torch.Tensor) -> None:
    """Not by the library: causal with the last query opposite the last key, ALiBi from there, and a sink."""
    rows = slice(4, 9)
    distance = torch.arange(LEN_Q)[:, None] + (LEN_K - LEN_Q) - torch.arange(LEN_K)
    s, hidden = by_hand(q, k), distance < 0
    causal = strobe.probabilities(q, k, rows=rows, mask=strobe.causal)
    wanted = s.masked_fill(hidden, -torch.inf).softmax(-1)[:, :, rows]
    torch.testing.assert_close(causal, wanted.float())
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01])
    biased = s - slopes.double()[:, None, None] * distance.abs()
    found = strobe.probabilities(q, k, rows=rows, score=strobe.alibi(slopes))
    torch.testing.assert_close(found, biased.softmax(-1)[:, :, rows].float())
    sinks = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with_sink = torch.cat([s, sinks.double()[:, None, None].expand(BATCH, HEADS, LEN_Q, 1)], -1).softmax(-1)
    found = strobe.probabilities(q, k, rows=rows, sinks=sinks)
    torch.testing.assert_close(found, with_sink[:, :, rows, :-1].float())
    assert (found.sum(-1) < 1).all()


def test_they_sum_to_one_and_empty_rows_are_zero(q: torch.Tensor, k: torch.Tensor) -> None:
    found = strobe.probabilities(q, k, mask=strobe.causal & strobe.window(3, 0))
    torch.testing.assert_close(found.sum(-1), torch.ones(BATCH, HEADS, LEN_Q))
    longer = torch.cat([q, q], 1)  # 40 queries, 33 keys: the first 7 see none
    found = strobe.probabilities(longer, k, mask=strobe.causal)
    assert (found[:, :, :7] == 0).all() and (found[:, :, 7:].sum(-1) > 0.99).all()


def test_layouts(q: torch.Tensor, k: torch.Tensor) -> None:
    wanted = strobe.probabilities(q, k, rows=[1, 5], mask=strobe.causal)
    found = strobe.probabilities(q.transpose(1, 2), k.transpose(1, 2), rows=[1, 5], mask=strobe.causal, layout="bhsd")
    torch.testing.assert_close(found, wanted)
    three_axes = strobe.probabilities(q[0], k[0], rows=[1, 5], mask=strobe.causal, layout="bshd")
    torch.testing.assert_close(three_axes, wanted[0])
    one = strobe.probabilities(q[0, :, 0], k[0, :, 0], rows=[1, 5], mask=strobe.causal)
    torch.testing.assert_close(one, wanted[0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor) -> None:
    """Computed from the rounded inputs, and not rounded again."""
    found = strobe.probabilities(q.to(dtype), k.to(dtype), mask=strobe.causal, rows=slice(3, 6))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide = strobe.probabilities(q.to(dtype).float(), k.to(dtype).float(), mask=strobe.causal, rows=slice(3, 6))
    torch.testing.assert_close(found.float(), wide)


def test_autocast_casts_as_attention_does(q: torch.Tensor, k: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = strobe.probabilities(q, k)
    torch.testing.assert_close(found, strobe.probabilities(q.bfloat16(), k.bfloat16()))


def test_gradients(q: torch.Tensor, k: torch.Tensor) -> None:
    q, k = q.double().requires_grad_(), k.double().requires_grad_()
    found = strobe.probabilities(q, k, rows=slice(2, 5), mask=strobe.causal)
    (found[..., 3] * 2).sum().backward()
    got = q.grad, k.grad
    q.grad = k.grad = None
    (of_attention(q, k, mask=strobe.causal)[:, :, 2:5, 3] * 2).sum().backward()
    for mine, whole in zip(got, (q.grad, k.grad), strict=True):
        torch.testing.assert_close(mine, whole)


def test_memory_grows_with_rows() -> None:
    n = 4096
    q, k = torch.randn(1, n, 1, 16), torch.randn(1, n, 1, 16)
    _, few = with_peak_memory(lambda: strobe.probabilities(q, k, rows=slice(100, 116), mask=strobe.causal), q.device)
    assert few < 20 * 16 * n * 4 + 8 * n * 16 * 4, (
        few
    )  # some copies of the rows, and of the keys; the matrix has 64 MiB


def test_it_works_inside_a_compiled_function(q: torch.Tensor, k: torch.Tensor) -> None:
    compiled = torch.compile(lambda q, k: strobe.probabilities(q, k, rows=3) * 2, backend="eager")
    torch.testing.assert_close(compiled(q, k), strobe.probabilities(q, k, rows=3) * 2)


def test_no_rows_and_no_keys(q: torch.Tensor, k: torch.Tensor) -> None:
    assert strobe.probabilities(q, k, rows=slice(5, 5)).shape == (BATCH, HEADS, 0, LEN_K)
    assert strobe.probabilities(q, k, rows=[]).shape == (BATCH, HEADS, 0, LEN_K)
    assert strobe.probabilities(q, k[:, :0]).shape == (BATCH, HEADS, LEN_Q, 0)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"rows": 20}, IndexError, "rows must be from -20 to 19"),
        ({"rows": [1, -21]}, IndexError, "got -21"),
        ({"rows": 1.5}, TypeError, "rows must be a slice, an index"),
        ({"rows": torch.ones(3, dtype=torch.bool)}, TypeError, "integers"),
        ({"causal": True}, TypeError, "use mask=strobe.causal"),
        ({"bias": torch.zeros(3, 3)}, ValueError, "bias has shape (3, 3)"),
        ({"mask": torch.zeros(20, 33)}, TypeError, "a mask tensor must be boolean"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have shape (heads,) = (4,)"),
        ({"layout": "sbhd"}, ValueError, "layout"),
    ],
)
def test_errors_are_attentions(wrong: dict[str, Any], error: type, says: str, q: torch.Tensor, k: torch.Tensor) -> None:
    with pytest.raises(error) as raised:
        strobe.probabilities(q, k, **wrong)
    assert says in str(raised.value)


def test_head_dims_must_agree(q: torch.Tensor, k: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="dim"):
        strobe.probabilities(q, k[..., :4])
    with pytest.raises(TypeError, match="k must be a torch.Tensor"):
        strobe.probabilities(q, None)  # type: ignore[arg-type]
