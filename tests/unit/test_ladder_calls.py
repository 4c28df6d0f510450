"""The ladder's launches on a GPU, before the driver sees them: the addresses are those of each call's own tensors."""

from __future__ import annotations

import struct

import fake_driver
import pytest
import torch
from fake_driver import Recorder

from strobe.cuda import launch as launching
from strobe.cuda.plans import backward_sm90
from strobe.emulator.backend import MACHINES
from strobe.learn.ladder import execute, rungs
from strobe.learn.ladder.rung import PARAMS, POINTERS, Shape


@pytest.mark.parametrize("number", ["02", "05", "11", "b0", "b1", "b3"])
def test_a_call_sends_the_addresses_of_its_tensors(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(execute, "_loaded", lambda rung, dim, arch: fake_driver.Kernel())
    monkeypatch.setattr(execute, "arch_of", lambda rung, device: "sm_90a")
    rung, shape = rungs.get(number), Shape(slices=3, len_q=70, len_k=150, dim=64, causal=True)
    call = execute.Call(rung, shape, torch.device("cuda", 0))
    assert [launch.grid for launch in Recorder.made] == [grid(shape) for grid in rung.grids]
    for seed in (0, 1):  # two calls, two sets of tensors
        x = execute.make(rung, shape, seed=seed)
        call(x)
        for stage, launch in enumerate(Recorder.made):
            stream, sent = launch.sent[seed]
            assert stream == 77 and (launch.threads, launch.smem) == (rung.threads, rung.smem(64))
            pointers = {name: struct.unpack_from("<Q", sent, PARAMS.offsets[name])[0] for name in POINTERS}
            assert pointers == dict.fromkeys(POINTERS, 0) | x.addresses()
            numbers = {
                n: struct.unpack_from("<i", sent, PARAMS.offsets[n])[0] for n in ("slices", "len_q", "len_k", "stage")
            }
            assert numbers == {"slices": 3, "len_q": 70, "len_k": 150, "stage": stage}
            if rung.hopper:
                maps = [struct.unpack_from("<Q", sent, PARAMS.offsets[f"map_{t}"])[0] for t in "qkv"]
                assert maps == [x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr()]


def test_the_librarys_backward_is_launched_from_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """b4 on a GPU: three launches, with the addresses of the rung's own tensors."""
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(launching, "kernel", lambda spec: fake_driver.Kernel())
    monkeypatch.setattr(execute, "machine_of", lambda device: MACHINES["sm90"])
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", 0)  # as with more keys: all three launches
    rung, shape = rungs.get("b4"), Shape(slices=3, len_q=70, len_k=150, dim=64, causal=True)
    x = execute.make(rung, shape)
    assert x.d_o is not None and x.dq is not None and x.dk is not None and x.dv is not None
    launch = execute.prepare(rung, shape, x)
    launch()
    launch()
    plan, _ = execute._library_plan(rung, shape, x, MACHINES["sm90"])
    assert [part.kernel.template for part in plan.launches] == ["backward_delta", "backward_sm90", "convert_dq"]
    delta, main, convert = Recorder.made
    assert [len(made.sent) for made in Recorder.made] == [2, 2, 2]

    def sent(made: Recorder, part: int, name: str) -> int:
        return struct.unpack_from("<Q", made.sent[1][1], plan.launches[part].kernel.params.offsets[name])[0]

    assert [sent(delta, 0, n) for n in ("o", "d_o", "lse")] == [t.data_ptr() for t in (x.o, x.d_o, x.lse)]
    mapped = {"q": x.q, "k": x.k, "v": x.v, "d_o": x.d_o, "dk": x.dk, "dv": x.dv}
    assert {n: sent(main, 1, f"map_{n}") for n in mapped} == {n: t.data_ptr() for n, t in mapped.items()}
    assert sent(convert, 2, "dq") == x.dq.data_ptr()
    assert sent(main, 1, "dq_sum") == sent(convert, 2, "dq_sum") != 0
