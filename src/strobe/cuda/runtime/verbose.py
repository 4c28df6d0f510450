"""Lines for those who want to know which kernels run."""

from __future__ import annotations

import os
import sys


def say(message: str) -> None:
    """Print the line if STROBE_VERBOSE is set."""
    if os.environ.get("STROBE_VERBOSE", "0") not in ("", "0"):
        print(f"strobe: {message}", file=sys.stderr, flush=True)
