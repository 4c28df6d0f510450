"""examples/serve.py: answers of requests that run together are those of each alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_server_answers_as_if_each_request_were_alone() -> None:
    """Few pages, so that requests wait; a small budget, so that prompts go through in pieces."""
    command = [sys.executable, "examples/serve.py", "--requests", "8", "--new", "6", "--pages", "30", "--budget", "24"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--check", "--device", "cpu"], capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "each of the 8 answers is that of its request alone"
    assert any(" 0 waiting" not in line for line in lines if line.startswith("step"))
    shared = max(int(line.split(" shared")[0].split()[-1]) for line in lines if line.startswith("step"))
    assert shared > 0
