"""Watts and joules, from counters that add up energy: NVML's on a GPU, RAPL's on a CPU.

NVML's counter stands still for some 100 ms and then jumps, so its plain difference over a second is off by up to a
tenth. It is therefore read every few milliseconds, and the mean power is taken from one jump to another. Where there is
no counter, sampled power stands in, and the source says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SHARE = 0.5  # of an interval that the jumps in it have to cover


@dataclass
class Energy:
    """The energy of one provider on one case, while it ran alone."""

    watts: float
    joules_per_call: float
    joules_per_tflop: float | None
    joules_per_1000_tokens: float | None
    source: str


class EnergyLog:
    """A log of the times at which a counter showed a new value: (time, joules)."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._jumps: list[tuple[float, float]] = []
        self._last: float | None = None

    def poll(self, at: float) -> None:
        value = self._read()
        with self._lock:
            if value is not None and value != self._last:
                if self._last is not None:  # when the first value appeared is not known
                    self._jumps.append((at, value))
                self._last = value

    def mean_watts(self, begin: float, end: float) -> float | None:
        """Return the mean power from the first to the last jump inside the interval; None if those are too few or too
        close."""
        with self._lock:
            inside = [jump for jump in self._jumps if begin <= jump[0] <= end]
        if len(inside) < 2 or inside[-1][0] - inside[0][0] < _SHARE * (end - begin):
            return None
        (t0, j0), (t1, j1) = inside[0], inside[-1]
        return (j1 - j0) / (t1 - t0)


class Rapl:
    """The energy counters of a machine's CPU packages, where this user may read them."""

    name = "RAPL, CPU packages"

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        """Raises OSError, saying why, if there are none to read."""
        packages = [
            zone
            for zone in sorted(root.glob("intel-rapl:*"))
            if zone.name.count(":") == 1 and (zone / "name").read_text().startswith("package")
        ]
        if not packages:
            raise OSError(f"no CPU package has an energy counter in {root}")
        self._counters = [zone / "energy_uj" for zone in packages]
        self._wraps = [int((zone / "max_energy_range_uj").read_text()) for zone in packages]
        self._last = [int(counter.read_text()) for counter in self._counters]
        self._joules = 0.0

    def joules(self) -> float:
        """Return the energy since this object was made. A counter that has wrapped around counts on."""
        for i, counter in enumerate(self._counters):
            now = int(counter.read_text())
            self._joules += ((now - self._last[i]) % (self._wraps[i] + 1)) * 1e-6
            self._last[i] = now
        return self._joules
