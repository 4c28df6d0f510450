"""The site: every code block runs, every page can be reached, links and settings are real. README.md:
test_readme.py."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

import strobe
from benchmarks.pages import gallery

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
EVERY_PAGE = sorted(DOCS.rglob("*.md"))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """One after the other, as a reader would type them, in a process of its own."""
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n\n".join(blocks(page, "python")), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}  # tests run beside this one
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["flash-attn", "sdpa", "flex-attention"])
def test_what_one_writes_here_is_compared_with_what_one_wrote_there(name: str) -> None:
    """Each argument in the right column of the table stands in a comparison below it."""
    page = DOCS / f"from-{name}.md"
    rows = re.findall(r"^\| (.+?[^\\]) \| (.+) \|$", text_of(page), re.MULTILINE)[1:]
    code = "".join(blocks(page, "python"))
    words = {word for _, ours in rows for word in re.findall(r"strobe\.(\w+)|(\w+)=", ours) for word in word if word}
    # There is nothing to compare, or no CPU has it.
    untested = {"dropout", "seed", "deterministic", "backend", "compat"}
    assert len(rows) >= 9 and code.count("same(") >= 6
    assert {word for word in words if word not in code} <= untested


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if path.startswith("notebooks/"):  # copied there by conf.py
            file = ROOT / path
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}; there are {sorted(anchors(file))}"


def test_every_page_is_in_the_table_of_contents() -> None:
    listed: set[Path] = set()
    for toctree in blocks(DOCS / "index.md", "{toctree}"):
        for entry in toctree.splitlines():
            if entry and not entry.startswith(":"):
                found = sorted(DOCS.glob(f"{entry}.md")) or [ROOT / f"{entry}.ipynb"]
                assert found[0].is_file(), f"the table of contents names {entry}"
                listed |= set(found)
    notebooks = set((ROOT / "notebooks").glob("*.ipynb"))
    assert {p for p in EVERY_PAGE if p.name != "index.md"} | notebooks == listed


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda p: str(p.relative_to(DOCS)))
def test_included_files_have_what_is_included(page: Path) -> None:
    for target, options in re.findall(r"^```\{include\} (\S+)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        included = text_of(page.parent / target)
        for marker in re.findall(r"^:(?:start-after|end-before): (.+)$", options, re.MULTILINE):
            assert included.count(marker) == 1, f"{marker!r} is {included.count(marker)} times in {target}"


def read_from_the_environment(path: Path) -> set[str]:
    """The variables that a Python file reads: what it asks `os.environ` for, and every string that looks like ours."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text_of(path))):
        asked: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[asked, *_]):
                pass
            case ast.Call(func=ast.Attribute(attr="getenv"), args=[asked, *_]):
                pass
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=asked, ctx=ast.Load()):
                pass
            case ast.Constant(value=str(text)) if re.fullmatch(r"STROBE(_[A-Z]+)+", text):
                names.add(text)
        if isinstance(asked, ast.Constant):
            names.add(str(asked.value))
    return names


def test_settings_are_those_of_the_code() -> None:
    """The table in install.md has every variable that the library reads, and ours that the tests read; and no other."""
    library = set().union(*map(read_from_the_environment, (ROOT / "src").rglob("*.py")))
    tests = set().union(*map(read_from_the_environment, (ROOT / "tests").rglob("*.py")))
    macros = set(re.findall(r"#define (STROBE_\w+)", "".join(map(text_of, (ROOT / "src").rglob("*.cuh")))))
    read = (library | {name for name in tests if name.startswith("STROBE_")}) - macros - {"PYTHONPATH"}  # Python's own
    table = re.findall(r"^\| `([A-Z_]+)` \|", text_of(DOCS / "install.md"), re.MULTILINE)
    assert len(table) == len(set(table)) and {"STROBE_CACHE_DIR", "CXX"} <= read
    assert set(table) == read, f"not documented: {read - set(table)}; not read: {set(table) - read}"


def test_versions_are_those_of_the_package() -> None:
    project = text_of(ROOT / "pyproject.toml")
    python, torch = re.search(r'requires-python = ">=([\d.]+)"', project), re.search(r'"torch>=([\d.]+)"', project)
    assert python and torch
    assert f"Python {python[1]} or later and PyTorch {torch[1]} or later" in text_of(DOCS / "install.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` does."""
    if missing := [n for n in ("sphinx", "myst_nb", "furo", "sphinx_design") if importlib.util.find_spec(n) is None]:
        pytest.skip(f"needs the extra `docs`: {', '.join(missing)} not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_the_page_the_notebooks_the_gallery_and_the_api(site: Path) -> None:
    def body(name: str) -> str:
        return text_of(site / f"{name}.html")

    assert "How FlashAttention works" in text_of(site / "flash-attention.html")
    assert "flash-attention.html" in body("index") and "flash-attention.html" in body("page")
    for name in ("01_cuda_starter", "02_flash_attention"):
        assert "not yet: " in body(f"notebooks/{name}")  # the outputs are there
        pictures = re.findall(r"<img [^>]*>", body(f"notebooks/{name}"))
        assert len(pictures) >= 7 and all(re.search(r'alt="[^"]{20,}"', picture) for picture in pictures)
    assert body("gallery").count("<img ") == len(gallery.EXAMPLES)
    public = [name for name in strobe.__all__ if callable(getattr(strobe, name))]
    assert all(
        f'id="strobe.{name}"' in body("api") for name in public if not isinstance(getattr(strobe, name), strobe.Mask)
    )
    assert 'class="gi"' in body("ladder/05") and str(ROOT) not in body("ladder/05")


def test_the_site_needs_no_network(site: Path) -> None:
    """Nothing is fetched from elsewhere, and formulas are drawn: in the text's colour, with their source to be read out."""
    pages = sorted(site.rglob("*.html"))
    fetched = re.compile(r"""(?:<script[^>]*\bsrc|<link[^>]*\bhref|<img[^>]*\bsrc)="((?:https?:)?//[^"]+)\"""")
    assert len(pages) > 30 and {page.name: found[1] for page in pages if (found := fetched.search(text_of(page)))} == {}
    notebook = text_of(site / "notebooks" / "02_flash_attention.html")
    formulas = re.findall(r'<svg class="formula" role="img" aria-label="([^"]+)".*?</svg>', notebook)
    assert len(formulas) > 40 and r"B_r &gt; \frac d2" in " ".join(formulas) and "currentColor" in notebook
    assert "\\frac" not in re.sub(r'aria-label="[^"]*"', "", notebook)


def test_the_page_in_the_site_leads_to_the_site(site: Path) -> None:
    footer = text_of(site / "flash-attention.html").partition("Where to go from here")[2]
    links = [link for link in re.findall(r'<a href="([^"]+)"', footer) if "arxiv.org" not in link]
    assert len(links) == 5 and all((site / link).is_file() for link in links), links


def test_the_gallery_is_current() -> None:
    assert gallery.main([], ROOT) == 0, "make docs"
    for example in gallery.EXAMPLES:
        drawn = torch.from_numpy(imread(ROOT / gallery.FOLDER / f"{example.name}.png")[..., :3].copy())
        wanted = gallery.pixels(example.weights()).float() / 255
        assert (drawn - wanted).abs().max() < 0.05, f"{example.name}: make docs"


def test_the_gallery_shows_differences() -> None:
    found = {example.name: example.weights() for example in gallery.EXAMPLES}
    sums = {name: weights.sum(1) for name, weights in found.items()}
    for name in found.keys() - {"sinks", "dropout"}:
        torch.testing.assert_close(sums[name], torch.ones(gallery.N))
    costs = {example.name: example.cost() for example in gallery.EXAMPLES if example.blocks}
    assert costs["causal"] == "21 of 36 blocks are visited, and the mask is asked in 6 of them."
    assert costs["chunked"] == "9 of 36 blocks are visited, and the mask is asked in 6 of them."
    patterns = {tuple((found[name] > 0).flatten().tolist()) for name in costs}
    assert len(patterns) == len(costs) == 11
    assert (sums["sinks"] < 1).all() and found["softcap"].max() < found["no-softcap"].max()
    assert (found["documents"] > 0).sum() == 5**2 + 9**2 + 10**2 and (found["dropout"] == 0).float().mean() > 0.2
