"""The first call, written as for another library: the error has the right spelling, axes in another order get a warning."""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import pytest
import torch

import strobe
from strobe.problem import hints

x = torch.ones(2, 3, 4, 8)
packed = torch.ones(5, 4, 8)
cu = torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("keyword", "value", "says"),
    [
        ("causal", True, "use mask=strobe.causal"),
        ("is_causal", True, "use mask=strobe.causal"),
        ("dropout_p", 0.1, "use dropout="),
        ("attn_mask", None, "use mask="),
        ("key_padding_mask", None, "use mask=~key_padding_mask[:, None, None, :]"),
        ("window_size", (128, 0), "use mask=strobe.window(left, right)"),
        ("softmax_scale", 1.0, "use scale="),
        ("alibi_slopes", None, "use score=strobe.alibi(slopes)"),
        ("enable_gqa", True, "use nothing: fewer key heads than query heads are grouped"),
        ("cu_seqlens_q", cu, "strobe.attention_varlen"),
        ("maks", None, "did you mean mask=?"),
        ("zzz", None, "it takes q, k, v, "),
    ],
)
@pytest.mark.parametrize("function", [strobe.attention, strobe.attention_varlen, strobe.explain])
def test_a_keyword_of_another_library_is_answered_with_ours(function: Any, keyword: str, value: Any, says: str) -> None:
    tensors = (packed, packed, packed, cu, cu) if function is strobe.attention_varlen else (x, x, x)
    with pytest.raises(TypeError) as caught:
        function(*tensors, **{keyword: value})
    message = str(caught.value)
    assert message.startswith(f"{function.__name__}() got an unexpected keyword argument {keyword!r}; ")
    assert says in message and "wrong" not in message


@pytest.mark.parametrize("function", [strobe.attention, strobe.attention_varlen])
def test_a_mask_by_position_is_answered_with_its_name(function: Any) -> None:
    tensors = (packed, packed, packed, cu, cu) if function is strobe.attention_varlen else (x, x, x)
    with pytest.raises(TypeError, match=r"q, k, v.* by position, got 1 more; give the others by name, such as mask="):
        function(*tensors, strobe.causal)


def test_a_padding_mask_is_answered_with_its_axes() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    with pytest.raises(ValueError, match=r"if it is \(batch, keys\), pass mask\[:, None, None, :\]"):
        strobe.attention(x, x, x, mask=mask)
    padded = strobe.attention(x, x, x, mask=mask[:, None, None, :])
    torch.testing.assert_close(padded[0], strobe.attention(x[:1], x[:1, :2], x[:1, :2])[0])


def test_jagged_tensors_are_sent_to_what_takes_them() -> None:
    rows = torch.nested.nested_tensor([torch.ones(n, 4, 8) for n in (2, 3)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"q is a nested tensor; strobe.sdpa takes jagged ones"):
        strobe.attention(rows, rows, rows)


def test_a_function_of_flash_attn_is_sent_to_its_module() -> None:
    with pytest.raises(AttributeError, match="strobe.compat.flash_attn has the functions of flash-attn"):
        strobe.flash_attn_func  # noqa: B018
    assert callable(strobe.compat.flash_attn.flash_attn_func)


def test_what_is_advised_exists() -> None:
    ours = (strobe.attention, strobe.attention_varlen, strobe.attention_paged)
    known = {name for function in ours for name in inspect.signature(function).parameters}
    for keyword, advice in hints._SPELLINGS.items():
        assert keyword not in known, f"{keyword} is our own"
        named = [word for word in known if f"{word}=" in advice]
        assert named or advice.startswith("nothing"), advice


def test_signatures_do_not_show_the_catch_all() -> None:
    for function in (strobe.attention, strobe.attention_varlen):
        assert not [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
    assert inspect.signature(strobe.attention).parameters["layout"].default == "bshd"


# ---- the order of axes -----------------------------------------------------------------------------------------------

swapped = torch.ones(1, 8, 100, 16)  # (batch, heads, length, dim)


def warnings_of(
    monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor, **options: Any
) -> list[warnings.WarningMessage]:
    """Return the warnings of the first such call of a process."""
    monkeypatch.setattr(hints, "_warned", False)
    monkeypatch.setattr(strobe.call.bound_call.remembered, "calls", {})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strobe.attention(*tensors, **options)
        strobe.attention(*(t[..., :8] for t in tensors), **options)  # another call, that is bound, too
    return found


def test_swapped_axes_are_warned_of_once_and_where_the_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hints.SILENCE, raising=False)
    (found,) = warnings_of(monkeypatch, swapped, swapped, swapped)
    assert 'pass layout="bhsd"' in str(found.message) and hints.SILENCE in str(found.message)
    assert "8 tokens and 100 heads" in str(found.message)
    assert found.filename == __file__


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2, 8, 16, 32), (2, 8, 16, 32)),  # as short as a first test
        ((2, 4, 64, 32), (2, 4, 64, 32)),
        ((2, 2, 5, 32), (2, 2, 5, 32)),
        ((1, 32, 17, 16), (1, 32, 17, 16)),  # nobody has 17 heads
        ((1, 8, 100, 16), (1, 8, 50, 16)),  # which passes for grouped heads
        ((1, 12, 10, 16), (1, 12, 10, 16)),
    ],
)
def test_what_is_likelier_pytorchs_order_is_warned_of(
    q: tuple[int, ...], k: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(hints.SILENCE, raising=False)
    (found,) = warnings_of(monkeypatch, torch.ones(q), torch.ones(k), torch.ones(k))
    assert f"{q[1]} tokens and {q[2]} heads" in str(found.message)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_who_gives_a_layout_is_not_warned(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not warnings_of(monkeypatch, swapped, swapped, swapped, layout=layout)


def test_the_environment_silences_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hints.SILENCE, "1")
    assert not warnings_of(monkeypatch, swapped, swapped, swapped)
    monkeypatch.setenv(hints.SILENCE, "0")
    assert warnings_of(monkeypatch, swapped, swapped, swapped)


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((1, 100, 8, 16), (1, 100, 8, 16)),  # as it should be
        ((1, 8, 8, 16), (1, 8, 8, 16)),  # nobody can tell
        ((1, 1, 128, 16), (1, 300, 128, 16)),  # one token and a long cache
        ((1, 7, 32, 16), (1, 7, 32, 16)),  # a short prompt: no model has seven heads
        ((1, 16, 32, 16), (1, 16, 8, 16)),  # grouped heads
        ((1, 200, 10, 16), (1, 200, 10, 16)),
        ((8, 16), (8, 16)),
    ],
)
def test_other_shapes_are_not_warned_of(
    q: tuple[int, ...], k: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not warnings_of(monkeypatch, torch.ones(q), torch.ones(k), torch.ones(k))


DOORS: dict[str, Any] = {
    "attention": strobe.attention,
    "explain": strobe.explain,
    "probabilities": lambda q, k, v, **options: strobe.probabilities(q, k, **options),
    "compiled": torch.compile(lambda *t, **options: strobe.attention(*t, **options), backend="eager"),
}


@pytest.mark.parametrize("door", DOORS)
def test_three_axes_need_a_layout(door: str) -> None:
    """(batch, length, dim) would attend over the batch. A call that said how to read them is no answer for one that does
    not."""
    t = torch.randn(32, 12, 8)
    DOORS[door](t, t, t, layout="bshd")
    with pytest.raises(ValueError, match=r"q has shape \(32, 12, 8\), and three axes need a layout") as caught:
        DOORS[door](t, t, t)
    for spelling in ('layout="bshd"', 'layout="bhsd"', "q[:, :, None], k[:, :, None] and v[:, :, None]"):
        assert spelling in str(caught.value)


def test_the_advice_for_three_axes_computes_what_is_meant() -> None:
    t = torch.randn(3, 12, 8)
    each = torch.stack([strobe.attention(one, one, one) for one in t])
    torch.testing.assert_close(strobe.attention(*[t[:, :, None]] * 3)[:, :, 0], each)
    torch.testing.assert_close(strobe.attention(t, t, t, layout="bhsd"), each)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(2, 4, 100, 16), (2, 4, 70, 16)], {}),
        ([(2, 4, 100, 16)] * 2, {"mask": torch.ones(100, 100, dtype=torch.bool)}),
        ([(2, 4, 100, 16)] * 2, {"bias": torch.ones(4, 100, 100)}),
    ],
    ids=["heads", "mask", "bias"],
)
def test_a_shape_that_fits_in_pytorchs_order_is_answered_with_it(
    shapes: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    q, k = map(torch.ones, shapes)
    offer = 'if q, k and v are (batch, heads, length, dim), pass layout="bhsd"'
    with pytest.raises(ValueError) as caught:
        strobe.attention(q, k, k, **options)
    assert offer in str(caught.value)
    strobe.attention(q, k, k, **options, layout="bhsd")
    with pytest.raises(ValueError) as caught:
        strobe.attention(q, k, k, **options, layout="bshd")
    assert offer not in str(caught.value)


def test_our_own_modules_are_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strobe.sdpa(swapped, swapped, swapped)
        strobe.nn.MultiheadAttention(512, 128, batch_first=True)(*[torch.ones(1, 3, 512)] * 3, need_weights=False)


# ---- what a repeated call costs --------------------------------------------------------------------------------------


def test_a_repeated_call_enters_four_functions_before_its_backend() -> None:
    strobe.attention(x, x, x, mask=strobe.causal)
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "strobe" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        strobe.attention(x, x, x, mask=strobe.causal)
    finally:
        sys.setprofile(None)
    assert entered[:5] == ["attention", "attend", "signature", "__hash__", "run"]
    assert not {"bind", "warn_of_layout", "unknown_keyword"} & set(entered)
