"""Choose the backend that runs a problem, and say why the others do not."""

from __future__ import annotations

import functools
import importlib

from strobe.backends.backend import Backend, Pass
from strobe.problem import Problem, Unsupported
from strobe.problem.arguments import Layout

# Fastest first. The first one that supports a problem runs it; those not marked automatic only when named.
_MODULES = {
    "sm90": "strobe.cuda.backend",
    "sm80": "strobe.cuda.backend",
    "aten_cpu": "strobe.backends.aten_cpu",
    "tiled": "strobe.backends.tiled.backend",
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
    """Return for each backend, fastest first: None if it can run the problem, else the reason why not."""
    return {name: get(name).supports(problem) for name in NAMES}


def choose(problem: Problem, name: str | None = None) -> Backend:
    """The named backend or, if none is named, the fastest that can. A named backend never falls back to another."""
    if name is not None:
        backend = get(name)
        reason = backend.supports(problem)
        if reason is not None:
            raise Unsupported(f"backend {name!r} cannot run this: {reason}")
        return backend
    return _fastest(problem)


def choose_backward(problem: Problem, forward: Backend) -> Backend:
    """Return the backend that ran the forward pass if it has a backward pass for this problem, which asks for
    gradients. Else the fastest, unless the forward's backend was one that must be named: then `tiled`."""
    if forward.supports(problem) is None:
        return forward
    return _fastest(problem) if forward.automatic else get("tiled")


def _fastest(problem: Problem) -> Backend:
    for candidate in NAMES:
        backend = get(candidate)
        if backend.automatic and backend.supports(problem) is None:
            return backend
    assert problem.invariant, "`tiled` supports every other problem"
    invariant = [b for b in map(get, NAMES) if b.automatic and b.can.invariant]
    reasons = "; or ".join(f"{b.name!r}, which cannot run this: {b.supports(problem)}" for b in invariant)
    raise Unsupported(f"invariant=True needs backend {reasons}")


def bind(backend: Backend, problem: Problem, layout: Layout) -> Pass:
    """An empty problem has nothing to attend to: `tiled` fills in the results, whichever backend was asked."""
    return (get("tiled") if problem.empty else backend).bind(problem, layout)
