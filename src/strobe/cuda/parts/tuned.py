"""Tiles that `strobe tune` found on this machine. STROBE_TILES names the file that it wrote."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Tile = TypeVar("Tile")


def tile_name(dim: int, dim_v: int, kind: str) -> str:
    """The key of a tile in the file."""
    return f"{dim}/{dim_v} {kind}"


def tile(name: str, make: Callable[..., Tile], fits: Callable[[Tile], bool] = lambda tile: True) -> Tile | None:
    """The tile of this name, if the file has one. `fits`: a file may come from another GPU."""
    fields = best().get(name)
    if fields is None:
        return None
    try:
        candidate = make(**fields)
    except TypeError as error:
        raise _refused(error) from error
    if not fits(candidate):
        raise _refused(f"the tile {candidate} of {name!r} does not fit on this GPU")
    return candidate


@functools.cache
def best() -> dict[str, dict[str, Any]]:
    """Name -> fields of the tile."""
    path = os.environ.get("STROBE_TILES")
    if not path:
        return {}
    try:
        return {name: dict(fields) for name, fields in json.loads(Path(path).read_text())["best"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(error) from error


def _refused(reason: object) -> ValueError:
    path = os.environ.get("STROBE_TILES")
    return ValueError(f"STROBE_TILES={path}: not a file written by `strobe tune` for this GPU ({reason})")
