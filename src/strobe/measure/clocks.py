"""The GPU's clock, power, temperature and throttle reasons while a benchmark runs, sampled by a thread.

NVML is part of the driver and is called directly; where its library cannot be loaded, `nvidia-smi` is asked instead.
Nothing is ever set: the card is measured as it is found.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

_INTERVAL_S = 0.01
_REASONS = {
    0x2: "application clocks setting",
    0x4: "power cap (software)",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake (hardware)",
    0x100: "display clock setting",
}


@dataclass
class Clock:
    """Of the GPU while the row ran."""

    sm_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: list[str] = field(default_factory=list)
    n: int = 0


@dataclass(frozen=True)
class Sample:
    at: float  # time.perf_counter()
    sm_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: tuple[str, ...]


def reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


class Nvml:
    """The four queries that matter, through libnvidia-ml."""

    name = "NVML"

    def __init__(self, device: torch.device) -> None:
        self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        try:
            self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._handle))
        except OSError:
            self._call("nvmlDeviceGetHandleByIndex_v2", device.index or 0, ctypes.byref(self._handle))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._lib, function)(*arguments)
        if status:
            raise OSError(f"{function}: error {status}")

    def _read(self, function: str, *arguments: Any, ctype: Any = ctypes.c_uint) -> int | None:
        value = ctype()
        try:
            self._call(function, self._handle, *arguments, ctypes.byref(value))
        except OSError:  # not every card reports everything
            return None
        return value.value

    def sample(self) -> Sample:
        sm_clock, on_die = 1, 0
        power = self._read("nvmlDeviceGetPowerUsage")
        bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctype=ctypes.c_ulonglong)
        return Sample(
            time.perf_counter(),
            self._read("nvmlDeviceGetClockInfo", sm_clock),
            None if power is None else power / 1e3,
            self._read("nvmlDeviceGetTemperature", on_die),
            reasons(bits or 0),
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._call("nvmlShutdown")


class NvidiaSmi:
    """A slower stand-in: one process that prints a line every 50 ms."""

    name = "nvidia-smi"

    def __init__(self, device: torch.device) -> None:
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        which = f"GPU-{uuid}" if uuid else str(device.index or 0)
        fields = "clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active"
        self._process = subprocess.Popen(
            ["nvidia-smi", f"--id={which}", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "50"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def sample(self) -> Sample:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError("nvidia-smi ended")
        return parse_smi(line)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(5)


def parse_smi(line: str) -> Sample:
    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:  # "[N/A]"
            return None

    parts = [part.strip() for part in line.split(",")]
    bits = int(parts[3], 16) if len(parts) > 3 and parts[3].startswith("0x") else 0
    return Sample(time.perf_counter(), number(parts[0]), number(parts[1]), number(parts[2]), reasons(bits))


class Monitor:
    """Samples in the background between `start` and `stop`; `during` says what was seen in some intervals."""

    def __init__(self, device: torch.device) -> None:
        self._source: Nvml | NvidiaSmi | None = None
        self.unavailable: str | None = None
        self._samples: list[Sample] = []
        self._running = threading.Event()
        self._quit = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            self.unavailable = f"no clocks are read on {device.type}"
            return
        problems = []
        for source in (Nvml, NvidiaSmi):
            try:
                self._source = source(device)
                break
            except (OSError, AttributeError) as error:
                problems.append(f"{source.name}: {error}")
        if self._source is None:
            self.unavailable = "; ".join(problems)
            return
        self._running.set()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="strobe-clocks")
        self._thread.start()

    @property
    def source(self) -> str | None:
        return None if self._source is None else self._source.name

    def _sample(self) -> None:
        assert self._source is not None
        while not self._quit.is_set():
            self._running.wait()
            try:
                self._samples.append(self._source.sample())
            except OSError:
                return
            if isinstance(self._source, Nvml):
                self._quit.wait(_INTERVAL_S)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While the CPU itself is measured."""
        self._running.clear()
        try:
            yield
        finally:
            self._running.set()

    def now(self) -> dict[str, Any] | None:
        return asdict(self._samples[-1]) | {"at": None} if self._samples else None

    def during(self, intervals: list[tuple[float, float]]) -> Clock | None:
        """Medians over the samples that fall into the intervals; None if there are none."""
        samples = list(self._samples)
        times = [s.at for s in samples]
        inside = [
            s for a, b in intervals for s in samples[bisect.bisect_left(times, a) : bisect.bisect_right(times, b)]
        ]
        if not inside:
            return None

        def median(values: list[float | None]) -> float | None:
            known = sorted(v for v in values if v is not None)
            return known[len(known) // 2] if known else None

        return Clock(
            sm_mhz=median([s.sm_mhz for s in inside]),
            power_w=median([s.power_w for s in inside]),
            temperature_c=median([s.temperature_c for s in inside]),
            throttle=sorted({reason for s in inside for reason in s.throttle}),
            n=len(inside),
        )

    def close(self) -> None:
        self._quit.set()
        self._running.set()
        if self._thread is not None:
            self._thread.join(2)
        if self._source is not None:
            self._source.close()
