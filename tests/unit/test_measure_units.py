"""Numbers with their units, the tolerance rule, and cases as data."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case, make
from oracle import checked

from strobe.measure import palette, tolerance, units
from strobe.measure.cases import mask_of, problem_of
from strobe.variants import mask as masks
from strobe.variants.ready_made import chunked, prefix, window

# ---- units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.size, None, "–"),
        (units.size, 0, "0 B"),
        (units.size, 1023, "1023 B"),
        (units.size, 1536, "1.5 KiB"),
        (units.size, 514 << 20, "514 MiB"),
        (units.size, 140 << 30, "140 GiB"),
        (units.traffic, 1_500, "1.5 kB"),
        (units.traffic, 2.5e9, "2.5 GB"),
        (units.milliseconds, 0.0477, "47.7 µs"),
        (units.milliseconds, 0.362, "0.362 ms"),
        (units.milliseconds, 1234.0, "1.23 s"),
        (units.seconds, 0.05, "50 ms"),
        (units.rate, 654.4, "654 TFLOP/s"),
        (units.rate, 45.2, "45.2 TFLOP/s"),
        (units.rate, 0.2194, "219 GFLOP/s"),
        (units.rate, 3e-4, "300 MFLOP/s"),
        (units.rate, 3e-7, "0.3 MFLOP/s"),
        (units.bandwidth, 4214.2, "4214 GB/s"),
        (units.bandwidth, 35.44, "35.4 GB/s"),
        (units.faster, 1.2362, "1.24 × faster"),
        (units.faster, 0.591, "1.69 × slower"),
        (units.faster, 1 / 6, "6 × slower"),
        (units.faster, 1.004, "as fast"),
        (units.faster, 1645.3, "1645 × faster"),
        (units.faster, None, "–"),
        (units.less, 5.93, "5.93 × less"),
        (units.less, 0.5, "2 × more"),
        (units.less, 1.0, "as much"),
        (units.percent, 0.867, "87%"),
        (units.length, 16384, "16K"),
        (units.length, 197, "197"),
        (units.length, 1500, "1500"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_units(function: object, value: float | None, text: str) -> None:
    assert function(value) == text  # type: ignore[operator]


def test_every_kind_has_its_own_look() -> None:
    names = [(f"{kind}{i}", kind) for kind in palette.KINDS for i in range(3)]
    styles = palette.styles(names)
    assert len({style.colour for style in styles.values()}) == len(names)
    assert len({styles[f"{kind}0"].shape for kind in palette.KINDS}) == len(palette.KINDS)


# ---- tolerance


def test_the_rule() -> None:
    """Twice the error of PyTorch in the same dtype, and two roundings near 0.3; three times for gradients."""
    exact = torch.tensor([0.5, -1.0], dtype=torch.float64)
    same = torch.tensor([0.5, -1.0 + 2**-6]).bfloat16()
    roundings = 2 * ((exact.bfloat16() + 0.3 - 0.3) - exact.bfloat16()).abs().max().item()
    assert tolerance.allowed(exact, same, torch.bfloat16) == 2 * 2**-6 + roundings
    assert tolerance.allowed(exact, same, torch.bfloat16, tolerance.GRADIENTS) == 3 * 2**-6 + roundings
    just = exact + 2 * 2**-6
    assert tolerance.compare("out", just.float(), exact, same).passed
    found = tolerance.compare("out", (just + 0.1).float(), exact, same)
    assert not found.passed and str(found).startswith("out: error 1.31") and "allowed" in str(found)
    assert tolerance.compare("out", (just + 0.1).float(), exact, same, floor=0.2).passed


@pytest.mark.parametrize(
    ("found", "exact", "problem"),
    [
        ([1.0, torch.nan], [1.0, 2.0], "1 of 2 are NaN"),
        ([1.0, torch.inf], [1.0, 2.0], "infinite where it should be finite"),
        ([1.0, 0.0], [1.0, -torch.inf], "infinities are wrong"),
        ([1.0, -torch.inf], [1.0, -torch.inf], None),
        ([-torch.inf], [-torch.inf], None),
    ],
)
def test_what_no_rounding_explains(found: list[float], exact: list[float], problem: str | None) -> None:
    exact64 = torch.tensor(exact, dtype=torch.float64)
    verdict = tolerance.compare("lse", torch.tensor(found), exact64, torch.tensor(exact))
    assert verdict.problem == problem and verdict.passed == (problem is None)
    assert problem is None or str(verdict) == f"lse: {problem}"


def test_parts_are_judged_together() -> None:
    """A part whose own yardstick is exact may err as much as the others do: the largest numbers count."""
    exact = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    same = [torch.zeros(3), torch.ones(3) + 1e-3]
    found = [torch.full((3,), 1e-3), torch.ones(3)]
    verdict = tolerance.compare("out", found, exact, same)
    assert verdict.passed and verdict.largest == pytest.approx(1e-3) and verdict.relative == pytest.approx(1e-3)
    with pytest.raises(ValueError, match=r"out has shape \(2,\), should be \(3,\)"):
        tolerance.compare("out", [torch.zeros(2), found[1]], exact, same)


def test_floors() -> None:
    lse = torch.tensor([-8.0, 3.0, -torch.inf])
    assert tolerance.lse_floor(lse) == 2 * torch.finfo(torch.float32).eps * 8
    assert tolerance.summation_floor(lse.double(), 10, torch.float32) == 10 * torch.finfo(torch.float32).eps * 8
    assert tolerance.summation_floor(lse, 0, torch.float32) == 0.0
    assert tolerance.lse_floor(torch.tensor([-torch.inf])) == 0.0


# ---- cases


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_problem_needs_no_tensors(case: Case) -> None:
    """The problem is that of a call with tensors, on a device that is not here."""
    q, k, v, kwargs = make(case, torch.float32)
    expected, _ = checked(q, k, v, kwargs)
    found = problem_of(case, torch.float32, torch.device("cuda", 3))
    assert found.device == torch.device("cuda", 3)
    if case.memory == "dense":
        assert problem_of(case, torch.float32, torch.device("cpu")) == expected


def test_shapes_and_sizes() -> None:
    case = Case("x", 5, 7, batch=3, heads=4, heads_k=2, dim=8, dim_v=16)
    assert case.shapes() == ((3, 5, 4, 8), (3, 7, 2, 8), (3, 7, 2, 16)) and case.group == 2
    assert case.score_elements() == 3 * 4 * 5 * 7
    assert case.tensor_elements() == 3 * (5 * 4 * (8 + 16) + 7 * 2 * (8 + 16))
    varlen = Case("y", 0, 0, heads=4, heads_k=2, dim=8, lengths=((5, 9), (0, 2)))
    assert varlen.shapes() == ((5, 4, 8), (11, 2, 8), (11, 2, 8))
    assert (varlen.softmax_scale, varlen.value_dim) == (8**-0.5, 8)


@pytest.mark.parametrize(
    "mask",
    [
        masks.full,
        masks.causal,
        masks.causal_top_left,
        window(3, None),
        prefix(4),
        chunked(5) & masks.causal,
    ],
    ids=lambda m: m.name,
)
def test_masks_are_read_from_their_names(mask: masks.Mask) -> None:
    assert mask_of(mask.name) == mask


@pytest.mark.parametrize("text", ["", "diagonal", "window(3)", "window(a, 0)", "window(-1, 0)", "causal & nothing"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mask must be one of full, causal"):
        mask_of(text)
