"""The GPU's clock, power, temperature, throttle reasons and energy while a benchmark runs, sampled by a thread.

They come from NVML through nvidia-ml-py (the extra `bench`), or from `nvidia-smi` where that is missing. On a CPU there
is energy alone, where its counters can be read. Nothing is ever set: the card is measured as it is found."""

from __future__ import annotations

import bisect
import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from strobe.measure.energy import EnergyLog, Rapl

_INTERVAL_S = 0.01  # between two samples of the clock
_ENERGY_INTERVAL_S = 0.004  # between two looks at the energy counter
_INSTALL = "install it with `pip install nvidia-ml-py`"
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
    """The state of the GPU while a row ran: medians."""

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
    """Reads a GPU through nvidia-ml-py. Raises OSError, saying why, where it cannot be used."""

    name = "NVML"
    energy_name = "NVML energy counter"
    interval_s = _INTERVAL_S

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError:
            raise OSError(f"nvidia-ml-py is not installed; {_INSTALL}") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
            try:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except pynvml.NVMLError:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from None
        self.instant_power = self._instant_watts() is not None

    def _read(self, function: str, *arguments: Any) -> Any:
        """None where the card, the driver or this version of nvidia-ml-py does not know it."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _instant_watts(self) -> float | None:
        """Newer cards answer the plain question with a mean over the last second; this is the present."""
        which = getattr(self._nvml, "NVML_FI_DEV_POWER_INSTANT", None)
        values = None if which is None else self._read("nvmlDeviceGetFieldValues", [which])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return values[0].value.uiVal / 1e3

    def sample(self) -> Sample:
        average = None if self.instant_power else self._read("nvmlDeviceGetPowerUsage")
        bits = self._read("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # the older name
            bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Sample(
            time.perf_counter(),
            self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            self._instant_watts() if self.instant_power else None if average is None else average / 1e3,
            self._read("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            reasons(bits or 0),
        )

    def joules(self) -> float | None:
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


class NvidiaSmi:
    """A slower stand-in: one process that prints a line every 50 ms."""

    name = "nvidia-smi"
    energy_name = "power sampled by nvidia-smi"
    interval_s = 0.0  # reading a line waits for it

    def __init__(self, device: torch.device) -> None:
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        self._which = f"GPU-{uuid}" if uuid else str(device.index or 0)
        power = self._known(
            "power.draw.instant", "power.draw"
        )  # the latter: a mean over the last second, on newer cards
        reasons = self._known("clocks_event_reasons.active", "clocks_throttle_reasons.active")
        self.instant_power = power == "power.draw.instant"
        self._process = subprocess.Popen(
            [*self._query("clocks.sm", power, "temperature.gpu", reasons), "-lms", "50"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _query(self, *fields: str) -> list[str]:
        return ["nvidia-smi", f"--id={self._which}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]

    def _known(self, new: str, old: str) -> str:
        """The new name of a field, if this driver knows it."""
        try:
            done = subprocess.run(self._query(new), capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            return old
        return new if done.returncode == 0 and "N/A" not in done.stdout else old

    def sample(self) -> Sample:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError("nvidia-smi ended")
        return parse_smi(line)

    def joules(self) -> float | None:
        return None

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(5)


def parse_smi(line: str) -> Sample:
    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:  # "[N/A]"
            return None

    parts = [*(part.strip() for part in line.split(",")), "", "", "", ""]
    bits = int(parts[3], 16) if parts[3].startswith("0x") else 0
    return Sample(time.perf_counter(), number(parts[0]), number(parts[1]), number(parts[2]), reasons(bits))


class Monitor:
    """Samples in the background until it is closed. `during` and `mean_watts` say what was seen in an interval."""

    def __init__(self, device: torch.device, energy: bool = False) -> None:
        """`energy`: also follow an energy counter, for which the thread wakes more often."""
        self._source: Nvml | NvidiaSmi | None = None
        self._rapl: Rapl | None = None
        self._samples: list[Sample] = []
        self._running = threading.Event()
        self._quit = threading.Event()
        self._thread: threading.Thread | None = None
        self._energy: EnergyLog | None = None
        self.unavailable: str | None = None  # why there are no clocks
        self.no_energy: str | None = None  # why there are no joules
        if device.type == "cuda":
            self._find_source(device)
        else:
            self.unavailable = f"no clocks are read on {device.type}"
        if energy:
            self._find_energy(device)
        if self._source is not None or self._energy is not None:
            self._running.set()
            self._thread = threading.Thread(target=self._sample, daemon=True, name="strobe-clocks")
            self._thread.start()

    def _find_source(self, device: torch.device) -> None:
        problems = []
        for source in (Nvml, NvidiaSmi):
            try:
                self._source = source(device)
                return
            except OSError as error:
                problems.append(f"{source.name}: {error}")
        self.unavailable = "; ".join(problems)

    def _find_energy(self, device: torch.device) -> None:
        if self._source is not None:
            if self._source.joules() is not None:
                self._energy = EnergyLog(self._source.joules)
        elif device.type == "cpu":
            try:
                self._rapl = Rapl()
            except OSError as error:
                self.no_energy = f"RAPL: {error.strerror or error}"
            else:
                self._energy = EnergyLog(self._rapl.joules)
        else:
            self.no_energy = self.unavailable

    @property
    def source(self) -> str | None:
        return None if self._source is None else self._source.name

    @property
    def energy_source(self) -> str | None:
        """Return where `mean_watts` comes from; None if there is nothing."""
        if self._rapl is not None:
            return self._rapl.name
        if self._source is None:
            return None
        return self._source.energy_name if self._energy is not None else f"power sampled by {self._source.name}"

    @property
    def instant_power(self) -> bool:
        """Return whether sampled power is the present one, not a mean over the last second."""
        return self._source is not None and self._source.instant_power

    def _sample(self) -> None:
        due = 0.0
        while not self._quit.is_set():
            self._running.wait()
            now = time.perf_counter()
            try:
                if self._energy is not None:
                    self._energy.poll(now)
                if self._source is not None and now >= due:
                    self._samples.append(self._source.sample())
                    due = now + self._source.interval_s
            except OSError:
                return
            wait = self._source.interval_s if self._source is not None else _INTERVAL_S
            self._quit.wait(_ENERGY_INTERVAL_S if self._energy is not None and self._source is not None else wait)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop sampling while the CPU itself is measured."""
        self._running.clear()
        try:
            yield
        finally:
            self._running.set()

    def now(self) -> dict[str, Any] | None:
        return asdict(self._samples[-1]) | {"at": None} if self._samples else None

    def _inside(self, intervals: list[tuple[float, float]]) -> list[Sample]:
        samples = list(self._samples)
        times = [s.at for s in samples]
        return [s for a, b in intervals for s in samples[bisect.bisect_left(times, a) : bisect.bisect_right(times, b)]]

    def during(self, intervals: list[tuple[float, float]]) -> Clock | None:
        """Medians over the samples that fall into the intervals; None if there are none."""
        inside = self._inside(intervals)
        if not inside:
            return None
        return Clock(
            sm_mhz=_median([s.sm_mhz for s in inside]),
            power_w=_median([s.power_w for s in inside]),
            temperature_c=_median([s.temperature_c for s in inside]),
            throttle=sorted({reason for s in inside for reason in s.throttle}),
            n=len(inside),
        )

    def mean_watts(self, begin: float, end: float) -> float | None:
        """Return the mean power by the energy counter or, without one, that of its samples."""
        if self._energy is not None:
            return self._energy.mean_watts(begin, end)
        watts = [s.power_w for s in self._inside([(begin, end)]) if s.power_w is not None]
        return sum(watts) / len(watts) if watts else None

    def close(self) -> None:
        self._quit.set()
        self._running.set()
        if self._thread is not None:
            self._thread.join(2)
        if self._source is not None:
            self._source.close()


def _median(values: list[float | None]) -> float | None:
    numbers = sorted(v for v in values if v is not None)
    return numbers[len(numbers) // 2] if numbers else None
