"""The ways from q4·s1 + min to a byte, one instruction at a time: the very PTX, run in the emulator on four weights.

Scale and minimum are free here, and not what a quantiser would choose, so that every way can be driven over its edge.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ptxlab.emulator import Finding, LaneType
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import as_words, replicate
from ptxlab.jupyter.page import Html, chip, element, join, page
from ptxlab.jupyter.registers import RegisterRow, section_row, word_table
from ptxlab.runtime import Kernel, load

LANES = 4
SIGNED, UNSIGNED = LaneType(True, 8, LANES), LaneType(False, 8, LANES)

_MULTIPLY = "mul.lo.u32 %d, %q, %s;  // @lanes d:u8x4 a:u8x4 b:u32"
_MULTIPLY_ADD = "mad.lo.u32 %d, %q, %s, %a;  // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4"
_KERNEL = """.version 6.5
.target sm_75
.address_size 64
.visible .entry identity(.param .u32 q, .param .u32 s, .param .u32 m, .param .u32 a, .param .u64 out) {{
    .reg .u32 %q, %s, %m, %a, %d, %none; .reg .u64 %out;
    ld.param.u32 %q, [q]; ld.param.u32 %s, [s]; ld.param.u32 %m, [m]; ld.param.u32 %a, [a]; ld.param.u64 %out, [out];
    mov.u32 %none, 0;
{body}
    ret;
}}
"""


@dataclass(frozen=True)
class Identity:
    """A way to dequantise four packed weights.

    Attributes:
        name: what it is called, and where it is from.
        steps: PTX on `%d` from `%q` (four q4), `%s` (s1), `%m` (min in every byte) and `%a` (128 + min in every byte).
        types: of the lanes of `%d` after each step.
        bias: what the result is meant to be off by.
    """

    name: str
    steps: tuple[str, ...]
    types: tuple[LaneType, ...]
    bias: int = 0


IDENTITIES = (
    Identity(
        "A packed add, which LiquidGEMM §4 warns of",
        (_MULTIPLY, "add.u32 %d, %d, %m;  // @lanes d:s8x4 a:u8x4 b:s8x4"),
        (UNSIGNED, SIGNED),
    ),
    Identity(
        "QoQ: an add that wraps in every byte (QServe §5.2.3)",
        (_MULTIPLY, "vadd4.u32.u32.u32 %d, %d, %m, %none;  // @lanes d:s8x4 a:u8x4 b:s8x4"),
        (UNSIGNED, SIGNED),
    ),
    Identity(
        "LQQ: one multiply-add, one XOR (LiquidGEMM §4)",
        (_MULTIPLY_ADD, "xor.b32 %d, %d, 0x80808080;  // @lanes d:s8x4 a:u8x4"),
        (UNSIGNED, SIGNED),
    ),
    Identity("LQQ without the XOR: weight + 128, taken off by the token sum", (_MULTIPLY_ADD,), (UNSIGNED,), 128),
)


@dataclass(frozen=True)
class Trace:
    """Run of an identity: a word after every step, and the emulator's findings of every step."""

    identity: Identity
    words: tuple[int, ...]
    findings: tuple[tuple[Finding, ...], ...]

    def lanes(self, step: int) -> tuple[int, ...]:
        """Decode the values of the lanes after a step, lane 0 first."""
        decoded_lanes = self.identity.types[step].decode(np.array([self.words[step]], np.uint64))
        return tuple(int(lane_value) for lane_value in decoded_lanes[:, 0])


@dataclass(frozen=True)
class Identities:
    """Every identity on the same four weights; in a notebook it shows itself as a page.

    Attributes:
        q4: the weights, lane 0 first.
        s1: their scale.
        minimum: what is added: min of LQQ, -z·s1 of QoQ.
        traces: of each identity.
    """

    q4: tuple[int, ...]
    s1: int
    minimum: int
    traces: tuple[Trace, ...]

    @property
    def exact(self) -> tuple[int, ...]:
        """q4·s1 + min, lane 0 first."""
        return tuple(q * self.s1 + self.minimum for q in self.q4)

    def wrong(self, trace: Trace) -> set[int]:
        """Find the lanes in which an identity does not give the exact value plus its bias."""
        traced = trace.lanes(-1)
        return {
            lane for lane, exact_value in enumerate(self.exact) if traced[lane] != exact_value + trace.identity.bias
        }

    def __repr__(self) -> str:
        lines = [f"q4 {self.q4}, s1 {self.s1}, min {self.minimum}: {self.exact} (lane 0 first)"]
        for trace in self.traces:
            wrong_lanes = sorted(self.wrong(trace))
            lines.append(
                f"{trace.identity.name}: {trace.lanes(-1)}" + (f", wrong in lanes {wrong_lanes}" if wrong_lanes else "")
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        inputs = [
            RegisterRow("q4", UNSIGNED, self.q4),
            RegisterRow("s1", LaneType(False, 32, 0), (self.s1,)),
            RegisterRow("min", SIGNED, (self.minimum,) * LANES),
            RegisterRow("a = 128 + min", UNSIGNED, (self.minimum + 128,) * LANES),
            RegisterRow("q4·s1 + min", SIGNED, self.exact, _outside(self.exact), "what it should be"),
        ]
        return page(word_table([*inputs, *(row for trace in self.traces for row in self._section(trace))]))

    def _section(self, trace: Trace) -> list[RegisterRow | Html]:
        wrong_lanes = self.wrong(trace)
        verdict = chip(f"wrong in {len(wrong_lanes)} of 4", kind="bad") if wrong_lanes else chip("exact", kind="good")
        rows = [
            RegisterRow(
                step.partition(";")[0],
                trace.identity.types[i],
                trace.lanes(i),
                _lanes_with_findings(trace, i),
                _note(trace, i),
            )
            for i, step in enumerate(trace.identity.steps)
        ]
        rows[-1] = replace(rows[-1], wrong=wrong_lanes)
        return [section_row(trace.identity.name, " ", verdict), *rows]


def identities(q4: tuple[int, ...] = (15, 3, 0, 9), s1: int = 15, minimum: int = -104) -> Identities:
    """Run every identity on four weights.

    Args:
        q4: four weights 0..15, lane 0 first.
        s1: their scale, 1..255 (a quantiser keeps to 1..16).
        minimum: -128..127.

    Raises:
        ArgumentError: a value out of its range.
    """
    if np.shape(q4) != (LANES,) or not all(0 <= q <= 15 for q in q4):
        raise ArgumentError("q4", "four values 0..15", q4)
    if not 1 <= s1 <= 255:
        raise ArgumentError("s1", "1..255", s1)
    if not -128 <= minimum <= 127:
        raise ArgumentError("minimum", "-128..127", minimum)
    return Identities(tuple(q4), s1, minimum, tuple(_trace(i, tuple(q4), s1, minimum) for i in IDENTITIES))


def _trace(identity: Identity, q4: tuple[int, ...], s1: int, minimum: int) -> Trace:
    word = as_words(np.array(q4, np.uint8))[0]
    low_minimum, shifted_minimum = replicate(np.array([minimum & 255, minimum + 128], np.uint8))
    out = np.empty(len(identity.steps), np.uint32)
    outcome = _kernel(identity)(
        word, np.uint32(s1), low_minimum, shifted_minimum, out, grid=1, block=1, backend="emulator", checks=["lanes"]
    )
    findings = tuple(tuple(f for f in outcome.findings if f.text == step.partition(";")[0]) for step in identity.steps)
    return Trace(identity, tuple(map(int, out)), findings)


@cache
def _kernel(identity: Identity) -> Kernel:
    """Build a kernel of one thread that stores `%d` after every step."""
    body = [f"    {step}\n    st.global.u32 [%out+{4 * i}], %d;" for i, step in enumerate(identity.steps)]
    return load(_KERNEL.format(body="\n".join(body)))


def _lanes_with_findings(trace: Trace, step: int) -> set[int]:
    return {finding.lane for finding in trace.findings[step] if finding.lane is not None}


def _outside(values: tuple[int, ...]) -> set[int]:
    low, high = SIGNED.limits
    return {lane for lane, number in enumerate(values) if not low <= number <= high}


def _note(trace: Trace, step: int) -> Html:
    """Render the word after a step, and the findings of the step."""
    parts = [element("code", f"{trace.words[step]:#010x}"), *(finding.message for finding in trace.findings[step])]
    return join(parts, "<br>")
