"""A call under torch.compile is one graph with the same numbers. `aot_eager` traces forward and backward but generates
no code; one test does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import strobe
from strobe.call import bound_call
from strobe.variants.mask import parse_mask
from strobe.variants.score import identity

SHAPE = (2, 33, 4, 16)
LENGTHS = torch.tensor([0, 5, 5, 33], dtype=torch.int32)
VISIBLE = torch.rand(33, 33, generator=torch.Generator().manual_seed(0)) > 0.3

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "plain": (lambda q, k, v: strobe.attention(q, k, v), [SHAPE] * 3),
    "causal, LSE": (lambda q, k, v: strobe.attention(q, k, v, mask=strobe.causal, return_lse=True), [SHAPE] * 3),
    "a mask made inside, softcap, grouped": (
        lambda q, k, v: strobe.attention(q, k, v, mask=strobe.window(3, 1) & strobe.prefix(2), softcap=5.0),
        [SHAPE, (2, 33, 2, 16), (2, 33, 2, 24)],
    ),
    "bias, sinks, dropout": (
        lambda q, k, v, bias, sinks: strobe.attention(q, k, v, bias=bias, sinks=sinks, dropout=0.1, seed=3),
        [SHAPE, SHAPE, SHAPE, (4, 33, 33), (4,)],
    ),
    "mask tensor, bhsd": (
        lambda q, k, v: strobe.attention(q, k, v, mask=VISIBLE, layout="bhsd", return_lse=True),
        [(2, 4, 33, 16)] * 3,
    ),
    "packed": (
        lambda q, k, v: strobe.attention_varlen(q, k, v, LENGTHS, LENGTHS, mask=strobe.causal, return_lse=True),
        [(33, 4, 16)] * 3,
    ),
    "sdpa": (lambda q, k, v: strobe.sdpa(q, k, v, is_causal=True), [(2, 4, 33, 16)] * 3),
    "two axes": (lambda q, k, v: strobe.attention(q, k, v, mask=strobe.causal, return_lse=True), [(33, 16)] * 3),
    "three axes": (lambda q, k, v: strobe.attention(q, k, v, return_lse=True, layout="bshd"), [(33, 4, 16)] * 3),
    "no keys": (lambda q, k, v: strobe.attention(q, k, v), [SHAPE, (2, 0, 4, 16), (2, 0, 4, 16)]),
    "a backend by name": (lambda q, k, v: strobe.attention(q, k, v, backend="tiled"), [SHAPE] * 3),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_gradients(function: Function, shapes: list[tuple[int, ...]], seed: int = 0) -> list[torch.Tensor]:
    """The results and the gradients of all inputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    found = function(*inputs)
    results = list(found) if isinstance(found, tuple) else [found]
    weights = [torch.randn(r.shape, generator=generator) for r in results]
    torch.autograd.backward(results, weights)
    return [t.detach() for t in results] + [t.grad for t in inputs if t.grad is not None]


@pytest.mark.parametrize("name", CASES)
def test_one_graph_and_the_same_numbers(name: str) -> None:
    function, shapes = CASES[name]
    expected = with_gradients(function, shapes)
    found = with_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), shapes)
    assert len(found) == len(expected) >= len(shapes)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_lengths_may_change_without_a_new_graph() -> None:
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: strobe.attention(q, k, v, mask=strobe.causal), backend=graphs, dynamic=True
    )
    seen = []
    for length in (17, 40, 64):
        shapes = [(2, length, 4, 16)] * 3
        expected = with_gradients(lambda q, k, v: strobe.attention(q, k, v, mask=strobe.causal), shapes)
        for a, b in zip(with_gradients(compiled, shapes), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        seen.append(graphs.frame_count)
    assert len(set(seen)) == 1, seen


def test_generated_code_around_it() -> None:
    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return strobe.attention(2 * q, k, v.relu(), mask=strobe.causal).sigmoid()

    found, expected = (with_gradients(f, [SHAPE] * 3) for f in (torch.compile(block, fullgraph=True), block))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return strobe.attention(2 * q, k, v, mask=strobe.causal)

    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    exported = torch.export.export(Layer(), (q, k, v), strict=strict)
    torch.testing.assert_close(exported.module()(q, k, v), Layer()(q, k, v))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 1 << 20, 8, 64)
        out, lse = strobe.attention(q, q, q, mask=strobe.causal, return_lse=True)
        assert out.shape == q.shape and lse.shape == (1, 8, 1 << 20) and lse.dtype == torch.float32
        with pytest.raises(strobe.Unsupported, match="can be traced"):
            strobe.attention(q, q, q, dropout=0.1)


def test_no_lse_unless_someone_needs_it() -> None:
    q = torch.randn(SHAPE)
    seen = []

    def look(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        seen.extend(node.args[-1] for node in module.graph.nodes if str(node.target).startswith("strobe.attention"))
        return module.forward

    torch.compile(strobe.attention, backend=look)(q, q, q)
    torch._dynamo.reset()
    torch.compile(strobe.attention, backend=look)(q.requires_grad_(), q, q)
    assert seen == [False, True]


@pytest.mark.parametrize("options", [{"out": torch.empty(SHAPE)}, {"dropout": 0.2}], ids=["out", "a seed to draw"])
def test_what_breaks_the_graph_still_runs(options: dict) -> None:
    q = torch.randn(SHAPE)
    torch.manual_seed(1)
    expected = strobe.attention(q, q, q, **options).clone()
    torch.manual_seed(1)
    torch.testing.assert_close(torch.compile(strobe.attention, backend="aot_eager")(q, q, q, **options), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(strobe.attention, backend="aot_eager", fullgraph=True)(q, q, q, **options)


def test_a_compiled_call_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once checked, arguments are not checked again."""
    q = torch.randn(SHAPE)
    compiled = torch.compile(lambda q: strobe.attention(q, q, q, mask=strobe.causal), backend="aot_eager")
    compiled(q)
    monkeypatch.setattr(bound_call, "Problem", None)
    compiled(q)


def test_errors_are_the_same() -> None:
    q, k = torch.randn(SHAPE), torch.randn(2, 33, 3, 16)
    compiled = torch.compile(strobe.attention, backend="aot_eager")
    with pytest.raises(Exception, match="4 heads, which is not a multiple of the 3 heads"):  # wrapped by the tracer
        compiled(q, k, k)
    with pytest.raises(TypeError, match="mask must be a strobe mask"):
        compiled(q, q, q, mask="causal")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_operation_keeps_its_promises(dtype: torch.dtype, with_lse: bool) -> None:
    """Schema, shapes and strides promised to the tracer, derivatives: PyTorch's own checks."""
    q, k, v = (torch.randn(SHAPE, dtype=dtype).requires_grad_(with_lse) for _ in range(3))
    interval, interval_numbers = strobe.causal.text_and_numbers()
    given = {"q": q, "k": k, "v": v, "score_tensors": [], "interval": interval, "score": identity.text()}
    given |= {"interval_numbers": interval_numbers, "score_numbers": []}
    given |= {"dropout": 0.0, "seed": 0, "layout": "bshd", "deterministic": False, "with_lse": with_lse}
    names = [argument.name for argument in torch.ops.strobe.attention.default._schema.arguments]
    torch.library.opcheck(torch.ops.strobe.attention, [given.get(name) for name in names])


@pytest.mark.parametrize(
    "mask",
    [
        strobe.full,
        strobe.causal,
        strobe.causal_top_left,
        strobe.window(3, None),
        strobe.window(None, 0),
        strobe.prefix(7),
        strobe.chunked(5) & strobe.causal,
        strobe.causal & strobe.window(2, 2) & strobe.prefix(1),
    ],
    ids=repr,
)
def test_masks_travel_as_text(mask: strobe.Mask) -> None:
    found = parse_mask(mask.text())
    assert found == mask and repr(found) == repr(mask)


def test_a_name_does_not_make_a_mask() -> None:
    """The two expressions travel, not the name: a mask of one's own may be called anything."""
    imposter = strobe.Mask(None, strobe.causal_top_left.hi, "causal")
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    k, v = k[:, :4], v[:, :4]
    expected = strobe.attention(q, k, v, mask=strobe.causal_top_left)
    compiled = torch.compile(lambda q, k, v: strobe.attention(q, k, v, mask=imposter), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
    assert not torch.equal(strobe.attention(q, k, v, mask=strobe.causal), expected)


def test_damaged_text_is_refused() -> None:
    for text in ("", "(+ q;;x", "(tree q 1);;x", "q k;;x"):
        with pytest.raises(ValueError):
            parse_mask(text)


# ---- numbers that are arguments --------------------------------------------------------------------------------------

NUMBERS: dict[str, tuple[Function, list]] = {
    "a window": (lambda q, k, v, n: strobe.attention(q, k, v, mask=strobe.window(n, 0)), [3, 4, 7, 11]),
    "masks": (
        lambda q, k, v, n: strobe.attention(q, k, v, mask=strobe.prefix(n) & strobe.window(n, n) & strobe.causal),
        [3, 4, 7, 11],
    ),
    "a chunk": (lambda q, k, v, n: strobe.attention(q, k, v, mask=strobe.chunked(n) & strobe.causal), [5, 8, 13]),
    "a mask": (
        lambda q, k, v, mask: strobe.attention(q, k, v, mask=mask),
        [strobe.window(n, 1) & strobe.causal for n in (3, 4, 7)],
    ),
    "a seed": (lambda q, k, v, seed: strobe.attention(q, k, v, dropout=0.5, seed=seed), [3, 4, 5, 6]),
    "a softcap": (lambda q, k, v, cap: strobe.attention(q, k, v, softcap=cap), [2.0, 3.5, 50.0]),
    "a softcap that is an int": (lambda q, k, v, cap: strobe.attention(q, k, v, softcap=cap), [2, 3, 50]),
    "a score": (
        lambda q, k, v, cap: strobe.attention(q, k, v, score=strobe.variants.score.softcap(cap)),
        [2.0, 3.5, 50.0],
    ),
    "a window and a softcap": (
        lambda q, k, v, x: strobe.attention(q, k, v, mask=strobe.window(x[0], 0), softcap=x[1]),
        [(3, 2.0), (5, 2.0), (5, 30.0)],
    ),
}
FLOATS = [name for name in NUMBERS if "soft" in name or "score" in name]  # each is a graph of its own


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_arguments(name: str, dynamic: bool | None) -> None:
    """One graph for every whole number once it is known that it changes."""
    function, values = NUMBERS[name]
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=graphs, fullgraph=True, dynamic=dynamic)
    seen = []
    for value in values:
        expected = with_gradients(lambda *qkv, value=value: function(*qkv, value), [SHAPE] * 3)
        found = with_gradients(lambda *qkv, value=value: compiled(*qkv, value), [SHAPE] * 3)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        seen.append(graphs.frame_count)
    if name not in FLOATS:
        assert len(set(seen[0 if dynamic else 1 :])) == 1, seen


def test_an_exported_window_may_change(tmp_path: Path) -> None:
    """Also after it was saved. The other numbers are part of the graph."""

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, n: int) -> torch.Tensor:
            return strobe.attention(q, q, q, mask=strobe.window(n, 0) & strobe.prefix(2), softcap=3.0)

    q = torch.randn(SHAPE)
    exported = torch.export.export(Layer(), (q, 5), dynamic_shapes=(None, torch.export.Dim.DYNAMIC))
    torch.export.save(exported, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for n in (5, 2, 9):
        torch.testing.assert_close(loaded(q, n), Layer()(q, n))


def test_generated_code_with_a_window_that_changes() -> None:
    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: int) -> torch.Tensor:
        return strobe.attention(2 * q, k, v, mask=strobe.window(n, 0), softcap=5.0).sigmoid()

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for n in (4, 6):
        found, expected = (
            with_gradients(lambda q, k, v, f=f, n=n: f(q, k, v, n), [SHAPE] * 3) for f in (compiled, block)
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "what", [strobe.window(3, 1) & strobe.causal, identity, strobe.variants.score.softcap(2.5)], ids=repr
)
def test_a_pickle_has_no_hash_of_another_process(what: strobe.Mask | strobe.Score) -> None:
    hash(what), what.name
    found = pickle.loads(pickle.dumps(what))
    assert found == what and repr(found) == repr(what) and "_hash" in vars(what)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(what)))


# ---- ALiBi -----------------------------------------------------------------------------------------------------------


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    return strobe.attention(q, k, v, mask=strobe.causal, score=strobe.alibi(slopes))


def test_gradients_with_slopes() -> None:
    slopes = torch.rand(4)
    compiled = torch.compile(biased, fullgraph=True, backend="aot_eager")
    found, expected = (with_gradients(lambda *qkv, f=f: f(*qkv, slopes), [SHAPE] * 3) for f in (compiled, biased))
    assert len(found) == 4
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_second_derivatives_with_slopes() -> None:
    leaves = [torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    slopes = torch.rand(2, dtype=torch.float64)
    compiled = torch.compile(biased, backend="eager", fullgraph=True)
    results = [penalty(lambda *qkv, f=f: f(*qkv, slopes), *leaves) for f in (biased, compiled)]
    torch.testing.assert_close(*(torch.autograd.grad(result, leaves) for result in results))


def test_an_exported_graph_with_slopes_can_be_trained() -> None:
    class Layer(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return biased(*tensors)

    slopes = torch.rand(4)
    example = (*(torch.randn(SHAPE) for _ in range(3)), slopes)
    exported = torch.export.export(Layer(), example).module()
    found, expected = (with_gradients(lambda *qkv, f=f: f(*qkv, slopes), [SHAPE] * 3) for f in (exported, biased))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ---- never silently wrong --------------------------------------------------------------------------------------------


def penalty(attention, q, k, v):  # type: ignore[no-untyped-def]
    (gradient,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    return gradient.square().sum()


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return strobe.attention(q, k, v, mask=strobe.causal, softcap=3.0)


def test_second_derivatives_through_the_operation() -> None:
    leaves = [torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(causal_attention, backend="eager", fullgraph=True)
    results = [penalty(f, *leaves) for f in (causal_attention, compiled)]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(result, leaves) for result in results]
    torch.testing.assert_close(*gradients)


def test_third_derivatives_are_refused() -> None:
    leaves = [torch.randn(1, 3, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(causal_attention, backend="eager", fullgraph=True)
    (second,) = torch.autograd.grad(penalty(compiled, *leaves), leaves[0], create_graph=True)
    with pytest.raises(strobe.Unsupported, match="no third"):
        torch.autograd.grad(second.sum(), leaves[0])


class Projected(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (x @ self.weight).unflatten(-1, (2, 8))
        return causal_attention(h, h, h)


@pytest.mark.parametrize("grad", [False, True])
def test_an_exported_module_can_be_trained(grad: bool) -> None:
    """Even if it was exported where no gradient was expected."""
    module, x = Projected(), torch.randn(1, 6, 16)
    with torch.set_grad_enabled(grad):
        exported = torch.export.export(module, (x,)).module()
    found = torch.autograd.grad(exported(x).square().sum(), list(exported.parameters()))
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(found, expected)


def test_a_jit_trace_is_right_at_other_shapes() -> None:
    q = torch.randn(1, 4, 2, 8)
    traced = torch.jit.trace(causal_attention, (q, q, q))
    q, k, v = torch.randn(2, 7, 2, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    torch.testing.assert_close(traced(q, k, v), causal_attention(q, k, v))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 2, 8), (1, 4, 2, 7), (1, 4, 2, 7)), "q and k disagree in head dim: 8 and 7"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)), "k and v disagree in length: 4 and 5"),
        (((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "q and k disagree in batch size: 2 and 1"),
    ],
)
def test_fake_tensors_that_do_not_fit_are_refused(shapes: tuple, message: str) -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        strobe.attention(*(torch.empty(shape) for shape in shapes))


def test_dispatch_modes_see_the_operation() -> None:
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    q = torch.randn(1, 4, 2, 8)
    with Recorder():
        found = causal_attention(q, q, q)
    assert seen == [torch.ops.strobe.attention.default]
    torch.testing.assert_close(found, causal_attention(q, q, q))


def test_seeds_of_64_bits() -> None:
    q = torch.randn(1, 8, 2, 8)
    for seed in (2**63 + 5, 2**64 - 1, -3):
        compiled = torch.compile(
            lambda q, seed=seed: strobe.attention(q, q, q, dropout=0.5, seed=seed), backend="eager", fullgraph=True
        )
        assert torch.equal(compiled(q), strobe.attention(q, q, q, dropout=0.5, seed=seed))


def test_a_default_device_is_not_ours() -> None:
    q = torch.randn(1, 8, 2, 8)
    expected = [strobe.attention(q, q, q, mask=strobe.window(2, 1), dropout=0.5, seed=1), causal_attention(q, q, q)]
    torch.set_default_device("meta")
    try:
        found = [strobe.attention(q, q, q, mask=strobe.window(2, 1), dropout=0.5, seed=1), causal_attention(q, q, q)]
        strobe.attention(q, q, q, dropout=0.5)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, expected)
