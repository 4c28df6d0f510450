"""The one cache: calls that look alike share what is bound, calls that differ in anything that counts do not."""

from __future__ import annotations

import itertools
import threading
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import strobe
from strobe.call import bound_call
from strobe.problem.arguments import Arguments, tensors_of, with_tensors, without_tensors
from strobe.variants.score import softcap

q = torch.randn(2, 20, 4, 8)
BASE: dict[str, Any] = {"q": q, "k": q, "v": q}
CHANGES: dict[str, dict[str, Any]] = {
    "shape": {"q": torch.randn(2, 21, 4, 8)},
    **{f"strides of {name}": {name: torch.randn(2, 4, 20, 8).transpose(1, 2)} for name in "qkv"},
    "shape of v": {"v": torch.randn(2, 20, 4, 16)},
    "dtype": {"q": q.double(), "k": q.double(), "v": q.double()},
    "needs gradients": {"v": q.clone().requires_grad_()},
    "mask": {"mask": strobe.causal},
    "mask tensor": {"mask": torch.ones(20, 20, dtype=torch.bool)},
    "mask tensor of another shape": {"mask": torch.ones(1, 20, dtype=torch.bool)},
    "scale": {"scale": 0.5},
    "softcap": {"score": softcap(2.0)},
    "score": {"score": strobe.alibi(torch.ones(4))},
    "bias": {"bias": torch.zeros(20, 20)},
    "dropout": {"dropout": 0.5, "seed": 1},
    "sinks": {"sinks": torch.zeros(4)},
    "sinks of another dtype": {"sinks": torch.zeros(4, dtype=torch.float64)},
    "layout": {"layout": "bhsd"},
    "out": {"out": torch.empty_like(q)},
    "out with other strides": {"out": torch.empty(2, 4, 20, 8).transpose(1, 2)},
    "lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "backend": {"backend": "tiled"},
    "partial": {"partial": True, "sinks": torch.zeros(4)},
    "partial with out": {"partial": True, "out": torch.empty_like(q)},
    "earlier LSE": {"partial": True, "out": torch.empty_like(q), "state_lse": torch.zeros(2, 4, 20)},
    "earlier LSE with other strides": {
        "partial": True,
        "out": torch.empty_like(q),
        "state_lse": torch.zeros(2, 4, 30)[..., :20],
    },
    "earlier output": {
        "out": torch.empty_like(q),
        "state_out": torch.empty_like(q),
        "state_lse": torch.zeros(2, 4, 20),
    },
    "earlier output with other strides": {
        "out": torch.empty_like(q),
        "state_out": torch.empty(2, 30, 4, 8)[:, :20],
        "state_lse": torch.zeros(2, 4, 20),
    },
}


def test_every_difference_counts() -> None:
    signatures = {name: bound_call.signature(Arguments(**(BASE | change))) for name, change in CHANGES.items()}
    signatures["nothing"] = bound_call.signature(Arguments(**BASE))
    assert None not in signatures.values() and len(set(signatures.values())) == len(signatures)


@pytest.mark.parametrize("name", ["nothing", *(name for name in CHANGES if "earlier" not in name)])  # no backend here
def test_an_equal_looking_call_is_found_again(name: str) -> None:
    def fresh() -> Arguments:
        def copied(t: Any) -> Any:
            return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

        return Arguments(**{key: copied(value) for key, value in (BASE | CHANGES.get(name, {})).items()})

    assert bound_call.lookup(fresh()) is bound_call.lookup(fresh())


def test_varlen_calls_are_remembered_by_their_longest_sequences() -> None:
    cu = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 20], [0, 15, 20], [0, 6, 20])]
    made = [
        bound_call.signature(Arguments(q[0], q[0], q[0], c, c, n, n)) for c, n in zip(cu, (15, 15, 14), strict=True)
    ]
    assert made[0] == made[1] != made[2]
    results = [strobe.attention_varlen(q[0], q[0], q[0], c, c) for c in cu]
    assert not torch.equal(results[0], results[1])  # contents are inputs


def test_it_counts_which_tensor_is_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on a GPU copies that one, and a plan has the strides of the copy."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as if it were memory of a GPU
    moved = torch.zeros(2, 20, 4, 24)[..., 1:9]
    plain = torch.zeros(2, 20, 4, 24)[..., 4:12]
    assert moved.data_ptr() % 16 and not plain.data_ptr() % 16 and moved.stride() == plain.stride()
    kinds = list(itertools.product((plain, moved), repeat=3))
    signatures = [bound_call.signature(Arguments(*qkv)) for qkv in kinds]
    assert None not in signatures and len(set(signatures)) == len(kinds)


@pytest.mark.parametrize("kind", [Decimal, complex, np.bool_, bool])
@pytest.mark.parametrize(("name", "value"), [("scale", 1.0), ("softcap", 1.0), ("dropout", 0.0)])
def test_numbers_of_other_classes_are_checked_although_they_are_equal(name: str, value: float, kind: Any) -> None:
    strobe.attention(q, q, q, **{name: value})
    assert kind(value) == value
    with pytest.raises(TypeError, match=f"{name} must be a number"):
        strobe.attention(q, q, q, **{name: kind(value)})


def test_what_cannot_be_hashed_or_has_no_strides_gets_the_errors_of_the_checks() -> None:
    for arguments, message in (
        ({"mask": [1, 2]}, "mask must be"),
        ({"scale": [1.0]}, "scale must be a number"),
        ({"k": q.to_sparse()}, "k must be a dense"),
        ({"v": None}, "v must be a torch.Tensor"),
    ):
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                strobe.attention(**(BASE | arguments))


def test_threads_do_not_share_bound_calls() -> None:
    """They hold launch buffers that are written at each call."""
    a, found = Arguments(**BASE), []
    thread = threading.Thread(target=lambda: found.append(bound_call.lookup(a)))
    thread.start()
    thread.join()
    assert found[0] is not bound_call.lookup(a)


def test_the_cache_does_not_grow_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_call, "_MOST", 3)
    for n in range(1, 9):
        strobe.attention(*torch.randn(3, 1, n, 1, 8))
    assert 0 < len(bound_call.remembered.calls) <= 3


def test_a_mask_of_a_class_of_the_users_is_not_kept() -> None:
    class Named(torch.Tensor):
        pass

    before = len(bound_call.remembered.calls)
    for _ in range(3):
        strobe.attention(q, q, q, mask=torch.ones(20, 20, dtype=torch.bool).as_subclass(Named))
    assert len(bound_call.remembered.calls) == before


def test_tensors_of_a_call_are_not_kept() -> None:
    import gc
    import weakref

    mask = torch.ones(20, 20, dtype=torch.bool)
    x = q.clone().requires_grad_()
    out = strobe.attention(x, x, x, mask=mask, score=strobe.alibi(torch.ones(4)))
    kept = [weakref.ref(t) for t in (mask, x)]
    del out, x, mask
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize(
    "change, count",
    [
        ({}, 3),
        ({"mask": strobe.causal, "score": softcap(2.0), "dropout": 0.5}, 3),
        ({"bias": torch.zeros(20, 20)}, 9),
        ({"sinks": torch.zeros(4)}, 9),
        ({"mask": torch.ones(20, 20, dtype=torch.bool)}, 9),
        ({"cu_q": torch.tensor([0, 20]), "cu_k": torch.tensor([0, 20]), "max_q": 20, "max_k": 20}, 9),
        ({"score": strobe.alibi(torch.ones(4))}, 10),
    ],
    ids=str,
)
def test_arguments_are_made_of_their_tensors_again(change: dict[str, Any], count: int) -> None:
    a = Arguments(**{**BASE, **change}, return_lse=True)
    tensors = tensors_of(a)
    assert len(tensors) == count
    again = with_tensors(without_tensors(a), 7, tensors)
    for name, value in a._asdict().items():
        found = getattr(again, name)
        assert found is value or name == "seed" or (not isinstance(value, torch.Tensor) and found == value)
    assert again.seed == 7


@pytest.mark.parametrize("seed, sinks", [(None, None), (7, None), (None, torch.zeros(4))])
def test_a_bound_call_knows_its_arguments_but_the_tensors(seed: int | None, sinks: torch.Tensor | None) -> None:
    """A caller may have passed arguments for results or not: a backward pass has an LSE, and no `out`."""
    a = Arguments(**BASE, mask=strobe.causal, scale=0.25, sinks=sinks, dropout=0.5 if seed else 0.0, seed=seed)
    for passed in (a, a._replace(out=torch.empty_like(a.q), return_lse=True)):
        found = bound_call.bind(passed).arguments(seed, tensors_of(a))
        assert type(found) is Arguments
        for name, value, expected in zip(a._fields, found, a._replace(return_lse=True), strict=True):
            assert value is expected or value == expected, name
