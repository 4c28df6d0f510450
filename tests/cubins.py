"""Read the cost of a compiled kernel from its cubin: an ELF file with NVIDIA's own sections."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile

# Attributes of the .nv.info sections.
_REGISTERS, _FRAME_SIZE = 0x2F, 0x11  # in .nv.info, per symbol
_PARAMETER, _MAX_THREADS = 0x17, 0x05  # in .nv.info.<kernel>
_SIZED_VALUE = 4  # the attribute's format in which a payload of `size` bytes follows


@dataclass(frozen=True)
class KernelInfo:
    registers: int
    stack_frame: int
    static_smem: int
    max_threads: int
    params: tuple[tuple[int, int], ...]  # (offset, size) of each parameter
    code_bytes: int


def inspect(cubin: bytes) -> dict[str, KernelInfo]:
    """Registers, stack, shared memory and parameters of every kernel in a cubin."""
    elf = ELFFile(io.BytesIO(cubin))
    symbols = [symbol.name for symbol in elf.get_section_by_name(".symtab").iter_symbols()]
    totals: dict[int, dict[str, int]] = {_REGISTERS: {}, _FRAME_SIZE: {}}
    for attribute, payload in _attributes(elf, ".nv.info"):
        if attribute in totals:
            symbol, value = struct.unpack("<II", payload)
            totals[attribute][symbols[symbol]] = value
    kernels = {}
    for section in elf.iter_sections():
        if not section.name.startswith(".text."):
            continue
        name = section.name.removeprefix(".text.")
        own = list(_attributes(elf, f".nv.info.{name}"))
        params = sorted(_parameter(payload) for attribute, payload in own if attribute == _PARAMETER)
        threads = [struct.unpack("<III", payload) for attribute, payload in own if attribute == _MAX_THREADS]
        shared = elf.get_section_by_name(f".nv.shared.{name}")
        kernels[name] = KernelInfo(
            registers=totals[_REGISTERS].get(name, 0),
            stack_frame=totals[_FRAME_SIZE].get(name, 0),
            static_smem=shared["sh_size"] if shared else 0,
            max_threads=threads[0][0] * threads[0][1] * threads[0][2] if threads else 0,
            params=tuple((offset, size) for _, offset, size in params),
            code_bytes=section["sh_size"],
        )
    return kernels


def _parameter(payload: bytes) -> tuple[int, int, int]:
    """(ordinal, offset, size)"""
    _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
    return ordinal, offset, packed >> 18


def _attributes(elf: ELFFile, section: str) -> Iterator[tuple[int, bytes]]:
    found = elf.get_section_by_name(section)
    data = b"" if found is None else found.data()
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED_VALUE:
            yield attribute, data[at : at + size]
            at += size
