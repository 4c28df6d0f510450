"""Inputs of `strobe demo`: made by a rule, or read from a file. Always (1, length, heads, dim)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

RULES = ("uniform", "normal", "ones", "ramp")
FILES = (".pt", ".npy", ".npz", ".txt", ".csv")


class QKV(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def made(rule: str, length: int, heads: int, dim: int, seed: int) -> QKV:
    """uniform in [-1, 1), normal (0, 1), ones, or a ramp that rises from 0 to 1 over all the numbers of a tensor."""
    shape = (1, length, heads, dim)
    generator = torch.Generator().manual_seed(seed)
    if rule == "uniform":
        return QKV(*(torch.rand(shape, generator=generator) * 2 - 1 for _ in range(3)))
    if rule == "normal":
        return QKV(*(torch.randn(shape, generator=generator) for _ in range(3)))
    if rule == "ones":
        return QKV(*(torch.ones(shape) for _ in range(3)))
    if rule == "ramp":
        return QKV(*(torch.linspace(0, 1, length * heads * dim).reshape(shape) for _ in range(3)))
    raise ValueError(f"--init must be one of {', '.join(RULES)} or a file ({', '.join(FILES)}), got {rule!r}")


def read(path: Path) -> QKV:
    """One matrix (length, dim) or (length, heads, dim), used as q, k and v alike; or, in .pt and .npz files, three of
    them named q, k and v. In .txt and .csv a line is a row, its numbers separated by blanks or commas; # begins a
    comment."""
    if not path.is_file():
        raise ValueError(f"--init: there is no file {path}; or did you mean one of {', '.join(RULES)}?")
    if path.suffix not in FILES:
        raise ValueError(f"--init: {path} has to end in one of {', '.join(FILES)}")
    content = _from_text(path) if path.suffix in (".txt", ".csv") else _from_binary(path)
    if isinstance(content, dict):
        missing = [name for name in QKV._fields if name not in content]
        if missing:
            raise ValueError(f"--init: {path} holds {sorted(map(str, content))}, but no {', '.join(missing)}")
        matrices = [content[name] for name in QKV._fields]
    else:
        matrices = [content] * 3
    q, k, v = (_as_4d(path, name, t) for name, t in zip(QKV._fields, matrices, strict=True))
    if q.shape[2:] != k.shape[2:] or k.shape[1:3] != v.shape[1:3]:
        shapes = ", ".join(f"{name} {tuple(t.shape[1:])}" for name, t in zip(QKV._fields, (q, k, v), strict=True))
        raise ValueError(f"--init: the matrices in {path} do not go together as (length, heads, dim): {shapes}")
    return QKV(q, k, v)


def _as_4d(path: Path, name: str, t: object) -> torch.Tensor:
    if not isinstance(t, torch.Tensor) or not (t.dtype.is_floating_point or t.dtype in (torch.int32, torch.int64)):
        raise ValueError(f"--init: {name} in {path} is not a tensor of numbers")
    if t.dim() not in (2, 3) or t.numel() == 0:
        raise ValueError(
            f"--init: {name} in {path} has shape {tuple(t.shape)}, not (length, dim) or (length, heads, dim)"
        )
    t = t.float()
    if count := int((~torch.isfinite(t)).sum()):
        raise ValueError(f"--init: {count} of {t.numel()} numbers of {name} in {path} are NaN or infinite")
    return (t if t.dim() == 3 else t[:, None])[None].contiguous()


def _from_binary(path: Path) -> object:
    try:
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
        import numpy

        loaded = numpy.load(path, allow_pickle=False)
        if path.suffix == ".npy":
            return torch.from_numpy(loaded)
        return {name: torch.from_numpy(loaded[name]) for name in loaded.files}
    except ImportError:
        raise ValueError(
            f"--init: reading {path.suffix} files needs numpy; install it, or use .pt, .txt or .csv"
        ) from None
    except Exception as error:  # whatever unpickling or unzipping makes of a file that is not what its name says
        raise ValueError(f"--init: {path} cannot be read as {path.suffix}: {str(error).splitlines()[0]}") from None


def _from_text(path: Path) -> torch.Tensor:
    rows: list[list[float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            rows.append([float(word) for word in words])
        except ValueError:
            raise ValueError(
                f"--init: line {number} of {path} is not a row of numbers: {line.strip()[:60]!r}"
            ) from None
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"--init: line {number} of {path} has {len(rows[-1])} numbers, the first row has {len(rows[0])}"
            )
    if not rows:
        raise ValueError(f"--init: {path} holds no numbers")
    return torch.tensor(rows)
