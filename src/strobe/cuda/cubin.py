"""What a compiled kernel costs, read from the cubin itself and from the assembler's log. Standard library only."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_NOBITS = 8  # a section that takes no space in the file
_SYMBOL_TABLE = 2

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


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def inspect(cubin: bytes) -> dict[str, KernelInfo]:
    """Registers, stack, shared memory and parameters of every kernel in a cubin."""
    if not is_complete(cubin):
        raise ValueError(f"cubin: {len(cubin)} bytes that are not a complete ELF file")
    sections = _sections(cubin)
    by_name = {s.name: s for s in sections}
    symbols = _symbols(cubin, sections)

    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, payload in _attributes(cubin, by_name.get(".nv.info")):
        table = {_REGISTERS: registers, _FRAME_SIZE: frames}.get(attribute)
        if table is not None:
            symbol, value = struct.unpack("<II", payload)
            table[symbols[symbol]] = value

    kernels = {}
    for section in sections:
        if not section.name.startswith(".text."):
            continue
        name = section.name.removeprefix(".text.")
        shared = by_name.get(f".nv.shared.{name}")
        params, max_threads = [], 0
        for attribute, payload in _attributes(cubin, by_name.get(f".nv.info.{name}")):
            if attribute == _PARAMETER:
                _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
                params.append((ordinal, offset, packed >> 18))
            elif attribute == _MAX_THREADS:
                x, y, z = struct.unpack("<III", payload)
                max_threads = x * y * z
        kernels[name] = KernelInfo(
            registers=registers.get(name, 0),
            stack_frame=frames.get(name, 0),
            static_smem=shared.size if shared else 0,
            max_threads=max_threads,
            params=tuple((offset, size) for _, offset, size in sorted(params)),
            code_bytes=section.size,
        )
    return kernels


def is_complete(cubin: bytes) -> bool:
    """Whether these bytes are a 64-bit ELF file with both its tables and every section inside it."""
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02":
        return False
    (segments,) = struct.unpack_from("<Q", cubin, 32)
    segment_entry, segment_count = struct.unpack_from("<HH", cubin, 54)
    if segments + segment_count * segment_entry > len(cubin):
        return False
    table, entry, count = _section_table(cubin)
    if count == 0 or entry < 64 or table + count * entry > len(cubin):
        return False
    for header in (struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)):
        _, kind, _, _, offset, size = header
        if kind not in (0, _NOBITS) and offset + size > len(cubin):
            return False
    return True


def spills(log: str) -> int:
    """Bytes of spill stores and loads in the assembler's verbose log, all kernels together."""
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))


def warnings(log: str) -> list[str]:
    """Lines in which the assembler says that it did not do what the kernel asked for."""
    complaint = re.compile(r"serialized|\bC7\d\d\d\b|setmaxnreg.*ignored|ignored.*setmaxnreg|\bwarning\b", re.I)
    return [line.strip() for line in log.splitlines() if complaint.search(line)]


def _section_table(cubin: bytes) -> tuple[int, int, int]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count = struct.unpack_from("<HH", cubin, 58)
    return table, entry, count


def _sections(cubin: bytes) -> list[_Section]:
    table, entry, count = _section_table(cubin)
    (names_index,) = struct.unpack_from("<H", cubin, 62)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + i * entry) for i in range(count)]
    names = headers[names_index][4]
    return [_Section(_text(cubin, names + h[0]), h[1], h[4], h[5], h[6]) for h in headers]


def _symbols(cubin: bytes, sections: list[_Section]) -> list[str]:
    symbols = next(s for s in sections if s.kind == _SYMBOL_TABLE)
    names = sections[symbols.link].offset
    starts = range(symbols.offset, symbols.offset + symbols.size, 24)
    return [_text(cubin, names + struct.unpack_from("<I", cubin, at)[0]) for at in starts]


def _attributes(cubin: bytes, section: _Section | None) -> Iterator[tuple[int, bytes]]:
    if section is None:
        return
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == _SIZED_VALUE:
            yield attribute, cubin[at : at + size]
            at += size


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()
