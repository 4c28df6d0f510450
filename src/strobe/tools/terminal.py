"""How the command line's results look: tables, progress, numbers with their units."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from strobe.backends import dispatch
from strobe.learn import worked_example
from strobe.tools import demo

stdout, stderr = Console(highlight=False), Console(stderr=True, highlight=False)


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=stderr, transient=True)


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def size(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"


def ratio(ours: float | None, theirs: float | None) -> str:
    return f"x {ours / theirs:.2g}" if ours and theirs else "–"


def numbers(t: torch.Tensor) -> str:
    if t.dim() > 1:
        return "[" + ", ".join(numbers(row) for row in t) + "]"
    return "[" + ", ".join(f"{x:.9g}" for x in t.tolist()) + "]"


# ---- demo ------------------------------------------------------------------------------------------------------------


def show_demo(rows: list[demo.Row], device: torch.device) -> None:
    table = Table()
    for heading in ("tokens", "attention", "error", "time", "to standard", "memory", "to standard"):
        table.add_column(heading, justify="left" if heading == "attention" else "right", min_width=7)
    base = rows[0]
    for row in rows:
        if row.method == demo.STANDARD:
            base = row
            table.add_section()
        tokens = str(row.length) if row is base else ""
        if row.skipped:
            table.add_row(tokens, row.method, "not run")
            continue
        error = f"{row.error:.1e}" if row.exact else f"[bold red]{row.error:.1e}[/]"
        compared = row is not base
        faster = ratio(row.seconds, base.seconds) if compared else ""
        smaller = ratio(row.extra_bytes, base.extra_bytes) if compared else ""
        table.add_row(tokens, row.method, error, seconds(row.seconds), faster, size(row.extra_bytes), smaller)
    stdout.print(table)
    for row in rows:
        if row.skipped:
            stdout.print(f"{row.length} tokens, {row.method}: not run, {row.skipped}", style="yellow")
        if not row.exact:
            wrong = f"error {row.error:.1e}, but rounding explains {row.allowed:.1e} at most"
            stdout.print(f"{row.length} tokens, {row.method}: {wrong}", style="bold red")
    stdout.print(
        "error: the largest difference from float64; time: the fastest of several calls; memory: the peak above the inputs, "
        f"{demo.MEMORY_NOTE.get(device.type, 'not measured on this device')}",
        style="dim",
    )


def print_tensors(**named: torch.Tensor) -> None:
    """The first head of each (1, length, heads, dim) tensor, as plain text, so that it can be piped."""
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=120)
    for name, t in named.items():
        head = t[0, :, 0].float().cpu()
        print(f"{name}, {head.shape[0]} x {head.shape[1]}")
        print(str(head).removeprefix("tensor(").removesuffix(")").replace("\n       ", "\n"), end="\n\n")
    torch.set_printoptions(profile="default")


_EXAMPLE_WORDS = """
Attention in tiles of 2 queries and 2 keys. For each query and each tile of keys:
  S      the scores of the two keys: query · key / sqrt(2)
  m      the largest score of the row so far
  alpha  e^(m before - m now): what was summed before is multiplied by it, because it was measured from the old m
  P      the weights of this tile, measured from m: e^(S - m)
  l      the sum of all weights of the row so far, measured from m
  O/l    the output if these were all the keys
"""


def show_worked_example(checks: list[worked_example.Check]) -> None:
    q, k, v = worked_example.inputs()
    for name, t in (("Query", q), ("Key", k), ("Value", v)):
        print(f"{name} = {numbers(t)}")
    print(_EXAMPLE_WORDS)
    for step in worked_example.tile_steps(q, k, v):
        if step.keys.start == 0:
            print(f"queries {step.rows.start} and {step.rows.stop - 1}: nothing is summed yet, m = -inf, l = 0, O = 0")
        print(f"  keys {step.keys.start} and {step.keys.stop - 1}")
        for row in range(len(step.rows)):
            s, p, o = (numbers(t[row]) for t in (step.s, step.p, step.normalised))
            print(f"    query {step.rows[row]}:  S = {s}   m = {step.m[row]:.6f}   alpha = {step.alpha[row]:.6e}")
            print(f"              P = {p}   l = {step.l[row]:.9f}   O/l = {o}")
    failed = [check for check in checks if not check.passed]
    agree = f"{len(checks) - len(failed)} of {len(checks)} numbers"
    print(f"\n{agree} agree with values that were worked out independently, strobe.attention's among them")
    for check in failed:
        print(f"  {check.what}: {check.computed!r}, should be {check.golden!r} within {check.tolerance}")
    print("\nTo watch it run in a browser: strobe explain-page --open")


# ---- doctor ----------------------------------------------------------------------------------------------------------


def show_doctor(found: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, ready, text in _findings(found):
        state = Text("ready", "green") if ready else Text("no", "yellow") if ready is False else ""
        table.add_row(name, state, Text(text))  # a plain string would lose what stands in brackets: strobe[cu13]
    stdout.print(table)
    stdout.print()
    stdout.print(_hosts_table(found["hosts"]))
    stdout.print("\nNext:")
    for step in found["next"]:
        stdout.print(f"- {step}", markup=False, soft_wrap=True)


def _hosts_table(hosts: dict[str, dict[str, str | None]]) -> Table:
    """Installed hosts first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("host", "installed", "strobe"):
        table.add_column(heading)
    for name, host in sorted(hosts.items(), key=lambda item: item[1]["version"] is None):
        label = "torch (SDPA)" if name == "torch" else name
        table.add_row(label, host["version"] or "no", Text(host["strobe"] or ""))
    return table


def _findings(found: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    """(what, ready or not or neither, the facts)"""
    torch_, cache, compiler = found["torch"], found["cache"], found["compiler"]
    lines: list[tuple[str, bool | None, str]] = [
        ("strobe", None, f"{found['strobe']}, Python {found['python']}"),
        ("torch", True, f"{torch_['version']}, CUDA {torch_['cuda'] or 'not built in'}, {torch_['threads']} threads"),
    ]
    for gpu in found["gpus"]:
        facts = (gpu["name"], gpu["arch"], f"{gpu['multiprocessors']} multiprocessors", size(gpu["memory"]))
        lines.append(("GPU", True, ", ".join(facts)))
    if not found["gpus"]:
        lines.append(("GPU", False, "torch finds none"))
    for key, name in (("driver", "driver"), ("nvrtc", "NVRTC")):
        lines.append((name, found[key]["problem"] is None, found[key]["problem"] or found[key]["version"] or ""))
    lines.append(("cuda-bindings", found["cuda-bindings"] is not None, found["cuda-bindings"] or "not installed"))
    held = (
        ""
        if cache["directory"] is None
        else f"{cache['directory']}: {cache['kernels']} cubins, {cache['libraries']} emulator libraries, {size(cache['bytes'])}"
    )
    lines.append(("cache", cache["problem"] is None, "; ".join(filter(None, (held, cache["problem"])))))
    lines += [("cubin layer", None, layer) for layer in cache["layers"]]
    lines.append(("C++ compiler", compiler["problem"] is None, compiler["problem"] or compiler["path"]))
    for name, problem in found["backends"].items():
        lines.append((f"backend {name}", problem is None, problem or dispatch.get(name).summary))
    return lines
