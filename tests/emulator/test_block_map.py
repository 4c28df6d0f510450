"""Blocks that a condition hides are left out, and where it hides nothing it is not asked: the same numbers, without NaN
from what is hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday import everyday

import strobe
from strobe.cuda.plans import backward_sm90, block_map
from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
IDS = (torch.arange(400) // 130).int().expand(2, 400).contiguous()
SLOPES = torch.tensor([0.5, 0.0625])
CASES: dict[str, dict[str, Any]] = {
    "gap": {"mask": lambda b, h, q, k: (k < 128) | (k >= 256)},  # nobody sees the second block of keys
    "documents": {"mask": lambda b, h, q, k: (q >= k) & (IDS[b, q] == IDS[b, k])},
    "heads": {"mask": lambda b, h, q, k: (q - k).abs() < 16 * (h + 1)},
    "scored": {
        "mask": lambda b, h, q, k: (q - k) * (q - k) < 6000,
        "score": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    },
    "varlen": {"mask": lambda b, h, q, k: (q - k) * (q - k) < 6000, "lengths": ((150, 300), (140, 140), (1, 130))},
    "no_key": {"mask": lambda b, h, q, k: (q % 2 == 0) & (k != q) & (k < 0)},
}


@pytest.fixture(autouse=True)
def short_sequences_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    monkeypatch.setattr(block_map, "LEAST_KEYS", 64)
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", 0)  # sums by turns visit every block


def tensors(lengths: Any = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows, keys = (sum(n) for n in zip(*lengths, strict=True)) if lengths else (200, 400)
    lead = ((rows,), (keys,), (keys,)) if lengths else ((2, rows), (2, keys), (2, keys))
    heads = (2, 1, 1)
    return [torch.randn(*n, h, 64, generator=generator).to(torch.bfloat16) for n, h in zip(lead, heads, strict=True)]


def results(x: list[torch.Tensor], backend: str, options: dict[str, Any]) -> list[torch.Tensor]:
    options = dict(options)
    call: Callable[..., Any] = strobe.attention
    if lengths := options.pop("lengths", None):
        call = strobe.attention_varlen
        for name, each in zip(("cu_q", "cu_k"), zip(*lengths, strict=True), strict=True):
            options[name] = torch.tensor([0, *each], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    leaves = [t.detach().clone().requires_grad_() for t in x]
    out = call(*leaves, backend=backend, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    return [out, *torch.autograd.grad((out.double() * weights).sum(), leaves)]


@pytest.mark.parametrize("name", everyday(list(CASES), ("documents",)))
def test_against_fp64(name: str) -> None:
    x = tensors(CASES[name].get("lengths"))
    found = results(x, "emulator", CASES[name])
    for f, e in zip(found, results([t.double() for t in x], "tiled", CASES[name]), strict=True):
        assert (f.double() - e).norm() <= 0.01 * e.norm() + 1e-6


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit, but for dQ: blocks of keys add to it in any order, so it may be rounded to the number beside it."""
    for name, f, e in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert not f.isnan().any(), name
        if name == "dq":
            torch.testing.assert_close(f, e, rtol=2**-7, atol=1e-6)
        else:
            assert torch.equal(f, e), name


def test_hidden_blocks_are_not_computed() -> None:
    """A key of NaN with a weight of 0 would still be NaN."""
    q, k, v = tensors()
    clean = results([q, k, v], "emulator", CASES["gap"])
    k[:, 128:256] = v[:, 128:256] = torch.nan
    assert_same(results([q, k, v], "emulator", CASES["gap"]), clean)


def test_a_block_mask_keeps_its_maps() -> None:
    x = tensors()
    mask = strobe.block_mask(CASES["documents"]["mask"], 2, None, 200, 400)
    assert_same(results(x, "emulator", {"mask": mask}), results(x, "emulator", CASES["documents"]))
    assert len(mask.maps) == 2  # of each direction
    for bits in mask.maps.values():
        bits.zero_()
    assert not any(t.any() for t in results(x, "emulator", {"mask": mask})), "the maps are not those that are kept"


def test_block_masks_that_differ_in_numbers_or_tensors_alone() -> None:
    """They share the text of their kernels, and no map; so do calls with one mask and several scores."""
    x = tensors()

    def near(width: int) -> Callable[..., Any]:
        return lambda b, h, q, k: (q - k) * (q - k) < width

    def same(ids: torch.Tensor) -> Callable[..., Any]:
        return lambda b, h, q, k: ids[q] == ids[k]

    functions = (near(2000), near(9000), near(2000), same(IDS[0]), same((torch.arange(400) // 70).int()))
    masks = [strobe.block_mask(f, None, None, 200, 400) for f in functions]
    for _ in range(2):
        for function, mask in zip(functions, masks, strict=True):
            assert_same(results(x, "emulator", {"mask": mask}), results(x, "emulator", {"mask": function}))
    for slope in (0.5, 0.0, -0.0, 0.125):
        score = strobe.score_function(lambda s, b, h, q, k, slope=slope: s + slope * (k - q))
        found, expected = (results(x, "emulator", {"mask": m, "score": score}) for m in (masks[0], functions[0]))
        assert_same(found, expected)


def test_it_is_planned_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_gpu import H200

    from strobe.cuda.plans import forward_sm90
    from strobe.problem import supposed
    from strobe.problem.resolve import resolved

    mask = strobe.mask_function(CASES["documents"]["mask"])
    score = resolved(strobe.problem.arguments.Arguments(None, None, None, mask=mask)).score
    shape = (2, 300, 4, 64)
    given: tuple[Any, ...] = (torch.device("cuda"), torch.bfloat16, shape, shape, shape)
    kernels = []
    for least in (64, 1024):
        monkeypatch.setattr(block_map, "LEAST_KEYS", least)
        problem = supposed(*given, score=score.with_tensors([IDS.to("meta")]), mask=strobe.causal)
        plan = forward_sm90.plan(problem, {"o": (300 * 4 * 64, 64, 4 * 64)}, H200)
        kernels.append([launch.kernel.name.split("[")[0] for launch in plan.launches])
    assert kernels == [["block_map", "forward_sm90"], ["forward_sm90"]]
