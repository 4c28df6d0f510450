"""Other people's packages: imported when a provider needs them, and a reason where that fails."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from strobe.bench.provider import Refusal


def imported(module: str, package: str, name: str | None = None) -> Any:
    """A module, or a name in it. Raises Refusal, whatever goes wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # packages tell at length what they could do with yet others
            loaded = importlib.import_module(module)
        return loaded if name is None else getattr(loaded, name)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module.startswith(missing):
            raise Refusal("not installed", f"{package} is not installed") from None
        raise Refusal("not installed", f"{package} needs {missing}, which is not installed") from None
    except Exception as error:  # binary packages fail in many ways: other ABI, other CUDA, other torch
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refusal("not installed", f"{package} cannot be imported: {why}") from None
