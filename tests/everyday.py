"""Choose which of many parameters `make test` runs. `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def everyday(parameters: Sequence[Any], names: Iterable[str]) -> list[Any]:
    """Mark, for `pytest.mark.parametrize`, the parameters that `names` does not hold as thorough. A parameter's name is
    its str."""
    chosen, known = set(names), [str(parameter) for parameter in parameters]
    if unknown := sorted(chosen - set(known)):
        raise LookupError(f"everyday: {', '.join(unknown)}; must be among {', '.join(known)}")
    return [
        pytest.param(parameter, id=name, marks=() if name in chosen else pytest.mark.thorough)
        for parameter, name in zip(parameters, known, strict=True)
    ]
