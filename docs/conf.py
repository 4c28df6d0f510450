"""Sphinx: `make site` builds these pages into build/site. The pages are Markdown (MyST), the notebooks are shown as they
were saved, the API is read from the docstrings, and the explaining page is built beside them."""

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(HERE)]

project = "strobe"
author = "the strobe authors"
extensions = ["mathematics", "myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
root_doc = "index"
exclude_patterns = ["figures/**"]
suppress_warnings = ["myst.header"]  # generated pages may skip a level

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks/build.py has run them

default_role = "code"  # of single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it in words

html_theme = "furo"
html_title = "strobe"
html_show_copyright = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathtext"  # of mathematics.py
copybutton_exclude = ".linenos, .gp"

# Pages that a reader of the repository finds elsewhere than a reader of the site.
_ELSEWHERE = {"benchmarks/README.md": "benchmark-method.md", "CONTRIBUTING.md": "contributing.md"}
EXPLANATION = "flash-attention.html"  # the page of `strobe explain-page`, in the site


def _copy_notebooks(app):
    """Sphinx reads what lies in its own folder only."""
    there = HERE / "notebooks"
    there.mkdir(exist_ok=True)
    for saved in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copyfile(saved, there / saved.name)


def _complete(app, name, source):
    """Diffs are put in, and links that leave this folder lead to the same text in the site."""
    if name.startswith("ladder/"):
        from benchmarks.pages.ladder_page import with_diffs

        source[0] = with_diffs(source[0])
    depth = "../" * name.count("/")
    for path, page in _ELSEWHERE.items():
        source[0] = re.sub(rf"\]\((?:\.\./)+{re.escape(path)}", f"]({depth}{page}", source[0])


def _build_explanation(app, exception):
    if exception is None and app.builder.format == "html":
        from strobe.learn import explain_page

        explain_page.build(Path(app.outdir) / EXPLANATION, lambda target: _in_the_site(Path(app.outdir), target))


def _in_the_site(out, target):
    """Where the site has a file of the project: as a page, or, source code, as a copy."""
    page = re.sub(r"^docs/|\.(?:md|ipynb)$", "", target)
    if (out / f"{page}.html").is_file():
        return f"{page}.html"
    copy = out / "source" / f"{Path(target).name}.txt"
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(ROOT / target, copy)
    return copy.relative_to(out).as_posix()


def _readable(app, what, name, obj, options, lines):
    """Docstrings are plain text: paragraphs, and tables of a name, two blanks and what it means. As Sphinx wants it."""
    found = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = [line for line in paragraph.splitlines() if line.strip()]
        entry = re.compile(r"(\S(?:.*?\S)?)\s{2,}(\S.*)")
        if not rows or not entry.fullmatch(rows[0]):
            found += [" ".join(row.strip() for row in rows).replace("*", "\\*"), ""]
            continue
        entries = []
        for row in rows:
            match = entry.fullmatch(row)
            if match and not row.startswith(" "):
                entries.append(f"- ``{match[1]}``: {match[2]}")
            else:
                entries[-1] += f" {row.strip()}"
        found += [text.replace("*", "\\*") for text in entries] + [""]
    lines[:] = found


def setup(app):
    app.connect("builder-inited", _copy_notebooks)
    app.connect("source-read", _complete)
    app.connect("autodoc-process-docstring", _readable)
    app.connect("build-finished", _build_explanation)
    return {"parallel_read_safe": True}
