"""Our backends as providers."""

from __future__ import annotations

from typing import Any

import torch

import strobe
from strobe.backends import dispatch
from strobe.bench import variants
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.provider import Prepare, Prepared, Provider, Reason, Refusal
from strobe.cuda.parts.kernel import PREFIX
from strobe.tiled import block_sizes

_NEEDS = {"sm80": "cuda", "sm90": "cuda", "aten_cpu": "cpu", "emulator": "cpu"}


def _prepare(backend: str) -> Prepare:
    def prepare(case: BenchCase, x: Tensors) -> Prepared:
        device = x.q.device
        found = dispatch.get(backend)
        if (reason := found.supports(case.problem(device))) is not None:
            raise Refusal("unsupported", reason)
        note = None
        if case.direction != "forward":
            wanted = ("q", "k", "v", "bias") if case.learns_bias else ("q", "k", "v")
            backward = dispatch.choose_backward(case.problem(device).backward(wanted), found)
            note = None if backward is found else f"the gradients are computed by the backend {backward.name}"
        options: dict[str, Any] = {
            "mask": _mask(case, device),
            "score": variants.functions(case, device).score,
            "softcap": case.softcap,
            "bias": x.bias,
            "sinks": x.sinks,
            "layout": "bshd",
            "backend": backend,
        }
        if case.tile is not None:
            return _with_tile(backend, case, device, options)
        return Prepared(lambda q, k, v: strobe.attention(q, k, v, **options), "bshd", note=note)

    return prepare


def _mask(case: BenchCase, device: torch.device) -> Any:
    """Blocks of a function are found once, before anything is timed, as FlexAttention's are."""
    functions = variants.functions(case, device)
    if functions.mask is None:
        return case.mask
    if functions.tensor is not None:
        return functions.tensor
    mask = case.mask & strobe.mask_function(functions.mask)
    return strobe.block_mask(mask, case.batch, case.heads, case.len_q, case.len_k)


def _with_tile(backend: str, case: BenchCase, device: torch.device, options: dict[str, Any]) -> Prepared:
    assert case.tile is not None
    block_q, block_k = case.tile
    if backend != "tiled" and case.direction != "forward":
        raise Refusal(
            "unsupported", "this suite sets tiles of the forward; `strobe tune --pass backward` times the others"
        )
    if backend == "tiled":
        return Prepared(
            lambda q, k, v: strobe.attention(q, k, v, **options),
            "bshd",
            scope=lambda: block_sizes(block_q, block_k),
        )
    from strobe.cuda import backend as cuda_backend
    from strobe.cuda.launch import Launcher, addresses_of
    from strobe.cuda.plans import forward_sm80, forward_sm90

    shape = (case.batch, case.len_q, case.heads, case.value_dim)
    strides = (case.len_q * case.heads * case.value_dim, case.value_dim, case.heads * case.value_dim)
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
        launch(*addresses_of(made, {"q": q, "k": k, "v": v, "o": out}))
        return out

    return Prepared(forward, "bshd")


def _slow_unless_named(backend: str) -> Reason:
    def why(case: BenchCase, device: torch.device) -> str | None:
        if backend == "emulator":
            return "emulated, thousands of times slower than anything else; name it to time it"
        if backend == "reference" and case.len_q * case.len_k > 1 << 18:
            return "the oracle stores the whole matrix in float64; name it to time it"
        plain = case.tile is None and case.suite != "quick"
        if backend == "tiled" and device.type == "cuda" and plain:
            return "on a GPU the tiles written in PyTorch stand in for missing features; name it to time it"
        return None

    return why


def providers() -> list[Provider]:
    return [
        Provider(
            f"strobe-{name}",
            "ours",
            dispatch.get(name).summary,
            _prepare(name),
            skipped=_slow_unless_named(name),
            matrices=(lambda case: 16 * case.score_elements()) if name == "reference" else (lambda case: 0),
            kernels=f"^{PREFIX}" if _NEEDS.get(name) == "cuda" else None,
            tiles=name in ("tiled", "sm80", "sm90"),
            functions=True,
            device=_NEEDS.get(name),
        )
        for name in dispatch.NAMES
    ]
