"""Changed opcodes and immediates of hand-written PTX, one at a time."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ptxlab.errors import PtxlabError, SourceError, UnknownInstruction
from ptxlab.runtime import run_spec
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec

# What each opcode becomes. Cache operators are not part of the meaning and stay.
SIBLINGS = {
    "add.u64": "sub.u64",
    "and.b32": "or.b32",
    "cvt.u64.u32": "cvt.s64.s32",
    "fma.rn.f16x2": "fma.rn.bf16x2",
    "ld.global.cs.u32": "ld.global.cs.u16",
    "ld.global.cs.v2.u32": "ld.global.cs.v2.u16",
    "ld.global.nc.u16": "ld.global.nc.u8",
    "ld.global.nc.u8": "ld.global.nc.s8",
    "ld.param.u32": "ld.param.u16",
    "ld.param.u64": "ld.param.u32",
    "lop3.b32": "lop3.b32",  # its meaning is the immediate
    "mad.lo.u32": "mad.hi.u32",
    "mad.wide.u32": "mad.wide.s32",
    "mov.b32": "not.b32",
    "mov.u32": "not.b32",
    "mul.lo.u32": "mul.hi.u32",
    "mul.rn.f16x2": "mul.rn.bf16x2",
    "prmt.b32": "prmt.b32.b4e",
    "ret": "trap",
    "setp.ge.u32": "setp.gt.u32",
    "shl.b32": "shr.u32",
    "shr.s32": "shr.u32",
    "shr.u32": "shl.b32",
    "st.global.cs.v4.u32": "st.global.cs.v4.u16",
    "sub.rn.f16x2": "add.rn.f16x2",
    "sub.u32": "add.u32",
    "vadd4.s32.s32.s32": "vsub4.s32.s32.s32",
    "vadd4.u32.u32.u32": "vsub4.u32.u32.u32",
    "vsub4.s32.u32.u32.sat": "vadd4.s32.u32.u32.sat",
    "xor.b32": "or.b32",
}
INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?(?P<opcode>[a-z]\w*(?:\.\w+)*)(?P<rest>[^;]*);")
SPECIAL = re.compile(r"%(?:n?tid|n?ctaid)\.x")  # nothing but mov and cvt reads them, so that one becomes another one
IMMEDIATE = re.compile(r"(?<![%\w.])(0x[0-9a-f]+|\d+)\b")


def mutants(text: str, siblings: dict[str, str] = SIBLINGS) -> Iterator[tuple[str, str]]:
    """Yield (description, whole text) of every mutant.

    The texts have no comments, as annotations fit only the original opcode.
    """
    lines = [line.partition("//")[0].rstrip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        start, opcode = match.start("opcode"), match["opcode"]
        assert opcode in siblings, f"say in SIBLINGS what {opcode} of line {number + 1} becomes in a mutant"
        special = SPECIAL.search(line)
        if special or siblings[opcode] != opcode:
            changed = line[:start] + siblings[opcode] + line[start + len(opcode) :]
            if special:
                changed = line[: special.end() - 1] + "y" + line[special.end() :]
            yield (
                f"{number + 1}: {opcode} => {changed.strip()}",
                "\n".join([*lines[:number], changed, *lines[number + 1 :]]),
            )
        for immediate in IMMEDIATE.finditer(match["rest"]):
            column = match.start("rest") + immediate.start()
            bumped = str(int(immediate[0], 0) + 1)
            changed = line[:column] + bumped + line[column + len(immediate[0]) :]
            yield (
                f"{number + 1}: {line.strip()} => {bumped}",
                "\n".join([*lines[:number], changed, *lines[number + 1 :]]),
            )


# Before the tests


def battery(spec: KernelSpec) -> list[dict[str, np.ndarray]]:
    """Make logical inputs that use every bit: several blocks, the last one partial, and lanes that overflow.

    Constants are any bytes. If some are floats, they are as they occur: no two machines agree on the bits of a NaN.
    """
    rng = np.random.default_rng(1)
    chosen = []
    for rows, K, g in ((5, 1056, 32), (3, 384, 128)):
        sizes = {"R": rows, "K": K, "g": g}
        logical = spec.example(rng, **{name: sizes[name] for name in spec.example_sizes[0]})
        signed = logical["q4"].dtype == np.int8
        logical["q4"] = rng.integers(*((-8, 8) if signed else (0, 16)), (rows, K), dtype=logical["q4"].dtype)
        if not any("float" in str(arg.dtype) for arg in spec.inputs):
            constants = [arg for arg in spec.inputs if arg.name != "qweight"]
            for arg in constants:
                dtype = np.dtype(str(arg.dtype))
                any_byte = np.iinfo(dtype).min, np.iinfo(dtype).max + 1
                logical[arg.name] = rng.integers(*any_byte, (rows, K // g), dtype=dtype)
        chosen.append(logical)
    return chosen


def is_killed(spec: KernelSpec, mutant: Source, inputs: list[dict[str, np.ndarray]]) -> bool:
    try:
        for logical in inputs:
            expected = spec.reference(**logical)
            poison = np.full_like(expected.view(np.uint8), 0xA5).view(expected.dtype)
            options: dict[str, Any] = {"backend": "emulator", "unchecked": True, "checks": ("race", "init")}
            run_spec(spec, mutant, spec.pack(logical), out={"out": poison}, **options)
            if poison.tobytes() != expected.tobytes():
                return True
    except (SourceError, UnknownInstruction):  # no mutant, but nonsense: it would count as killed for the wrong reason
        raise
    except PtxlabError:
        return True
    return False
