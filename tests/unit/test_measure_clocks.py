"""Clocks and energy, from sources that are made up: NVML through a fake nvidia-ml-py, nvidia-smi's lines, RAPL's files."""

from __future__ import annotations

import io
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strobe.measure import clocks
from strobe.measure.clocks import Monitor, Nvml, Sample
from strobe.measure.energy import EnergyLog, Rapl

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeNvml(types.ModuleType):
    """The functions of nvidia-ml-py that are asked, with answers that a test can change; a missing one raises as
    there."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = 0, 1, 0, 186

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetPowerUsage": 612_310,
            "nvmlDeviceGetTemperature": 56,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
            "nvmlDeviceGetTotalEnergyConsumption": 1_000,
            "instant": 701_000,
        }

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        raise self.NVMLError("Invalid Argument")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        assert fields == [186]
        watts = self.answers["instant"]
        return [SimpleNamespace(nvmlReturn=0 if watts else 3, value=SimpleNamespace(uiVal=watts))]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def ask(handle: str, *arguments: int) -> Any:
            assert handle == "card 0"
            if name not in self.answers:
                raise self.NVMLError("Not Supported")
            answer = self.answers[name]
            return answer() if callable(answer) else answer

        return ask


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0000"))
    return fake


# ---- NVML


def test_a_sample_of_nvml(nvml: FakeNvml) -> None:
    source = Nvml(CUDA)
    sample = source.sample()
    assert (sample.sm_mhz, sample.power_w, sample.temperature_c) == (1755, 701.0, 56)
    assert sample.throttle == ("power cap (software)",) and source.joules() == 1.0 and source.instant_power
    source.close()
    assert nvml.open == 0


def test_older_cards_and_drivers(nvml: FakeNvml) -> None:
    """No instant power, the older name of the reasons, no energy: what there is, is read."""
    nvml.answers["instant"] = 0
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = nvml.answers.pop(
        "nvmlDeviceGetCurrentClocksEventReasons"
    )
    del nvml.answers["nvmlDeviceGetTotalEnergyConsumption"], nvml.answers["nvmlDeviceGetTemperature"]
    source = Nvml(CUDA)
    sample = source.sample()
    assert (sample.power_w, sample.temperature_c, sample.throttle) == (612.31, None, ("power cap (software)",))
    assert source.joules() is None and not source.instant_power


def test_energy_between_jumps(nvml: FakeNvml) -> None:
    """The log runs in a thread, against the counter of the fake card."""
    begun = time.perf_counter()
    nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = lambda: int((time.perf_counter() - begun) / 0.02) * 14_000
    monitor = Monitor(CUDA, energy=True)
    begun = time.perf_counter()
    time.sleep(0.4)
    end = time.perf_counter()
    watts, seen = monitor.mean_watts(begun, end), monitor.during([(begun, end)])
    monitor.close()
    assert monitor.energy_source == "NVML energy counter" and monitor.source == "NVML" and nvml.open == 0
    assert watts == pytest.approx(700, rel=0.15)  # 14 J every 20 ms; other work may hold the thread up
    assert seen is not None and seen.sm_mhz == 1755 and seen.n > 3


@pytest.mark.parametrize("new_driver", [True, False])
def test_without_the_package_nvidia_smi_is_asked(new_driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=None))
    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **more: Any) -> None:
            commands.append(command)
            self.stdout = io.StringIO("1755, 600.0, 56, 0x0000000000000004\n1700, 700.0, 57, 0x0000000000000000\n")

        def terminate(self) -> None:
            commands.append(["terminated"])

        def wait(self, timeout: float) -> None:
            pass

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        known = new_driver or "instant" not in command[2]
        return subprocess.CompletedProcess(command, 0 if known else 2, "700.0" if known else "not a valid field", "")

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(subprocess, "run", run)
    monitor = Monitor(CUDA, energy=True)
    monitor._thread.join(5)  # type: ignore[union-attr]
    assert commands[0][0] == "nvidia-smi" and monitor.source == "nvidia-smi" and monitor.instant_power == new_driver
    power = "power.draw.instant" if new_driver else "power.draw"
    assert commands[0][2] == f"--query-gpu=clocks.sm,{power},temperature.gpu,clocks_event_reasons.active"
    assert monitor.energy_source == "power sampled by nvidia-smi"
    assert monitor.mean_watts(0.0, time.perf_counter()) == 650.0
    monitor.close()
    assert commands[-1] == ["terminated"]


def test_with_neither_the_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=None))
    monkeypatch.setenv("PATH", "")
    monitor = Monitor(CUDA, energy=True)
    assert "nvidia-ml-py is not installed" in str(monitor.unavailable) and "pip install nvidia-ml-py" in str(
        monitor.unavailable
    )
    assert "nvidia-smi: " in str(monitor.unavailable) and monitor.energy_source is None
    assert monitor.mean_watts(0, 1e9) is None and monitor.now() is None
    monitor.close()


def test_nvidia_smi_lines() -> None:
    sample = clocks.parse_smi("1755, 612.31, 56, 0x0000000000000004")
    assert (sample.sm_mhz, sample.power_w, sample.temperature_c) == (1755, 612.31, 56)
    assert sample.throttle == ("power cap (software)",)
    assert clocks.parse_smi("[N/A], [N/A], 40, [N/A]").sm_mhz is None
    assert clocks.parse_smi("No devices were found").power_w is None


# ---- the monitor


def test_clocks_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(CPU)
    assert monitor.unavailable and monitor.now() is None and monitor.during([(0, 1e9)]) is None
    with monitor.paused():
        pass
    monitor.close()


def test_medians_over_intervals() -> None:
    monitor = Monitor(CPU)
    for second, mhz in enumerate((1000, 1900, 1800, 1700, 500)):
        throttle = ("power cap (software)",) if second == 2 else ()
        monitor._samples.append(Sample(float(second), mhz, 100.0 + second, 50.0, throttle))
    seen = monitor.during([(0.5, 1.5), (1.9, 3.1)])
    assert seen is not None and (seen.sm_mhz, seen.n, seen.throttle) == (1800, 3, ["power cap (software)"])
    assert monitor.during([(10, 11)]) is None


# ---- energy


def log_of(period: float, watts: float, offset: float = 0.0, until: float = 3.0) -> EnergyLog:
    """A counter that jumps every `period` seconds, looked at every 2 ms."""
    now = [0.0]
    log = EnergyLog(lambda: watts * period * ((now[0] + offset) // period))
    while now[0] < until:
        log.poll(now[0])
        now[0] += 0.002
    return log


@pytest.mark.parametrize("offset", [0.0, 0.013, 0.05, 0.099])
def test_jumps_of_a_counter_do_not_show(offset: float) -> None:
    """A plain difference over a second would be off by up to a tenth."""
    log = log_of(period=0.1, watts=700.0, offset=offset)
    assert log.mean_watts(0.5, 1.5) == pytest.approx(700.0, rel=0.005)


def test_too_few_jumps_say_nothing() -> None:
    assert log_of(period=0.1, watts=700.0).mean_watts(0.52, 0.64) is None
    assert log_of(period=2.0, watts=700.0).mean_watts(0.5, 1.5) is None
    silent = EnergyLog(lambda: None)
    silent.poll(0.0)
    assert silent.mean_watts(0.0, 1.0) is None


def rapl(folder: Path, microjoules: list[int], wrap: int = 1_000_000) -> None:
    for i, value in enumerate(microjoules):
        for name, zone in ((f"package-{i}", f"intel-rapl:{i}"), ("core", f"intel-rapl:{i}:0")):
            (folder / zone).mkdir(exist_ok=True)
            (folder / zone / "name").write_text(f"{name}\n")
            (folder / zone / "energy_uj").write_text(f"{value}\n")
            (folder / zone / "max_energy_range_uj").write_text(f"{wrap - 1}\n")


def test_rapl_adds_packages_and_survives_a_wrap(tmp_path: Path) -> None:
    rapl(tmp_path, [900_000, 100])
    counter = Rapl(tmp_path)
    assert counter.joules() == 0.0
    rapl(tmp_path, [950_000, 200])
    assert counter.joules() == pytest.approx(0.0501)
    rapl(tmp_path, [30_000, 200])  # beyond 1 J it begins again
    assert counter.joules() == pytest.approx(0.1301)


def test_without_rapl_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no CPU package has an energy counter"):
        Rapl(tmp_path)

    def unreadable() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(clocks, "Rapl", unreadable)
    monitor = Monitor(CPU, energy=True)
    assert monitor.no_energy == "RAPL: Permission denied" and monitor.energy_source is None
    monitor.close()


def test_energy_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joules = iter(range(10_000))
    monkeypatch.setattr(clocks, "Rapl", lambda: SimpleNamespace(name="RAPL", joules=lambda: next(joules)))
    monitor = Monitor(CPU, energy=True)
    begun = time.perf_counter()
    time.sleep(0.2)
    assert monitor.energy_source == "RAPL" and (monitor.mean_watts(begun, time.perf_counter()) or 0) > 0
    monitor.close()
