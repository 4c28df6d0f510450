"""The GPUs that kernels are compiled for: compute capabilities, names for the compiler, shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

SMEM_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}  # of one block


def generation(arch: str) -> str:
    """The oldest architecture with as much shared memory, and so with the same tiles: consumer Ampere, Ada and consumer
    Blackwell have little."""
    number = int("".join(c for c in arch if c.isdigit()))
    if number in (86, 89) or number >= 120:
        return "sm_86"
    return "sm_80" if number < 90 else "sm_90" if number < 100 else "sm_100"


@dataclass(frozen=True)
class Architecture:
    """The compute capabilities on which a kernel runs, from `first` to `last`."""

    first: tuple[int, int]
    last: tuple[int, int] | None  # None: every later one, too
    gpus: str  # in words
    reason: str  # why others do not run it
    letter: str = ""  # behind the compiler's name; "a": instructions that no other architecture has

    def refuses(self, capability: tuple[int, int]) -> str | None:
        """Return why a GPU of this compute capability does not run the kernel; None if it does."""
        if self.first <= capability and (self.last is None or capability <= self.last):
            return None
        return f"compute capability {capability[0]}.{capability[1]}; {self.reason}"

    def target(self, capability: tuple[int, int]) -> str:
        """The compiler's name of the architecture."""
        return f"sm_{capability[0]}{capability[1]}{self.letter}"

    def has_target(self, arch: str) -> bool:
        """Return whether the kernel can be compiled for `arch`, a name like sm_80 or sm_90a."""
        parts = re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", arch)
        return parts is not None and parts[3] == self.letter and self.refuses((int(parts[1]), int(parts[2]))) is None

    def tiles_of(self, arch: str) -> str:
        """The architecture whose tiles serve `arch`."""
        return arch if self.letter else generation(arch)


AMPERE = Architecture((8, 0), None, "an NVIDIA GPU, Ampere or later", "the kernels need 8.0 (Ampere) or later")
HOPPER = Architecture((9, 0), (9, 0), "a Hopper GPU (H100, H200)", "wgmma exists on 9.0 (Hopper) alone", letter="a")
ARCHITECTURES = (HOPPER, AMPERE)  # the first that a GPU has names it to the compiler


def target(capability: tuple[int, int]) -> str:
    """The compiler's name for a GPU."""
    names = (a.target(capability) for a in ARCHITECTURES if a.refuses(capability) is None)
    return next(names, "sm_{}{}".format(*capability))
