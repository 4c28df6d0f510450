"""Read the interface of vLLM's attention backends, names and parameters, from its source, which is not imported.

`python tests/compat/vllm_interface.py --write PATH` records it, where PATH is a folder that holds the package `vllm`. The
record is names and parameters; `stubs` makes modules of it that are enough to import our backend.
"""

from __future__ import annotations

import abc
import ast
import enum
import json
import sys
from pathlib import Path
from types import ModuleType, new_class
from typing import Any, Generic, TypeVar

RECORD = Path(__file__).with_suffix(".json")
BACKEND, REGISTRY, FLASH = (
    f"vllm.v1.attention.{name}" for name in ("backend", "backends.registry", "backends.flash_attn")
)
WANTED = {
    BACKEND: [
        "AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionImplBase", "AttentionMetadata",
        "AttentionMetadataBuilder", "CommonAttentionMetadata", "MultipleOf",
    ],
    REGISTRY: ["AttentionBackendEnum", "register_backend"],
    FLASH: ["FlashAttentionImpl", "FlashAttentionMetadataBuilder"],  # which names vLLM calls beyond those of the bases
}  # fmt: skip


def record(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module, names in WANTED.items():
        tree = ast.parse((root / module.replace(".", "/")).with_suffix(".py").read_text())
        nodes = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        found[module] = {name: _described(nodes[name]) for name in names}
    return found


def _described(node: ast.ClassDef | ast.FunctionDef) -> Any:
    if isinstance(node, ast.FunctionDef):
        return _function(node)
    fields = [
        item.target.id + ("=" if item.value is not None else "")
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    members = [
        t.id for item in node.body if isinstance(item, ast.Assign) for t in item.targets if isinstance(t, ast.Name)
    ]
    methods = {item.name: _function(item) for item in node.body if isinstance(item, ast.FunctionDef)}
    return {"fields": " ".join(fields), "members": " ".join(members), "methods": methods}


def _function(node: ast.FunctionDef) -> str:
    """Its decorators, and its parameters with a "=" behind those that have a default: "@classmethod (cls, size=)"."""
    names = [a.arg for a in node.args.args]
    optional = len(names) - len(node.args.defaults)
    parameters = ", ".join(name + "=" * (i >= optional) for i, name in enumerate(names))
    return " ".join([*(f"@{ast.unparse(d)}" for d in node.decorator_list), f"({parameters})"])


def parameters(described: str) -> list[str]:
    """Names without what is bound, self or cls."""
    inside = described[described.rindex("(") + 1 : -1].replace("=", "").split(", ")
    return [name for name in inside if name not in ("", "self", "cls")]


def stubs(table: dict[str, Any]) -> dict[str, ModuleType]:
    """Modules with the bases of our classes: methods that a subclass must have are abstract, others return None."""
    modules: dict[str, ModuleType] = {}
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", BACKEND, "vllm.v1.attention.backends", REGISTRY):
        modules[name] = ModuleType(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, modules[name])
    for name, described in table[BACKEND].items():
        setattr(modules[BACKEND], name, _class(name, described))

    class AttentionBackendEnum(enum.Enum):
        CUSTOM = None

        @classmethod
        def register(cls, name: str, value: str) -> Any:
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            cls._member_map_[name] = member
            return member

    registry: Any = modules[REGISTRY]
    registry.AttentionBackendEnum = AttentionBackendEnum
    registry.register_backend = AttentionBackendEnum.register
    return modules


def _class(name: str, described: dict[str, Any]) -> Any:
    if name == "AttentionCGSupport":
        return enum.Enum(name, described["members"].split())
    if name == "MultipleOf":
        return type(name, (), {"__init__": lambda self, base: setattr(self, "base", base)})
    if name == "CommonAttentionMetadata":
        return type(name, (), {"__init__": lambda self, **given: self.__dict__.update(given)})
    body: dict[str, Any] = {}
    for method, facts in described["methods"].items():
        function: Any = _nothing()
        if "@abstractmethod" in facts:
            function = abc.abstractmethod(function)
        for kind in (staticmethod, classmethod):
            if f"@{kind.__name__}" in facts:
                function = kind(function)
        if method not in ("__new__", "__init__") and "@property" not in facts:
            body[method] = function
    if name == "AttentionMetadataBuilder":
        body["__init__"] = lambda self, kv_cache_spec, layer_names, vllm_config, device: None
    bases = (abc.ABC, Generic[TypeVar("T")]) if "Builder" in name or "Impl" in name else (abc.ABC,)  # type: ignore[index]
    return new_class(name, bases, {}, lambda space: space.update(body))


def _nothing() -> Any:
    return lambda *args, **kwargs: None


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] != "--write":
        sys.exit(__doc__)
    root = Path(sys.argv[2])
    table = {"version": "0.33.0", **record(root)}
    RECORD.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
