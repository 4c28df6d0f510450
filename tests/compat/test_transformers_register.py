"""Registering is asked for, says so, and can be undone."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
from transformers.generation.continuous_batching import continuous_api  # noqa: E402

import strobe  # noqa: E402
from strobe.compat import transformers as ours  # noqa: E402


def state() -> tuple[object, ...]:
    manager = continuous_api.ContinuousBatchingManager
    interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    check = transformers.PreTrainedModel.get_correct_attn_implementation
    return (*(dict(i._global_mapping) for i in interfaces), manager.switch_to_cb_friendly_attn, check)


def test_register_and_unregister() -> None:
    before = state()
    assert ours.status() is None and "transformers" not in strobe.compat.status()
    ours.register()
    ours.register()  # twice is like once
    assert {"strobe", "paged|strobe"} <= set(transformers.AttentionInterface._global_mapping)
    assert "strobe" in transformers.AttentionMaskInterface._global_mapping  # else padding would be lost without a word
    assert strobe.compat.status()["transformers"] == 'attn_implementation="strobe" is registered'
    ours.unregister()
    assert state() == before and ours.status() is None
    ours.unregister()
    assert state() == before


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")  # by name: transformers may replace its own module
    with pytest.raises(strobe.Unsupported, match=r"transformers 4\.57\.1 is too old"):
        ours.register()
    assert ours.status() is None
