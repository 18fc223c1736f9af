"""What GPUs do otherwise than the PTX manual says: `entries.toml`, and the forms that the generator therefore avoids.

An entry keeps forms out by a `pattern` of the line, or by a `rule` of the generator: which registers it reads again,
from which domain an operand comes.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("entries.toml")


@dataclass(frozen=True)
class Entry:
    """A class of departures.

    Attributes:
        name: of the entry.
        effect: what happens, in a sentence.
        who: "optimiser" if the driver's optimisation level 0 is right, "ptxas" if it is the same, "hardware".
        manual: what the manual says, or "silent".
        program: lines of PTX in which it is seen; thread t reads 8 words from [%in] on, and stores as many to [%out].
        inputs: words by thread, as hexadecimal text; the threads behind them repeat them.
        emulator, gpu, level0: words that the first threads store: in the emulator, on an H200, there at level 0.
        pattern: lines that the generator avoids.
        rule: of the generator, by which it avoids the form.
    """

    name: str
    effect: str
    who: str
    manual: str
    program: str
    inputs: list[list[str]]
    emulator: list[list[str]]
    gpu: list[list[str]]
    level0: list[list[str]]
    pattern: str = ""
    rule: str = ""
    threads: int = 32


@cache
def load() -> dict[str, Entry]:
    """Read all entries, by name."""
    fields = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: Entry(name=name, **entry) for name, entry in fields.items()}


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((entry.name, re.compile(entry.pattern)) for entry in load().values() if entry.pattern)


def match(line: str) -> str:
    """The entry that keeps a line out, or ""."""
    return next((name for name, pattern in _patterns() if pattern.search(line)), "")


@cache
def rules() -> frozenset[str]:
    """The generator's rules that entries ask for."""
    return frozenset(entry.rule for entry in load().values() if entry.rule)


def require_rule(rule: str) -> None:
    """Refuse a rule that no entry asks for: the generator avoids nothing without one."""
    if rule not in rules():
        raise ValueError(f"no entry of {FILE.name} has the rule {rule!r}")


def wrap(program: str) -> str:
    """PTX of a kernel that executes an entry's lines."""
    return f""".version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 inputs, .param .u64 outputs)
{{
.reg .b16 %h<10>; .reg .b32 %r<20>, %t; .reg .b64 %x<20>, %in, %out, %offset; .reg .pred %p<8>;
ld.param.u64 %in, [inputs];
ld.param.u64 %out, [outputs];
mov.u32 %t, %tid.x;
mul.wide.u32 %offset, %t, 64;
cvta.to.global.u64 %in, %in;
cvta.to.global.u64 %out, %out;
add.s64 %in, %in, %offset;
add.s64 %out, %out, %offset;
{program}
ret;
}}
"""
