"""Print the command line's results."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strobe.backends import dispatch
from strobe.learn import worked_example
from strobe.measure import units
from strobe.tools import demo

stdout, stderr = Console(highlight=False), Console(stderr=True, highlight=False)


def numbers(t: torch.Tensor) -> str:
    if t.dim() > 1:
        return "[" + ", ".join(numbers(row) for row in t) + "]"
    return "[" + ", ".join(f"{x:.9g}" for x in t.tolist()) + "]"


# ---- demo ------------------------------------------------------------------------------------------------------------


class DemoTable:
    """Rows of `strobe demo`, each printed when it is there."""

    # Name, heading, width; what is as wide as a number stands on the right.
    _COLUMNS = (
        ("tokens", "tokens", 7),
        ("attention", "attention", -10),
        ("error", "error", 8),
        ("time", "time", 9),
        ("faster", "to standard", -14),
        ("memory", "memory", 9),
        ("less", "to standard", -14),
    )

    def __init__(self) -> None:
        self._base: demo.Row | None = None
        self._print({name: heading for name, heading, _ in self._COLUMNS}, "bold")

    def show(self, row: demo.Row) -> None:
        standard = row.method == demo.STANDARD
        if standard:
            self._base = row
        cells = {"tokens": str(row.length) if standard else "", "attention": row.method}
        if row.skipped:
            self._print(cells, "yellow", f"  not run: {row.skipped}")
            return
        assert row.verdict is not None
        cells |= {"error": f"{row.verdict.largest:.1e}", "time": units.milliseconds(row.ms)}
        cells["memory"] = units.size(row.extra_bytes)
        base = None if standard else self._base
        if base is not None and base.ms and row.ms:
            cells["faster"] = units.faster(base.ms / row.ms)
        if base is not None and base.extra_bytes and row.extra_bytes:
            cells["less"] = units.less(base.extra_bytes / row.extra_bytes)
        self._print(cells, None if row.exact else "bold red")
        if not row.exact:
            stdout.print(f"{row.length} tokens, {row.verdict}", style="bold red", markup=False, soft_wrap=True)

    def _print(self, cells: dict[str, str], style: str | None, more: str = "") -> None:
        padded = (
            cells.get(name, "").ljust(-width) if width < 0 else cells.get(name, "").rjust(width)
            for name, _, width in self._COLUMNS
        )
        text = "  ".join(padded).rstrip() + more
        stdout.print(text, style=style, markup=False, soft_wrap=True)


def show_demo_notes(device: torch.device, tiles: bool) -> None:
    memory = demo.MEMORY_NOTE.get(device.type, "not measured on this device")
    stdout.print(
        f"error: the largest difference from float64 in up to {demo.CHECKED_ROWS} rows; time: of the fastest call; "
        f"memory: the peak above the inputs, {memory}",
        style="dim",
    )
    if tiles and device.type == "cpu":
        stdout.print(demo.TILES_NOTE, style="dim")


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


def show_doctor(report: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, ready, text in _findings(report):
        state = Text("ready", "green") if ready else Text("no", "yellow") if ready is False else ""
        table.add_row(
            name, state, Text(text)
        )  # a plain string would lose what stands in brackets: strobe-attention[cu13]
    stdout.print(table)
    stdout.print()
    stdout.print(_hosts_table(report["hosts"]))
    stdout.print("\nNext:")
    for step in report["next"]:
        stdout.print(f"- {step}", markup=False, soft_wrap=True)


def _hosts_table(hosts: dict[str, dict[str, str | None]]) -> Table:
    """Installed hosts first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("host", "installed", "strobe, in this process"):
        table.add_column(heading)
    for name, host in sorted(hosts.items(), key=lambda item: item[1]["version"] is None):
        label = "torch (SDPA)" if name == "torch" else name
        table.add_row(label, host["version"] or "no", Text(host["strobe"] or ""))
    return table


def _findings(report: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    """(what, ready or not or neither, the facts)"""
    torch_, cache, compiler = report["torch"], report["cache"], report["compiler"]
    lines: list[tuple[str, bool | None, str]] = [
        ("strobe", None, f"{report['strobe']}, Python {report['python']}"),
        ("torch", True, f"{torch_['version']}, CUDA {torch_['cuda'] or 'not built in'}, {torch_['threads']} threads"),
    ]
    for gpu in report["gpus"]:
        facts = (gpu["name"], gpu["arch"], f"{gpu['multiprocessors']} multiprocessors", units.size(gpu["memory"]))
        lines.append(("GPU", True, ", ".join(facts)))
    if not report["gpus"]:
        lines.append(("GPU", False, "torch finds none"))
    for key, name in (("driver", "driver"), ("nvrtc", "NVRTC")):
        lines.append((name, report[key]["problem"] is None, report[key]["problem"] or report[key]["version"] or ""))
    lines.append(("cuda-bindings", report["cuda-bindings"] is not None, report["cuda-bindings"] or "not installed"))
    held = ""
    if cache["directory"] is not None:
        counts = f"{cache['kernels']} cubins, {cache['libraries']} emulator libraries, {units.size(cache['bytes'])}"
        held = f"{cache['directory']}: {counts}"
    lines.append(("cache", cache["problem"] is None, "; ".join(filter(None, (held, cache["problem"])))))
    lines += [("cubin layer", None, layer) for layer in cache["layers"]]
    lines.append(("C++ compiler", compiler["problem"] is None, compiler["problem"] or compiler["path"]))
    for name, problem in report["backends"].items():
        lines.append((f"backend {name}", problem is None, problem or dispatch.get(name).summary))
    return lines
