"""mma.sync of every shape and type, alone and in lines that share operands."""

from dataclasses import dataclass, replace

import numpy as np

from tests.fuzz.categories.numbers import draw_exact, draw_integers
from tests.fuzz.categories.straight import program_threads
from tests.fuzz.domains import Values
from tests.fuzz.program import How, Program, Source

CROSSES = How(crosses=True)
SLOT = {"s32": "s32", "f32": "f32", "f16": "f16x2", "f64": "f64"}  # domain of a register of D
FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Mma:
    """A form: its shape, types, and how many registers A, B and D have."""

    shape: str
    d: str
    a: str
    b: str
    a_registers: int
    b_registers: int

    @property
    def d_registers(self) -> int:
        """Count the registers of C and D."""
        return int(self.shape[1:].split("n")[0]) // (8 if self.d == "f16" else 4)

    @property
    def is_integer(self) -> bool:
        """Tell whether its operands are integers or bits."""
        return self.d == "s32"

    def opcode(self, program: Program) -> str:
        """Draw modifiers."""
        if self.a == "b1":
            return f"mma.sync.aligned.{self.shape}.row.col.s32.b1.b1.s32.{program.pick('xor', 'and')}.popc"
        clamp = ".satfinite" if self.is_integer and program.chance(0.4) else ""
        rounding = program.pick("", ".rn", ".rz", ".rm", ".rp") if self.a == "f64" else ""
        return f"mma.sync.aligned.{self.shape}.row.col{clamp}{rounding}.{self.d}.{self.a}.{self.b}.{self.d}"

    def draw(self, rng: np.random.Generator, operand: str, count: int, special: float = 0.0) -> Values:
        """Draw a register of an operand, for so many threads."""
        t = {"a": self.a, "b": self.b}.get(operand, self.d)
        if t == "s32":
            return rng.integers(0, 2**32 if rng.random() < 0.5 else 999, count, dtype=np.uint64)
        return draw_integers(rng, t, count) if self.is_integer else draw_exact(rng, t, count, self.d == "f16", special)


def _forms() -> list[Mma]:
    forms = []
    for bits in (8, 4):
        k = 128 // bits
        for shape, a, b in ((f"m16n8k{k}", 2, 1), (f"m16n8k{2 * k}", 4, 2), (f"m8n8k{k}", 1, 1)):
            forms.append(Mma(shape, "s32", f"s{bits}", f"s{bits}", a, b))
    forms += [
        Mma(shape, "s32", "b1", "b1", a, b)
        for shape, a, b in (("m8n8k128", 1, 1), ("m16n8k128", 2, 1), ("m16n8k256", 4, 2))
    ]
    for t, d, k in (("f16", "f32", 8), ("f16", "f16", 8), ("bf16", "f32", 8), ("tf32", "f32", 4)):
        forms += [Mma(f"m16n8k{k}", d, t, t, 2, 1), Mma(f"m16n8k{2 * k}", d, t, t, 4, 2)]
    for d in ("f32", "f16"):
        forms += [Mma("m16n8k16", d, "e4m3", "e4m3", 2, 1), Mma("m16n8k32", d, "e4m3", "e4m3", 4, 2)]
    for shape, a, b in (("m8n8k4", 1, 1), ("m16n8k4", 2, 1), ("m16n8k8", 4, 2), ("m16n8k16", 8, 4)):
        forms.append(Mma(shape, "f64", "f64", "f64", a, b))
    return forms


FORMS = _forms()


def draw_form(program: Program, *, lines: bool = False) -> Mma:
    """Draw a form; `lines`: one whose lines the emulator makes one product of."""
    forms = (
        [f for f in FORMS if f.d in ("s32", "f32") and f.shape.startswith("m16") and f.a != "b1"] if lines else FORMS
    )
    form = program.pick(*forms)
    if form.a in ("s8", "s4"):
        return replace(form, a=program.pick("s", "u") + form.a[1], b=program.pick("s", "u") + form.a[1])
    return replace(form, a=program.pick(*FP8), b=program.pick(*FP8)) if form.a == "e4m3" else form


def braces(registers: list[str]) -> str:
    """Write registers as a vector."""
    return "{" + ", ".join(registers) + "}"


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program of single ones, some of which go on with their own result."""
    program = Program(rng, category, program_threads(rng, (32, 64)))
    for _ in range(6 + program.below(8)):
        add_mma(program, draw_form(program))
    return program


def add_mma(program: Program, form: Mma) -> None:
    """Add one mma, or two of which the second adds to the first."""
    special = 0.02 if not form.is_integer and program.chance(0.15) else 0.0
    wide = form.a == "f64"
    sources: list[Source] = []

    def load(operand: str, count: int) -> str:
        domain = "b64" if wide else "b32"
        drawn = [program.input(domain, form.draw(program.rng, operand, program.total, special)) for _ in range(count)]
        sources.extend(drawn)
        return braces([source.text for source in drawn])

    a, b, c = load("a", form.a_registers), load("b", form.b_registers), load("c", form.d_registers)
    d = [program.register(64 if wide else 32) for _ in range(form.d_registers)]
    opcode = form.opcode(program)
    lines = [f"{opcode} {braces(d)}, {a}, {b}, {c};"]
    if program.chance(0.3):
        lines.append(f"{opcode} {braces(d)}, {a}, {b}, {braces(d)};")
    program.sequence(
        lines, opcode + " special" * bool(special), [(r, SLOT[form.d]) for r in d], tuple(sources), CROSSES
    )


def generate_lines(rng: np.random.Generator, category: str) -> Program:
    """Make a program of lines of one form: each of some A times each of some B, or any, writing what others read."""
    program = Program(rng, category, program_threads(rng, (32, 64)))
    form = draw_form(program, lines=True)
    opcode = form.opcode(program)

    def load(operand: str, count: int) -> list[str]:
        registers = [program.register(32) for _ in range(count)]
        for register in registers:
            if form.is_integer:
                drawn = rng.integers(0, 2**32, program.total, dtype=np.uint64)
            else:
                drawn = draw_exact(rng, {"a": form.a, "b": form.b}.get(operand, form.d), program.total, few_bits=True)
            program.lines(f"mov.b32 {register}, {program.input('b32', drawn).text};")
        return registers

    all_a = [load("a", form.a_registers) for _ in range(1 + program.below(3))]
    all_b = [load("b", form.b_registers) for _ in range(1 + program.below(4))]
    sums = [load("c", 4) for _ in range(2 + program.below(8))]
    lines = []
    if program.chance(0.5):
        grid = [(a, b) for a in all_a for b in all_b] * program.pick(1, 2)
        lines = [f"{opcode} {braces(c)}, {braces(a)}, {braces(b)}, {braces(c)};"
                 for (a, b), c in zip(grid, sums * len(grid), strict=False)]  # fmt: skip
    else:
        for _ in range(3 + program.below(11)):
            c, d = program.pick(*sums), program.pick(*sums)
            if form.is_integer and form.a_registers == 4 and program.chance(0.15):
                d = program.pick(*all_a)
            elif program.chance(0.6):
                d = c
            lines.append(
                f"{opcode} {braces(d)}, {braces(program.pick(*all_a))}, {braces(program.pick(*all_b))}, {braces(c)};"
            )
    stored = [(r, SLOT[form.d]) for c in sums for r in c] + [(r, "b32") for a in all_a for r in a]
    program.sequence(lines, f"lines of {opcode}", stored, how=CROSSES)
    return program


def generate_quarters(rng: np.random.Generator, category: str) -> Program:
    """Make a program of Volta's m8n8k4, in all layouts."""
    program = Program(rng, category, 32)
    for _ in range(4 + program.below(4)):
        d_type, c_type = program.pick(("f16", "f16"), ("f32", "f16"), ("f32", "f32"))
        counts = {"a": 2, "b": 2, "c": 8 if c_type == "f32" else 4}
        sources = {
            x: [
                program.input("b32", draw_exact(rng, c_type if x == "c" else "f16", 32, few_bits=True))
                for _ in range(count)
            ]
            for x, count in counts.items()
        }
        d = [program.register(32) for _ in range(8 if d_type == "f32" else 4)]
        orders = [program.pick("row", "col") for _ in range(2)]
        opcode = f"mma.sync.aligned.m8n8k4.{'.'.join(orders)}.{d_type}.f16.f16.{c_type}"
        operands = ", ".join(braces([s.text for s in sources[x]]) for x in "abc")
        every = tuple(source for registers in sources.values() for source in registers)
        program.sequence([f"{opcode} {braces(d)}, {operands};"], opcode, [(r, SLOT[d_type]) for r in d], every, CROSSES)
    return program
