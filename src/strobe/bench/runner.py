"""One run: for every case, prepare the providers, check them, see which kernels they run, time them in turns, write the
rows down."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from strobe.bench import ceilings, compile_time, results as files
from strobe.bench.exactness import Judge, Tensors
from strobe.bench.kernel_names import kernels_that_ran
from strobe.bench.prepare import compile_ahead, time_limit
from strobe.bench.providers import (
    SDPA_BACKENDS,
    Prepared,
    Provider,
    Refusal,
    from_layout,
    select,
    to_layout,
    why_no_kernel,
)
from strobe.bench.reasons import explain
from strobe.bench.results import Results, Row
from strobe.bench.suites import DTYPES, Case, cases
from strobe.measure import provenance, stopwatch as measure
from strobe.measure.clocks import Monitor
from strobe.measure.stopwatch import Contender, Stopwatch

Progress = Callable[[str, int, int], None]  # what is being done, cases done, cases in all


@dataclass(frozen=True)
class Request:
    suites: tuple[str, ...]
    device: torch.device
    direction: str = "forward"
    providers: tuple[str, ...] = ()  # names, kinds or prefixes; () for all but those on request
    only: tuple[str, ...] = ()  # patterns that a case's label or key must match
    seed: int = 0
    settings: measure.Settings = field(default_factory=measure.Settings)
    out: Path | None = None
    profile: bool = True
    call_limit_s: float = 3.0  # a provider that takes longer for one call is not timed
    compile_limit_s: float = 90.0  # for one provider that compiles, all its shapes together

    def cases(self) -> list[Case]:
        found = [c for suite in self.suites for c in cases(suite, self.direction, self.device.type == "cuda")]
        if self.only:
            found = [
                c for c in found if any(fnmatch.fnmatch(c.label, p) or fnmatch.fnmatch(c.key, p) for p in self.only)
            ]
            if not found:
                raise ValueError(f"only: no case of {', '.join(self.suites)} matches {', '.join(self.only)}")
        return found

    def repeat(self, case: Case, provider: str) -> str:
        """The command that makes one row again, with all who took turns: that moves a GPU's clock."""
        providers = (provider,) if case.measure == "compile" else self.providers
        s, words = self.settings, ["strobe bench", f"--suite {case.suite}", f"--only '{case.key}'"]
        words += [f"--provider {name}" for name in providers]
        if case.direction != "forward" and self.direction != "forward":
            words.append(f"--pass {self.direction}")
        words += [
            f"--device {self.device.type}",
            f"--seed {self.seed}",
            f"--budget-ms {s.budget_ms:g}",
            f"--rounds {s.rounds}",
        ]
        return " ".join(words + ([f"--l2 {s.l2}"] if s.l2 != "flushed" else []))


@dataclass
class Entry:
    """A provider on a case while it is being measured."""

    provider: Provider
    row: Row
    prepared: Prepared | None = None
    inputs: tuple[torch.Tensor, ...] = ()
    do: torch.Tensor | None = None
    contender: Contender | None = None

    def refuse(self, status: str, reason: str) -> None:
        self.row.status, self.row.reason = status, reason
        self.contender = None
        self.prepared = None


class Runner:
    def __init__(self, request: Request) -> None:
        self.request, self.device = request, request.device
        self.providers = select(list(request.providers))
        self.cases = request.cases()
        self.watch = Stopwatch(self.device, request.settings)
        self._compiling: dict[str, float] = {}  # seconds spent per provider that compiles

    def run(self, progress: Progress = lambda what, done, total: None) -> Results:
        begun = time.perf_counter()
        request, total = self.request, len(self.cases)
        monitor = Monitor(self.device)
        progress("the matrix product and the copy", 0, total)
        found = Results(
            provenance=provenance.collect(self.device, request.seed),
            method=self._method(monitor),
            ceilings=ceilings.measure(self.watch, list(dict.fromkeys(c.dtype for c in self.cases))),
        )
        found.clocks["before"] = monitor.now()
        try:
            if self.device.type == "cuda":
                progress("compiling kernels", 0, total)
                found.method["compiled_ahead_s"] = compile_ahead(self.cases, self.providers, self.device)
            for done, case in enumerate(self.cases):
                progress(case.key, done, total)
                found.rows += self._case(case, monitor, found)
                found.seconds = time.perf_counter() - begun
                found.clocks["after"] = monitor.now()
                if request.out is not None:
                    files.save(found, request.out)
            found.complete = True
            found.clocks["matmul_tflops_after"] = ceilings.measure(
                self.watch, list(found.ceilings.matmul_tflops)
            ).matmul_tflops
            found.seconds = time.perf_counter() - begun
            if request.out is not None:
                files.save(found, request.out)
        finally:
            monitor.close()
        return found

    def _method(self, monitor: Monitor) -> dict[str, Any]:
        s = self.request.settings
        return {
            "budget_ms": s.budget_ms,
            "rounds": s.rounds,
            "warmup_ms": s.warmup_ms,
            "l2": s.l2 if self.device.type == "cuda" else None,
            "order": "providers in turns, in changing orders; the first call of a turn is not timed",
            "queue": "a turn in which the GPU waits for the CPU is repeated with a head start for the CPU",
            "data": "standard normal",
            "interval": "95 % of the median, by order statistics of the turns' medians",
            "flops": "exact count of visible pairs; forward 2, backward 5 matrix products",
            "clock_source": monitor.source or monitor.unavailable,
        }

    # ---- one case
    # ------------------------------------------------------------------------------------------------------

    def _case(self, case: Case, monitor: Monitor, found: Results) -> list[Row]:
        providers = [p for p in self.providers if p.tiles or case.tile is None]
        if case.measure == "compile":
            return compile_time.rows(case, providers, self.device, self.request.repeat)
        entries = [
            Entry(
                p,
                Row(
                    case,
                    p.name,
                    p.kind,
                    flops=case.flops(self.device),
                    ideal_bytes=case.ideal_bytes(self.device),
                    repeat=self.request.repeat(case, p.name),
                ),
            )
            for p in providers
        ]
        try:
            self._measure(case, entries, monitor)
        except Exception as error:  # making the inputs or the reference failed: a reason for everyone
            status, reason = explain(error)
            for entry in entries:
                if entry.row.timing is None and entry.row.status == files.OK:
                    entry.refuse(status, reason)
        for entry in entries:
            self._finish(entry, monitor, found)
        rows = [entry.row for entry in entries]
        del entries
        self._clean()
        return rows

    def _measure(self, case: Case, entries: list[Entry], monitor: Monitor) -> None:
        self._screen(case, entries)
        if not any(e.row.status == files.OK for e in entries):
            return
        tensors = make_tensors(case, self.device, self.request.seed)
        judge = Judge(case, tensors)
        layouts: dict[str, tuple[torch.Tensor, ...]] = {}
        for entry in entries:
            if entry.row.status == files.OK:
                with self._guarded(entry, case, tensors):
                    self._prepare(entry, case, tensors, layouts)
                    self._check(entry, case, judge)
        alive = [e for e in entries if e.row.status == files.OK]
        if self.request.profile:
            self._name_kernels(alive)
        contenders = [e.contender for e in alive if e.contender is not None]
        with monitor.paused() if case.measure == "call" else contextlib.nullcontext():
            measure.interleave(contenders, self.watch, case.measure)
        for entry in alive:
            if entry.contender is not None and entry.contender.problem is not None:
                entry.refuse(*explain(entry.contender.problem))

    def _screen(self, case: Case, entries: list[Entry]) -> None:
        """What is known before anything runs."""
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
            elif case.direction != "forward" and not p.differentiable:
                entry.refuse("unsupported", "no gradients")
            elif not named and (reason := p.skipped(case, self.device)) is not None:
                entry.refuse("skipped", reason)
            elif (need := p.matrices(case) + case.tensor_bytes()) > total:
                entry.refuse(
                    "out of memory",
                    f"needs at least {need / 2**30:.0f} GiB at one time, the device has {total / 2**30:.0f}",
                )
            elif p.compiles and self._compiling.get(p.name, 0.0) > self.request.compile_limit_s:
                entry.refuse(
                    "skipped",
                    f"compiling took more than the {self.request.compile_limit_s:g} s allowed, see --compile-limit-s",
                )

    def _prepare(
        self, entry: Entry, case: Case, tensors: Tensors, layouts: dict[str, tuple[torch.Tensor, ...]]
    ) -> None:
        limit = max(1.0, self.request.compile_limit_s - self._compiling.get(entry.provider.name, 0.0))
        begun = time.perf_counter()
        with time_limit(limit) if entry.provider.compiles else contextlib.nullcontext():
            entry.prepared = prepared = entry.provider.prepare(case, tensors)
            entry.row.note = prepared.note
            if prepared.layout not in layouts:
                made = [to_layout(t, prepared.layout) for t in (tensors.q, tensors.k, tensors.v)]
                layouts[prepared.layout] = tuple(t.requires_grad_(case.direction != "forward") for t in made)
            entry.inputs = layouts[prepared.layout]
            entry.do = None if tensors.do is None else to_layout(tensors.do, prepared.layout)
            if entry.provider.compiles:
                with self._scope(entry)():
                    step(entry, "both" if case.direction != "forward" else "forward")
                self._compiling[entry.provider.name] = (
                    self._compiling.get(entry.provider.name, 0.0) + time.perf_counter() - begun
                )

    def _check(self, entry: Entry, case: Case, judge: Judge) -> None:
        """Error, memory, and the call that will be timed."""
        prepared, scope = entry.prepared, self._scope(entry)
        assert prepared is not None
        whole = "forward" if case.direction == "forward" else "both"
        with scope():
            out, gradients = step(entry, whole)
            poison(out)  # the next output is likely to lie where this one was
            shape = out.shape
            del out, gradients
            self.watch.synchronize()
            begun = time.perf_counter()
            out, gradients = step(entry, whole)
            self.watch.synchronize()
            seconds = time.perf_counter() - begun
            if out.shape != shape:
                raise RuntimeError(f"two calls gave shapes {tuple(shape)} and {tuple(out.shape)}")
            back = None if gradients is None else tuple(from_layout(g, prepared.layout) for g in gradients)
            entry.row.error = error = judge.judge(
                from_layout(out.detach(), prepared.layout), back, entry.provider.roundings(case)
            )
            del back, gradients
            if not error.passed:
                reason = (
                    f"relative error {error.relative:.1e} (allowed {error.allowed_relative:.1e}), "
                    f"largest {error.max_abs:.1e} (allowed {error.allowed_max_abs:.1e}), {error.checked}"
                )
                raise Refusal("wrong", reason)
            del out
        if seconds > self.request.call_limit_s:
            raise Refusal(
                "skipped", f"one call takes {seconds:.1f} s, more than --call-limit-s {self.request.call_limit_s:g}"
            )
        with scope():
            peak = measure.peak_memory(lambda: step(entry, whole), self.device)
        if peak is not None:
            inputs = sum(t.numel() * t.element_size() for t in entry.inputs)
            entry.row.peak_bytes = inputs + peak
            entry.row.extra_bytes = max(0, inputs + peak - case.tensor_bytes())
        entry.contender = self._contender(entry, case, scope)

    def _contender(self, entry: Entry, case: Case, scope: Any) -> Contender:
        if case.direction == "backward":
            assert entry.prepared is not None
            with scope():
                out = entry.prepared.forward(*entry.inputs)
            return Contender(lambda: torch.autograd.grad(out, entry.inputs, entry.do, retain_graph=True), scope)
        if case.direction == "both":
            return Contender(lambda: step(entry, "both"), scope)
        forward, inputs = entry.prepared.forward, entry.inputs  # type: ignore[union-attr]
        return Contender(lambda: forward(*inputs), scope)

    def _scope(self, entry: Entry) -> Callable[[], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def scope() -> Iterator[None]:
            assert entry.prepared is not None
            with entry.prepared.scope(), torch.set_grad_enabled(entry.row.case.direction != "forward"):
                yield

        return scope

    def _name_kernels(self, entries: list[Entry]) -> None:
        calls = {e.provider.name: (e.contender.call, e.contender.scope) for e in entries if e.contender is not None}
        names = kernels_that_ran(calls, self.device)
        for entry in entries:
            entry.row.kernels = names.get(entry.provider.name, [])
            expected = entry.provider.kernels
            if (
                self.device.type == "cuda"
                and expected
                and entry.row.kernels
                and not _any_matches(expected, entry.row.kernels)
            ):
                entry.row.status = "fell back"
                entry.row.reason = f"no kernel matches /{expected}/; ran {', '.join(entry.row.kernels[:3])}"

    def _finish(self, entry: Entry, monitor: Monitor, found: Results) -> None:
        row, contender = entry.row, entry.contender
        if contender is None or not contender.samples_ms:
            if row.status == files.OK:
                row.status, row.reason = "failed", "no timing was taken"
            return
        per_turn = len(contender.turns_ms[0])
        samples, late = contender.samples_ms, contender.late
        row.timing = files.Timing(samples, contender.summary(), contender.method, contender.l2, per_turn, late)
        if late > len(samples) / 20:
            waited = f"the GPU waited for the CPU in {late} of {len(samples)} calls"
            row.note = waited if row.note is None else f"{row.note}; {waited}"
        row.clock = monitor.during(contender.intervals)
        if row.case.measure == "call":
            return  # the CPU's time says nothing about FLOPs
        ms = row.timing.summary.median
        row.tflops, row.gbytes_per_s = row.flops / ms / 1e9, row.ideal_bytes / ms / 1e6  # type: ignore[operator]
        ceiling = found.ceilings
        if ceiling.matmul_tflops.get(row.case.dtype):
            row.of_matmul = row.tflops / ceiling.matmul_tflops[row.case.dtype]
        if ceiling.copy_gbytes_per_s:
            row.of_copy = row.gbytes_per_s / ceiling.copy_gbytes_per_s
        device = found.provenance["device"]
        row.matrix_unit = ceilings.matrix_unit_use(
            row.flops or 0,
            ms,
            row.clock.sm_mhz if row.clock else None,
            device.get("arch"),
            row.case.dtype,
            device.get("multiprocessors"),
        )

    @contextlib.contextmanager
    def _guarded(self, entry: Entry, case: Case, tensors: Tensors) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a provider raises becomes its row
            status, reason = explain(error)
            name = entry.provider.name
            if name in SDPA_BACKENDS and "available kernel" in reason.lower() and entry.prepared is not None:
                status, reason = "unsupported", why_no_kernel(SDPA_BACKENDS[name], case, tensors, entry.prepared)
            entry.refuse(status, reason)
            del error
            self._clean()

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _any_matches(pattern: str, names: list[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def make_tensors(case: Case, device: torch.device, seed: int) -> Tensors:
    """Normal numbers; the same for the same case and seed on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed + zlib.crc32(case.label.encode()))
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    return Tensors(
        q=normal(case.batch, case.heads, case.len_q, case.dim),
        k=normal(case.batch, case.heads_k, case.len_k, case.dim),
        v=normal(case.batch, case.heads_k, case.len_k, case.dim_v),
        do=normal(case.batch, case.heads, case.len_q, case.dim_v) if case.direction != "forward" else None,
        bias=normal(1, case.heads, case.len_q, case.len_k) if case.bias else None,
        sinks=normal(case.heads).float() if case.sinks else None,
    )


def step(entry: Entry, direction: str) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    assert entry.prepared is not None
    out = entry.prepared.forward(*entry.inputs)
    return out, (torch.autograd.grad(out, entry.inputs, entry.do) if direction == "both" else None)


def poison(out: torch.Tensor) -> None:
    """NaN into memory that is about to be freed, so that an element which is not written shows."""
    with torch.no_grad():
        out.detach().fill_(float("nan"))
