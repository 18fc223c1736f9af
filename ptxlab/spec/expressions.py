"""The expressions of a spec (`K % g == 0`, `R*K/16`): evaluated over sizes, quoted in messages, solved for a size."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.hardware.words import unpack_nibbles

_FUNCTIONS: dict[str, Any] = {
    "__builtins__": {},
    "log2": lambda n: int(n).bit_length() - 1,
    "ceil_div": ceil_div,
    "min": min,
    "max": max,
}
_QUOTIENT = re.compile(r"^(\w+)\s*/\s*(\w+)$")


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """Evaluate a spec's own expression (`"K % g == 0"`, `"R*K/16"`) over sizes or arrays. Never for user input."""
    return eval(_compile_expression(expression), _FUNCTIONS, dict(names))


@cache
def _compile_expression(expression: str) -> CodeType:
    return compile(expression, f"<{expression}>", "eval")


@cache
def names_in(expression: str) -> frozenset[str]:
    """Return the names that an expression takes from outside, without the functions that every expression may use."""
    nodes = ast.walk(ast.parse(expression, mode="eval"))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name)) - set(_FUNCTIONS)


def solve(axis: str, length: int, sizes: dict[str, int]) -> None:
    """Learn a size from one axis: `S`, `S/4` or `S/T` with S known. Consistency is checked by the caller."""
    if axis.isidentifier():
        sizes.setdefault(axis, length)
        return
    quotient = _QUOTIENT.match(axis)
    if quotient is None:
        return
    top, bottom = quotient.groups()
    if bottom.isdigit():
        sizes.setdefault(top, length * int(bottom))
    elif top in sizes and length:
        sizes.setdefault(bottom, sizes[top] // length)


def nibbles(words: np.ndarray) -> np.ndarray:
    """Unpack the eight nibbles of every word, in logical order, wide enough to compute with.

    Value rules use it.
    """
    wide_nibbles: np.ndarray = unpack_nibbles(words).astype(np.int32)
    return wide_nibbles


def per_weight(values: np.ndarray, group: int) -> np.ndarray:
    """Repeat each value of a group for the weights of that group, wide enough to compute with.

    Value rules use it.
    """
    return np.repeat(values.astype(np.int32), group, axis=-1)
