"""Planners say what their kernels can do; the rest follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from strobe.backends.backend import Capabilities
from strobe.cuda import backend
from strobe.cuda.parts.architecture import AMPERE, ARCHITECTURES, HOPPER, target
from strobe.cuda.parts.plan import Machine
from strobe.cuda.plans import families, forward_sm80
from strobe.cuda.plans.families import FAMILIES, Family
from strobe.cuda.plans.planner import Planner
from strobe.problem import Problem, State, supposed

PLANNERS = [planner for family in FAMILIES.values() for planner in family.planners]


def problem(dim: int = 64, dtype: torch.dtype = torch.bfloat16, dim_v: int | None = None, **options: Any) -> Problem:
    q, k, v = (2, 16, 4, dim), (2, 256, 4, dim), (2, 256, 4, dim_v or dim)
    if "lengths" in options:
        k, v = (4, 8, 4, dim), (4, 8, 4, dim_v or dim)
    return supposed(torch.device("cuda", 0), dtype, q, k, v, (), **options)


def home(planner: Planner) -> Problem:
    dim, dim_v = planner.dims[-1]
    plain = problem(dim, next(iter(planner.dtypes)), dim_v)
    return plain.backward(("q", "k", "v")) if planner.gradients else plain


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_limits_follow_from_the_record(planner: Planner) -> None:
    plain = home(planner)
    assert planner.limits(plain) is None
    opposite = replace(plain, gradients=() if planner.gradients else ("q",))
    assert planner.limits(opposite) == f"no {'forward' if planner.gradients else 'backward'} kernel"
    assert "float64" in str(planner.limits(replace(plain, dtype=torch.float64)))
    step, most = planner.chunk, max(dim for dim, _ in planner.dims)
    for dim in (most + step, most - 1):
        assert f"head dim {dim}; the kernels take multiples of {step} up to {most}" in str(
            planner.limits(replace(plain, dim=dim))
        )
    assert planner.can.partial == (planner.limits(replace(plain, partial=True)) is None)
    if not planner.gradients:
        state = replace(plain, partial=planner.can.partial, state=State((64, 16), None))
        assert planner.can.merges == (planner.limits(state) is None)
        paged = replace(plain, k=problem(table=(2, 2), lengths=(2,)).k)
        assert planner.can.pages == (planner.limits(paged) is None)


def test_a_pair_of_head_dims_must_fit_one_kernel() -> None:
    decode = replace(forward_sm80.PLANNER, dims=[(64, 256), (128, 128)])
    assert decode.limits(problem(64, dim_v=256)) is None
    assert decode.limits(problem(128, dim_v=256)) == "head dims 128/256; the kernels take up to 64/256, 128/128"


def test_the_first_planner_that_can_plans() -> None:
    small = replace(forward_sm80.PLANNER, name="small", dims=[(64, 64)])
    paged = replace(forward_sm80.PLANNER, name="paged", can=Capabilities(pages=True), further_limits=lambda p: "never")
    family = Family("", (small, paged, forward_sm80.PLANNER))
    assert family.planner(problem(64)).name == "small"
    assert family.planner(problem(128)).name == "forward_sm80"
    assert family.limits(problem(64, table=(2, 2), lengths=(2,))) == "no paged keys"  # the smallest says why
    assert family.limits(problem(128, table=(2, 2), lengths=(2,))) == "never"
    assert "up to 256" in str(family.limits(problem(264)))  # the last
    assert family.can == Capabilities(pages=True, merges=True)
    assert "the kernels take bfloat16, float16" in str(family.limits(problem(dtype=torch.float64)))


def test_rounding_a_state_waits_for_no_splits() -> None:
    machine = Machine("sm_90a", sms=132, l2_bytes=1, smem_bytes=1)
    for splits, rounds in ((None, True), (lambda p, m: 1, True), (lambda p, m: 2, False)):
        planner = replace(forward_sm80.PLANNER, rounds_states=True, splits=splits)
        assert Family("", (planner,)).rounds_states(problem(), machine) == rounds


@pytest.mark.parametrize(
    ("capability", "name", "runs"),
    [((7, 5), "sm_75", []), ((8, 0), "sm_80", ["sm80"]), ((8, 9), "sm_89", ["sm80"]), ((12, 0), "sm_120", ["sm80"]),
     ((9, 0), "sm_90a", ["sm90", "sm80"])],
)  # fmt: skip
def test_which_family_runs_on_a_gpu(
    capability: tuple[int, int], name: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target(capability) == name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend.driver, "available", lambda: None)
    monkeypatch.setattr(backend.jit, "compiler_missing", lambda: None)
    why = {n: backend.missing.__wrapped__(torch.device("cuda"), *f.architectures) for n, f in FAMILIES.items()}
    assert [n for n, reason in why.items() if reason is None] == runs
    assert all(f"compute capability {capability[0]}.{capability[1]}" in reason for reason in why.values() if reason)


def test_names_for_the_compiler() -> None:
    assert [AMPERE.has_target(arch) for arch in ("sm_75", "sm_80", "sm_90", "sm_120", "sm_90a", "ampere")] == [
        False, True, True, True, False, False]  # fmt: skip
    assert [HOPPER.has_target(arch) for arch in ("sm_90a", "sm_90", "sm_100a")] == [True, False, False]
    assert not families.planners("sm_100a")
    assert {planner.architecture for planner in PLANNERS} == set(ARCHITECTURES)


def test_the_parts_of_a_wide_forward_serve_whole_head_dims() -> None:
    wide = [kernel for kernel in families.variants("sm_90a") if kernel.facts.get("dim") == 512]
    assert wide and all(families.serves(kernel, 512) and not families.serves(kernel, 384) for kernel in wide)


def test_the_head_dim_of_keys_says_which_kernels_a_call_may_run() -> None:
    served = [kernel.facts for kernel in families.variants("sm_90a") if families.serves(kernel, 192)]
    assert {(facts["dim"], facts["dim_v"]) for facts in served if "dim" in facts} == {(192, 192), (192, 128)}
