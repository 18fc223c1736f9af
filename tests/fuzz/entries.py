"""The entries: quirks (`ptxlab.hardware.quirks`), and what the generator leaves out because of them.

A quirk keeps a form out by its `forms`, as they are seen in a line, or by a `rule` of the generator: which registers it
reads again, from which domain an operand comes.
"""

import re
from functools import cache

from ptxlab.hardware import quirks

_LINE = re.compile(r"(@\S+ )?([\w.:]+)(?: (.*))?;$")
_PART = re.compile(r"(?<=\.)\w+$")


def find_entry(line: str) -> str:
    """Return the name of the entry that keeps a line out, or ""."""
    if not (parts := _LINE.match(line)):
        return ""
    operands = (parts[3] or "").split(", ")
    constants = [int(operand) if re.fullmatch(r"-?\d+", operand) else None for operand in operands]
    selectors = ["".join(_PART.findall(operand)) for operand in operands]
    sources = [operand for operand in operands[1:] if operand.startswith("%")]
    seen = parts[2], bool(parts[1]), selectors, constants, len({*sources}) < len(sources)
    return next((name for name, form in _forms_of_one_line() if form.fits(*seen)), "")


@cache
def _forms_of_one_line() -> list[tuple[str, quirks.Form]]:
    """List the forms that one line shows."""
    return [(quirk.name, form) for quirk in quirks.load().values() if not quirk.rule for form in quirk.forms]


@cache
def rules() -> frozenset[str]:
    """Collect the generator's rules that entries ask for."""
    return frozenset(quirk.rule for quirk in quirks.load().values() if quirk.rule)


def require_rule(rule: str) -> None:
    """Refuse a rule that no entry asks for: the generator avoids nothing without one."""
    if rule not in rules():
        raise ValueError(f"no entry of {quirks.FILE.name} has the rule {rule!r}")


def wrap(program: str, cluster: int = 1) -> str:
    """Write the PTX of a kernel that executes an entry's lines."""
    return f""".version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 inputs, .param .u64 outputs) {f".reqnctapercluster {cluster}" * (cluster > 1)}
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
