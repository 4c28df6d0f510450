"""A real browser for the tests of this folder: the installed Chromium, driven by Playwright.

Playwright's own download is not used, so a Debian package (or Chrome) is enough. Without either the tests are skipped,
and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A fresh tab of a laptop's size. It fails the test if the page reports an error or asks the network for anything."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    problems: list[str] = []
    requests: list[str] = []

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            problems.append(message.text)

    tab.on("console", console)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    yield tab
    context.close()
    assert problems == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "about:"))] == []
