"""Forms of instructions: PTX with alternatives in parentheses, and operands as `name:domain`.

    add.(t=u32/s32/u64) d:$t, a:$t, b:$t;      one of three types, the same for all operands
    mul.wide.(t=u16/s16) d:$2t, a:$t, b:$t;    a result of twice the width
    prmt.b32 d:u32, a:b32, b:b32, #0-65535;    a constant within limits

Operands d, e, p, q and u, v are written, all others read.
"""

import re
from collections.abc import Sequence

import numpy as np

WRITTEN = "depquv"
OPERAND = re.compile(r"(?<![\w:.])([a-z]):([a-z]\w*)\b")
_CHOICE = re.compile(r"\((?:(\w)=)?([^()]*)\)")
_REFERENCE = re.compile(r"\$(2?)([a-z])")
_CONSTANT = re.compile(r"#(-?\d+)-(\d+)")


def parse(text: str) -> list[str]:
    """Split a table of forms, a line each."""
    return text.strip().splitlines()


def choose(forms: Sequence[str], rng: np.random.Generator) -> str:
    """Draw one of the forms, with one of its alternatives in each place: PTX whose operands are still domains."""
    return expand(forms[int(rng.integers(len(forms)))], rng)


def expand(form: str, rng: np.random.Generator) -> str:
    """Draw alternatives and constants of one form."""
    types: dict[str, str] = {}

    def alternative(match: re.Match[str]) -> str:
        options = match[2].split("/")
        option = options[int(rng.integers(len(options)))]
        if match[1]:
            types[match[1]] = option
        return option

    def reference(match: re.Match[str]) -> str:
        t = types[match[2]]
        return f"{t[0]}{2 * int(t[1:])}" if match[1] else t

    text = _REFERENCE.sub(reference, _CHOICE.sub(alternative, form))
    return _CONSTANT.sub(lambda match: str(int(rng.integers(int(match[1]), int(match[2]) + 1))), text)
