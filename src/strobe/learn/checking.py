"""An exercise: a task, a stub to fill in, hints, and a check that says which thread wrote which wrong element."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strobe.learn.simulator import Array, KernelError, Report, launch

Kernel = Callable[..., Any]
_SHOWN = 3  # wrong elements, or races: one mistake makes many


@dataclass(frozen=True)
class Case:
    """One launch, and what `output`, one of the arguments, should hold afterwards."""

    what: str
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    arguments: tuple[Any, ...]
    output: Array
    expected: Sequence[Any]  # nested like the output
    # Beyond the right numbers: None, or what is still wrong.
    demand: Callable[[Report], str | None] = lambda report: None


@dataclass(frozen=True)
class Verdict:
    passed: bool
    message: str

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'not yet'}: {self.message}"


@dataclass(frozen=True)
class Task:
    """The fields that all exercises have, in whatever language they are solved."""

    name: str
    task: str
    hints: tuple[str, ...]

    def hint(self, number: int = 1) -> str:
        if not 1 <= number <= len(self.hints):
            raise ValueError(f"number: {number}; {self.name} has hints 1 to {len(self.hints)}")
        return self.hints[number - 1]

    @property
    def comment(self) -> list[str]:
        """The task in lines of a comment's width."""
        return textwrap.wrap(self.task, 100)


@dataclass(frozen=True)
class Exercise(Task):
    stub: Kernel
    solution: Kernel
    cases: Callable[[], Iterator[Case]]

    def check(self, kernel: Kernel) -> Verdict:
        """Run the kernel on every case; stops at the first that fails."""
        count = 0
        for case in self.cases():
            problem = _problem(kernel, case)
            if problem is not None:
                return Verdict(False, f"{self.name}, {case.what}:\n{problem}")
            count += 1
        return Verdict(True, f"{self.name}, {count} cases")

    def show(self) -> str:
        """The task as a comment, and the stub: all of it can be copied into a cell and run as it stands."""
        return "\n".join([*(f"# {line}" for line in self.comment), _listing(self.stub, self.name)])

    def show_solution(self) -> str:
        return _listing(self.solution, self.name)


def _listing(kernel: Kernel, name: str) -> str:
    """The source of a stub or solution under the exercise's own name, with the import that it needs."""
    text = re.sub(rf"^def {name}_\w+\(", f"def {name}(", inspect.getsource(kernel))
    return f"import math\n\n\n{text}" if "math." in text else text


def _problem(kernel: Kernel, case: Case) -> str | None:
    try:
        report = launch(kernel, case.grid, case.block, *case.arguments, strict=False)
    except KernelError as error:
        return str(error)
    except Exception as error:  # whatever a half-written kernel raises
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    wrong = wrong_elements(case.output, case.expected)
    problems = report.problems[:_SHOWN] + ([wrong] if wrong else [])
    return "\n".join(problems) or case.demand(report)


def wrong_elements(output: Array, expected: Sequence[Any], tolerance: float = 1e-6) -> str | None:
    """Return which elements are wrong, what they are, what they should be, and who wrote them; None if all are
    right."""
    wrong = []
    for index, right in _elements(expected):
        offset = output._offset(index)
        value = output.data[offset]
        close = isinstance(value, (int, float)) and math.isclose(value, right, rel_tol=tolerance, abs_tol=tolerance)
        if not close:
            name, writer = f"{output.name}[{', '.join(map(str, index))}]", output.writer(*index)
            if writer is None:
                wrong.append(f"  nobody wrote {name}; it should be {right:.6g}")
            else:
                shown = f"{value:.6g}" if isinstance(value, (int, float)) else repr(value)
                wrong.append(f"  {writer}, wrote {name} = {shown}; it should be {right:.6g}")
    if not wrong:
        return None
    more = [f"  … and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    return "\n".join([f"{len(wrong)} of {len(output.data)} elements are wrong:", *wrong[:_SHOWN], *more])


def _elements(values: Sequence[Any], index: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], float]]:
    for i, value in enumerate(values):
        if isinstance(value, (list, tuple)):
            yield from _elements(value, (*index, i))
        else:
            yield (*index, i), value
