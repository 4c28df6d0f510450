"""The report says the right thing first, by each method, and nothing is clipped, left out or nonsense."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench_results import synthetic
from playwright.sync_api import Page

from strobe.bench.report import page as report
from strobe.bench.results import Results
from strobe.measure.method import SUSTAINED, TURNS


def gpu_run() -> Results:
    """Both methods, and our provider needs no memory at all."""
    run = synthetic(("sweep", "grid36", "models"), methods=(TURNS, SUSTAINED))
    for row in run.rows:
        if row.provider == "strobe-sm90" and row.extra_bytes is not None:
            row.extra_bytes = 0
        if row.provider == "cuda-unfused":
            row.provider = "megatron-fused-softmax"  # the longest there is
    return run


def cpu_run() -> Results:
    """Slow, noisy, and on a machine with other work."""
    run = synthetic(("sweep",))
    cpu = {"kind": "cpu", "name": "A CPU, 2 threads", "memory_bytes": 1 << 34}
    run.provenance |= {"device": cpu, "host_load": 1.9, "host_cores": 2}
    run.ceilings.matmul_tflops = {"bfloat16": 0.3}
    for row in run.rows:
        row.tflops = None if row.tflops is None else row.tflops / 3000
        row.of_matmul = None if row.tflops is None else row.tflops / 0.1
    return run


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write([gpu_run()], tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write([cpu_run()], tmp_path_factory.mktemp("cpu"))


def show(page: Page, path: Path) -> None:
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")


def test_it_begins_with_its_conclusion(page: Page, gpu: Path) -> None:
    show(page, gpu)
    sentences = page.locator("#conclusions li").all_inner_texts()
    assert 3 <= len(sentences) <= 6 and "faster in short turns" in sentences[0] and "faster sustained" in sentences[0]
    assert any("less energy per FLOP" in s for s in sentences) and any("needs no memory" in s for s in sentences)
    box, first = page.locator("#conclusions").bounding_box(), page.locator("section").first.bounding_box()
    assert box is not None and first is not None and box["y"] + box["height"] < first["y"]


def test_methods_are_chosen(page: Page, gpu: Path) -> None:
    show(page, gpu)
    assert page.locator("#methods button").all_inner_texts() == ["in short turns", "sustained"]
    assert page.locator("section#energy").count() == 0
    page.locator("#methods button", has_text="sustained").click()
    assert page.locator("section#energy figure").count() == 4 and "method=sustained" in page.url
    shown = page.locator("section#energy").inner_text()
    assert "joules per TFLOP" in shown
    page.locator("section#energy details summary").click()
    assert "690" in page.locator("section#energy table").inner_text()
    page.reload()
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert page.locator("section#energy").count() == 1  # the address says what was shown


def test_what_needs_no_memory_is_drawn(page: Page, gpu: Path) -> None:
    show(page, gpu)
    figure = page.locator("section#memory figure").first
    assert re.search(r"(^|\n)0(\n|$)", figure.inner_text()), "the axis has a 0"
    colour = report.page_data([gpu_run()])["run"]["styles"]["strobe-sm90"]["colour"]
    marks = figure.locator(f"circle[fill='{colour}']")
    heights = {round(mark.bounding_box()["y"]) for mark in marks.all()}  # type: ignore[index]
    assert marks.count() == 6 and len(heights) == 1
    axis = figure.locator("line.axis").last.bounding_box()
    assert axis is not None and 0 < axis["y"] - min(heights) < 30


def test_what_did_not_run_is_one_line(page: Page, gpu: Path) -> None:
    show(page, gpu)
    body = page.locator("body").inner_text()
    assert "flash-attn 3 is not installed" not in body and "providers did not run" in body
    page.locator("#everything details.absent summary").click()
    assert "not installed: flash-attn 3 is not installed: flash-attn-3 ×24" in page.locator("#everything").inner_text()
    assert "flash-attn-3" not in page.locator("#everything table").inner_text()


def test_names_are_for_readers_and_not_clipped(page: Page, gpu: Path) -> None:
    show(page, gpu)
    page.locator("#suites button", has_text="grid36").click()
    titles = page.locator("section#speed h3").all_inner_texts()
    assert "head dim 64, no mask" in titles and "head dim 256, causal" in titles
    page.locator("#suites button", has_text="models").click()
    assert "Llama 3 8B" in page.locator("section#bars h3").all_inner_texts()
    clipped = page.evaluate(
        """() => [...document.querySelectorAll("svg text")].filter(t => {
             const box = t.getBBox(), view = t.ownerSVGElement.viewBox.baseVal;
             return box.x < -1 || box.x + box.width > view.width + 1;
           }).map(t => t.textContent)"""
    )
    assert clipped == []


def test_a_cpu_is_drawn_in_its_units(page: Page, cpu: Path) -> None:
    show(page, cpu)
    assert "GFLOP/s" in page.locator("section#speed figure").first.inner_text()
    assert "TFLOP/s" not in page.locator("section#roofline figure").first.inner_text()
    assert "Other work ran on this machine" in page.locator("#warnings").inner_text()
    table = page.locator("#everything table").inner_text()
    assert not re.search(r"(^|\s)0 [GT]FLOP/s", table)
    over = re.findall(r"(\d+) %( \*)?", table)
    assert any(int(n) > 100 for n, _ in over) and all(mark for n, mark in over if int(n) > 100)
    assert "a yardstick, not a limit" in page.locator("section#speed").inner_text()


@pytest.mark.parametrize(
    "evil", ["<!--<script>", "</script><script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>"]
)
def test_names_cannot_break_it(page: Page, evil: str, tmp_path: Path) -> None:
    run = synthetic(("sweep",))
    for row in run.rows:
        if row.provider == "torch-flash":
            row.provider, row.reason, row.note = evil, evil, evil
    run.provenance["device"] = {**run.provenance["device"], "name": evil}
    show(page, report.write([run], tmp_path))
    assert page.locator("h1").inner_text() == evil and page.locator("img").count() == 0
    assert evil in page.locator(".legend").first.inner_text()
