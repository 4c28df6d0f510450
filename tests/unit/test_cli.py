"""The command line, run in this process: what it prints, what it returns, and that user errors are a line and exit code
2."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
import typer

import strobe
from strobe.backends import dispatch
from strobe.cuda.runtime import jit
from strobe.learn import worked_example
from strobe.measure import command
from strobe.measure.tolerance import Verdict
from strobe.tools import cli, demo, demo_inputs, doctor, terminal

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def strobe_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, value in WIDE.items():
        monkeypatch.setenv(name, value)
    for console in (terminal.stdout, terminal.stderr):  # made before, perhaps, by a test without that environment
        monkeypatch.setattr(console, "width", int(WIDE["COLUMNS"]))

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["strobe", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return run


SMALL = ("demo", "--seq-len", "48", "--head-dim", "16", "--device", "cpu")


def test_version(strobe_command) -> None:
    assert strobe_command("--version").out.strip() == f"strobe {strobe.__version__}"


COMMANDS = ("demo", "doctor", "compile", "tune", "bench", "report", "ladder", "plan", "explain-page")


@pytest.mark.parametrize("command", ["", *COMMANDS, "ladder diff"])
def test_help(strobe_command, command: str) -> None:
    """Each command has one, in which flags take no value."""
    result = strobe_command(*command.split(), "--help")
    assert result.code == 0 and "Usage:" in result.out and "bool" not in result.out.lower()
    assert command or [name for name in COMMANDS if name not in result.out] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("5000", 5000), ("4K", 4096), ("4k", 4096), ("1M", 1 << 20), ("10" * 20, int("10" * 20))],
)
def test_numbers_of_tokens(text: str, number: int) -> None:
    assert command.tokens(text) == number


@pytest.mark.parametrize("text", ["", "0", "0K", "-1", "4KB", "4.5K", "K"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="got"):
        command.tokens(text)


def test_progress_off_a_terminal_is_a_line_every_few_seconds() -> None:
    said: list[str] = []
    now = iter(float(second) for second in range(100))
    with command.Lines(said.append, lambda: next(now)) as lines:
        task = lines.add_task("kernels to compile", total=20)
        for i in range(12):
            lines.update(task, description=f"kernel {i}", advance=1)
    assert said == [
        "kernels to compile: 20 in all",
        "5 of 20, about 15 s left: kernel 4",
        "10 of 20, about 10 s left: kernel 9",
    ]


_LOADED = """
import json, sys
sys.argv = ["strobe", *json.loads(sys.argv[1])]
from strobe.tools import cli
try:
    cli.main()
except SystemExit as ended:
    print("\\nloaded", sorted({"torch", "numpy"} & set(sys.modules)), ended.code)
"""


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--help"], 0),
        (["--version"], 0),
        (["demo", "--help"], 0),
        (["bench", "--help"], 0),
        (["tune", "--help"], 0),
        (["ladder", "--help"], 0),
        (["explain-page", "--help"], 0),
        (["nosuch"], 2),
        (["demo", "--seq-len", "0"], 2),
        (["demo", "--dtype", "int8"], 2),
        (["demo", "--block-q", "8", "--backend", "reference"], 2),
        (["bench", "--suite", "nosuch"], 2),
        (["bench", "--method", "nosuch"], 2),
        (["compile", "--arch", "ampere", "--out", "x"], 2),
        (["tune", "--method", "do_bench"], 2),
    ],
    ids=str,
)
def test_help_and_usage_errors_do_not_wait_for_torch(arguments: list[str], code: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(strobe.__file__).parents[1])}
    command = [sys.executable, "-c", _LOADED, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == f"loaded [] {code}", done.stdout + done.stderr


def test_the_command_has_every_public_name() -> None:
    """They are loaded when they are used, and are the same."""
    script = "import sys; sys.argv[0] = 'strobe'; import strobe; a = 'torch' in sys.modules; print(a, *("
    script += "getattr(strobe, n).__class__.__name__ + n for n in strobe.__all__), strobe.explain is strobe.explain)"
    environment = os.environ | {"PYTHONPATH": str(Path(strobe.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    wanted = [getattr(strobe, n).__class__.__name__ + n for n in strobe.__all__]
    assert done.stdout.split() == ["False", *wanted, "True"], done.stderr


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--causal",),
        ("--heads", "2"),
        ("--dtype", "float64"),
        ("--dtype", "bfloat16"),
        ("--init", "uniform"),
        ("--init", "ones"),
        ("--init", "ramp"),
        ("--seed", "7"),
        ("--backend", "reference"),
        ("--seq-len", "20"),
        ("--block-q", "16", "--block-k", "8"),
    ],
    ids=" ".join,
)
def test_demo_runs(strobe_command, extra: tuple[str, ...]) -> None:
    result = strobe_command(*SMALL, *extra)
    assert result.code == 0, result.err
    assert "standard" in result.out and "48" in result.out and "KiB" in result.out


def test_demo_says_why_tiles_can_be_slower_on_a_cpu(strobe_command) -> None:
    assert demo.TILES_NOTE.split(".")[0] in strobe_command(*SMALL).out
    assert "tiled:" not in strobe_command(*SMALL, "--backend", "reference").out


def test_block_sizes_reach_the_tiles() -> None:
    seen = []
    settings = demo.Settings(lengths=(40,), head_dim=8, block_q=16, block_k=8)
    q, k, v = demo.first_inputs(settings)
    for row in demo.run(settings):
        seen.append(strobe.explain(q, k, v, backend="tiled").details)
        assert row.exact
    assert seen and all((d["block_q"], d["block_k"]) == (16, 8) for d in seen)
    assert list(demo.methods(settings, demo.QKV(q, k, v))) == ["standard", "tiled"]


def test_print_shows_the_tensors(strobe_command) -> None:
    result = strobe_command("demo", "--seq-len", "3", "--head-dim", "2", "--init", "ones", "--device", "cpu", "--print")
    assert result.code == 0
    for name in ("Query", "Key", "Value", "Output"):
        assert f"{name}, 3 x 2\n[[1., 1.],\n [1., 1.],\n [1., 1.]]" in result.out


def test_demo_finds_a_wrong_result(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    right = strobe.attention
    monkeypatch.setattr(strobe, "attention", lambda *a, **k: right(*a, **k) + 1e-3)
    result = strobe_command(*SMALL)
    assert result.code == 1 and "larger than rounding" in result.err


def test_demo_finds_nan(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    right = strobe.attention
    monkeypatch.setattr(strobe, "attention", lambda *a, **k: right(*a, **k) * float("nan"))
    assert strobe_command(*SMALL).code == 1


def test_standard_attention_that_does_not_fit_is_skipped(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "free_bytes", lambda device: 22_000)  # q, k, v and the output fit, the matrices do not
    result = strobe_command(*SMALL)
    assert result.code == 0 and "not run" in result.out and "do not fit" in result.out


def test_memory_is_really_measured() -> None:
    """Standard attention holds at least its matrix; ours, a hundred times less than the two matrices."""
    n = 1024
    rows = {row.method: row for row in demo.run(demo.Settings(lengths=(n,), head_dim=16))}
    matrix = n * n * 4
    assert 2 * matrix <= rows["standard"].extra_bytes <= 3 * matrix
    assert n * 16 * 4 <= rows["tiled"].extra_bytes < matrix
    assert demo.free_bytes(torch.device("cpu")) > 1 << 20


def test_rows_come_one_by_one(strobe_command, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Each stands on the terminal before the next is measured."""
    seen: list[str] = []
    real = demo.run

    def watched(settings: demo.Settings):
        for row in real(settings):
            yield row
            seen.append(capsys.readouterr().out)

    monkeypatch.setattr(demo, "run", watched)
    strobe_command(*SMALL, "--seq-len", "16")
    assert len(seen) == 6 and all("MiB" in text or "KiB" in text for text in seen)


def test_ratios_are_words(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    from strobe.tools import terminal

    table = terminal.DemoTable()
    fine = Verdict("out", 1e-7, 1e-6)
    for row in (
        demo.Row(1024, demo.STANDARD, fine, 39.0, 8 << 20),
        demo.Row(1024, "aten_cpu", fine, 10.0, 1 << 20),
        demo.Row(1024, "tiled", fine, 6 * 39.0, 0),
    ):
        table.show(row)
    out = strobe_command("--version").out
    assert "3.9 × faster" in out and "8 × less" in out and "6 × slower" in out


def test_the_demo_takes_under_15_s_on_two_cores() -> None:
    """The bound is on CPU time, since other tests run beside this one: what it would take two free cores, half of the
    bound. There is one thread: two would spin while they wait for a core, which counts as CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(Path(strobe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "strobe", "demo", "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "8192" in done.stdout, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 20.0


def test_worked_example(strobe_command) -> None:
    result = strobe_command("demo", "--example")
    assert result.code == 0
    assert "0.697084216" in result.out and "alpha = 2.064853e-04" in result.out and "48 of 48" in result.out


@pytest.mark.parametrize("backend", ["aten_cpu", "tiled", "reference"])
def test_worked_example_on_each_backend(backend: str) -> None:
    assert [c for c in worked_example.checks(backend) if not c.passed] == []


def test_a_wrong_example_is_found(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worked_example, "V", ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6), (0.7, 0.9)))
    result = strobe_command("demo", "--example")
    assert result.code == 1 and "should be" in result.out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--backend", "fa2"), ("--backend", "fa2", "tiled")),
        (("--backend", "sm80"), ("--backend sm80 needs an NVIDIA GPU",)),
        (("--backend", "sm90", "--seq-len", "1K"), ("--backend sm90 needs a Hopper GPU",)),
        (("--seq-len", "4k5"), ("--seq-len", "4k5", "4K", "1M")),
        (("--dtype", "int8"), ("--dtype", "int8", "bfloat16")),
        (("--device", "nowhere"), ("--device", "nowhere")),
        (("--device", "meta"), ("--device", "meta")),
        (("--init", "nothing.txt"), ("--init", "nothing.txt", "--seq-len")),
        (("--block-q", "8", "--backend", "reference"), ("--block-q", "tiled", "reference")),
        (("--seq-len", "0"), ("--seq-len", "1")),
        (("--head-dim", "many"), ("--head-dim", "integer")),
        (("--unknown",), ("--unknown",)),
        (("--seq-len", "10000000000"), ("--seq-len", "10000000000", "GiB", "free")),
        (("--seq-len", "1" + "0" * 30), ("--seq-len", "GiB")),
    ],
    ids=" ".join,
)
def test_user_errors_of_demo(strobe_command, arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    result = strobe_command(*SMALL, *arguments)
    assert result.code == 2 and "Traceback" not in result.err
    assert [word for word in says if word not in result.err] == []


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", demo_inputs.FILES)
def test_inputs_from_a_file(tmp_path: Path, suffix: str, strobe_command) -> None:
    q = torch.arange(12.0).reshape(6, 2) / 10
    path = tmp_path / f"inputs{suffix}"
    if suffix == ".pt":
        torch.save({"q": q, "k": q + 1, "v": q + 2}, path)
    elif suffix == ".npz":
        numpy.savez(path, q=q.numpy(), k=(q + 1).numpy(), v=(q + 2).numpy())
    elif suffix == ".npy":
        numpy.save(path, q.numpy())
    else:
        separator = "," if suffix == ".csv" else " "
        path.write_text("# a comment\n" + "\n".join(separator.join(map(str, row)) for row in q.tolist()) + "\n\n")
    read = demo_inputs.read(path)
    torch.testing.assert_close(read.q, q[None, :, None])
    torch.testing.assert_close(read.v, (q + 2 if suffix in (".pt", ".npz") else q)[None, :, None])
    result = strobe_command("demo", "--init", str(path), "--device", "cpu")
    assert result.code == 0 and "1 x 2" in result.out


@pytest.mark.parametrize("len_q, len_k, code", [(3, 5, 0), (5, 3, 2)])
def test_causal_with_unequal_lengths(tmp_path: Path, strobe_command, len_q: int, len_k: int, code: int) -> None:
    path = tmp_path / "unequal.pt"
    torch.save({"q": torch.randn(len_q, 4), "k": torch.randn(len_k, 4), "v": torch.randn(len_k, 6)}, path)
    result = strobe_command("demo", "--init", str(path), "--device", "cpu", "--causal")
    assert result.code == code
    assert code == 0 or "5 queries but 3 keys" in result.err


def test_heads_from_a_file(tmp_path: Path) -> None:
    torch.save(torch.ones(6, 3, 2), tmp_path / "heads.pt")
    assert tuple(demo_inputs.read(tmp_path / "heads.pt").q.shape) == (1, 6, 3, 2)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("missing.txt", None, "no file"),
        ("inputs.json", "[]", ".csv"),
        ("words.txt", "1 2\nthree four\n", "line 2"),
        ("ragged.csv", "1,2\n3\n", "line 2"),
        ("empty.txt", "# nothing\n", "no numbers"),
        ("broken.pt", "not a pickle", "cannot be read"),
        ("broken.npy", "not an array", "cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, strobe_command, name: str, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    result = strobe_command("demo", "--init", str(tmp_path / name), "--device", "cpu")
    assert result.code == 2 and says in result.err and name in result.err


@pytest.mark.parametrize(
    "content, says",
    [
        ({"q": torch.ones(4, 2)}, "no k, v"),
        (torch.ones(4), "(4,)"),
        (torch.ones(4, 2, dtype=torch.bool), "not a tensor of numbers"),
        ({"q": torch.ones(4, 2), "k": torch.ones(4, 3), "v": torch.ones(4, 3)}, "q (4, 1, 2), k (4, 1, 3)"),
        ({"q": torch.ones(4, 2), "k": torch.ones(5, 2), "v": torch.ones(4, 2)}, "do not go together"),
        (torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]]), "2 of 4 numbers of q"),
        (torch.full((2, 2), 1e300, dtype=torch.float64), "4 of 4 numbers of q"),
    ],
)
def test_bad_tensors_in_a_file(tmp_path: Path, content: object, says: str) -> None:
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(ValueError) as caught:
        demo_inputs.read(tmp_path / "bad.pt")
    assert says in str(caught.value)


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_as_json(strobe_command) -> None:
    result = strobe_command("doctor", "--json")
    found = json.loads(result.out)
    assert result.code == 0
    assert found["strobe"] == strobe.__version__ and found["torch"]["version"] == torch.__version__
    assert tuple(found["backends"]) == dispatch.NAMES
    assert found["backends"]["tiled"] is None and found["backends"]["reference"] is None
    assert (found["backends"]["sm80"] is None) <= torch.cuda.is_available()


def test_doctor_for_people(strobe_command) -> None:
    result = strobe_command("doctor")
    assert result.code == 0
    for word in ("torch", "GPU", "driver", "NVRTC", "cuda-bindings", "cache", "C++ compiler", *dispatch.NAMES):
        assert word in result.out


def test_doctor_survives_what_is_missing(strobe_command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "file" / "cache"))  # cannot be made
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(jit, "nvrtc_status", lambda: "NVRTC is not there")
    found = json.loads(strobe_command("doctor", "--json").out)
    assert found["cache"]["directory"] is None and "STROBE_CACHE_DIR" in found["cache"]["problem"]
    assert found["compiler"]["path"] is None and "g++" in found["compiler"]["problem"]
    assert found["nvrtc"] == {"problem": "NVRTC is not there", "version": None}
    assert found["backends"]["emulator"] is not None and found["backends"]["tiled"] is None
    assert strobe_command("doctor").code == 0


def test_doctor_shows_what_stands_in_brackets(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "nvrtc_status", lambda: 'install NVRTC with `pip install "strobe-attention[cu13]"`')
    assert 'pip install "strobe-attention[cu13]"' in strobe_command("doctor").out


def test_doctor_lists_the_hosts(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "5.17.0", "flash-attn": "2.8.4"}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package) or real(package))
    monkeypatch.setattr(doctor, "_compat_status", lambda: {})
    found = json.loads(strobe_command("doctor", "--json").out)["hosts"]
    assert found["torch"] == {"version": torch.__version__, "strobe": "not active"}
    assert found["flash_attn"] == {"version": "2.8.4", "strobe": "not active"}
    assert found["vllm"]["version"] == real("vllm")
    lines = [line.split() for line in strobe_command("doctor").out.splitlines()]
    assert ["transformers", "5.17.0", "not", "active"] in lines
    assert ["host", "installed", "strobe,", "in", "this", "process"] in lines


def test_doctor_asks_compat(strobe_command, monkeypatch: pytest.MonkeyPatch) -> None:
    compat = types.ModuleType("strobe.compat")
    compat.status = lambda: {"torch": "active: flash [impl]", "novel_host": "registered"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strobe.compat", compat)
    found = json.loads(strobe_command("doctor", "--json").out)["hosts"]
    assert found["torch"]["strobe"] == "active: flash [impl]" and found["transformers"]["strobe"] == "not active"
    assert found["novel_host"] == {"version": None, "strobe": "registered"}
    assert "active: flash [impl]" in strobe_command("doctor").out


def test_doctor_without_compat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "strobe.compat", None)
    assert {host["strobe"] for host in doctor.hosts().values()} == {"not active"}


HEALTHY = {
    "torch": {"version": "2.13.0", "cuda": "13.0", "threads": 2},
    "gpus": [{"name": "H200", "arch": "sm_90"}],
    "namesake": None,
    "driver": {"problem": None},
    "nvrtc": {"problem": None},
    "cache": {"problem": None},
    "compiler": {"problem": None},
}
CPU_BUILD = {"version": "2.13.0+cpu", "cuda": None, "threads": 2}


@pytest.mark.parametrize(
    "changes, nvidia, says",
    [
        ({}, True, None),
        ({"torch": CPU_BUILD, "gpus": []}, False, None),
        ({"torch": CPU_BUILD, "gpus": []}, True, "install a CUDA build of torch: 2.13.0+cpu has no CUDA"),
        ({"gpus": []}, True, "CUDA 13.0 but finds no GPU"),
        ({"gpus": [{"name": "Tesla T4", "arch": "sm_75"}]}, True, "Tesla T4 (sm_75) runs tiled"),
        ({"nvrtc": {"problem": "install strobe-attention[cu13]"}}, True, "install strobe-attention[cu13]"),
        ({"driver": {"problem": "libcuda cannot be loaded"}}, True, "libcuda cannot be loaded"),
        ({"cache": {"problem": "not writable"}}, True, "not writable"),
        ({"namesake": "pip uninstall strobe"}, True, "pip uninstall strobe"),
        ({"compiler": {"problem": "CXX is 'x', which cannot be found"}}, True, "CXX is 'x'"),
    ],
)
def test_doctor_ends_with_what_to_do_next(
    changes: dict[str, object], nvidia: bool, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_has_nvidia_driver", lambda: nvidia)
    *remedies, demo_step, bench_step = doctor.next_steps(HEALTHY | changes)
    assert "strobe demo" in demo_step and "strobe bench" in bench_step
    assert len(remedies) == (says is not None) and all(str(says) in remedy for remedy in remedies)


@pytest.mark.parametrize("file, says", [("strobe/__init__.py", "pip uninstall strobe"), ("_strobe.pth", "None")])
def test_doctor_knows_the_other_strobe(file: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index has another project named `strobe`, with the same import name; an editable installation of our
    own under an older name does no harm."""
    information = tmp_path / "strobe-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: strobe\nVersion: 1.2\n")
    (information / "RECORD").write_text(f"{file},,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert says in str(doctor.report()["namesake"])


def test_doctor_prints_the_next_steps_last(strobe_command) -> None:
    steps = json.loads(strobe_command("doctor", "--json").out)["next"]
    assert strobe_command("doctor").out.splitlines()[-len(steps) - 1 :] == ["Next:", *(f"- {step}" for step in steps)]


# ---- compile ---------------------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(jit.nvrtc_status() is not None, reason="no NVRTC")


@pytest.fixture
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel of each (dtype, head dim): every one takes its half second."""
    from strobe.cuda.plans import families

    every = families.variants

    def first_of_each(arch: str):
        seen = set()
        for variant in every(arch):
            if (
                "dim" in variant.facts
                and (key := (variant.element, variant.facts["dim"], variant.facts["dim_v"])) not in seen
            ):
                seen.add(key)
                yield variant

    monkeypatch.setattr(families, "variants", first_of_each)


@needs_nvrtc
def test_compile_makes_a_layer(strobe_command, few_variants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strobe.cuda.plans import families

    out = tmp_path / "kernels"
    result = strobe_command("compile", "--arch", "sm_80", "--out", str(out), "--dtype", "bfloat16", "--head-dim", "60")
    assert result.code == 0, result.err
    assert f"STROBE_CUBIN_PATH={out}" in result.out
    wanted = ("bf16", 64, 64)
    variants = [v for v in families.variants("sm_80") if (v.element, v.facts["dim"], v.facts["dim_v"]) == wanted]
    assert len(list(out.glob("*.cubin"))) == len(list(out.glob("*.cu"))) == len(variants) == 1
    monkeypatch.setenv("STROBE_CUBIN_PATH", str(out))
    monkeypatch.setenv("STROBE_NO_COMPILE", "1")
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(jit, "in_memory", {})
    assert jit.get(variants[0].source, "sm_80").origin == "layer"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--arch", "ampere"), ("--arch", "ampere", "sm_80")),
        (("--arch", "sm_100a"), ("--arch sm_100a is not supported", "sm_90a (H100, H200)", "sm_100 (B200)")),
        (("--arch", "sm_90a", "--arch", "sm_75"), ("--arch sm_75 is not supported", "sm_80 and later")),
        (("--arch", "sm_80", "--dtype", "float32"), ("--dtype", "float32", "bfloat16")),
        (("--arch", "sm_80", "--head-dim", "999"), ("--head-dim", "999")),
        ((), ("--arch",)),
    ],
    ids=" ".join,
)
@needs_nvrtc
def test_user_errors_of_compile(
    strobe_command, tmp_path: Path, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    result = strobe_command("compile", *arguments, "--out", str(tmp_path / "out"))
    assert result.code == 2 and "Traceback" not in result.err
    assert [word for word in says if word not in result.err] == []
    assert not (tmp_path / "out").exists()


@needs_nvrtc
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX paths")
def test_compile_into_an_impossible_directory(strobe_command, tmp_path: Path, few_variants) -> None:
    (tmp_path / "file").write_text("")
    result = strobe_command("compile", "--arch", "sm_80", "--out", str(tmp_path / "file" / "below"))
    assert result.code == 2 and "--out" in result.err


def test_compile_without_nvrtc(strobe_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "nvrtc_status", lambda: "NVRTC is not there; install strobe-attention[cu13]")
    result = strobe_command("compile", "--arch", "sm_80", "--out", str(tmp_path))
    assert result.code == 2 and "strobe-attention[cu13]" in result.err
