"""Keeps what is generated in step with the committed measurements: a line in each rung's header, and a part of
docs/ladder.md, which is made from these headers.

`python -m strobe.learn.ladder.docs --write` writes it; without `--write` it says what is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from strobe.learn.ladder.rung import Rung
from strobe.learn.ladder.rungs import RUNGS
from strobe.measure.generated import replace_between

BEGIN, END = "<!-- ladder: begin (python -m strobe.learn.ladder.docs --write) -->", "<!-- ladder: end -->"


def measurements(root: Path) -> dict[str, dict[str, Any]]:
    """Machine -> what `strobe ladder --json` wrote there."""
    paths = sorted((root / "benchmarks" / "results").glob("*/ladder.json"))
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def headers(root: Path) -> dict[Path, str]:
    """Each rung's file with the line "Measured", from the first machine that has measurements."""
    found = next(iter(measurements(root).values()), None)
    kernels = root / "src" / "strobe" / "learn" / "ladder" / "kernels"
    texts = {}
    for row in found["rungs"] if found else ():
        (rung,) = [rung for rung in RUNGS if rung.number == row["number"]]
        text = (kernels / rung.file).read_text(encoding="utf-8")
        texts[kernels / rung.file] = with_measurement(text, row, found["provenance"]["device"]["name"])  # type: ignore[index]
    return texts


def with_measurement(text: str, row: dict[str, Any], device: str) -> str:
    without = re.sub(r"^// Measured: .*\n", "", text, flags=re.MULTILINE)
    if row["ms"] is None:
        return without
    faster = "" if row["speed_up"] is None else f"x {row['speed_up']:.2f}, "
    line = f"// Measured: {faster}{row['tflops']:.3g} TFLOP/s ({device}; docs/ladder.md says how)\n"
    before, limits, after = without.partition("// What limits it now:")
    if not limits:
        raise ValueError(f"rung {row['number']}: its header does not say what limits it now")
    return before + line + limits + after


def block(root: Path) -> str:
    found = measurements(root)
    lines = [line for machine, data in found.items() for line in _table(machine, data)]
    if not found:
        lines = ["No measurements are committed yet: `strobe ladder --json OUT` on a GPU makes them.", ""]
    for rung in RUNGS:
        lines += _section(rung)
    return "\n".join(lines) + "\n"


def _table(machine: str, data: dict[str, Any]) -> list[str]:
    shape, facts = data["shape"], data["provenance"]
    mask = ", causal" if shape["causal"] else ""
    lines = [
        f"**{facts['device']['name']}**, {shape['slices']} heads, {shape['len_q']} queries and keys, "
        f"head dim {shape['dim']}{mask}; {data['method']}; {facts['date'][:10]}, `benchmarks/results/{machine}/ladder.json`:",
        "",
        "| rung | | time | TFLOP/s | faster | predicted |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in data["rungs"]:
        if row["ms"] is None:
            lines.append(
                f"| {row['number']} | {row['title']} | not run: {row['skipped']} | | | x {row['predicted']:g} |"
            )
            continue
        faster = "" if row["speed_up"] is None else f"x {row['speed_up']:.2f}"
        cells = (
            row["number"],
            row["title"],
            f"{row['ms']:.3f} ms",
            f"{row['tflops']:.3g}",
            faster,
            f"x {row['predicted']:g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "Faster: than the rung before; b1: than 05, for equal work.", ""]


def _section(rung: Rung) -> list[str]:
    lines = [f"### {rung.number} {rung.title}", "", f"`src/strobe/learn/ladder/kernels/{rung.file}`", ""]
    lines += [f"- *{name}:* {_plain(text)}" for name, text in rung.header.items()]
    return [*lines, ""]


def _plain(text: str) -> str:
    """Comments are not Markdown."""
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "\\<").replace("|", "\\|")


def updated(text: str, root: Path) -> str:
    return replace_between(text, BEGIN, END, block(root))


def main(arguments: list[str], root: Path | None = None) -> int:
    root = root or Path(__file__).resolve().parents[4]
    stale = []
    for path, wanted in headers(root).items():
        if path.read_text(encoding="utf-8") != wanted:
            stale.append(path)
            if "--write" in arguments:
                path.write_text(wanted, encoding="utf-8")
    for rung in RUNGS:  # what was read before is old now
        rung.__dict__.pop("text", None)
        rung.__dict__.pop("header", None)
    page = root / "docs" / "ladder.md"
    text = page.read_text(encoding="utf-8")
    if (wanted := updated(text, root)) != text:
        stale.append(page)
        if "--write" in arguments:
            page.write_text(wanted, encoding="utf-8")
    if "--write" in arguments:
        return 0
    for path in stale:
        print(f"{path.relative_to(root)} is out of date: python -m strobe.learn.ladder.docs --write")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
