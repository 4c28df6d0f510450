"""A call on a GPU does its own work before the driver sees it: arguments, tensor maps, counters, reuse. Here the driver
is replaced."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import fake_driver
import pytest
import torch
from fake_driver import Kernel, Recorder
from fake_gpu import H200
from oracle import check

import strobe
from strobe.call.bound_call import bind
from strobe.cuda import backend as cuda_backend, launch as launching
from strobe.cuda.launch import Launcher
from strobe.cuda.parts.element import BF16
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.params import COUNTERS
from strobe.cuda.parts.plan import Plan
from strobe.cuda.parts.scores import Scores
from strobe.cuda.plans import backward_sm90, forward_sm80, forward_sm90, forward_wide_sm90
from strobe.cuda.plans.backward_plan import group_parts
from strobe.cuda.runtime import driver
from strobe.problem import Problem, supposed
from strobe.problem.arguments import Arguments
from strobe.problem.resolve import resolved


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(launching, "kernel", lambda spec: Kernel())
    monkeypatch.setattr(launching, "compile_together", lambda specs: None)
    monkeypatch.setattr(launching, "zeros", lambda device, stream: (4096 + stream, None))


def call_of(kernel: str) -> tuple[Launcher, Plan]:
    q, k = torch.empty(2, 150, 4, 64, dtype=torch.bfloat16), torch.empty(2, 130, 2, 64, dtype=torch.bfloat16)
    problem, _ = check(q, k, k, mask=strobe.causal, scale=0.5)
    plan = {"sm80": forward_sm80, "sm90": forward_sm90}[kernel].plan(problem, {"o": (150 * 4 * 64, 64, 4 * 64)}, H200)
    return Launcher(plan, 0), plan


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two compilations wait for each other: one behind the other they would wait for ever."""
    both, seen = threading.Barrier(2, timeout=30), []

    def compile(source: str, arch: str, name: str) -> None:
        both.wait()
        seen.append(name)

    monkeypatch.setattr(launching.jit, "get", compile)
    features = [Features(BF16, dim, dim, Scores()) for dim in (64, 128)]
    first, second = (
        forward_sm90.kernel(f, forward_sm90.choose_tile(f), split=False, pack_gqa=1, one_box=True) for f in features
    )
    launching.compile_together([first, second, first])
    assert sorted(seen) == sorted([first.name, second.name])


@pytest.mark.parametrize("kernel, first_word", [("sm80", None), ("sm90", True), ("sm90", False)])
def test_a_launch_sends_the_addresses_of_this_call(kernel, first_word, no_driver, monkeypatch) -> None:
    """Tensor maps have to be moved by the driver, or not; None: there are none, and it is not asked."""
    asked: list[str] = []
    monkeypatch.setattr(driver, "address_is_first_word", lambda: asked.append(kernel) or first_word)
    call, plan = call_of(kernel)
    assert bool(asked) == (first_word is not None)
    (launch,), (planned,) = Recorder.made, plan.launches
    spec = planned.kernel
    assert (launch.grid, launch.threads, launch.smem) == (planned.grid, spec.threads, spec.smem)
    offsets = spec.params.offsets
    pointers = [f.name for f in spec.params.fields if f.ctype.endswith("*")]
    for base in (1 << 20, 1 << 24):
        addresses = {name: base + 256 * i for i, name in enumerate(plan.tensors)}
        call(*addresses.values())
        stream, sent = launch.sent[-1]
        assert stream == 77
        found = {name: struct.unpack_from("<Q", sent, offsets[name])[0] for name in pointers}
        assert found == {name: addresses.get(name, 4096 + 77 if name == "counter" else 0) for name in pointers}
        if kernel == "sm90":
            maps = {t: struct.unpack_from("<Q", sent, offsets[f"map_{t}"])[0] for t in "qkvo"}
            assert maps == {t: addresses[t] for t in "qkvo"}


@pytest.mark.parametrize("first_word", [True, False])
def test_launches_of_column_parts_begin_further_on(first_word: bool, no_driver: None, monkeypatch) -> None:
    monkeypatch.setattr(driver, "address_is_first_word", lambda: first_word)
    x = torch.empty(1, 150, 4, 512, dtype=torch.bfloat16)
    problem, _ = check(x, x, x, mask=strobe.causal)
    plan = forward_wide_sm90.plan(problem, {"o": (150 * 4 * 512, 512, 4 * 512)}, H200)
    call = Launcher(plan, 0)
    for base in (1 << 20, 1 << 24):
        addresses = {name: base + (i << 14) for i, name in enumerate(plan.tensors)}
        call(*addresses.values())
        for part, (planned, launch) in enumerate(zip(plan.launches, Recorder.made, strict=True)):
            offsets = planned.kernel.params.offsets
            for name in "qkvo":
                moved = addresses[name] + (512 * part if name in "vo" else 0)
                for field in (name, f"map_{name}"):
                    assert struct.unpack_from("<Q", launch.sent[-1][1], offsets[field])[0] == moved, (part, field)


def test_parts_of_the_workspace_do_not_overlap(no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has its own bytes of what was allocated, and all launches agree where they are."""
    plans: list[Plan] = []
    monkeypatch.setattr(cuda_backend, "machine_of", lambda device: H200)
    monkeypatch.setattr(cuda_backend, "Launcher", lambda plan, *rest: plans.append(plan) or Launcher(plan, *rest))
    guards, allocated = torch._C._dynamo.guards, []
    empty = guards._empty_strided_cpu
    monkeypatch.setattr(guards, "_empty_strided_cuda", lambda *x: allocated.append(empty(*x)) or allocated[-1])
    q = torch.randn(2, 1100, 4, 64).bfloat16()
    a = Arguments(q, q, q)
    problem, layout = Problem.of(a, needs_grad=True)
    backward = cuda_backend._bind_backward(backward_sm90.plan, problem.backward(("q", "k", "v")), layout)
    backward.run(a, q, torch.zeros(2, 4, 1100), q, None)
    (plan,), (workspace,) = plans, [t for t in allocated if t.dtype == torch.uint8]
    found: dict[str, set[int]] = {name: set() for name in plan.workspace}
    for planned, launch in zip(plan.launches, Recorder.made, strict=True):
        offsets = planned.kernel.params.offsets
        for name in offsets.keys() & found.keys():
            found[name].add(struct.unpack_from("<Q", launch.sent[-1][1], offsets[name])[0])
    parts = sorted((address, plan.workspace[name]) for name, addresses in found.items() for address in addresses)
    assert len(parts) == len(plan.workspace) > 1 and parts[0][0] == workspace.data_ptr()
    ends = [address + size for address, size in parts]
    assert all(end <= address for end, (address, _) in zip(ends, parts[1:], strict=False))
    assert ends[-1] <= workspace.data_ptr() + workspace.numel()


def test_a_map_of_blocks_is_kept(no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map of a block mask is kept, and its launch is left out; not while a graph is captured, when nothing runs."""
    guards, capturing = torch._C._dynamo.guards, True
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    q = torch.empty(2, 2048, 4, 64, dtype=torch.bfloat16)
    mask = strobe.block_mask(lambda b, h, q, k: (q + k) % 7 < 3, None, None, 2048, 2048)
    problem, _ = Problem.of(resolved(Arguments(q, q, q, mask=mask)))
    plan = forward_sm90.plan(problem, {"o": (2048 * 4 * 64, 64, 4 * 64)}, H200)
    call = Launcher(plan, 0)
    (of_map, main), addresses = Recorder.made, range(256, 256 * (len(plan.tensors) + 1), 256)
    for capturing, kept, counts in ((True, 0, (1, 1)), (False, 1, (2, 2)), (False, 1, (2, 3)), (True, 1, (2, 4))):  # noqa: B007
        call(*addresses, blocks=mask)
        assert (len(of_map.sent), len(main.sent)) == counts and len(mask.maps) == kept
    call(*addresses)
    assert (len(of_map.sent), len(main.sent)) == (3, 5)
    (found,) = mask.maps.values()
    for launch, planned, calls in zip((of_map, main), plan.launches, ((1,), (1, 2, 3)), strict=True):
        offset = planned.kernel.params.offsets["block_map"]
        sent = {struct.unpack_from("<Q", launch.sent[i][1], offset)[0] for i in calls}
        assert sent == {found.bits.data_ptr()}


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_the_rest_of_the_arguments_stays(kernel: str, no_driver: None) -> None:
    call, plan = call_of(kernel)
    call(*range(256, 256 * (len(plan.tensors) + 1), 256))
    _, sent = Recorder.made[0].sent[0]
    (planned,) = plan.launches
    offsets, tiles = planned.kernel.params.offsets, planned.values["tiles"]
    for name, expected in (("len_q", 150), ("len_k", 130), ("heads", 4), ("group", 2), ("tiles", tiles)):
        assert struct.unpack_from("<i", sent, offsets[name])[0] == expected
    assert struct.unpack_from("<3q", sent, offsets["q_batch"]) == (150 * 4 * 64, 64, 4 * 64)


def test_counters_belong_to_streams_and_graphs_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    size, capture = 4 * COUNTERS, 0  # the capture that is under way; 0: none
    empty, zeroed, allocated = torch.empty, [], []
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    monkeypatch.setattr(driver, "allocate", lambda size: allocated.append(size) or (1 << 30) * len(allocated))
    monkeypatch.setattr(driver, "zero", lambda address, size, stream: zeroed.append((address, size, stream)))
    monkeypatch.setattr(driver, "capture_id", lambda stream: capture)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capture > 0, raising=False)
    monkeypatch.setattr(launching, "_zeros", {})
    monkeypatch.setattr(launching, "_spare", {})
    monkeypatch.setattr(launching, "_RESERVE", 4)
    found = {}
    for capture, stream in ((0, 1), (0, 2), (0, 1), (5, 1), (5, 1), (6, 1), (6, 1), (0, 1), (6, 1)):  # noqa: B007
        address, alive = launching.zeros(0, stream)
        assert alive is None and found.setdefault((capture, stream), address) == address
    assert len(set(found.values())) == 4 and allocated == [4 * size]
    assert zeroed == [
        (address, size, stream) for (_, stream), address in found.items()
    ]  # once, where it was first used
    assert all(1 << 30 <= address <= (1 << 30) + 3 * size for address in found.values())

    capture = 7  # the reserve is used up, and nothing can be allocated now: memory of the graph's own, for one launch
    address, alive = launching.zeros(0, 1)
    assert (
        alive is not None and alive.data_ptr() == address and alive.nbytes == size and zeroed[-1] == (address, size, 1)
    )
    assert launching.zeros(0, 1)[1] is not None and allocated == [4 * size]
    capture = 0
    assert launching.zeros(0, 3)[0] >= 2 << 30 and launching.zeros(1, 1)[0] >= 3 << 30  # a new reserve; another GPU's


@pytest.mark.parametrize("invariant", [False, True])
def test_layers_share_a_list_of_work(invariant: bool, no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer fills it, from whole tensors; later steps fill it in `update`. A plan is not kept by the calls."""
    monkeypatch.setattr(cuda_backend, "machine_of", lambda device: H200)
    pool, q = torch.empty(40, 16, 2, 64).bfloat16(), torch.empty(3, 1, 8, 64).bfloat16()
    lengths, table = torch.arange(1, 7).int().view(3, 2)[:, 0], torch.zeros(3, 12).int()
    a = Arguments(q, pool, pool, mask=strobe.causal, table=table, lengths=lengths, invariant=invariant)
    bound, plan = cuda_backend._bind_forward(forward_sm90.plan, *Problem.of(a)), strobe.paged.Plan()
    for step in range(2):
        plan.update(lengths)
        for layer in range(3):
            bound.run(a._replace(plan=plan))
            filling, attention = Recorder.made
            assert (len(filling.sent), len(attention.sent)) == (step + 1, 3 * step + layer + 1)
    (known,) = plan.by_kind.values()
    fields, (_, sent) = forward_sm90.plan(Problem.of(a)[0], {"o": (1, 1, 1)}, H200).launches, filling.sent[-1]
    at = [struct.unpack_from("<Q", sent, fields[0].kernel.params.offsets[name])[0] for name in ("work", "lengths")]
    assert at[0] == known.memory.data_ptr() and at[1] != lengths.data_ptr()
    offsets, (_, sent) = fields[1].kernel.params.offsets, attention.sent[-1]
    at = [struct.unpack_from("<Q", sent, offsets[name])[0] for name in ("work", "partial")]
    assert at == [known.memory.data_ptr(), known.room.data_ptr()]
    alive = weakref.ref(plan)
    del plan, known
    assert alive() is None


class Addresses:
    """A stand-in for a Launcher: it keeps what it was called with."""

    calls: list[dict[str, int]] = []

    def __init__(self, plan: Plan, device: int, names: Sequence[str]) -> None:
        self.names, self.missing = names, dict.fromkeys(plan.tensors, 0)

    def __call__(self, *addresses: int, blocks: None = None) -> None:
        Addresses.calls.append(self.missing | dict(zip(self.names, addresses, strict=True)))


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made for an H200, and `Addresses` keeps them."""
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(cuda_backend, "Launcher", Addresses)
    monkeypatch.setattr(cuda_backend, "machine_of", lambda device: H200)


def planning(kernel: Any) -> tuple[list[Any], Any]:
    """(the plans that were made, what makes them)."""
    plans: list[Any] = []
    return plans, lambda *x: plans.append(kernel.plan(*x)) or plans[-1]


def of_a_step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, keys, and the LSE of rows 40 to 190 of a state."""
    q, k = (torch.randn(2, n, heads, 64).bfloat16() for n, heads in ((150, 4), (130, 2)))
    return q, k, torch.randn(2, 4, 300)[..., 40:190]


def of_a_state(odd: bool) -> torch.Tensor:
    """Its output at those rows. `odd`: not aligned."""
    size = 2 * 300 * 4 * 64
    return torch.randn(size + 1)[int(odd) : size + int(odd)].view(2, 300, 4, 64)[:, 40:190]


@pytest.mark.parametrize("kernel", [forward_sm80, forward_sm90])
def test_a_call_that_merges_sends_the_earlier_result(kernel, addresses) -> None:
    """Rows 40 to 190 of a state: the LSE's strides are those of all rows. Later calls allocate nothing. An `odd` output is
    not aligned and must be copied, there and back."""
    plans, planner = planning(kernel)
    q, k, lse = of_a_step()
    for odd in (False, True):
        out = of_a_state(odd)
        a = Arguments(q, k, k, out=out, partial=True, return_lse=True, state_lse=lse)
        bound = cuda_backend._bind_forward(planner, *Problem.of(a))
        for _ in range(2):
            before = out.clone()
            assert bound.run(a)[0] is out and bound.run(a)[1] is lse
            sent = Addresses.calls[-1]
            assert sent["lse"] == lse.data_ptr() and (sent["o"] == out.data_ptr()) != odd
            assert torch.equal(out, before)  # what was copied is the earlier result
        values = plans[-1].launches[0].values
        assert (values["merge"], values["lse_batch"], values["lse_head"]) == (1, 4 * 300, 300)
    alone = Problem.of(a._replace(out=None, state_lse=None))[0]
    values = kernel.plan(alone, {"o": (150 * 4 * 64, 64, 4 * 64)}, H200).launches[0].values
    assert (values["merge"], values["lse_batch"], values["lse_head"]) == (0, 4 * 150, 150)
    plain = Problem.of(Arguments(q, k, k))[0]
    assert "merge" not in kernel.plan(plain, {"o": (150 * 4 * 64, 64, 256)}, H200).launches[0].values


def test_a_call_that_rounds_what_it_merges_sends_both_outputs(addresses) -> None:
    """An `odd` earlier output is copied, since TMA could not read it."""
    plans, planner = planning(forward_sm90)
    (q, k, lse), out = of_a_step(), torch.empty(2, 150, 4, 64).bfloat16()
    for odd in (False, True):
        earlier = of_a_state(odd)
        a = Arguments(q, k, k, out=out, return_lse=True, state_lse=lse, state_out=earlier)
        bound = cuda_backend._bind_forward(planner, *Problem.of(a))
        for _ in range(2):
            assert bound.run(a)[0] is out and bound.run(a)[1] is lse
            sent = Addresses.calls[-1]
            assert sent["lse"] == lse.data_ptr() and sent["o"] == out.data_ptr()
            assert (sent["state"] == earlier.data_ptr()) != odd
        launch = plans[-1].launches[0]
        assert launch.values["merge"] == 1
        assert launch.maps["state"].strides[-1] == 4 * (150 if odd else 300) * 4 * 64


def test_long_keys_of_few_rows_are_split_and_rounded_afterwards(monkeypatch) -> None:
    """A call that rounds what it merges cannot split its keys: it is offered where none would be."""
    monkeypatch.setattr(cuda_backend, "machine_of", lambda device: H200)
    for rows, rounds_states in ((64, False), (8192, True)):
        q, k = torch.empty(1, rows, 4, 64).bfloat16(), torch.empty(1, 8192, 4, 64).bfloat16()
        problem = Problem.of(Arguments(q, k, k, partial=True))[0]
        assert cuda_backend.BACKENDS["sm90"].rounds_states(problem) == rounds_states
        assert not cuda_backend.BACKENDS["sm80"].rounds_states(problem)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"out": None}, "state_out goes with a rounded out"),
        ({"partial": True, "out": torch.zeros(1, 8, 4, 64)}, "state_out goes with a rounded out"),
        ({"state_out": torch.zeros(1, 9, 4, 64)}, "state_out is torch.float32 of shape"),
        ({"state_out": torch.zeros(1, 8, 4, 64).bfloat16()}, "state_out is torch.bfloat16"),
        ({"state_out": torch.zeros(1, 8, 64, 4).mT}, "the last axis of state_out must be contiguous"),
        ({"state_lse": None}, "state_lse must be a torch.Tensor"),
        ({"backend": "tiled"}, "a state to merge with"),
        ({"backend": "emulator"}, "a state that is merged and rounded"),  # as sm80
    ],
)
def test_what_a_state_output_must_be(change, message, monkeypatch) -> None:
    monkeypatch.delenv("STROBE_EMULATE", raising=False)
    q = torch.zeros(1, 8, 4, 64).bfloat16()
    a = Arguments(q, q, q, out=torch.empty_like(q), state_out=q.float(), state_lse=torch.zeros(1, 4, 8))
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        bind(a._replace(**change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"out": None}, "state_lse goes with a partial out"),
        ({"state_lse": torch.zeros(1, 4, 9)}, "state_lse has shape"),
        ({"state_lse": torch.zeros(1, 4, 8).double()}, "state_lse is torch.float64"),
        ({"state_lse": torch.zeros(1, 8, 4).mT}, "the last axis of state_lse must be contiguous"),
        ({"state_lse": torch.zeros(1, 1, 8).expand(1, 4, 8)}, "several of its elements share memory"),
        ({"backend": "tiled"}, "a state to merge with"),
        ({"backend": "emulator", "dropout": 0.5, "seed": 1}, "a state to merge with"),
    ],
)
def test_what_a_state_must_be(change, message) -> None:
    q = torch.zeros(1, 8, 4, 64).bfloat16()
    a = Arguments(q, q, q, out=q.float(), partial=True, state_lse=torch.zeros(1, 4, 8), backend="emulator")
    with pytest.raises((ValueError, RuntimeError), match=message):
        bind(a._replace(**change))


@pytest.mark.parametrize(
    "sinks, turns", [(None, 1), (torch.zeros(4), 1), (torch.zeros(4).bfloat16(), 3), (torch.zeros(8)[::2], 3)]
)
def test_a_repeated_forward_sends_what_the_first_would(sinks, turns, addresses, monkeypatch) -> None:
    """Tensors are prepared once, or in each of three calls where the sinks must be copied."""
    prepared = []
    original = cuda_backend.prepare
    monkeypatch.setattr(cuda_backend, "prepare", lambda *x: prepared.append(original(*x)) or prepared[-1])
    q, k = (torch.randn(2, n, heads, 64).bfloat16() for n, heads in ((150, 4), (130, 2)))
    a = Arguments(q, k, k, sinks=sinks, return_lse=True)
    bound = cuda_backend._bind_forward(forward_sm90.plan, *Problem.of(a))
    for _ in range(3):
        (out, lse), sent = bound.run(a), Addresses.calls[-1]
        used = sinks if turns == 1 else prepared[-1][0]["sinks"]
        for name, t in (("q", q), ("k", k), ("v", k), ("o", out), ("lse", lse), ("sinks", used)):
            assert sent[name] == (0 if t is None else t.data_ptr())
    assert len(prepared) == turns


@pytest.mark.parametrize("wanted", [("q", "k", "v"), ("q",), ("v",), ("q", "k", "v", "sinks")], ids=str)
def test_a_repeated_backward_sends_what_the_first_would(wanted: tuple[str, ...], addresses, monkeypatch) -> None:
    """The first call prepares tensors one by one; the second, whose tensors are like its, launches at once; the third has
    a gradient that must be copied."""
    sinks = torch.zeros(4) if "sinks" in wanted else None
    q, k, v = (torch.randn(2, n, heads, 64).bfloat16() for n, heads in ((150, 4), (130, 2), (130, 2)))
    a = Arguments(q, k, v, mask=strobe.causal, sinks=sinks)
    problem, layout = Problem.of(a, needs_grad=True)
    bound = cuda_backend._bind_backward(backward_sm90.plan, problem.backward(wanted), layout)
    Addresses.calls.clear()
    prepared = []
    original = cuda_backend.prepare_backward
    monkeypatch.setattr(cuda_backend, "prepare_backward", lambda *x: prepared.append(1) or original(*x))
    out, lse = torch.empty_like(q), torch.empty(2, 4, 150)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    for turn, dout in enumerate((torch.empty_like(q), torch.empty_like(q), odd)):
        found, sent = bound.run(a, out, lse, dout, None), Addresses.calls[-1]
        assert [n for n in ("q", "k", "v", "sinks") if getattr(found, n) is not None] == list(wanted)
        for name, t in (("q", q), ("k", k), ("v", v), ("o", out), ("lse", lse), ("sinks", sinks)):
            assert sent[name] == (0 if t is None else t.data_ptr())
        assert (sent["d_o"] == dout.data_ptr()) == (turn < 2)
        for name in set(wanted) - {"sinks"}:
            assert sent[f"d{name}"] == getattr(found, name).data_ptr()
        assert (sent["dq"] == 0) == ("q" not in wanted) and (sent["dk"] == 0) == (not {"k", "v"} & set(wanted))
        assert len(prepared) == (1, 1, 2)[turn]


def test_a_repeated_backward_tells_gradients_of_the_lse_apart(addresses) -> None:
    """None, and one whose memory holds the negated numbers, which is copied."""
    q = torch.randn(2, 150, 4, 64).bfloat16()
    a, lse = Arguments(q, q, q), torch.zeros(2, 4, 150)
    problem, layout = Problem.of(a, needs_grad=True)
    bound = cuda_backend._bind_backward(backward_sm90.plan, problem.backward(("q", "k", "v")), layout)
    for dlse in (None, None, lse, lse, torch._neg_view(lse), None):
        found, sent = bound.run(a, q, lse, q, dlse), Addresses.calls[-1]
        assert [sent[f"d{n}"] for n in "qkv"] == [t.data_ptr() for t in found[:3]]
        copied = dlse is not None and dlse.is_neg()
        assert (sent["dlse"] == (0 if dlse is None else lse.data_ptr())) != copied


def test_a_call_allocates_and_launches_on_its_own_device(addresses, monkeypatch) -> None:
    """Another device is current, and stays so. Memory is allocated on the current device, the workspace too."""
    current, used = 1, []

    class Current:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            nonlocal current
            self.before, current = current, self.index

        def __exit__(self, *_: object) -> None:
            nonlocal current
            current = self.before

    guards = torch._C._dynamo.guards
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current)
    empty = guards._empty_strided_cpu
    monkeypatch.setattr(guards, "_empty_strided_cuda", lambda *x: used.append(current) or empty(*x))
    monkeypatch.setattr(launching, "kernel", lambda spec: Kernel())
    monkeypatch.setattr(launching, "compile_together", lambda specs: None)
    monkeypatch.setattr(launching, "zeros", lambda device, stream: used.append(current) or (4096, None))
    monkeypatch.setattr(cuda_backend, "Launcher", Launcher)
    q = torch.randn(2, 130, 4, 64).bfloat16()
    a = Arguments(q, q, q)
    problem, layout = Problem.of(a, needs_grad=True)
    forward = cuda_backend._bind_forward(forward_sm90.plan, problem, layout)
    backward = cuda_backend._bind_backward(backward_sm90.plan, problem.backward(("q", "k", "v")), layout)
    for _ in range(2):
        out, lse = forward.run(a)
        found = backward.run(a, out, lse, torch.empty_like(out), None)
        assert [t.is_contiguous() and t.shape for t in (out, lse, *found[:3])] == [q.shape, (2, 4, 130), *[q.shape] * 3]
    assert current == 1 and used == [0] * (1 + 1 + 3 + 4)  # counters, workspace; both again, with two and three results


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_of_parts_of_a_group_are_summed_up(layout: str, addresses, monkeypatch) -> None:
    """Gradients are summed up in the first call and in a repeated one: 32 blocks of keys for 132 multiprocessors, so
    groups of 16 heads are divided into parts, which are written in fp32. Here, part i writes the number i."""
    heads, parts = layout.index("h"), 4
    shapes = [torch.Size((2, 512, h, 64) if layout == "bshd" else (2, h, 512, 64)) for h in (64, 4, 4 * parts)]
    numbers = torch.arange(4.0 * parts).view(-1, *(1,) * (3 - heads)).expand(shapes[2])

    class Writes(Addresses):
        def __call__(self, *addresses: int, blocks: None = None) -> None:
            for name, address in zip(self.names, addresses, strict=True):
                if name in ("dk", "dv"):
                    memory = (ctypes.c_float * numbers.numel()).from_address(address)
                    torch.frombuffer(memory, dtype=torch.float32).view(shapes[2]).copy_(numbers)

    monkeypatch.setattr(cuda_backend, "Launcher", Writes)
    q, k = (torch.zeros(shape).bfloat16() for shape in shapes[:2])
    a = Arguments(q, k, k, layout=layout)
    problem, order = Problem.of(a, needs_grad=True)
    assert group_parts(problem, H200.sms) == parts
    bound = cuda_backend._bind_backward(backward_sm90.plan, problem.backward(("q", "k", "v")), order)
    expected = numbers.unflatten(heads, (4, parts)).sum(heads + 1).bfloat16()
    for _ in range(2):
        found = bound.run(a, torch.empty_like(q), torch.empty(2, 64, 512), torch.empty_like(q), None)
        assert torch.equal(found.k, expected) and torch.equal(found.v, expected) and found.k.shape == k.shape


@pytest.mark.parametrize(
    "heads, heads_k, length, parts",
    [
        (32, 1, 2048, 8),
        (32, 8, 2048, 1),
        (32, 1, 8192, 4),
        (64, 8, 512, 2),
        (8, 1, 512, 2),
        (8, 1, 256, 1),
        (7, 1, 1024, 1),
    ],
)
def test_when_groups_are_divided(heads: int, heads_k: int, length: int, parts: int) -> None:
    """Groups are divided if blocks of keys are fewer than multiprocessors: so that they are twice as many, as far as
    the group can be divided evenly and dK and dV of the parts take no more memory than q; not if there is little to
    do."""
    q, k = ((2, length, h, 64) for h in (heads, heads_k))
    problem = supposed(torch.device("cpu"), torch.bfloat16, q, k, k, ("q", "k", "v"))
    assert group_parts(problem, H200.sms) == parts


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"scale": 0.5, "layout": "bhsd"}], ids=str)
def test_a_repeated_call_makes_six_python_calls(options, no_driver, monkeypatch) -> None:
    """Six calls of ours lead from `strobe.attention` to the driver; PyTorch's question whether it compiles is one of
    its own."""
    monkeypatch.setattr(cuda_backend, "machine_of", lambda device: H200)
    monkeypatch.setattr(cuda_backend, "missing", lambda device, hopper: None)
    monkeypatch.setattr(launching, "_zeros", {(0, 77): 4096})
    q, k, v = torch.randn(3, 2, 160, 4, 64).bfloat16()
    for _ in range(2):
        strobe.attention(q, k, v, **options)
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(("strobe.", "namedtuple_")):
            calls.append(f"{name}: {frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        strobe.attention(q, k, v, **options)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 6 and calls[0] == "strobe.api: attention", calls
    assert Recorder.made[-1].sent[-1][0] == 77
