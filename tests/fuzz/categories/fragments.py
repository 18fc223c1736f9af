"""ldmatrix, stmatrix, movmatrix, and wmma from and to shared memory."""

from collections.abc import Callable

import numpy as np

from tests.fuzz.categories.matrices import CROSSES, SLOT, braces
from tests.fuzz.categories.numbers import draw_exact
from tests.fuzz.categories.straight import program_threads
from tests.fuzz.domains import Values
from tests.fuzz.forms import parse
from tests.fuzz.program import How, Program

SIZE = 4096  # bytes of shared memory
MOVE = parse("movmatrix.sync.aligned.m8n8.trans.b16 d:b32, a:b32;")


def fill(program: Program, base: str, size: int, draw: Callable[[], Values]) -> None:
    """Store values drawn into shared memory, all threads side by side."""
    place = program.register(32)
    program.lines(f"mad.lo.u32 {place}, %t, 8, {base};")
    for offset in range(0, size, 8 * program.threads):
        word = program.input("b64", draw())
        program.lines(f"st.shared.b64 [{place}+{offset}], {word.text};")


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program of loads and stores of matrices of 8 rows of 16 bytes."""
    program = Program(rng, category, program_threads(rng, (32, 64)))
    program.shared.append(f".shared .align 128 .b8 tile[{SIZE}];")
    base = program.register(32)
    program.lines(f"mov.u32 {base}, tile;")
    fill(program, base, SIZE, lambda: rng.integers(0, 2**64, program.total, dtype=np.uint64))
    program.lines("bar.sync 0;")
    for _ in range(8 + program.below(10)):
        kind = program.pick(add_ldmatrix, add_ldmatrix, add_stmatrix)
        if program.chance(0.15):
            program.form(MOVE, How(crosses=True, guarded=False, constants=False))
        else:
            kind(program, base)
    return program


def add_ldmatrix(program: Program, base: str) -> None:
    """Add an ldmatrix from any rows."""
    count, trans = program.pick(1, 2, 4), program.pick("", ".trans")
    rows = program.input("b32", 16 * program.rng.integers(0, SIZE // 16, program.total, np.uint64))
    d, place = [program.register(32) for _ in range(count)], program.register(32)
    space, lines = program.pick(".shared", ".shared::cta", ""), [f"add.u32 {place}, {base}, {rows.text};"]
    if not space:
        generic = program.register(64)
        lines += [f"cvt.u64.u32 {generic}, {place};", f"cvta.shared.u64 {generic}, {generic};"]
        place = generic
    opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16"
    program.sequence([*lines, f"{opcode} {braces(d)}, [{place}];"], opcode, [(r, "b32") for r in d], (rows,), CROSSES)


def add_stmatrix(program: Program, base: str) -> None:
    """Add an stmatrix to rows of the warp's own, each once; and what is there behind it."""
    count, trans = program.pick(1, 2, 4), program.pick("", ".trans")
    warps = program.threads // 32
    places = np.concatenate([(program.rng.permutation(32) + 32 * warp) * 16 for warp in range(warps)])
    rows, sources = program.input("b32", places), [program.source("b32") for _ in range(count)]
    place, address, low, high = (program.register(bits) for bits in (32, 32, 64, 64))
    opcode = f"stmatrix.sync.aligned.m8n8.x{count}{trans}{program.pick('.shared', '.shared::cta')}.b16"
    lines = [
        "bar.sync 0;",
        f"add.u32 {place}, {base}, {rows.text};",
        f"{opcode} [{place}], {braces([s.text for s in sources])};",
        "bar.sync 0;",
        f"mad.lo.u32 {address}, %t, 16, {base};",
        f"ld.shared.v2.b64 {{{low}, {high}}}, [{address}];",
        "bar.sync 0;",
    ]
    program.sequence(lines, opcode, [(low, "b64"), (high, "b64")], (rows, *sources), CROSSES)


# wmma

_WIDE = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16)}
_PER_WORD = {"s4": 8, "u4": 8, "b1": 32}


def generate_wmma(rng: np.random.Generator, category: str) -> Program:
    """Make a program of one product: operands from shared memory, the result back to it."""
    program = Program(rng, category, 32)
    t = program.pick("f16", "f16", "bf16", "s8", "u8", "tf32", "f64", "s4", "u4", "b1")
    d = {"f16": program.pick("f32", "f16"), "bf16": "f32", "tf32": "f32", "f64": "f64"}.get(t, "s32")
    shapes = {"tf32": "m16n16k8", "f64": "m8n8k4", "s4": "m8n8k32", "u4": "m8n8k32", "b1": "m8n8k128"}
    shape = shapes.get(t) or program.pick(*_WIDE)
    m, n, k = _WIDE.get(shape) or tuple(int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    bits = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s4": 4, "u4": 4, "b1": 1}.get(t, 8)
    d_bits = {"f16": 16, "f64": 64}.get(d, 32)
    program.shared += [".shared .align 256 .b8 tile[16384];", ".shared .align 256 .b8 result[8192];"]
    base, target = program.register(32), program.register(32)
    program.lines(f"mov.u32 {base}, tile;", f"mov.u32 {target}, result;")

    def words(of: str) -> np.ndarray:
        if d == "s32":
            return rng.integers(0, 2**64, program.total, dtype=np.uint64)
        low, high = (draw_exact(rng, of, program.total, few_bits=d == "f16") for _ in range(2))
        return low if of == "f64" else low | high << np.uint64(32)

    fill(program, base, 8192, lambda: words(t))
    sums = program.register(32)
    program.lines(f"add.u32 {sums}, {base}, 8192;")
    fill(program, sums, 4096, lambda: words(d))
    fill(program, target, 8192, lambda: np.zeros(program.total, np.uint64))

    def registers(size: int, element: int, is_factor: bool) -> list[str]:
        wide = 64 if element == 64 else 32
        return [
            program.register(wide)
            for _ in range(8 if t == "f16" and is_factor else max(1, size * element // (32 * wide)))
        ]

    a, b = registers(m * k, bits, True), registers(k * n, bits, True)
    c, product = registers(m * n, d_bits, False), registers(m * n, d_bits, False)
    order = ("row", "col") if t in _PER_WORD else (program.pick("row", "col"), program.pick("row", "col"))
    c_order, d_order = program.pick("row", "col"), program.pick("row", "col")
    step = {16: 8, 8: 16, 32: 4, 64: 2, 4: 32, 1: 128}

    def stride(shorter: int, longer: int, layout: str, element: int) -> int:
        return (shorter if layout == "row" else longer) + program.below(2) * step[element]

    strides = (stride(k, m, order[0], bits), stride(n, k, order[1], bits))
    types = f"{d}.{d}" if t == "f16" else f"{d}.{t}.{t}.{d}"
    clamp = ".satfinite" if d == "s32" and t != "b1" and program.chance(0.4) else ""
    name = f"wmma.mma.{program.pick('xor', 'and')}.popc" if t == "b1" else "wmma.mma"
    rounding = program.pick("", ".rn", ".rz", ".rp") if t == "f64" else ""
    opcode = f"{name}.sync.aligned.{order[0]}.{order[1]}.{shape}{rounding}.{types}{clamp}"
    c_stride, d_stride = stride(n, m, c_order, d_bits), stride(n, m, d_order, d_bits)
    second = f"{base}+{1024 * program.below(4)}"
    lines = [
        "bar.sync 0;",
        f"wmma.load.a.sync.aligned.{order[0]}.{shape}.shared.{t} {braces(a)}, [{base}], {strides[0]};",
        f"wmma.load.b.sync.aligned.{order[1]}.{shape}.shared.{t} {braces(b)}, [{second}], {strides[1]};",
        f"wmma.load.c.sync.aligned.{c_order}.{shape}.shared.{d} {braces(c)}, [{sums}], {c_stride};",
        f"{opcode} {braces(product)}, {braces(a)}, {braces(b)}, {braces(c)};",
        f"wmma.store.d.sync.aligned.{d_order}.{shape}.shared.{d} [{target}], {braces(product)}, {d_stride};",
        "bar.sync 0;",
        f"mad.lo.u32 {target}, %t, 8, {target};",
    ]
    stored_registers = []
    for offset in range(0, 8192, 256):
        if d == "f64":
            stored_registers.append((program.register(64), "f64"))
            lines.append(f"ld.shared.b64 {stored_registers[-1][0]}, [{target}+{offset}];")
        else:
            pair = [program.register(32), program.register(32)]
            stored_registers += [(r, SLOT[d]) for r in pair]
            lines.append(f"ld.shared.v2.b32 {braces(pair)}, [{target}+{offset}];")
    program.sequence(lines, opcode, stored_registers, how=CROSSES)
    return program
