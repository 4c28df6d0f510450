"""Who is measured. Each provider can say, before anything runs, why it cannot; what it raises later becomes its row as
well."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import strobe
from strobe.backends import dispatch
from strobe.bench.exactness import Tensors
from strobe.bench.results import KINDS
from strobe.bench.suites import DTYPES, Case
from strobe.tiled import block_sizes

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Scope = Callable[[], contextlib.AbstractContextManager[Any]]
ON_REQUEST = ("ladder",)  # kinds that are not measured unless asked for by name, kind or prefix


class Refusal(Exception):
    """A provider does not run a case; `status` is one of results.STATUSES."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class Prepared:
    """A forward call in the provider's own layout, and what has to be set while it runs."""

    forward: Forward
    layout: str = "bhsd"  # "bhsd", "bshd", "sbhd"
    scope: Scope = contextlib.nullcontext
    note: str | None = None


@dataclass(frozen=True)
class Provider:
    name: str
    kind: str  # one of results.KINDS
    summary: str
    prepare: Callable[[Case, Tensors], Prepared]  # raises Refusal
    matrices: Callable[[Case], int] = field(
        default=lambda case: 0
    )  # bytes of the N x N matrices it holds at one time, at least
    kernels: str | None = None  # a regular expression that some kernel's name on a GPU must match
    differentiable: bool = True
    cannot: Callable[[Case, torch.device], str | None] = field(
        default=lambda case, device: None
    )  # known without tensors
    skipped: Callable[[Case, torch.device], str | None] = field(
        default=lambda case, device: None
    )  # unless named: why not
    roundings: Callable[[Case], float] = field(default=lambda case: 0.0)  # see Judge.judge
    compiles: bool = False  # each new shape costs seconds
    tiles: bool = False  # can take a tile size
    device: str | None = None  # the only kind it runs on


# ---- layouts
# -----------------------------------------------------------------------------------------------------------

_TO = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}
_BACK = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


def to_layout(t: torch.Tensor, layout: str) -> torch.Tensor:
    """From (batch, heads, length, dim), contiguous in the new order."""
    return t.permute(_TO[layout]).contiguous()


def from_layout(t: torch.Tensor, layout: str) -> torch.Tensor:
    return t.permute(_BACK[layout])


def dense_mask(case: Case, device: torch.device) -> torch.Tensor | None:
    """For those who can only be told a mask in full; None if nothing is hidden."""
    return None if case.mask == "full" else case.mask_object().dense(case.len_q, case.len_k, device)


def lacking(case: Case, **features: str) -> str | None:
    """The reason given for the first of these features that a case has: softcap, sinks, bias, window, unequal, …"""
    has = {
        "softcap": case.softcap is not None,
        "sinks": case.sinks,
        "bias": case.bias,
        "window": case.mask.startswith("window"),
        "unequal": case.dim != case.dim_v,
        "gradients": case.direction != "forward",
        "float32": case.dtype == "float32",
    }
    return next((reason for feature, reason in features.items() if has[feature]), None)


def refuse(case: Case, **features: str) -> None:
    """Raises for what a provider lacks, with the reasons of `lacking`."""
    if (reason := lacking(case, **features)) is not None:
        raise Refusal("unsupported", reason)


# ---- ours
# --------------------------------------------------------------------------------------------------------------


def _ours(backend: str) -> Callable[[Case, Tensors], Prepared]:
    def prepare(case: Case, x: Tensors) -> Prepared:
        device = x.q.device
        found = dispatch.get(backend)
        if (reason := found.supports(case.problem(device))) is not None:
            raise Refusal("unsupported", reason)
        note = None
        if case.direction != "forward":
            backward = dispatch.choose_backward(case.problem(device).backward(("q", "k", "v")), found)
            note = None if backward is found else f"the gradients are computed by the backend {backward.name}"
        options: dict[str, Any] = {
            "mask": case.mask_object(),
            "softcap": case.softcap,
            "bias": x.bias,
            "sinks": x.sinks,
            "backend": backend,
        }
        if case.tile is not None:
            return _with_tile(backend, case, device, options)
        return Prepared(lambda q, k, v: strobe.attention(q, k, v, **options), "bshd", note=note)

    return prepare


def _with_tile(backend: str, case: Case, device: torch.device, options: dict[str, Any]) -> Prepared:
    assert case.tile is not None
    block_q, block_k = case.tile
    if backend == "tiled":
        return Prepared(
            lambda q, k, v: strobe.attention(q, k, v, **options),
            "bshd",
            scope=lambda: block_sizes(block_q, block_k),
        )
    from strobe.cuda import backend as cuda_backend, forward_sm80, forward_sm90
    from strobe.cuda.launch import Launcher

    shape = (case.batch, case.len_q, case.heads, case.dim_v)
    strides = (case.len_q * case.heads * case.dim_v, case.dim_v, case.heads * case.dim_v)
    machine = cuda_backend.machine_of(device)
    if backend == "sm90":
        hopper = forward_sm90.Tile(consumers=block_q // 64, block_n=block_k, q_slots=1)
        made = forward_sm90.plan(case.problem(device), strides, machine, hopper)
    else:
        ampere = forward_sm80.Tile(block_q, block_k, warps=4, stages=1, blocks_per_sm=1)
        made = forward_sm80.plan(case.problem(device), strides, machine, ampere)
    wanted, limit = made.launches[0].kernel.smem, machine.smem_bytes
    if wanted > limit:
        raise Refusal("unsupported", f"the tile needs {wanted} bytes of shared memory, a block has {limit}")
    launch = Launcher(made, device.index or 0)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
        launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, 0, 0, 0, 0)
        return out

    return Prepared(forward, "bshd")


def _slow_unless_named(backend: str) -> Callable[[Case, torch.device], str | None]:
    def why(case: Case, device: torch.device) -> str | None:
        if backend == "emulator":
            return "emulated, thousands of times slower than anything else; name it to time it"
        if backend == "reference" and case.len_q * case.len_k > 1 << 18:
            return "the oracle stores the whole matrix in float64; name it to time it"
        if (
            backend == "tiled"
            and device.type == "cuda"
            and case.tile is None
            and case.direction == "forward"
            and case.suite != "quick"
        ):
            return "on a GPU the tiles written in PyTorch stand in for missing features; name it to time it"
        return None

    return why


def ours() -> list[Provider]:
    needs = {"sm80": "cuda", "sm90": "cuda", "aten_cpu": "cpu", "emulator": "cpu"}
    return [
        Provider(
            f"strobe-{name}",
            "ours",
            dispatch.get(name).summary,
            _ours(name),
            skipped=_slow_unless_named(name),
            matrices=(lambda case: 16 * case.score_elements()) if name == "reference" else (lambda case: 0),
            kernels="kernel" if needs.get(name) == "cuda" else None,
            tiles=name in ("tiled", "sm80", "sm90"),
            device=needs.get(name),
        )
        for name in dispatch.NAMES
    ]


# ---- PyTorch's scaled_dot_product_attention
# ----------------------------------------------------------------------------


@contextlib.contextmanager
def _sdpa_scope(backend: str, half: bool) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() if half else False
    if half:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with sdpa_kernel(getattr(SDPBackend, backend)):
                yield
    finally:
        if half:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _sdpa(backend: str, half: bool = False) -> Callable[[Case, Tensors], Prepared]:
    def prepare(case: Case, x: Tensors) -> Prepared:
        refuse(case, softcap="no softcap", sinks="no sinks")
        device = x.q.device
        if device.type != "cuda" and backend in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            raise Refusal("unsupported", f"needs an NVIDIA GPU, the tensors are on {device.type}")
        if half and (device.type != "cuda" or case.dtype == "float32"):
            raise Refusal(
                "unsupported", "a setting for 16-bit inputs on NVIDIA GPUs; here it would be the same as torch-math"
            )
        causal = case.mask == "causal" and case.len_q == case.len_k
        mask = None if causal else dense_mask(case, device)
        if x.bias is not None:
            mask = x.bias if mask is None else x.bias.masked_fill(~mask, -torch.inf)
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": causal,
            "scale": case.scale,
            "enable_gqa": case.group > 1,
        }
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return Prepared(lambda q, k, v: sdpa(q, k, v, **options), scope=lambda: _sdpa_scope(backend, half))

    return prepare


def why_no_kernel(backend: str, case: Case, x: Tensors, prepared: Prepared) -> str:
    """PyTorch raises "no available kernel" and warns why; the warnings are the reason."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError), sdpa_kernel(getattr(SDPBackend, backend)):
            prepared.forward(x.q, x.k, x.v)
    texts = [str(w.message).split("(Triggered")[0].strip() for w in caught]
    useful = [
        t
        for t in texts
        if "was not enabled" not in t and "kernel not used because" not in t and "has been runtime disabled" not in t
    ]
    return "; ".join(dict.fromkeys(useful)) or "PyTorch has no such kernel for this problem"


SDPA_BACKENDS = {
    "torch-flash": "FLASH_ATTENTION",
    "torch-efficient": "EFFICIENT_ATTENTION",
    "torch-cudnn": "CUDNN_ATTENTION",
}


def _width(case: Case) -> int:
    return DTYPES[case.dtype].itemsize


def torch_providers() -> list[Provider]:
    math = "PyTorch's math backend"
    return [
        Provider("torch-cudnn", "peer", "PyTorch's cuDNN backend", _sdpa("CUDNN_ATTENTION"), kernels="cudnn|sdpa"),
        Provider(
            "torch-flash",
            "peer",
            "PyTorch's flash backend (FlashAttention-2)",
            _sdpa("FLASH_ATTENTION"),
            kernels="flash",
        ),
        Provider(
            "torch-efficient",
            "peer",
            "PyTorch's memory-efficient backend (CUTLASS)",
            _sdpa("EFFICIENT_ATTENTION"),
            kernels="fmha|efficient|attention_kernel",
        ),
        Provider(
            "torch-math",
            "standard",
            f"{math}, which computes 16-bit inputs in fp32",
            _sdpa("MATH"),
            matrices=lambda c: 8 * c.score_elements(),
        ),
        Provider(
            "torch-math-half",
            "standard",
            f"{math} in half precision",
            _sdpa("MATH", half=True),
            matrices=lambda c: 2 * _width(c) * c.score_elements(),
        ),
    ]


# ---- softmax(q k^T) v, as written
# --------------------------------------------------------------------------------------


def _textbook(case: Case, x: Tensors) -> Forward:
    visible = dense_mask(case, x.q.device)
    hidden = None if visible is None else ~visible

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if case.group > 1:
            k, v = (t.repeat_interleave(case.group, 1) for t in (k, v))
        s = (q * case.scale) @ k.mT
        if case.softcap is not None:
            s = case.softcap * torch.tanh(s / case.softcap)
        if x.bias is not None:
            s = s + x.bias
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        if x.sinks is not None:
            s = torch.cat([s, x.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
        return torch.softmax(s, -1)[..., : case.len_k] @ v

    return forward


def _eager(case: Case, x: Tensors) -> Prepared:
    return Prepared(_textbook(case, x))


def keep_buffers() -> None:
    """Compiled backward passes may overwrite what the forward saved, which forbids timing them again and again."""
    from torch._functorch import config

    config.donated_buffer = False


def _compiled(case: Case, x: Tensors) -> Prepared:
    torch._dynamo.reset()
    keep_buffers()
    return Prepared(torch.compile(_textbook(case, x), dynamic=False))


def _costs_a_compilation(case: Case, device: torch.device) -> str | None:
    return "compiling takes seconds per shape; name it to time it"


def eager_providers() -> list[Provider]:
    matrices = lambda c: 2 * _width(c) * c.score_elements()  # noqa: E731
    return [
        Provider("eager", "standard", "softmax(q kᵀ) v in PyTorch", _eager, matrices=matrices),
        Provider(
            "eager-compiled",
            "standard",
            "the same under torch.compile",
            _compiled,
            matrices=lambda c: _width(c) * c.score_elements(),
            skipped=_costs_a_compilation,
            compiles=True,
        ),
    ]


def every() -> list[Provider]:
    """All there are, ours first."""
    from strobe.bench import peers, rungs, standard_cuda

    others = [*torch_providers(), *eager_providers(), *standard_cuda.providers(), *peers.providers()]
    return [*ours(), *rungs.providers(), *others]


def select(names: list[str] | None) -> list[Provider]:
    """By name, or all but those of kinds that wait to be asked for. A name may also be a kind ("ours", "ladder",
    "standard", "peer") or a prefix ("torch", "strobe", "ladder-05")."""
    found = every()
    if not names:
        return [p for p in found if p.kind not in ON_REQUEST]
    chosen: list[Provider] = []
    for name in names:
        hits = [p for p in found if name in (p.name, p.kind)] or [p for p in found if p.name.startswith(f"{name}-")]
        if not hits:
            raise ValueError(
                f"provider must be one of {', '.join(p.name for p in found)}, "
                f"a kind ({', '.join(KINDS)}) or a prefix, got {name!r}"
            )
        chosen += [p for p in hits if p not in chosen]
    return chosen
