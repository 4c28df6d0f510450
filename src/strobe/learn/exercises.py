"""All exercises, in the order of the lessons.

from strobe.learn.exercises import GRAYSCALE
print(GRAYSCALE.show())            # the task and the stub
print(GRAYSCALE.hint(1))
print(GRAYSCALE.check(my_kernel))  # which thread wrote which wrong element
print(GRAYSCALE.show_solution())
"""

from __future__ import annotations

from strobe.learn.attention_exercises import ATTENTION, FLASH, LOG_SUM_EXP
from strobe.learn.cuda_cpp.exercises import BLOCK_MAX, CUDA, FLASH_CUDA, NEGATIVE
from strobe.learn.starter_exercises import BLOCK_SUM, GRAYSCALE, GRAYSCALE_2D, MATMUL, MATMUL_TILED, STARTER, TRANSPOSE

ALL = (*STARTER, *FLASH)  # in Python, on the simulator; those of CUDA are in CUDA C++

__all__ = [
    "ALL",
    "ATTENTION",
    "BLOCK_MAX",
    "BLOCK_SUM",
    "CUDA",
    "FLASH",
    "FLASH_CUDA",
    "GRAYSCALE",
    "GRAYSCALE_2D",
    "LOG_SUM_EXP",
    "MATMUL",
    "MATMUL_TILED",
    "NEGATIVE",
    "STARTER",
    "TRANSPOSE",
]
