"""The method "by do_bench": `triton.testing.do_bench`, provider after provider, as many published numbers are taken.

It stands between the other two: each provider runs alone, but for a tenth of a second only."""

from __future__ import annotations

import time

from strobe.measure.stopwatch import Stopwatch, TimedCall


def unavailable(watch: Stopwatch) -> str | None:
    if not watch.on_gpu:
        return f"do_bench times GPUs, the device is {watch.device.type}"
    try:
        import triton.testing  # noqa: F401
    except ImportError as error:
        return f"do_bench is triton's, which cannot be imported: {error}"
    return None


def do_bench(calls: list[TimedCall]) -> None:
    """Fills in each call's samples, with Triton's own settings: 25 ms to warm up, 100 ms measured, the L2 cache cleared
    before each call. One that fails drops out with its `problem`; the others go on."""
    import triton.testing

    for call in calls:
        with call.guarded():
            begun = time.perf_counter()
            samples = triton.testing.do_bench(call.call, return_mode="all")
            call.turns_ms.append([float(ms) for ms in samples])
            call.intervals.append((begun, time.perf_counter()))
            call.how, call.l2 = "triton.testing.do_bench", "flushed"
