"""A request says what a run shall measure."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path

import torch

from strobe.bench.case import BenchCase
from strobe.bench.suites import cases
from strobe.measure import stopwatch, sustained
from strobe.measure.method import METHODS, TURNS


@dataclass(frozen=True)
class Request:
    suites: tuple[str, ...]
    device: torch.device
    methods: tuple[str, ...] = (TURNS,)
    direction: str = "forward"
    providers: tuple[str, ...] = ()  # names, kinds or prefixes; () for all
    only: tuple[str, ...] = ()  # patterns that a case's label or key must match
    seed: int = 0
    settings: stopwatch.Settings = field(default_factory=stopwatch.Settings)
    sustained: sustained.Settings = field(default_factory=sustained.Settings)
    out: Path | None = None
    profile: bool = True
    call_limit_s: float = 3.0  # a provider that takes longer for one call is not timed
    compile_limit_s: float = 90.0  # for one provider that compiles, all its shapes together

    def __post_init__(self) -> None:
        if unknown := [method for method in self.methods if method not in METHODS]:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {unknown[0]!r}")

    def cases(self) -> list[BenchCase]:
        """Those of the suites that match, and that the methods can measure."""
        of_suites = [c for suite in self.suites for c in cases(suite, self.direction, self.device.type == "cuda")]
        chosen = list(dict.fromkeys(of_suites))  # models has the cases of llama
        if self.only:
            chosen = [
                c for c in chosen if any(fnmatch.fnmatch(c.label, p) or fnmatch.fnmatch(c.key, p) for p in self.only)
            ]
            if not chosen:
                raise ValueError(f"only: no case of {', '.join(self.suites)} matches {', '.join(self.only)}")
        able = [c for c in chosen if self.methods_for(c)]
        if not able:
            raise ValueError(
                f"method: {', '.join(self.methods)} cannot measure {', '.join(self.suites)}, whose cases are not about "
                f"the time of a call on the device; {TURNS} can"
            )
        return able

    def methods_for(self, case: BenchCase) -> tuple[str, ...]:
        """Return the methods for a case. What a call costs the CPU and how long a graph takes are measured in a way of
        their own."""
        return self.methods if case.measure in ("time", "model") else tuple(m for m in self.methods if m == TURNS)

    def repeat(self, case: BenchCase, method: str = TURNS) -> str:
        """The command that makes one row again, with all providers it was interleaved with: they move a GPU's clock."""
        s, words = self.settings, ["strobe bench", f"--suite {case.suite}", f"--only '{case.key}'"]
        words += [f"--provider {name}" for name in self.providers]
        words += [] if method == TURNS else [f"--method {method}"]
        if self.direction != "forward":
            words.append(f"--pass {self.direction}")
        words += [f"--device {self.device.type}", f"--seed {self.seed}"]
        if method == TURNS:
            words += [f"--budget-ms {s.budget_ms:g}", f"--rounds {s.rounds}"]
            words += [f"--l2 {s.l2}"] if s.l2 != "flushed" else []
        return " ".join(words)
