"""Context parallel attention in what people train with: FSDP2, activation checkpoints, torch.compile, autocast, meshes."""

from __future__ import annotations

import functools
import itertools
import types
from dataclasses import replace

import pytest
import rank_work
import torch
from everyday import everyday
from rank_pool import RankPool
from shard_cases import PACKED, Case
from tiny_llama import TinyLlama, TrainCase, text

import strobe
from strobe.compat.transformers.context_parallel import attention_function, no_mask
from strobe.distributed import simulator


@functools.cache
def alone(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """One process, all tokens, no sharding of anything."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return strobe.attention_varlen(q[0], k[0], v[0], cu, cu, mask=strobe.causal)[None]

    model = TinyLlama(attend)
    tokens, labels = text(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    loss = model.loss(tokens, positions, labels) / labels.numel()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


PLAIN = TrainCase()


@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        replace(PLAIN, method="allgather", fsdp=False),
        replace(PLAIN, method="ulysses"),
        replace(PLAIN, method="hybrid", inner=2),
        replace(PLAIN, checkpoint=True),
        replace(PLAIN, checkpoint=True, method="ulysses", lengths=(7, 30, 1, 8), strategy="documents"),
        replace(PLAIN, lengths=(7, 30, 1, 8), strategy="documents"),
        replace(PLAIN, method="halo", lengths=(7, 30, 1, 8), strategy="contiguous"),
        replace(PLAIN, compile=True),
    ],
    ids=lambda case: (
        "-".join(str(value) for name, value in vars(case).items() if value != getattr(PLAIN, name)) or "plain"
    ),
)
def test_a_training_step(pool: RankPool, case: TrainCase) -> None:
    """The loss and the gradient of every weight equal those of one process."""
    found, *others = pool.run(rank_work.train_step, case)
    wanted = alone(case.lengths)
    assert set(found) == set(wanted)
    for name, t in wanted.items():
        torch.testing.assert_close(found[name], t, atol=1e-12, rtol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    assert all(torch.equal(o["loss"], found["loss"]) for o in others)


@pytest.mark.parametrize("method", everyday(["ring", "allgather", "ulysses", "hybrid", "auto"], ["ring", "allgather"]))
def test_compiled_into_one_graph(pool: RankPool, method: str) -> None:
    for case in (Case(heads=(6, 2), sinks=True, dropout=0.2), Case(lengths=PACKED, heads=(8, 4), alibi=True)):
        for eager, traced in pool.run(rank_work.compiled, method, case):
            for a, b in zip(eager, traced, strict=True):
                torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


def test_compiled_with_a_process_group(pool: RankPool) -> None:
    """A compiler takes a process group for an object that may be asked little."""
    for eager, traced in pool.run(rank_work.compiled, "ring", Case(heads=(6, 2)), True):
        for a, b in zip(eager, traced, strict=True):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


def test_autocast(pool: RankPool) -> None:
    torch.manual_seed(3)
    q = torch.randn(1, 24, 4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = strobe.attention(q, q, q, mask=strobe.causal)
    wanted.float().square().sum().backward()
    for dtype, of_gradient, (out, gradient) in pool.run(rank_work.autocast):
        assert dtype == torch.bfloat16 and of_gradient == torch.float32
        torch.testing.assert_close(out, wanted.detach(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(gradient, q.grad, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("method, lengths", [("ring", (45,)), ("ulysses", (30, 15)), ("halo", (45,))], ids=str)
def test_a_model_of_transformers(pool: RankPool, method: str, lengths: tuple[int, ...]) -> None:
    """Llama, with documents that transformers tells by positions that start again; and Mistral's sliding window."""
    # transformers computes norms in fp32, whatever the weights are: roundings there are what differs.
    wanted = rank_work.llama_of_transformers(None, lengths, method)
    found = pool.run(rank_work.llama_of_transformers, lengths, method)[0]
    assert set(found) == set(wanted)
    for name, t in wanted.items():
        torch.testing.assert_close(found[name], t, atol=1e-8, rtol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_what_a_model_of_transformers_cannot_have() -> None:
    """Nothing is left out in silence."""
    no_mask(batch_size=1, attention_mask=None)
    no_mask(batch_size=1, attention_mask=torch.ones(1, 4))
    with pytest.raises(strobe.Unsupported, match=r"attention_mask of shape \(1, 4\) hides tokens"):
        no_mask(batch_size=1, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    from transformers import masking_utils as host

    documents = torch.tensor([[0, 0, 1, 1]])
    no_mask(mask_function=host.sliding_window_causal_mask_function(4))
    no_mask(mask_function=host.and_masks(host.causal_mask_function, host.packed_sequence_mask_function(documents)))
    image = lambda b, h, q, k: (q < 2) & (k < 2)  # noqa: E731
    for part in (host.or_masks, host.and_masks):
        with pytest.raises(strobe.Unsupported, match="neither layers nor a plan say"):
            no_mask(mask_function=part(host.causal_mask_function, image))
    q, module = torch.randn(1, 2, 4, 8), torch.nn.Module()

    def fails(match: str, mask: torch.Tensor | None = None, **options: object) -> None:
        def work(mesh: object) -> None:
            with pytest.raises(strobe.Unsupported, match=match):
                attention_function(mesh)(module, q, q, q, mask, **options)

        simulator.run(1, work)

    fails("attention_mask is a tensor", torch.ones(1, 1, 4, 4))
    fails("dropout is 0.1", dropout=0.1)
    fails("position_bias is given", position_bias=torch.zeros(1, 2, 4, 4))
    module.config = types.SimpleNamespace(attention_chunk_size=2)
    fails("attention_chunk_size is set")
