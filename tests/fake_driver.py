"""A driver that records launches instead of making them: what a call on a GPU does before the driver sees it."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
import torch

from strobe.cuda.runtime import driver


class Recorder:
    """Stands in for driver.Launch and keeps what each launch would have sent."""

    made: list[Recorder] = []

    def __init__(self, function: Any, grid: int, threads: int, smem: int, params: bytes, pdl: bool = False) -> None:
        self.function, self.grid, self.threads, self.smem = function, grid, threads, smem
        self.params = bytearray(params)
        self.sent: list[tuple[int, bytes]] = []
        self.stream = 0
        Recorder.made.append(self)

    def move_to(self, stream: int) -> None:
        self.stream = stream

    def enqueue(self) -> int:
        self.sent.append((self.stream, bytes(self.params)))
        return 0

    def launch(self, stream: int) -> None:
        self.move_to(stream)
        self.enqueue()


class Slot:
    def __init__(self, buffer: bytearray, offset: int = 0) -> None:
        self.buffer, self.offset = buffer, offset

    def point_to(self, address: int) -> None:
        struct.pack_into("<Q", self.buffer, self.offset, address)


class Kernel:
    def function(self, device: int) -> str:
        return f"function on {device}"


def install(monkeypatch: pytest.MonkeyPatch, stream: int = 77) -> None:
    """Replace strobe.cuda.runtime.driver, and what torch says of a GPU; calls go to this stream."""
    Recorder.made.clear()
    monkeypatch.setattr(driver, "Launch", Recorder)
    monkeypatch.setattr(driver, "TensorMapSlot", Slot)
    monkeypatch.setattr(driver, "address_is_first_word", lambda: True)
    monkeypatch.setattr(driver, "have_context", lambda device: None)
    monkeypatch.setattr(driver.TensorMapSpec, "encode", lambda self: b"\1" * driver.TENSOR_MAP_BYTES)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    guards = torch._C._dynamo.guards
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
