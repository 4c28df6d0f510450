"""docs/context-parallel.md: the script runs under torchrun, pictures are what the command prints, formulas are those of
the code. test_docs.py runs its other code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import strobe
from strobe.distributed import ShardPlan
from strobe.distributed.cost import METHODS, Shape, sent
from strobe.distributed.shard_strategies import STRATEGIES
from strobe.tools import cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "context-parallel.md"


def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(script, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 holds 501 positions", "rank 1 holds 500 positions"]


def test_pictures_are_what_the_command_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^```console\n\$ strobe (.*?)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown
    for arguments, printed in shown:
        done = CliRunner().invoke(cli.app, shlex.split(arguments))
        assert done.output == printed


def test_every_strategy_and_method_has_a_row() -> None:
    rows = set(re.findall(r"^\| `(\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == {*STRATEGIES, *METHODS}


def test_formulas() -> None:
    """Those of the table, word for word in Python."""
    n, p, h, hk, d, e = 4096, 8, 32, 8, 64, 2
    shape = Shape(h, hk, d, d, e)
    full = ShardPlan(n, ranks=p, strategy="contiguous")
    for method, wanted in (
        ("ring", (p - 1) / p * 2 * n * hk * d * e),
        ("allgather", (p - 1) / p * 2 * n * hk * d * e),
        ("ulysses", (p - 1) / p**2 * n * (2 * (h + hk) * d * e + 4 * h)),
    ):
        assert {s.forward for s in sent(full, shape, method)} == {wanted}, method
    w = 100
    mask = strobe.causal & strobe.window(w - 1, 0)
    windowed = sent(ShardPlan(n, ranks=p, strategy="contiguous", mask=mask), shape, "halo")
    assert [s.forward for s in windowed] == [2 * (w - 1) * hk * d * e] * (p - 1) + [0]
