"""Loads and stores of all types, widths and spaces, by addresses of the space and generic ones."""

from dataclasses import dataclass

import numpy as np

from tests.fuzz.categories.straight import program_threads
from tests.fuzz.domains import DOMAINS
from tests.fuzz.program import How, Program

SHARED, LOCAL, CONSTANT = 64, 128, 64  # bytes: of a thread, of a thread, of all
TYPES = (*(f"{kind}{bits}" for kind in "sub" for bits in (8, 16, 32, 64)), "f32", "f64")
SPACES = ("const", "global", "local", *(f"shared{scope}" for scope in ("", "::cta", "::cluster")))


@dataclass(frozen=True)
class Window:
    """Memory that a thread may use: its own bytes, or what all of them read."""

    space: str  # as the instruction names it; "" for generic
    base: str
    bytes: int
    loads: tuple[str, ...] = ("",)  # modifiers
    stores: tuple[str, ...] = ()  # none: it is read alone


STRONG_LOADS = ("", "", ".relaxed.cta", ".acquire.gpu", ".volatile", ".relaxed.sys")
STRONG_STORES = ("", ".release.gpu", ".volatile", ".relaxed.gpu")


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program: windows are filled, then loaded and stored at random places, then loaded whole."""
    program = Program(rng, category, program_threads(rng, (32, 64, 128)))
    table = ", ".join(str(program.below(256)) for _ in range(CONSTANT))
    program.declarations += [
        f".const .align 16 .b8 constants[{CONSTANT}] = {{{table}}};",
        f".global .align 16 .b8 numbers[{CONSTANT}] = {{{table}}};",
    ]
    program.shared += [
        f".shared .align 16 .b8 tile[{SHARED * program.threads}];",
        f".local .align 16 .b8 own[{LOCAL}];",
    ]
    shared, local = program.register(32), program.register(32)
    generic_shared, generic_local, numbers = (program.register(64) for _ in range(3))
    program.lines(
        f"mov.u32 {shared}, tile;",
        f"mad.lo.u32 {shared}, %t, {SHARED}, {shared};",
        f"mov.u32 {local}, own;",
        f"cvt.u64.u32 {generic_shared}, {shared};",
        f"cvta.shared.u64 {generic_shared}, {generic_shared};",
        f"cvt.u64.u32 {generic_local}, {local};",
        f"cvta.local.u64 {generic_local}, {generic_local};",
        f"mov.u64 {numbers}, numbers;",
    )
    windows = [
        Window("shared", shared, SHARED, STRONG_LOADS, STRONG_STORES),
        Window("shared::cta", shared, SHARED, ("",), ("",)),
        Window("", generic_shared, SHARED, STRONG_LOADS, STRONG_STORES),
        Window("local", local, LOCAL, ("",), ("",)),
        Window("", generic_local, LOCAL, ("",), ("",)),
        Window("const", "constants", CONSTANT),
        Window("global", "numbers", CONSTANT, (*STRONG_LOADS, ".ca", ".cg", ".cs")),
        Window("global", numbers, CONSTANT, (*STRONG_LOADS, ".nc", ".relaxed.sys")),
        Window("", numbers, CONSTANT, STRONG_LOADS),
    ]
    whole = (("shared", shared, SHARED), ("local", local, LOCAL))
    for space, base, size in whole:
        program.lines(
            *(f"st.{space}.b64 [{base}+{offset}], {program.input('b64').text};" for offset in range(0, size, 8))
        )
    for _ in range(25 + program.below(30)):
        add_access(program, program.pick(*windows))
    for register, space in ((generic_shared, "shared"), (generic_local, "local"), (numbers, "global")):
        p, window = program.register(1), program.pick(*SPACES)
        if (space, window) != ("global", "const"):  # constants lie in global memory, or do not
            program.sequence([f"isspacep.{window} {p}, {register};"], f"isspacep.{window} of {space}", [(p, "pred")])
    load_words_of_others(program)
    for space, base, size in whole:
        registers = [program.register(64) for _ in range(0, size, 8)]
        lines = [f"ld.{space}.b64 {register}, [{base}+{8 * i}];" for i, register in enumerate(registers)]
        program.sequence(lines, f"{space} memory", [(register, "b64") for register in registers])
    return program


def add_access(program: Program, window: Window) -> None:
    """Add a load or a store of one to four elements."""
    t = program.pick(*TYPES)
    count = program.pick(1, 1, 2, 4)
    count = count if int(t[1:]) * count <= 128 else 1
    size = int(t[1:]) // 8 * count
    place = f"[{window.base}+{size * program.below(window.bytes // size)}]"
    space, vector = f".{window.space}" if window.space else "", f".v{count}" if count > 1 else ""
    widths = [bits for bits in (16, 32, 64) if bits >= int(t[1:])]
    domain = t if t[0] == "f" else f"b{program.pick(*widths)}"
    if window.stores and program.chance(0.45):
        sources = [program.source(domain) for _ in range(count)]
        text = f"st{program.pick(*window.stores)}{space}{vector}.{t} {place}, {braces([s.text for s in sources])};"
        guard = f"@{program.source('pred').text} " if program.chance(0.2) else ""
        program.lines(guard + text)
        return
    qualifier = program.pick(*window.loads)
    opcode = (
        f"ld{space}{qualifier}{vector}.{t}"
        if qualifier in (".nc", ".ca", ".cg", ".cs")
        else f"ld{qualifier}{space}{vector}.{t}"
    )
    targets = [program.register(DOMAINS[domain].bits) for _ in range(count)]
    program.sequence([f"{opcode} {braces(targets)}, {place};"], f"{opcode} to {domain}", [(d, domain) for d in targets])


def braces(registers: list[str]) -> str:
    """Write several registers as a vector, one as itself."""
    return "{" + ", ".join(registers) + "}" if len(registers) > 1 else registers[0]


def load_words_of_others(program: Program) -> None:
    """Load what other threads of the block have in shared memory, between barriers."""
    program.lines("bar.sync 0;")
    for _ in range(4):
        place, base, d = (program.register(32) for _ in range(3))
        at = 4 * program.below(SHARED // 4)
        lines = [
            f"xor.b32 {place}, %t, {program.below(program.threads)};",
            f"mov.u32 {base}, tile;",
            f"mad.lo.u32 {place}, {place}, {SHARED}, {base};",
            f"ld.shared.u32 {d}, [{place}+{at}];",
        ]
        program.sequence(lines, "ld.shared of another thread", [(d, "b32")], how=How(crosses=True))
    program.lines("bar.sync 0;")
