"""One run: for every case, prepare the providers, check them, see which kernels they run, time them by each method,
write the rows down."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from strobe.bench import ceilings, llama, results as files
from strobe.bench.case import BenchCase
from strobe.bench.exactness import Judge
from strobe.bench.inputs import Tensors, make_tensors
from strobe.bench.kernel_names import kernels_that_ran
from strobe.bench.prepare import compile_ahead, time_limit
from strobe.bench.provider import Forward, Prepared, Provider, Refusal, from_layout, to_layout
from strobe.bench.refusals import explain
from strobe.bench.registry import select
from strobe.bench.request import Request
from strobe.bench.result_row import finished
from strobe.bench.results import Results, Row
from strobe.bench.torch_attention import SDPA_BACKENDS, why_no_kernel
from strobe.measure import do_bench, provenance, turns, units
from strobe.measure.clocks import Monitor
from strobe.measure.memory import with_peak_memory
from strobe.measure.method import DO_BENCH, SUMMARIES, SUSTAINED, TURNS
from strobe.measure.stopwatch import Call, Scope, Stopwatch, TimedCall
from strobe.measure.sustained import SustainedCall, sustain

Progress = Callable[[str, int, int], None]  # what is being done, cases done, cases in all


@dataclass
class Entry:
    """A provider on a case while it is being measured."""

    provider: Provider
    row: Row
    prepared: Prepared | None = None
    inputs: tuple[torch.Tensor, ...] = ()
    leaves: tuple[torch.Tensor, ...] = ()  # those, and a bias that learns
    do: torch.Tensor | None = None
    call: Call | None = None  # what is timed

    @property
    def alive(self) -> bool:
        return self.row.status in files.TIMED

    def refuse(self, status: str, reason: str) -> None:
        self.row.status, self.row.reason = status, reason
        self.call = self.prepared = None

    def step(self, direction: str) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        assert self.prepared is not None
        out = self.prepared.forward(*self.inputs)
        return out, (torch.autograd.grad(out, self.leaves, self.do) if direction == "both" else None)

    def scope(self) -> Scope:
        prepared, gradients = self.prepared, self.row.case.direction != "forward"

        @contextlib.contextmanager
        def scope() -> Iterator[None]:
            assert prepared is not None
            with prepared.scope(), torch.set_grad_enabled(gradients):
                yield

        return scope


class Runner:
    def __init__(self, request: Request) -> None:
        self.request, self.device = request, request.device
        self.providers = select(list(request.providers))
        self.cases = request.cases()
        self.watch = Stopwatch(self.device, request.settings)
        self._compiling: dict[str, float] = {}  # seconds spent per provider that compiles
        if llama.SUITE in request.suites and (reason := llama.missing()) is not None:
            raise ValueError(f"suite {llama.SUITE}: {reason}")
        if DO_BENCH in request.methods and (reason := do_bench.unavailable(self.watch)) is not None:
            raise ValueError(f"method: {reason}")

    def run(self, progress: Progress = lambda what, done, total: None) -> Results:
        begun = time.perf_counter()
        request, total = self.request, len(self.cases)
        monitor = Monitor(self.device, energy=SUSTAINED in request.methods)
        try:
            progress("the matrix product and the copy", 0, total)
            dtypes = list(dict.fromkeys(c.dtype for c in self.cases))
            results = Results(
                provenance=provenance.collect(self.device, request.seed),
                method=self._method(monitor),
                ceilings=ceilings.measure(self.watch, dtypes),
            )
            results.clocks["before"] = monitor.now()
            if SUSTAINED in request.methods:
                ceilings.measure_sustained(results.ceilings, self.watch, monitor, request.sustained)
            if self.device.type == "cuda":
                progress("compiling kernels", 0, total)
                results.method["compiled_ahead_s"] = compile_ahead(self.cases, self.providers, self.device)
            for done, case in enumerate(self.cases):
                progress(case.title, done, total)
                results.rows += self._case(case, monitor, results)
                results.seconds = time.perf_counter() - begun
                results.clocks["after"] = monitor.now()
                if request.out is not None:
                    files.save(results, request.out)
            results.complete = True
            again = ceilings.measure(self.watch, list(results.ceilings.matmul_tflops))
            results.clocks["matmul_tflops_after"] = again.matmul_tflops
            results.seconds = time.perf_counter() - begun
            if request.out is not None:
                files.save(results, request.out)
        finally:
            monitor.close()
        return results

    def _method(self, monitor: Monitor) -> dict[str, Any]:
        s, on_gpu = self.request.settings, self.device.type == "cuda"
        facts: dict[str, Any] = {
            "methods": {method: SUMMARIES[method] for method in self.request.methods},
            "budget_ms": s.budget_ms,
            "rounds": s.rounds,
            "warmup_ms": s.warmup_ms,
            "l2": s.l2 if on_gpu else None,
            "order": "interleaved, in changing orders; the first call of a turn is not timed",
            "queue": "a turn in which the GPU waits for the CPU is repeated with a queue delay",
            "data": "standard normal",
            "interval": "95 % of the median, by order statistics of the turns' medians",
            "flops": "exact count of visible pairs; forward 2, backward 5 matrix products",
            "clock_source": monitor.source or monitor.unavailable,
        }
        if SUSTAINED in self.request.methods:
            facts["sustained"] = dataclasses.asdict(self.request.sustained)
            facts["energy_source"] = monitor.energy_source or monitor.no_energy
        return facts

    # ---- one case

    def _case(self, case: BenchCase, monitor: Monitor, results: Results) -> list[Row]:
        model = case.measure == "model"
        providers = [p for p in self.providers if p.models == model]
        flops, ideal = (None, None) if model else (case.flops(self.device), case.ideal_bytes(self.device))
        entries = [Entry(p, Row(case, p.name, p.kind, flops=flops, ideal_bytes=ideal)) for p in providers]
        timed: dict[str, list[TimedCall | None]] = {}
        try:
            (self._check_models if model else self._check_all)(case, entries)
            for method in self.request.methods_for(case):
                timed[method] = self._time(case, entries, method, monitor)
        except Exception as error:  # making the inputs or the reference failed: a reason for everyone
            status, reason = explain(error)
            for entry in entries:
                if entry.alive:
                    entry.refuse(status, reason)
        rows = [
            finished(entry.row, call, method, self.request.repeat(case, method), monitor, results)
            for method in self.request.methods_for(case)
            for entry, call in zip(entries, timed.get(method) or [None] * len(entries), strict=True)
        ]
        del entries, timed
        self._clean()
        return rows

    def _check_all(self, case: BenchCase, entries: list[Entry]) -> None:
        self._screen(case, entries)
        if not any(e.alive for e in entries):
            return
        tensors = make_tensors(case, self.device, self.request.seed)
        judge = Judge(case, tensors)
        layouts: dict[str, tuple[torch.Tensor, ...]] = {}
        for entry in entries:
            if entry.alive:
                with self._guarded(entry, tensors):
                    self._prepare(entry, case, tensors, layouts)
                    self._check(entry, case, judge)
        if self.request.profile:
            self._name_kernels([e for e in entries if e.alive])

    def _check_models(self, case: BenchCase, entries: list[Entry]) -> None:
        """Error, memory, and the step that will be timed, of a whole model with each attention implementation."""
        for entry in entries:
            reason = entry.provider.skipped(case, self.device)
            if reason is not None and entry.provider.name not in self.request.providers:
                entry.refuse("skipped", reason)
        if not any(entry.alive for entry in entries):
            return
        steps = llama.Steps(case, self.device, self.request.seed)
        for entry in (entry for entry in entries if entry.alive):
            with self._guarded(entry, None):
                limit = self.request.compile_limit_s
                with time_limit(limit) if entry.provider.compiles else contextlib.nullcontext():
                    step, entry.row.error = steps.prepare(entry.provider.name.removeprefix(llama.PREFIX))
                    if not entry.row.error.passed:
                        raise Refusal("wrong", str(entry.row.error))
                    entry.prepared = Prepared(_whole(step))
                    with entry.scope()():
                        step()  # what there is to compile is not timed
                        entry.row.peak_bytes = with_peak_memory(step, self.device)[1]
                entry.call = step

    def _time(self, case: BenchCase, entries: list[Entry], method: str, monitor: Monitor) -> list[TimedCall | None]:
        """Return what the method found for every entry; None for those that are out."""
        kind = SustainedCall if method == SUSTAINED else TimedCall
        calls = [kind(e.call, e.scope()) if e.alive and e.call is not None else None for e in entries]
        running = [call for call in calls if call is not None]
        if method == TURNS:
            with monitor.paused() if case.measure == "call" else contextlib.nullcontext():
                turns.interleave(running, self.watch, case.measure)
        elif method == DO_BENCH:
            do_bench.do_bench(running)
        else:
            alone = [call for call in running if isinstance(call, SustainedCall)]
            sustain(alone, self.watch, monitor, self.request.sustained)
        return list(calls)

    def _screen(self, case: BenchCase, entries: list[Entry]) -> None:
        """Refuse the entries that are known to fail before anything runs."""
        total = provenance.device_facts(self.device).get("memory_bytes") or 0
        for entry in entries:
            p = entry.provider
            named = p.name in self.request.providers
            if (reason := p.cannot(case, self.device)) is not None:
                entry.refuse("unsupported", reason)
            elif p.device is not None and p.device != self.device.type:
                entry.refuse("unsupported", f"runs on {p.device} only")
            elif case.measure == "graph" and self.device.type != "cuda":
                entry.refuse("unsupported", "CUDA graphs need an NVIDIA GPU")
            elif case.variant is not None and not p.functions:
                entry.refuse("unsupported", "not measured with functions of scores and masks")
            elif case.direction != "forward" and not p.differentiable:
                entry.refuse("unsupported", "no gradients")
            elif not named and (reason := p.skipped(case, self.device)) is not None:
                entry.refuse("skipped", reason)
            elif (need := p.matrices(case) + case.tensor_bytes()) > total:
                has = f"needs at least {units.size(need)} at one time, the device has {units.size(total)}"
                entry.refuse("out of memory", has)
            elif p.compiles and self._compiling.get(p.name, 0.0) > self.request.compile_limit_s:
                limit = f"{self.request.compile_limit_s:g} s allowed, see --compile-limit-s"
                entry.refuse("skipped", f"compiling took more than the {limit}")

    def _prepare(
        self, entry: Entry, case: BenchCase, tensors: Tensors, layouts: dict[str, tuple[torch.Tensor, ...]]
    ) -> None:
        name = entry.provider.name
        limit = max(1.0, self.request.compile_limit_s - self._compiling.get(name, 0.0))
        begun = time.perf_counter()
        with time_limit(limit) if entry.provider.compiles else contextlib.nullcontext():
            entry.prepared = prepared = entry.provider.prepare(case, tensors)
            entry.row.note = prepared.note
            if prepared.layout not in layouts:
                laid_out = [to_layout(t, prepared.layout) for t in (tensors.q, tensors.k, tensors.v)]
                layouts[prepared.layout] = tuple(t.requires_grad_(case.direction != "forward") for t in laid_out)
            entry.inputs = entry.leaves = layouts[prepared.layout]
            if case.learns_bias and tensors.bias is not None:
                entry.leaves = (*entry.inputs, tensors.bias)
            entry.do = None if tensors.do is None else to_layout(tensors.do, prepared.layout)
            if entry.provider.compiles:
                with entry.scope()():
                    entry.step("both" if case.direction != "forward" else "forward")
                self._compiling[name] = self._compiling.get(name, 0.0) + time.perf_counter() - begun

    def _check(self, entry: Entry, case: BenchCase, judge: Judge) -> None:
        """Error, memory, and the call that will be timed."""
        prepared, scope = entry.prepared, entry.scope()
        assert prepared is not None
        whole = "forward" if case.direction == "forward" else "both"
        with scope():
            out, gradients = entry.step(whole)
            poison(out, *(gradients or ()))  # the next results are likely to lie where these were
            shape = out.shape
            del out, gradients
            self.watch.synchronize()
            begun = time.perf_counter()
            out, gradients = entry.step(whole)
            self.watch.synchronize()
            seconds = time.perf_counter() - begun
            if out.shape != shape:
                raise RuntimeError(f"two calls gave shapes {tuple(shape)} and {tuple(out.shape)}")
            back = None
            if gradients is not None:
                back = (*(from_layout(g, prepared.layout) for g in gradients[:3]), *gradients[3:])
            roundings = entry.provider.roundings(case)
            entry.row.error = verdict = judge.judge(from_layout(out.detach(), prepared.layout), back, roundings)
            del back, gradients, out
            if not verdict.passed:
                raise Refusal("wrong", str(verdict))
        if seconds > self.request.call_limit_s:
            limit = f"--call-limit-s {self.request.call_limit_s:g}"
            raise Refusal("skipped", f"one call takes {seconds:.1f} s, more than {limit}")
        with scope():
            peak = with_peak_memory(lambda: entry.step(whole), self.device)[1]
        if peak is not None:
            tensors = (*entry.inputs, *(() if entry.do is None else (entry.do,)))
            inputs = sum(t.numel() * t.element_size() for t in tensors)
            entry.row.peak_bytes = inputs + peak
            entry.row.extra_bytes = max(0, inputs + peak - case.tensor_bytes())
        entry.call = self._call(entry, case, scope)

    def _call(self, entry: Entry, case: BenchCase, scope: Scope) -> Call:
        """Return the call that is timed. A backward pass is: the same for everybody, gradients of q, k, v and perhaps a
        bias from one graph that is kept."""
        assert entry.prepared is not None
        forward, inputs, leaves, do = entry.prepared.forward, entry.inputs, entry.leaves, entry.do
        if case.direction == "backward":
            with scope():
                out = forward(*inputs)
            return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)
        if case.direction == "both":
            return lambda: torch.autograd.grad(forward(*inputs), leaves, do)
        return lambda: forward(*inputs)

    def _name_kernels(self, entries: list[Entry]) -> None:
        calls = {e.provider.name: (e.call, e.scope()) for e in entries if e.call is not None}
        names = kernels_that_ran(calls, self.device)
        for entry in entries:
            ran, expected = names.get(entry.provider.name, []), entry.provider.kernels
            entry.row.kernels = ran
            if self.device.type == "cuda" and expected and ran and not any(re.search(expected, name) for name in ran):
                entry.row.status = "fell back"
                entry.row.reason = f"no kernel matches /{expected}/; ran {', '.join(ran[:3])}"

    @contextlib.contextmanager
    def _guarded(self, entry: Entry, tensors: Tensors | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a provider raises becomes its row
            status, reason = explain(error)
            name = entry.provider.name
            no_kernel = name in SDPA_BACKENDS and "available kernel" in reason.lower()
            if no_kernel and entry.prepared is not None and tensors is not None:
                status, reason = "unsupported", why_no_kernel(name, tensors, entry.prepared)
            entry.refuse(status, reason)
            del error
            self._clean()

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _whole(step: Callable[[], torch.Tensor]) -> Forward:
    """A step of a model, whose inputs are its own."""
    return lambda q, k, v: step()


def poison(*results: torch.Tensor) -> None:
    """NaN into memory that is about to be freed, so that an element which is not written shows."""
    with torch.no_grad():
        for t in results:
            with contextlib.suppress(RuntimeError):  # a gradient may be expanded: its elements share memory
                t.detach().fill_(float("nan"))
