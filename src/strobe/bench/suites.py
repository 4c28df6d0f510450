"""What is measured: cases as data, grouped into suites. Tests use the same cases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

import strobe
from strobe.mask import Mask
from strobe.problem import Problem, supposed

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PASSES = ("forward", "backward", "both")
MEASURES = ("time", "call", "graph", "compile")


@dataclass(frozen=True)
class Case:
    """One attention problem and what is measured of it."""

    suite: str
    label: str
    batch: int
    heads: int
    heads_k: int
    len_q: int
    len_k: int
    dim: int
    dim_v: int
    mask: str = "full"  # full, causal, window(left, right)
    dtype: str = "bfloat16"
    direction: str = "forward"  # one of PASSES
    measure: str = "time"  # of the device; "call": of the CPU, per call; "graph": of the device, replayed; "compile"
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    tile: tuple[int, int] | None = None  # (queries, keys) in a tile, for the study of tile sizes
    model: str | None = None  # whose shape it is

    @property
    def key(self) -> str:
        """Names the case in results of any run; what two runs are compared by."""
        parts = [self.suite, self.label, self.dtype, self.direction]
        return "/".join(parts + ([self.measure] if self.measure != "time" else []))

    @property
    def group(self) -> int:
        return self.heads // self.heads_k

    @property
    def model_dim(self) -> int:
        return self.heads * self.dim

    def mask_object(self) -> Mask:
        if self.mask in ("full", "causal"):
            return getattr(strobe, self.mask)
        left, right = self.mask.removeprefix("window(").removesuffix(")").split(",")
        return strobe.window(*(None if side.strip() == "None" else int(side) for side in (left, right)))

    def problem(self, device: torch.device) -> Problem:
        """The facts that FLOPs and bytes are counted from; tensors lie as (batch, length, heads, dim)."""
        q, k, v = (
            (self.batch, self.len_q, self.heads, self.dim),
            (self.batch, self.len_k, self.heads_k, self.dim),
            (self.batch, self.len_k, self.heads_k, self.dim_v),
        )
        options: dict[str, Any] = {"mask": self.mask_object(), "scale": self.scale, "softcap": self.softcap}
        if self.bias:
            options["bias"] = (1, self.heads, self.len_q, self.len_k)
        if self.sinks:
            options["sinks"] = (self.heads,)
        return supposed(device, DTYPES[self.dtype], q, k, v, **options)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def flops(self, device: torch.device) -> int:
        """Of the matrix products. Forward has two (q k^T, p v); backward five (s again, dp, dq, dk, dv)."""
        problem = self.problem(device)
        forward, backward = problem.flops(), 2 * (3 * self.dim + 2 * self.dim_v) * problem.pairs()
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]

    def ideal_bytes(self, device: torch.device) -> int:
        """Each input read once, each output written once."""
        forward = self.problem(device).bytes()
        o = self.batch * self.heads * self.len_q * self.dim_v * DTYPES[self.dtype].itemsize
        backward = forward + o + (self.tensor_bytes() - o)  # what the forward read and wrote, and do; dq, dk, dv
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]

    def tensor_bytes(self) -> int:
        """q, k, v and o: what any attention has to hold."""
        queries = self.batch * self.heads * self.len_q * (self.dim + self.dim_v)
        keys = self.batch * self.heads_k * self.len_k * (self.dim + self.dim_v)
        return (queries + keys) * DTYPES[self.dtype].itemsize

    def score_elements(self) -> int:
        """Of the matrix that standard attention stores."""
        return self.batch * self.heads * self.len_q * self.len_k

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "key": self.key, "model_dim": self.model_dim}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Case:
        known = {field.name for field in dataclasses.fields(Case)}
        values = {name: value for name, value in data.items() if name in known}
        if values.get("tile") is not None:
            values["tile"] = tuple(values["tile"])
        return Case(**values)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def case(suite: str, label: str, *, batch: int = 1, heads: int, length: int, dim: int, **more: Any) -> Case:
    """With as many key heads, keys and value columns as query heads, queries and query columns unless said
    otherwise."""
    values = {"heads_k": heads, "len_q": length, "len_k": length, "dim_v": dim} | more
    return Case(suite=suite, label=label, batch=batch, heads=heads, dim=dim, **values)


# ---- the suites
# --------------------------------------------------------------------------------------------------------

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def grid36(direction: str = "forward") -> list[Case]:
    """3 head dims x 2 masks x 6 lengths; 16384 tokens in all, heads x dim = 2048."""
    return [
        case(
            "grid36",
            f"d{dim}-{mask}-{_short(n)}",
            batch=16384 // n,
            heads=2048 // dim,
            length=n,
            dim=dim,
            mask=mask,
            direction=direction,
        )
        for dim in (64, 128, 256)
        for mask in ("full", "causal")
        for n in LENGTHS
    ]


def sweep(direction: str = "forward") -> list[Case]:
    """Length against model dimension, one sequence: where memory grows, and with it the distance to standard
    attention."""
    return [
        case(
            "sweep",
            f"m{model}-{mask}-{_short(n)}",
            heads=model // 128,
            length=n,
            dim=128,
            mask=mask,
            direction=direction,
        )
        for model in (1024, 2048, 4096, 8192)
        for mask in ("full",)
        for n in (1024, 2048, 4096, 8192, 16384, 32768)
    ]


def gqa(direction: str = "forward") -> list[Case]:
    """Fewer key heads than query heads; few queries against a long cache."""
    grouped = [
        case(
            "gqa",
            f"{heads}h{heads_k}-{mask}-{_short(n)}",
            batch=2,
            heads=heads,
            heads_k=heads_k,
            length=n,
            dim=128,
            mask=mask,
            direction=direction,
        )
        for heads, heads_k in ((64, 8), (32, 8), (32, 1))
        for mask in ("full", "causal")
        for n in (2048, 8192)
    ]
    if direction != "forward":
        return grouped
    # One query; several, guessed ahead; a piece of a prompt against what came before it. Masks would hide next to
    # nothing.
    against_a_cache = [
        ("decode-b1", 1, 64, 1, 32768),
        ("decode-b16", 16, 64, 1, 8192),
        ("decode-b128", 128, 64, 1, 4096),
        ("guess8-b1", 1, 64, 8, 32768),
        ("guess8-b16", 16, 64, 8, 8192),
        ("piece256-8h1", 1, 8, 256, 32768),
        ("piece256-64h8", 1, 64, 256, 32768),
    ]
    return grouped + [
        case(
            "gqa", f"{name}-{_short(n)}", batch=batch, heads=heads, heads_k=heads // 8, length=length, len_k=n, dim=128
        )
        for name, batch, heads, length, n in against_a_cache
    ]


def models(direction: str = "forward") -> list[Case]:
    """Shapes of models people run, with what their attention adds: windows, softcaps, sinks, biases."""
    shapes: list[tuple[str, str, dict[str, Any]]] = [
        ("llama3-8b", "Llama 3 8B", {"heads": 32, "heads_k": 8, "length": 8192, "dim": 128, "mask": "causal"}),
        ("llama3-70b", "Llama 3 70B", {"heads": 64, "heads_k": 8, "length": 8192, "dim": 128, "mask": "causal"}),
        (
            "gemma2-global",
            "Gemma 2 9B, global",
            {"heads": 16, "heads_k": 8, "length": 8192, "dim": 256, "mask": "causal", "softcap": 50.0},
        ),
        (
            "gemma2-local",
            "Gemma 2 9B, local",
            {"heads": 16, "heads_k": 8, "length": 8192, "dim": 256, "mask": "window(4095, 0)", "softcap": 50.0},
        ),
        (
            "gemma3-local",
            "Gemma 3 27B, local",
            {"heads": 32, "heads_k": 16, "length": 8192, "dim": 128, "mask": "window(1023, 0)"},
        ),
        (
            "deepseek-v3",
            "DeepSeek-V3, prefill",
            {"heads": 128, "length": 4096, "dim": 192, "dim_v": 128, "mask": "causal"},
        ),
        (
            "gpt-oss-full",
            "gpt-oss, full",
            {"heads": 64, "heads_k": 8, "length": 8192, "dim": 64, "mask": "causal", "sinks": True},
        ),
        (
            "gpt-oss-local",
            "gpt-oss, local",
            {"heads": 64, "heads_k": 8, "length": 8192, "dim": 64, "mask": "window(127, 0)", "sinks": True},
        ),
        ("vit-l-224", "ViT-L/16, 224 pixels", {"batch": 64, "heads": 16, "length": 197, "dim": 64}),
        ("vit-l-384", "ViT-L/16, 384 pixels", {"batch": 32, "heads": 16, "length": 577, "dim": 64}),
        ("t5-large", "T5 large encoder", {"batch": 16, "heads": 16, "length": 512, "dim": 64, "bias": True}),
    ]
    return [case("models", label, model=model, direction=direction, **shape) for label, model, shape in shapes]


def overhead(direction: str = "forward") -> list[Case]:
    """Short lengths: what one call costs the CPU, and what the device needs when a graph replays it."""
    return [
        case("overhead", f"d128-{n}", heads=16, length=n, dim=128, measure=measure, direction=direction)
        for n in (16, 128, 256, 512, 1024)
        for measure in ("call", "graph")
        if direction == "forward" or measure == "call"
    ]


def tiles(direction: str = "forward") -> list[Case]:
    """Queries x keys in a tile, for our backends whose tiles can be chosen."""
    return [
        case(
            "tiles",
            f"d{dim}-{mask}-{_short(n)}-{bq}x{bk}",
            heads=16,
            length=n,
            dim=dim,
            mask=mask,
            tile=(bq, bk),
            direction=direction,
        )
        for dim in (64, 128)
        for mask, n in (("full", 4096),)
        for bq in (64, 128, 192)
        for bk in (32, 64, 96, 128)
    ]


def ladder(direction: str = "forward") -> list[Case]:
    """The shape of `strobe ladder`, and a shorter one, in the two dtypes that rungs are written for."""
    return [
        case(
            "ladder",
            f"d{dim}-{mask}-{_short(n)}",
            heads=16,
            length=n,
            dim=dim,
            mask=mask,
            dtype=dtype,
            direction=direction,
        )
        for dtype in ("float32", "bfloat16")
        for dim in (64, 128)
        for mask in ("full", "causal")
        for n in (1024, 4096)
    ]


def compile(direction: str = "forward") -> list[Case]:
    """Compile times of our kernels, first and cached, and first calls of a process; lengths do not matter."""
    return [
        case(
            "compile", f"d{dim}-{mask}", heads=8, length=512, dim=dim, mask=mask, measure="compile", direction=direction
        )
        for dim in (64, 128, 256)
        for mask in ("full", "causal")
    ]


def cpu(direction: str = "forward") -> list[Case]:
    return [
        case(
            "cpu", f"d{dim}-{mask}-{_short(n)}", heads=4, length=n, dim=dim, mask=mask, dtype=dtype, direction=direction
        )
        for dtype in ("float32", "bfloat16")
        for dim in (64, 128)
        for mask in ("full", "causal")
        for n in (512, 1024, 2048, 4096)
    ]


def quick(direction: str = "forward", on_gpu: bool = False) -> list[Case]:
    """A look at everything: the lengths over which standard attention falls behind, a backward, a call, tile sizes."""
    if on_gpu:
        made = [
            case(
                "quick",
                f"d128-{mask}-{_short(n)}",
                batch=max(1, 8192 // n),
                heads=16,
                length=n,
                dim=128,
                mask=mask,
                direction=direction,
            )
            for mask in ("full", "causal")
            for n in (1024, 4096, 16384)
        ]
    else:
        made = [
            case(
                "quick",
                f"d64-{mask}-{_short(n)}",
                heads=2,
                length=n,
                dim=64,
                mask=mask,
                dtype="float32",
                direction=direction,
            )
            for mask, lengths in (("full", (256, 512, 1024, 2048)), ("causal", (512, 2048)))
            for n in lengths
        ]
    dtype = "bfloat16" if on_gpu else "float32"
    if direction == "forward":
        made.append(
            case(
                "quick", "d64-causal-1k", heads=4, length=1024, dim=64, mask="causal", dtype=dtype, direction="backward"
            )
        )
        made.append(case("quick", "d64-128", heads=4, length=128, dim=64, dtype=dtype, measure="call"))
        sides = ((64, 128), (64, 128)) if on_gpu else ((64, 256, 1024), (64, 1024))
        made += [
            case("quick", f"d64-full-1k-{bq}x{bk}", heads=2, length=1024, dim=64, dtype=dtype, tile=(bq, bk))
            for bq in sides[0]
            for bk in sides[1]
        ]
    return made


SUITES = {
    "grid36": grid36,
    "sweep": sweep,
    "gqa": gqa,
    "models": models,
    "overhead": overhead,
    "tiles": tiles,
    "ladder": ladder,
    "compile": compile,
    "cpu": cpu,
    "quick": quick,
}


def cases(suite: str, direction: str = "forward", on_gpu: bool = False) -> list[Case]:
    """The cases of a suite. Raises ValueError for a name there is not."""
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    if direction not in PASSES:
        raise ValueError(f"direction must be one of {', '.join(PASSES)}, got {direction!r}")
    return quick(direction, on_gpu) if suite == "quick" else SUITES[suite](direction)
