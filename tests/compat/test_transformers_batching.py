"""Continuous batching: requests of different lengths in one batch get the tokens that each gets alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("psutil")  # transformers asks it for the memory of a CPU
from compat import models  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
# Neither chunked attention nor different head dims of keys and values have a paged cache in transformers.
NAMES = [name for name in models.DECODERS if name not in ("llama4", "deepseek-v3")]
PROMPTS = [list(range(5, 17)), [20, 21, 22], list(range(30, 37)), [40, 41]]
NEW = 10
_HAS_PAGES = "page_size" in inspect.signature(transformers.ContinuousBatchingConfig).parameters


def alone(name: str) -> list[list[int]]:
    model = models.model(name, "eager")
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def together(name: str, implementation: str, tokens: int = 16, page: int | None = None) -> list[list[int]]:
    """`tokens`: of a step. `page`: rows of a page of the cache, not the default, into which all of our prompts fit."""
    model = models.model(name, implementation)
    pages = {} if page is None else {"page_size" if _HAS_PAGES else "block_size": page}
    found = model.generate_batch(
        inputs=PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        # Few tokens a step, so that prompts are cut into pieces and mixed with requests that are further on.
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=tokens, **pages
        ),
        progress_bar=False,
    )
    assert model.config._attn_implementation.removeprefix("paged|") == "strobe"
    return [found[key].generated_tokens for key in sorted(found, key=lambda key: int(key.split("_")[-1]))]


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str) -> None:
    assert together(name, "strobe") == alone(name)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the functions that ask the cache for a copy of its keys."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    found: list[str] = []

    def noting(name: str, original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(*args, **kwargs)

        return noted

    monkeypatch.setattr(PagedAttentionCache, "update", noting("update", PagedAttentionCache.update))
    monkeypatch.setattr(torch, "index_select", noting("index_select", torch.index_select))
    return found


@pytest.mark.parametrize(
    "name, page, tokens",
    [("llama", 4, 6), ("mistral", 4, 6), ("gemma2", 4, 6), ("gemma2", 8, 16), ("gpt-oss", 4, 16)],
)
def test_the_cache_is_read_where_it_lies(name: str, page: int, tokens: int, copies: list[str]) -> None:
    """Windows are 8 keys, so rings turn over several times; pieces of prompts are shorter and longer than a window."""
    assert together(name, "strobe", tokens, page) == alone(name)
    assert copies == []


def test_a_cache_that_is_not_known_is_asked_for_a_copy(monkeypatch: pytest.MonkeyPatch, copies: list[str]) -> None:
    from strobe.compat.transformers import in_place

    monkeypatch.setattr(in_place, "layer_of", lambda *args: None)
    assert together("gemma2", "strobe") == alone("gemma2")
    assert "update" in copies


def test_pages_without_a_kernel_are_copied(monkeypatch: pytest.MonkeyPatch, copies: list[str]) -> None:
    """Nothing has been written when that is found out: in a ring, rows would be lost."""
    from strobe.compat.transformers import in_place

    monkeypatch.setattr(in_place, "_reads_pages", lambda a: False)
    assert together("gemma2", "strobe", 6, 4) == alone("gemma2")
    assert "update" in copies


def test_every_way_of_a_ring_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from strobe.compat.transformers import in_place

    taken: list[str] = []
    for name in ("_table", "_table_of_ring", "_two_states"):
        original = getattr(in_place, name)
        monkeypatch.setattr(in_place, name, lambda *args, n=name, f=original: (taken.append(n), f(*args))[1])
    together("gemma2", "strobe", 6, 4)
    assert set(taken) == {"_table", "_table_of_ring", "_two_states"}


def test_the_paged_name() -> None:
    assert together("mistral", "paged|strobe") == alone("mistral")


def test_others_are_switched_as_before() -> None:
    """The gate that lets us pass still does its work for the rest."""
    from strobe.compat.transformers import paged

    calls: list[str] = []

    class Manager:
        def switch_to_cb_friendly_attn(self, model: object, *args: object) -> None:
            calls.append("original")

    api = type("Api", (), {"ContinuousBatchingManager": Manager})
    original, paged.continuous_api = paged.continuous_api, api
    try:
        gate = paged.open_gate("strobe")
        Manager().switch_to_cb_friendly_attn(models.model("llama", "sdpa"), True)
        assert calls == ["original"]
        paged.close_gate(gate)
        assert Manager.switch_to_cb_friendly_attn is gate[1]
    finally:
        paged.continuous_api = original
