"""A kernel's argument struct, written once: its C++ text, its layout, and the bytes that are sent."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strobe.cuda.runtime.driver import TENSOR_MAP_BYTES
from strobe.problem.arguments import ROWS
from strobe.variants.text import MOST_TENSORS

COUNTER = "counter"  # a tensor that no caller provides: COUNTERS zeros, zero again when the launch has ended
MOST_PARTS = 8  # that one launch merges
COUNTERS = 1024  # the first hands out tiles; a consumer of a tile whose keys are split has one of the others

_SCORED = tuple(f"score{i}" for i in range(MOST_TENSORS))  # captured tensors
_FIRST = ("q", "k", "v", "o", "lse", "sinks", "cu_q", "cu_k", "positions", "seed", COUNTER, "partial", "bias")
_STRIDES = [f"{t}_{axis}" for t in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for axis in ("batch", "head", "row")]
# Pointers come first, since they change with every call, then numbers, then tensor maps. Within each of these, fields that
# several parts declare come in this order, and others behind them, as the kernel declares them.
ORDER = (
    *_FIRST,
    *(*_SCORED, "mask_tensor", "dbias", *(f"d{name}" for name in _SCORED)),
    *(name for name, row in ROWS.items() if row.read is not None and name not in _FIRST),
    *("block_map", "work"),
    *("d_o", "dlse", "dq", "dk", "dv", "dsink", "dq_sum", "turns", "lse2", "delta", "dropout_rows"),
    *_STRIDES,
    *(f"{t}_strides" for t in (*_SCORED, "bias", "mask_tensor", "dbias")),
    *(f"{t}_strides" for t in ("k_new", "v_new", "slots", "positions", "part", "part_lse", "out", "lse")),
    *("cos_row", "sin_row", "rotary_rows", "rotary_half", "inner_rows", "new_rows", "key_chunks", "value_chunks"),
    *("lse_batch", "lse_head", "stat_rows"),
    *("row_blocks", "section", "splits", "tiles", "k_batch_rows", "v_batch_rows"),
    *("page_size", "pages", "table_width", "pieces", "items", "slot_rows"),
    *("key_blocks", "sections", "heads_k", "group_parts", "stat_blocks"),
    *("merge", "unscale", "scale_grad"),
    *("score", "scale_log2", "dropout_scale", "dropout_threshold", "score_integers"),
    *("map_batch", "map_head", "map_words", "map_heads", "map_tiles", "heads_in_one"),
    *("batch", "heads", "group", "len_q", "len_k", "dim", "dim_v", "mask"),
)
_PLACES = {name: place for place, name in enumerate(ORDER)}

# C type -> (format of the struct module, size, alignment). Any `X*` is a pointer; a tensor map is 128 opaque bytes.
_SCALARS = {
    "u64": ("Q", 8, 8),
    "i64": ("q", 8, 8),
    "u32": ("I", 4, 4),
    "int": ("i", 4, 4),
    "float": ("f", 4, 4),
    "u16": ("H", 2, 2),
    "TensorMap": (f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES, 64),
}


@dataclass(frozen=True)
class Field:
    name: str
    ctype: str
    count: int | None = None  # an array of so many; None: a single value

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name: {self.name!r} is not an identifier")
        if not self.ctype.endswith("*") and self.ctype not in _SCALARS:
            allowed = f"a pointer or one of {', '.join(_SCALARS)}"
            raise ValueError(f"ctype: {self.ctype!r} of field {self.name!r} is not {allowed}")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count: {self.count} of field {self.name!r} is not at least 1")

    @property
    def is_address(self) -> bool:
        """Return whether it changes with every call: the address of a tensor, or a seed."""
        return self.ctype.endswith("*") or self.name == "seed"

    @property
    def _scalar(self) -> tuple[str, int, int]:
        return ("Q", 8, 8) if self.ctype.endswith("*") else _SCALARS[self.ctype]

    @property
    def format(self) -> str:
        return self._scalar[0] * (self.count or 1)

    @property
    def size(self) -> int:
        return self._scalar[1] * (self.count or 1)

    @property
    def align(self) -> int:
        return self._scalar[2]

    def cpp(self) -> str:
        type_name = "strobe::TensorMap" if self.ctype == "TensorMap" else self.ctype
        return f"{type_name} {self.name}{'' if self.count is None else f'[{self.count}]'};"

    def values(self, value: Any) -> Sequence[Any]:
        """The value as the items that `format` packs."""
        if self.count is None:
            return (value,)
        if len(value) != self.count:
            raise ValueError(f"{self.name}: {len(value)} values given, the field holds {self.count}")
        return value


class Struct:
    """A C struct in C's layout: fields in order, each naturally aligned, the size a multiple of the largest."""

    def __init__(self, name: str, fields: Sequence[Field], align: int = 1) -> None:
        names = [field.name for field in fields]
        if not fields or len(set(names)) != len(names):
            raise ValueError(f"fields: {names} should be at least one field, each name once")
        if align & (align - 1):
            raise ValueError(f"align: {align} is not a power of two")
        self.name = name
        self.fields = tuple(fields)
        self._alignas = align
        self.align = max(align, *(field.align for field in fields))
        self.offsets: dict[str, int] = {}
        at = 0
        for field in fields:
            at += -at % field.align
            self.offsets[field.name] = at
            at += field.size
        self.size = at + -at % self.align
        self._by_name = {field.name: field for field in fields}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Struct) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    @property
    def _facts(self) -> tuple[object, ...]:
        return self.name, self.fields, self._alignas

    def cpp(self) -> str:
        """The struct's text. The assertion makes the compiler compare its size with the number that Python sends."""
        alignas = f"alignas({self._alignas}) " if self._alignas > 1 else ""
        lines = "".join(f"  {field.cpp()}\n" for field in self.fields)
        assertion = f'static_assert(sizeof({self.name}) == {self.size}, "not the {self.name} that the host sends");'
        return f"struct {alignas}{self.name} {{\n{lines}}};\n{assertion}\n"

    def pack(self, values: Mapping[str, Any]) -> bytearray:
        """All fields as bytes; padding is zero."""
        unused = {f.name: bytes(TENSOR_MAP_BYTES) for f in self.fields if f.ctype == "TensorMap"}
        values = {**unused, **values}  # a map that nobody uses may be missing
        missing = [name for name in self._by_name if name not in values]
        unknown = [name for name in values if name not in self._by_name]
        if missing or unknown:
            raise KeyError(f"{self.name}: fields missing: {missing or 'none'}; unknown: {unknown or 'none'}")
        buffer = bytearray(self.size)
        for name, field in self._by_name.items():
            try:
                struct.pack_into(f"<{field.format}", buffer, self.offsets[name], *field.values(values[name]))
            except (struct.error, TypeError) as error:
                message = f"{self.name}.{name} ({field.ctype}): {values[name]!r} does not fit: {error}"
                raise ValueError(message) from None
        return buffer

    def patcher(self, buffer: Any, *names: str) -> Callable[..., None]:
        """A fast `patch(*values)` that writes the named fields of this buffer: those that change from call to call.

        Names may come in any order. Neighbouring fields that are named in their order are written together.
        """
        unknown = [name for name in names if name not in self._by_name]
        if unknown or not names:
            raise KeyError(f"{self.name}: unknown fields {unknown}; it has {list(self._by_name)}")
        runs: list[tuple[int, str, int]] = []  # offset, format, number of values
        end = -1
        for name in names:
            field, at = self._by_name[name], self.offsets[name]
            if field.count is not None:
                raise ValueError(f"{self.name}.{name}: an array cannot be patched, only single values")
            if at == end:
                start, format, count = runs.pop()
                runs.append((start, format + field.format, count + 1))
            else:
                runs.append((at, field.format, 1))
            end = at + field.size
        if len(runs) == 1:
            offset, format, _ = runs[0]
            return functools.partial(struct.Struct(f"<{format}").pack_into, buffer, offset)
        writers = []
        first = 0
        for offset, format, count in runs:
            write = functools.partial(struct.Struct(f"<{format}").pack_into, buffer, offset)
            writers.append((write, slice(first, first + count)))
            first += count
        return functools.partial(_patch_runs, tuple(writers), len(names))


def _patch_runs(writers: tuple, expected: int, *values: Any) -> None:
    if len(values) != expected:
        raise TypeError(f"patch: {len(values)} values given, {expected} wanted")
    for write, part in writers:
        write(*values[part])


def params(*parts: Iterable[Field]) -> Struct:
    """`struct Params` of a kernel from the fields that its parts declare."""
    fields = {field.name: field for part in parts for field in part}
    for part in parts:
        for field in part:
            if fields[field.name] != field:
                raise ValueError(f"two parts declare {field.name!r} differently: {field} and {fields[field.name]}")
    return Struct("Params", sorted(fields.values(), key=_place))


def _place(field: Field) -> tuple[int, int]:
    kind = 0 if field.is_address else 2 if field.ctype == "TensorMap" else 1
    return kind, _PLACES.get(field.name, len(ORDER))
