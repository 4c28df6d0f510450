"""`examples/long_context.py`, as its first lines say: torchrun, under a limit of memory."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 16384


def train(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sizes = ["--length", "3072", "--vocabulary", str(VOCABULARY), "--layers", "1", "--steps", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = str(ROOT / "examples" / "long_context.py")
    return subprocess.run(
        [*command, script, *sizes, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )


def test_a_step_that_one_process_cannot_hold() -> None:
    """Logits of 3,072 tokens are 201 MB; with their softmax and gradients they are four times that."""
    one = train(1, "--limit", "600")
    assert one.returncode != 0
    assert "3,072 tokens on 1 rank need more than 600 MB a rank" in one.stderr
    assert "step 0" not in one.stdout
    two = train(2, "--limit", "600")
    assert two.returncode == 0, two.stderr
    assert "on 2 ranks, zigzag, causal" in two.stdout
    found = re.search(r"^step 0: loss (\d+\.\d+)$", two.stdout, re.MULTILINE)
    assert found is not None, two.stdout
    # Weights are random, so every word is about as likely as any other.
    assert abs(float(found[1]) - math.log(VOCABULARY)) < 0.5
