"""Files of results, comparisons, conclusions, the command line on them, figures, provenance."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_results import synthetic
from typer.testing import CliRunner

from benchmarks.pages import results_page
from strobe.bench import ceilings, claims, read_results, results as files
from strobe.bench.compare import comparable, compare, other_neighbours
from strobe.bench.conclusions import conclusions
from strobe.bench.report import page
from strobe.bench.results import Results
from strobe.measure import provenance, units
from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.statistics import geometric_mean
from strobe.measure.tolerance import Verdict
from strobe.tools import cli

SMALL = ("sweep",)
BOTH = (TURNS, SUSTAINED)


def terminal(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, list(arguments))
    return done.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", done.output)


@pytest.fixture(scope="module")
def made() -> Results:
    return synthetic(SMALL)


# ---- files


@pytest.mark.parametrize("methods", [(TURNS,), BOTH], ids=str)
def test_a_file_holds_everything(methods: tuple[str, ...], tmp_path: Path) -> None:
    made = synthetic(SMALL, methods=methods)
    path = tmp_path / "a" / "r.json"
    files.save(made, path)
    again = read_results.load(path)
    assert [(r.identity, r.case, r.status, r.reason, r.kernels) for r in again.rows] == [
        (r.identity, r.case, r.status, r.reason, r.kernels) for r in made.rows
    ]
    for before, after in zip(made.rows, again.rows, strict=True):
        assert (before.timing is None) == (after.timing is None) and (before.energy is None) == (after.energy is None)
        if before.timing is not None and after.timing is not None:
            assert after.ms == pytest.approx(before.ms, rel=1e-5)
            assert len(after.timing.samples_ms) == len(before.timing.samples_ms)
        if before.energy is not None and after.energy is not None:
            assert after.energy.joules_per_tflop == pytest.approx(before.energy.joules_per_tflop, rel=1e-5)
    assert again.provenance == made.provenance and not list(tmp_path.glob("a/.tmp*"))
    assert again.ceilings.sustained_tflops == {"bfloat16": 700.0}


def test_not_a_number_survives(tmp_path: Path) -> None:
    """JSON has no NaN, and results that are wrong have little else."""
    run = synthetic(("overhead",))
    row = run.rows[0]
    row.status, row.reason, row.timing = "wrong", "NaN", None
    row.error = Verdict("every head", float("nan"), 1.0, problem="3 of 4 are NaN")
    files.save(run, tmp_path / "r.json")
    json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = read_results.load(tmp_path / "r.json").rows[0]
    assert again.error is not None and not again.error.passed and again.error.problem == "3 of 4 are NaN"
    assert "Attention on" in page.html([run])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "strobe bench", "schema": 2}', "[" * 100_000])
def test_other_files_are_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="other.json"):
        read_results.load(path)


def places(data: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*where, key)
        yield from places(value, (*where, key))


def small_file() -> dict[str, Any]:
    run = synthetic(("grid36",), methods=BOTH)
    kept: dict[tuple[bool, str, str], Any] = {}
    for row in reversed(run.rows):  # one of each kind
        kept.setdefault((row.timed, row.method if row.timed else "", row.status), row)
    run.rows = list(kept.values())
    for row in run.rows:
        if row.timing is not None:
            row.timing.samples_ms = row.timing.samples_ms[:2]
    return json.loads(json.dumps(files.to_json(run)))


def test_a_field_of_another_type_is_named() -> None:
    """Whatever stands in a file in place of what should: it is refused with the name of the field, or drawn."""
    whole = small_file()
    refused = 0
    for place in places(whole):
        for value in (None, "<!--<script>", [], {}, -1, 1e999, "\ud800"):
            data = copy.deepcopy(whole)
            holder = data
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            try:
                found = read_results.from_json(data)
            except ValueError as error:
                refused += 1
                assert str(error), (place, value)
                continue
            html = page.html([found])
            assert html.count("<script") == 3 and html.count("</script>") == 3, (place, value)
            results_page.page({"machine": {"file": found}})
            html.encode()
    assert refused > 200


def test_the_error_says_where(tmp_path: Path) -> None:
    data = small_file()
    data["rows"] = [row for row in data["rows"] if "timing" in row]
    data["rows"][0]["timing"]["summary"]["median"] = "fast"
    (tmp_path / "r.json").write_text(json.dumps(data))
    code, output = terminal("report", str(tmp_path / "r.json"), "-o", str(tmp_path / "report"))
    said = " ".join(output.replace("│", " ").split())
    assert code == 2 and "rows[0].timing.summary.median must be a number, got 'fast'" in said


# ---- comparisons


def test_regressions_are_found_and_noise_is_not(made: Results) -> None:
    same = compare(made, synthetic(SMALL, seed=5))
    assert not any(c.bad for c in same)
    slower = compare(made, synthetic(SMALL, faster=0.9, seed=5))
    assert {c.provider for c in slower if c.kind == "regression"} == {"strobe-sm90", "strobe-sm80"}
    faster = compare(made, synthetic(SMALL, faster=1.2, seed=5))
    assert any(c.kind == "improvement" for c in faster) and not any(c.bad for c in faster)


def test_methods_are_compared_with_themselves() -> None:
    """Sustained times are longer; that is no regression."""
    turns, both = synthetic(("sweep",)), synthetic(("sweep",), methods=BOTH, seed=5)
    changes = compare(turns, both)
    assert not any(c.bad for c in changes)
    assert {c.method for c in changes if c.kind == "new"} == {SUSTAINED}
    reason = comparable(turns, synthetic(("sweep",), methods=(SUSTAINED,)))
    assert reason == "different methods: in short turns and sustained"


def test_what_stops_working_is_a_regression(made: Results) -> None:
    now = synthetic(SMALL)
    row = next(r for r in now.rows if r.provider == "strobe-sm90")
    row.status, row.reason, row.timing = "failed", "broken", None
    bad = [c for c in compare(made, now) if c.bad]
    assert [(c.provider, c.kind) for c in bad] == [("strobe-sm90", "broken")]


def test_the_command_exits_accordingly(made: Results, tmp_path: Path) -> None:
    for name, run in (("old", made), ("same", synthetic(SMALL, seed=9)), ("slow", synthetic(SMALL, faster=0.8))):
        files.save(run, tmp_path / f"{name}.json")
    old, same, slow = (str(tmp_path / f"{name}.json") for name in ("old", "same", "slow"))
    assert terminal("bench", "--result", same, "--compare", old)[0] == 0
    code, output = terminal("bench", "--result", slow, "--compare", old)
    assert code == 1 and "regression" in output and "strobe-sm90" in output
    other = synthetic(SMALL)
    other.provenance["device"] = {**other.provenance["device"], "name": "Another GPU"}
    files.save(other, tmp_path / "other.json")
    code, output = terminal("bench", "--result", str(tmp_path / "other.json"), "--compare", old)
    assert code == 2 and "different devices" in " ".join(output.split()) and comparable(made, other) is not None


def test_other_neighbours_are_noted(made: Results, tmp_path: Path) -> None:
    """The clock of a GPU follows what ran before."""
    fewer = synthetic(SMALL)
    fewer.rows = [row for row in fewer.rows if row.provider != "torch-cudnn"]
    assert other_neighbours(made, made) is None and "torch-cudnn took turns" in str(other_neighbours(made, fewer))
    files.save(made, tmp_path / "old.json")
    files.save(fewer, tmp_path / "fewer.json")
    code, output = terminal("bench", "--result", str(tmp_path / "fewer.json"), "--compare", str(tmp_path / "old.json"))
    assert code == 0 and "note: torch-cudnn took turns in only one" in " ".join(output.split())
    fewer.provenance["device"] = {**fewer.provenance["device"], "kind": "cpu"}
    assert other_neighbours(made, fewer) is None


# ---- the report


def test_the_page_is_one_file_that_asks_for_nothing(made: Results, tmp_path: Path) -> None:
    text = page.write([made, synthetic(SMALL, faster=0.9)], tmp_path).read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"'\s)<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "@import" not in text and "fetch(" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert len(data["run"]["rows"]) == len(made.rows) and "samples_ms" not in text
    kinds = {change["kind"] for change in data["compared"][0]["changes"]}
    assert "regression" in kinds
    assert any(row["status"] == "out of memory" for row in data["run"]["rows"])


@pytest.mark.parametrize("evil", ["</script><b>&", "<!--<script>", "TITLE /*DATA*/ /*SCRIPT*/"])
def test_text_from_results_cannot_break_the_page(evil: str, tmp_path: Path) -> None:
    run = synthetic(("overhead",))
    run.rows[0].reason = run.rows[1].provider = evil
    run.provenance["device"] = {**run.provenance["device"], "name": f"<i>{evil}"}
    text = page.write([run], tmp_path).read_text(encoding="utf-8")
    assert text.count("<script") == 3 == text.count("</script>") and "<!--" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert any(row["provider"] == evil for row in data["run"]["rows"])


def test_files_of_one_device_are_one_report() -> None:
    """Two suites, two methods: what was not measured twice belongs together."""
    parts = [synthetic(("sweep",)), synthetic(("grid36",)), synthetic(("grid36",), methods=(SUSTAINED,))]
    data = page.page_data(parts)
    assert list(data["run"]["suites"]) == ["sweep", "grid36"] and list(data["run"]["methods"]) == [TURNS, SUSTAINED]
    assert data["compared"] == [] and len(data["run"]["rows"]) == sum(len(part.rows) for part in parts)
    assert any("sustained" in sentence for sentence in data["run"]["conclusions"]["grid36"]["forward"])


@pytest.mark.parametrize("name", ["README.md", "pyproject.toml"])
def test_what_is_no_result_says_what_is_wanted(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: not JSON.*strobe bench --out FILE"):
        read_results.load(Path(__file__).parents[2] / name)


def test_a_report_opens_on_the_forward_and_mixes_no_passes(tmp_path: Path) -> None:
    """Whatever the order of the files: each row says its pass, and so does each conclusion."""
    parts = [synthetic(("grid36",), direction="backward"), synthetic(("grid36",)), synthetic(("sweep",))]
    run = page.page_data(parts)["run"]
    assert list(run["passes"]) == ["forward", "backward"] and {row["pass"] for row in run["rows"]} == set(run["passes"])
    forward, backward = (run["conclusions"]["grid36"][p] for p in ("forward", "backward"))
    assert forward[0].startswith("Forward") and backward[0].startswith("Backward")
    assert not [s for s in forward if "ackward" in s] and not [s for s in backward if s.startswith("Forward")]
    assert run["conclusions"]["sweep"]["backward"] == []


def test_a_line_joins_cases_that_differ_in_length_alone() -> None:
    """Decode stands beside prompts in one suite: other queries and other batches are other panels."""
    run = read_results.load(Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "gqa.json")
    for title, rows in page.families(run.rows).items():
        found = [(row.provider, row.case.len_k) for row in rows]
        assert len(found) == len(set(found)), title


# ---- what is concluded


def test_claims(made: Results) -> None:
    exponents = claims.memory_exponents(made, "sweep")
    assert exponents["strobe-sm90"] == pytest.approx(1.0, abs=0.01)
    assert exponents["torch-math"] == pytest.approx(2.0, abs=0.01)
    duels = claims.duels(claims.selected(made.rows, "sweep"), "standard")
    assert all(other.ms > ours.ms for ours, other in duels if ours.ms and other.ms)
    assert any(row.status == "out of memory" for row in made.rows)


def mean_speed(
    run: Results, suite: str, direction: str = "forward", method: str = TURNS, value: Any = lambda row: row.ms
) -> float:
    """Return the mean speed of our fastest beside cuDNN, which is the fastest peer here."""
    duels = claims.duels(claims.selected(run.rows, suite, direction, method), "peer")
    assert {other.provider for _, other in duels} == {"torch-cudnn"}
    return geometric_mean([value(other) / value(ours) for ours, other in duels])


def test_conclusions_by_both_methods() -> None:
    run = synthetic(("sweep",), methods=BOTH)
    peer, standard, oom, energy, memory = conclusions(run)
    assert all(units.faster(mean_speed(run, "sweep", method=method)) in peer for method in BOTH)
    assert "torch-cudnn" in peer and "torch-math-half" in standard
    without_memory = {row.case.key for row in run.rows if row.status == "out of memory"}
    assert f"{len(without_memory)} of 24" in oom
    joules = mean_speed(run, "sweep", method=SUSTAINED, value=claims.joules_per_tflop)
    assert units.less(joules) in energy and "strobe-sm90" in memory


def test_conclusions_say_where_it_is_slower() -> None:
    run = synthetic(("grid36",), faster=0.7)
    (sentence, *_) = conclusions(run)
    said = units.faster(mean_speed(run, "grid36"))
    assert said in sentence and "slower" in said and "36 of 36" in sentence
    assert conclusions(synthetic(("overhead",))) == []  # CPU times have no such duel


def test_backward_is_concluded_on_its_own() -> None:
    run = synthetic(("grid36",), direction="backward")
    assert units.faster(mean_speed(run, "grid36", "backward")) in conclusions(run)[0]


# ---- the command line


def test_the_command_names_what_is_wrong() -> None:
    code, output = terminal("bench", "--suite", "grid37", "--device", "cpu")
    assert code == 2 and "grid36" in output and "grid37" in output
    assert terminal("report", "no-such-file.json")[0] == 2
    code, output = terminal("bench", "--list", "--suite", "models")
    assert code == 0 and "models/gpt-oss-local" in output and "torch-math-half" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--list", "--suite", "nosuch"), ("--suite", "nosuch", "grid36")),
        (("--device", "zzz"), ("device", "zzz")),
        (("--device", "cuda:77"), ("device", "cuda:77")),
        (("--method", "mean"), ("--method", "mean", "sustained")),
        (("--pass", "sideways"), ("--pass", "sideways", "backward")),
        (("--l2", "cold"), ("--l2", "cold", "flushed")),
        (("--provider", "nobody", "--device", "cpu"), ("provider", "nobody")),
        (("--only", "nothing", "--device", "cpu"), ("only", "nothing")),
        (("--method", "do_bench", "--device", "cpu"), ("method", "do_bench")),
        (("--suite", "grid36", "--device", "cpu"), ("grid36", "sized for a GPU", "--yes")),
        (("--result", "missing.json"), ("missing.json",)),
    ],
    ids=lambda x: " ".join(x),
)
def test_user_errors_are_lines(arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli.app, ["bench", *arguments])
    said = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", done.output).replace("│", " ").split())
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.exception
    assert [word for word in says if word not in said] == []


def test_the_terminal_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables without nonsense, a busy machine's warning, and the conclusion."""
    import io

    from rich.console import Console

    from strobe.bench import table

    run = synthetic(("sweep",), methods=BOTH)
    cpu = {"kind": "cpu", "name": "A CPU", "memory_bytes": 1 << 34}
    run.provenance |= {"device": cpu, "host_load": 1.9, "host_cores": 2}
    noisy, tiny, above = (r for r in run.rows[:3])
    assert noisy.timing is not None
    object.__setattr__(noisy.timing.summary, "high", 20 * noisy.timing.summary.median)
    tiny.tflops, above.of_matmul = 3e-7, 2.25
    out = io.StringIO()
    table.show(run, Console(file=out, width=160))
    text = out.getvalue()
    assert "Other work ran on this machine when the run began (load 1.9 on 2 cores)" in text
    assert "noisy" in text and "1645" not in text and "0.3 MFLOP/s" in text and "225%*" in text
    assert table.NOISY_NOTE in text and table.ABOVE_NOTE.split(",")[0] in text
    assert "head dim 128, no mask, 1K tokens, sustained" in text and "690 W" in text and "J/TF" in text
    conclusion = " ".join(line.strip() for line in text.splitlines()[-12:])
    assert "strobe-sm90 is 1." in conclusion and "faster in short turns" in conclusion


# ---- ceilings and provenance


def test_cycles_of_the_matrix_units() -> None:
    """132 multiprocessors at 1 GHz: 4096 FLOP each per clock, 540 672 per clock together."""
    flops = 132 * 4096 * 1_000_000
    assert ceilings.matrix_unit_use(flops, 1.0, 1000, "sm_90", "bfloat16", 132) == pytest.approx(1.0)
    assert ceilings.matrix_unit_use(flops, 2.0, 1000, "sm_90", "float16", 132) == pytest.approx(0.5)
    for unknown in (("sm_89", "bfloat16", 1000), ("sm_90", "float32", 1000), ("sm_90", "bfloat16", None)):
        arch, dtype, mhz = unknown
        assert ceilings.matrix_unit_use(flops, 1.0, mhz, arch, dtype, 132) is None


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023", "535.54.03"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)",
            "580.159.04",
        ),
        ("GCC version: 12.2.0", None),
    ],
)
def test_driver_version(line: str, version: str | None) -> None:
    assert provenance.driver_version(line) == version


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: A CPU @ 2.0GHz: fast\nmodel name\t: A CPU @ 2.0GHz: fast\n",
            "A CPU @ 2.0GHz: fast",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "a machine, implementer 0x41, part 0xd0c"),
        ("", "a machine"),
    ],
)
def test_the_name_of_a_cpu(cpuinfo: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.platform, "processor", lambda: "")
    monkeypatch.setattr(provenance.platform, "machine", lambda: "a machine")
    assert provenance.cpu_name_in(cpuinfo) == name
