"""Machine code: nvdisasm's text parsed, counted by opcode and pipe, and the cost of dequantising eight weights.

The pipes are Hopper's (sm_90), after Nsight Compute's description of them; other architectures share most of it, but
no rate is claimed for them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ptxlab import toolchain
from ptxlab.errors import ArgumentError
from ptxlab.hardware import sheets
from ptxlab.sass import harness
from ptxlab.sources import Source

LANES_PER_CLOCK = sheets.LANES_PER_CLOCK["sm_90"]

ARITHMETIC = frozenset({"alu", "fmaheavy", "fma", "xu", "fp64"})

_PIPES = {
    "alu": "BMSK CS2R F2FP FCHK FMNMX FSEL FSET FSETP HMNMX2 HSET2 HSETP2 I2FP I2IP IABS IADD IADD3 IMNMX ISCADD ISETP "
    "LEA LOP LOP3 MOV MOV32I P2R PLOP3 PRMT PSETP R2P R2UR SEL SGXT SHF SHL SHR VABSDIFF VABSDIFF4 VIADD VIADDMNMX "
    "VIMNMX VOTE",
    "fmaheavy": "IDP IDP4A IMAD IMUL",
    "fma": "FADD FFMA FMUL FSWZADD HADD2 HFMA2 HMUL2",
    "xu": "BREV F2F F2I FLO FRND I2F I2I MUFU POPC",
    "fp64": "DADD DFMA DMUL DSETP",
    "tensor": "BGMMA BMMA DMMA HGMMA HMMA IGMMA IMMA QGMMA WARPGROUP",
    "lsu": "ATOM ATOMG ATOMS CCTL ERRBAR FENCE LD LDG LDGDEPBAR LDGSTS LDL LDS LDSM MATCH MEMBAR QSPC RED REDUX SHFL "
    "ST STG STL STS STSM SYNCS UBLKCP UBLKPF UBLKRED UTMALDG UTMAPF UTMAREDG UTMASTG",
    "control": "ACQBULK BAR BMOV BPT BRA BREAK BRX BRXU BSSY BSYNC CALL DEPBAR ELECT ENDCOLLECTIVE EXIT JMP JMX KILL "
    "NANOSLEEP NOP PREEXIT RET RPCMOV UCGABAR_ARV UCGABAR_WAIT USETMAXREG UTMACMDFLUSH WARPSYNC YIELD",
    "constant": "LDC S2R S2UR",
}
_MEMORY = {
    "store": "ATOM ATOMG ATOMS RED ST STG STL STS STSM UBLKRED UTMAREDG UTMASTG",
    "load": "LD LDC LDG LDGSTS LDL LDS LDSM S2R S2UR UBLKCP ULDC UTMALDG",
}


def _by_opcode(table: Mapping[str, str]) -> dict[str, str]:
    return {opcode: name for name, opcodes in table.items() for opcode in opcodes.split()}


_PIPE_OF = _by_opcode(_PIPES)
_MEMORY_OF = _by_opcode(_MEMORY)

_SECTION = re.compile(r"^\.text\.([^:\s]+):")
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_PLACE = re.compile(r'//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*?)\s*;"
)


@dataclass(frozen=True)
class SassInstruction:
    """A machine instruction.

    Attributes:
        address: byte offset in its function.
        opcode: without modifiers, `IMAD`.
        modifiers: `("MOV", "U32")`.
        operands: as written.
        guard: `@P0`, `@!UP1`, or empty.
        line: of the source that it came from, 0 if unknown.
        path: of that source, or of the header.
    """

    address: int
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    line: int
    path: str = ""

    @property
    def name(self) -> str:
        """Opcode and modifiers, `IMAD.MOV.U32`."""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def pipe(self) -> str:
        """The pipe that executes it; `uniform` for the uniform datapath, `other` for an opcode not in the table."""
        return _PIPE_OF.get(self.opcode) or ("uniform" if self.opcode.startswith("U") else "other")

    @property
    def section(self) -> str:
        """`load`, `store`, `memory`, `control`, `arithmetic`, `tensor`, `uniform` (addresses, counters), `constant`.

        An opcode that the table does not know counts as arithmetic: a count may err upwards, never downwards.
        """
        if self.opcode in _MEMORY_OF:
            return _MEMORY_OF[self.opcode]
        return {"lsu": "memory", "other": "arithmetic"}.get(
            self.pipe, "arithmetic" if self.pipe in ARITHMETIC else self.pipe
        )


def parse(disassembly: str) -> dict[str, list[SassInstruction]]:
    """Parse nvdisasm's (or cuobjdump's) text into the instructions of every function, without padding at the end.

    Branch targets are byte offsets, as in cuobjdump's text: labels are resolved.
    """
    functions: dict[str, list[SassInstruction]] = {}
    labels: dict[str, int] = {}
    current_instructions: list[SassInstruction] = []
    line, path = 0, ""
    for text in disassembly.splitlines():
        section = _SECTION.match(text) or _FUNCTION.match(text)
        if section:
            current_instructions, line = functions.setdefault(section[1], []), 0
        elif label := _LABEL.match(text):
            labels[label[1]] = current_instructions[-1].address + 16 if current_instructions else 0
        elif place := _PLACE.search(text):
            line, path = int(place["line"]), place["file"]
        elif match := _INSTRUCTION.match(text):
            opcode, *modifiers = match["opcode"].split(".")
            operands = tuple(o.strip() for o in match["operands"].split(",") if o.strip())
            address = int(match["address"], 16)
            guard = match["guard"] or ""
            current_instructions.append(SassInstruction(address, opcode, tuple(modifiers), operands, guard, line, path))
    return {name: _without_padding([_resolve_labels(i, labels) for i in code]) for name, code in functions.items()}


def loop_of(instructions: list[SassInstruction]) -> list[SassInstruction]:
    """Return the last innermost loop: from the target of the last backward branch to that branch; empty without one."""
    for end in reversed(instructions):
        if end.opcode == "BRA" and (target := int(end.operands[-1], 16)) <= end.address:
            return [i for i in instructions if target <= i.address <= end.address]
    return []


def opcode_counts(instructions: Iterable[SassInstruction]) -> dict[str, int]:
    """Count the occurrences of each opcode, modifiers included, most frequent first."""
    return dict(Counter(i.name for i in instructions).most_common())


def pipe_counts(instructions: Iterable[SassInstruction]) -> dict[str, int]:
    """Count the instructions of each pipe."""
    return dict(Counter(i.pipe for i in instructions).most_common())


def pipe_limit(per_pipe: Mapping[str, float]) -> tuple[float, str]:
    """Compute the clocks that one SM needs per lane for these instructions on Hopper, at best.

    Return them and the pipe that decides.
    """
    return sheets.slowest_pipe(per_pipe, "sm_90")


@dataclass(frozen=True)
class Report:
    """The assembler's report on one entry.

    Attributes:
        name: of the source, with its language.
        entry: entry symbol.
        arch: architecture.
        tools: assembler (or NVRTC) and disassembler with versions: counts drift between them.
        registers: per thread.
        spill_stores: bytes per thread, likewise `spill_loads` and `stack`.
        shared: static shared memory, bytes per block.
        opcodes: occurrences in the whole entry, with modifiers.
        pipes: instructions of the whole entry by pipe.
        sections: instructions of the whole entry by section.
        alu_per_8: arithmetic instructions that dequantise 8 weights, steady state; None where no word is marked.
        opcodes_per_8: the same by opcode.
        pipes_per_8: the same by pipe.
        warnings: of the compiler.
    """

    name: str
    entry: str
    arch: str
    tools: tuple[str, ...]
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    opcodes: dict[str, int]
    pipes: dict[str, int]
    sections: dict[str, int]
    alu_per_8: float | None
    opcodes_per_8: dict[str, float]
    pipes_per_8: dict[str, float]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return asdict(self)


def report(
    source: Source, arch: str, *, entry: str | None = None, defines: toolchain.Defines = toolchain.NO_DEFINES
) -> Report:
    """Compile, disassemble and count one entry of a source, and its marked word if there is one.

    Raises:
        ArgumentError: no such entry, or several and none was named.
        CompileError, UnavailableError: as in `toolchain`.
    """
    image, entry = _build_entry(source, arch, entry, defines)
    instructions = parse(toolchain.disassemble(image))[entry]
    resources = image.resources[entry]
    word = count_per_8_weights(source, arch)
    return Report(
        name=source.label,
        entry=entry,
        arch=arch,
        tools=(image.tool, f"nvdisasm {toolchain.version('nvdisasm')}"),
        registers=resources.registers,
        spill_stores=resources.spill_stores,
        spill_loads=resources.spill_loads,
        stack=resources.stack,
        shared=resources.shared,
        opcodes=opcode_counts(instructions),
        pipes=pipe_counts(instructions),
        sections=dict(Counter(i.section for i in instructions).most_common()),
        alu_per_8=None if word is None else sum(word.values()),
        opcodes_per_8=dict(word or {}),
        pipes_per_8=by_pipe(word or {}),
        warnings=image.warnings,
    )


def instructions(
    source: Source, arch: str, *, entry: str | None = None, defines: toolchain.Defines = toolchain.NO_DEFINES
) -> list[SassInstruction]:
    """Return the machine code of one entry of a source, each instruction with its source line.

    Raises as `report` does.
    """
    image, entry = _build_entry(source, arch, entry, defines)
    return parse(toolchain.disassemble(image))[entry]


def _build_entry(
    source: Source, arch: str, entry: str | None, defines: toolchain.Defines
) -> tuple[toolchain.Image, str]:
    """Build a source; return its image and the entry: the one that is named, otherwise the only one."""
    image = toolchain.build(source, arch, defines=defines)
    if entry is None and len(image.resources) == 1:
        entry = next(iter(image.resources))
    if entry is None or entry not in image.resources:
        raise ArgumentError(f"{source.label}: entry", f"one of {', '.join(image.resources) or 'none'}", entry or "none")
    return image, entry


def count_per_8_weights(source: Source, arch: str) -> dict[str, float] | None:
    """Count the arithmetic instructions that one word (8 weights) costs, by opcode.

    The count is the difference between treating 16 and 8 words, divided by 8: constants, addresses and the entry's
    frame cancel. Return None for a source that marks no word.
    """
    harnesses = [harness.counting_harness(source, words) for words in (8, 16)]
    counts_8, counts_16 = (_arithmetic(h, arch) if h else None for h in harnesses)
    if counts_8 is None or counts_16 is None:
        return None
    # An opcode may also become rarer (ptxas spells one operation in several ways), so keep negative differences.
    return {
        name: (counts_16[name] - counts_8[name]) / 8
        for name in sorted({*counts_8, *counts_16})
        if counts_16[name] != counts_8[name]
    }


def by_pipe(opcodes: Mapping[str, float]) -> dict[str, float]:
    """Sum counts of opcodes by pipe."""
    pipes: Counter[str] = Counter()
    for name, count in opcodes.items():
        pipes[_PIPE_OF.get(name.split(".")[0], "other")] += count  # type: ignore[assignment]
    return dict(pipes)


def _arithmetic(source: Source, arch: str) -> Counter[str]:
    functions = parse(toolchain.disassemble(toolchain.build(source, arch)))
    return Counter(i.name for i in functions[harness.COUNTING] if i.section == "arithmetic")


def _resolve_labels(instruction: SassInstruction, labels: Mapping[str, int]) -> SassInstruction:
    if not any("`(" in o for o in instruction.operands):
        return instruction
    operands = tuple(_TARGET.sub(lambda m: hex(labels.get(m[1], 0)), o) for o in instruction.operands)
    return replace(instruction, operands=operands)


def _without_padding(instructions: list[SassInstruction]) -> list[SassInstruction]:
    """Cut the NOPs after the end, and the branch to itself that stands before them."""
    end = len(instructions)
    while end and instructions[end - 1].opcode == "NOP":
        end -= 1
    if (
        end
        and instructions[end - 1].opcode == "BRA"
        and instructions[end - 1].operands[-1:] == (hex(instructions[end - 1].address),)
    ):
        end -= 1
    return instructions[:end]
