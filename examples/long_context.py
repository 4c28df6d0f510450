"""Train on a sequence that is too long for one process: context parallel attention with FSDP2.

    torchrun --nproc-per-node 1 examples/long_context.py --limit 600   # does not fit
    torchrun --nproc-per-node 4 examples/long_context.py --limit 600   # each of four ranks holds a quarter

Runs on GPUs (NCCL) if there are any, else on CPUs (gloo). `--limit` is how many MB each process may add to what it has
after start-up. The loss is the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import strobe

if not hasattr(strobe, "attention"):
    sys.exit(
        f"{strobe.__file__} is another project's package of the same name: pip uninstall strobe, then pip install ."
    )

from strobe.distributed import ShardPlan, attention, describe, shard

WIDTH, HEADS, HEADS_K, DIM = 128, 8, 2, 16


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(batch, rows, heads, dim), turned by the position of each row in the whole sequence."""
    frequencies = 10000.0 ** -torch.arange(0, 1, 2 / DIM, device=x.device)
    angle = positions[:, None, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, mesh: DeviceMesh, plan: ShardPlan, method: str) -> None:
        super().__init__()
        self.mesh, self.plan, self.method = mesh, plan, method
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * HEADS_K * DIM, bias=False)
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q = rotate(self.q(y).unflatten(-1, (HEADS, DIM)), positions)
        k, v = self.kv(y).unflatten(-1, (2 * HEADS_K, DIM)).chunk(2, -2)
        # The only line that knows about other ranks; the mask is that of the plan.
        o = attention(q, rotate(k, positions), v, mesh=self.mesh, plan=self.plan, method=self.method)
        x = x + self.o(o.flatten(-2))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self, layers: int, vocabulary: int, *attention_of: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Layer(*attention_of) for _ in range(layers))  # type: ignore[arg-type]
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, positions, use_reentrant=False)
        return self.head(x)


def limit_memory(megabytes: int, device: torch.device, told: str) -> None:
    """Limit what this process allocates from now on. On a CPU a thread watches, and ends the process that takes more:
    what a machine that has no more memory would do."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, megabytes * 1e6 / total), device)
        return

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    most = resident() + megabytes * 10**6

    def watch() -> None:
        while resident() < most:
            time.sleep(0.002)
        print(told, file=sys.stderr, flush=True)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def too_long(options: argparse.Namespace) -> str:
    ranks = dist.get_world_size()
    each = f"{options.length:,} tokens on {ranks} rank{'' if ranks == 1 else 's'}"
    return f"rank {dist.get_rank()}: {each} need more than {options.limit} MB a rank"


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))
    plan = ShardPlan(options.length, ranks=ranks, mask=strobe.causal, strategy="zigzag")
    torch.manual_seed(0)  # the same weights and the same text on every rank
    with device:
        model = Model(options.layers, options.vocabulary, mesh, plan, options.method)
        text = torch.randint(options.vocabulary, (1, options.length + 1))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Labels are shifted first and cut afterwards: the label of a shard's last token is often on another rank.
    tokens, labels = shard(plan, text[:, :-1], text[:, 1:], rank=rank)
    positions = plan.position_ids(rank, device)
    if rank == 0:
        print(describe(plan))
    if options.limit:
        limit_memory(options.limit, device, too_long(options))
    for step in range(options.steps):
        logits = model(tokens, positions)
        # This rank's part of the mean over all tokens. FSDP2 averages gradients over ranks, so `ranks` turns that into
        # a sum.
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / plan.total
        (loss * ranks).backward()
        optimiser.step()
        optimiser.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if rank == 0:
            print(f"step {step}: loss {whole.item():.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=8192, help="tokens of the sequence")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--method", default="ring", help="ring, allgather, ulysses, halo or auto")
    parser.add_argument("--limit", type=int, default=0, help="MB that each process may add; 0: no limit")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device)
    except torch.OutOfMemoryError:
        print(too_long(options), file=sys.stderr, flush=True)
        os._exit(3)  # without a word to the other ranks: torchrun ends them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
