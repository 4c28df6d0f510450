"""`install()` and `uninstall()`: what others import, what they learn of versions, and that everything comes back."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import strobe
from strobe import compat
from strobe.compat.installation import STANDS_IN

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(autouse=True)
def _not_installed() -> Iterator[None]:
    compat.uninstall()
    yield
    compat.uninstall()


def test_nothing_is_active_by_import() -> None:
    code = """
        import sys, strobe
        assert "strobe.compat" not in sys.modules and "strobe.nn" not in sys.modules
        strobe.compat.status, strobe.nn.rotary
        assert strobe.compat.status() == {}
        assert not [m for m in sys.modules if m.startswith("flash_attn") or m == "transformers"]
    """
    run(code)


def run(code: str) -> None:
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_imports_find_strobe() -> None:
    compat.install()
    compat.install()  # twice is like once
    for name, module in STANDS_IN.items():
        assert importlib.import_module(name) is importlib.import_module(module)
        assert importlib.util.find_spec(name) is not None
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]
    from flash_attn.bert_padding import pad_input, unpad_input  # type: ignore[import-not-found]
    from flash_attn.layers.rotary import apply_rotary_emb  # type: ignore[import-not-found]
    from flash_attn_2_cuda import varlen_bwd  # type: ignore[import-not-found]
    from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]

    found = (flash_attn_func, pad_input, unpad_input, apply_rotary_emb, varlen_bwd, flash_attn_varlen_func)
    assert all(f.__module__.startswith("strobe.compat") for f in found)
    assert compat.status() == {
        "flash_attn": "strobe stands in for it",
        "flash_attn_interface": "strobe stands in for it",
    }
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.losses")


def test_versions_are_found() -> None:
    assert "flash_attn" not in metadata.packages_distributions()
    compat.install()
    assert metadata.version("flash-attn") == metadata.version("flash_attn") == "2.8.4"
    assert metadata.version("flash_attn_3") == "3.0.0"
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    assert metadata.version("pytest")  # others are found as ever
    compat.uninstall()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash-attn")


def test_uninstall_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.ops", "flash_attn_interface")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in STANDS_IN.values():
        importlib.import_module(module)  # our own modules may stay
    modules, finders = dict(sys.modules), list(sys.meta_path)
    compat.install()
    assert sys.modules["flash_attn"] is not theirs["flash_attn"] and "flash_attn.ops" not in sys.modules
    compat.uninstall()
    assert sys.modules == modules and sys.meta_path == finders
    assert compat.status() == {}
    compat.uninstall()  # without an installation nothing happens
    assert sys.modules == modules and sys.meta_path == finders


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_takes_it_for_flash_attn() -> None:
    """But for the GPU, which it asks for as well."""
    code = """
        import strobe, torch
        strobe.compat.install()
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_capability = lambda *a: (9, 0)
        from transformers.utils import import_utils
        assert import_utils.is_flash_attn_2_available() and import_utils.is_flash_attn_3_available()
        assert not import_utils.is_flash_attn_4_available()
        from transformers import modeling_flash_attention_utils as utils
        utils.lazy_import_flash_attention("flash_attention_2")
        assert utils._flash_varlen_fn is strobe.compat.flash_attn.flash_attn_varlen_func
    """
    run(code)


def test_doctor_shows_it() -> None:
    from strobe.tools import doctor

    assert doctor.hosts()["flash_attn"]["strobe"] == "not active"
    compat.install()
    assert doctor.hosts()["flash_attn"] == {"version": "2.8.4", "strobe": "strobe stands in for it"}
    assert strobe.compat is compat
