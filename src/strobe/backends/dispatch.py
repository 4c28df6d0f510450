"""Which backend runs a problem, and why not the others."""

from __future__ import annotations

import functools
import importlib

from strobe.backends.backend import Backend
from strobe.problem import Problem, Unsupported

# Fastest first. The first one that supports a problem runs it; those not marked automatic only when named.
_MODULES = {
    "sm90": "strobe.cuda.backend",
    "sm80": "strobe.cuda.backend",
    "aten_cpu": "strobe.backends.aten_cpu",
    "tiled": "strobe.backends.tiled.forward",
    "reference": "strobe.backends.reference",
    "emulator": "strobe.emulator.backend",
}
NAMES = tuple(_MODULES)


@functools.cache
def get(name: str) -> Backend:
    if name not in _MODULES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))} or None, got {name!r}")
    return importlib.import_module(_MODULES[name]).BACKENDS[name]


def rejections(problem: Problem) -> dict[str, str | None]:
    """For each backend, fastest first: None if it can run the problem, else the reason why not."""
    return {name: get(name).supports(problem) for name in NAMES}


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem, name: str | None = None) -> Backend:
    """The named backend or, if none is named, the fastest that can. A named backend never falls back to another."""
    if name is not None:
        backend = get(name)
        reason = backend.supports(problem)
        if reason is not None:
            raise Unsupported(f"backend {name!r} cannot run this: {reason}")
        return backend
    for candidate in NAMES:
        backend = get(candidate)
        if backend.automatic and backend.supports(problem) is None:
            return backend
    raise AssertionError("`tiled` supports every problem")
