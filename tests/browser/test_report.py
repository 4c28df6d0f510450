"""The report in a real browser, from a file: it draws, it sorts, nothing fails, and it fits a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
from bench_results import synthetic

from strobe.bench.report import page

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=5000",
)

# Runs after the page's own script and leaves what it finds in the document, where --dump-dom shows it.
PROBE = """
<script>
window.addEventListener("error", e => document.documentElement.setAttribute("data-error", e.message));
</script>
"""
CLICKS = """
<script>
try {
  const heads = () => [...document.querySelectorAll("#everything th")];
  const first = () => document.querySelector("#everything tbody tr td:nth-child(3)").textContent;
  heads()[2].click(); const fastest = first(); heads()[2].click(); const slowest = first();
  document.querySelector(".legend button").click();
  const hiddenPressed = document.querySelector('.legend button').getAttribute("aria-pressed");
  document.querySelector("details").open = true;
  [...document.querySelectorAll("#suites button")].find(b => b.textContent === "sweep").click();
  const out = document.createElement("div");
  out.id = "probe";
  out.textContent = [fastest, slowest, hiddenPressed, document.querySelectorAll("#memory .oom").length,
    document.documentElement.scrollWidth <= innerWidth + 1].join("|");
  document.body.append(out);
} catch (error) { document.documentElement.setAttribute("data-error", String(error)); }
</script>
"""


def browse(path: Path, tmp_path: Path, *flags: str) -> str:
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90).stdout


def html_tag(dom: str) -> str:
    """Where the page and the probe leave their marks."""
    return re.search(r"<html[^>]*>", dom)[0]  # type: ignore[index]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [synthetic(("grid36", "sweep", "overhead", "tiles")), synthetic(("grid36",), faster=0.9)]
    return page.write(runs, tmp_path_factory.mktemp("report"))


def test_it_draws_every_figure(report: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    probed.write_text(report.read_text(encoding="utf-8").replace("<body>", f"<body>{PROBE}"), encoding="utf-8")
    dom = browse(probed, tmp_path, "--dump-dom")
    assert 'data-ready="yes"' in html_tag(dom) and "data-error" not in html_tag(dom)
    for part in ("speed", "speedup", "memory", "roofline", "errors", "everything", "compare"):
        assert f'<section id="{part}">' in dom
    assert dom.count("<figure>") >= 6 * 3 + 1 and dom.count("<circle") > 500
    assert "regression" in dom and "NaN" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


def test_it_answers_clicks_and_fits_a_phone(report: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    text = report.read_text(encoding="utf-8").replace("<body>", f"<body>{PROBE}").replace("</body>", f"{CLICKS}</body>")
    probed.write_text(text, encoding="utf-8")
    dom = browse(probed, tmp_path, "--window-size=500,900", "--dump-dom")
    assert "data-error" not in html_tag(dom)
    fastest, slowest, pressed, crosses, fits = re.search(r'<div id="probe">(.*?)</div>', dom)[1].split("|")  # type: ignore[index]
    assert fastest.endswith("µs") and slowest.endswith("s") and fastest != slowest
    assert pressed == "false" and int(crosses) >= 3 and fits == "true"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_screenshot_is_not_empty(report: Path, tmp_path: Path, theme: str) -> None:
    themed = tmp_path / "themed.html"
    text = report.read_text(encoding="utf-8").replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
    themed.write_text(text, encoding="utf-8")
    shot = tmp_path / "shot.png"
    browse(themed, tmp_path, "--window-size=1200,1600", f"--screenshot={shot}")
    corner = first_pixel(shot.read_bytes())
    assert shot.stat().st_size > 60_000
    assert (sum(corner) > 600) == (theme == "light"), corner


def first_pixel(png: bytes) -> tuple[int, ...]:
    """Red, green, blue of the upper left corner: the first row of a PNG predicts from nothing."""
    data = b"".join(m for m in _chunks(png, b"IDAT"))
    return tuple(zlib.decompressobj().decompress(data, 4)[1:4])


def _chunks(png: bytes, kind: bytes) -> list[bytes]:
    found, at = [], 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == kind:
            found.append(png[at + 8 : at + 8 + length])
        at += 12 + length
    return found
