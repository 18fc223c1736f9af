"""Bits as numbers of a type, and numbers as text."""

import re
from collections.abc import Callable

import numpy as np

from ptxlab.debugger.session import DebuggerError
from ptxlab.emulator import LaneType
from ptxlab.emulator.front.types import DTYPES, Array, is_float
from ptxlab.emulator.ops.rounding import widen

MOST = 256  # numbers that are printed at once
_PACKED = re.compile(r"([us])(\d+)x(\d+)")
_WIDTH = 108  # characters of a line


def parse_packed(type_name: str) -> LaneType | None:
    """Parse a packed type such as `u8x4`: integers side by side in a word of 8, 16, 32 or 64 bits."""
    match = _PACKED.fullmatch(type_name)
    lanes = LaneType(match[1] == "s", int(match[2]), int(match[3])) if match else None
    return lanes if lanes and lanes.count > 1 and lanes.bits * lanes.count in (8, 16, 32, 64) else None


def dtype_of(type_name: str) -> np.dtype:
    """Return the dtype of an element in memory. Raises DebuggerError for a type that does not exist."""
    if lanes := parse_packed(type_name):
        return np.dtype(f"u{lanes.bits * lanes.count // 8}")
    if type_name not in DTYPES:
        raise DebuggerError(f"as: a PTX type (f32, s8, bf16, f16x2 ..) or lanes such as u8x4 (got {type_name})")
    return DTYPES[type_name]


def format_values(values: Array, type_name: str) -> Array:
    """Format each value (of `dtype_of` the type) as text; the shape stays."""
    flat_values = np.ascontiguousarray(values).reshape(-1)
    if lanes := parse_packed(type_name):
        columns = lanes.decode(flat_values)
        texts = [f"({', '.join(map(str, column))})" for column in columns.T.tolist()]
    elif is_float(type_name):
        rows = widen(flat_values, type_name).reshape(len(flat_values), -1)
        numbers = [[f"{number:.6g}" for number in row] for row in rows.tolist()]
        texts = [row[0] if len(row) == 1 else f"({', '.join(row)})" for row in numbers]
    elif type_name == "pred":
        texts = ["true" if number else "false" for number in flat_values.tolist()]
    elif type_name[0] == "b":
        texts = [f"0x{number:0{2 * flat_values.itemsize}x}" for number in flat_values.tolist()]
    else:
        texts = [str(number) for number in flat_values.tolist()]
    return np.array(texts, object).reshape(np.shape(values))


def scalar(number: Array, type_name: str) -> str:
    """Format one value; an integer in decimal (signed if its sign is unknown) and in hexadecimal."""
    bits = int(np.asarray(number).reshape(-1)[:1].view(f"u{number.itemsize}")[0])
    if type_name == "pred" or is_float(type_name):
        return str(format_values(number.reshape(1), type_name)[0])
    if parse_packed(type_name):
        return f"{format_values(number.reshape(1), type_name)[0]}  0x{bits:0{2 * number.itemsize}x}"
    integer = int(number.reshape(1).view(f"i{number.itemsize}")[0]) if type_name[0] in "sb" else bits
    return f"{integer}  0x{bits:x}"


def grid(texts: Array, labels: Callable[[int], str], columns: bool = False) -> list[str]:
    """Format a matrix of texts as lines with row labels, cut to what fits a screen."""
    rows, width = texts.shape
    column_width = max((len(text) for text in texts[:MOST].reshape(-1)), default=1) + 2
    most_columns = max(1, (_WIDTH - 10) // column_width)
    most_rows = max(1, MOST // min(width, most_columns))
    lines = []
    if columns:
        lines.append(" " * 10 + "".join(f"{i:>{column_width}}" for i in range(min(width, most_columns))))
    for i in range(min(rows, most_rows)):
        ellipsis = " .." if width > most_columns else ""
        lines.append(
            f"{labels(i):>10}" + "".join(f"{text:>{column_width}}" for text in texts[i, :most_columns]) + ellipsis
        )
    if rows > most_rows or width > most_columns:
        lines.append(f"{'':>10}  of {rows} x {width}; a slice such as [0:8, 0:16] shows others")
    return lines


def array(values: Array, type_name: str, first: int = 0) -> list[str]:
    """Format the lines of an array.

    Two axes make a matrix, fewer or more make rows of up to eight with the index of the first.
    """
    if values.ndim == 2:
        return grid(format_values(values[:MOST, :MOST], type_name), str, columns=True) if values.size else ["  nothing"]
    flat_values = values.reshape(-1)
    texts = format_values(flat_values[:MOST], type_name)
    cell_width = max(map(len, texts), default=0) + 2
    width = next((n for n in (8, 4, 2) if n * cell_width <= _WIDTH - 10), 1)
    width = min(width, len(texts)) or 1
    padded_rows = np.concatenate([texts, np.full(-len(texts) % width, "", object)]).reshape(-1, width)
    lines = grid(padded_rows, lambda i: str(first + width * i))
    hidden_count = len(flat_values) - len(texts)
    if hidden_count > 0:
        lines.append(f"{'':>10}  and {hidden_count} more; a slice such as [256:512] shows others")
    return lines
