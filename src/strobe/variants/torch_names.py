"""The names that torch gives to the operations of expressions."""

from __future__ import annotations

import torch

from strobe.variants.expression import BOOL, FLOAT, INT, LONG

BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "mod", "pow": "pow", "and": "&",
    "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# Functions and methods -> operation.
NAMES = {
    **BINARY, **COMPARE,
    "subtract": "-", "multiply": "*", "true_divide": "/", "floor_divide": "//",
    "remainder": "mod", "minimum": "min", "maximum": "max", "fmin": "min", "fmax": "max", "less": "<", "less_equal": "<=",
    "greater": ">", "greater_equal": ">=", "not_equal": "!=", "logical_and": "&", "logical_or": "|", "logical_xor": "^",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "neg": "neg", "negative": "neg", "abs": "abs", "absolute": "abs", "invert": "invert", "bitwise_not": "invert",
    "logical_not": "not", "pos": "pos", "positive": "pos",
    **{name: name for name in ("exp", "log", "sqrt", "sin", "cos", "erf", "sigmoid", "tanh")},
    **{name: name for name in ("floor", "ceil", "trunc", "round")},
}  # fmt: skip
LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")
FILLED = {
    **{name: 0 for name in ("zeros_like", "new_zeros")}, **{name: 1 for name in ("ones_like", "new_ones")},
    **{name: None for name in ("full_like", "new_full")},
}  # fmt: skip
CASTS = {"int": INT, "long": LONG, "float": FLOAT, "bool": BOOL, "double": FLOAT}
DTYPES = {
    torch.int32: INT, torch.int16: INT, torch.int8: INT, torch.uint8: INT, torch.int64: LONG, torch.bool: BOOL,
    torch.float32: FLOAT, torch.float64: FLOAT, torch.float16: FLOAT, torch.bfloat16: FLOAT,
}  # fmt: skip
