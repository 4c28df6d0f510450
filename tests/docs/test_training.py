"""examples/train_gpt.py in small, the text it learns, and what docs/training.md says of the committed runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training_example import SCRIPT, load

import strobe
from benchmarks.pages import documents, figures, training_page
from benchmarks.pages.generated import marks

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "examples" / "text" / "moby-dick.txt"
SHA256 = "4372990686628734cfe18c000c77299373a5d44cb5fbf3d420e02e5d23d1c03f"
SMALL = "--device cpu --batch 4 --context 32 --layers 1 --width 32 --heads 2 --lr 0.01".split()
COMMITTED = training_page.load(ROOT)
assert COMMITTED, "benchmarks/results has no train-gpt*.json"

each_file = pytest.mark.parametrize("place", COMMITTED, ids=str)
gpt = load()


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}  # tests run beside this one
    command = [sys.executable, str(SCRIPT), *SMALL, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def one_run(name: str, *arguments: str, seed: int = 0) -> dict[str, Any]:
    return gpt.train(gpt.options_of([*SMALL, *arguments]), name, seed)[0]


# ---- the text --------------------------------------------------------------------------------------------------------


def test_the_text_is_the_one_that_was_committed() -> None:
    data = TEXT.read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert 300_000 < len(data) < 600_000 and data.isascii()
    assert data.startswith(b"CHAPTER 1. Loomings.\n\nCall me Ishmael.") and data.count(b"\n\n\nCHAPTER ") == 45
    assert b"Herman Melville" in (ROOT / "examples" / "README.md").read_bytes()


# ---- the example -----------------------------------------------------------------------------------------------------


def test_strobe_learns_what_math_attention_learns(tmp_path: Path) -> None:
    out = tmp_path / "new" / "curve.json"
    longer = ("--batch", "1", "--context", "640")  # several tiles of keys, which have to be merged
    queries = torch.empty(1, 640, 2, 16)
    assert strobe.explain(queries, queries, queries, mask=strobe.causal, backend="tiled").details["block_k"] < 640
    names = ("strobe", "strobe:tiled")
    done = start(*longer, "--steps", "12", "--compare", *names, "--sample", "30", "--out", str(out))
    shown, complaints = done.communicate(timeout=120)
    assert done.returncode == 0, complaints
    assert "attention on aten_cpu, gradients on aten_cpu" in shown and "attention on tiled, gradients on tiled" in shown
    assert "step 12/12  loss " in shown and " tokens/s  0 s left" in shown
    assert "strobe agrees with math" in shown and "strobe:tiled agrees with math" in shown
    found = json.loads(out.read_text(encoding="utf-8"))
    runs = {(run["attention"], run["seed"]): run for run in found["runs"]}
    exact = runs["math", 0]
    for key, run in runs.items():
        assert len(run["loss"]) == 12 and run["complete"]
        assert abs(run["loss"][0] - math.log(256)) < 0.1  # every byte is as likely as any other
        assert run["loss"][-1] < run["loss"][0] - 1 and run["validation"][-1] < run["validation"][0]
        far = max(abs(a - b) for a, b in zip(run["loss"], exact["loss"], strict=True))
        assert far > 0.01 if key == ("math", 1) else far < 5e-6, f"{key}: {far}"


@pytest.mark.parametrize(
    "wrong", [{"scale": 0.99 * 16**-0.5}, {"mask": strobe.full}, {"mask": strobe.window(30, 0)}], ids=str
)
def test_wrong_attention_does_not_agree(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scale that is 1 % off, no mask, one key too few: small, but more than rounding."""
    right = strobe.attention
    monkeypatch.setattr(strobe, "attention", lambda q, k, v, **rest: right(q, k, v, **(rest | wrong)))
    assert gpt.main([*SMALL, "--steps", "10", "--compare"]) == 1
    assert "strobe DOES NOT AGREE with math" in capsys.readouterr().out


def test_wrong_gradients_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    right = strobe.attention
    monkeypatch.setattr(strobe, "attention", lambda q, k, v, **rest: right(q, k.detach(), v, **rest))
    assert gpt.main([*SMALL, "--steps", "10", "--compare"]) == 1


def test_only_the_seed_decides_weights_and_batches() -> None:
    one, again, other = (one_run(name, "--steps", "3") for name in ("strobe", "strobe", "sdpa"))
    assert one["loss"] == again["loss"] and one["validation"] == again["validation"]
    assert other["loss"] == pytest.approx(one["loss"], abs=5e-6)
    assert abs(one_run("strobe", "--steps", "1", seed=1)["loss"][0] - one["loss"][0]) > 1e-3


def test_shuffled_keys_are_the_same_attention() -> None:
    q, k, v = torch.randn(3, 2, 20, 3, 8, dtype=torch.float64)
    exact, shuffled = gpt.attention_named("math")(q, k, v), gpt.attention_named("shuffled:1")(q, k, v)
    torch.testing.assert_close(shuffled, exact)
    assert not torch.equal(shuffled, exact)
    torch.testing.assert_close(strobe.attention(q, k, v, mask=strobe.causal), exact)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions
def test_autocast_is_in_bfloat16() -> None:
    found = one_run("strobe:tiled", "--steps", "2", "--dtype", "bfloat16")
    assert found["loss"] != one_run("strobe:tiled", "--steps", "2")["loss"]


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "curve.json"
    done = start("--steps", "4000", "--compare", "--out", str(out))
    assert done.stdout is not None
    assert "attention on aten_cpu" in done.stdout.readline() and "step 200/4000" in done.stdout.readline()
    done.send_signal(signal.SIGINT)
    shown, complaints = done.communicate(timeout=60)
    assert done.returncode == 130 and "stopped after step" in shown and "Traceback" not in complaints, complaints
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["verdict"] is None and [run["complete"] for run in found["runs"]] == [False]
    assert 200 <= len(found["runs"][0]["loss"]) < 4000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "argument --steps: must be a whole number of at least 1, got '0'"),
        (["--batch", "many"], "argument --batch: must be a whole number of at least 1, got 'many'"),
        (["--attention", "flash"], "attention 'flash': must be strobe, strobe:BACKEND, math, shuffled:N or sdpa"),
        (["--attention", "strobe:nobody"], "attention 'strobe:nobody': backend must be one of"),
        (["--attention", "strobe:sm80"], "backend 'sm80' cannot run this: float32 inputs"),
        (["--compare", "math"], "attention 'math': is what the others are compared with"),
        (["--heads", "5"], "--width must be a multiple of 2 * heads = 10, got 32"),
        (["--text", "missing.txt"], "--text must be a file of at least 660 bytes, got missing.txt"),
    ],
)
def test_bad_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpt.options_of([*SMALL, *arguments])
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


# ---- the judgement ---------------------------------------------------------------------------------------------------


def made_up(far: float, noise: float) -> list[dict[str, Any]]:
    def run(name: str, seed: int, offset: float) -> dict[str, Any]:
        curve = [3.0 + offset, 2.0 + offset]
        return {"attention": name, "seed": seed, "forward": "x", "backward": "x", "complete": True, "loss": curve,
                "validation": [2.5 + offset], "validation_steps": [2], "tokens_per_s": 1, "seconds": 1.0}  # fmt: skip

    return [run("strobe", 0, far), run("math", 0, 0.0), run("shuffled:1", 0, noise), run("math", 1, 0.1)]


def test_the_noise_is_the_limit() -> None:
    within = gpt.judge(made_up(0.0029, 0.001))
    assert within["agrees"] and within["noise"] == pytest.approx(0.001) and within["another_seed"] == pytest.approx(0.1)
    assert within["distance"] == {"strobe": pytest.approx(0.0029)} and within["allowed"] == pytest.approx(0.003 + 1e-6)
    assert not gpt.judge(made_up(0.0031, 0.001))["agrees"]
    assert not gpt.judge(made_up(0.0031, 0.0))["agrees"] and gpt.judge(made_up(1e-7, 0.0))["agrees"]
    assert not gpt.judge(made_up(math.nan, 0.001))["agrees"] and not gpt.judge(made_up(0.0, math.nan))["agrees"]


# ---- the page --------------------------------------------------------------------------------------------------------


@each_file
def test_the_verdict_is_that_of_the_curves(place: Path) -> None:
    found = COMMITTED[place]
    judged, written = gpt.judge(found["runs"]), found["verdict"]
    assert judged.pop("distance") == pytest.approx(written["distance"])  # another host, another last bit
    assert judged == pytest.approx({name: written[name] for name in judged}) and written["agrees"]
    assert found["text"] == {"name": TEXT.name, "sha256": SHA256}
    assert all(run["complete"] and len(run["loss"]) == found["settings"]["steps"] for run in found["runs"])
    git = found["provenance"]["git"]
    assert git["commit"] and not git["dirty"]
    assert found["provenance"]["command"].startswith("train_gpt.py --compare")
    assert all(run["validation"][-1] < run["loss"][0] - 2.5 for run in found["runs"])


@each_file
def test_the_page_shows_the_distances(place: Path) -> None:
    page, found = (ROOT / training_page.PAGE).read_text(encoding="utf-8"), COMMITTED[place]
    assert (
        f"`benchmarks/results/{place.as_posix()}`" in page and f"(figures/{training_page.figure_name(place)})" in page
    )
    for name, far in found["verdict"]["distance"].items():
        (run,) = (run for run in found["runs"] if run["attention"] == name)
        assert training_page.distance_from(found, run) == pytest.approx(far)
        assert f"| {name} | {run['forward']} | {run['backward']} | {run['validation'][-1]:.4f} | {far:.2g} |" in page


@pytest.mark.skipif(figures.unavailable() is not None, reason="needs matplotlib")
def test_other_files_of_that_kind_are_taken(tmp_path: Path) -> None:
    results, page = tmp_path / "benchmarks" / "results", tmp_path / training_page.PAGE
    page.parent.mkdir(parents=True)
    begin, end = marks("training")
    page.write_text(f"before\n{begin}\n{end}\nafter\n", encoding="utf-8")
    found = dict(next(iter(COMMITTED.values()))) | {"runs": made_up(0.0001, 0.001)}
    found["verdict"] = gpt.judge(found["runs"])
    for name in ("h200/train-gpt.json", "train-gpt-h200.json"):
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(json.dumps(found), encoding="utf-8")
    assert documents.main([], tmp_path) == 1
    assert documents.main(["--write"], tmp_path) == 0 and documents.main([], tmp_path) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "`strobe` agrees with math attention" in text
    assert "| math, keys shuffled (1) |" in text and "| math, another seed |" in text
    for name in ("h200-train-gpt.svg", "train-gpt-h200.svg"):
        assert f"figures/{name}" in text and "another seed" in (tmp_path / "docs" / "figures" / name).read_text()
    (results / "train-gpt-h200.json").unlink()
    stale = tmp_path / "docs" / "figures" / "train-gpt-h200.svg"
    assert set(documents.outdated(tmp_path)) == {page, stale}


def test_an_unfinished_comparison_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks" / "results" / "x" / "train-gpt.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"kind": training_page.KIND, "verdict": None}), encoding="utf-8")
    with pytest.raises(ValueError, match="must be a complete comparison"):
        training_page.load(tmp_path)
