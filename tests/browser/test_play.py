"""The page's last chapter, in a real browser: its numbers are the library's, its controls work by mouse and by keyboard,
breaking the algorithm shows, and an address brings back a moment. The chapters before: test_story.py."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page
from trace_sample import sample

import strobe
from strobe.learn import explain_page, measured, worked_example
from strobe.learn.gpus import GPUS
from strobe.tile_trace import trace

MODERATE, WORDS, WORKED, LARGE, CAUSAL, WINDOW, NARROW, REAL = range(8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explain_page.build(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(autouse=True)
def opened(page: Page, path: Path) -> None:
    open_at(page, path, "#play?example=The worked example")


def open_at(page: Page, path: Path, address: str) -> None:
    page.goto("about:blank")
    page.goto(path.as_uri() + address)
    page.wait_for_selector("html[data-ready=yes][data-part=play]", state="attached")


def put(page: Page, element: str, value: object) -> None:
    """Set the element's value as if it were chosen or typed."""
    page.evaluate(
        f"(() => {{ const e = document.getElementById('{element}'); e.value = {json.dumps(value)};"
        " for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )


def text(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def numbers(page: Page) -> dict[str, str]:
    """Panel 2 as it is shown, with plain signs."""
    shown = page.evaluate("[...document.querySelectorAll('#numbers > div')].map(e => e.textContent)")
    plain = [part.replace("−", "-") for part in shown]
    return dict(zip(plain[::2], plain[1::2], strict=True))


def close(found: Any, wanted: Any, tolerance: float, where: str = "") -> None:
    """Two pieces of JSON are the same, numbers within a tolerance relative to their size."""
    if isinstance(wanted, dict):
        for key in wanted:
            close(found[key], wanted[key], tolerance, f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            close(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(wanted, (int, float)) and isinstance(found, (int, float)) and float in (type(wanted), type(found)):
        assert math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance), f"{where}: {found} is not {wanted}"
    else:
        assert found == wanted, f"{where}: {found!r} is not {wanted!r}"


# ---- the page and the library ----------------------------------------------------------------------------------------

RUNS = [
    (4, 2, 2, 2, "float64", "full", 0, 0),
    (8, 4, 2, 2, "float64", "causal", 0, 0),
    (11, 3, 4, 3, "float64", "window", 2, 0),
    (13, 5, 3, 4, "float64", "window", 1, 2),
    (9, 2, 16, 4, "float64", "causal", 0, 0),
    (7, 6, 1, 1, "float64", "full", 0, 0),
    (16, 8, 4, 8, "float32", "causal", 0, 0),
    (16, 8, 8, 4, "float16", "full", 0, 0),
    (16, 8, 8, 4, "bfloat16", "window", 5, 1),
    (40, 16, 16, 8, "bfloat16", "causal", 0, 0),
    (24, 4, 7, 5, "float32", "window", 0, 0),
]


@pytest.mark.parametrize(("n", "d", "block_q", "block_k", "dtype", "mask", "left", "right"), RUNS)
def test_recomputation_equals_the_library(
    page: Page, n: int, d: int, block_q: int, block_k: int, dtype: str, mask: str, left: int, right: int
) -> None:
    masks = {"full": strobe.full, "causal": strobe.causal, "window": strobe.window(left, right)}
    q, k, v = (t.to(getattr(torch, dtype)) for t in sample(n, d, seed=n))
    wanted = trace(q, k, v, block_q=block_q, block_k=block_k, mask=masks[mask]).to_dict()
    found = page.evaluate(f"""(() => {{
      const [q, k, v] = strobePage.sample({n}, {d}, {n});
      const t = strobePage.recompute({{ n: {n}, d: {d}, blockQ: {block_q}, blockK: {block_k}, dtype: "{dtype}", mask: "{mask}",
        left: {left}, right: {right}, q, k, v, broken: null }});
      const rows = q.map((_, i) => t.row(i));
      return {{ ...t, row: null, rows: rows.map(r => r.tiles), out: rows.map(r => r.out), lse: rows.map(r => r.lse) }};
    }})()""")
    exact = dtype == "float64"
    out = wanted.pop("out")
    close(found, wanted, 1e-12 if exact else 3e-6)
    # The library rounds its output to the type of the inputs, the page shows it before that.
    close(found["out"], out, {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype])


def test_recorded_traces_equal_the_recomputation(page: Page) -> None:
    """The numbers that the page shows first come from the library; changing one and back must not change them."""
    assert page.evaluate("strobePage.trace.from") == "library" and "recorded by strobe" in text(page, "#source")
    tiles = "(t => [0, 1, 2, 3].map(i => t.row(i).tiles))"
    before = page.evaluate(f"{tiles}(strobePage.trace)")
    close(page.evaluate(f"{tiles}(strobePage.recompute(strobePage.settings))"), before, 1e-5)


def test_golden_numbers_are_shown(page: Page) -> None:
    put(page, "dtype", "float64")
    seen: dict[tuple[int, str], dict[str, str]] = {}
    steps = page.evaluate("strobePage.trace.steps.length")
    page.click("#first")
    for index in range(1, steps + 1):
        page.click("#next")
        moment = page.evaluate(
            "({ index: strobePage.state.index, kind: strobePage.moment.kind, block: strobePage.moment.step.block,"
            " tile: strobePage.moment.step.tile })"
        )
        assert moment["index"] == index
        if moment["block"] == 0:
            seen[moment["tile"], moment["kind"]] = numbers(page)
        assert len(text(page, "#sentence")) > 30
    assert seen[0, "scores"]["s"] == "[2.47487, 6.71751]" and seen[0, "max"]["m"] == "-∞ → 6.71751"
    assert seen[0, "add"]["p"] == "[0.0143696, 1]" and seen[0, "add"]["l"].endswith("= 1.01437")
    assert seen[0, "add"]["o / l"] == "[0.297167, 0.397167]"
    assert seen[1, "scores"]["s"] == "[10.9602, 15.2028]" and seen[1, "max"]["α"].endswith("= 2.065e-4")
    assert seen[1, "add"]["l"].endswith("= 1.01458") and seen[None, "store"]["o / l"] == "[0.697084, 0.797084]"
    out = page.evaluate("[0, 1, 2, 3].map(i => strobePage.trace.row(i).out)")
    close(out, [[0.697084216, 0.797084216], [0.699989959, 0.799989959], [0.699999965, 0.799999965], [0.7, 0.8]], 1e-9)
    put(page, "mask", "causal")
    out = page.evaluate("[0, 1, 2, 3].map(i => strobePage.trace.row(i).out)")
    close(out, [[0.1, 0.2], [0.299989960, 0.399989960], [0.499999965, 0.599999965], [0.7, 0.8]], 1e-9)


def test_edited_numbers_are_recomputed(page: Page) -> None:
    page.evaluate("document.querySelector('#edit').open = true")
    page.evaluate(
        "(() => { const e = document.querySelector('[aria-label=\"K row 1 column 0\"]'); e.value = '-1.25';"
        " e.dispatchEvent(new Event('change')); })()"
    )
    q, k, v = worked_example.inputs(torch.float32)
    k[1, 0] = -1.25
    wanted = trace(q, k, v, block_q=2, block_k=2)
    close(page.evaluate("[0, 1, 2, 3].map(i => strobePage.trace.row(i).out)"), wanted.out, 1e-6)
    assert page.evaluate("strobePage.trace.from") == "page" and text(page, "#about") == "Your own numbers."


# ---- breaking it -----------------------------------------------------------------------------------------------------


def test_without_the_rescale_the_answer_is_wrong(page: Page) -> None:
    put(page, "preset", MODERATE)
    page.click("input[value=rescale]")
    q, k, v = (torch.tensor(explain_page.MODERATE[name], dtype=torch.float64) for name in "qkv")
    s = (q @ k.T / math.sqrt(2))[0]
    kept = torch.cat(
        [(s[:2] - s[:2].max()).exp(), (s[2:] - s.max()).exp()]
    )  # each tile measured from the maximum of its time
    wrong = (kept @ v / kept.sum()).tolist()
    close(page.evaluate("strobePage.trace.row(0).out"), wrong, 1e-12)
    assert "wrong" in text(page, "#verdict") and "instead of [1.11212, 1.67598]" in text(page, "#verdict")
    page.evaluate("strobePage.go(12)")
    assert numbers(page)["o / l"] == "[1, 1.33488]" and numbers(page)["right"] == "[1.11212, 1.67598]"
    page.click("input[name=broken][value='']")
    assert page.evaluate("document.querySelector('#verdict').hidden") and "right" not in numbers(page)


def test_without_the_maximum_large_scores_overflow(page: Page) -> None:
    put(page, "preset", LARGE)
    page.click("input[value=max]")
    assert page.evaluate(
        "strobePage.trace.row(0).out.every(Number.isNaN) && strobePage.trace.row(0).tiles[0].l === Infinity"
    )
    assert "no numbers any more" in text(page, "#verdict") and "NaN" in text(page, "#verdict")
    page.evaluate("strobePage.go(6)")
    assert numbers(page)["l"].endswith("∞")
    put(page, "preset", WORKED)
    assert "happens to come out right" in text(page, "#verdict")  # e^74.6 still fits 32 bits
    put(page, "dtype", "float16")
    assert "overflows float16 above s = 11.09" in text(page, "#verdict")


# ---- the model -------------------------------------------------------------------------------------------------------


def test_bytes_and_time_follow_the_settings(page: Page) -> None:
    put(page, "preset", NARROW)
    page.click("#last")
    assert "times more than standard" in text(page, "#lanes")  # 16 rows are fewer than d / 2
    put(page, "blockQ", 64)
    page.click("#last")
    assert "times less than standard" in text(page, "#lanes") and "flash is 2 times faster" in text(page, "#times")
    n, d, size = 1024, 64, 2
    assert page.evaluate("strobePage.sums.flash.at(-1).hbm_read") == size * (2 * n * n * d // 64 + n * d)
    page.click("#cached")
    assert page.evaluate("strobePage.sums.flash.at(-1).hbm_read") == size * 3 * n * d
    put(page, "gpu", 4)
    put(page, "blockQ", 1024)
    assert "does not fit" in text(page, "#lanes") and "T4" in text(page, "#times")


def test_toy_sizes_claim_no_speed(page: Page) -> None:
    for preset in (MODERATE, WORDS, WORKED, LARGE, CAUSAL):
        put(page, "preset", preset)
        assert "say nothing about speed" in text(page, "#times") and text(page, "#roof") == ""
        assert "faster" not in text(page, "#times")


def test_what_was_measured_agrees_with_the_model(page: Page) -> None:
    """The model is a bound: no measurement is faster, and the measured ratio is the one that is shown."""
    put(page, "preset", REAL)
    found = measured.load()["attention"]
    ratio = found["standard"]["ms"] / found["flash"]["ms"]
    assert f"strobe is {float(f'{ratio:.2g}'):g} times faster" in text(page, "#times")
    gpu, case = GPUS[0], found["case"]
    flops = 4 * case["heads"] * case["len_q"] * case["len_k"] * case["dim"]
    least = flops / gpu["tflops"]["bfloat16"] / 1e9
    assert 0.5 * found["flash"]["ms"] < least < found["flash"]["ms"]
    assert f"at best {1000 * least:.0f} µs, limited by arithmetic" in text(page, "#times")
    put(page, "gpu", 2)
    assert "It was not measured" in text(page, "#times")


def test_it_opens_in_the_middle_of_a_rescale(page: Page, path: Path) -> None:
    open_at(page, path, "#play")
    assert page.evaluate("strobePage.moment.kind") == "rescale" and page.evaluate("strobePage.moment.tile.alpha") < 1
    assert numbers(page)["l"].startswith("0.493069 × 1.49307") and "0.493" in text(page, "#bars")


def test_a_tile_that_is_done_is_gone(page: Page) -> None:
    """One tile of scores exists at most, with its numbers; before and after it there are none."""
    coloured = "[...document.querySelectorAll('#grid .cell.now')].length"
    for index in range(page.evaluate("strobePage.trace.steps.length") + 1):
        page.evaluate(f"strobePage.go({index})")
        exists = page.evaluate("['scores', 'max', 'rescale', 'add'].includes(strobePage.moment.kind)")
        assert page.evaluate(coloured) == int(exists)
        assert page.locator("#grid .in-cell").count() == (4 if exists else 0)


def test_an_address_brings_back_a_moment(page: Page, path: Path) -> None:
    put(page, "preset", MODERATE)
    page.evaluate("strobePage.go(9)")
    put(page, "offset", 1)
    page.click("input[value=rescale]")
    page.wait_for_function("location.hash.includes('broken=rescale') && location.hash.includes('row=1')")
    address = page.evaluate("location.hash")
    before = text(page, "#sentence"), numbers(page)
    open_at(page, path, address)
    assert (text(page, "#sentence"), numbers(page)) == before
    open_at(page, path, "#play?n=2&d=1&blockQ=1&blockK=1&q=1;2&k=3;4&v=5;6&dtype=float64&at=4")
    assert page.evaluate("[strobePage.settings.k, strobePage.state.index]") == [[[3], [4]], 4]
    open_at(page, path, "#play?n=99999&q=x&broken=no&at=-3")
    assert page.evaluate("[strobePage.trace.n, strobePage.settings.broken]") == [4, None]


def test_impossible_settings_are_refused_with_a_reason(page: Page) -> None:
    put(page, "n", 16384)
    assert "at most 4096 are drawn" in text(page, "#problem") and page.evaluate("strobePage.trace.n") == 4
    put(page, "n", "")
    assert "Tokens N must be a whole number" in text(page, "#problem")
    put(page, "n", 6)
    assert page.evaluate("document.querySelector('#problem').hidden") and page.evaluate("strobePage.trace.n") == 6


# ---- controls --------------------------------------------------------------------------------------------------------


def test_keyboard(page: Page) -> None:
    def press(name: str) -> int:
        page.keyboard.press(name)
        return page.evaluate("strobePage.state.index")

    assert [press(k) for k in ("ArrowRight", "ArrowRight", "ArrowLeft")] == [1, 2, 1]
    assert [press(k) for k in ("PageDown", "PageDown", "PageUp")] == [6, 11, 6]
    assert [press(k) for k in ("End", "ArrowRight", "Home")] == [24, 24, 0]
    page.evaluate("document.querySelector('#sizes').open = true, document.querySelector('#n').focus()")
    assert press("ArrowRight") == 0, "a key typed into a field is the field's"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(" ")
    assert text(page, "#run").endswith("Pause")
    assert page.evaluate("document.querySelector('#sentence').ariaLive") == "off"
    end = time.monotonic() + 10
    while page.evaluate("strobePage.state.index") == 0 and time.monotonic() < end:
        time.sleep(0.05)
    page.keyboard.press(" ")
    assert page.evaluate("strobePage.state.index") >= 1 and text(page, "#run").endswith("Play")
    press("Home")
    press("ArrowLeft")
    page.wait_for_selector("html[data-part=story]", state="attached")  # before the first step: back to the story


def test_playing_reaches_the_end_and_stops(page: Page) -> None:
    put(page, "speed", "50")
    put(page, "detail", "tile")
    page.click("#run")
    end = time.monotonic() + 20
    while page.evaluate("strobePage.state.playing !== null") and time.monotonic() < end:
        time.sleep(0.05)
    assert page.evaluate("strobePage.state.index") == 24 and text(page, "#position") == "8 / 8"


def test_scrubbing_and_clicking_a_tile(page: Page) -> None:
    put(page, "preset", CAUSAL)
    put(page, "scrub", 20)
    assert page.evaluate("strobePage.state.index") == 20
    page.click("#grid .cell:nth-of-type(14)")  # 4 + 4 + 4 strips come first
    moment = page.evaluate("[strobePage.moment.kind, strobePage.moment.step.block, strobePage.moment.step.tile]")
    assert moment == ["skip", 0, 1] and page.evaluate("document.querySelectorAll('#grid .cell.now').length") == 1
    assert "skips the tile" in text(page, "#sentence")


def test_everything_has_a_name_and_can_be_reached(page: Page) -> None:
    put(page, "preset", MODERATE)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    nameless = page.evaluate("""[...document.querySelectorAll("button, input, select, svg[role=img]")].filter(e =>
      !e.getAttribute("aria-label") && !e.closest("label")?.textContent.trim() && !e.textContent.trim())
      .map(e => e.outerHTML.slice(0, 80))""")
    assert nameless == []
    assert page.evaluate("document.querySelector('#sentence').ariaLive") == "polite"
    page.evaluate("strobePage.go(10)")
    assert page.evaluate("document.querySelector('#scrub').getAttribute('aria-valuetext')").startswith(
        "Step 10 of 24: l and o are"
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


# ---- how it looks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [WORKED, CAUSAL, WINDOW, REAL])
def test_it_fits_a_phone(page: Page, preset: int) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    put(page, "preset", preset)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate("strobePage.go(Math.floor(strobePage.trace.steps.length / 2))")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    small = page.evaluate("""[...document.querySelectorAll("#transport button")].filter(e => {
      const b = e.getBoundingClientRect();
      return b.width < 40 || b.height < 40; }).map(e => e.id)""")
    assert small == []


def test_light_and_dark(page: Page) -> None:
    def light() -> bool:
        return (
            sum(map(int, page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(", ")))
            > 600
        )

    assert light()
    page.emulate_media(color_scheme="dark")
    assert not light()
    page.click("#theme")
    assert light()
    page.click("#theme")
    assert not light()
    assert len(page.screenshot()) > 20_000


def test_motion_can_be_reduced(page: Page) -> None:
    moving = "getComputedStyle(document.querySelector('.track i')).transitionDuration"
    assert page.evaluate(moving) == "0.15s"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(moving) == "0s"
