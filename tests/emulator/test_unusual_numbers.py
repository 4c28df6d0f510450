"""The forward kernels on NaN, on scores far beyond any that a model has, and on infinite sinks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case
from emulator.emulate import KERNELS, forward
from oracle import prepare

from strobe.cuda.parts import blocks
from strobe.emulator import compiler
from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.variants.mask import Mask, causal, full

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SPLIT_SMS = 6
KINDS = [*KERNELS, "sm90 split"]
PLAIN = Case("plain", 70, 300, batch=1, heads=1, heads_k=1, dim=64)
CAUSAL = dataclasses.replace(PLAIN, name="causal", mask=causal)
NO_KEYS = dataclasses.replace(PLAIN, name="no_keys", len_q=150, len_k=100, mask=causal)  # the first 50 rows see nothing


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_SPLIT", "FEWEST_SPLITS"):
        monkeypatch.setattr(blocks, name, 1)


def run(kind: str, problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE) as float64, [rows, dim_v] and [rows]."""
    kernel, _, split = kind.partition(" ")
    out, lse = forward(kernel, problem, inputs, sms=SPLIT_SMS if split else 1)
    return out[0, 0].double(), lse[0, 0].double()


def exact(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (t[0, 0].double() for t in (inputs.q, inputs.k, inputs.v))
    mask: Mask = problem.mask
    s = torch.where(mask.dense(len(q), len(k)), q @ k.T * problem.scale, -torch.inf)
    lse = torch.logsumexp(s, 1)
    p = torch.where(lse[:, None] == -torch.inf, 0, torch.exp(s - lse[:, None]))
    return p @ v, lse


def close(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], rows: slice) -> None:
    torch.testing.assert_close(found[0][rows], wanted[0][rows], atol=0.02, rtol=0.01)
    torch.testing.assert_close(found[1][rows], wanted[1][rows], atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [0, 69])
@pytest.mark.parametrize("case", [PLAIN, CAUSAL], ids=str)
def test_a_nan_query_is_nan_and_no_other(case: Case, row: int, kind: str) -> None:
    problem, inputs = prepare(case, torch.bfloat16)
    wanted = exact(problem, inputs)
    q = inputs.q.clone()
    q[..., row, 3] = torch.nan
    found = run(kind, problem, inputs._replace(q=q))
    assert found[0][row].isnan().all() and found[1][row].isnan()
    close(found, wanted, slice(0, row))
    close(found, wanted, slice(row + 1, None))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [0, 261, 299])  # the first, one that half of the rows see, the last
def test_a_nan_key_is_nan_where_it_is_seen(key: int, kind: str) -> None:
    problem, inputs = prepare(CAUSAL, torch.bfloat16)
    wanted = exact(problem, inputs)
    k = inputs.k.clone()
    k[..., key, 5] = torch.nan
    found = run(kind, problem, inputs._replace(k=k))
    first = max(0, key - (CAUSAL.len_k - CAUSAL.len_q))  # the first row that sees it
    assert found[0][first:].isnan().all() and found[1][first:].isnan().all()
    close(found, wanted, slice(0, first))


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_value_is_nan_in_the_output_alone(kind: str) -> None:
    problem, inputs = prepare(PLAIN, torch.bfloat16)
    wanted = exact(problem, inputs)
    v = inputs.v.clone()
    v[..., 100, 7] = torch.nan
    out, lse = run(kind, problem, inputs._replace(v=v))
    assert out[:, 7].isnan().all()
    others = torch.arange(out.shape[1]) != 7
    close((out[:, others], lse), (wanted[0][:, others], wanted[1]), slice(None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_sees_nothing_but_nan(kind: str) -> None:
    problem, inputs = prepare(PLAIN, torch.bfloat16)
    found = run(kind, problem, inputs._replace(k=torch.full_like(inputs.k, torch.nan)))
    assert found[0].isnan().all() and found[1].isnan().all()


# ---- finite inputs, finite answers -----------------------------------------------------------------------------------
LARGE = 60000.0  # of fp16's 65504: scores of 3e10


def large(keys: str, generator: torch.Generator) -> torch.Tensor:
    """[300, 64], all of them large."""
    k = torch.full((300, 64), LARGE)
    if keys == "few":  # the others score far below
        k[:] = LARGE / 2
        k[[7, 150, 290]] = LARGE
    elif keys == "rising":
        k *= torch.linspace(0.5, 1.0, 300)[:, None]
    elif keys == "falling":
        k *= torch.linspace(1.0, 0.5, 300)[:, None]
    elif keys == "random":
        k *= torch.rand((300, 1), generator=generator) - 0.5
    return k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("keys", ["equal", "few", "rising", "falling", "random"])
@pytest.mark.parametrize("mask", [full, causal], ids=str)
def test_scores_of_1e10(mask: Mask, keys: str, sign: int, kind: str) -> None:
    problem, inputs = prepare(dataclasses.replace(PLAIN, mask=mask), torch.float16)
    k = large(keys, torch.Generator().manual_seed(1)).half()
    q = torch.full((70, 64), sign * LARGE).half()
    q[::3] = inputs.q[0, 0, ::3]  # rows of a warp that are large beside others
    q[::3, 0] = 2e-3
    inputs = inputs._replace(q=q[None, None], k=k[None, None])
    out, lse = run(kind, problem, inputs)
    wanted, wanted_lse = exact(problem, inputs)
    assert out.isfinite().all() and lse.isfinite().all()
    close((out, lse), (wanted, wanted_lse), slice(1, None, 3))
    close((out, lse), (wanted, wanted_lse), slice(2, None, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [12, 16, 20, 22])
def test_scores_of_any_size_are_as_exact_as_their_numbers(size: int, kind: str) -> None:
    """Scores are sums of a power of two and small integers, which fp32 holds: the answer depends on the latter."""
    problem, inputs = prepare(dataclasses.replace(PLAIN, scale=1.0), torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    k = torch.zeros(300, 64)
    k[:, 0] = 2.0 ** (size // 2)
    k[:, 1] = torch.randint(-4, 5, (300,), generator=generator).float()
    q = torch.zeros(70, 64)
    q[:, 0] = 2.0 ** (size - size // 2) * torch.where(torch.arange(70) % 2 == 0, 1.0, -1.0)
    q[:, 1] = 1.0
    inputs = inputs._replace(q=q.bfloat16()[None, None], k=k.bfloat16()[None, None])
    found, wanted = run(kind, problem, inputs), exact(problem, inputs)
    torch.testing.assert_close(found[0], wanted[0], atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-4, rtol=2e-7)


# ---- sinks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [CAUSAL, NO_KEYS], ids=str)
def test_infinite_sinks(case: Case, kind: str) -> None:
    problem, inputs = prepare(dataclasses.replace(case, sinks=True), torch.bfloat16)
    wanted = exact(problem, inputs)

    def with_sink(x: float) -> tuple[torch.Tensor, torch.Tensor]:
        return run(kind, problem, inputs._replace(sinks=torch.tensor([x])))

    out, lse = with_sink(torch.inf)
    assert (out == 0).all() and (lse == torch.inf).all()
    close(with_sink(-torch.inf), wanted, slice(None))
    out, lse = with_sink(2.5)
    close(
        (out, lse),
        (wanted[0] * torch.exp(wanted[1] - lse)[:, None], torch.logaddexp(wanted[1], torch.tensor(2.5))),
        slice(None),
    )
    out, lse = with_sink(torch.nan)
    assert out.isnan().all() and lse.isnan().all()
