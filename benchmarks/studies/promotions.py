"""How many bytes the L2 cache fetches at a time, for each tensor map of the Hopper kernels: 256, or 128 for some of them.
`python -m benchmarks.studies promotions -o benchmarks/results/MACHINE/studies/promotions.json`

Training shapes of the grid, short sequences, grouped heads, windows and packed sequences, through the API, so that the
backward's sums of dQ and its statistics are part of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import strobe
from strobe.cuda import backward_sm90, forward_sm90
from strobe.cuda.plan import Launch, Plan
from strobe.mask import Mask, causal, full, window
from strobe.measure.cases import Case
from strobe.measure.clocks import Monitor
from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.statistics import summarise_turns
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.sustained import Settings as SustainedSettings, SustainedCall, sustain
from strobe.measure.turns import interleave
from strobe.tools.tune import HIDDEN, TOKENS

FETCHES: dict[str, tuple[str, ...]] = {  # the maps of which 128 bytes are fetched at a time
    "in use": (),
    "k and v": ("k", "v"),
    "q and do": ("q", "d_o"),
    "all": ("q", "k", "v", "o", "d_o", "dq", "dk", "dv"),
    "in use, again": (),  # what lies between the two is noise
}


def case_of(length: int, mask: Mask, dim: int = 128, group: int = 1, **options: Any) -> Case:
    heads = HIDDEN // dim
    name = f"{mask.name} {length}{f', groups of {group}' if group > 1 else ''}{', packed' if options else ''}"
    shape: dict[str, Any] = {"batch": TOKENS // length, "heads": heads, "heads_k": heads // group, "dim": dim}
    return Case(name, length, length, mask=mask, **shape, **options)


PACKED = tuple(itertools.islice(itertools.cycle((137, 1024, 300, 2900, 64, 1500)), 16))
CASES = [
    *(case_of(n, mask, dim) for dim in (64, 128) for mask in (full, causal) for n in (512, 1024, 2048, 16384)),
    *(case_of(n, window(1023, 0)) for n in (4096, 16384)),
    *(case_of(n, causal, group=8) for n in (1024, 8192)),
    case_of(max(PACKED), causal, lengths=tuple((n, n) for n in PACKED)),
]


def tensors(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `strobe.attention`, or of `strobe.attention_varlen`."""
    found: dict[str, Any] = {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for name, shape in zip("qkv", case.shapes(), strict=True)
    }
    if case.lengths is not None:
        ends = itertools.accumulate((n for n, _ in case.lengths), initial=0)
        cu = torch.tensor(list(ends), dtype=torch.int32, device=device)
        found |= {"cu_q": cu, "cu_k": cu, "max_q": case.len_q, "max_k": case.len_k}
    return found


@contextlib.contextmanager
def fetched(maps: Collection[str]) -> Iterator[None]:
    """What is planned meanwhile fetches 128 bytes at a time of these maps."""

    def changed(launch: Launch) -> Launch:
        return replace(
            launch,
            maps={name: replace(m, promotion=128) if name in maps else m for name, m in launch.maps.items()},
        )

    def planner(plan: Callable[..., Plan]) -> Callable[..., Plan]:
        def planned(*arguments: Any, **options: Any) -> Plan:
            made = plan(*arguments, **options)
            return replace(made, launches=tuple(map(changed, made.launches)))

        return planned

    with contextlib.ExitStack() as stack:
        for module in (forward_sm90, backward_sm90):
            stack.enter_context(mock.patch.object(module, "plan", planner(module.plan)))
        yield


def calls(case: Case, direction: str, device: torch.device) -> dict[str, Callable[[], Any]]:
    """A call for each way of fetching. The scale differs in its last digits: else they would share prepared launches."""
    x = tensors(case, device)
    attend: Any = strobe.attention_varlen if case.lengths else strobe.attention
    inputs = [x[name] for name in "qkv"]
    found: dict[str, Callable[[], Any]] = {}
    for i, (name, maps) in enumerate(FETCHES.items()):
        options = {**x, "mask": case.mask, "scale": case.softmax_scale * (1 + i * 2**-20), "backend": "sm90"}
        with fetched(maps):
            out = attend(**options)
            gradients = functools.partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
            gradients()
        plain = options | {name: x[name].detach() for name in "qkv"}
        found[name] = functools.partial(attend, **plain) if direction == "forward" else gradients
        with fetched(maps):
            found[name]()
    return found


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    watch = Stopwatch(device, Settings(budget_ms=40, rounds=8))
    monitor = Monitor(device, energy=True)
    for direction, case in itertools.product(("forward", "backward"), CASES):
        torch.manual_seed(0)
        found = calls(case, direction, device)
        timed = {name: TimedCall(call) for name, call in found.items()}
        interleave(list(timed.values()), watch)
        row: dict[str, Any] = {"direction": direction, "dim": case.dim, "case": case.name}
        row[TURNS] = {name: summarise_turns(call.turns_ms).median for name, call in timed.items() if not call.problem}
        if case.len_q >= 16384:  # shorter ones rarely reach the power limit
            sustained = {name: SustainedCall(call) for name, call in found.items()}
            sustain(list(sustained.values()), watch, monitor, SustainedSettings(repeats=1))
            row[SUSTAINED] = {name: call.mean_ms() for name, call in sustained.items() if not call.problem}
            row["watts"] = {name: call.watts() for name, call in sustained.items() if not call.problem}
        yield row
    monitor.close()
