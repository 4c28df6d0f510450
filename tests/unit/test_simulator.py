"""The grid simulator counts what it should, and every kind of mistake is reported with thread, block and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strobe.learn.access import sectors, wavefronts
from strobe.learn.drawing import bars, thread_map
from strobe.learn.simulator import Array, Dim3, KernelError, launch


def line_of(kernel: Callable[..., Any], offset: int) -> int:
    return kernel.__code__.co_firstlineno + offset


def reverse(t, x, y):
    tile = t.shared("tile", t.block_dim.x)
    tile[t.thread_idx.x] = x[t.thread]
    yield
    y[t.thread] = tile[t.block_dim.x - 1 - t.thread_idx.x]


def test_a_right_kernel_runs_and_is_counted() -> None:
    x, y = Array("x", range(8)), Array("y", shape=8)
    report = launch(reverse, 2, 4, x, y)
    assert y.to_host() == [3, 2, 1, 0, 7, 6, 5, 4]
    assert (report.loads["x"], report.stores["y"], report.shared_loads, report.shared_stores) == (8, 8, 8, 8)
    assert (report.barriers, report.bank_conflicts, report.shared_bytes, report.problems) == (2, 0, 16, [])
    assert (report.threads, report.warps, report.idle_lanes) == (8, 2, 56)
    assert "2 blocks of 4 threads" in str(report)


def test_indices_are_cudas() -> None:
    """x runs fastest, in blocks and in the grid."""

    def who(t, out):
        row, column = t.block_idx.y * 2 + t.thread_idx.y, t.block_idx.x * 3 + t.thread_idx.x
        out[row, column] = (t.block, t.lane_of_block)

    out = Array("out", shape=(4, 6))
    launch(who, (2, 2), (3, 2), out)
    rows = out.to_host()
    assert rows[0] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert rows[3] == [(2, 3), (2, 4), (2, 5), (3, 3), (3, 4), (3, 5)]
    assert Dim3(3, 2, 2).at(11) == (2, 1, 1)


@pytest.mark.parametrize("index", [8, -1])
def test_out_of_bounds(index: int) -> None:
    def kernel(t, x):
        if t.thread == 5:
            x[index] = 1

    with pytest.raises(
        KernelError, match=rf"thread 1 of block 1, line \d+: writes x\[{index}\] out of bounds: index {index}"
    ):
        launch(kernel, 2, 4, Array("x", range(8)))


def test_out_of_bounds_of_one_axis_is_not_the_next_row() -> None:
    x = Array("x", [[0, 1], [2, 3]])
    with pytest.raises(KernelError, match=r"thread \(0, 0\) of block 0.*x\[0, 2\].*index 2 of axis 1 is not in 0 to 1"):
        launch(lambda t, x: x[0, 2], 1, (1, 2), x)
    with pytest.raises(KernelError, match="flat indices run from 0 to 3"):
        launch(lambda t, x: x[4], 1, 1, x)
    with pytest.raises(KernelError, match=r"3 indices for shape \(2, 2\)"):
        launch(lambda t, x: x[0, 0, 0], 1, 1, x)


def test_race_within_a_block_names_both() -> None:
    def no_barrier(t, x, y):
        tile = t.shared("tile", 4)
        tile[t.thread_idx.x] = x[t.thread]
        y[t.thread] = tile[(t.thread_idx.x + 3) % 4]

    report = launch(no_barrier, 1, 4, Array("x", range(4)), Array("y", shape=4), strict=False)
    write, read = line_of(no_barrier, 2), line_of(no_barrier, 3)
    reader, writer = f"thread 1 of block 0, line {read}", f"thread 0 of block 0, line {write}"
    assert any(f"{reader}: race on tile[0]: this thread reads it, {writer}, writes it" in p for p in report.problems)
    assert any("reads tile[3] of shared memory before anyone has written it" in p for p in report.problems)
    with pytest.raises(KernelError, match="race on tile"):
        launch(no_barrier, 1, 4, Array("x", range(4)), Array("y", shape=4))


def test_a_read_before_a_write_is_a_race_as_well() -> None:
    """Threads are simulated in order; a race that this order hides must still be found."""

    def shift(t, x):
        value = x[(t.thread + 1) % 4]
        x[t.thread] = value

    report = launch(shift, 1, 4, Array("x", range(4)), strict=False)
    assert any("this thread writes it" in p and "reads it" in p for p in report.problems)

    def shift_with_barrier(t, x):
        value = x[(t.thread + 1) % 4]
        yield
        x[t.thread] = value

    x = Array("x", range(4))
    assert launch(shift_with_barrier, 1, 4, x).problems == [] and x.to_host() == [1, 2, 3, 0]


def test_a_barrier_does_not_order_blocks() -> None:
    def kernel(t, x):
        yield
        x[0] = t.block

    with pytest.raises(
        KernelError, match=r"thread 0 of block 1.*race on x\[0\].*thread 0 of block 0.*blocks run in any order"
    ):
        launch(kernel, 2, 1, Array("x", [0]))

    def reader(t, x):
        if t.block == 1:
            x[0] = 1
        else:
            x[0]

    with pytest.raises(KernelError, match="race on x"):
        launch(reader, 2, 1, Array("x", [0]))


def test_reads_alone_never_race() -> None:
    assert launch(lambda t, x: x[0], 4, 4, Array("x", [1])).problems == []


def test_divergent_barrier() -> None:
    def some(t, x):
        if t.thread_idx.x < 2:
            yield

    barrier = line_of(some, 2)
    with pytest.raises(
        KernelError, match=rf"block 0: threads 0, 1 at the barrier in line {barrier}; threads 2, 3 already"
    ):
        launch(some, 1, 4, Array("x", [0]))

    def elsewhere(t, x):
        if t.thread_idx.x == 0:
            yield
        else:
            yield

    with pytest.raises(KernelError, match="divergent barrier in block 0: thread 0 at the barrier in line"):
        launch(elsewhere, 1, 4, Array("x", [0]))


@pytest.mark.parametrize(("stride", "expected"), [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (0, 1)])
def test_wavefronts(stride: int, expected: int) -> None:
    assert wavefronts(4 * stride * lane for lane in range(32)) == expected


@pytest.mark.parametrize(("stride", "expected"), [(1, 4), (2, 8), (8, 32), (0, 1)])
def test_sectors(stride: int, expected: int) -> None:
    assert sectors(4 * stride * lane for lane in range(32)) == expected


@pytest.mark.parametrize(("pitch", "conflicts"), [(32, 32 * 31), (33, 0)])
def test_bank_conflicts_of_a_column(pitch: int, conflicts: int) -> None:
    def kernel(t, out):
        tile = t.shared("tile", (32, pitch))
        tile[t.thread_idx.y, t.thread_idx.x] = 1.0
        yield
        out[t.thread_idx.y, t.thread_idx.x] = tile[t.thread_idx.x, t.thread_idx.y]

    report = launch(kernel, 1, (32, 32), Array("out", shape=(32, 32)))
    assert report.bank_conflicts == conflicts and report.sectors == 32 * 4


def test_two_accesses_of_one_line_are_two_instructions() -> None:
    """x[i] + x[i + 32] is no conflict: the two reads happen one after the other."""

    def kernel(t, out):
        tile = t.shared("tile", 64)
        tile[t.thread], tile[t.thread + 32] = 1.0, 2.0
        yield
        out[t.thread] = tile[t.thread] + tile[t.thread + 32]

    assert launch(kernel, 1, 32, Array("out", shape=32)).bank_conflicts == 0


def test_host_and_device_are_apart() -> None:
    x = Array("x", [[1, 2], [3, 4]])
    with pytest.raises(
        KernelError, match=r"x\[0, 1\] lies in the device's memory: on the host, copy it with x.to_host\(\)"
    ):
        x[0, 1]
    assert x.to_host() == [[1, 2], [3, 4]] and x.shape == (2, 2)


def test_an_exception_of_the_kernel_says_whose() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        launch(lambda t, x: 1 / (t.thread - 6), 2, 4, Array("x", [0]))
    assert caught.value.__notes__ == ["in thread 2 of block 1"]


def test_bad_launches_and_arrays() -> None:
    for grid, block, what in (
        (0, 1, "grid: 0"),
        (1, (4, 0), "block"),
        (1, (64, 32), "2048 threads; a block has at most 1024"),
    ):
        with pytest.raises(ValueError, match=what):
            launch(lambda t: None, grid, block)
    with pytest.raises(ValueError, match="needs values or a shape"):
        Array("x")
    with pytest.raises(ValueError, match="rows of different shapes"):
        Array("x", [[1], [1, 2]])
    with pytest.raises(ValueError, match=r"3 values do not fill shape \(2, 2\)"):
        Array("x", [1, 2, 3], shape=(2, 2))


def test_thread_map_shows_every_element_once() -> None:
    figure = thread_map(3, 6, (4, 2))
    assert figure.text.splitlines()[1].split() == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "(1.2)", "(1.3)"]
    assert figure.text.count(".") == 4 * 8 and figure.text.count("(") == 32 - 18
    assert figure.svg.count("<rect") == 1 + 32 and figure.svg.count("stroke-dasharray") == 32 - 18


def test_bars_are_in_proportion() -> None:
    lines = bars("t", {"a": 10, "b": 40, "c": 0}).text.splitlines()
    assert [line.count("█") for line in lines[1:]] == [10, 40, 0]
    with pytest.raises(ValueError, match="none zero on a logarithmic scale"):
        bars("t", {"a": 0}, logarithmic=True)
