"""Each exercise fails with a helpful message on its stub, passes on its solution, and does not pass on near misses."""

from __future__ import annotations

import math

import pytest

from strobe.emulator import compiler
from strobe.learn import exercises
from strobe.learn.checking import Exercise
from strobe.learn.cuda_cpp.exercises import CudaExercise
from strobe.learn.run import gpu
from strobe.learn.starter_exercises import SQUARE, TILE

# What a reader of the message learns: the thread, the element, the kind of mistake.
HELP = {
    "grayscale": ["thread 0 of block 0", "wrote gray[0] = ", "it should be"],
    "grayscale_2d": ["thread (0, 0) of block (1, 0)", "race on gray[0, 0]", "nobody wrote gray[0, 2]"],
    "block_sum": ["divergent barrier in block 0", "threads 0, 1, 2 and 1 more", "Every thread of a block must"],
    "matmul": ["thread (0, 0) of block 0", "wrote c[0, 0] = 0; it should be"],
    "matmul_tiled": ["race on a_tile", "thread (0, 0) of block (0, 0)", "no barrier between them"],
    "transpose": ["right, but shared memory has 992 bank conflicts"],
    "log_sum_exp": ["scores up to 1000", "OverflowError", "in thread 0 of block 0"],
    "attention": ["scores in the thousands", "OverflowError", "in thread 0 of block 0"],
}
by_name = pytest.mark.parametrize("exercise", exercises.ALL, ids=lambda e: e.name)


def test_all_are_here() -> None:
    assert [e.name for e in exercises.ALL] == list(HELP)


@by_name
def test_the_stub_fails_helpfully(exercise: Exercise) -> None:
    verdict = exercise.check(exercise.stub)
    assert not verdict.passed and str(verdict).startswith(f"not yet: {exercise.name}")
    for part in HELP[exercise.name]:
        assert part in verdict.message


@by_name
def test_the_solution_passes(exercise: Exercise) -> None:
    verdict = exercise.check(exercise.solution)
    assert verdict.passed, verdict.message
    assert str(verdict) == f"passed: {exercise.name}, 2 cases"


@by_name
def test_a_kernel_that_does_nothing_fails(exercise: Exercise) -> None:
    verdict = exercise.check(lambda *arguments: None)
    assert not verdict.passed and "nobody wrote" in verdict.message


@by_name
def test_task_hints_and_solution_can_be_read(exercise: Exercise) -> None:
    assert f"def {exercise.name}(" in exercise.show() and f"def {exercise.name}(" in exercise.show_solution()
    assert exercise.task.split()[0] in exercise.show().splitlines()[0]
    assert all(exercise.hint(i + 1) for i in range(len(exercise.hints)))
    with pytest.raises(ValueError, match=f"{exercise.name} has hints 1 to"):
        exercise.hint(len(exercise.hints) + 1)


@by_name
def test_stub_and_solution_can_be_copied_as_they_stand(exercise: Exercise) -> None:
    for text, passes in ((exercise.show(), False), (exercise.show_solution(), True)):
        namespace: dict[str, object] = {}
        exec(text, namespace)  # in an empty notebook
        verdict = exercise.check(namespace[exercise.name])  # type: ignore[arg-type]
        assert verdict.passed == passes and "NameError" not in verdict.message


CUDA_HELP = {
    "negative": ["256 numbers", "128 of 256 elements of out are wrong", "out[128] is NaN", "nobody wrote it"],
    "block_max": ["race: ", "line 7"],
    "flash": ["scores in the hundreds", "elements of o are wrong", "NaN"],
}
in_cuda = pytest.mark.parametrize("exercise", exercises.CUDA, ids=lambda e: e.name)


@pytest.mark.skipif(gpu() is None or compiler() is None, reason="needs the emulator, which notices")
@in_cuda
def test_cuda_stubs_fail_helpfully_and_solutions_pass(exercise: CudaExercise) -> None:
    verdict = exercise.check(exercise.stub)
    assert not verdict.passed
    for part in CUDA_HELP[exercise.name]:
        assert part in verdict.message, verdict.message
    assert str(exercise.check(exercise.solution)) == f"passed: {exercise.name}, 2 cases"


@in_cuda
def test_cuda_exercises_can_be_read(exercise: CudaExercise) -> None:
    assert exercise.show().startswith("// ") and exercise.stub.strip() in exercise.show()
    assert f"void {exercise.name}(" in exercise.show_solution() and exercise.stub != exercise.solution
    assert all(exercise.hint(i + 1) for i in range(len(exercise.hints)))


def test_no_guard() -> None:
    def kernel(t, rgb, gray, pixels):
        i = t.thread
        gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]

    message = exercises.GRAYSCALE.check(kernel).message
    assert (
        "10 pixels in blocks of 4" in message
        and "thread 2 of block 2" in message
        and "rgb[10, 0] out of bounds" in message
    )


def test_right_numbers_are_not_enough_for_tiles() -> None:
    message = exercises.MATMUL_TILED.check(exercises.MATMUL.solution).message
    assert "right, but 512 loads of a, 128 are enough" in message and TILE == 4


def test_right_numbers_are_not_enough_for_the_transposition() -> None:
    def straight(t, a, b):
        x, y = t.thread_idx.x, t.thread_idx.y
        b[t.block_idx.x * SQUARE + x, y] = a[y, t.block_idx.x * SQUARE + x]

    assert "right, but global memory moves" in exercises.TRANSPOSE.check(straight).message


def test_two_passes_are_one_too_many() -> None:
    def kernel(t, s, lse, n):
        m = max(s[t.thread, i] for i in range(n))
        lse[t.thread] = m + math.log(sum(math.exp(s[t.thread, i] - m) for i in range(n)))

    assert "right, but 48 loads of s; 24 are enough" in exercises.LOG_SUM_EXP.check(kernel).message


def test_a_forgotten_rescale_of_the_output_is_found() -> None:
    def kernel(t, q, k, v, o, n, d):
        m, total, out = -math.inf, 0.0, [0.0] * d
        for key in range(n):
            score = sum(q[t.thread, i] * k[key, i] for i in range(d)) / math.sqrt(d)
            m_new = max(m, score)
            total = total * math.exp(m - m_new) + math.exp(score - m_new)
            out = [x + math.exp(score - m_new) * v[key, i] for i, x in enumerate(out)]  # not converted
            m = m_new
        for i in range(d):
            o[t.thread, i] = out[i] / total

    message = exercises.ATTENTION.check(kernel).message
    assert "moderate scores" in message and "wrote o[" in message


def test_what_a_kernel_raises_is_shown() -> None:
    assert "TypeError" in exercises.MATMUL.check(lambda t: None).message
