"""The short animation in the README: some steps of the explaining page, one after the other.

python docs/animation.py        # writes docs/figures/page.gif; needs Playwright, Pillow and Chromium
"""

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from strobe.learn import explain_page

OUT = Path(__file__).resolve().parent / "figures" / "page.gif"
STEPS = ("score", "softmax", "load", "tile", "use", "vanish", "forgotten", "larger", "rescale", "second-sum", "halfway")
SIZE, SHOWN, COLOURS = (1160, 600), (870, 450), 128
STILL_MS = 2200  # of each step
_STYLE = "#rail, #theme { display: none } .step:not(.active) { opacity: 0 !important }"


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    shots = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = explain_page.build(Path(folder) / "page.html")
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--hide-scrollbars"])
        page = chromium.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, reduced_motion="reduce")
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        page.add_style_tag(content=_STYLE)
        for step in STEPS:
            page.evaluate(f"strobePage.goTo({step!r}, {{ instant: true }})")
            page.wait_for_timeout(400)
            shots.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize(SHOWN, Image.LANCZOS))
        chromium.close()
    every = Image.new("RGB", (SHOWN[0], SHOWN[1] * len(shots)))
    for i, shot in enumerate(shots):
        every.paste(shot, (0, i * SHOWN[1]))
    palette = every.quantize(COLOURS)  # one for all, so that a colour stays what it is
    frames = [shot.quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots]
    frames[0].save(OUT, save_all=True, append_images=frames[1:], duration=STILL_MS, loop=0, optimize=True)
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
