"""Prints `Wgmma<T, N>`, Hopper's warpgroup matrix product, and `Accumulators<T, N>`, its result, for the shapes a
kernel uses.

Each instruction names N/2 accumulator registers, which nobody should type. This is the only Python that prints asm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strobe.cuda.parts.element import BY_NAME

FORMS = ("ss_zero", "ss", "ss_tt_zero", "rs_zero", "rs", "rs_t_zero", "rs_t")


Form = str | tuple[str, int]  # (form, steps): a chain of products in one statement


def shapes(element: str, ns: Iterable[tuple[int, Sequence[Form]]]) -> str:
    """Specialisations of `strobe::Wgmma` for each width N with the forms named; a width named twice gets all of them.

    `ss`: A and B from shared memory; `ss_tt`: both stored with M or N, not K, running fastest; `rs`: A from registers;
    `rs_t`: and B stored with N, not K, running fastest. A `_zero` form ignores the old accumulators. The text belongs
    after `#include <strobe/ptx/wgmma.cuh>`.

    A chain adds up several products: its template arguments say how many and how far apart their operands in shared
    memory lie. It is one statement because NVRTC's time grows with the operands of statements, and each product names
    all accumulators.
    """
    wanted: dict[int, set[tuple[str, int | None]]] = {}
    for n, forms in ns:
        _ptx_type(element, n)
        if isinstance(forms, str) or not forms:
            raise ValueError(f"forms: {forms!r} for n = {n} should be a sequence of one or more of {', '.join(FORMS)}")
        for form in forms:
            name, steps = (form, None) if isinstance(form, str) else form
            if name not in FORMS or (steps is not None and steps < 1):
                raise ValueError(f"forms: {form!r} for n = {n} should be one of {', '.join(FORMS)}, or (one, steps)")
            wanted.setdefault(n, set()).add((name, steps))
    structs = [
        _struct(element, n, sorted(forms, key=lambda f: (FORMS.index(f[0]), f[1] or 0))) for n, forms in wanted.items()
    ]
    return _for_the_gpu("".join(structs))


def accumulators(element: str, n: int, steps: int) -> str:
    """`strobe::Accumulators<T, N>`: the D of a chain rs_t in registers that are declared in PTX.

    They are named in the text of statements and are never operands: NVRTC's optimiser, whose time grows with operands,
    does not see them, only ptxas does. The text belongs where that of `shapes` does."""
    kind = _ptx_type(element, n)
    if n % 16:
        raise ValueError(f"n: {n} is not a multiple of 16, in which they are stored")
    d = [f"d{i}" for i in range(n // 2)]
    zero = " ".join(f"mov.f32 {name}, 0f00000000;" for name in d)
    scale = " ".join(f"mul.ftz.f32 {name}, {name}, %{i >> 1 & 1};" for i, name in enumerate(d))

    def moved(row: int, move: str) -> str:
        """The thread's registers of one of its two rows, to or from memory. Four registers, two in either row, stand for
        eight columns. Operands: the address, the number of columns that are there."""
        texts = []
        for i in range(0, n // 2, 4):
            pair = f"{{{d[i + 2 * row]}, {d[i + 2 * row + 1]}}}"
            texts.append(f"setp.gt.s32 there, %1, {2 * i}; @there {move.format(address=f'[%0 + {8 * i}]', pair=pair)};")
        return f"{{ .reg .pred there; {' '.join(texts)} }}"

    loaded = [moved(row, "ld.global.cg.v2.f32 {pair}, {address}") for row in (0, 1)]
    stored = [moved(row, "st.global.v2.f32 {address}, {pair}") for row in (0, 1)]

    def added(row: int) -> str:
        """Return the text that adds a row of memory to the accumulator, each times a factor: operands 2 and 3. Many
        loads are under way at once."""
        texts, at_once = [], 16
        for first in range(0, n // 8, at_once):
            pairs = range(first, min(n // 8, first + at_once))
            texts.append(f"{{ .reg .pred there; .reg .f32 x<{2 * at_once}>;")
            for i, pair in enumerate(pairs):
                x, y = f"x{2 * i}", f"x{2 * i + 1}"
                texts.append(f"mov.f32 {x}, 0f00000000; mov.f32 {y}, 0f00000000; setp.gt.s32 there, %1, {8 * pair};")
                texts.append(f"@there ld.global.cg.v2.f32 {{{x}, {y}}}, [%0 + {32 * pair}];")
            for i, pair in enumerate(pairs):
                for j in (0, 1):
                    x, total = f"x{2 * i + j}", d[4 * pair + 2 * row + j]
                    texts.append(f"mul.ftz.f32 {x}, {x}, %2; fma.rn.ftz.f32 {total}, {total}, %3, {x};")
            texts.append("}")
        return " ".join(texts)

    # Operands: the address, a factor for either row, then the numbers of eight registers.
    pairs = [
        f"mul.ftz.f32 x, d%{3 + 2 * i}, %{1 + i % 2}; mul.ftz.f32 y, d%{4 + 2 * i}, %{1 + i % 2}; "
        f"cvt.rn.{kind}x2.f32 p{i}, y, x; "
        for i in range(4)
    ]
    write = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {p0, p1, p2, p3};"
    stage = f"{{ .reg .b32 p<4>; .reg .f32 x, y; {''.join(pairs)}{write} }}"
    # Odd rows move the four groups of a panel in another order than even ones (tile/swizzle.cuh): registers are chosen.
    # Operands: the address, whether the row is odd, a factor for either row, the numbers of 16 registers.
    odd = "setp.ne.s32 odd, %1, 0;"
    stage_fp32 = f"{{ .reg .pred odd; .reg .b32 a; .reg .f32 x<4>; {odd} "
    for i in range(4):
        for j in range(4):
            stage_fp32 += f"selp.f32 x{j}, d%{4 + 4 * (i ^ 2) + j}, d%{4 + 4 * i + j}, odd; "
            stage_fp32 += f"mul.ftz.f32 x{j}, x{j}, %{2 + j // 2}; "
        stage_fp32 += f"xor.b32 a, %0, {32 * i}; "
        stage_fp32 += "st.shared.v2.f32 [a], {x0, x1}; st.shared.v2.f32 [a + 1024], {x2, x3}; "
    stage_fp32 += "}"
    # Operands: the address, whether the row is odd, whether something is there, the numbers of 16 registers.
    add_staged = f"{{ .reg .pred odd, there; .reg .b32 a; .reg .f32 x<16>, y; {odd} setp.ne.s32 there, %2, 0; "
    add_staged += " ".join(f"mov.f32 x{i}, 0f00000000;" for i in range(16)) + " "
    for i in range(4):
        add_staged += f"xor.b32 a, %0, {32 * i}; "
        add_staged += f"@there ld.shared.v2.f32 {{x{4 * i}, x{4 * i + 1}}}, [a]; "
        add_staged += f"@there ld.shared.v2.f32 {{x{4 * i + 2}, x{4 * i + 3}}}, [a + 1024]; "
    for i in range(16):
        add_staged += f"selp.f32 y, x{i ^ 8}, x{i}, odd; add.ftz.f32 d%{3 + i}, d%{3 + i}, y; "
    add_staged += "}"
    panel = ", ".join(f'"n"(16 * J + {i})' for i in range(16))
    whole_panel = f'static_assert(32 * J + 32 <= {n}, "a whole panel");'
    numbers = ", ".join(f'"n"(8 * J + {i})' for i in range(8))
    chain, inputs = _products(element, n, "rs_t", steps, d, 0)
    return _for_the_gpu(
        f"template <> struct Accumulators<{element}, {n}> {{\n"
        f'  static STROBE_DEVICE void declare() {{ asm volatile(".reg .f32 d<{len(d)}>;"); }}\n'
        f'  static STROBE_DEVICE void zero() {{ asm volatile("{zero}" ::); }}\n'
        f'  static STROBE_DEVICE void scale(const float (&by)[2]) {{ asm volatile("{scale}" ::"f"(by[0]), "f"(by[1])); }}\n'
        f"  template <int kSteps, class B> static STROBE_DEVICE void rs_t(u32 (&a)[{4 * steps}], u64 b) {{\n"
        f"    {_printed(steps)}\n"
        f"    asm volatile({chain}                 :: {', '.join(inputs)});\n"
        "  }\n"
        "  template <int J> static STROBE_DEVICE void stage(u32 address, const float (&by)[2]) {\n"
        f'    asm volatile("{stage}" ::"r"(address), "f"(by[0]), "f"(by[1]), {numbers} : "memory");\n'
        "  }\n"
        "  template <int J> static STROBE_DEVICE void stage_fp32(u32 address, bool odd, const float (&by)[2]) {\n"
        f"    {whole_panel}\n"
        f'    asm volatile("{stage_fp32}" ::"r"(address), "r"(int(odd)), "f"(by[0]), "f"(by[1]), {panel} : "memory");\n'
        "  }\n"
        "  template <int J> static STROBE_DEVICE void add_staged(u32 address, bool odd, bool there) {\n"
        f"    {whole_panel}\n"
        f'    asm volatile("{add_staged}" ::"r"(address), "r"(int(odd)), "r"(int(there)), {panel} : "memory");\n'
        "  }\n"
        f"{_of_row('load_row', 'const float* from', loaded)}"
        f"{_of_row('store_row', 'float* to', stored)}"
        f"{_of_row('add_row', 'const float* from', list(map(added, (0, 1))), 'by_there', 'by_here')}"
        "};\n"
    )


def _of_row(name: str, address: str, texts: list[str], *factors: str) -> str:
    """A function of a row r: the statement `texts[r]`."""
    operands = (
        ", ".join([f'"l"({address.split()[-1]})', '"r"(columns)', *(f'"f"({x})' for x in factors)]) + ' : "memory"'
    )
    arguments = ", ".join(["int r", address, "int columns", *(f"float {x}" for x in factors)])
    return (
        f"  static STROBE_DEVICE void {name}({arguments}) {{\n"
        f'    if (r == 0) asm volatile("{texts[0]}" ::{operands});\n'
        f'    else asm volatile("{texts[1]}" ::{operands});\n'
        "  }\n"
    )


def _ptx_type(element: str, n: int) -> str:
    if element not in BY_NAME:
        raise ValueError(f"element: {element!r} is not one of {', '.join(BY_NAME)}")
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"n: {n} is not a multiple of 8 from 8 to 256")
    return BY_NAME[element].in_ptx


def _for_the_gpu(structs: str) -> str:
    inside = f"namespace strobe {{\n{structs}}}  // namespace strobe\n"
    return f"#ifdef __CUDACC__  // the emulator has one template for every shape\n{inside}#endif\n"


def _printed(steps: int) -> str:
    return f'static_assert(kSteps == {steps}, "the chain that was printed");'


def _struct(element: str, n: int, forms: Sequence[tuple[str, int | None]]) -> str:
    chains: dict[str, list[int]] = {}
    for form, steps in forms:
        chains.setdefault(form, []).extend([] if steps is None else [steps])
    members = "".join(_form(element, n, form) for form, steps in forms if steps is None)
    members += "".join(_chain(element, n, form, lengths) for form, lengths in chains.items() if lengths)
    return f"template <> struct Wgmma<{element}, {n}> {{\n{members}}};\n"


def _statement(element: str, n: int, form: str, chained: int | None) -> str:
    count = n // 2
    statement, inputs = _products(element, n, form, chained, [f"%{i}" for i in range(count)], count)
    # If the old sums are ignored, accumulators are outputs only: the compiler need not keep a value in them.
    outputs = ", ".join(f'"{"=" if form.endswith("_zero") else "+"}f"(d[{i}])' for i in range(count))
    return f"asm volatile({statement}                 : {outputs} : {', '.join(inputs)});\n"


def _form(element: str, n: int, form: str) -> str:
    arguments = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b" if form.startswith("rs") else "u64 a, u64 b"
    return (
        f"  static STROBE_DEVICE void {form}(float (&d)[{n // 2}], {arguments}) {{\n"
        f"    {_statement(element, n, form, None)}"
        f"  }}\n"
    )


def _chain(element: str, n: int, form: str, lengths: Sequence[int]) -> str:
    from_registers = form.startswith("rs")
    arguments = "u32 (&a)[4 * kSteps], u64 b" if from_registers else "u64 a, u64 b"
    template = "template <int kSteps, class B>" if from_registers else "template <int kSteps, class A, class B>"
    either = " || ".join(f"kSteps == {steps}" for steps in lengths)
    bodies = "".join(
        f"    if constexpr (kSteps == {steps}) {{\n    {_statement(element, n, form, steps)}    }}\n"
        for steps in lengths
    )
    return (
        f"  {template} static STROBE_DEVICE void {form}(float (&d)[{n // 2}], {arguments}) {{\n"
        f'    static_assert({either}, "a chain that was printed");\n'
        f"{bodies}"
        f"  }}\n"
    )


def _products(
    element: str, n: int, form: str, chained: int | None, d: Sequence[str], operands: int
) -> tuple[str, list[str]]:
    """The text of one product or a chain of them into the registers `d`, and its inputs, before which come other
    `operands`."""
    steps = chained or 1
    kind, k = BY_NAME[element].in_ptx, BY_NAME[element].mma_k
    from_registers, fresh = form.startswith("rs"), form.endswith("_zero")
    transpose_a, transpose_b = int(form.startswith("ss_tt")), int(form.startswith(("rs_t", "ss_tt")))
    if from_registers:
        names = [f"a[{i}]" for i in range(4 * steps)] if chained else ["a0", "a1", "a2", "a3"]
        immediates = f"1, 1, {transpose_b}"  # signs of A and B, transpose B
    else:
        names = ["a"]
        immediates = f"1, 1, {transpose_a}, {transpose_b}"  # and transpose A
    constraint = "r" if from_registers else "l"
    inputs = [f'"{constraint}"({name})' for name in names] + ['"l"(b)']
    a, b = f"%{operands}", f"%{operands + len(names)}"
    lines = ["{ .reg .pred none, sum; .reg .b64 a, b; setp.ne.b32 none, 0, 0; setp.ne.b32 sum, 1, 0;"]
    for step in range(steps):
        if from_registers:
            a = f"{{{', '.join(f'%{operands + 4 * step + i}' for i in range(4))}}}"
        elif step and transpose_a:
            lines.append(f"add.s64 a, %{operands}, %{operands + len(inputs)};")
            inputs.append(f'"n"(A::step({step}))')
            a = "a"
        elif step:  # A stays the same from block to block: the compiler may keep where its parts are
            a = f"%{operands + len(inputs)}"
            inputs.append(f'"l"(a + A::step({step}))')
        if step:
            lines.append(f"add.s64 b, {b}, %{operands + len(inputs)};")
            inputs.append(f'"n"(B::step({step}))')
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}")
        lines.append(
            f"{{{', '.join(d)}}}, {a}, {'b' if step else b}, {'none' if fresh and not step else 'sum'}, {immediates};"
        )
    return "".join(f'                 "{line}\\n"\n' for line in [*lines, "}"]).lstrip(), inputs
