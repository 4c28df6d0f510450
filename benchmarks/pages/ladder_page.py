"""Keeps what is generated in step with the committed measurements: a line in each rung's header, docs/ladder.md, a page
for each rung in docs/ladder/, and the figure.

`python -m benchmarks.pages --write` writes them; without `--write` it says what is out of date.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.committed import ROOT
from benchmarks.pages import ladder_chart
from benchmarks.pages.generated import marks, replace_between, update
from strobe.learn.ladder import rungs, show
from strobe.learn.ladder.rung import Rung
from strobe.learn.ladder.rungs import RUNGS

FIGURE = Path("docs", "figures", "ladder.svg")


def measurements(root: Path) -> dict[str, dict[str, Any]]:
    """Machine -> what `strobe ladder --json` wrote there."""
    paths = sorted((root / "benchmarks" / "results").glob("*/ladder.json"))
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def completed(data: dict[str, Any]) -> dict[str, Any]:
    """Add a row for each rung without one: those that were not measured have no time."""
    known = {row["number"]: row for row in data["rungs"]}
    return data | {"rungs": [known.get(rung.number) or _unmeasured(rung) for rung in RUNGS]}


def _unmeasured(rung: Rung) -> dict[str, Any]:
    before = rungs.before(rung)
    facts = {"number": rung.number, "title": rung.title, "against": before and before.number}
    return facts | {"predicted": rung.predicted, **dict.fromkeys(("ms", "tflops", "speed_up", "skipped"))}


# ---- the headers of the kernels --------------------------------------------------------------------------------------


def headers(root: Path) -> dict[Path, str]:
    """Each rung's file with the line "Measured", from the first machine that has measurements."""
    found = next(iter(measurements(root).values()), None)
    if found is None:
        return {}
    kernels = root / "src" / "strobe" / "learn" / "ladder" / "kernels"
    device = found["provenance"]["device"]["name"]
    texts = {}
    for row in completed(found)["rungs"]:
        path = kernels / rungs.get(row["number"]).file
        texts[path] = with_measurement(path.read_text(encoding="utf-8"), row, device)
    return texts


def with_measurement(text: str, row: dict[str, Any], device: str) -> str:
    without = re.sub(r"^// Measured: .*\n", "", text, flags=re.MULTILINE)
    if row["ms"] is not None:
        faster = "" if row["speed_up"] is None else f"x {row['speed_up']:.2f}, "
        said = f"{faster}{row['tflops']:.3g} TFLOP/s ({device}; docs/ladder.md says how)"
    else:
        said = "not yet; `strobe ladder` measures it on a GPU"
    line = f"// Measured: {said}\n"
    before, limits, after = without.partition("// What limits it now:")
    if not limits:
        raise ValueError(f"rung {row['number']}: its header does not say what limits it now")
    return before + line + limits + after


# ---- docs/ladder.md --------------------------------------------------------------------------------------------------


def block(root: Path) -> str:
    found = measurements(root)
    lines = [line for machine, data in found.items() for line in _tables(machine, completed(data))]
    if not found:
        lines = ["No measurements are committed yet: `strobe ladder --json OUT` on a GPU makes them.", ""]
        lines += [f"- [{rung.number} {rung.title}](ladder/{rung.number}.md)" for rung in RUNGS]
    return "\n".join(lines) + "\n"


def _tables(machine: str, data: dict[str, Any]) -> list[str]:
    shape, facts = data["shape"], data["provenance"]
    mask = ", causal" if shape["causal"] else ""
    lines = [
        f"**{facts['device']['name']}**, {shape['slices']} heads, {shape['len_q']} queries and keys, "
        f"head dim {shape['dim']}{mask}; {data['method']}; {facts['date'][:10]}, "
        f"`benchmarks/results/{machine}/ladder.json`:",
        "",
    ]
    for heading, flight in (("forward", rungs.FORWARD), ("gradient", rungs.BACKWARD)):
        lines += [f"| rung | {heading} | time | TFLOP/s | measured | predicted |", "|---|---|---:|---:|---:|---:|"]
        numbers = {rung.number for rung in flight}
        lines += [_line(row) for row in data["rungs"] if row["number"] in numbers]
        lines.append("")
    return [*lines, f"Measured and predicted: the speed-up over the rung before ({rungs.comparisons()}).", ""]


def _line(row: dict[str, Any]) -> str:
    number, predicted = f"[{row['number']}](ladder/{row['number']}.md)", f"x {row['predicted']:g}"
    if row["ms"] is not None:
        faster = "" if row["speed_up"] is None else f"x {row['speed_up']:.2f}"
        cells = (number, row["title"], f"{row['ms']:.3f} ms", f"{row['tflops']:.3g}", faster, predicted)
    else:
        why = f"not run: {row['skipped']}" if row["skipped"] else "not measured yet"
        cells = (number, row["title"], why, "", "", predicted)
    return f"| {' | '.join(cells)} |"


def updated(text: str, root: Path) -> str:
    return replace_between(text, *marks("ladder"), block(root))


# ---- a page for each rung --------------------------------------------------------------------------------------------


def pages(root: Path) -> dict[Path, str]:
    return {root / "docs" / "ladder" / f"{rung.number}.md": _page(rung) for rung in RUNGS}


def diff_mark(before: Rung, rung: Rung) -> str:
    """The line of a page that the site replaces by the diff (`with_diffs`), so that no diff is committed."""
    return f"<!-- diff {before.number} {rung.number} -->"


def with_diffs(text: str) -> str:
    """A page's text with its diffs in place, headers left out: they stand above."""

    def diff(found: re.Match[str]) -> str:
        return f"````diff\n{show.unified(*(rungs.get(number) for number in found.groups()), headers=False)}````"

    return re.sub(r"^<!-- diff (\w+) (\w+) -->$", diff, text, flags=re.MULTILINE)


def _page(rung: Rung) -> str:
    """Write the page of a rung: what the header says, a mark where the diff from the rung before goes, and the whole
    file, which Sphinx includes."""
    kernels = "../../src/strobe/learn/ladder/kernels"
    lines = [
        f"<!-- generated: python -m benchmarks.pages --write -->\n# {rung.number} {_plain(rung.title)}",
        "",
        *(f"**{name}.** {_plain(_sentence(text))}\n" for name, text in rung.header.items()),
    ]
    before = rungs.before(rung)
    if rung.library and before is not None:
        lines += [
            f"This rung is the library's own kernel. `strobe ladder diff {before.number} {rung.number}` compares it with the "
            "rung before.",
            "",
        ]
    elif before is not None:
        lines += [f"## From {before.number} to {rung.number}", "", diff_mark(before, rung), ""]
    lines += ["## The file", "", f"`src/strobe/learn/ladder/kernels/{rung.file}`", ""]
    lines += [f"```{{literalinclude}} {kernels}/{rung.file}", ":language: cuda", ":linenos:", "```", ""]
    steps = [f"[{way} {other.number}]({other.number}.md)" for way, other in _neighbours(RUNGS.index(rung))]
    return "\n".join([*lines, " · ".join([*steps, "[the ladder](../ladder.md)"]), ""])


def _sentence(text: str) -> str:
    """Capitalise the text as a paragraph begins; `x 8` is a number, and stays small."""
    return text if text.startswith("x ") else text[:1].upper() + text[1:]


def _neighbours(index: int) -> list[tuple[str, Rung]]:
    found = [("←", RUNGS[index - 1])] if index else []
    return found + ([("→", RUNGS[index + 1])] if index + 1 < len(RUNGS) else [])


def _plain(text: str) -> str:
    """Comments are not Markdown."""
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "\\<").replace("|", "\\|")


# ---- all of it -------------------------------------------------------------------------------------------------------


def _forget() -> None:
    """Forget what was read of the kernels before they were written: it is old now."""
    for rung in RUNGS:
        rung.__dict__.pop("text", None)
        rung.__dict__.pop("header", None)


def texts(root: Path) -> dict[Path, str]:
    """Path -> what it should hold. The figure is not among them: its bytes depend on the version of the plotting library."""
    page = root / "docs" / "ladder.md"
    return headers(root) | pages(root) | {page: updated(page.read_text(encoding="utf-8"), root)}


def main(arguments: list[str], root: Path = ROOT) -> int:
    if "--write" not in arguments:
        return update(texts(root), root, write=False)
    update(headers(root), root, write=True)
    _forget()
    for found in list(measurements(root).values())[:1]:
        (root / FIGURE).write_text(ladder_chart.svg(completed(found)), encoding="utf-8")
    return update(texts(root), root, write=True)
