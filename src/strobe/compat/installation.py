"""`install()`: `import flash_attn` finds strobe in this process. Code that says `from flash_attn import flash_attn_func`
runs unchanged, with or without a flash-attn on the machine.

Modules are put where Python looks first, in `sys.modules`. What else a flash-attn on the machine has, as
`flash_attn.losses`, is found there. Libraries that ask for a version find one, too: a finder of ours tells
`importlib.metadata` of the packages that we stand in for. `uninstall()` puts everything back.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# The name that is imported -> the module of ours.
STANDS_IN = {
    "flash_attn": "strobe.compat.flash_attn",
    "flash_attn.bert_padding": "strobe.compat.flash_attn.bert_padding",
    "flash_attn.flash_attn_interface": "strobe.compat.flash_attn.flash_attn_interface",
    "flash_attn.layers": "strobe.compat.flash_attn.layers",
    "flash_attn.layers.rotary": "strobe.compat.flash_attn.layers.rotary",
    "flash_attn.ops": "strobe.compat.flash_attn.ops",
    "flash_attn.ops.triton": "strobe.compat.flash_attn.ops.triton",
    "flash_attn.ops.triton.rotary": "strobe.compat.flash_attn.ops.triton.rotary",
    "flash_attn_2_cuda": "strobe.compat.flash_attn_2_cuda",
    "flash_attn_3": "strobe.compat.flash_attn_3",
    "flash_attn_3.flash_attn_interface": "strobe.compat.flash_attn_interface",
    "flash_attn_interface": "strobe.compat.flash_attn_interface",
}
_ROOTS = {name.split(".")[0] for name in STANDS_IN}
# Distribution -> what is imported from it.
_PACKAGES = {
    "flash-attn": ("flash_attn", "flash_attn_2_cuda"),
    "flash-attn-3": ("flash_attn_3", "flash_attn_interface"),
}
_VERSION_OF = {"flash-attn": "strobe.compat.flash_attn", "flash-attn-3": "strobe.compat.flash_attn_3"}


class _Package(metadata.Distribution):
    """The facts that `importlib.metadata` knows of a package that we stand in for."""

    def __init__(self, name: str) -> None:
        version = importlib.import_module(_VERSION_OF[name]).__version__
        summary = "the functions of this package, run by strobe"
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n",
            "top_level.txt": "".join(f"{module}\n" for module in _PACKAGES[name]),
        }

    def read_text(self, filename: Any) -> str | None:
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: strobe.compat stands in for this package; there are no files")


class _Finder(metadata.DistributionFinder):
    """Finds the packages, and of a flash-attn on the machine the modules that we do not stand in for. Ours are in
    `sys.modules`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        if (
            package.split(".")[0] != "flash_attn" or package not in STANDS_IN
        ):  # others' packages have paths of their own
            return None
        theirs = _found_by_others("flash_attn", None)
        if theirs is None or theirs.submodule_search_locations is None:
            return None
        inside = package.split(".")[1:]
        return _found_by_others(name, [str(Path(at, *inside)) for at in theirs.submodule_search_locations])

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        wanted = None if context is None else context.name
        for name in _PACKAGES:
            if wanted is None or _normalised(wanted) == name:
                yield _Package(name)


def _found_by_others(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Return where an import would find the module if we were not there. Nothing is loaded."""
    for finder in sys.meta_path:
        if finder is not _finder and (spec := finder.find_spec(name, path)) is not None:
            return spec
    return None


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_finder = _Finder()
_replaced: dict[str, ModuleType] | None = None  # what was in `sys.modules`; None: not installed
_operators: Any = None  # torch.ops.flash_attn_3


def install() -> None:
    """Make `import flash_attn`, `flash_attn_interface` (FlashAttention 3) and what belongs to them give strobe's
    functions in this process. Call it before the libraries that import them. A second call changes nothing."""
    global _replaced, _operators
    if _replaced is not None:
        return
    ours = {name: importlib.import_module(module) for name, module in STANDS_IN.items()}
    _replaced = _taken_out()
    sys.modules.update(ours)
    sys.meta_path.insert(0, _finder)
    _operators = importlib.import_module("strobe.compat.flash_attn_3.operators").library()


def uninstall() -> None:
    """Restores modules and packages as they were before `install()`. Code that has imported ours meanwhile keeps
    them."""
    global _replaced, _operators
    if _replaced is None:
        return
    for name in _taken_out():
        package, _, module = name.rpartition(".")
        if (
            package in STANDS_IN and name not in STANDS_IN
        ):  # one of theirs, which Python made an attribute of our package
            vars(importlib.import_module(STANDS_IN[package])).pop(module, None)
    sys.modules.update(_replaced)
    sys.meta_path.remove(_finder)
    _replaced = None
    _operators._destroy()
    _operators = None


def installed() -> bool:
    return _replaced is not None


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in _ROOTS]
    return {name: sys.modules.pop(name) for name in names}
