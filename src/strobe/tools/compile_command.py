"""`strobe compile`: kernels ahead of time, for machines without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from strobe.measure import command
from strobe.measure.command import UserError


def compile(
    arch: Annotated[list[str], typer.Option(help="The GPU: sm_80, sm_89, sm_90a, … May be repeated.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Directory for the kernels; made if need be.")],
    dtype: Annotated[
        list[str] | None, typer.Option(help="float16, bfloat16, or for sm_90a float32. Default: all.")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(min=1, help="Only kernels for this head dim. May be repeated.")
    ] = None,
) -> None:
    """Compile the kernels ahead of time. Needs no GPU; the machine that uses them needs no compiler."""
    from strobe.cuda.parts.architecture import ARCHITECTURES  # without PyTorch, which takes a second

    if wrong := [a for a in arch if not any(architecture.has_target(a) for architecture in ARCHITECTURES)]:
        raise UserError(f"--arch {wrong[0]} is not supported; {_ARCHS}")
    from strobe.cuda.plans import families
    from strobe.cuda.runtime import jit
    from strobe.measure import units

    if (problem := jit.nvrtc_status()) is not None:
        raise UserError(f"cannot compile here: {problem}")
    try:
        every = [variant for a in dict.fromkeys(arch) for variant in families.variants(a)]
    except ValueError as error:
        raise UserError(str(error)) from error
    inputs = {variant: families.name_of(families.inputs_of(variant)) for variant in every}
    dtypes = sorted(set(inputs.values()))
    if wrong := [d for d in dtype or () if d not in dtypes]:
        raise UserError(f"--dtype must be one of {', '.join(dtypes)}, got {wrong[0]!r}")
    variants = [
        v
        for v in every
        if inputs[v] in (dtype or dtypes) and (not head_dim or any(families.serves(v, d) for d in head_dim))
    ]
    if not variants:
        raise UserError(
            f"no kernel has --head-dim {', '.join(map(str, head_dim or ()))}; "
            f"the largest is {max(map(families.largest_dim, arch))}"
        )
    total = _compile_into(out, variants)
    print(f"{len(variants)} kernels, {units.size(total)}, in {out}")
    print(f"use them:                     export STROBE_CUBIN_PATH={out.resolve()}")
    print("and forbid to compile others: export STROBE_NO_COMPILE=1")


_ARCHS = (
    "supported are sm_90a (H100, H200) and, without a letter, sm_80 and later: sm_80 (A100), sm_86 (A10, RTX 30), "
    "sm_89 (L4, L40, RTX 40), sm_90, sm_100 (B200), sm_120 (RTX 50)"
)


def _compile_into(out: Path, variants: list[Any]) -> int:
    """Bytes of machine code."""
    from strobe.cuda.runtime import jit

    total = 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        with command.progress() as bar:
            task = bar.add_task("kernels to compile", total=len(variants))
            for variant in variants:
                bar.update(task, description=f"{variant.arch} {variant.name}")
                artifact = jit.get(variant.source, variant.arch, name=variant.name)
                total += jit.write_layer(out, artifact).stat().st_size
                bar.advance(task)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error
    except (jit.CompileError, jit.CompileForbidden) as error:
        raise UserError(str(error)) from error
    return total
