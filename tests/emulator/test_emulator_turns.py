"""Blocks that wait for one another: who runs next is decided by the seed, and a wait that nobody ends is reported."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.toy_kernels import Toy, aligned

from strobe.emulator import EmulatorError

BLOCKS = 6
TURNS = Toy(
    """
STROBE_KERNEL(64, 1) kernel(STROBE_GRID_CONSTANT Params p) {  // block b has turn b, or, if p.reversed, the last has 0
  const u32 number = p.reversed ? grid_dim() - 1 - block_idx() : block_idx();
  if (thread_idx() == 0) {
    st_global(p.begun + block_idx(), atomic_inc_wrap(p.clock, 1000u));
    while (acquire_turn(p.turn) != number) {
    }
    st_global(p.order + number, block_idx());
    release_turn(p.turn);
  }
}
""",
    {"clock": "uint32", "begun": "uint32", "turn": "uint32", "order": "uint32"},
    ("reversed",),
    threads=64,
)


def run(toy: Toy = TURNS, *, reversed: bool = False, **how: object) -> tuple[np.ndarray, np.ndarray]:
    """The blocks by turn, and when each of them began."""
    clock, begun, turn, order = (aligned(n, "uint32") for n in (1, BLOCKS, 1, BLOCKS))
    toy.run(clock=clock, begun=begun, turn=turn, order=order, reversed=int(reversed), grid=BLOCKS, **how)  # type: ignore[arg-type]
    return order, begun


def test_blocks_take_turns() -> None:
    assert run(together=1)[0].tolist() == [*range(BLOCKS)]
    for reversed, expected in ((False, [*range(BLOCKS)]), (True, [*range(BLOCKS)][::-1])):
        for mode in ("sync", "async"):
            assert run(reversed=reversed, mode=mode, together=BLOCKS)[0].tolist() == expected


def test_async_mode_begins_blocks_in_an_order_of_the_seed() -> None:
    orders = [run(mode="async", seed=seed, together=1)[1].tolist() for seed in range(8)]
    assert orders == [run(mode="async", seed=seed, together=1)[1].tolist() for seed in range(8)]
    assert len({tuple(order) for order in orders}) > 4


def test_too_few_blocks_at_once_are_reported() -> None:
    """Block 0 has the last turn and never leaves room for the others."""
    with pytest.raises(EmulatorError) as error:
        run(reversed=True, together=BLOCKS - 1)
    at = TURNS.line("acquire_turn")
    assert f"thread 0 (1 thread): acquire_turn at {at}; no other block ends the wait" in str(error.value)
    assert "deadlock in block" in str(error.value)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_turn_that_is_not_passed_on_is_reported(mode: str) -> None:
    with pytest.raises(EmulatorError, match="no other block ends the wait"):
        run(TURNS.mutate("    release_turn(p.turn);\n", ""), mode=mode, together=BLOCKS)
