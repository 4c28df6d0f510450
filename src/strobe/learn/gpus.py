"""GPUs that the lessons reckon with, from the vendor's data sheets and the CUDA programming guide."""

from __future__ import annotations

from typing import Any

# Multiprocessors; KiB of shared memory and of registers on each; MiB of L2; kind, GB and GB/s of memory; dense TFLOP/s
# of the units that would do the work (matrix units with 32-bit sums for 16 bits; ordinary ones for float32; the better
# of both for float64). SXM boards where there are several.
_COLUMNS = ("name", "sms", "shared", "registers", "l2", "memory", "capacity", "bandwidth", "tflops")
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("H200", 132, 228, 256, 60, "HBM3e", 141, 4800, {"float16": 989, "bfloat16": 989, "float32": 67, "float64": 67}),
    ("H100", 132, 228, 256, 50, "HBM3", 80, 3350, {"float16": 989, "bfloat16": 989, "float32": 67, "float64": 67}),
    ("A100", 108, 164, 256, 40, "HBM2e", 80, 2039, {"float16": 312, "bfloat16": 312, "float32": 19.5, "float64": 19.5}),
    ("RTX 4090", 128, 100, 256, 72, "GDDR6X", 24, 1008, {"float16": 165, "bfloat16": 165, "float32": 82.6, "float64": 1.3}),
    ("T4", 40, 64, 256, 4, "GDDR6", 16, 320, {"float16": 65, "float32": 8.1, "float64": 0.25}),
)  # fmt: skip
GPUS: list[dict[str, Any]] = [dict(zip(_COLUMNS, row, strict=True)) for row in _ROWS]
