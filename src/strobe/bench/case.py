"""A case, and what is measured of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from strobe.bench import variants
from strobe.bench.names import PASS_TITLES
from strobe.measure import units
from strobe.measure.cases import Case, mask_of, problem_of
from strobe.problem import Problem, supposed
from strobe.problem.arguments import Arguments
from strobe.problem.resolve import resolved
from strobe.variants.mask import causal, full
from strobe.variants.user_function import mask_function

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MEASURES = ("time", "call", "graph", "model")


@dataclass(frozen=True, kw_only=True)
class BenchCase(Case):
    suite: str
    dtype: str = "bfloat16"
    direction: str = "forward"  # one of names.PASSES
    # "time": of the device; "call": of the CPU, per call; "graph": of the device, replayed; "model": of a step
    # of a whole model.
    measure: str = "time"
    model: str | None = None  # whose shape it is
    variant: str | None = None  # one of variants.NAMES

    @property
    def label(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """Names the case in results of any run; what two runs are compared by."""
        parts = [self.suite, self.label, self.dtype, self.direction]
        return "/".join(parts + ([self.measure] if self.measure != "time" else []))

    @property
    def title(self) -> str:
        """The title for readers: "head dim 128, causal, 4K tokens, backward"."""
        shape = self.model or f"head dim {self.dim}{f'/{self.value_dim}' if self.value_dim != self.dim else ''}"
        parts = [shape, "" if self.model else self.variant or ("no mask" if self.mask == full else self.mask.name)]
        queries = (
            ""
            if self.len_q == self.len_k
            else f"{units.length(self.len_q)} {_plural(self.len_q, 'query', 'queries')}, "
        )
        if not self.model:
            parts.append(f"{queries}{units.length(self.len_k)} {'keys' if queries else 'tokens'}")
            parts.append("" if self.batch == 1 or not queries else f"batch {self.batch}")
            parts.append("" if self.group == 1 else f"{self.heads} heads on {self.heads_k}")
        parts.append("" if self.direction == "forward" else PASS_TITLES[self.direction])
        return ", ".join(part for part in parts if part)

    @property
    def learns_bias(self) -> bool:
        """Return whether the gradient of the bias is wanted, too."""
        return self.variant == variants.LEARNT_BIAS and self.direction != "forward"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def model_dim(self) -> int:
        return self.heads * self.dim

    @property
    def tokens(self) -> int:
        """Queries of all sequences."""
        return self.batch * self.len_q

    @property
    def causal(self) -> bool:
        return self.mask == causal

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """(left, right), of a mask that is a window."""
        if not self.mask.name.startswith("window("):
            return None
        left, right = self.mask.name.removeprefix("window(").removesuffix(")").split(",")
        return _side(left), _side(right)

    def problem(self, device: torch.device) -> Problem:
        return _problem(self, device)

    def pairs(self, device: torch.device) -> int:
        """Visible ones of all heads."""
        share = variants.visible_share(self)
        return self.problem(device).pairs() if share is None else round(share * self.score_elements())

    def flops(self, device: torch.device) -> int:
        """Return the operations of the matrix products. Forward has two (q k^T, p v); backward five (s again, dp, dq,
        dk, dv)."""
        pairs = self.pairs(device)
        forward, backward = 2 * (self.dim + self.value_dim) * pairs, 2 * (3 * self.dim + 2 * self.value_dim) * pairs
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]

    def ideal_bytes(self, device: torch.device) -> int:
        """Each input read once, each output written once."""
        forward = self.problem(device).bytes()
        backward = forward + self._qkvo_bytes()  # what the forward read and wrote; do, dq, dk, dv
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]

    def tensor_bytes(self) -> int:
        """Return the bytes that any attention has to hold: q, k, v and o; with gradients do, dq, dk and dv as well."""
        return self._qkvo_bytes() * (1 if self.direction == "forward" else 2)

    def _qkvo_bytes(self) -> int:
        """dq, dk, dv and do have the same shapes."""
        return self.tensor_elements() * self.torch_dtype.itemsize

    def q_bytes(self) -> int:
        return self.batch * self.heads * self.len_q * self.dim * self.torch_dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "label": self.label,
            "batch": self.batch,
            "heads": self.heads,
            "heads_k": self.heads_k,
            "len_q": self.len_q,
            "len_k": self.len_k,
            "dim": self.dim,
            "dim_v": self.value_dim,
            "mask": self.mask.name,
            "dtype": self.dtype,
            "direction": self.direction,
            "measure": self.measure,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "bias": self.bias is not None,
            "model": self.model,
            "variant": self.variant,
            "key": self.key,
            "model_dim": self.model_dim,
        }


@functools.lru_cache(maxsize=512)
def _problem(case: BenchCase, device: torch.device) -> Problem:
    functions = variants.functions(case, torch.device("meta"))
    if functions.score is None and (functions.mask is None or functions.tensor is not None):
        return problem_of(case, case.torch_dtype, device)
    mask = case.mask if functions.mask is None else case.mask & mask_function(functions.mask)
    a = resolved(Arguments(None, None, None, mask=mask, score=functions.score))
    q, k, v = case.shapes()
    return supposed(device, case.torch_dtype, q, k, v, mask=a.mask, score=a.score)


def _plural(n: int, one: str, many: str) -> str:
    return one if n == 1 else many


def _side(text: str) -> int | None:
    return None if text.strip() == "None" else int(text)


def case(
    suite: str, label: str, *, batch: int = 1, heads: int, length: int, dim: int, bias: bool = False, **more: Any
) -> BenchCase:
    """Return a case with as many key heads, keys and value columns as query heads, queries and query columns unless
    said otherwise."""
    values = {"heads_k": heads, "len_q": length, "len_k": length, "dim_v": dim} | more
    if isinstance(values.get("mask"), str):
        values["mask"] = mask_of(values["mask"])
    variant, pairs = values.get("variant"), (values["len_q"], values["len_k"])
    if variant is not None and variant not in variants.NAMES:
        raise ValueError(f"variant must be one of {', '.join(variants.NAMES)}, got {variant!r}")
    shape = (batch if variant == variants.LEARNT_BIAS else 1, heads, *pairs) if bias else None
    booleans = (batch, 1, *pairs) if variant == variants.BOOLEANS else None
    return BenchCase(
        name=label, suite=suite, batch=batch, heads=heads, dim=dim, bias=shape, mask_tensor=booleans, **values
    )
