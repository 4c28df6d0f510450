"""Prints `Wgmma<T, N>`, Hopper's warpgroup matrix product, for the shapes a kernel uses.

Each instruction names N/2 accumulator registers, which nobody should type. This is the only Python that prints asm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PTX_TYPES = {"bf16": "bf16", "fp16": "f16"}
FORMS = ("ss_zero", "ss", "rs_zero", "rs", "rs_t_zero", "rs_t")


Form = str | tuple[str, int]  # (form, steps): a chain of products in one statement


def shapes(element: str, ns: Iterable[tuple[int, Sequence[Form]]]) -> str:
    """Specialisations of `strobe::Wgmma` for each width N with the forms named; a width named twice gets all of them.

    `ss`: A and B from shared memory; `rs`: A from registers; `rs_t`: and B stored with N, not K, running fastest. A
    `_zero` form ignores the old accumulators. The text belongs after `#include <strobe/ptx/wgmma.cuh>`.

    A chain adds up several products: its template arguments say how many and how far apart their operands in shared
    memory lie. It is one statement because NVRTC's time grows with the operands of statements, and each product names
    all accumulators.
    """
    if element not in _PTX_TYPES:
        raise ValueError(f"element: {element!r} is not one of {', '.join(_PTX_TYPES)}")
    wanted: dict[int, set[tuple[str, int | None]]] = {}
    for n, forms in ns:
        if n % 8 or not 8 <= n <= 256:
            raise ValueError(f"n: {n} is not a multiple of 8 from 8 to 256")
        if isinstance(forms, str) or not forms:
            raise ValueError(f"forms: {forms!r} for n = {n} should be a sequence of one or more of {', '.join(FORMS)}")
        for form in forms:
            name, steps = (form, None) if isinstance(form, str) else form
            if name not in FORMS or (steps is not None and steps < 1):
                raise ValueError(f"forms: {form!r} for n = {n} should be one of {', '.join(FORMS)}, or (one, steps)")
            wanted.setdefault(n, set()).add((name, steps))
    structs = [_struct(element, n, sorted(forms, key=lambda f: (FORMS.index(f[0]), f[1] or 0))) for n, forms in wanted.items()]
    text = "namespace strobe {\n" + "".join(structs) + "}  // namespace strobe\n"
    return f"#ifdef __CUDACC__  // the emulator has one template for every shape\n{text}#endif\n"


def _struct(element: str, n: int, forms: Sequence[tuple[str, int | None]]) -> str:
    members = "".join(_form(element, n, form, steps) for form, steps in forms)
    return f"template <> struct Wgmma<{element}, {n}> {{\n{members}}};\n"


def _form(element: str, n: int, form: str, chained: int | None) -> str:
    steps = chained or 1
    from_registers, fresh = form.startswith("rs"), form.endswith("_zero")
    transpose_b = 1 if form.startswith("rs_t") else 0
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    # With the old sums ignored they are outputs only: the compiler need not keep a value in them.
    outputs = ", ".join(f'"{"=" if fresh else "+"}f"(d[{i}])' for i in range(count))
    if from_registers:
        names = [f"a[{i}]" for i in range(4 * steps)] if chained else ["a0", "a1", "a2", "a3"]
        arguments = f"u32 (&a)[{4 * steps}], u64 b" if chained else "u32 a0, u32 a1, u32 a2, u32 a3, u64 b"
        immediates = f"1, 1, {transpose_b}"  # signs of A and B, transpose B
    else:
        names = ["a"]
        arguments = "u64 a, u64 b"
        immediates = f"1, 1, 0, {transpose_b}"  # and transpose A
    kind = "r" if from_registers else "l"
    inputs = [f'"{kind}"({name})' for name in names] + ['"l"(b)']
    a, b = f"%{count}", f"%{count + len(names)}"
    lines = ["{ .reg .pred none, sum; .reg .b64 b; setp.ne.b32 none, 0, 0; setp.ne.b32 sum, 1, 0;"]
    for step in range(steps):
        if from_registers:
            a = f"{{{', '.join(f'%{count + 4 * step + i}' for i in range(4))}}}"
        elif step:  # Q stays the same from block to block: the compiler may keep where its parts are
            a = f"%{count + len(inputs)}"
            inputs.append(f'"l"(a + A::step({step}))')
        if step:
            lines.append(f"add.s64 b, {b}, %{count + len(inputs)};")
            inputs.append(f'"n"(B::step({step}))')
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{_PTX_TYPES[element]}.{_PTX_TYPES[element]}")
        operands = f"{a}, {'b' if step else b}, {'none' if fresh and not step else 'sum'}"
        lines.append(f"{{{accumulators}}}, {operands}, {immediates};")
    template = f"template <int kSteps, {'' if from_registers else 'class A, '}class B> " if chained else ""
    assertion = f'    static_assert(kSteps == {steps}, "the chain that was printed");\n' if chained else ""
    statement = "".join(f'                 "{line}\\n"\n' for line in [*lines, "}"]).lstrip()
    return (
        f"  {template}static STROBE_DEVICE void {form}(float (&d)[{count}], {arguments}) {{\n{assertion}"
        f"    asm volatile({statement}"
        f"                 : {outputs} : {', '.join(inputs)});\n"
        f"  }}\n"
    )
