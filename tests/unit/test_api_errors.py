"""Bad input: the exception's type, that its message names the argument and its value, and that nothing was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import strobe


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def qkv(*shape: int, **changes: Any) -> dict[str, Any]:
    """Good arguments, (batch, length, heads, dim) = (2, 3, 4, 8) unless told otherwise, with some of them replaced."""
    shape = shape or (2, 3, 4, 8)
    return {"q": t(*shape), "k": t(*shape), "v": t(*shape)} | changes


def half(**changes: Any) -> dict[str, Any]:
    return {name: tensor.bfloat16() for name, tensor in qkv().items()} | changes


def packed(**changes: Any) -> dict[str, Any]:
    """Good arguments for two packed sequences of 2 and 3 rows."""
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    return {"q": t(5, 4, 8), "k": t(5, 4, 8), "v": t(5, 4, 8), "cu_q": cu, "cu_k": cu.clone()} | changes


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@dataclass(frozen=True)
class Case:
    name: str
    arguments: Callable[[], dict[str, Any]]
    error: type[Exception]
    says: tuple[str, ...]  # what the message must contain: the argument's name, its value, what is allowed
    call: Callable[..., Any] = field(default=strobe.attention)


Arguments = Callable[[], dict[str, Any]]


def bad(name: str, arguments: Arguments, error: type[Exception], *says: str, call: Any = strobe.attention) -> Case:
    return Case(name, arguments, error, says, call)


def bad_packed(name: str, arguments: Arguments, error: type[Exception], *says: str) -> Case:
    return Case(name, arguments, error, says, strobe.attention_varlen)


CASES = [
    # q, k, v
    bad("q is not a tensor", lambda: qkv(q=[[1.0, 2.0]]), TypeError, "q must be a torch.Tensor", "list"),
    bad("v is None", lambda: qkv(v=None), TypeError, "v must be a torch.Tensor", "NoneType"),
    bad("rank 1", lambda: qkv(8), ValueError, "q has 1 axes", "2", "4"),
    bad("rank 5", lambda: qkv(1, 2, 3, 4, 8), ValueError, "q has 5 axes"),
    bad("ranks differ", lambda: qkv(k=t(3, 4, 8)), ValueError, "k has 3 axes", "q has 4"),
    bad("integer q", lambda: qkv(q=t(2, 3, 4, 8, dtype=torch.int64)), TypeError, "q has dtype torch.int64", "float32"),
    bad("integer v", lambda: qkv(v=t(2, 3, 4, 8, dtype=torch.int32)), TypeError, "v has dtype torch.int32"),
    bad("boolean k", lambda: qkv(k=t(2, 3, 4, 8, dtype=torch.bool)), TypeError, "k has dtype torch.bool"),
    bad("complex q", lambda: qkv(q=t(2, 3, 4, 8, dtype=torch.complex64)), TypeError, "q has dtype torch.complex64"),
    bad("sparse k", lambda: qkv(k=t(2, 3, 4, 8).to_sparse()), TypeError, "k must be a dense", "sparse"),
    bad("opaque q", lambda: qkv(q=t(2, 3, 4, 8).to_mkldnn()), TypeError, "q must be a dense", "mkldnn"),
    bad("opaque q to tiles", lambda: qkv(q=t(2, 3, 4, 8).to_mkldnn(), backend="tiled"), TypeError, "q must be a dense"),
    bad("compressed v", lambda: qkv(v=t(2, 3, 4, 8).to_sparse_csr()), TypeError, "v must be a dense", "sparse"),
    bad("dtypes differ", lambda: qkv(k=t(2, 3, 4, 8, dtype=torch.bfloat16)), TypeError, "k has dtype torch.bfloat16"),
    bad("devices differ", lambda: qkv(v=t(2, 3, 4, 8, device="meta")), ValueError, "v is on meta", "q is on cpu"),
    bad("batches differ", lambda: qkv(q=t(1, 3, 4, 8)), ValueError, "batch size", "1 and 2"),
    bad("k and v batches differ", lambda: qkv(v=t(5, 3, 4, 8)), ValueError, "k and v", "batch size", "2 and 5"),
    bad("k and v lengths differ", lambda: qkv(v=t(2, 7, 4, 8)), ValueError, "k and v", "length", "3 and 7"),
    bad("k and v heads differ", lambda: qkv(v=t(2, 3, 2, 8)), ValueError, "k and v", "heads", "4 and 2"),
    bad("head dims differ", lambda: qkv(q=t(2, 3, 4, 16)), ValueError, "q and k", "head dim", "16 and 8"),
    bad("head dim 0", lambda: qkv(2, 3, 4, 0), ValueError, "head dim", "0", "at least 1"),
    bad("no key heads", lambda: qkv(k=t(2, 3, 0, 8), v=t(2, 3, 0, 8)), ValueError, "q has 4 heads", "k has none"),
    bad(
        "heads not divisible", lambda: qkv(k=t(2, 3, 3, 8), v=t(2, 3, 3, 8)), ValueError, "4 heads", "multiple of the 3"
    ),
    bad("more key heads", lambda: qkv(k=t(2, 3, 8, 8), v=t(2, 3, 8, 8)), ValueError, "4 heads", "multiple of the 8"),
    bad(
        "q's last axis strided",
        lambda: qkv(q=t(2, 3, 4, 16)[..., ::2]),
        ValueError,
        "last axis of q",
        "2",
        "contiguous",
    ),
    bad("v's last axis strided", lambda: qkv(v=t(2, 3, 8, 4).mT), ValueError, "last axis of v", "contiguous"),
    bad("k's last axis expanded", lambda: qkv(k=t(2, 3, 4, 1).expand(2, 3, 4, 8)), ValueError, "last axis of k", "0"),
    # mask
    bad("unknown layout", lambda: qkv(layout="sbhd"), ValueError, "layout", "'sbhd'", "'bshd'", "'bhsd'"),
    bad("mask is a string", lambda: qkv(mask="causal"), TypeError, "mask", "'causal'", "strobe.causal"),
    bad("mask is a list", lambda: qkv(mask=[True]), TypeError, "mask", "[True]", "strobe.causal"),
    bad("mask is a function", lambda: qkv(mask=strobe.window), TypeError, "mask", "window"),
    bad("mask of numbers", lambda: qkv(mask=t(3, 3)), TypeError, "mask", "torch.float32", "boolean", "bias"),
    bad(
        "mask of wrong shape", lambda: qkv(mask=t(3, 5, dtype=torch.bool)), ValueError, "mask", "(3, 5)", "(2, 4, 3, 3)"
    ),
    bad("mask of rank 5", lambda: qkv(mask=t(1, 2, 4, 3, 3, dtype=torch.bool)), ValueError, "mask has 5 axes", "4"),
    bad(
        "mask elsewhere",
        lambda: qkv(mask=t(3, 3, dtype=torch.bool, device="meta")),
        ValueError,
        "mask is on meta",
        "cpu",
    ),
    bad("negative left", lambda: qkv(mask=strobe.window(-1, 0)), ValueError, "left", "-1", "at least 0"),
    bad("negative right", lambda: qkv(mask=strobe.window(None, -2)), ValueError, "right", "-2", "at least 0"),
    bad("window of floats", lambda: qkv(mask=strobe.window(1.5, 0)), TypeError, "left", "1.5", "int"),
    bad("negative prefix", lambda: qkv(mask=strobe.prefix(-3)), ValueError, "prefix", "-3"),
    bad("chunks of 0", lambda: qkv(mask=strobe.chunked(0)), ValueError, "chunked", "0", "at least 1"),
    bad("chunks of True", lambda: qkv(mask=strobe.chunked(True)), TypeError, "chunked", "True"),
    # scores
    bad("scale NaN", lambda: qkv(scale=math.nan), ValueError, "scale", "nan", "finite"),
    bad("scale infinite", lambda: qkv(scale=math.inf), ValueError, "scale", "inf", "finite"),
    bad("scale a string", lambda: qkv(scale="0.5"), TypeError, "scale", "'0.5'", "number"),
    bad("scale a tensor", lambda: qkv(scale=t(2)), TypeError, "scale", "number"),
    bad("scale True", lambda: qkv(scale=True), TypeError, "scale", "True", "number"),
    bad("softcap True", lambda: qkv(softcap=True), TypeError, "softcap", "True", "number"),
    bad("softcap 0", lambda: qkv(softcap=0.0), ValueError, "softcap", "0.0", "greater than 0"),
    bad("softcap negative", lambda: qkv(softcap=-30), ValueError, "softcap", "-30"),
    bad("softcap NaN", lambda: qkv(softcap=math.nan), ValueError, "softcap", "nan"),
    bad("bias of integers", lambda: qkv(bias=t(3, 3, dtype=torch.int32)), TypeError, "bias", "torch.int32"),
    bad("bias of booleans", lambda: qkv(bias=t(3, 3, dtype=torch.bool)), TypeError, "bias", "torch.bool", "mask"),
    bad("bias not a tensor", lambda: qkv(bias=1.0), TypeError, "bias must be a torch.Tensor", "float"),
    bad("bias of wrong shape", lambda: qkv(bias=t(3, 3, 3)), ValueError, "bias", "(3, 3, 3)", "(2, 4, 3, 3)"),
    bad("sinks of wrong shape", lambda: qkv(sinks=t(3)), ValueError, "sinks", "(3,)", "(4,)"),
    bad("sinks of integers", lambda: qkv(sinks=t(4, dtype=torch.int64)), TypeError, "sinks", "torch.int64"),
    bad("sinks elsewhere", lambda: qkv(sinks=t(4, device="meta")), ValueError, "sinks is on meta", "cpu"),
    # dropout
    bad("dropout 1", lambda: qkv(dropout=1.0), ValueError, "dropout", "1.0", "less than 1"),
    bad("dropout negative", lambda: qkv(dropout=-0.1), ValueError, "dropout", "-0.1"),
    bad("dropout NaN", lambda: qkv(dropout=math.nan), ValueError, "dropout", "nan"),
    bad("dropout True", lambda: qkv(dropout=True), TypeError, "dropout", "True", "number"),
    bad("dropout False", lambda: qkv(dropout=False), TypeError, "dropout", "False", "number"),
    bad("dropout a tensor", lambda: qkv(dropout=torch.tensor(0.0)), TypeError, "dropout", "number"),
    bad("seed without dropout", lambda: qkv(seed="7"), TypeError, "seed", "'7'", "int"),
    bad("seed a float", lambda: qkv(dropout=0.1, seed=1.5), TypeError, "seed", "1.5", "int"),
    bad("seed a string", lambda: qkv(dropout=0.1, seed="7"), TypeError, "seed", "'7'", "int"),
    # out
    bad("out not a tensor", lambda: qkv(out=True), TypeError, "out must be a torch.Tensor", "bool"),
    bad("out of wrong shape", lambda: qkv(out=t(2, 4, 3, 8)), ValueError, "out", "(2, 4, 3, 8)", "(2, 3, 4, 8)"),
    bad(
        "out of wrong dtype",
        lambda: qkv(out=t(2, 3, 4, 8, dtype=torch.float64)),
        TypeError,
        "out",
        "float64",
        "float32",
    ),
    bad("out elsewhere", lambda: qkv(out=t(2, 3, 4, 8, device="meta")), ValueError, "out is on meta", "cpu"),
    bad("out requires grad", lambda: qkv(out=t(2, 3, 4, 8).requires_grad_()), ValueError, "out requires grad"),
    bad("out expanded", lambda: qkv(out=t(1, 3, 4, 8).expand(2, 3, 4, 8)), ValueError, "out", "share memory"),
    bad("out strided", lambda: qkv(out=t(2, 3, 4, 16)[..., ::2]), ValueError, "last axis of out", "2"),
    bad(
        "out with gradients",
        lambda: qkv(q=t(2, 3, 4, 8).requires_grad_(), out=t(2, 3, 4, 8)),
        ValueError,
        "out",
        "no_grad",
    ),
    # backend
    bad("unknown backend", lambda: qkv(backend="fa2"), ValueError, "backend", "'fa2'", "'tiled'"),
    bad("backend a number", lambda: qkv(backend=3), ValueError, "backend", "3", "'tiled'"),
    bad("backend of another device", lambda: half(backend="sm80"), strobe.Unsupported, "sm80", "cpu"),
    # packed sequences
    bad_packed("packed rank 4", lambda: packed(**qkv(1, 5, 4, 8)), ValueError, "q has 4 axes", "3"),
    bad_packed("cu_q a list", lambda: packed(cu_q=[0, 2, 5]), TypeError, "cu_q must be a torch.Tensor", "list"),
    bad_packed(
        "cu_q int64", lambda: packed(cu_q=ints(0, 2, 5, dtype=torch.int64)), TypeError, "cu_q", "torch.int64", "int32"
    ),
    bad_packed("cu_k of rank 2", lambda: packed(cu_k=ints(0, 2, 5)[None]), ValueError, "cu_k", "(1, 3)"),
    bad_packed("cu_q empty", lambda: packed(cu_q=ints()), ValueError, "cu_q", "(0,)"),
    bad_packed("cu_q elsewhere", lambda: packed(cu_q=ints(0, 2, 5).to("meta")), ValueError, "cu_q is on meta", "cpu"),
    bad_packed("cu_q decreases", lambda: packed(cu_q=ints(0, 6, 5)), ValueError, "cu_q[1] = 6", "cu_q[2] = 5"),
    bad_packed("cu_k starts at 1", lambda: packed(cu_k=ints(1, 2, 5)), ValueError, "cu_k", "from 0 to 5", "1 … 5"),
    bad_packed("cu_k ends early", lambda: packed(cu_k=ints(0, 2, 4)), ValueError, "cu_k", "to 5", "0 … 4"),
    bad_packed("cu_q ends late", lambda: packed(cu_q=ints(0, 2, 6)), ValueError, "cu_q", "to 5", "0 … 6"),
    bad_packed("as many sequences", lambda: packed(cu_k=ints(0, 1, 2, 5)), ValueError, "cu_q and cu_k", "2 and 3"),
    bad_packed("max_q too small", lambda: packed(max_q=2), ValueError, "max_q is 2", "cu_q", "3"),
    bad_packed("max_k too small", lambda: packed(max_k=0), ValueError, "max_k is 0", "cu_k", "3"),
    bad_packed("max_q a float", lambda: packed(max_q=3.0), TypeError, "max_q", "3.0", "int"),
    bad_packed("max_k negative", lambda: packed(max_k=-1), ValueError, "max_k", "-1"),
    bad_packed("packed heads", lambda: packed(k=t(5, 3, 8), v=t(5, 3, 8)), ValueError, "4 heads", "multiple of the 3"),
    bad_packed("packed dropout", lambda: packed(dropout=2), ValueError, "dropout", "2", "less than 1"),
    bad_packed("packed out", lambda: packed(out=t(5, 4, 7)), ValueError, "out", "(5, 4, 7)", "(5, 4, 8)"),
    # the other functions
    bad(
        "flash_attention: rank",
        lambda: dict(q=t(2, 3, 4), k=t(3, 4), v=t(3, 4), output=t(3, 4)),
        ValueError,
        "q must have 2 axes",
        "(2, 3, 4)",
        call=strobe.flash_attention,
    ),
    bad(
        "flash_attention: output",
        lambda: dict(q=t(3, 4), k=t(3, 4), v=t(3, 4), output=t(4, 3)),
        ValueError,
        "out",
        "(4, 3)",
        "(3, 4)",
        call=strobe.flash_attention,
    ),
    bad(
        "flash_attention: no output",
        lambda: dict(q=t(3, 4), k=t(3, 4), v=t(3, 4), output=None),
        TypeError,
        "output must be a torch.Tensor",
        "NoneType",
        call=strobe.flash_attention,
    ),
    bad(
        "sdpa: both masks",
        lambda: dict(
            query=t(1, 2, 3, 8),
            key=t(1, 2, 3, 8),
            value=t(1, 2, 3, 8),
            is_causal=True,
            attn_mask=t(3, 3, dtype=torch.bool),
        ),
        ValueError,
        "attn_mask",
        "is_causal",
        call=strobe.sdpa,
    ),
    bad(
        "sdpa: grouped heads",
        lambda: dict(query=t(1, 4, 3, 8), key=t(1, 2, 3, 8), value=t(1, 2, 3, 8)),
        ValueError,
        "4 heads",
        "2",
        "enable_gqa",
        call=strobe.sdpa,
    ),
    bad(
        "explain: one cu",
        lambda: dict(q=t(5, 4, 8), k=t(5, 4, 8), v=t(5, 4, 8), cu_q=ints(0, 5)),
        ValueError,
        "cu_q and cu_k",
        call=strobe.explain,
    ),
]

POISON = 12345.0
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


@pytest.fixture(autouse=True, scope="module")
def good_calls_before() -> None:
    """Calls that look like an earlier one skip the checks: every bad call below comes after good ones like it."""
    for options in (
        {},
        {"scale": 1.0},
        {"softcap": 1.0},
        {"mask": strobe.causal},
        {"layout": "bhsd"},
        {"backend": "tiled"},
    ):
        strobe.attention(**qkv(**options))
        strobe.attention(**qkv(q=t(2, 3, 4, 8).requires_grad_(), **options))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_bad_input_is_named(case: Case) -> None:
    with pytest.raises(case.error) as caught:
        case.call(**case.arguments())
    missing = [part for part in case.says if part not in str(caught.value)]
    assert not missing, f"{missing} not in the message: {caught.value}"


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.call is not strobe.explain and c.call is not strobe.sdpa],
    ids=lambda case: case.name.replace(" ", "-"),
)
def test_nothing_is_written(case: Case) -> None:
    """There is an `out` of the right shape beside the bad argument, or the bad `out` itself."""
    name = "output" if case.call is strobe.flash_attention else "out"
    try:
        arguments = case.arguments()
    except (TypeError, ValueError):
        return  # masks check their own sizes: no call, nothing to write
    out = arguments.get(name)
    if name not in arguments:
        q = arguments["q"]
        good = isinstance(q, torch.Tensor) and q.dtype == torch.bfloat16
        shape = (5, 4, 8) if case.call is strobe.attention_varlen else (2, 3, 4, 8)
        out = arguments[name] = t(*shape, dtype=torch.bfloat16 if good else torch.float32)
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        out.data.fill_(POISON)
    with pytest.raises((TypeError, ValueError, strobe.Unsupported)):
        case.call(**arguments)
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert bool((out == POISON).all())


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "shapes, want",
    [
        (((0, 3, 4, 8), (0, 3, 4, 8)), (0, 3, 4, 8)),  # no sequences
        (((2, 0, 4, 8), (2, 3, 4, 8)), (2, 0, 4, 8)),  # no queries
        (((2, 3, 4, 8), (2, 0, 4, 8)), (2, 3, 4, 8)),  # no keys: every row sees nothing
        (((2, 3, 0, 8), (2, 3, 0, 8)), (2, 3, 0, 8)),  # no heads
    ],
)
def test_empty_is_not_an_error(shapes: tuple[tuple[int, ...], tuple[int, ...]], want: tuple[int, ...]) -> None:
    q, kv = t(*shapes[0]), t(*shapes[1])
    out, lse = strobe.attention(q, kv, kv, return_lse=True)
    assert tuple(out.shape) == want and not out.any()
    assert tuple(lse.shape) == (want[0], want[2], want[1]) and bool((lse == -math.inf).all())


def test_packed_lengths_of_zero_are_not_an_error() -> None:
    cu = ints(0, 0, 5, 5)
    out, lse = strobe.attention_varlen(t(5, 4, 8), t(5, 4, 8), t(5, 4, 8), cu, cu, return_lse=True)
    torch.testing.assert_close(out, t(5, 4, 8))
    assert tuple(lse.shape) == (4, 5) and bool(lse.isfinite().all())


def test_numbers_that_are_allowed() -> None:
    """The edges of what is refused above."""
    arguments = qkv()
    want = strobe.attention(**arguments)
    wide = ({"mask": strobe.window(None, None)}, {"mask": strobe.prefix(99)})
    for harmless in ({"scale": 1}, {"dropout": 0}, {"softcap": 1e4}, *wide):
        torch.testing.assert_close(strobe.attention(**arguments, **harmless), want)


@pytest.mark.parametrize("name", ["mask", "score"])
def test_a_function_that_cannot_be_traced_is_unsupported(name: str) -> None:
    """And a TypeError, as what is no function is."""
    with pytest.raises(strobe.Unsupported) as caught:
        strobe.attention(**qkv(), **{name: lambda *positions: math.floor(positions[0])})
    assert isinstance(caught.value, TypeError)
