"""Make a row of what a method found."""

from __future__ import annotations

import dataclasses

from strobe.bench.ceilings import matrix_unit_use
from strobe.bench.refusals import explain
from strobe.bench.results import TIMED, Results, Row, Timing
from strobe.measure.clocks import Monitor
from strobe.measure.energy import Energy
from strobe.measure.method import SUSTAINED
from strobe.measure.statistics import summarise_turns
from strobe.measure.stopwatch import TimedCall
from strobe.measure.sustained import SustainedCall

_HOST_BOUND = 0.05  # of the samples: more are noted


def finished(checked: Row, call: TimedCall | None, method: str, repeat: str, monitor: Monitor, results: Results) -> Row:
    """The row of one method. `checked`: what is the same for every method; `call`: None if it was not timed."""
    row = dataclasses.replace(checked, method=method, repeat=repeat, kernels=list(checked.kernels))
    if row.status not in TIMED:
        return row
    if call is not None and call.problem is not None:
        row.status, row.reason = explain(call.problem)
        return row
    if call is None or not call.samples_ms:
        row.status, row.reason = "failed", "no timing was taken"
        return row
    row.timing = _timing(call)
    row.note = "; ".join([*filter(None, [row.note]), *_notes(call)]) or None
    row.clock = monitor.during(call.intervals)
    if row.flops is not None and row.case.measure != "call":  # the CPU's time says nothing about FLOPs
        _set_speed(row, results)
    if isinstance(call, SustainedCall):
        row.energy = _energy(row, call, monitor)
    return row


def _timing(call: TimedCall) -> Timing:
    per_turn, samples = len(call.turns_ms[0]), call.samples_ms
    if isinstance(call, SustainedCall):
        return Timing(samples, call.summary(), call.how, call.l2, per_turn, call.host_bound, call.mean_ms())
    return Timing(samples, summarise_turns(call.turns_ms), call.how, call.l2, per_turn, call.host_bound)


def _notes(call: TimedCall) -> list[str]:
    notes = []
    if call.host_bound > _HOST_BOUND * len(call.samples_ms):
        notes.append(f"the GPU waited for the CPU in {call.host_bound} of {len(call.samples_ms)} samples")
    if isinstance(call, SustainedCall) and any(r.settled_after_s is None for r in call.repeats):
        notes.append("power, clock or speed had not settled when it was measured")
    return notes


def _set_speed(row: Row, results: Results) -> None:
    assert row.timing is not None and row.flops is not None and row.ideal_bytes is not None
    ms, ceiling, device = row.timing.ms, results.ceilings, results.provenance["device"]
    row.tflops, row.gbytes_per_s = row.flops / ms / 1e9, row.ideal_bytes / ms / 1e6
    matmul = ceiling.sustained_tflops if row.method == SUSTAINED else ceiling.matmul_tflops
    if matmul.get(row.case.dtype):
        row.of_matmul = row.tflops / matmul[row.case.dtype]
    if ceiling.copy_gbytes_per_s:
        row.of_copy = row.gbytes_per_s / ceiling.copy_gbytes_per_s
    row.matrix_unit = matrix_unit_use(
        row.flops,
        ms,
        row.clock.sm_mhz if row.clock else None,
        device.get("arch"),
        row.case.dtype,
        device.get("multiprocessors"),
    )


def _energy(row: Row, call: SustainedCall, monitor: Monitor) -> Energy | None:
    watts, source = call.watts(), monitor.energy_source
    if watts is None or source is None:
        return None
    joules = watts * call.mean_ms() / 1e3
    return Energy(
        watts=watts,
        joules_per_call=joules,
        joules_per_tflop=joules / (row.flops / 1e12) if row.flops else None,
        joules_per_1000_tokens=joules / (row.case.tokens / 1e3),
        source=source,
    )
