"""Say why something was not measured, in the words of a row: whatever is raised has a status and a reason."""

from __future__ import annotations

import re

import torch

import strobe
from strobe.bench.provider import Refusal


def explain(error: BaseException) -> tuple[str, str]:
    """(status, reason) of whatever went wrong."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    text = re.sub(r"(?:/[\w.+-]+){2,}/([\w.+-]+)", r"\1", text)  # directories of this machine say nothing to others
    if isinstance(error, Refusal):
        return error.status, error.reason
    if (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text.lower()
        or "can't allocate memory" in text.lower()
    ):
        return "out of memory", text
    if isinstance(error, strobe.Unsupported | NotImplementedError):
        return "unsupported", text
    if isinstance(error, ModuleNotFoundError):
        return "not installed", text
    return "failed", f"{type(error).__name__}: {text}"
