"""Tests that need transformers get it with strobe registered, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def registered() -> Iterator[None]:
    pytest.importorskip("transformers")
    from strobe.compat import transformers

    transformers.register()
    yield
    transformers.unregister()
