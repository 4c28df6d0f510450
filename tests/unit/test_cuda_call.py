"""What a call on a GPU does before the driver sees it, with the driver replaced: arguments, tensor maps, counters,
reuse."""

from __future__ import annotations

import struct
from typing import Any

import fake_driver
import pytest
import torch
from fake_driver import Kernel, Recorder

import strobe
from strobe.cuda import backend, driver
from strobe.cuda.plan import PART_COUNTERS, POINTERS, plan_sm80, plan_sm90
from strobe.problem import check


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(backend, "kernel", lambda variant: Kernel())
    monkeypatch.setattr(backend, "_counter", lambda device, stream: (4096 + stream, None))


def call_of(kernel: str) -> tuple[backend.Call, Any]:
    q, k = torch.empty(2, 150, 4, 64, dtype=torch.bfloat16), torch.empty(2, 130, 2, 64, dtype=torch.bfloat16)
    problem, _ = check(q, k, k, mask=strobe.causal, scale=0.5)
    strides = (150 * 4 * 64, 64, 4 * 64)
    plan = plan_sm90(problem, strides, 132) if kernel == "sm90" else plan_sm80(problem, "sm_90", strides)
    return backend.Call(plan, 0), plan


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_a_launch_sends_the_addresses_of_this_call(kernel: str, no_driver: None) -> None:
    call, plan = call_of(kernel)
    (launch,) = Recorder.made
    assert (launch.grid, launch.threads, launch.smem) == (plan.grid, plan.variant.threads, plan.variant.smem)
    offsets = plan.variant.params.offsets
    for base in (1 << 20, 1 << 24):
        addresses = tuple(base + 256 * i for i in range(8))
        call(*addresses)
        stream, sent = launch.sent[-1]
        assert stream == 77
        found = {name: struct.unpack_from("<Q", sent, offsets[name])[0] for name in POINTERS}
        assert found == dict(zip(POINTERS, (*addresses, 4096 + 77 if kernel == "sm90" else 0, 0), strict=True))
        if kernel == "sm90":
            maps = [struct.unpack_from("<Q", sent, offsets[f"map_{t}"])[0] for t in "qkvo"]
            assert maps == list(addresses[:4])


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_the_rest_of_the_arguments_stays(kernel: str, no_driver: None) -> None:
    call, plan = call_of(kernel)
    call(*range(256, 256 * 9, 256))
    _, sent = Recorder.made[0].sent[0]
    offsets = plan.variant.params.offsets
    for name, expected in (("len_q", 150), ("len_k", 130), ("heads", 4), ("group", 2), ("tiles", plan.values["tiles"])):
        assert struct.unpack_from("<i", sent, offsets[name])[0] == expected
    assert struct.unpack_from("<3q", sent, offsets["q_batch"]) == (150 * 4 * 64, 64, 4 * 64)


def test_counters_belong_to_streams_and_graphs_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    size, capture = 4 * (1 + PART_COUNTERS), 0  # the capture that is under way; 0: none
    empty, zeroed, allocated = torch.empty, [], []
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    monkeypatch.setattr(driver, "allocate", lambda size: allocated.append(size) or (1 << 30) * len(allocated))
    monkeypatch.setattr(driver, "zero", lambda address, size, stream: zeroed.append((address, size, stream)))
    monkeypatch.setattr(driver, "capture_id", lambda stream: capture)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capture > 0, raising=False)
    monkeypatch.setattr(backend, "_counters", {})
    monkeypatch.setattr(backend, "_spare", {})
    monkeypatch.setattr(backend, "_RESERVE", 4)
    found = {}
    for capture, stream in ((0, 1), (0, 2), (0, 1), (5, 1), (5, 1), (6, 1), (6, 1), (0, 1), (6, 1)):  # noqa: B007
        address, alive = backend._counter(0, stream)
        assert alive is None and found.setdefault((capture, stream), address) == address
    assert len(set(found.values())) == 4 and allocated == [4 * size]
    assert zeroed == [
        (address, size, stream) for (_, stream), address in found.items()
    ]  # once, where it was first used
    assert all(1 << 30 <= address <= (1 << 30) + 3 * size for address in found.values())

    capture = 7  # the reserve is used up, and nothing can be allocated now: memory of the graph's own, for one launch
    address, alive = backend._counter(0, 1)
    assert (
        alive is not None and alive.data_ptr() == address and alive.nbytes == size and zeroed[-1] == (address, size, 1)
    )
    assert backend._counter(0, 1)[1] is not None and allocated == [4 * size]
    capture = 0
    assert backend._counter(0, 3)[0] >= 2 << 30 and backend._counter(1, 1)[0] >= 3 << 30  # a new reserve; another GPU's
