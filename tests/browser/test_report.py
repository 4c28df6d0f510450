"""The report in a real browser, from a file: it draws, it sorts, nothing fails, and it fits a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_results import synthetic
from playwright.sync_api import Page

from strobe.bench.report import page as report


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [synthetic(("grid36", "sweep", "overhead")), synthetic(("grid36",), faster=0.9)]
    return report.write(runs, tmp_path_factory.mktemp("report"))


@pytest.fixture(autouse=True)
def opened(page: Page, path: Path) -> None:
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")


def test_it_draws_every_figure(page: Page) -> None:
    for part in ("speed", "speedup", "memory", "roofline", "errors", "everything", "compare"):
        assert page.locator(f"section#{part}").count() == 1
    assert page.locator("figure").count() >= 6 * 3 + 1 and page.locator("circle").count() > 500
    shown = page.locator("body").inner_text()
    assert "regression" in shown and "NaN" not in shown


def test_it_answers_clicks(page: Page) -> None:
    heading = page.locator("#everything th").nth(2)
    first = page.locator("#everything tbody tr td:nth-child(3)").first
    heading.click()
    fastest = first.inner_text()
    heading.click()
    slowest = first.inner_text()
    assert fastest.endswith("µs") and slowest.endswith("s") and fastest != slowest
    switch = page.locator(".legend button").first
    switch.click()
    assert page.locator(".legend button").first.get_attribute("aria-pressed") == "false"
    page.locator("#suites button", has_text="sweep").click()
    assert page.locator("#memory .oom").count() >= 3


def test_it_fits_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_follows_the_theme(page: Page, theme: str) -> None:
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background.strip("rgb()").split(", "))) > 600) == (theme == "light"), background
    assert len(page.screenshot(full_page=True)) > 60_000


def test_passes_are_kept_apart(page: Page, tmp_path: Path) -> None:
    runs = [synthetic(("grid36",), direction="backward"), synthetic(("sweep",))]
    page.goto(report.write(runs, tmp_path).as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert page.locator("#passes button").all_inner_texts() == ["forward", "backward"]
    assert page.locator("#conclusions li").first.inner_text().startswith("Forward")
    page.locator("#passes button", has_text="backward").click()
    assert page.locator("#conclusions li").first.inner_text().startswith("Backward")
    assert page.locator("#suites button[aria-pressed=true]").inner_text() == "grid36"  # the only one with that pass
    assert all("backward" in title for title in page.locator("#speed h3").all_inner_texts())
