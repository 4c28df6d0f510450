"""Compile kernels and compare their machine code with an earlier table: `python tests/replay.py --help`.

NVRTC is deterministic. A kernel whose code is the same as before needs no new measurement and no new test on a GPU. The
hashes are of what runs: `.text`, `.nv.info.<kernel>` (registers, parameters, barriers) and the constant sections. The name
of the kernel, and numbers and addresses of symbols, are left out, because every rename changes them.

    python tests/replay.py --write before.json           some 60 kernels, a minute
    python tests/replay.py --write before.json --all     every variant that calls ask for, half an hour
    python tests/replay.py --against before.json         compile those again and list which differ
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import struct
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elftools.elf.elffile import ELFFile

from strobe.cuda.parts.kernel import ENTRY, TemplateKernel
from strobe.cuda.plans.families import variants
from strobe.cuda.runtime import jit

ARCHS = ("sm_90a", "sm_80")  # the other architectures compile the same templates as sm_80
EVERY_DAY = 60
SIZED, PLACE_OF_PARAMETERS = 4, 0x0A  # of .nv.info: the format with a payload, and an attribute


def chosen(every: bool, old: Collection[str] = ()) -> dict[str, TemplateKernel]:
    """Kernels by architecture and name: those of an `old` table, else without `every` a fixed sample of each template."""
    found = {f"{arch} {kernel.name}": kernel for arch in ARCHS for kernel in variants(arch)}
    if every:
        return found
    if old:  # another template would change the sample
        return {name: kernel for name, kernel in found.items() if name in old}
    by_template: dict[tuple[str, str], list[str]] = {}
    for name, kernel in found.items():
        by_template.setdefault((kernel.arch, kernel.template), []).append(name)
    share = EVERY_DAY // len(by_template)
    sample = [name for names in by_template.values() for name in names[:: max(1, len(names) // share)]]
    return {name: found[name] for name in sample}


def code_hash(cubin: bytes, entry: str) -> str:
    """The hash of the kernel with this name, whatever the name is."""
    digest = hashlib.sha256()
    for section in ELFFile(io.BytesIO(cubin)).iter_sections():
        data = section.data()
        if section.name.startswith(".nv.info."):
            data = without_symbols(data)
        elif section.name == ".nv.constant4" or not section.name.startswith((".text", ".nv.constant")):
            continue  # the former is a table of the addresses of named constants
        digest.update(section.name.replace(entry, ENTRY).encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def without_symbols(info: bytes) -> bytes:
    """Attributes of a kernel. That of the parameters' place begins with the number of a symbol, which renames change."""
    kept, at = bytearray(), 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        end = at + 4 + (size if form == SIZED else 0)
        kept += info[at + 8 if attribute == PLACE_OF_PARAMETERS else at : end]
        at = end
    return bytes(kept)


def hashes(kernels: dict[str, TemplateKernel], workers: int) -> dict[str, str]:
    began, done = time.monotonic(), 0

    def one(name: str) -> tuple[str, str]:
        kernel = kernels[name]
        return name, code_hash(jit.get(kernel.source, kernel.arch, name=kernel.name).cubin, kernel.entry)

    found = {}
    with ThreadPoolExecutor(workers) as pool:
        for name, value in pool.map(one, kernels):
            found[name] = value
            done += 1
            if done % 20 == 0:
                print(f"{done} of {len(kernels)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the table of hashes to this file")
    parser.add_argument("--against", type=Path, help="compare with the table in this file")
    parser.add_argument("--all", action="store_true", help="every variant instead of the sample")
    parser.add_argument("--workers", type=int, default=2, help="compilations at a time (2)")
    options = parser.parse_args()
    if options.write is None and options.against is None:
        parser.error("give --write or --against")
    old = json.loads(options.against.read_text()) if options.against else {}
    kernels = chosen(options.all or len(old) > 4 * EVERY_DAY, old)
    new = hashes(kernels, options.workers)
    if options.write:
        options.write.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
        print(f"{len(new)} kernels in {options.write}")
    if not options.against:
        return 0
    both = [name for name in new if name in old]
    differ = [name for name in both if new[name] != old[name]]
    for name in differ:
        print(f"differs  {name}")
    for what, names in (("missing", set(old) - set(new)), ("new", set(new) - set(old))):
        for name in sorted(names):
            print(f"{what}  {name}")
    print(f"{len(both) - len(differ)} of {len(both)} kernels have the code they had")
    return 1 if differ or set(old) - set(new) else 0


if __name__ == "__main__":
    sys.exit(main())
