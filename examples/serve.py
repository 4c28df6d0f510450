"""A server in one file: a paged cache, continuous batching and shared prompts, on a CPU or a GPU.

    python examples/serve.py                  # 24 requests to a small model with random weights
    python examples/serve.py --check          # and each answer is compared with that of the request alone

Requests arrive while others run. Every step takes one token of each running request and chunks of new prompts, in one call
of attention per layer. Pages that hold the same beginning of a prompt are computed once and shared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import nn

import strobe

if not hasattr(strobe, "attention"):
    sys.exit(
        f"{strobe.__file__} is another project's package of the same name: pip uninstall strobe, then pip install ."
    )

from strobe.nn.rotary import angles, rotate

VOCABULARY, WIDTH, LAYERS, HEADS, HEADS_K, DIM = 256, 128, 3, 8, 2, 16  # tokens are bytes
PAGE, LONGEST = 16, 512


# ---- the model -------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * DIM, bias=False)
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(self.before(x)).unflatten(-1, (-1, DIM)).split((HEADS, HEADS_K, HEADS_K), -2)

    def rest(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.o(attended.flatten(-2))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
        for p in self.parameters():  # wide enough for answers that depend on the whole prompt
            if p.dim() == 2:
                nn.init.normal_(p, std=2 * p.shape[1] ** -0.5)
        self.register_buffer("cos", angles(torch.arange(LONGEST), DIM)[0])
        self.register_buffer("sin", angles(torch.arange(LONGEST), DIM)[1])

    def alone(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits behind each token of a sequence, (length, vocabulary), without a cache."""
        x, cos, sin = self.embedding(tokens)[None], self.cos[: len(tokens)], self.sin[: len(tokens)]
        for layer in self.layers:
            q, k, v = layer.split(x)
            q, k = (rotate(t, cos, sin) for t in (q, k))
            x = layer.rest(x, strobe.attention(q, k, v, mask=strobe.causal, layout="bshd"))
        return self.head(x[0])


# ---- the cache -------------------------------------------------------------------------------------------------------


class Cache:
    """Pages with counts of who holds them. A full page of a prompt is found again by all tokens up to its end."""

    def __init__(self, pages: int, device: str) -> None:
        self.k, self.v = torch.zeros(2, LAYERS, pages, PAGE, HEADS_K, DIM, device=device)
        self.free, self.holders = deque(range(pages)), [0] * pages
        self.by_tokens: dict[bytes, int] = {}
        self.tokens_of: dict[int, bytes] = {}
        self.reused = 0

    def take(self) -> int:
        page = self.free.popleft()
        if (old := self.tokens_of.pop(page, None)) is not None:
            del self.by_tokens[old]  # nobody held it any more, and now it gets other keys
        self.holders[page] = 1
        return page

    def begin(self, prompt: bytes) -> list[int]:
        """The pages of the longest known beginning of a prompt, without its last token, which must be computed."""
        found: list[int] = []
        for end in range(PAGE, len(prompt), PAGE):
            page = self.by_tokens.get(prompt[:end])
            if page is None:
                break
            if not self.holders[page]:
                self.free.remove(page)
            self.holders[page] += 1
            found.append(page)
        self.reused += len(found)
        return found

    def publish(self, tokens: bytes, pages: list[int]) -> None:
        """Full pages of a prompt can be found from now on."""
        for i, end in enumerate(range(PAGE, len(tokens) + 1, PAGE)):
            if tokens[:end] not in self.by_tokens and pages[i] not in self.tokens_of:
                self.by_tokens[tokens[:end]], self.tokens_of[pages[i]] = pages[i], tokens[:end]

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)  # its keys stay until somebody takes it


# ---- the server ------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    prompt: bytes
    new: int  # tokens that are wanted
    tokens: bytearray = field(default_factory=bytearray)  # prompt and answer
    computed: int = 0  # tokens whose keys are in the cache
    pages: list[int] = field(default_factory=list)

    @property
    def answer(self) -> bytes:
        return bytes(self.tokens[len(self.prompt) :])


class Server:
    def __init__(self, model: Model, pages: int, budget: int, device: str) -> None:
        self.model, self.device, self.budget = model, device, budget
        self.cache = Cache(pages, device)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = self.prompt_tokens = self.new_tokens = 0

    def submit(self, request: Request) -> None:
        request.tokens = bytearray(request.prompt)
        self.waiting.append(request)

    def admit(self) -> None:
        """Requests start while there are pages for all that they may become."""
        while self.waiting:
            request = self.waiting[0]
            most = -(-(len(request.prompt) + request.new) // PAGE)
            promised = sum(-(-(len(r.prompt) + r.new) // PAGE) - len(r.pages) for r in self.running)
            if len(self.cache.free) < most + promised:
                return
            request.pages = self.cache.begin(request.prompt)
            request.computed = len(request.pages) * PAGE
            self.running.append(self.waiting.popleft())

    def step(self) -> list[Request]:
        """One token for whoever decodes and chunks of prompts up to the budget. The requests that are done now."""
        self.admit()
        room, batch = self.budget, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.computed):  # decodes first
            count = min(room, len(request.tokens) - request.computed)
            if count:
                batch.append((request, count))
                room -= count
        for request, count in batch:
            while len(request.pages) * PAGE < request.computed + count:
                request.pages.append(self.cache.take())
        found = self.forward(batch).argmax(-1).tolist()
        self.steps += 1
        done = []
        for (request, count), token in zip(batch, found, strict=True):
            request.computed += count
            self.cache.publish(bytes(request.prompt[: request.computed]), request.pages)
            if request.computed == len(request.tokens):  # else the prompt goes on
                request.tokens.append(token)
                self.new_tokens += 1
            if len(request.answer) == request.new:
                done.append(request)
                self.running.remove(request)
                self.cache.give_back(request.pages)
        self.prompt_tokens += sum(count for _, count in batch)
        return done

    @torch.inference_mode()
    def forward(self, batch: list[tuple[Request, int]]) -> torch.Tensor:
        """Logits behind the last token of each request, (requests, vocabulary)."""
        numbers = [(i, r.computed + j) for i, (r, count) in enumerate(batch) for j in range(count)]
        sequence, positions = torch.tensor(numbers, device=self.device).unbind(-1)
        tokens = torch.tensor([batch[i][0].tokens[at] for i, at in numbers], device=self.device)
        width = max(len(r.pages) for r, _ in batch)
        table = [r.pages + [-1] * (width - len(r.pages)) for r, _ in batch]
        counts = [count for _, count in batch]
        table, lengths, cu_q = (
            torch.tensor(rows, dtype=torch.int32, device=self.device)
            for rows in (table, [r.computed + n for r, n in batch], [0, *counts])
        )
        cu_q = cu_q.cumsum(0, dtype=torch.int32)
        slots = strobe.paged.slots(table, PAGE, positions, sequence)
        cos, sin = self.model.cos[positions], self.model.sin[positions]
        x = self.model.embedding(tokens)
        for layer, k_pool, v_pool in zip(self.model.layers, self.cache.k, self.cache.v, strict=True):
            q, k, v = layer.split(x)
            strobe.paged.append(k, v, k_pool, v_pool, slots, rotary=(self.model.cos, self.model.sin, positions, False))
            q = rotate(q, cos, sin)
            x = layer.rest(x, strobe.attention_paged(q, k_pool, v_pool, table, lengths, cu_q, max_q=max(counts)))
        return self.model.head(x[cu_q[1:].long() - 1])


# ---- the terminal ----------------------------------------------------------------------------------------------------


def requests(count: int, new: int) -> list[Request]:
    """Half of them begin with the same instruction."""
    instruction = b"You answer questions about whales, briefly, and you say so when you do not know. "
    return [
        Request((instruction if i % 2 else b"") + b"Question %d: " % i + b"why? " * (i % 7 + 1), new - i % 3)
        for i in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24, help="how many requests arrive, two in every step")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--pages", type=int, default=128, help=f"pages of the cache, of {PAGE} tokens each")
    parser.add_argument("--budget", type=int, default=64, help="tokens of a step, prompts and answers together")
    parser.add_argument("--check", action="store_true", help="compare each answer with that of the request alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model().to(options.device).eval()
    server = Server(model, options.pages, options.budget, options.device)
    arriving, finished, started = deque(requests(options.requests, options.new)), [], time.perf_counter()
    while arriving or server.waiting or server.running:
        for _ in range(min(2, len(arriving))):  # two arrive in every step
            server.submit(arriving.popleft())
        finished += server.step()
        seconds = time.perf_counter() - started
        used = options.pages - len(server.cache.free)
        line = (
            f"step {server.steps:4}  {len(server.running):3} running  {len(server.waiting):3} waiting  {used:4} pages  "
            f"{server.cache.reused:4} shared  {len(finished):3} done  {server.new_tokens / seconds:7.0f} tokens/s"
        )
        print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    print(
        f"\n{len(finished)} answers, {server.new_tokens} new tokens in {seconds:.1f} s: {server.new_tokens / seconds:.0f} "
        f"tokens/s. {server.prompt_tokens} tokens went through the model; {server.cache.reused} pages were shared."
    )
    if options.check:
        for request in finished:
            check(model, request)
        print(f"each of the {len(finished)} answers is that of its request alone")


@torch.inference_mode()
def check(model: Model, request: Request) -> None:
    """Every token is the likeliest one, or as likely within rounding."""
    tokens = torch.tensor(list(request.tokens), device=model.cos.device)
    logits = model.alone(tokens[:-1])
    behind = logits.amax(-1) - logits.gather(-1, tokens[1:, None])[:, 0]
    for at in range(len(request.prompt), len(tokens)):
        if (gap := float(behind[at - 1])) > 1e-3:
            sys.exit(f"{bytes(request.tokens[:at])!r} goes on with another token than alone, which is {gap} behind")


if __name__ == "__main__":
    main()
