"""The processes of a `RankPool` run these functions of a process group, which are named in tests and imported by the
ranks."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from shard_cases import Case, inputs, leaves_of, on_one_rank
from tiny_llama import TinyLlama, TrainCase, text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from wrapped_transports import Late, Traced

import strobe
from strobe.bench import context_parallel
from strobe.distributed import Counted, ShardPlan, shard, unshard
from strobe.distributed.step import Step
from strobe.distributed.transport import Failed, GroupTransport

_meshes: dict[Any, Any] = {}


def mesh_of(group: dist.ProcessGroup, inner: int | None) -> Any:
    """The group or, with `inner`, a pair of groups: rows travel in the first, heads are traded in the second."""
    if inner is None:
        return group
    key = group.size(), inner
    if key not in _meshes:
        size = group.size()
        assert size == dist.get_world_size(), "groups of a mesh are made by all processes"
        rows = [dist.new_group(list(range(i, size, inner))) for i in range(inner)]
        heads = [dist.new_group(list(range(i, i + inner))) for i in range(0, size, inner)]
        _meshes[key] = rows[group.rank() % inner], heads[group.rank() // inner]
    return _meshes[key]


def attend(group: dist.ProcessGroup, method: str, cases: list[Case], **keywords: Any) -> list[dict[str, torch.Tensor]]:
    mesh = mesh_of(group, 2 if method == "hybrid" else None)
    rank, size = group.rank(), group.size()
    return [on_one_rank(case, mesh, rank, case.plan(size), method, **keywords) for case in cases]


def attend_late(group: dist.ProcessGroup, method: str, cases: list[Case], seed: int) -> list[dict[str, torch.Tensor]]:
    """Attend through a transport that delivers as late as it may."""
    mesh = mesh_of(group, 2 if method == "hybrid" else None)
    groups = mesh if isinstance(mesh, tuple) else (mesh,)
    late = tuple(Late(GroupTransport(g), seed + 10 * i + group.rank()) for i, g in enumerate(groups))
    rank, size = group.rank(), group.size()
    return [on_one_rank(c, late if len(late) == 2 else late[0], rank, c.plan(size), method) for c in cases]


def bytes_sent(group: dist.ProcessGroup, method: str, cases: list[Case]) -> list[int]:
    mesh = mesh_of(group, 2 if method == "hybrid" else None)
    groups = mesh if isinstance(mesh, tuple) else (mesh,)
    found = []
    for case in cases:
        counted = tuple(Counted(GroupTransport(g)) for g in groups)
        on_one_rank(
            case, counted if len(counted) == 2 else counted[0], group.rank(), case.plan(group.size()), method,
            through_lse=False, check=False,
        )  # fmt: skip
        found.append(sum(c.sent for c in counted))
    return found


def events(group: dist.ProcessGroup, method: str, case: Case) -> tuple[list[str], list[str]]:
    """Return the events of a forward and of a backward pass: when transfers start, when they are waited for, and when
    ranks attend."""
    seen: list[str] = []
    forward, backward = Step.forward, Step.backward

    def attend_forward(self: Step, *arguments: Any) -> None:
        seen.append("attend")
        forward(self, *arguments)

    def attend_backward(self: Step, *arguments: Any) -> None:
        seen.append("attend")
        backward(self, *arguments)

    x, plan = inputs(case), case.plan(group.size())
    q, k, v = (t.clone().requires_grad_() for t in shard(plan, x.q, x.k, x.v, rank=group.rank(), dim=case.axis))
    traced = Traced(GroupTransport(group), seen)
    try:
        Step.forward, Step.backward = attend_forward, attend_backward  # type: ignore[method-assign]
        out = strobe.distributed.attention(q, k, v, mesh=traced, plan=plan, method=method, check=False)
        count = len(seen)
        out.sum().backward()
    finally:
        Step.forward, Step.backward = forward, backward  # type: ignore[method-assign]
    return seen[:count], seen[count:]


def call_differently(group: dist.ProcessGroup, changed: dict[int, dict[str, Any]]) -> torch.Tensor:
    """A call in which some ranks pass something else."""
    mine = {"rows": 4, "heads": 2, "dtype": torch.float32, "mask": strobe.causal, "method": "ring", "scale": None}
    mine |= {"layout": "bshd", "grad": False, "length": 4 * group.size(), **changed.get(group.rank(), {})}
    q = torch.randn(1, mine["rows"], mine["heads"], 8).to(mine["dtype"]).requires_grad_(mine["grad"])
    plan = ShardPlan(mine["length"], ranks=group.size(), strategy="contiguous")
    options = {name: mine[name] for name in ("mask", "method", "scale", "layout")}
    return strobe.distributed.attention(q, q, q, mesh=group, plan=plan, **options).detach()


def lose_a_rank(rank: int, size: int, store: str, who: int, signal_: str, when: str, timeout: float) -> None:
    """Not in a pool: one of these processes is killed, or stops and is silent, before or in the middle of a call. The
    others say what they were told, after how many seconds."""
    patient = datetime.timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=patient)
    q = torch.randn(1, 4, 2, 8)
    strobe.distributed.attention(q, q, q, mesh=dist.group.WORLD, method="ring")  # loads what a call needs
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=timeout))
    strobe.distributed.attention(q, q, q, mesh=group, method="ring")
    if rank == who and when == "before the call":
        os.kill(os.getpid(), getattr(signal, signal_))
    if rank == who:  # after the agreement, which is the first exchange
        exchange, exchanges = GroupTransport.exchange, itertools.count()

        def last_exchange(self: GroupTransport, *messages: Any) -> Any:
            if next(exchanges):
                os.kill(os.getpid(), getattr(signal, signal_))
            return exchange(self, *messages)

        GroupTransport.exchange = last_exchange  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        strobe.distributed.attention(q, q, q, mesh=group, method="ring")
    except Failed as error:
        print(f"{time.monotonic() - start:.1f} {error}", flush=True)
    os._exit(0)


# ---- models ----------------------------------------------------------------------------------------------------------


def train_step(group: dist.ProcessGroup, case: TrainCase) -> dict[str, Any]:
    """The loss and the gradients of a tiny model whose sequence is shared out, whose weights are, too (FSDP2)."""
    mesh = device_mesh(group, case.inner)
    flat = device_mesh(group, None)
    rank, size = group.rank(), group.size()
    plan = ShardPlan(case.lengths, ranks=size, mask=strobe.causal, strategy=case.strategy)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return strobe.distributed.attention(q, k, v, mesh=mesh, plan=plan, method=case.method)

    model = TinyLlama(attend, checkpoint=case.checkpoint)
    if case.fsdp:
        for layer in model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
    if case.compile:
        model.layers[0].compile(backend="aot_eager", fullgraph=True)
    tokens, labels = text(sum(case.lengths))
    mine, targets = shard(plan, tokens, labels, rank=rank)
    # Each rank has the loss of its tokens, divided by the number of all. FSDP takes the average over the ranks.
    loss = model.loss(mine, plan.position_ids(rank)[None], targets) / labels.numel()
    (loss * size if case.fsdp else loss).backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    gradients = {}
    for name, p in model.named_parameters():
        gradient = p.grad.full_tensor() if case.fsdp else p.grad.clone()
        if not case.fsdp:
            dist.all_reduce(gradient, group=group)
        gradients[name] = gradient
    return {"loss": total, **(gradients if rank == 0 else {})}


def device_mesh(group: dist.ProcessGroup, inner: int | None) -> DeviceMesh:
    assert group.size() == dist.get_world_size(), "a mesh has all processes"
    if ("mesh", inner) not in _meshes:
        shape, names = (
            ((group.size(),), ("cp",)) if inner is None else ((group.size() // inner, inner), ("rows", "heads"))
        )
        _meshes["mesh", inner] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes["mesh", inner]


def compiled(
    group: dist.ProcessGroup, method: str, case: Case, as_group: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of a function around a call, as it is and compiled into one graph."""
    torch._dynamo.reset()  # there is a limit to how often a function is compiled
    inner = 2 if method == "hybrid" else None
    mesh = group if as_group else device_mesh(group, inner)
    plan, x = case.plan(group.size()), inputs(case)
    (dout,) = shard(plan, x.dout, rank=group.rank(), dim=case.axis)
    found = []

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        out, lse = strobe.distributed.attention(
            q.sin(), k, v, mesh=mesh, plan=plan, method=method, sinks=sinks, return_lse=True, **x.options
        )
        return out.cos() * dout, lse

    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaves = leaves_of(x, *shard(plan, x.q, x.k, x.v, rank=group.rank(), dim=case.axis))
        out, lse = function(*leaves, *(() if x.sinks is not None else (None,)))
        total = out.sum() + torch.where(torch.isfinite(lse), lse, 0).sum()
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)])
    return found[0], found[1]


def autocast(group: dist.ProcessGroup) -> tuple[torch.dtype, torch.dtype, list[torch.Tensor]]:
    plan = ShardPlan(24, ranks=group.size(), mask=strobe.causal)
    torch.manual_seed(3)
    q = torch.randn(1, 24, 4, 8)
    mine = shard(plan, q, rank=group.rank())[0].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = strobe.distributed.attention(mine, mine, mine, mesh=group, plan=plan, method="ring")
    out.float().square().sum().backward()
    return out.dtype, mine.grad.dtype, unshard(plan, out, mine.grad, mesh=group)


def llama_of_transformers(group: dist.ProcessGroup | None, lengths: tuple[int, ...], method: str) -> dict[str, Any]:
    """The loss and the gradients of a Llama of transformers, shared out among ranks with FSDP2; without a group as it
    comes, in one process."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

    from strobe.compat.transformers.context_parallel import NAME, register

    torch.manual_seed(7)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    if method == "halo":  # a model of sliding windows
        config = MistralConfig(**sizes, **heads, sliding_window=9, attn_implementation="sdpa")
        model = transformers.MistralForCausalLM(config).double()
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa")).double()
    tokens, labels = text(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    if group is None:
        logits = model(input_ids=tokens, position_ids=positions).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    mesh, rank = device_mesh(group, None), group.rank()
    register(mesh, method=method)
    model.set_attn_implementation(NAME)
    plan = ShardPlan(lengths, ranks=group.size(), strategy="documents")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine, targets = shard(plan, tokens, labels, rank=rank)
    logits = model(input_ids=mine, position_ids=plan.position_ids(rank)[None], plan=plan).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / labels.numel()
    (loss * group.size()).backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"loss": total, **(gradients if rank == 0 else {})}


def sdpa_of_dtensors(
    group: dist.ProcessGroup,
    tensors: list[torch.Tensor],
    dout: torch.Tensor,
    axes: list[int | None],
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """The result and the gradients of q, k and v, whole. `axes`: of each tensor the one that is sharded."""
    mesh = device_mesh(group, None)
    placed = [
        distribute_tensor(t, mesh, [Replicate() if axis is None else Shard(axis)]).requires_grad_()
        for t, axis in zip(tensors, axes, strict=True)
    ]
    out = strobe.sdpa(*placed, **options)
    gradient = distribute_tensor(dout, mesh, [Replicate()]).redistribute(mesh, out.placements)
    return [t.full_tensor().detach() for t in (out, *torch.autograd.grad(out, placed, gradient))]


def decode_tokens(group: dist.ProcessGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Tokens one after the other; the keys of each go to the rank whose stripe they are in."""
    found, rank = [], group.rank()
    for length in range(1, q.shape[0] + 1):
        plan = ShardPlan(length, ranks=group.size(), mask=strobe.causal, strategy="striped", block=2)
        mine = shard(plan, k[:length], v[:length], rank=rank, dim=0)
        found.append(strobe.distributed.decode(q[length - 1 : length], *mine, mesh=group, plan=plan))
    return torch.cat(found)


def bench(group: dist.ProcessGroup, size: context_parallel.Size) -> list[context_parallel.Row]:
    return context_parallel.measure(group, torch.device("cpu"), size, calls=1)
