"""List every provider there is, and choose those that a request means."""

from __future__ import annotations

from strobe.bench import llama, megatron, peers, strobe_providers, torch_attention, unfused
from strobe.bench.provider import Provider
from strobe.measure.palette import KINDS


def every() -> list[Provider]:
    """All there are, ours first."""
    modules = (strobe_providers, torch_attention, unfused, megatron, peers, llama)
    return [provider for module in modules for provider in module.providers()]


def select(names: list[str] | None) -> list[Provider]:
    """Return the providers of these names, or all. A name may also be a kind ("ours", "standard", "peer") or a prefix
    ("torch", "strobe")."""
    providers = every()
    if not names:
        return providers
    chosen: list[Provider] = []
    for name in names:
        hits = [p for p in providers if name in (p.name, p.kind)] or [
            p for p in providers if p.name.startswith(f"{name}-")
        ]
        if not hits:
            raise ValueError(
                f"provider must be one of {', '.join(p.name for p in providers)}, "
                f"a kind ({', '.join(KINDS)}) or a prefix, got {name!r}"
            )
        chosen += [p for p in hits if p not in chosen]
    return chosen
