"""A decoder of two layers, as small as one can be that has everything: rotary positions, grouped heads, gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, HEADS_K, DIM = 32, 32, 4, 2, 8


@dataclass(frozen=True)
class TrainCase:
    lengths: tuple[int, ...] = (45,)
    method: str = "ring"
    strategy: str = "zigzag"
    inner: int | None = None
    fsdp: bool = True
    checkpoint: bool = False
    compile: bool = False


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(batch, rows, heads, dim), turned by the position of each row."""
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / x.shape[-1], dtype=x.dtype)
    angle = positions[..., None, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.q = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * HEADS_K * DIM, bias=False)
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q = rotated(self.q(y).unflatten(-1, (HEADS, DIM)), positions)
        k, v = self.kv(y).unflatten(-1, (2 * HEADS_K, DIM)).chunk(2, -2)
        x = x + self.o(self.attend(q, rotated(k, positions), v).flatten(-2))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class TinyLlama(nn.Module):
    """A Llama in fp64. It has the same weights each time."""

    def __init__(self, attend: Callable[..., torch.Tensor], checkpoint: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList([Layer(attend), Layer(attend)])
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpoint = checkpoint
        self.double()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, summed over the tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, positions, use_reentrant=False) if self.checkpoint else layer(x, positions)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")

    loss = nn.Module.__call__


def text(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, (1, length): labels are shifted before anything is cut."""
    tokens = torch.randint(VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(6))
    return tokens[:, :-1], tokens[:, 1:]
