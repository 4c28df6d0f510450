"""The suites: data that says what it should."""

from __future__ import annotations

import pytest
import torch

from strobe.bench import names, read_results, registry, suites
from strobe.bench.case import case
from strobe.bench.suites import cases

CPU = torch.device("cpu")


def test_the_grid_is_the_grid() -> None:
    grid = cases("grid36")
    assert len(grid) == 36 and all(c.batch * c.len_q == 16384 and c.heads * c.dim == 2048 for c in grid)
    assert {c.dim for c in grid} == {64, 128, 256} and {c.mask.name for c in grid} == {"full", "causal"}


def test_the_sweep_covers_the_mission() -> None:
    sweep = cases("sweep")
    assert {c.model_dim for c in sweep} == {1024, 2048, 4096, 8192}
    assert {c.len_q for c in sweep} == {1024 << i for i in range(6)}
    largest = next(c for c in sweep if c.model_dim == 4096 and c.len_q == 32768)
    assert largest.score_elements() * 4 == 128 << 30  # bytes of S alone in fp32: an H200 cannot hold two of them


@pytest.mark.parametrize("suite", suites.SUITES)
@pytest.mark.parametrize("direction", names.PASSES)
def test_keys_are_unique_and_survive_json(suite: str, direction: str) -> None:
    for on_gpu in (False, True):
        made = cases(suite, direction, on_gpu)
        assert len({c.key for c in made}) == len(made) > 0
        assert [read_results._case(c.to_dict(), "case") for c in made] == made


def test_flops_and_bytes() -> None:
    full = case("t", "x", batch=2, heads=4, length=128, dim=64)
    assert full.flops(CPU) == 4 * 2 * 4 * 128 * 128 * 64
    causal = case("t", "x", batch=2, heads=4, length=128, dim=64, mask="causal")
    assert causal.flops(CPU) == 4 * 2 * 4 * (128 * 129 // 2) * 64
    backward = case("t", "x", batch=2, heads=4, length=128, dim=64, direction="backward")
    assert backward.flops(CPU) == 2.5 * full.flops(CPU)
    both = case("t", "x", batch=2, heads=4, length=128, dim=64, direction="both")
    assert both.flops(CPU) == 3.5 * full.flops(CPU)
    tensor = 2 * 4 * 128 * 64 * 2
    assert full.ideal_bytes(CPU) == 4 * tensor + 2 * 4 * 128 * 4 and full.tensor_bytes() == 4 * tensor
    assert backward.tensor_bytes() == both.tensor_bytes() == 8 * tensor and full.q_bytes() == tensor
    assert backward.ideal_bytes(CPU) == 8 * tensor + 2 * 4 * 128 * 4  # q, k, v, o, do, LSE read; dq, dk, dv written


@pytest.mark.parametrize("suite", ["grid36", "gqa", "models"])
def test_every_pass_counts_its_own_flops(suite: str) -> None:
    """Two products forward, five backward. Their widths are the head dims, which differ in DeepSeek-V3."""
    passes = {
        direction: {c.label: c for c in cases(suite, direction) if c.measure == "time"} for direction in names.PASSES
    }
    for label, backward in passes["backward"].items():
        flops = {direction: of[label].flops(CPU) for direction, of in passes.items()}
        d, dv = backward.dim, backward.value_dim
        assert flops["backward"] / flops["forward"] == (3 * d + 2 * dv) / (d + dv)
        assert flops["both"] == flops["forward"] + flops["backward"]
        assert backward.title.endswith(", backward") and passes["both"][label].title.endswith(", forward and backward")


def test_names_are_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="grid36.*got 'grid'"):
        cases("grid")
    with pytest.raises(ValueError, match="forward, backward, both"):
        cases("grid36", "sideways")
    with pytest.raises(ValueError, match="strobe-tiled.*got 'nobody'"):
        registry.select(["nobody"])


def test_providers_are_selected_by_name_kind_and_prefix() -> None:
    assert [p.name for p in registry.select(["eager"])] == ["eager"]
    assert {p.kind for p in registry.select(["standard"])} == {"standard"}
    assert all(p.name.startswith("torch-") for p in registry.select(["torch"]))
    names = [p.name for p in registry.every()]
    assert len(set(names)) == len(names)
    wanted = """torch-math torch-math-half eager-compiled cuda-unfused megatron-local megatron-fused-softmax torch-flash
        torch-cudnn flex flash-attn-2 flash-attn-3 flash-attn-4 xformers flashinfer"""
    assert set(wanted.split()) <= set(names)
