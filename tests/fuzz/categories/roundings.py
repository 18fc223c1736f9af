"""Products whose sums have to be rounded: of f16 as Hopper's tensor cores do it, of other types within a tolerance."""

import numpy as np

from ptxlab.hardware.fragments import mma_a, mma_b, mma_c
from ptxlab.lowbit.reference.tensor_cores import hopper_mma
from tests.fuzz.categories.matrices import FORMS, SLOT, Mma, braces
from tests.fuzz.categories.numbers import pack
from tests.fuzz.categories.straight import program_threads
from tests.fuzz.domains import Values
from tests.fuzz.program import How, Program, Tolerance

CROSSES = How(crosses=True)
LARGEST = 2.0  # of operands that are summed up within a tolerance
UNITS = {"f16": 2.0**-10, "f32": 2.0**-20, "f64": 2.0**-50}  # tolerated, in parts of the largest sum that could be
FLOATS = [form for form in FORMS if not form.is_integer and form.a != "e4m3"]


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program of some of both kinds."""
    program = Program(rng, category, program_threads(rng, (32, 64, 128)))
    for _ in range(4 + program.below(4)):
        multiply_halves(program) if program.chance(0.5) else multiply_full_significands(program, program.pick(*FLOATS))
    return program


def add_mma(program: Program, form: Mma, registers: dict[str, list[Values]], how: How, d: list[Values]) -> None:
    """Add an mma; `d` are the registers of its result where they are known."""
    bits = 64 if form.a == "f64" else 32
    sources = {x: [program.input(f"b{bits}", values) for values in registers[x]] for x in "abc"}
    result_registers = [(program.register(bits), SLOT[form.d]) for _ in range(form.d_registers)]
    opcode = f"mma.sync.aligned.{form.shape}.row.col.{form.d}.{form.a}.{form.b}.{form.d}"
    operands = ", ".join(braces([source.text for source in sources[x]]) for x in "abc")
    every = tuple(source for values in sources.values() for source in values)
    text = f"{opcode} {braces([register for register, _ in result_registers])}, {operands};"
    program.sequence([text], opcode, result_registers, every, how, expected=d)


def multiply_halves(program: Program) -> None:
    """Multiply f16 of any size."""
    warps = program.total // 32
    a, b = (draw_halves(program.rng, (warps, *shape)) for shape in ((16, 16), (16, 8)))
    exponents = program.rng.integers(-40, 20, (warps, 16, 8))
    c = np.ldexp(program.rng.uniform(-2, 2, exponents.shape), exponents).astype(np.float32)
    c = np.where(program.rng.random(c.shape) < 0.1, np.float32(0), c)
    maps = {
        "a": (mma_a(16, 16), a),
        "b": (mma_b(16, 16), b),
        "c": (mma_c(32), c),
        "d": (mma_c(32), hopper_mma(a, b, c)),
    }
    registers = {
        x: [*fragment.scatter(matrix).reshape(program.total, -1).T.astype(np.uint64)]
        for x, (fragment, matrix) in maps.items()
    }
    add_mma(program, Mma("m16n8k16", "f32", "f16", "f16", 4, 2), registers, CROSSES, registers["d"])


def draw_halves(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw finite f16 of a narrow range of exponents, or of a wide one; a tenth are zeros."""
    low = int(rng.integers(0, 20))
    exponents = rng.integers(low, int(rng.integers(low, 30)) + 1, shape)
    bits = exponents << 10 | rng.integers(0, 1024, shape) | rng.integers(0, 2, shape) << 15
    return np.where(rng.random(shape) < 0.1, bits & 0x8000, bits).astype(np.uint16).view(np.float16)


def multiply_full_significands(program: Program, form: Mma) -> None:
    """Multiply numbers all of whose bits are in use."""
    k = int(form.shape.split("k")[1])
    tolerance = Tolerance(0.0, UNITS[form.d] * (k * LARGEST**2 + LARGEST))

    def draw(t: str) -> Values:
        size = program.total * (2 if t in ("f16", "bf16") else 1)
        return pack(program.rng.uniform(-LARGEST, LARGEST, size), t)

    counts = {"a": (form.a, form.a_registers), "b": (form.b, form.b_registers), "c": (form.d, form.d_registers)}
    registers = {x: [draw(t) for _ in range(count)] for x, (t, count) in counts.items()}
    add_mma(program, form, registers, How(crosses=True, tolerance=tolerance), [])
