"""Results from a file. Every field must have its type; an error names the one that has not."""

import dataclasses
import functools
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from strobe.bench.case import DTYPES, MEASURES, BenchCase, case
from strobe.bench.names import PASSES
from strobe.bench.results import SCHEMA, STATUSES, Ceilings, Results, Row
from strobe.measure.method import METHODS
from strobe.measure.palette import KINDS

# Objects: field -> type. A name that ends in "?" may be missing, and fields that are not here are kept as they are.
_TEXT, _COUNT = str | None, int | None
_DEVICE: dict[str, Any] = {"kind": str, "name": str, "arch?": _TEXT}
_DEVICE |= dict.fromkeys(("memory_bytes?", "multiprocessors?", "l2_bytes?"), _COUNT)
_PROVENANCE: dict[str, Any] = dict.fromkeys(("strobe", "date", "command", "torch"), str)
_PROVENANCE |= {"git": {"commit": _TEXT, "dirty": bool | None}, "device": _DEVICE}
_PROVENANCE |= {"driver?": _TEXT, "cuda?": _TEXT, "nvrtc?": _TEXT, "cudnn?": _COUNT, "seed?": int}
_PROVENANCE |= dict.fromkeys(("python?", "system?", "host_cpu?"), str) | {
    "host_cores?": int,
    "host_load?": float | None,
}
_PROVENANCE |= dict.fromkeys(("packages?", "environment?"), dict[str, str])
_METHOD: dict[str, Any] = {"budget_ms?": float, "rounds?": int, "warmup_ms?": float, "l2?": _TEXT}
_SIZES = ("batch", "heads", "heads_k", "len_q", "len_k", "dim", "dim_v")
_CASE: dict[str, Any] = {"suite": str, "label": str, **dict.fromkeys(_SIZES, int), "softcap?": float | None}
_CASE |= dict.fromkeys(("mask?", "dtype?", "direction?", "measure?"), str) | {"sinks?": bool, "bias?": bool}
_CASE |= dict.fromkeys(("model?", "variant?"), _TEXT)
_FILE: dict[str, Any] = {"complete": bool, "seconds": float | None, "provenance": _PROVENANCE, "method": _METHOD}
_FILE |= {"ceilings": Ceilings, "clocks": dict[str, Any], "rows": list[Any]}

_WANTED = "wanted is a file that `strobe bench --out FILE` wrote"


def load(path: Path) -> Results:
    """Raises ValueError, naming the file, for anything that is not a result."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error}); {_WANTED}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def from_json(data: Any) -> Results:
    if not isinstance(data, dict):
        raise ValueError(
            f"not a result of `strobe bench`: a JSON object is expected, this is a {type(data).__name__}; {_WANTED}"
        )
    kind, schema = data.get("kind"), data.get("schema")
    if kind != "strobe bench" or schema != SCHEMA:
        raise ValueError(
            f"not a result of `strobe bench` with schema {SCHEMA}: kind {kind!r}, schema {schema!r}; {_WANTED}"
        )
    fields = _checked(_FILE, data, "")
    results = Results(
        provenance=fields["provenance"],
        method=fields["method"],
        ceilings=fields["ceilings"],
        clocks=fields["clocks"],
        complete=fields["complete"],
        seconds=fields["seconds"],
    )
    results.rows = [_row(entry, f"rows[{i}]") for i, entry in enumerate(fields["rows"])]
    return results


def _row(data: Any, where: str) -> Row:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, got {data!r:.60}")
    data = dict(data)
    if isinstance(error := data.get("error"), dict):
        numbers = ("largest", "relative", "allowed")  # a NaN is stored as null: JSON has none
        data["error"] = error | {name: math.nan for name in numbers if name in error and error[name] is None}
    data["case"] = _case(data.get("case"), f"{where}.case")
    row = _built(Row, data, where)
    _one_of(row.kind, KINDS, f"{where}.kind")
    _one_of(row.status, STATUSES, f"{where}.status")
    _one_of(row.method, METHODS, f"{where}.method")
    for name, value in (("timing.ms", row.ms), ("tflops", row.tflops)):
        if value is not None and value <= 0:
            raise ValueError(f"{where}.{name} must be positive, got {value}")
    if row.timing is not None and min(row.timing.summary.low, row.timing.summary.high) <= 0:
        raise ValueError(f"{where}.timing.summary: low and high must be positive")
    return row


def _case(data: Any, where: str) -> BenchCase:
    facts = _checked(_CASE, data, where)
    label, length = facts.pop("label"), facts.pop("len_q")
    for name in _SIZES:
        if not 1 <= (size := facts.get(name, length)) < 1 << 40:
            raise ValueError(f"{where}.{name} must be at least 1, got {size}")
    if facts["heads"] % facts["heads_k"]:
        raise ValueError(f"{where}: heads must be a multiple of heads_k, got {facts['heads']} and {facts['heads_k']}")
    _one_of(facts.get("dtype", "bfloat16"), DTYPES, f"{where}.dtype")
    _one_of(facts.get("direction", "forward"), PASSES, f"{where}.direction")
    _one_of(facts.get("measure", "time"), MEASURES, f"{where}.measure")
    fields = {name: value for name, value in facts.items() if name in _CASE or f"{name}?" in _CASE}
    try:
        return case(**fields, label=label, length=length)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _one_of(value: str, allowed: Any, where: str) -> None:
    if value not in allowed:
        raise ValueError(f"{where} must be one of {', '.join(allowed)}, got {value!r}")


# ---- types


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _built(cls: Any, data: dict[str, Any], where: str) -> Any:
    """A dataclass from its fields; what it does not know is left out."""
    hints = _hints(cls)
    values = {}
    for f in dataclasses.fields(cls):
        if f.name in data:
            values[f.name] = _checked(hints[f.name], data[f.name], f"{where}.{f.name}".removeprefix("."))
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{f.name} is missing".removeprefix("."))
    return cls(**values)


def _checked(hint: Any, value: Any, where: str) -> Any:
    """The value, if it is what the type says; dataclasses are made from objects."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint)):
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return _checked(inner, value, where)
    if isinstance(hint, dict):
        return _checked_object(hint, _is(dict, value, "an object", where), where)
    if dataclasses.is_dataclass(hint):
        return _built(hint, _is(dict, value, "an object", where), where)
    if origin is list:
        items = _is(list, value, "a list", where)
        if arguments[0] is float and all(type(v) is float and abs(v) <= 1e300 for v in items):
            return items  # samples: thousands in a row
        return [_checked(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(items)]
    if origin is dict:
        items = _is(dict, value, "an object", where).items()
        return {key: _checked(arguments[1], v, f"{where}.{key}") for key, v in items}
    return _checked_scalar(hint, value, where)


def _checked_object(fields: dict[str, Any], value: dict[str, Any], where: str) -> dict[str, Any]:
    result = dict(value)
    for field, hint in fields.items():
        name = field.removesuffix("?")
        if name in value:
            result[name] = _checked(hint, value[name], f"{where}.{name}".removeprefix("."))
        elif name == field:
            raise ValueError(f"{where}.{name} is missing".removeprefix("."))
    return result


def _checked_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isinf(value) or abs(value) > 1e300:
            raise ValueError(f"{where} must be finite, got {value:.3g}")
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is bool:
        return _is(bool, value, "true or false", where)
    if hint is str:
        text = _is(str, value, "text", where)
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in text):
            raise ValueError(f"{where} holds half a character")
        return text
    raise ValueError(f"{where} must be {'a number' if hint is float else 'a whole number'}, got {value!r:.60}")


def _is(kind: type, value: Any, name: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where or 'the file'} must be {name}, got {value!r:.60}")
    return value
