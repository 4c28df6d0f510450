"""Dependencies point one way, `asm` stays behind its wrappers, importing stays cheap. Read from the source, not from
memory."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "strobe"
HEADERS = SOURCE / "cuda" / "include" / "strobe"

# Rooms, from the ground up: a room may import from itself and from the floors below. A room is a module or a package of
# `strobe`, or a module or package inside one where that stands on a floor of its own.
LAYERS = [
    ["variants", "cuda.runtime"],
    ["problem"],
    ["backends.backend", "cuda.parts"],
    ["cuda.plans"],
    ["backends", "cuda", "emulator"],
    ["call"],
    ["api", "explain", "merging", "probabilities", "tile_trace", "tiled"],
    ["scaled_dot_product", "nn", "paged"],
    ["distributed"],
    ["compat"],
    ["measure"],
    ["learn"],
    ["bench"],
    ["tools"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
HEADER_LAYERS = ["ptx", "tile", "pipeline", "kernels"]  # emu stands in for ptx


def module_name(path: Path, root: Path = SOURCE.parent) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
# Beside the package: what writes the documents. It stands above it and is not installed.
CHECKOUT = {module_name(path, ROOT): path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}


def layer_of(module: str) -> str | None:
    """ "strobe.cuda.runtime.jit" -> "cuda"; None for the package itself, which only lists the public names."""
    parts = module.split(".")[1:]
    if not parts:
        return None
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in RANK), parts[0])


def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """The modules of ours that a file imports, with or without those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    nodes = ast.walk(tree) if lazy else _executed_on_import(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write imports in full"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return found


def _executed_on_import(tree: ast.AST) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, functions)]
    return nodes


@pytest.mark.parametrize("module", [m for m in MODULES if layer_of(m)])
def test_imports_point_down(module: str) -> None:
    layer = layer_of(module)
    assert layer in RANK, f"{module} is in no layer: add it to LAYERS where it belongs"
    for imported in imports(MODULES[module]):
        if imported == "strobe":
            assert RANK[layer] > RANK["api"], f"{module} imports the public package, which stands above it"
        elif imported.startswith("strobe."):
            below = layer_of(imported)
            assert below in RANK, f"{module} imports {imported}, which is in no layer"
            assert RANK[below] <= RANK[layer], f"{module} ({layer}) imports {imported}: {below} stands above {layer}"
        else:
            assert imported.split(".")[0] != "benchmarks", f"{module} imports {imported}, which is not installed"


def test_the_package_reaches_no_higher_than_its_hosts() -> None:
    """`import strobe` offers what is below lessons, measurements and commands, and knows none of them."""
    for imported in imports(MODULES["strobe"]):
        if imported.startswith("strobe."):
            assert RANK[layer_of(imported) or ""] <= RANK["compat"], f"strobe/__init__ imports {imported}"


# flash-attn's own names begin with an underscore and are imported by its users.
HOSTS_NAMES = re.compile(r"strobe\.compat\.flash_attn(\.kernels|_interface)\._(wrapped_)?(flash_attn|get_block)_\w+")


def private_names(path: Path) -> set[str]:
    """Names of other modules of ours that begin with an underscore and are imported by a file, or read from a module
    that it imports: "strobe.cuda.runtime.jit._locks"."""
    ours = MODULES | CHECKOUT
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules: dict[str, str] = {}  # what the file calls a module of ours -> which it is
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ours:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                used.add(full)
                modules |= {alias.asname or alias.name: full} if full in ours else {}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in ours}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))) is not None:
            used.add(f"{module}.{node.attr}")
    return {name for name in used if re.search(r"\._(?!_)", name) and not HOSTS_NAMES.fullmatch(name)}


@pytest.mark.parametrize("module", MODULES | CHECKOUT)
def test_no_private_name_leaves_its_module(module: str) -> None:
    used = private_names((MODULES | CHECKOUT)[module])
    assert not used, f"{module} uses {', '.join(sorted(used))}: make it public, or move it to where it is used"


def test_no_circles_even_inside_functions() -> None:
    """An import inside a function hides a circle from Python, not from a reader."""
    inside = MODULES.keys() - {"strobe"}  # which lists the public names, and offers what stands above
    graph = {m: {i for i in imports(MODULES[m]) if i in inside and i != m} for m in inside}
    while graph:
        ready = {m for m, targets in graph.items() if not targets & graph.keys()}
        assert ready, f"these modules import one another in a circle, or one that does: {sorted(graph)}"
        graph = {m: targets for m, targets in graph.items() if m not in ready}


def test_only_the_cuda_layer_knows_cuda_packages() -> None:
    users = {m for m, path in MODULES.items() if any(i.split(".")[0] == "cuda" for i in imports(path))}
    assert users, "nothing imports cuda.bindings: has it moved?"
    assert all(layer_of(m) == "cuda.runtime" for m in users), users


@pytest.mark.parametrize("module", ["strobe.cuda.runtime.jit", "strobe.cuda.runtime.driver"])
def test_jit_and_driver_know_no_torch(module: str) -> None:
    assert not any(i.split(".")[0] == "torch" for i in imports(MODULES[module]))


# ---- headers ---------------------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
_BENCHMARK = SOURCE / "bench" / "kernels"  # standard attention, to be measured against: built on the library's wrappers
_HEADER_FILES = sorted(path for folder in (HEADERS, _BENCHMARK) for path in folder.rglob("*.cuh"))


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", _HEADER_FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_includes_point_down(path: Path) -> None:
    text = without_comments(path.read_text(encoding="utf-8"))
    layer = "kernels" if path.parent == _BENCHMARK else path.relative_to(HEADERS).parts[0]
    assert layer in [*HEADER_LAYERS, "emu"], f"{path.relative_to(SOURCE)} is in no layer"
    for bracket, included in _INCLUDE.findall(text):
        if not included.startswith("strobe/"):
            assert layer == "emu", f"{path.name} includes <{included}>: kernels include no header but ours"
            continue
        assert bracket == "<", f"{path.name} includes {included} in quotes; write <{included}>"
        assert (HEADERS.parent / included).is_file(), f"{path.name} includes {included}, which does not exist"
        below = included.split("/")[1]
        if layer == "emu":
            assert below in ("emu", "ptx"), f"{path.name} includes {included}"
        else:
            assert below in HEADER_LAYERS[: HEADER_LAYERS.index(layer) + 1], f"{layer}/{path.name} includes {included}"


def test_asm_only_in_wrappers() -> None:
    """The rule holds for every C++ text we ship, and every Python string that might print one."""
    word = re.compile(r"\b(asm|__asm__)\b")
    sources = [p for p in SOURCE.rglob("*") if p.suffix in (".cuh", ".cu", ".h", ".hpp", ".cpp")]
    holders = {p for p in sources if word.search(without_comments(p.read_text(encoding="utf-8")))}
    # The emulator's switch of stacks: the CPU's instructions, not PTX.
    on_the_host = HEADERS / "emu" / "engine" / "fiber.cuh"
    wrong = [str(p.relative_to(SOURCE)) for p in holders if HEADERS / "ptx" not in p.parents and p != on_the_host]
    assert holders and not wrong, wrong
    allowed = {
        "strobe.cuda.parts.wgmma"
    }  # prints one wrapper per shape of an instruction that names up to 128 registers
    printers = {m for m, p in MODULES.items() if any(re.search(r"\basm\s*(volatile|\()", s) for s in strings(p))}
    assert printers <= allowed, printers - allowed


def strings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_wrapper_has_a_second_implementation() -> None:
    for ptx in sorted((HEADERS / "ptx").glob("*.cuh")):
        assert (HEADERS / "emu" / ptx.name).is_file(), f"ptx/{ptx.name} has no emulation in emu/"


# ---- importing -------------------------------------------------------------------------------------------------------


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT / "src")


def test_import_loads_neither_cuda_packages_nor_the_command_line() -> None:
    found = python("-c", "import sys, strobe; print(*sorted({m.split('.')[0] for m in sys.modules}))").stdout.split()
    assert "strobe" in found and "torch" in found
    assert not {"cuda", "nvidia", "typer", "rich", "click", "numba", "triton"} & (set(found) - set(torch_alone()))


def torch_alone() -> list[str]:
    return python("-c", "import sys, torch; print(*sorted({m.split('.')[0] for m in sys.modules}))").stdout.split()


_TIMED_IMPORT = """
from time import process_time
a = process_time(); import torch
b = process_time(); import strobe
print(b - a, process_time() - b)
"""


def test_import_costs_at_most_50_ms_more_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time, because other tests run beside this one; the best of three, with compiled bytecode as any second import
    has. Or 4 % of what torch costs: the same on a machine on which everything takes longer."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    python("-c", "import strobe")
    tries = [map(float, python("-c", _TIMED_IMPORT).stdout.split()) for _ in range(3)]
    torch_alone, ours = (min(times) for times in zip(*tries, strict=True))
    assert ours <= max(0.050, 0.04 * torch_alone)


# ---- text ------------------------------------------------------------------------------------------------------------

_TEXT = (".py", ".cuh", ".cu", ".h", ".cpp", ".md", ".toml", ".yml", ".json", ".txt", ".sh", ".ipynb")
_SKIP = {".git", ".venv", ".cache", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "dist"}


def test_no_paths_of_one_machine() -> None:
    """Nobody else has these directories."""
    local = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|opt/(?:wheels|pypi))/")
    files = [p for p in ROOT.rglob("*") if p.is_file() and not _SKIP & set(p.relative_to(ROOT).parts)]
    files = [p for p in files if p.suffix in _TEXT or p.name in ("Makefile", "run")]
    assert len(files) > 20
    texts = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in files if p != Path(__file__)}
    guilty = {name: found[0] for name, text in texts.items() if (found := local.search(text))}
    assert not guilty


def test_modules_say_what_they_are_and_stay_small() -> None:
    for module, path in (MODULES | CHECKOUT).items():
        text = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
        assert text.count("\n") <= 400, f"{module} has {text.count(chr(10))} lines: split it by subject"
        assert path.stem not in ("utils", "util", "helpers", "common", "misc"), f"{module}: name it after what it does"
