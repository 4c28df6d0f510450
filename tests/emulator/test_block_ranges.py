"""The map of blocks finds which blocks a condition lets through: by interval arithmetic where that decides, and pair by
pair elsewhere. All functions are one condition, each that of a head, so that they are one program."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import strobe
from strobe.cuda.parts import print_condition
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans import block_map
from strobe.cuda.tensors import read_by_kernels
from strobe.emulator import compiler
from strobe.emulator.backend import launch
from strobe.problem import Problem
from strobe.problem.arguments import Arguments
from strobe.problem.resolve import resolved

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
LEN_Q, LEN_K, BLOCK = 108, 140, 32  # the first query stands opposite key 32
generator = torch.Generator().manual_seed(11)
ids = torch.sort(torch.randint(0, 5, (1, LEN_K), generator=generator))[0]
mixed = torch.randint(0, 3, (LEN_K,), generator=generator, dtype=torch.int32)
length = torch.tensor([70])
picked = torch.rand(5, 5, generator=generator) > 0.5
dense = torch.rand(LEN_K, LEN_K, generator=generator) > 0.3
bias = torch.randn(LEN_K, generator=generator)
bias[3], bias[40], bias[100] = torch.nan, torch.inf, -torch.inf


def neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q // 12 - k // 12).abs() <= 2) & ((q % 12 - k % 12).abs() <= 2)


# Those whose empty and full blocks are all found without a look at pairs.
DECIDED: dict[str, Callable[..., Any]] = {
    "documents": lambda b, h, q, k: ids[b, q] == ids[b, k],
    "causal documents": lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]),
    "padding": lambda b, h, q, k: k < length[b],
    "prefix": lambda b, h, q, k: (k <= q) | (k < length[b]),
    "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),
    "global and local": lambda b, h, q, k: ((q - k).abs() <= 20) | (k < 4),
    "table of blocks": lambda b, h, q, k: picked[q // 32, k // 32],
    "sum": lambda b, h, q, k: (q + 2 * k - 30 > h) ^ (q < 50),
    "late": lambda b, h, q, k: (q > 85) & (k % 3 != b),
    "chunks": lambda b, h, q, k: (q - k) // 40 != 0,
}
OTHERS: dict[str, Callable[..., Any]] = {
    "unsorted": lambda b, h, q, k: mixed[q] == mixed[k],
    "neighbourhood": neighbourhood,
    "dense": lambda b, h, q, k: dense[q, k] & (q < 100),
    "division": lambda b, h, q, k: ((k - q) // -7 % 3 < 2) | ((k - q) % -5 > -4) | ((q - k) // (h + 3) > k - 90),
    "floats": lambda b, h, q, k: (
        ((q - k) * 0.37 < 7.5) & ((q - k) / (k + 1.0) > -0.5) & (torch.floor((q - k) * 0.3) < 9)
    ),
    "not a number": lambda b, h, q, k: (bias[k] * 0.5 + q > 60.0) | ~(torch.maximum(bias[k], q - k * 1.0) >= 1.0),
    "function": lambda b, h, q, k: torch.exp((q - k) * 0.01) < 1.5,
    "select": lambda b, h, q, k: torch.where(q > k, q - k, (k * k) % 9).clamp(3, 50) != torch.minimum(q, k),
    "casts": lambda b, h, q, k: (((q - k) * 0.25).int() + (q - k).long() * 3).float() > k * 1.0 - 20.0,
}
OVERFLOW = {"overflow": lambda b, h, q, k: (q - k) * 30000 * 1000 + (q + k) * 20000000 > 7}  # 32 bits
FUNCTIONS = DECIDED | OTHERS | OVERFLOW
HEADS = len(FUNCTIONS)


def every_function(b: Any, h: Any, q: Any, k: Any) -> Any:
    """One for each head, which is counted down without more numbers: each would take room in the arguments."""
    found, left, one = h < 0, h, (h >= 0).int()
    for function in FUNCTIONS.values():
        found, left = found | (~left.bool() & function(b, h, q, k)), left - one
    return found


def bits(group: int = 1, transposed: bool = False, blocks: tuple[int, int] = (BLOCK, BLOCK)) -> torch.Tensor:
    """(heads, blocks of queries, blocks of keys): 1 where pairs are visible, 2 where some are hidden, 3 where both."""
    q, k = torch.empty(1, LEN_Q, HEADS, 64), torch.empty(1, LEN_K, HEADS // group, 64)
    a = resolved(Arguments(*(t.bfloat16() for t in (q, k, k)), mask=every_function))
    problem, _ = Problem.of(a)
    features = Features.of(problem, (64, 64))
    made = block_map.block_map(problem, features, "sm_90a", *blocks, transposed=transposed)
    words = torch.zeros(made.workspace["block_map"] // 4, dtype=torch.int32)
    launch(Plan((made.launch,)), {"block_map": words, **read_by_kernels(a)})
    of_blocks = (words.view(HEADS // group if transposed else HEADS, -1, 2, 1, 1) >> torch.arange(32)) & 1
    found = (of_blocks[:, :, 0] + 2 * of_blocks[:, :, 1]).flatten(2)
    rows, keys = -(-LEN_Q // blocks[0]), -(-LEN_K // blocks[1])
    assert not found[..., rows if transposed else keys :].any()
    return found[..., :rows].mT if transposed else found[..., :keys]


def by_brute_force(blocks: tuple[int, int] = (BLOCK, BLOCK)) -> torch.Tensor:
    traced = strobe.mask_function(every_function)
    pairs = replace(traced, lo=None, hi=None).dense(LEN_Q, LEN_K, 1, HEADS)[0]
    found = torch.zeros(HEADS, -(-LEN_Q // blocks[0]), -(-LEN_K // blocks[1]), dtype=torch.int64)
    for i, rows in enumerate(pairs.split(blocks[0], 1)):
        for j, block in enumerate(rows.split(blocks[1], 2)):
            found[:, i, j] = block.any((1, 2)).long() + 2 * (~block).any((1, 2)).long()
    return found


@pytest.fixture(scope="module")
def found() -> torch.Tensor:
    return bits()


def named(found: torch.Tensor, names: Any) -> torch.Tensor:
    return found[[list(FUNCTIONS).index(name) for name in names]]


def test_against_brute_force(found: torch.Tensor) -> None:
    expected = by_brute_force()
    for name in DECIDED | OTHERS:  # torch computes with 64 bits
        assert torch.equal(named(found, [name]), named(expected, [name])), name


def test_which_blocks_are_looked_at(found: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other pair is said to be visible: then all blocks that are looked at are partial, and no others."""
    original = print_condition.printed

    def printed(*args: Any) -> print_condition.PrintedCondition:
        found = original(*args)
        text, count = re.subn(r"(of_pair\(.*?\) const ).*", r"\1{ return (at.q(i) + at.k(i)) % 2; }", found.text)
        assert count == 1
        return found._replace(text=text)

    monkeypatch.setattr(print_condition, "printed", printed)
    without_pairs = bits()
    looked_at = without_pairs == 3
    assert torch.equal(without_pairs[~looked_at], found[~looked_at])  # also those of the function that overflows
    for name in DECIDED:
        assert not (named(looked_at, [name]) & (named(found, [name]) != 3)).any(), name
    assert named(looked_at, ["overflow"]).any() and not named(looked_at, ["neighbourhood"]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("blocks", [(64, 32), (32, 96)])
def test_transposed_and_grouped(blocks: tuple[int, int]) -> None:
    expected = by_brute_force(blocks)
    group = 2 if HEADS % 2 == 0 else 1
    expected = expected.unflatten(0, (-1, group)).amax(1) | expected.unflatten(0, (-1, group)).amin(1)
    overflowing = list(FUNCTIONS).index("overflow") // group
    found = bits(group, transposed=True, blocks=blocks)
    keep = [i for i in range(len(found)) if i != overflowing]
    assert torch.equal(found[keep], expected[keep])
