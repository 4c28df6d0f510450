"""Launch a kernel that takes its arguments one by one, on a grid of up to three dimensions: what lessons need. The
library's own kernels take one struct on a flat grid (`driver.Launch`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from strobe.cuda.runtime import driver

_C: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "bool": ctypes.c_bool,
    "unsigned char": ctypes.c_ubyte,
}


def launch(
    function: Any,
    grid: Sequence[int],
    block: Sequence[int],
    smem: int,
    arguments: Sequence[tuple[str, Any, bool]],
    stream: int,
) -> None:
    """Enqueue it. An argument is (its C type, its value, whether it is a pointer); the driver copies the values."""
    values: list[Any] = [(ctypes.c_void_p if pointer else _C[ctype])(value) for ctype, value, pointer in arguments]
    addresses = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    call = driver.bindings().cuLaunchKernel(function, *grid, *block, smem, stream, ctypes.addressof(addresses), 0)
    driver.check("cuLaunchKernel", call)
