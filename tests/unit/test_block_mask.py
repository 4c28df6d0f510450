"""A block mask is its function to every backend, for calls of the lengths that it was made for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import strobe

IDS = torch.arange(24) // 10
q, k, v = torch.randn(3, 2, 24, 4, 16, generator=torch.Generator().manual_seed(0))


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (IDS[q] == IDS[k])


def made(**given: Any) -> Any:
    sizes = {"batch": None, "heads": None, "len_q": 24, "len_k": 24} | given
    return strobe.block_mask(documents, *sizes.values())


def test_it_is_its_function() -> None:
    expected = strobe.attention(q, k, v, mask=documents)
    for mask in (made(), made(batch=2, heads=4), copy.deepcopy(made()), pickle.loads(pickle.dumps(made()))):
        for backend in ("tiled", "reference", None):
            torch.testing.assert_close(strobe.attention(q, k, v, mask=mask, backend=backend), expected)
    compiled = torch.compile(lambda q: strobe.attention(q, k, v, mask=made_before), fullgraph=True, backend="eager")
    made_before = made()
    torch.testing.assert_close(compiled(q), expected)
    assert repr(made_before) == "strobe.block_mask(documents, None, None, 24, 24)"


def test_with_a_score_and_gradients() -> None:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    results = []
    for mask in (documents, made()):
        out = strobe.attention(*leaves, mask=mask, score=lambda s, b, h, q, k: s - 0.1 * (q - k))
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_masks_of_ours() -> None:
    mask = strobe.block_mask(strobe.causal & strobe.documents(IDS), None, None, 24, 24)
    torch.testing.assert_close(
        strobe.attention(q, k, v, mask=mask), strobe.attention(q, k, v, mask=strobe.causal & strobe.documents(IDS))
    )
    mask = strobe.block_mask(strobe.causal, None, None, 24, 24)
    torch.testing.assert_close(strobe.attention(q, k, v, mask=mask), strobe.attention(q, k, v, mask=strobe.causal))


def test_it_holds_what_the_tensors_were() -> None:
    ids = IDS.clone()
    mask = strobe.block_mask(strobe.documents(ids), 2, None, 24, 24)
    expected = strobe.attention(q, k, v, mask=mask)
    ids.zero_()
    assert torch.equal(strobe.attention(q, k, v, mask=mask), expected)


@pytest.mark.parametrize("sizes", [{"len_q": 23}, {"len_k": 30}, {"batch": 3}, {"heads": 2}])
def test_other_sizes(sizes: dict[str, int]) -> None:
    (name, size), given = next(iter(sizes.items())), {"batch": 2, "heads": 4, "len_q": 24, "len_k": 24}
    strobe.attention(q, k, v, mask=made())
    with pytest.raises(ValueError, match=f"{name} {size}, the call has {given[name]}"):
        strobe.attention(q, k, v, mask=made(**sizes))
    with pytest.raises(ValueError, match=f"{name} {size}, the call has {given[name]}"):
        strobe.attention(*(t.transpose(1, 2) for t in (q, k, v)), layout="bhsd", mask=made(**sizes))


def test_refused() -> None:
    for combine in (lambda m: strobe.causal & m, lambda m: m | strobe.causal, lambda m: ~m):
        with pytest.raises(TypeError, match="combine first"):
            combine(made())
    with pytest.raises(ValueError, match="heads is None, but the function depends on h"):
        strobe.block_mask(lambda b, h, q, k: (q + k) % (h + 2) > 0, 2, None, 24, 24)
    for sizes in ((0, 1, 24, 24), (1, True, 24, 24), (1, 1, None, 24), (1, 1, 24, 2.0)):
        with pytest.raises(ValueError, match="must be"):
            strobe.block_mask(documents, *sizes)
    with pytest.raises(TypeError, match="a function"):
        strobe.block_mask(IDS, 2, 4, 24, 24)
    cu = torch.tensor([0, 24], dtype=torch.int32)
    with pytest.raises(ValueError, match="sequences of different lengths"):
        strobe.attention_varlen(q[0], k[0], v[0], cu, cu, mask=made())
