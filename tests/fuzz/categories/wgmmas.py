"""wgmma of all types: operands in shared memory with any swizzle, or A in registers; negated, transposed, in groups."""

import numpy as np

from ptxlab.hardware.fragments import WGMMA_N
from tests.fuzz.categories.fragments import fill
from tests.fuzz.categories.matrices import CROSSES, FP8, SLOT, braces
from tests.fuzz.categories.numbers import BITS, SPECIALS, draw_exact
from tests.fuzz.domains import Values
from tests.fuzz.program import Program

SIZE, B_AT = 32768, 16384  # bytes of shared memory, and where B lies
KINDS = (  # types of D, A and B
    [("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")],
    [(d, "f16", "f16") for d in ("f16", "f32")],
    [("f32", t, t) for t in ("bf16", "tf32")],
    [(d, a, b) for d in ("f16", "f32") for a in FP8 for b in FP8],
)
WIDTHS = range(8, 72, 8)
SHOWN = 24  # registers of D that are stored


def draw_descriptor(program: Program) -> int:
    """Draw layout and strides of an operand: without swizzle any, with one those of rows that follow each other."""
    swizzle = program.pick(0, 0, 1, 2, 3)
    leading, stride = (16 * (8 + program.below(56)) for _ in range(2))
    if swizzle:
        leading, stride = 16, {1: 1024, 2: 512, 3: 256}[swizzle]
    return (leading >> 4) << 16 | (stride >> 4) << 32 | swizzle << 62


def descriptors_of_b(program: Program, base: str) -> list[tuple[str, int, int]]:
    """Draw where three B lie, and how: each in another way, lest ptxas takes their products for one another."""
    drawn: list[tuple[str, int, int]] = []
    while len(drawn) < 3:
        b = base, 1024 * program.below(4), draw_descriptor(program)
        if b in drawn:
            program.avoid("equal wgmma")
        else:
            drawn.append(b)
    return drawn


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program of one warp group."""
    program = Program(rng, category, 128)
    program.is_asynchronous = True
    d_type, a_type, b_type = program.pick(*program.pick(*KINDS))
    is_integer, k = d_type == "s32", 256 // BITS.get(a_type, 8)
    n = program.pick(*(n for n in WIDTHS if n in WGMMA_N or not is_integer))
    special = 0.01 if not is_integer and program.chance(0.1) else 0.0

    def numbers(t: str, words: int) -> Values:
        if is_integer:
            return rng.integers(0, 2**32 if words == 1 else 2**64, program.total, dtype=np.uint64)
        specials = (np.nan,) if t == "e4m3" else SPECIALS  # sums of 448 have more than the 14 bits that wgmma keeps
        drawn = [draw_exact(rng, t, program.total, d_type == "f16", special, specials) for _ in range(words)]
        return drawn[0] if words == 1 else drawn[0] | drawn[1] << np.uint64(32)

    program.shared.append(f".shared .align 1024 .b8 tile[{SIZE}];")
    base, b_base = program.register(32), program.register(32)
    program.lines(f"mov.u32 {base}, tile;", f"add.u32 {b_base}, {base}, {B_AT};")
    fill(program, base, B_AT, lambda: numbers(a_type, 2))
    fill(program, b_base, SIZE - B_AT, lambda: numbers(b_type, 2))
    program.lines("fence.proxy.async;", "bar.sync 0;")
    d = [program.register(32) for _ in range(n // (4 if d_type == "f16" else 2))]
    starts = [program.input("b32", numbers(d_type, 1)).text for _ in range(6)]
    lines = [f"mov.b32 {register}, {starts[i % len(starts)]};" for i, register in enumerate(d)]
    at_a = 1024 * program.below(8)
    described = []
    for from_, at, layout in ((base, at_a, draw_descriptor(program)), *descriptors_of_b(program, b_base)):
        place, register = program.register(32), program.register(64)
        lines += [
            f"add.u32 {place}, {from_}, {at};",
            f"shr.u32 {place}, {place}, 4;",
            f"cvt.u64.u32 {register}, {place};",
            f"or.b64 {register}, {register}, {layout};",
        ]
        described.append(register)
    a, *of_b = described
    in_registers = program.chance(0.3)
    if in_registers:
        a = braces([program.input("b32", numbers(a_type, 1)).text for _ in range(4)])
    clamp = ".satfinite" if is_integer and program.chance(0.3) else ""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{a_type}.{b_type}{clamp}"
    flags = "" if is_integer else f", {program.pick(1, 1, -1)}, {program.pick(1, 1, -1)}"
    if a_type in ("f16", "bf16"):
        flags += ", 0" if in_registers else ", 0, 0"
    is_added = program.pick("eq", "eq", "ne")

    def multiply(b: str) -> str:
        return f"{opcode} {braces(d)}, {a}, {b}, %is{flags};"

    ways = {
        "one": [multiply(of_b[0])],
        "others": [multiply(b) for b in of_b],
        "fenced": [multiply(of_b[0]), "wgmma.fence.sync.aligned;", multiply(of_b[0])],
    }
    way = program.pick("one", *ways, "equal")
    if way == "equal":
        program.avoid("equal wgmma")
        way = "others"
    lines += [
        "wgmma.fence.sync.aligned;",
        f"setp.{is_added}.u32 %is, %t, %t;",
        *ways[way],
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
    ]
    form = opcode.replace(f"n{n}", "nN") + " A in registers" * in_registers + " special" * bool(special)
    program.sequence(lines, form, [(register, SLOT[d_type]) for register in d[:SHOWN]], how=CROSSES)
    return program
