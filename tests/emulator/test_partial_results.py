"""Context parallelism needs two things of the kernels: masks that count positions in a whole sequence of which only a
part is in memory, and partial results in fp32 that can be merged."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import tolerance
import torch
from cases import Case
from emulator.emulate import KERNELS, member, plan_of, tensors_of, with_positions
from emulator.gradients import gradients
from emulator.test_forward_kernels import check
from everyday import everyday
from oracle import expected, prepare

from strobe.backends.tiled import forward as tiled
from strobe.cuda.parts import blocks
from strobe.emulator import backend, compiler
from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.variants.mask import causal
from strobe.variants.ready_made import chunked, window

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

Result = tuple[torch.Tensor, torch.Tensor]  # O in fp32, [batch, heads, rows, dim_v], and the LSE, [batch, heads, rows]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEAST_SPLIT", 1), ("FEWEST_SPLITS", 1), ("FEW_ROWS", 64)):
        monkeypatch.setattr(blocks, name, value)


def partial_result(
    kernel: str, problem: Problem, inputs: Inputs, positions: list[tuple[int, ...]] | None = None, sms: int = 2
) -> Result:
    batch, heads, rows, _ = inputs.q.shape
    wide = torch.full((batch, rows, heads, problem.dim_v + 8), torch.nan)  # what lies behind a row is another's
    out, lse = wide[..., : problem.dim_v].transpose(1, 2), torch.full((batch, heads, rows), torch.nan)
    if positions is not None:
        inputs = inputs._replace(positions=torch.tensor(positions, dtype=torch.int32))
    asked = dataclasses.replace(with_positions(problem, positions), partial=True)
    made = plan_of(kernel, asked, out.stride()[:3], sms)  # type: ignore[arg-type]
    backend.launch(made, tensors_of(inputs, out, lse), mode="async", seed=1)
    assert wide[..., problem.dim_v :].isnan().all()
    return out, lse


def part_of(problem: Problem, inputs: Inputs, rows: slice, keys: slice) -> tuple[Problem, Inputs]:
    q, k, v = inputs.q[:, :, rows], inputs.k[:, :, keys], inputs.v[:, :, keys]
    rows_of = dataclasses.replace(
        problem.q, length=q.shape[2], total=problem.batch * q.shape[2], strides=(q.stride()[:3],)
    )
    keys_of = dataclasses.replace(
        problem.k, length=k.shape[2], total=problem.batch * k.shape[2], strides=(k.stride()[:3], v.stride()[:3])
    )
    return dataclasses.replace(problem, q=rows_of, k=keys_of), inputs._replace(q=q, k=k, v=v)


def merged(results: list[Result]) -> Result:
    """Partial results of the same rows and different keys, in float64."""
    outs, lses = (torch.stack([x.double() for x in parts]) for parts in zip(*results, strict=True))
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lse == -torch.inf, 0, torch.exp(lses - lse))
    return (weights[..., None] * outs).sum(0), lse


def check_merged(case: Case, found: Result) -> None:
    check(case, torch.bfloat16, (found[0].bfloat16(), found[1].float()))


SHARDED = [
    Case("causal", 150, 200, batch=1, heads=2, heads_k=1, dim=64, mask=causal),
    Case("window", 150, 200, batch=2, heads=1, heads_k=1, dim=128, mask=window(60, 5)),
    Case("window_left", 150, 200, batch=1, heads=1, heads_k=1, dim=192, dim_v=128, mask=window(60, None)),
    Case("chunked", 150, 200, batch=1, heads=1, heads_k=1, dim=64, mask=chunked(40) & causal),
    Case("packed_gqa", 40, 200, batch=1, heads=4, heads_k=1, dim=64, mask=causal),
    Case("full", 150, 200, batch=1, heads=1, heads_k=1, dim=64),
]
CUTS = {"q": (0, 70, 150), "k": (0, 90, 200)}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", everyday(SHARDED, ["causal", "packed_gqa"]))
def test_two_query_shards_by_two_key_shards_are_the_whole(case: Case, kernel: str) -> None:
    problem, inputs = prepare(case, torch.bfloat16)
    whole = problem.len_q, problem.len_k
    rows, keys = (
        [slice(a, b) for a, b in itertools.pairwise(min(cut, length) if cut else 0 for cut in cuts)]
        for cuts, length in (((0, whole[0] * 7 // 15, whole[0]), whole[0]), (CUTS["k"], whole[1]))
    )
    shards = []
    for r in rows:
        results = []
        for k in keys:
            positions = [(r.start, whole[0], k.start, whole[1])] * problem.batch
            results.append(partial_result(kernel, *part_of(problem, inputs, r, k), positions))
        shards.append(merged(results))
    check_merged(case, (torch.cat([o for o, _ in shards], 2), torch.cat([lse for _, lse in shards], 2)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_positions_of_varlen_sequences(kernel: str) -> None:
    """Each sequence is the end of a longer one, of which the first queries and keys are elsewhere."""
    lengths = ((60, 100), (0, 5), (70, 130))
    case = Case("varlen", 0, 0, heads=2, heads_k=1, dim=64, mask=window(40, 0), lengths=lengths)
    problem, inputs = prepare(case, torch.bfloat16)
    kept = ((25, 30), (0, 2), (10, 50))  # queries and keys that are left out
    assert inputs.cu_q is not None and inputs.cu_k is not None
    pieces: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    for i, (skip_q, skip_k) in enumerate(kept):
        q, k = (slice(int(cu[i]) + skip, int(cu[i + 1])) for cu, skip in ((inputs.cu_q, skip_q), (inputs.cu_k, skip_k)))
        for name, rows in (("q", q), ("k", k), ("v", k)):
            pieces[name].append(getattr(inputs, name)[:, :, rows])
    tensors = {name: torch.cat(parts, 2) for name, parts in pieces.items()}
    counts = [
        [n - skip for (n, skip) in zip(pair, skips, strict=True)] for pair, skips in zip(lengths, kept, strict=True)
    ]
    cu = [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*counts, strict=True)]
    strides = [tensors[name].stride()[:3] for name in "qkv"]
    part = dataclasses.replace(
        problem,
        q=dataclasses.replace(
            problem.q, total=tensors["q"].shape[2], length=max(n for n, _ in counts), strides=(strides[0],)
        ),
        k=dataclasses.replace(
            problem.k, total=tensors["k"].shape[2], length=max(n for _, n in counts), strides=tuple(strides[1:])
        ),
    )
    positions = [(a, n, b, m) for (a, b), (n, m) in zip(kept, lengths, strict=True)]
    out, lse = partial_result(kernel, part, inputs._replace(**tensors, cu_q=cu[0], cu_k=cu[1]), positions)
    for i, ((skip_q, skip_k), (len_q, len_k)) in enumerate(zip(kept, lengths, strict=True)):
        if not len_q:
            continue
        q, k, v = (
            t[0, :, int(c[i]) : int(c[i + 1])].double()
            for t, c in ((inputs.q, inputs.cu_q), (inputs.k, inputs.cu_k), (inputs.v, inputs.cu_k))
        )
        seen = case.mask.dense(len_q, len_k).clone()
        seen[:, :skip_k] = False
        s = torch.where(seen, q @ k.mT * problem.scale, -torch.inf)[:, skip_q:]
        wanted = torch.logsumexp(s, -1)
        mine = slice(int(cu[0][i]), int(cu[0][i + 1]))
        torch.testing.assert_close(lse[0, :, mine].double(), wanted, atol=1e-5, rtol=1e-5)
        p = torch.where(wanted[..., None] == -torch.inf, 0, torch.exp(s - wanted[..., None]))
        torch.testing.assert_close(out[0, :, mine].double(), p @ v, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("kernel", KERNELS)
def test_positions_with_split_kv(kernel: str) -> None:
    case = Case("split", 60, 500, batch=1, heads=1, heads_k=1, dim=64, mask=causal)
    problem, inputs = prepare(case, torch.bfloat16)
    if kernel == "sm90":
        split, _ = part_of(problem, inputs, slice(20, 60), slice(0, 300))
        assert member(plan_of(kernel, split, (0, 64, 64), 6), "kSplit")
    results = [
        partial_result(kernel, *part_of(problem, inputs, slice(20, 60), keys), [(20, 60, keys.start, 500)], sms=6)
        for keys in (slice(0, 300), slice(300, 500))
    ]
    out, lse = merged(results)
    (exact, exact_lse), (same, same_lse) = expected(case, torch.bfloat16)
    tolerance.check("out", out.bfloat16(), exact[:, :, 20:], same[:, :, 20:])
    floor = tolerance.lse_floor(same_lse)
    tolerance.check("lse", lse.float(), exact_lse[:, :, 20:], same_lse[:, :, 20:], floor=floor)


PARTIAL = [
    Case("causal", 150, 200, batch=2, heads=2, heads_k=1, dim=64, mask=causal),
    Case("rows_without_keys", 200, 60, batch=1, heads=3, heads_k=3, dim=128, mask=causal),
    Case("padded", 70, 140, batch=1, heads=2, heads_k=2, dim=72, dim_v=40),
    Case("sinks", 70, 140, batch=1, heads=2, heads_k=2, dim=96, sinks=True, mask=causal),
    Case("dim_256", 70, 140, batch=1, heads=1, heads_k=1, dim=256),
    Case("packed_gqa", 9, 150, batch=2, heads=8, heads_k=2, dim=64, mask=causal),
    Case("varlen", 0, 0, heads=2, dim=64, mask=causal, lengths=((70, 100), (0, 3), (65, 129), (130, 70))),
    Case("split", 5, 600, batch=1, heads=1, heads_k=1, dim=64),
    Case("split_padded", 5, 600, batch=1, heads=2, heads_k=2, dim=136, dim_v=72, mask=causal),
    Case("split_packed_gqa", 5, 600, batch=1, heads=8, heads_k=1, dim=128, mask=causal),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", everyday(PARTIAL, ["causal", "packed_gqa", "rows_without_keys"]))
def test_partial_output_is_o_in_fp32(case: Case, kernel: str) -> None:
    problem, inputs = prepare(case, torch.bfloat16)
    if inputs.sinks is not None:
        inputs = inputs._replace(sinks=inputs.sinks.float())
    sms = 6 if "split" in case.name else 2
    out, lse = partial_result(kernel, problem, inputs, sms=sms)
    check(case, torch.bfloat16, (out.bfloat16(), lse))
    assert not torch.equal(out, out.bfloat16().float())  # more than 16 bits of it


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_gradients_from_an_lse_with_gaps(family: str) -> None:
    """A step hands over the LSE of some rows of its shard, a view with gaps between heads."""
    p, inputs = prepare(Case("", 70, 90, batch=2, heads=2, heads_k=1, dim=64, mask=causal), torch.bfloat16)
    out, lse = tiled.forward(p, inputs)
    wide = torch.full((*lse.shape[:2], lse.shape[2] + 30), torch.nan)
    wide[..., 10:-20] = lse
    found = gradients(family, p, inputs, mode="sync", forward=(out, wide[..., 10:-20]))
    without_gaps = gradients(family, p, inputs, mode="sync", forward=(out, lse))
    for g, same in zip(found[:3], without_gaps[:3], strict=True):
        torch.testing.assert_close(g, same)
