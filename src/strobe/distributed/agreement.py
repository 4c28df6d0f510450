"""Ranks make sure that they mean the same call before they exchange tensors: else one would wait for what never comes.

Each rank contributes a digest of the facts on which all must agree, or word of an error of its own. Where digests differ,
the facts follow, and every rank raises an error that names what differs.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from strobe.distributed.transport import Transport

_TEXT = 2048  # bytes of facts that are shown
_FAILED, _DIFFERENT = -1, -2
# Calls on which the ranks of a group have agreed. On a GPU reading a digest would stall the queue of kernels.
_agreed: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def agree(
    transports: Sequence[Transport],
    facts: dict[str, Any],
    error: Exception | None,
    device: torch.device,
    check: bool | None,
) -> None:
    """`facts`: the name of the function first. `error`: what this rank would raise on its own, and raises here. `check`:
    True, at each call; False, never; None, at each call on a CPU and elsewhere at each new kind of call. Another seed of
    the dropout is no other kind: each step of a training run has its own."""
    if check is False:
        if error is not None:
            raise error
        return
    every_call = check is True or device.type == "cpu"
    text, kind = _text(facts), _digest(_text({name: value for name, value in facts.items() if name != "seed"}))
    holder = getattr(transports[0], "group", transports[0])
    agreed = _agreed.setdefault(holder, set())
    if not every_call and error is not None and agreed:
        raise error  # the others may know the call and not ask: they would not hear of it
    if not every_call and error is None and kind in agreed:
        return
    mine = torch.tensor([_FAILED if error is not None else _digest(text)], dtype=torch.int64, device=device)
    for transport in reversed(transports):
        digests = _gathered(transport, mine).unique()
        mine = digests if digests.numel() == 1 else digests.new_tensor([_DIFFERENT])
    verdict = int(mine)
    if verdict >= 0:
        agreed.add(kind)
        return
    if error is not None:
        text = json.dumps(
            {"error": f"{type(error).__name__}: {error}"[: _TEXT // 8]}
        )  # which JSON may write as six bytes each
    told = _told(transports, text, device)
    if error is not None:
        raise error
    raise ValueError(_difference(facts["function"], told))


def _text(facts: dict[str, Any]) -> str:
    return json.dumps({name: str(value) for name, value in facts.items()})


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def short_text(plan: str) -> str:
    """The text of a plan as a fact: where it is long its beginning, and a digest."""
    return plan if len(plan) < 200 else f"{plan[:100]}… ({hashlib.sha256(plan.encode()).hexdigest()[:16]})"


def _gathered(transport: Transport, mine: torch.Tensor) -> torch.Tensor:
    into = mine.new_empty((transport.size, *mine.shape))
    if transport.size == 1:
        return into.copy_(mine[None])
    transport.all_gather(into, mine).wait()
    return into


def _told(transports: Sequence[Transport], text: str, device: torch.device) -> list[dict[str, str]]:
    """The facts of each rank, in the order of the plan."""
    data = text.encode()
    if len(data) > _TEXT:
        data = json.dumps({"error": "too many facts to show"}).encode()
    mine = torch.zeros(1, _TEXT, dtype=torch.uint8)
    mine[0, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    texts = mine.to(device)
    for transport in reversed(transports):
        texts = _gathered(transport, texts).flatten(0, 1)
    return [json.loads(bytes(row.tolist()).rstrip(b"\0").decode()) for row in texts.cpu()]


def _difference(function: str, told: list[dict[str, str]]) -> str:
    errors = [f"rank {rank}: {facts['error']}" for rank, facts in enumerate(told) if "error" in facts]
    if errors:
        return f"{function} cannot run: {'; '.join(errors)}"
    lines = []
    for name in told[0]:
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            by_value.setdefault(facts.get(name, "missing"), []).append(rank)
        if len(by_value) > 1:
            each = ", ".join(f"{value} on rank {' '.join(map(str, ranks))}" for value, ranks in by_value.items())
            lines.append(f"{name} is {each}")
            if name == "function":  # which has other facts
                break
    return f"ranks disagree about the call: {'; '.join(lines)}"
