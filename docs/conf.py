"""Sphinx: `sphinx-build -W docs build/docs`. The pages are Markdown (MyST); nothing is imported from strobe."""

import importlib.util

project = "strobe"
author = "the strobe authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["figures/**"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # generated pages may skip a level
html_theme = "furo" if importlib.util.find_spec("furo") else "alabaster"
html_title = "strobe"
html_show_copyright = False
html_show_sourcelink = False
