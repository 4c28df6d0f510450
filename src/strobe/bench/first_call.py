"""The first call of a process, as a user waits for it: plan, compile or load, launch, wait. Each is made in a new
process.

That process (`python -m strobe.bench.first_call`) imports torch and strobe, makes the tensors and with them the CUDA
context, and only then starts the clock. It imports nothing else before, or the call would find done what it has to do
itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from strobe.bench.case import BenchCase

METHOD = "perf_counter in a new process: plan, kernel, launch, wait"
ORIGINS = {"first call": "compiled", "cached call": "disk"}  # where the kernel comes from
AIMS_MS = {"first call": 2000.0, "cached call": 50.0}
_CACHED = 3  # processes that find the kernel on disk, after one that did not
_TIMEOUT_S = 300.0


def times(case: BenchCase, backend: str, device: torch.device) -> Iterator[tuple[str, list[float]]]:
    """Milliseconds, with an empty cache directory and then with the one that this call has filled. Raises Refusal or
    RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="strobe-bench-") as directory:
        for name, processes in (("first call", 1), ("cached call", _CACHED)):
            samples = []
            for _ in range(processes):
                answer = _ask(_question(case, backend, device), Path(directory))
                if device.type == "cuda" and answer["origins"] != [ORIGINS[name]]:
                    raise RuntimeError(f"{name}: one kernel should be {ORIGINS[name]}; found {answer['origins']}")
                samples.append(answer["ms"])
            yield name, samples


def _question(case: BenchCase, backend: str, device: torch.device) -> dict[str, Any]:
    q, k, v = (
        (case.batch, case.len_q, case.heads, case.dim),
        (case.batch, case.len_k, case.heads_k, case.dim),
        (case.batch, case.len_k, case.heads_k, case.value_dim),
    )
    return {"shapes": [q, k, v], "dtype": case.dtype, "mask": case.mask.name, "backend": backend, "device": str(device)}


def _ask(question: dict[str, Any], cache: Path) -> dict[str, Any]:
    """What the new process found."""
    import strobe
    from strobe.bench.provider import Refusal

    unlike_a_user = ("STROBE_CUBIN_PATH", "STROBE_NO_COMPILE", "PYTHONDONTWRITEBYTECODE")  # whose modules are compiled
    environment = {name: value for name, value in os.environ.items() if name not in unlike_a_user}
    source = str(
        Path(strobe.__file__).resolve().parents[1]
    )  # the strobe of this process, wherever it was imported from
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment["STROBE_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "strobe.bench.first_call", json.dumps(question)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a new process did not answer within {_TIMEOUT_S:g} s") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RuntimeError(f"a new process ended with status {done.returncode} and said: {said}") from None
    if "status" in answer:
        raise Refusal(answer["status"], answer["reason"])
    return answer


# ---- in the new process
# --------------------------------------------------------------------------------------------------


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    import torch

    import strobe

    device = torch.device(question["device"])
    try:
        q, k, v = (torch.zeros(s, dtype=getattr(torch, question["dtype"]), device=device) for s in question["shapes"])
        mask, backend = getattr(strobe, question["mask"]), question["backend"]
        _wait(device)
        begun = time.perf_counter()
        strobe.attention(q, k, v, mask=mask, backend=backend)
        _wait(device)
        ms = (time.perf_counter() - begun) * 1e3
    except Exception as error:  # becomes a row in the process that asked
        from strobe.bench.refusals import explain

        status, reason = explain(error)
        return {"status": status, "reason": reason}
    jit = sys.modules.get("strobe.cuda.runtime.jit")
    return {"ms": ms, "origins": [] if jit is None else [artifact.origin for artifact in jit.in_memory.values()]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
