"""`strobe.paged.append` and `strobe.merge` do their work on a GPU before the driver sees it; here the driver is
replaced."""

from __future__ import annotations

import struct
import threading
from typing import Any

import fake_driver
import pytest
import torch
from fake_driver import Kernel, Recorder
from fake_gpu import H200
from paged_cases import pool, queries

import strobe
from strobe import merging
from strobe.cuda import append, launch as launching, merge, small_calls
from strobe.merging import merged
from strobe.nn.rotary import angles
from strobe.paged import Rotary, attention


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(launching, "kernel", lambda spec: Kernel())
    monkeypatch.setattr(launching, "compile_together", lambda specs: None)
    monkeypatch.setattr(small_calls, "missing", lambda device, architecture: None)
    monkeypatch.setattr(small_calls, "machine_of", lambda device: H200)
    for module in (append, merge):
        monkeypatch.setattr(module, "_launchers", small_calls.Launchers())


def new_keys(rows: int = 3) -> list[torch.Tensor]:
    """k_new, v_new, k, v, slots."""
    return [*torch.zeros(2, rows, 2, 16).half(), *torch.zeros(2, 5, 4, 2, 16).half(), torch.arange(rows)]


def states(parts: int = 2, rows: int = 5) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.randn(2, rows, 3, 16) for _ in range(parts)], [torch.randn(2, 3, rows) for _ in range(parts)]


def sent(kernel: Any, *names: str) -> list[int]:
    _, bytes_ = Recorder.made[-1].sent[-1]
    return [struct.unpack_from("<Q", bytes_, kernel.params.offsets[name])[0] for name in names]


def test_addresses_of_this_call_are_sent() -> None:
    rotary = Rotary(*angles(torch.arange(9), 16), torch.arange(3))
    for _ in range(2):
        x = new_keys()
        assert append.append(*x, rotary)
        plan = append.plan(*x, rotary, H200.arch)
        assert plan is not None
        wanted = [t.data_ptr() for t in (*x, *rotary[:3])]
        assert sent(plan.launches[0].kernel, *append.NAMES) == wanted
    (launch,) = Recorder.made  # made once, launched twice
    assert len(launch.sent) == 2
    outs, lses = states()
    for sinks in (None, torch.zeros(3)):
        found = merge.merge(outs, lses, sinks, None)
        assert found is not None
        plan = merge.plan(outs, lses, sinks, *found, H200.arch)
        assert plan is not None
        tensors = (*outs, *lses, *found, *(() if sinks is None else (sinks,)))
        addresses = sent(plan.launches[0].kernel, *merge.names(2, sinks is not None))
        assert addresses == [t.data_ptr() for t in tensors]


def test_other_facts_make_another_launch() -> None:
    calls = [new_keys(), new_keys(4), [*new_keys()[:4], torch.arange(3).int()]]
    for x in calls:
        assert append.append(*x, None)
    assert len(Recorder.made) == 3
    assert all(append.append(*x, None) for x in calls) and len(Recorder.made) == 3


def test_unaligned_addresses_are_refused() -> None:
    x = new_keys()
    odd = torch.zeros(3 * 2 * 16 + 1).half()[1:].view(3, 2, 16)
    assert append.append(*x, None) and not append.append(odd, *x[1:], None)
    outs, lses = states()
    odd = torch.zeros(2 * 5 * 3 * 16 + 1)[1:].view(2, 5, 3, 16)
    assert merge.merge(outs, lses, None, None) is not None and merge.merge([odd, outs[1]], lses, None, None) is None


def test_pools_and_outputs_in_one_place_are_refused() -> None:
    """Nobody would know which write is the last."""
    k_new, v_new, k, v, slots = new_keys()
    assert not append.append(k_new, v_new[..., :8], k, k[..., :8], slots, None)
    assert not append.append(k_new, v_new[..., :8], k, k[..., 8:], slots, None)
    assert append.append(k_new, v_new, *torch.stack((k, v), 2).unbind(2), slots, None)
    outs, lses = states()
    assert merge.merge(outs, lses, None, outs[1]) is None


def test_tensors_of_other_kinds_are_refused() -> None:
    class Other(torch.Tensor):
        pass

    x = new_keys()
    assert not append.append(x[0].as_subclass(Other), *x[1:], None)
    outs, lses = states()
    assert merge.merge([outs[0].as_subclass(Other), outs[1]], lses, None, None) is None


def test_kernels_that_differ_are_not_taken_for_one_another() -> None:
    """Some differ in the types of their arguments alone."""
    x, kernels = new_keys(), []
    at, tables = x[4], [torch.zeros(9, 8), torch.zeros(9, 8).half()]
    turns = [None, *(Rotary(t, t, a, i) for t in tables for i in (False, True) for a in (at, at.int()))]
    for slots in (at, at.int()):
        kernels += [append.plan(*x[:4], slots, turn, "sm_80") for turn in turns]
    outs, lses = states()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for sinks in (None, *(torch.zeros(3, dtype=d) for d in (torch.float32, torch.float16, torch.bfloat16))):
            for out in (torch.float32, torch.float16, torch.bfloat16):
                parts = [t.to(dtype) for t in outs]
                kernels.append(merge.plan(parts, lses, sinks, outs[0].to(out), lses[0], "sm_80"))
    specs = [plan.launches[0].kernel for plan in kernels if plan is not None]
    assert len(specs) == len(kernels) == len(set(specs)) == len({spec.source for spec in specs})


def test_launchers_are_few_and_belong_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_calls, "_MOST", 3)
    for rows in range(1, 10):
        assert append.append(*new_keys(rows), None)
        assert len(append._launchers._made) <= 3
    made = len(Recorder.made)
    other = threading.Thread(target=lambda: append.append(*new_keys(9), None))
    other.start()
    other.join()
    assert len(Recorder.made) == made + 1


@pytest.mark.parametrize(
    "shape, strides, found",
    [
        ((4, 3), [(6, 2), (3, 1)], (12, [(0, 2), (0, 1)])),
        ((4, 3), [(6, 2), (9, 1)], (3, [(6, 2), (9, 1)])),
        ((4, 1, 3), [(6, 99, 2), (9, 0, 1)], (3, [(6, 2), (9, 1)])),
        ((2, 4, 3), [(24, 6, 2), (0, 3, 1)], (12, [(24, 2), (0, 1)])),
        ((2, 4, 3), [(24, 6, 2), (1, 5, 20)], None),
        ((1, 1), [(7, 7)], (1, [(0, 0)])),
    ],
)
def test_axes_in_common(shape: Any, strides: Any, found: Any) -> None:
    assert small_calls.two_axes(shape, strides) == found


@pytest.mark.parametrize("packed", [True, False])
def test_a_cascade_takes_the_kernel(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are views, of which nothing has to be copied."""
    p = pool([13, 16, 5], 8, dim=16, dim_v=16, dtype=torch.bfloat16)
    q, cu = queries([2, 2, 2], dim=16, dtype=torch.bfloat16)
    level = strobe.paged.Level(p.table[:1, :1], torch.tensor([8]).int(), torch.tensor([0, 6]).int())
    taken = []

    def seen(outs: Any, lses: Any, *, sinks: Any, out: Any) -> Any:
        taken.append(merge.merge(outs, lses, sinks, out))
        return merged(outs, lses, sinks, out)

    monkeypatch.setattr(attention, "merge", seen)
    sinks = torch.zeros(q.shape[-2])
    more = (cu,) if packed else ()
    q = q if packed else q.unflatten(0, (3, 2))
    strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, *more, shared=[level], sinks=sinks)
    assert taken[0] is not None


def test_stacked_parts_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = states(3)
    found = merging.merge(torch.stack(outs), torch.stack(lses))
    for a, b in zip(found, merged(outs, lses, None, None), strict=True):
        assert torch.equal(a, b)
