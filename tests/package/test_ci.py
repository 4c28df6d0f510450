"""`.ci/run`: a browser where one can be installed, the tests in any case, and a word about what is missing."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / ".ci" / "run"
TOOLS = ("sh", "dirname", "mktemp", "tail", "rm", "ln", "timeout")  # what the script may use besides


class Machine:
    """A path with stand-ins for what differs between machines; each call of one is a line in a log."""

    def __init__(self, place: Path) -> None:
        self.bin, self.log = place / "bin", place / "log"
        self.bin.mkdir()
        self.log.write_text("")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def add(self, name: str, does: str = "") -> None:
        (self.bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {self.log}\n{does}\n')
        (self.bin / name).chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
        return subprocess.run([RUN], env=environment, capture_output=True, text=True, timeout=600)

    @property
    def called(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if not line.startswith("id ")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Debian, as root, without a browser."""
    machine = Machine(tmp_path)
    machine.add("id", "echo 0")
    machine.add("make", "echo 3 skipped")
    machine.add("apt-get", f'case "$*" in *install*) ln -s {machine.bin}/sh {machine.bin}/chromium;; esac')
    return machine


def test_chromium_is_installed_before_the_tests(machine: Machine) -> None:
    done = machine.run()
    update, install, tests = machine.called
    assert update == "apt-get -q update" and install.startswith("apt-get ") and install.endswith(" chromium")
    assert tests == "make test-all"
    assert (done.returncode, done.stdout) == (0, "3 skipped\n")


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_a_browser_that_is_there_is_enough(machine: Machine, name: str) -> None:
    machine.add(name)
    assert machine.run().returncode == 0
    assert machine.called == ["make test-all"]


@pytest.mark.parametrize(
    "tool, does, says",
    [
        ("apt-get", None, "there is no apt-get"),
        ("id", "echo 1000", "only root can install it"),
        ("apt-get", "echo no network; exit 100", "apt-get could not install chromium"),
        ("apt-get", "", "apt-get could not install chromium"),  # it says yes and does nothing
    ],
)
def test_without_one_the_tests_run_and_the_last_line_says_so(
    machine: Machine, tool: str, does: str | None, says: str
) -> None:
    if does is None:
        (machine.bin / tool).unlink()
    else:
        machine.add(tool, does)
    done = machine.run()
    assert done.returncode == 0 and machine.called[-1] == "make test-all"
    last = done.stdout.splitlines()[-1]
    assert last.startswith("skipped: tests/browser (") and says in last
    assert ("no network" in done.stderr) == (does is not None and "no network" in does)


def test_an_update_that_fails_does_not_keep_it_from_trying(machine: Machine) -> None:
    text = (machine.bin / "apt-get").read_text()
    (machine.bin / "apt-get").write_text(text + 'case "$*" in *update*) exit 100;; esac\n')
    assert machine.run().stdout == "3 skipped\n"


@pytest.mark.parametrize("with_browser", [True, False])
def test_the_verdict_is_that_of_the_tests(machine: Machine, with_browser: bool) -> None:
    machine.add("make", "exit 3")
    if not with_browser:
        (machine.bin / "apt-get").unlink()
    done = machine.run()
    assert done.returncode == 3 and ("skipped: tests/browser" in done.stdout) == (not with_browser)


@pytest.mark.parametrize(("target", "leaves_out"), [("test", "not thorough"), ("test-all", None)])
def test_make_runs_every_tier_and_lists_what_was_skipped(target: str, leaves_out: str | None) -> None:
    """The make program itself says what it would do."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    (command,) = (line for line in done.stdout.splitlines() if "-m pytest" in line)
    words = shlex.split(command)
    assert "-rfEs" in words and "mypy" in done.stdout
    tiers = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {str(tier.relative_to(ROOT)) for tier in tiers} - set(words) == {"tests/gpu"}
    selections = [chosen for option, chosen in itertools.pairwise(words) if option == "-m" and chosen != "pytest"]
    assert selections == ([] if leaves_out is None else [leaves_out])
