"""The story on the page, in a real browser: its numbers are the library's, tiles disappear, controls, keys, quizzes and
links work, and everything that is written can be read on a laptop and on a phone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import strobe
from strobe.learn import explain_page, measured, story
from strobe.learn.gpus import GPUS

Q, K, V = story.inputs()
S = Q @ K.T / 2
ROW = story.ROW
LAPTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explain_page.build(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(autouse=True)
def opened(page: Page, path: Path) -> None:
    page.emulate_media(reduced_motion="reduce")  # a figure is where it belongs at once
    open_at(page, path, "")


def open_at(page: Page, path: Path, address: str) -> None:
    page.goto("about:blank")
    page.goto(path.as_uri() + address)
    page.wait_for_selector("html[data-ready=yes]", state="attached")


def read(page: Page, step: str) -> None:
    """Scroll to a step, and wait until it is the one that is read."""
    page.evaluate(f"strobePage.goTo({step!r}, {{ instant: true }})")
    expect(page.locator(f"#{step}.active")).to_have_count(1)
    page.wait_for_selector("html[data-settled=yes]", state="attached")


def numbers(page: Page, step: str, name: str) -> dict[tuple[int, ...], float]:
    """The full values of the marks `name-i-j` (or `name-i`) of a step, as a reader finds them by pointing at them."""
    found = page.evaluate(
        f"strobePage.sceneOf({step!r}).marks.filter(m => new RegExp('^{name}(-\\\\d+)+$').test(m.key) && m.title)"
        ".map(m => [m.key, m.title])"
    )
    return {tuple(int(i) for i in key.removeprefix(f"{name}-").split("-")): plain(text) for key, text in found}


def plain(text: str) -> float:
    return float(text.replace("−", "-"))


def matrix(values: torch.Tensor) -> dict[tuple[int, ...], Any]:
    return {
        (i, j): pytest.approx(values[i, j].item(), abs=1e-8)
        for i in range(values.shape[0])
        for j in range(values.shape[1])
    }


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_attention_is_the_librarys(page: Page) -> None:
    assert numbers(page, "score", "s") == matrix(S)
    assert numbers(page, "attention", "s") == matrix(S.softmax(1))
    assert numbers(page, "attention", "o") == matrix(strobe.attention(Q, K, V, backend="reference"))
    assert {key[0] for key in numbers(page, "mix", "o")} == {ROW}


def test_a_tile_adds_its_share(page: Page) -> None:
    p, rows, keys = S.softmax(1), story.BLOCK_Q, story.BLOCK_K
    assert numbers(page, "tile", "ts") == matrix(S[:rows, :keys])
    assert numbers(page, "use", "to") == matrix(p[:rows, :keys] @ V[:keys])
    assert numbers(page, "next-tile", "to") == matrix(p[:rows, : 2 * keys] @ V[: 2 * keys])
    assert numbers(page, "written", "ho") == matrix((p @ V)[:rows])


def test_the_row_is_rescaled_as_the_library_does(page: Page) -> None:
    steps = {"first-sum": 2, "second-sum": 4, "third-sum": 6}
    for step, seen in steps.items():
        s, m = S[ROW, :seen], S[ROW, :seen].max()
        state = {name: page_state(page, step, name) for name in ("m", "l", "o0", "o1", "o2", "o3")}
        assert state["m"] == pytest.approx(m.item(), abs=1e-8)
        assert state["l"] == pytest.approx((s - m).exp().sum().item(), abs=1e-8)
        o = (s - m).exp() @ V[:seen]
        assert [state[f"o{c}"] for c in range(4)] == pytest.approx(o.tolist(), abs=1e-8)
    alpha = math.exp(1 - 1.5)
    assert page_state(page, "rescale", "l") == pytest.approx(alpha * page_state(page, "first-sum", "l"), abs=1e-8)
    out = [page_state(page, "division", f"o{c}") for c in range(4)]
    assert out == pytest.approx(strobe.attention(Q, K, V)[ROW].tolist(), abs=1e-8)


def page_state(page: Page, step: str, name: str) -> float:
    return plain(page.evaluate(f"strobePage.sceneOf({step!r}).marks.find(m => m.key === 'keep-{name}').title"))


def test_breaking_it_gives_what_the_text_says(page: Page) -> None:
    found = page.evaluate("strobePage.breakRow({ broken: 'rescale', gain: 1 })")
    tiles = S[ROW].split(story.BLOCK_K)
    largest = torch.stack([t.max() for t in tiles]).cummax(0).values
    kept = torch.cat([(t - m).exp() for t, m in zip(tiles, largest, strict=True)])  # each in the unit of its time
    assert found["wrong"]["weights"] == pytest.approx((kept / kept.sum()).tolist(), abs=1e-6)
    assert found["right"]["out"] == pytest.approx(strobe.attention(Q, K, V)[ROW].tolist(), abs=1e-6)
    for gain, finite in ((34, True), (36, False), (100, False)):  # the text names 36
        wrong = page.evaluate(
            f"strobePage.breakRow({{ broken: 'max', gain: {gain} }}).wrong.out.every(Number.isFinite)"
        )
        assert wrong == finite
        right = page.evaluate(f"strobePage.breakRow({{ broken: 'max', gain: {gain} }}).right.out")
        assert right == pytest.approx(strobe.attention(gain * Q, K, V)[ROW].tolist(), abs=1e-5)


def test_both_sides_of_the_race_move_what_the_model_says(page: Page) -> None:
    moved = story.story()["bytes"]
    assert page.evaluate("strobePage.flashAt(1e9).done") is True
    for side, total in (("flash", moved["flash"]), ("standard", moved["standard"])):
        almost, done = (total - 4) // 4, total // 4
        finished = f"strobePage.{side}At({{}}).{'done' if side == 'flash' else 'kernel === 4'}"
        assert page.evaluate(finished.format(almost)) is False and page.evaluate(finished.format(done)) is True
    end = page.evaluate(f"strobePage.standardAt({moved['standard'] // 4})")
    assert (end["s"] + end["p"]) * 4 == moved["kept_standard"] and end["o"] == 24


def test_gradients_are_autograds(page: Page) -> None:
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))
    do = torch.tensor(story.D_O, dtype=torch.float64)
    wanted = torch.autograd.grad((q @ k.T / 2).softmax(1) @ v, (q, k, v), do)
    found = page.evaluate("strobePage.gradientsAfter(99)")
    for name, gradient in zip(("dq", "dk", "dv"), wanted, strict=True):
        torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), gradient)
        assert numbers(page, "gradients", f"b-{name}") == matrix(gradient)


def test_masks_leave_the_tiles_that_the_library_visits(page: Page) -> None:
    for name, _, mask, _ in story.MASKS:
        dense = mask.dense(24, 24).reshape(6, 4, 6, 4).transpose(1, 2).reshape(6, 6, 16)
        wanted = ["whole" if t.all() else "part" if t.any() else "skip" for row in dense for t in row]
        found = page.evaluate(
            f"JSON.parse(document.getElementById('data').textContent).story.masks.find(m => m.name === {name!r})"
        )
        assert [t["kind"] for t in found["tiles"]] == wanted
        read(page, "masks")
        page.get_by_role("button", name=name, exact=True).click()
        assert f"whole: {wanted.count('whole')}" in page.locator("#stage").inner_html()


def test_numbers_in_the_text_follow_from_the_data(page: Page) -> None:
    gpu, n, d = GPUS[0], 4096, 64
    heads, scores = 16, n * n * 2
    trips = 4 * heads * scores
    once = 4 * n * d * 2  # Q, K, V and O
    times = {name: found["ms"] for name, found in measured.load()["attention"].items() if "ms" in found}
    wanted = {
        "registers-all": f"{gpu['sms'] * gpu['registers'] / 1024:.0f} MiB",
        "shared-all": f"{gpu['sms'] * gpu['shared'] / 1024:.0f} MiB",
        "l2": f"{gpu['l2']} MiB",
        "s-bytes": f"{heads * scores / 1e6:.0f} MB",
        "ridge": f"{gpu['tflops']['float16'] * 1000 / gpu['bandwidth']:.0f}",
        "trips": f"{trips / 1e9:.1f} GB",
        "trip-time": f"{trips / gpu['bandwidth'] / 1e3:.0f} µs",
        "sum-time": f"{4 * heads * n * n * d / gpu['tflops']['float16'] / 1e6:.0f} µs",
        "moved-standard-4096": f"{(4 * scores + once) / 1e6:.0f} MB",
        "kept-standard-4096": f"{2 * scores / 2**20:.0f} MiB",
        "moved-flash-4096": f"{(2 * n * n * d // 128 * 2 + once // 2 + 4 * n) / 1e6:.0f} MB",
        "kept-flash-4096": f"{4 * n / 1024:.0f} KiB",
        "registers": f"{gpu['registers']} KiB",
        "kept-standard": f"{2 * 36 * 4}",
        "kept-flash": f"{6 * 4}",
        "standard-ms": f"{times['standard']:.3f} ms",
        "flash-ms": f"{times['flash']:.3f} ms",
    }
    assert 8.5 < heads * scores / (gpu["l2"] * 2**20) < 9.5  # "nine times"
    shown = page.evaluate("[...document.querySelectorAll('[data-check]')].map(e => [e.dataset.check, e.textContent])")
    assert dict(shown) == wanted


def test_the_ladder_is_the_measured_one(page: Page) -> None:
    rungs = [rung for rung in measured.load()["ladder"]["rungs"] if rung["number"].isdigit()]
    titles = page.evaluate("strobePage.sceneOf('climb').marks.filter(m => /^rung-\\d+$/.test(m.key)).map(m => m.title)")
    rates = [f"{float(format(rung['tflops'], '.3g')):g}" for rung in rungs]
    assert titles == [f"{r['number']} {r['title']}: {rate} TFLOP/s" for r, rate in zip(rungs, rates, strict=True)]
    named = page.evaluate(
        "strobePage.sceneOf('climb').marks.filter(m => /^rung-\\d+-name$/.test(m.key)).map(m => m.text)"
    )
    assert len(named) == len(rungs) and all(len(name) > 5 and "undefined" not in name for name in named), named


def test_how_large_a_tile(page: Page) -> None:
    assert page.evaluate("[strobePage.share(16, 64), strobePage.share(32, 64), strobePage.share(16, 128)]") == [2, 1, 4]
    most = page.evaluate("strobePage.mostRows(64)")
    held = [rows * (128 + 64 + 2) * 4 for rows in (most, most + 1)]  # scores, o, m and l
    assert held[0] <= 256 * 1024 < held[1]


# ---- what is seen ----------------------------------------------------------------------------------------------------


def test_tiles_disappear(page: Page) -> None:
    """Never are there more scores on the chip than one tile has, and none once it is used."""
    for step, scores in {"load": 0, "tile": 6, "use": 6, "vanish": 0, "next-tile": 6, "written": 0}.items():
        assert len(numbers(page, step, "ts")) == scores
    read(page, "tile")
    assert page.locator("#stage .mark.s rect").count() == 6
    read(page, "vanish")
    assert page.locator("#stage .mark.s rect, #stage .mark.p rect").count() == 0


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_every_step_can_be_read(page: Page, size: dict[str, int]) -> None:
    """No label leaves the figure, lies on another, or is wider than its cell; the text stands beside its figure."""
    page.set_viewport_size(size)  # type: ignore[arg-type]
    for step in page.evaluate("strobePage.steps"):
        read(page, step)
        assert page.evaluate(_UNREADABLE) == [], step
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), step
        figure = page.locator("#figure").bounding_box()
        first = page.locator(f"#{step} p").first.bounding_box()
        assert figure and first and 0 <= first["y"] < size["height"] - 40, step
        beside = first["x"] + first["width"] <= figure["x"] or first["y"] >= figure["y"] + figure["height"] - 1
        assert beside, f"{step}: the text lies under the figure"


_UNREADABLE = """(() => {
  const stage = document.querySelector("#stage").getBoundingClientRect(), found = [];
  const texts = [...document.querySelectorAll("#stage text")].filter(t => t.textContent.trim())
    .map(node => ({ node, box: node.getBoundingClientRect(), text: node.textContent }));
  for (const { node, box, text } of texts) {
    if (box.left < stage.left - 1 || box.right > stage.right + 1 || box.top < stage.top - 1 || box.bottom > stage.bottom + 1)
      found.push(`${text} leaves the figure`);
    const cell = node.parentNode.querySelector("rect")?.getBoundingClientRect();
    if (cell && box.width > cell.width + 2) found.push(`${text} is wider than its cell`);
  }
  // a label neither lies on a number's cell nor crosses the edge of a box
  const boxes = [...document.querySelectorAll("#stage .mark rect")].map(node => ({ node, box: node.getBoundingClientRect() }));
  for (const { node, box: a, text } of texts) {
    if (node.parentNode.querySelector("rect")) continue;
    for (const { node: rect, box: b } of boxes) {
      const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (w < 3 || h < 4) continue;
      const cell = rect.parentNode.querySelector("text")?.textContent.trim();
      if (cell) found.push(`${text} lies on the cell of ${cell}`);
      else if (b.width > 60 && b.height > 60 && w < a.width - 3 && b.right < stage.right - 1)
        found.push(`${text} crosses the edge of ${rect.parentNode.getAttribute("class")}`);
    }
  }
  for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
    const a = texts[i].box, b = texts[j].box;
    const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (w > 1 && h > 2.5 && w * h > 0.12 * Math.min(a.width * a.height, b.width * b.height))
      found.push(`${texts[i].text} lies on ${texts[j].text}`);
  }
  return found;
})()"""


def test_weights_can_be_seen_in_the_dark(page: Page) -> None:
    """Cells without numbers stand out from what they lie on by their lightness."""
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    read(page, "trip-2")
    page.wait_for_timeout(450)
    luminance = page.evaluate(
        """Object.fromEntries(["p", "s", "hbm", "chip"].map(name => {
          const fill = getComputedStyle(document.querySelector(`#stage .mark.${name} rect`)).fill;
          const [r, g, b] = fill.match(/[\\d.]+/g).map(x => x / 255)
            .map(x => (x <= 0.04 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
          return [name, 0.2126 * r + 0.7152 * g + 0.0722 * b];
        }))"""
    )
    for name in ("hbm", "chip", "s"):
        darker, lighter = sorted((luminance["p"] + 0.05, luminance[name] + 0.05))
        assert lighter / darker > 1.15, (name, luminance)


def test_a_finger_is_told_to_tap(chromium: Browser, path: Path) -> None:
    for touch, shown, hidden in ((True, "Tap any other score", "Point at"), (False, "Point at any other score", "Tap")):
        context = chromium.new_context(viewport=PHONE, has_touch=touch, is_mobile=touch)  # type: ignore[arg-type]
        tab = context.new_page()
        tab.goto(path.as_uri())
        text = tab.locator("#score").inner_text()
        assert shown in text and hidden not in text
        assert ("press" in tab.locator("#start").inner_text()) is not touch
        context.close()


def test_where_to_go_is_linked(page: Page) -> None:
    links = page.evaluate("[...document.querySelectorAll('footer li a')].map(a => a.href)")
    ours = [link for link in links if not link.startswith("https://arxiv.org/")]
    assert len(ours) == 5 and all(Path(link.removeprefix("file://")).is_file() for link in ours)
    unknown = explain_page.html(lambda target: None)
    assert "the ladder of kernels, or" in unknown and "data-to" not in unknown


def test_one_colour_has_one_meaning(page: Page) -> None:
    """Each legend entry has the fill that its marks have, in both schemes."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        read(page, "use")
        page.wait_for_timeout(50)
        for name in ("q", "k", "v", "p", "state"):
            mark = page.evaluate(f"getComputedStyle(document.querySelector('#stage .mark.{name} rect')).fill")
            assert mark == page.evaluate(f"getComputedStyle(document.querySelector('#legend .{name}')).backgroundColor")


def test_pointing_at_a_score_shows_where_it_comes_from(page: Page) -> None:
    read(page, "score")
    expect(page.locator("#readout")).to_have_text("“sat” asks “bank”: (1·0 + 1·0 + 2·2 + 1·1) / √4 = 5 / 2 = 2.5")
    page.locator("#stage [data-pick='s,3,2']").hover()
    expect(page.locator("#readout")).to_contain_text("“the” asks “on”")
    assert page.locator("#stage .q.lit").count() == 4 and page.locator("#stage .k.lit").count() == 4
    page.locator("#stage [tabindex]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#readout")).to_contain_text("“the” asks “the”")


# ---- what a reader does ----------------------------------------------------------------------------------------------


def test_scrolling_moves_the_figure(page: Page) -> None:
    read(page, "words")
    for _ in range(12):
        page.mouse.wheel(0, 180)
        page.wait_for_timeout(20)
    expect(page.locator("#words.active")).to_have_count(0)
    assert page.locator(".step.active").count() == 1
    page.wait_for_function("location.hash")  # set once the scrolling has ended
    assert page.evaluate("location.hash.slice(1)") in [*page.evaluate("strobePage.steps"), "words"]


def test_arrow_keys_walk_through_all_steps(page: Page) -> None:
    read(page, "start")
    walked = []
    for _ in page.evaluate("strobePage.steps")[1:]:
        page.keyboard.press("ArrowRight")
        walked.append(page.evaluate("strobePage.story.active.id"))
    assert ["start", *walked] == page.evaluate("strobePage.steps")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("strobePage.story.active.id") == walked[-2]
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(120)
    expect(page.locator("html")).to_have_attribute("data-part", "play")


def test_quizzes_answer(page: Page) -> None:
    for step, wrong, right in (
        ("attention", "The largest comes closer to 1.", "Nothing."),
        ("predict", "3.71", "2.23"),
        ("large-tile", "A quarter of it", "Four times as much as standard attention"),
    ):
        read(page, step)
        quiz = page.locator(f"#{step} .quiz")
        quiz.get_by_role("button", name=wrong, exact=True).click()
        assert len(quiz.locator(".feedback").inner_text()) > 30
        assert quiz.locator("[data-chosen=wrong]").count() == 1
        quiz.get_by_role("button", name=right, exact=True).click()
        assert quiz.locator("[data-chosen=right]").count() == 1 and quiz.locator("[data-chosen=wrong]").count() == 0
        assert quiz.locator(".feedback").inner_text().startswith("Yes")
    read(page, "predict")
    page.locator("#predict").get_by_role("button", name="2.23").click()
    expect(page.locator("#readout")).to_have_text("l = 0.862 + 0.368 + 1 = 2.23")


def test_every_state_has_an_address(page: Page, path: Path) -> None:
    read(page, "tile-size")
    page.locator("#tile-size input").fill("7")
    page.locator("#tile-size").get_by_role("button", name="d = 128").click()
    expect(page.locator("#readout")).to_contain_text("Br = 128, d = 128")
    page.wait_for_function("location.hash === '#tile-size?br=128&d=128'")
    open_at(page, path, "#tile-size?br=32&d=64")
    expect(page.locator("#tile-size.active")).to_have_count(1)
    expect(page.locator("#readout")).to_contain_text("as many bytes as standard attention")
    open_at(page, path, "#race?clock=600")
    expect(page.locator("#readout")).to_contain_text("FlashAttention is done after 600 B")
    open_at(page, path, "#masks?mask=documents")
    expect(page.locator("#readout")).to_contain_text("its own document")
    open_at(page, path, "#no-such-step?mask=1")
    expect(page.locator("#start.active")).to_have_count(1)


def test_a_glide_can_be_interrupted(page: Page) -> None:
    page.emulate_media(reduced_motion="no-preference")
    for step in ("words", "attention", "first-bars", "tile"):
        page.evaluate(f"strobePage.goTo({step!r}, {{ instant: false }})")
        page.wait_for_timeout(60)
    page.wait_for_function("strobePage.story.pinned === null")
    page.wait_for_selector("html[data-settled=yes]", state="attached")
    assert page.evaluate("strobePage.story.active.id") == "tile"
    left = page.locator("#stage .mark").count()
    assert left == page.evaluate("strobePage.sceneOf('tile').marks.length")


def test_a_step_stays_active_while_the_page_scrolls_to_it(page: Page) -> None:
    """A busy machine takes long to scroll; the steps that pass by are not shown."""
    page.emulate_media(reduced_motion="no-preference")
    page.evaluate(_SLOW_SCROLLING)
    shown = page.evaluate(
        """async () => {
          const shown = new Set();
          strobePage.goTo("vanish");
          while (!window.arrived) {
            shown.add(strobePage.story.active.id);
            await new Promise(requestAnimationFrame);
          }
          return [...shown];
        }"""
    )
    assert shown == ["vanish"]
    page.wait_for_function("strobePage.story.pinned === null")
    assert page.evaluate("strobePage.story.active.id") == "vanish"


def test_a_reader_who_scrolls_is_not_held(page: Page) -> None:
    """The wheel ends the way to a step at once."""
    page.emulate_media(reduced_motion="no-preference")
    page.evaluate(_SLOW_SCROLLING)
    page.evaluate("strobePage.goTo('vanish')")
    page.mouse.wheel(0, 100)
    page.wait_for_function("strobePage.story.pinned === null && !window.arrived")


_SLOW_SCROLLING = """() => {
  window.scrollTo = ({ top }) => {
    const from = scrollY, steps = 40;
    let step = 0;
    const timer = setInterval(() => {
      document.documentElement.scrollTop = from + ((top - from) * ++step) / steps;
      if (step < steps) return;
      clearInterval(timer);
      window.arrived = true;
    }, 50);
  };
}"""


def test_chapters_can_be_jumped_to(page: Page) -> None:
    links = page.locator("#rail a")
    assert links.count() == 12
    links.nth(4).click()
    expect(page.locator("#empty.active")).to_have_count(1)
    expect(links.nth(4)).to_have_attribute("aria-current", "step")


def test_the_prose_needs_no_script(chromium: Browser, path: Path) -> None:
    context = chromium.new_context(java_script_enabled=False, viewport=LAPTOP)  # type: ignore[arg-type]
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert "never stores the N × N matrix" in tab.locator("#start").inner_text()
    assert tab.locator("#rescale").evaluate("e => getComputedStyle(e).opacity") == "1"
    context.close()
