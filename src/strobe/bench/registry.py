"""Who is measured: every provider there is, and which of them a request means."""

from __future__ import annotations

from strobe.bench import llama, megatron, peers, rungs, standard_cuda, strobe_providers, torch_attention
from strobe.bench.provider import Provider
from strobe.measure.palette import KINDS

ON_REQUEST = ("ladder",)  # kinds that are not measured unless asked for by name, kind or prefix


def every() -> list[Provider]:
    """All there are, ours first."""
    others = (torch_attention, standard_cuda, megatron, peers, llama)
    return [*strobe_providers.providers(), *rungs.providers(), *(p for module in others for p in module.providers())]


def select(names: list[str] | None) -> list[Provider]:
    """By name, or all but those of kinds that wait to be asked for. A name may also be a kind ("ours", "ladder",
    "standard", "peer") or a prefix ("torch", "strobe", "ladder-05")."""
    found = every()
    if not names:
        return [p for p in found if p.kind not in ON_REQUEST]
    chosen: list[Provider] = []
    for name in names:
        hits = [p for p in found if name in (p.name, p.kind)] or [p for p in found if p.name.startswith(f"{name}-")]
        if not hits:
            raise ValueError(
                f"provider must be one of {', '.join(p.name for p in found)}, "
                f"a kind ({', '.join(KINDS)}) or a prefix, got {name!r}"
            )
        chosen += [p for p in hits if p not in chosen]
    return chosen
