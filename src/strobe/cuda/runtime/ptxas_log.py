"""Read what the assembler's log says about a kernel."""

from __future__ import annotations

import re


def spills(log: str) -> int:
    """Bytes of spill stores and loads in the assembler's verbose log, all kernels together."""
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))


def warnings(log: str) -> list[str]:
    """Lines in which the assembler says that it did not do what the kernel asked for."""
    complaint = re.compile(r"serialized|\bC7\d\d\d\b|setmaxnreg.*ignored|ignored.*setmaxnreg|\bwarning\b", re.I)
    return [line.strip() for line in log.splitlines() if complaint.search(line)]
