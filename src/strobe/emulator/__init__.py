"""Runs strobe's CUDA kernels on the CPU: the same source, the PTX wrappers replaced by `include/strobe/emu/`.

Needs a C++ compiler and nothing else. Every access is checked, deadlocks are explained, and in asynchronous mode copies
and matrix products complete late and threads run in random order, so that a missing wait or barrier shows.
"""

from strobe.emulator.compiler import CompilerMissing, FrameError, build, compiler
from strobe.emulator.program import Buffer, Counters, EmulatorError, Program
from strobe.emulator.tensor_map import encode_tensor_map

__all__ = [
    "Buffer",
    "CompilerMissing",
    "Counters",
    "EmulatorError",
    "FrameError",
    "Program",
    "build",
    "compiler",
    "encode_tensor_map",
]
