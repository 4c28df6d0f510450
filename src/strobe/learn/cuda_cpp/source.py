"""A learner's CUDA C++: what its kernel takes, and its text in the form in which the emulator can watch it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILE = "kernel.cu"  # the name under which compilers and the emulator speak of it
FRAME_BYTES = 32 << 10  # that local variables of a function may take on the emulator: kFrame of emulated.cuh
TYPES = {"float": "d", "double": "d", "int": "q", "unsigned": "Q", "long long": "q", "bool": "q", "unsigned char": "q"}

_NAMES = sorted((*TYPES, "unsigned int", "char", "short", "size_t", "__half", "half"), key=len, reverse=True)
_TYPE = "(?:" + "|".join(name.replace(" ", r"\s+") for name in _NAMES) + ")"
_KERNEL = re.compile(
    r"__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
_POINTER = re.compile(rf"\b(const\s+)?({_TYPE})(\s+const)?\s*\*(?:\s*(?:__restrict__|const\b))*")
_SHARED = re.compile(rf"(\bextern\s+)?\b__shared__\s+({_TYPE})\s+([^;]+);")


@dataclass(frozen=True)
class Parameter:
    name: str
    ctype: str  # of the value, or of what a pointer points to
    pointer: bool = False
    const: bool = False

    def __str__(self) -> str:
        return f"{'const ' if self.const else ''}{self.ctype}{'*' if self.pointer else ''} {self.name}"


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: tuple[Parameter, ...]
    text: str
    extern_shared: bool = False  # it has an array whose size the launch gives


_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(text: str) -> str:
    """Comments become blanks; every line stays where it is."""
    return _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)


def parse(text: str, name: str | None = None) -> Kernel:
    """The kernel `name` of the text, or its only one."""
    code = without_comments(text)
    kernels = {match[1]: match for match in _KERNEL.finditer(code)}
    if not kernels:
        raise ValueError("source: there is no `__global__ void name(…)` in it")
    if name is None and len(kernels) > 1:
        raise ValueError(f"source: it has the kernels {', '.join(kernels)}; say which one with name=")
    match = kernels.get(name or next(iter(kernels)))
    if match is None:
        raise ValueError(f"name: {name!r}; the source has {', '.join(kernels)}")
    end = code.index(")", match.end())
    listed = [part for part in code[match.end() : end].split(",") if part.strip()]
    later = [other.start() for other in kernels.values() if other.start() > match.start()]
    body = code[end : min(later, default=len(code))]
    extern_shared = re.search(r"\bextern\s+__shared__\b", body) is not None
    return Kernel(match[1], tuple(_parameter(part) for part in listed), text, extern_shared)


def _parameter(text: str) -> Parameter:
    pointer = re.fullmatch(rf"\s*{_POINTER.pattern}\s*(\w+)\s*", text)
    if pointer:
        const = bool(pointer[1] or pointer[3])
        return Parameter(pointer[4], _plain(pointer[2]), pointer=True, const=const)
    value = re.fullmatch(rf"\s*(?:const\s+)?({_TYPE})(?:\s+const)?\s+(\w+)\s*", text)
    if value is None or _plain(value[1]) not in TYPES:
        raise ValueError(
            f"source: the parameter `{text.strip()}` is not understood; "
            f"a kernel of a lesson takes {', '.join(TYPES)} and pointers to them"
        )
    return Parameter(value[2], _plain(value[1]))


def _plain(ctype: str) -> str:
    name = re.sub(r"\s+", " ", ctype)
    return {"unsigned int": "unsigned", "half": "__half"}.get(name, name)


# ---- for the emulator ------------------------------------------------------------------------------------------------


def emulated(kernel: Kernel) -> str:
    """C++ for the emulator: the header, the learner's text with its memory watched, and an entry that unpacks the
    arguments. Lines keep their numbers."""
    header = "".join(
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("emulated.cuh", "half.cuh")
    )
    fields = [
        f"unsigned long long {p.name}, {p.name}_bytes, {p.name}_writers, {p.name}_epochs;" if p.pointer else _field(p)
        for p in kernel.parameters
    ]
    arrays = [
        f'    {{"{p.name}", reinterpret_cast<lesson::Writer*>(p.{p.name}_writers), '
        f"reinterpret_cast<unsigned*>(p.{p.name}_epochs), p.{p.name}, p.{p.name}_bytes}},"
        for p in kernel.parameters
        if p.pointer
    ]
    arguments = [_argument(p) for p in kernel.parameters]
    return "\n".join(
        [
            header,
            f'namespace lesson {{ namespace user {{\n#line 1 "{FILE}"',
            rewritten(kernel.text),
            '#line 1 "launch.cu"',
            "}}  // namespace lesson::user",
            "struct Params {",
            "  lesson::Launch launch;",
            *(f"  {field}" for field in fields),
            "};",
            "STROBE_KERNEL(1024, 1)",
            "kernel(STROBE_GRID_CONSTANT Params p) {",
            "  if (strobe::thread_idx() >= p.launch.threads) return;",
            "  lesson::begin();",
            "  const lesson::Array list[] = {",
            *arrays,
            "    {nullptr, nullptr, nullptr, 0, 0}};",
            "  static thread_local lesson::Array kept[sizeof list / sizeof list[0]];",
            "  memcpy(kept, list, sizeof list);",
            "  lesson::arrays() = kept;",
            f"  lesson::user::{kernel.name}({', '.join(arguments)});",
            "  lesson::end();",
            "}",
            "",
        ]
    )


def _field(parameter: Parameter) -> str:
    ctype = {"d": "double", "q": "long long", "Q": "unsigned long long"}[TYPES[parameter.ctype]]
    return f"{ctype} {parameter.name};"


def _argument(parameter: Parameter) -> str:
    if not parameter.pointer:
        return f"static_cast<{parameter.ctype}>(p.{parameter.name})"
    ctype = f"{'const ' if parameter.const else ''}{parameter.ctype}"
    return f"lesson::Ptr<{ctype}>(p.{parameter.name}, lesson::Space::global)"


def rewritten(text: str) -> str:
    """Pointers and shared arrays replaced by types that watch, loops and functions that count; comments are blanked,
    includes dropped."""
    code = re.sub(r"^[ \t]*#[ \t]*include[^\n]*", "", without_comments(text), flags=re.MULTILINE)
    code = re.sub(r'\bextern\s+"C"\s*(?=__global__)', "", code)
    slots = iter(range(64))
    code = _SHARED.sub(lambda match: _shared(match, slots), code)
    code = _POINTER.sub(lambda match: f"Ptr<{'const ' if match[1] or match[3] else ''}{match[2]}> ", code)
    return _counted(code)


_LOOP = re.compile(r"\b(for|while)\s*\(")
_FUNCTION = re.compile(r"\b__device__\b[^;{}=]*\{")
_STRING = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'")


def _counted(code: str) -> str:
    """Each condition of a loop calls `step` first, each function `enter`: neither can go on forever unnoticed."""
    outside = _STRING.sub(lambda loop: "_" * len(loop[0]), code)  # brackets in strings do not count
    insertions: list[tuple[int, str]] = [(loop.end(), " ::lesson::enter();") for loop in _FUNCTION.finditer(outside)]
    for loop in _LOOP.finditer(outside):
        begin, depth, ends = loop.end(), 1, []
        for end in range(begin, len(outside)):
            depth += (outside[end] in "({[") - (outside[end] in ")}]")
            if depth == 0:
                break
            if depth == 1 and outside[end] == ";":
                ends.append(end)
        if loop[1] == "for" and len(ends) != 2:  # over a range, which ends
            continue
        first, last = (begin, end) if loop[1] == "while" else (ends[0] + 1, ends[1])
        if re.match(rf"\s*(?:const\s+)?(?:auto|{_TYPE})\s+\w+\s*=", outside[first:last]):  # declares what it tests
            continue
        if outside[first:last].strip():
            insertions += [(first, "::lesson::step() && ("), (last, ")")]
        else:
            insertions.append((first, "::lesson::step()"))
    for at, text in sorted(insertions, reverse=True):
        code = code[:at] + text + code[at:]
    return code


def _shared(declaration: re.Match[str], slots: object) -> str:
    declared = []
    for declarator in _split(declaration[3]):
        match = re.fullmatch(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)", declarator)
        if match is None:
            raise ValueError(f"source: `__shared__ {declaration[2]} {declarator.strip()}` is not understood")
        name, dims = match[1], re.sub(r"\s+", " ", match[2]).strip()
        declared.append(f'Shared<{declaration[2]}{dims}> {name}({next(slots)}, "{name}");')  # type: ignore[call-overload]
    lines = declaration[0].count("\n")
    return " ".join(declared) + "\n" * lines


def _split(declarators: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for letter in declarators:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
