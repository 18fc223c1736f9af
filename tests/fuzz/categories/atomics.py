"""Atomics on words of a thread's own, on vectors, and on words that many threads change in any order."""

import numpy as np

from tests.fuzz.categories.memory import braces
from tests.fuzz.categories.straight import program_threads
from tests.fuzz.domains import DOMAINS
from tests.fuzz.program import How, Program, Source

CELL = 16  # bytes of a thread
MEETING = 256  # bytes of all
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
OPERATIONS = (
    *(("add", t) for t in ("u32", "s32", "u64", "f32", "f64", *HALVES)),
    *((name, t) for name in ("min", "max") for t in ("u32", "s32", "u64", "s64")),
    *((name, f"b{bits}") for name in ("and", "or", "xor", "exch", "cas") for bits in (32, 64)),
    *((name, "u32") for name in ("inc", "dec")), ("cas", "b16"),
)  # fmt: skip
COMMUTING = [
    "inc.u32",
    *(
        f"{name}.{kind}{bits}"
        for names, kinds in (("add", "u"), ("min max", "us"), ("and or xor", "b"))
        for name in names.split() for kind in kinds for bits in (32, 64)
    ),
]  # fmt: skip
VECTORS = (
    *(("f32", count, "add") for count in (2, 4)),
    *((t, count, f"{name}.noftz") for t in ("f16", "bf16") for count in (2, 4, 8) for name in ("add", "min", "max")),
    *((t, count, f"{name}.noftz") for t in ("f16x2", "bf16x2") for count in (2, 4) for name in ("add", "min", "max")),
)


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    program = Program(rng, category, program_threads(rng, (32, 64, 128)))
    size = CELL * program.threads + MEETING
    program.shared.append(f".shared .align 16 .b8 tile[{size}];")
    program.declarations.append(f".global .align 16 .b8 memory[{size}];")
    shared, in_global, generic = program.register(32), program.register(64), program.register(64)
    program.lines(
        f"mov.u32 {shared}, tile;",
        f"mad.lo.u32 {shared}, %t, {CELL}, {shared};",
        f"mov.u64 {in_global}, memory;",
        f"mad.wide.u32 {in_global}, %t, {CELL}, {in_global};",
        f"cvt.u64.u32 {generic}, {shared};",
        f"cvta.shared.u64 {generic}, {generic};",
    )
    for _ in range(12 + program.below(14)):
        add_own_atomic(
            program, *program.pick((".global", in_global), (".shared", shared), ("", in_global), ("", generic))
        )
    for _ in range(2 + program.below(4)):
        add_vector_atomic(program, in_global)
    for _ in range(2 + program.below(4)):
        add_contended_atomic(program)
    return program


def add_own_atomic(program: Program, space: str, base: str) -> None:
    """Add an atomic on the thread's own word: what it returns, and what is there behind it."""
    name, t = program.pick(*OPERATIONS)
    order, bits, noftz = program.pick("", "", ".relaxed.gpu", ".release.gpu"), DOMAINS[t].bits, ".noftz" * (t in HALVES)
    first, operand = program.input(t), program.input(t)
    sources, operands = [first, operand], operand.text
    if name == "cas":
        compared = first if program.chance(0.5) else program.input(t)
        sources.append(compared)
        operands = f"{compared.text}, {operand.text}"
    d, stored_register = program.register(bits), program.register(bits)
    returns = name in ("exch", "cas") or program.chance(0.7)
    opcode = f"{'atom' if returns else 'red'}{order}{space}.{name}{noftz}.{t}"
    lines = [
        f"st{space}.b{bits} [{base}], {first.text};",
        f"{opcode} {f'{d}, ' * returns}[{base}], {operands};",
        f"ld{space}.b{bits} {stored_register}, [{base}];",
    ]
    registers = [(stored_register, t), *[(d, t)] * returns]
    program.sequence(lines, opcode, registers, tuple[Source, ...](sources))


def add_vector_atomic(program: Program, base: str) -> None:
    """Add a sum, or smaller or larger elements, of a vector in global memory; words in either order."""
    t, count, name = program.pick(*VECTORS)
    in_memory = {"f32": "f32", "f16": "f16x2", "bf16": "bf16x2"}[t.removesuffix("x2")]
    first = [program.input(in_memory) for _ in range(4)]
    values = [program.input(t) for _ in range(count)]
    returned = [program.register(DOMAINS[t].bits) for _ in range(count)]
    stored_registers = [program.register(32) for _ in range(4)]
    returns = program.chance(0.5)
    words = f"{name}.v{count}.{t}" if program.chance(0.7) else f"v{count}.{t}.{name}"
    opcode = f"{'atom' if returns else 'red'}{program.pick('.global', '')}.{words}"
    target = f"{braces(returned)}, " if returns else ""
    lines = [
        f"st.global.v4.b32 [{base}], {braces([s.text for s in first])};",
        f"{opcode} {target}[{base}], {braces([s.text for s in values])};",
        f"ld.global.v4.b32 {braces(stored_registers)}, [{base}];",
    ]
    registers = [*((d, in_memory) for d in stored_registers), *([(d, t) for d in returned] if returns else [])]
    program.sequence(lines, opcode, registers, (*first, *values))


def add_contended_atomic(program: Program) -> None:
    """Add an atomic of many threads on few words, of a kind whose order does not show."""
    space, (name, t) = program.pick("global", "shared"), program.pick(*COMMUTING).split(".")
    bits, words = int(t[1:]), program.pick(1, 2, 4, 8)
    operand = str(program.pick(3, 7, 100, 0xFFFFFFFF)) if name == "inc" else program.input(t).text
    index, is_first = program.register(32), program.register(1)
    base, stored_register = program.register(64 if space == "global" else 32), program.register(bits)
    symbol, wide = ("memory", "wide") if space == "global" else ("tile", "lo")
    move = f"mov.u{64 if space == 'global' else 32} {base}, {symbol};"
    start = 0 if name == "inc" else int(DOMAINS[t].draw(program.rng, 1)[0])
    kind = program.pick("red", "atom")
    target = f"{program.register(bits)}, " if kind == "atom" else ""
    place = f"[{base}+{CELL * program.threads}]"
    cell = program.register(bits)
    lines = [
        f"and.b32 {index}, %t, {words - 1};",
        move,
        f"mad.{wide}.u32 {base}, {index}, 8, {base};",
        "bar.sync 0;",
        f"mov.b{bits} {cell}, {start};",
        f"setp.lt.u32 {is_first}, %t, {words};",
        f"@{is_first} st.{space}.b{bits} {place}, {cell};",
        "bar.sync 0;",
        f"{kind}.{space}.{name}.{t} {target}{place}, {operand};",
        "bar.sync 0;",
        f"ld.{space}.b{bits} {stored_register}, {place};",
        "bar.sync 0;",
    ]
    program.sequence(lines, f"{kind}.{space}.{name}.{t} of many", [(stored_register, t)], how=How(crosses=True))
