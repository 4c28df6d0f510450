"""The method "in short turns": providers interleaved, a few milliseconds each, in changing orders.

A GPU at its power limit moves its clock within some ten milliseconds, and what ran before decides where to. In long
turns, or always behind the same neighbour, providers would be timed at different clocks. The first call of a turn takes
longer and is not timed. Where a call of one is too short for events, those of all are captured into CUDA graphs and
replayed. (The measurements behind this are in benchmarks/README.md.)"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from strobe.measure.stopwatch import CALLS_IN_GRAPH, Stopwatch, TimedCall

_MOST_SAMPLES = 400  # of a provider
_MOST_CALLS = 200  # whose CPU time is one sample: a GPU's queue must not fill up
_LEAD_BELOW_MS = 20.0  # of longer calls the slow beginning is a small part


@dataclass(frozen=True)
class Share:
    """The turns of a provider: how many it has, and what it does then."""

    rounds: int
    repeats: int  # timed calls in a turn
    leads: bool  # whether another, not timed, goes first


def interleave(calls: list[TimedCall], watch: Stopwatch, measure: str = "time") -> list[tuple[TimedCall, Share]]:
    """Fills in each call's samples and says who had which share. One that fails drops out with its `problem`; the others
    go on. `measure`: "time" or "graph" of the device, or "call" of the CPU."""
    settings = watch.settings
    watch.queue_delay = 0
    estimates: list[tuple[TimedCall, float]] = []
    for call in calls:
        with call.guarded():
            estimates.append((call, watch.warm_up(call.call)))
    graphs = watch.on_gpu and (measure == "graph" or any(ms < settings.graph_below_ms for _, ms in estimates))
    entrants: list[tuple[TimedCall, Share]] = []
    for call, estimate in estimates:
        with call.guarded():
            if measure == "call":
                call.how, estimate = "perf_counter, CPU time per call", max(watch.host_ms(call.call, 20), 1e-4)
            elif graphs:
                call.replay_from_graph(watch)
                estimate *= CALLS_IN_GRAPH
            else:
                call.how = "device events" if watch.on_gpu else "perf_counter"
                call.l2 = settings.l2 if watch.on_gpu else "warm"
            rounds = min(settings.rounds, max(3, int(settings.budget_ms / estimate)))
            most = _MOST_CALLS if measure == "call" else max(1, _MOST_SAMPLES // rounds)
            repeats = max(1, min(most, int(settings.budget_ms / rounds / estimate)))
            entrants.append((call, Share(rounds, repeats, estimate < _LEAD_BELOW_MS)))
    rounds = max((share.rounds for _, share in entrants), default=0)
    for turn, order in zip(range(rounds), orders(len(entrants)), strict=False):
        for call, share in (entrants[i] for i in order):
            its_turn = (turn + 1) * share.rounds // rounds > turn * share.rounds // rounds  # spread over all rounds
            if its_turn and call.problem is None:
                with call.guarded():
                    _take_turn(call, share, watch, measure)
    return entrants


def orders(n: int) -> Iterator[list[int]]:
    """Orders of n providers, without end: everyone comes behind everyone else about equally often, nobody behind
    itself."""
    behind: Counter[tuple[int, int]] = Counter()
    last = -1
    while n:
        row: list[int] = []
        while len(row) < n:
            able = [i for i in range(n) if i not in row and (i != last or n == 1)]
            chosen = min(able, key=lambda i: behind[last, i])
            behind[last, chosen] += 1
            row.append(chosen)
            last = chosen
        yield row


def _take_turn(call: TimedCall, share: Share, watch: Stopwatch, measure: str) -> None:
    begun, host_bound = time.perf_counter(), watch.host_bound
    if measure == "call":
        call.call()
        taken = [watch.host_ms(call.call, share.repeats)]
    elif call.graph is not None:
        replays = watch.times_ms(call.graph.replay, share.repeats, flush=False, lead=share.leads)
        taken = [replay / CALLS_IN_GRAPH for replay in replays]
    else:
        taken = watch.times_ms(call.call, share.repeats, lead=share.leads)
    call.turns_ms.append(taken)
    call.host_bound += watch.host_bound - host_bound
    call.intervals.append((begun, time.perf_counter()))
