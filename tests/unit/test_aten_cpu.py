"""PyTorch's CPU kernel under our semantics, and refused where it does not have them."""

from __future__ import annotations

import dataclasses

import pytest
import tolerance
import torch
from cases import CASES, Case
from oracle import backward, check, cotangents, expected, expected_gradients, forward, prepare

import strobe
from strobe.backends import aten_cpu
from strobe.problem import Load
from strobe.variants import mask as masks
from strobe.variants.ready_made import window
from strobe.variants.score import softcap

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKEND = aten_cpu.BACKENDS["aten_cpu"]


def supported(case: Case) -> bool:
    return BACKEND.supports(prepare(case, torch.float32)[0]) is None


COVERED = [case for case in CASES if supported(case)]


def test_covers_what_it_should() -> None:
    names = {case.name for case in COVERED}
    assert {
        "plain",
        "causal",
        "ragged",
        "top_left",
        "top_left_more_queries",
        "one_query",
        "dim_odd",
        "dim_256",
    } <= names
    assert {
        "huge",
        "rising",
        "scale_negative",
        "sliced_group",
        "group_8",
        "mask_tensor",
        "mask_padding",
        "bias",
    } <= names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    p, inputs = prepare(case, dtype)
    out, lse = forward("aten_cpu", p, inputs)
    assert (out.dtype, lse.dtype) == (dtype, p.lse_dtype)
    exact, same = expected(case, dtype)
    tolerance.check("out", out, exact[0], same[0])
    # In 16 bits its exponentials, and so the LSE, are good to about 1e-4 only.
    tolerance.check(
        "lse", lse, exact[1], same[1], floor=tolerance.lse_floor(lse) + (2e-4 if dtype.itemsize == 2 else 0)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in COVERED if c.bias is None], ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    p, inputs = prepare(case, dtype)
    out, lse = forward("aten_cpu", p, inputs)
    dout, dlse = cotangents(p, inputs)
    for direction in (None, dlse) if dtype == torch.float32 else (None,):  # through the LSE it is `tiled` that runs
        found = backward("aten_cpu", p, inputs, out, lse, dout, direction, ("q", "k", "v"))
        exact, same = expected_gradients(case, dtype, direction is not None)
        for name, gradient, e, s in zip("qkv", found, exact, same, strict=False):
            floor = tolerance.gradient_floor(name, p, inputs, lse, dout, e)
            tolerance.check(f"d{name}", gradient, e, s, tolerance.GRADIENTS, floor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape_q, shape_k", [((4096, 16), (16, 1)), ((8, 1), (16384, 1))], ids=["queries", "keys"])
def test_long_sums_in_16_bits(shape_q: tuple[int, int], shape_k: tuple[int, int], dtype: torch.dtype) -> None:
    """Of dK and dV over many queries and the heads of a group, of dQ over many keys."""
    torch.manual_seed(0)
    x = [torch.randn(1, *shape, 16).to(dtype).requires_grad_() for shape in (shape_q, shape_k, shape_k)]
    wide = [t.detach().double().requires_grad_() for t in x]
    dout = torch.randn(1, *shape_q, 16).to(dtype)
    found = torch.autograd.grad(strobe.attention(*x, backend="aten_cpu"), x, dout)
    exact = torch.autograd.grad(strobe.attention(*wide), wide, dout.double())
    for gradient, e in zip(found, exact, strict=True):
        assert (gradient.double() - e).norm() <= torch.finfo(dtype).eps / 2 * e.norm()


def test_a_row_that_a_mask_tensor_hides_among_many_keys() -> None:
    """The keys are many: else `tiled` takes over whenever an LSE is 0, and would cover for a wrong one."""
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 100, 2, 8)
    mask = torch.ones(1, 1, 5, 100, dtype=torch.bool)
    mask[..., 3, :] = False
    out, lse = strobe.attention(q, k, k, mask=mask, return_lse=True, backend="aten_cpu")
    hidden = torch.tensor([False, False, False, True, False])
    assert (lse[..., hidden] == -torch.inf).all() and lse[..., ~hidden].isfinite().all()
    assert (out[:, hidden] == 0).all()


def test_rows_without_keys() -> None:
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    visible = torch.ones(8, 8, dtype=torch.bool)
    visible[3] = False
    p, inputs = check(q, k, v, mask=visible)
    out, lse = forward("aten_cpu", p, inputs)
    assert (out[:, :, 3] == 0).all() and (lse[:, :, 3] == -torch.inf).all() and torch.isfinite(lse[:, :, 4:]).all()
    gradients = backward("aten_cpu", p, inputs, out, lse, torch.ones_like(out), None, ("q", "k", "v"))
    assert (gradients.q[:, :, 3] == 0).all() and all(torch.isfinite(g).all() for g in gradients[:3])


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_of_any_dtype(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 8, 2, 16).to(dtype) for _ in range(3))
    p, inputs = check(q, k, v, bias=torch.randn(8, 8).to(bias_dtype))
    out, _ = forward("aten_cpu", p, inputs)
    s = inputs.q.double() @ inputs.k.double().mT / 4 + inputs.bias.double()
    torch.testing.assert_close(out.double(), s.softmax(-1) @ inputs.v.double(), atol=8 * torch.finfo(dtype).eps, rtol=0)


def test_writes_into_out() -> None:
    p, inputs = prepare(CASES[0], torch.float32)
    out = torch.full_like(inputs.q, torch.nan)
    result, _ = forward("aten_cpu", p, inputs, out)
    assert result is out and torch.isfinite(out).all()


PLAIN, _ = prepare(CASES[0], torch.float32)


def plain(**changes: object) -> str | None:
    return BACKEND.supports(dataclasses.replace(PLAIN, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cuda")}, "CPU"),
        ({"q": dataclasses.replace(PLAIN.q, varlen=True)}, "packed"),
        ({"k": dataclasses.replace(PLAIN.k, total=0)}, "empty"),
        ({"batch": 0}, "empty"),
        ({"dim_v": 8}, "dims must be equal, got 32 and 8"),
        ({"score": softcap(2.0)}, "softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"per_head": frozenset(("sinks",))}, "sinks"),
        ({"mask": window(3, 0)}, "window"),
        ({"mask": masks.causal, "k": dataclasses.replace(PLAIN.k, length=65)}, "unequal lengths"),
        ({"mask": masks.causal, "loads": (Load("bias", torch.float32, (0, 0, 0, 0)),)}, "bias together"),
        ({"loads": (Load("bias", torch.float32, (0, 0, 0, 0)),), "gradients": ("bias",)}, "gradient of the bias"),
        ({"mask": masks.causal, "scale": -1.0}, "scale -1.0"),
        ({"mask": masks.causal, "scale": 0.0}, "scale 0.0"),
        ({"mask": masks.causal, "scale": 1e-46}, "scale 1e-46"),
        ({"scale": 1e38}, "scale 1e+38"),
        (
            {"gradients": ("k",), "dtype": torch.float16, "q": dataclasses.replace(PLAIN.q, length=4097)},
            "its backward adds 17 blocks in torch.float16, which is exact enough for 16",
        ),
    ],
    ids=str,
)
def test_says_why_not(changes: dict[str, object], reason: str) -> None:
    assert plain() is None
    assert reason in (plain(**changes) or "")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("backend", ["aten_cpu", "tiled"])
def test_a_repeated_call_gives_the_same_as_the_first(layout: str, backend: str) -> None:
    """Further calls of one shape skip the checks; they must not skip anything else."""
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 40, 4, 32) for _ in range(3))
        views = [t if layout == "bshd" else t.transpose(1, 2) for t in (q, k, v)]
        out, lse = strobe.attention(*views, mask=strobe.causal, layout=layout, return_lse=True, backend=backend)
        doubles = [t.double() for t in (q, k, v)]
        exact, exact_lse = strobe.attention(*doubles, mask=strobe.causal, return_lse=True, backend="reference")
        assert torch.allclose(out.double() if layout == "bshd" else out.transpose(1, 2).double(), exact, atol=1e-5)
        assert torch.allclose(lse.double(), exact_lse, atol=1e-5)
    q.requires_grad_()
    views = [t if layout == "bshd" else t.transpose(1, 2) for t in (q, k, v)]
    for enabled in (True, True, False):
        with torch.set_grad_enabled(enabled):
            out, _ = strobe.attention(*views, mask=strobe.causal, layout=layout, return_lse=True, backend=backend)
        assert out.requires_grad == enabled


@pytest.mark.parametrize("backend", ["aten_cpu", "tiled"])
def test_repeated_gradients(backend: str) -> None:
    """First and second derivatives, through the LSE too, and for whichever inputs want them this time."""
    for seed, wanted in enumerate([(0, 1, 2), (0, 1, 2), (1,), (0, 2)]):
        torch.manual_seed(seed)
        leaves = [torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=i in wanted) for i in range(3)]
        found = []
        for name in (backend, "reference"):
            needed = [leaves[i] for i in wanted]
            out, lse = strobe.attention(*leaves, return_lse=True, backend=name)
            first = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), needed, create_graph=True)
            second = torch.autograd.grad(sum((g * g).sum() for g in first), needed)
            found.append([*first, *second])
            for layout in ("bshd", "bhsd"):  # without the LSE, a shorter way
                out = strobe.attention(*leaves, mask=strobe.causal, layout=layout, scale=0.4, backend=name)
                found[-1] += torch.autograd.grad(out.sin().sum(), needed, retain_graph=True)
                first = torch.autograd.grad(out.sin().sum(), needed, create_graph=True)
                found[-1] += [*first, *torch.autograd.grad(sum((g * g).sum() for g in first), needed)]
        torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=1e-10)
