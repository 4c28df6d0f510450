"""Prints `Wgmma<T, N>`, Hopper's warpgroup matrix product, for the shapes a kernel uses.

Each instruction names N/2 accumulator registers, which nobody should type. This is the only Python that prints asm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PTX_TYPES = {"bf16": "bf16", "fp16": "f16"}
FORMS = ("ss_zero", "ss", "rs_zero", "rs", "rs_t_zero", "rs_t")


def shapes(element: str, ns: Iterable[tuple[int, Sequence[str]]]) -> str:
    """Specialisations of `strobe::Wgmma` for each width N with the forms named; a width named twice gets all of them.

    `ss`: A and B from shared memory; `rs`: A from registers; `rs_t`: and B stored with N, not K, running fastest. A
    `_zero` form ignores the old accumulators. The text belongs after `#include <strobe/ptx/wgmma.cuh>`.
    """
    if element not in _PTX_TYPES:
        raise ValueError(f"element: {element!r} is not one of {', '.join(_PTX_TYPES)}")
    wanted: dict[int, set[str]] = {}
    for n, forms in ns:
        if n % 8 or not 8 <= n <= 256:
            raise ValueError(f"n: {n} is not a multiple of 8 from 8 to 256")
        unknown = [form for form in forms if form not in FORMS]
        if isinstance(forms, str) or unknown or not forms:
            raise ValueError(f"forms: {forms!r} for n = {n} should be a sequence of one or more of {', '.join(FORMS)}")
        wanted.setdefault(n, set()).update(forms)
    structs = [_struct(element, n, [form for form in FORMS if form in forms]) for n, forms in wanted.items()]
    text = "namespace strobe {\n" + "".join(structs) + "}  // namespace strobe\n"
    return f"#ifdef __CUDACC__  // the emulator has one template for every shape\n{text}#endif\n"


def _struct(element: str, n: int, forms: Sequence[str]) -> str:
    members = "".join(_form(element, n, form) for form in forms)
    return f"template <> struct Wgmma<{element}, {n}> {{\n{members}}};\n"


def _form(element: str, n: int, form: str) -> str:
    accumulate = 0 if form.endswith("_zero") else 1
    transpose_b = 1 if form.startswith("rs_t") else 0
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    # With the old sums ignored they are outputs only: the compiler need not keep a value in them.
    outputs = ", ".join(f'"{"+" if accumulate else "="}f"(d[{i}])' for i in range(count))
    if form.startswith("rs"):
        arguments = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b"
        operands = "{" + ", ".join(f"%{count + i}" for i in range(4)) + f"}}, %{count + 4}"
        inputs = '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)'
        immediates = f"1, 1, {transpose_b}"  # signs of A and B, transpose B
    else:
        arguments = "u64 a, u64 b"
        operands = f"%{count}, %{count + 1}"
        inputs = '"l"(a), "l"(b)'
        immediates = f"1, 1, 0, {transpose_b}"  # and transpose A
    kind = _PTX_TYPES[element]
    return (
        f"  static STROBE_DEVICE void {form}(float (&d)[{count}], {arguments}) {{\n"
        f'    asm volatile("{{ .reg .pred sum; setp.ne.b32 sum, {accumulate}, 0;\\n"\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "\n'
        f'                 "{{{accumulators}}}, {operands}, sum, {immediates}; }}\\n"\n'
        f"                 : {outputs} : {inputs});\n"
        f"  }}\n"
    )
