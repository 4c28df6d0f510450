"""The names under which profilers show kernels: told by the features, and the same for kernels of equal code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu import H200

import strobe
from strobe.bench import strobe_providers
from strobe.cuda.parts.kernel import ENTRY, PREFIX, TemplateKernel
from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans.families import FAMILIES, variants
from strobe.problem import supposed
from strobe.variants.score import identity, softcap

IDS, SLOPES = torch.empty(2, 1024, dtype=torch.int32, device="meta"), torch.empty(8, device="meta")
DOCUMENTS = identity.hiding(strobe.mask_function(lambda b, h, q, k: IDS[b, q] == IDS[b, k]))
LONGEST = 80
Options = dict[str, Any]


def plan(family: str, dim: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Plan:
    shape, strides = (2, 1024, 8, dim), (1024 * 8 * dim, dim, 8 * dim)
    problem = supposed(torch.device("cuda"), dtype, shape, shape, shape, **options)
    machine = replace(H200, arch="sm_80") if family == "sm80" else H200
    planner = FAMILIES[family].planner(problem)
    assert planner.limits(problem) is None
    return planner.plan(problem, dict.fromkeys(("o", "d_o", "dq", "dk", "dv"), strides), machine)


def entries(made: Plan) -> list[str]:
    return [launch.kernel.entry for launch in made.launches]


def without_name(kernel: TemplateKernel) -> tuple[str, str]:
    assert kernel.source.count(f" {kernel.entry}(") == 1
    return kernel.arch, kernel.source.replace(f" {kernel.entry}(", f" {ENTRY}(")


@pytest.mark.parametrize(
    ("family", "dim", "options", "names"),
    [
        ("sm90", 128, {"mask": strobe.causal}, ["strobe_forward_sm90_bf16_d128_causal"]),
        ("sm90", 128, {"mask": strobe.window(7, 7)}, ["strobe_forward_sm90_bf16_d128_window"]),
        ("sm80", 64, {"score": softcap(9.0), "dropout": 0.5}, ["strobe_forward_sm80_bf16_d64_full_dropout_softcap"]),
        ("sm80", 64, {"bias": (2, 8, 1024, 1024)}, ["strobe_forward_sm80_bf16_d64_full_bias"]),
        (
            "sm90",
            64,
            {"bias": (2, 8, 1024, 1024), "score": softcap(9.0), "mask": strobe.causal},
            ["strobe_forward_sm90_bf16_d64_causal_bias_softcap"],
        ),
        ("sm90", 64, {"score": strobe.alibi(SLOPES)}, ["strobe_forward_sm90_bf16_d64_full_alibi"]),
        ("sm90", 64, {"mask": strobe.causal & strobe.chunked(8)}, ["strobe_forward_sm90_bf16_d64_interval"]),
        ("sm90", 64, {"dtype": torch.float32}, ["strobe_split_terms", "strobe_forward_fp32_sm90_fp32_d64_full"]),
        ("sm90", 64, {"score": DOCUMENTS}, ["strobe_block_map", "strobe_forward_sm90_bf16_d64_sparse_function"]),
        (
            "sm90",
            128,
            {"mask": strobe.causal, "gradients": ("q", "k", "v")},
            ["strobe_backward_delta", "strobe_backward_sm90_bf16_d128_causal_deterministic"],
        ),
        (
            "sm80",
            128,
            {"mask": strobe.causal, "gradients": ("q", "k", "v")},
            ["strobe_backward_delta", "strobe_backward_sm80_bf16_d128_causal", "strobe_convert_dq_sm80"],
        ),
        (
            "sm90",
            256,
            {"gradients": ("q", "k", "v")},
            ["strobe_backward_delta", "strobe_dkv_sm90_bf16_d256_full", "strobe_dq_sm90_bf16_d256_full"],
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_name_tells_the_features(family: str, dim: int, options: Options, names: list[str]) -> None:
    assert entries(plan(family, dim, **options)) == names


@pytest.mark.parametrize(
    "score",
    [
        strobe.score_function(lambda s, b, h, q, k: s.exp()),
        strobe.score_function(lambda s, b, h, q, k: s * SLOPES[h]),
        identity.hiding(strobe.mask_function(lambda b, h, q, k: (q - k) % 3 == 0)),
    ],
    ids=["score", "captures", "mask"],
)
@pytest.mark.parametrize(
    "options", [{}, {"mask": strobe.causal, "bias": (2, 8, 1024, 1024)}], ids=["alone", "with_bias"]
)
def test_a_function_of_a_user_is_the_last_word(score: Any, options: Options) -> None:
    for family in FAMILIES:
        assert entries(plan(family, 64, score=score, **options))[-1].endswith("_function")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mask": strobe.window(5, 7)}, {"mask": strobe.window(99, 0)}),
        ({"mask": strobe.causal}, {"mask": strobe.window(None, 3)}),
        ({"mask": strobe.causal}, {"mask": strobe.mask_function(lambda b, h, q, k: k <= q).interval}),
        ({"score": softcap(5.0)}, {"score": softcap(50.0)}),
        ({"score": softcap(5.0)}, {"score": strobe.score_function(lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0))}),
    ],
    ids=["windows", "right_bounds", "traced_mask", "softcaps", "traced_softcap"],
)
def test_what_prints_the_same_text_is_one_kernel(one: Options, other: Options) -> None:
    for family in FAMILIES:
        a, b = (plan(family, 64, **options).launches[0].kernel for options in (one, other))
        assert a == b and a.source == b.source


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_names_are_identifiers_and_follow_from_the_code(arch: str) -> None:
    names: dict[tuple[str, str], str] = {}
    for kernel in variants(arch):
        assert re.fullmatch(rf"{PREFIX}[a-z0-9_]+", kernel.entry) and len(kernel.entry) <= LONGEST, kernel.entry
        assert names.setdefault(without_name(kernel), kernel.entry) == kernel.entry, kernel.name
    assert len(set(names.values())) > len(names) / 2  # most variants have a name of their own


def test_the_benchmarks_expect_the_names() -> None:
    expected = {p.name: p.kernels for p in strobe_providers.providers() if p.device == "cuda"}
    assert set(expected) == {f"strobe-{family}" for family in FAMILIES}
    for family in FAMILIES:
        (name,) = entries(plan(family, 128, mask=strobe.causal))
        pattern = expected[f"strobe-{family}"]
        assert pattern is not None and re.search(pattern, name)
        assert not any(re.search(pattern, other) for other in (ENTRY, "flash_fwd_kernel", "void at::native::kernel"))
