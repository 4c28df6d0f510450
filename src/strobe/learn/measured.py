"""Measurements on a GPU, for lessons on machines without one: an excerpt of the committed results, `measured.json`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")


@functools.cache
def load() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))
