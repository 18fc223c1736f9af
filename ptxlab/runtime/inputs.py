"""Arguments as a command line gives them: `x=f32[1024]:normal`, `n=1024`, `FILE.npy`, by name or in order."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.hardware.floats import bfloat16_bits
from ptxlab.io.files import load_array

_NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"(\w+)\[([\d\s,x]*)\](?::(.+))?")
_TYPED = re.compile(r"([a-z]\w*):([^:,]+)")
FILLS = ("normal", "uniform", "arange", "zeros", "uninitialised")
_DTYPES = {f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)} | {
    f"{letter}{bits}": np.dtype(f"{name}{bits}")
    for letter, name in (("i", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}
_DTYPES |= {str(dtype): dtype for dtype in _DTYPES.values()}
BFLOAT16 = ("bf16", "bfloat16")
_RULE = (
    "[NAME=]VALUE, of which VALUE is a number, null, DTYPE[SHAPE][:FILL] such as f32[1024]:normal "
    f"(FILL: {', '.join(FILLS)} or a number), DTYPE:NUMBER (of a struct each field, between commas) or FILE.npy"
)


@dataclass(frozen=True, eq=False)
class CommandArgument:
    """An argument of a command line.

    Attributes:
        name: empty for the next in order.
        is_uninitialised: whether its content counts as never written.
        is_bfloat16: whether its elements, uint16, are bits of bfloat16.
    """

    name: str
    value: Any
    is_uninitialised: bool = False
    is_bfloat16: bool = False


def parse_argument(option: str, text: str, seed: int = 0) -> CommandArgument:
    """Parse one argument; random content is drawn from `seed`, so that two runs have the same.

    Raises:
        ArgumentError: the text is none; `option` is named in the message.
        FileError: the .npy cannot be read.
    """
    name, value_text = match.groups() if (match := _NAMED.fullmatch(text)) else ("", text)
    if value_text == "null":  # a pointer
        return CommandArgument(name, None)
    if value_text.endswith(".npy"):
        return CommandArgument(name, load_array(Path(value_text)))
    if match := _ARRAY.fullmatch(value_text):
        dtype, shape = match[1], tuple(int(size) for size in re.findall(r"\d+", match[2]))
        if dtype in _DTYPES or dtype in BFLOAT16:
            fill = (match[3] or "zeros").strip()
            array = _make_array(option, dtype, shape, fill, seed)
            return CommandArgument(name, array, fill == "uninitialised", dtype in BFLOAT16)
        raise ArgumentError(option, f"a dtype of {', '.join([*(n for n in _DTYPES if len(n) < 4), 'bf16'])}", dtype)
    if fields := _struct(value_text):
        return CommandArgument(name, fields[0] if len(fields) == 1 else _struct_bytes(fields))
    return CommandArgument(name, _number(option, value_text, text))


def _number(option: str, text: str, argument: str) -> int | float:
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(option, _RULE, argument or "nothing") from None


def _struct(text: str) -> list[np.generic]:
    """Parse `i32:100,f32:2` to scalars; return an empty list for a text that is not such a list."""
    fields: list[np.generic] = []
    for part in text.split(","):
        match = _TYPED.fullmatch(part.strip())
        if not match or match[1] not in _DTYPES:
            return []
        dtype = _DTYPES[match[1]]
        try:
            fields.append(dtype.type(int(match[2], 0) if dtype.kind in "iu" else float(match[2])))
        except (ValueError, OverflowError):
            return []
    return fields


def _struct_bytes(fields: Sequence[np.generic]) -> bytes:
    """Return the bytes of a struct of these fields, each aligned to its size, as C++ lays it out."""
    raw = b""
    for field in fields:
        raw += bytes(-len(raw) % field.nbytes) + field.tobytes()
    return raw + bytes(-len(raw) % max(field.nbytes for field in fields))


def _make_array(option: str, name: str, shape: tuple[int, ...], fill: str, seed: int) -> Any:
    """Make an array filled as `fill` says; bfloat16 is made as its bits, uint16."""
    is_bfloat16 = name in BFLOAT16
    dtype = np.dtype(np.float32) if is_bfloat16 else _DTYPES[name]
    rng = np.random.default_rng(seed)
    if fill in ("zeros", "uninitialised"):
        array = np.zeros(shape, dtype)
    elif fill == "arange":
        array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    elif fill == "uniform" and dtype.kind in "iu":
        limits: Any = np.iinfo(str(dtype))
        array = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    elif fill == "uniform":
        array = rng.random(shape).astype(dtype)
    elif fill == "normal" and dtype.kind == "f":
        array = rng.standard_normal(shape).astype(dtype)
    else:
        rule = ", ".join(fill_name for fill_name in FILLS if fill_name != "normal" or dtype.kind == "f")
        try:
            array = np.full(shape, int(fill, 0) if dtype.kind in "iu" else float(fill), dtype)
        except (ValueError, OverflowError):
            raise ArgumentError(option, f"one of {rule} or a number that {name} holds", fill) from None
    return bfloat16_bits(array) if is_bfloat16 else array


def name_arguments(
    label: str, parameters: Sequence[str], arguments: Sequence[CommandArgument], named: Collection[str]
) -> list[CommandArgument]:
    """Give arguments without a name those of the parameters that no argument, and nothing in `named`, has, in order.

    Raises ArgumentError for a name that is no parameter or stands twice, or for more values than parameters.
    """
    names = [argument.name for argument in arguments if argument.name]
    for name in names:
        if names.count(name) > 1 or name not in parameters:
            raise ArgumentError(label, f"each of {', '.join(parameters) or 'no arguments'} once", name)
    free_names = [name for name in parameters if name not in names and name not in named]
    if len(arguments) - len(names) > len(free_names):
        raise ArgumentError(label, f"at most {len(parameters)} ({', '.join(parameters)})", len(arguments) + len(named))
    next_free = iter(free_names)
    return [argument if argument.name else replace(argument, name=next(next_free)) for argument in arguments]
