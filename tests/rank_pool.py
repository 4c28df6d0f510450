"""Processes that stay alive between tests, one for each rank, joined by gloo. Starting them costs seconds, a test
milliseconds.

`RankPool.run(function, …)` calls function(group, …) on each rank; functions live in `rank_work.py`, which ranks import.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300.0  # seconds for which a test may keep the ranks busy


class RankFailed(AssertionError):
    """Raised with the traceback of a rank."""


class RankPool:
    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.size, self.timeout = size, timeout
        self.directory = tempfile.TemporaryDirectory(prefix="ranks")
        address = f"{self.directory.name}/pool"
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
            "OMP_NUM_THREADS": "1",
        }
        with Listener(address, "AF_UNIX") as listener:
            command = [sys.executable, str(Path(__file__)), address, str(size)]
            self.processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(size)]
            found = dict(_greeted(listener.accept()) for _ in range(size))
        self.connections = [found[rank] for rank in range(size)]

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """Return what function(group, *arguments) returns on each of the first `ranks` ranks, in a group of those."""
        count = ranks or self.size
        found = self.outcomes(function, *arguments, ranks=count)
        for rank, (ok, value) in enumerate(found):
            if not ok:
                raise RankFailed(f"rank {rank} of {count}:\n{value[1]}")
        return [value for _, value in found]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """Return for each rank (True, what it returned) or (False, (the error, its traceback))."""
        count = ranks or self.size
        message = pickle.dumps((count, function, arguments))
        for connection in self.connections[:count]:
            connection.send_bytes(message)
        found = []
        for rank, connection in enumerate(self.connections[:count]):
            if not connection.poll(self.timeout):
                self.close()
                raise RankFailed(f"rank {rank} of {count} did not answer within {self.timeout:g} s")
            found.append(pickle.loads(connection.recv_bytes()))
        return found

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self.directory.cleanup()


def _greeted(connection: Connection) -> tuple[int, Connection]:
    return connection.recv(), connection


def _serve(address: str, size: int, rank: int) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = Client(address, "AF_UNIX")
    connection.send(rank)
    timeout = datetime.timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=f"file://{address}.store", rank=rank, world_size=size, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, size + 1)}
    while True:
        try:
            count, function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:  # the tests are over
            os._exit(0)
        try:
            answer = True, function(groups[count], *arguments)
        except BaseException as error:  # tell the test
            answer = False, (f"{type(error).__name__}: {error}", traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
