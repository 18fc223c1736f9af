"""Integer arithmetic, extended precision, dot products."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.domains import DOMAINS
from tests.fuzz.forms import parse
from tests.fuzz.program import PLAIN, How, Program, Source

ANY = "u16/s16/u32/s32/u64/s64"
ARITHMETIC = parse(f"""
(add/sub/mul.lo/mul.hi).(t={ANY}) d:$t, a:$t, b:$t;
(min/max).(t={ANY}) d:$t, a:$t, b:$t;
mul.wide.(t=u16/s16/u32/s32) d:$2t, a:$t, b:$t;
mad.wide.(t=u16/s16/u32/s32) d:$2t, a:$t, b:$t, c:$2t;
mad.(lo/hi).(t={ANY}) d:$t, a:$t, b:$t, c:$t;
mad.(lo/hi).s32 d:s32, a:s32, (3/-5/65537/-2147483648), c:s32;
mad.hi.sat.s32 d:s32, a:s32, b:s32, c:s32;
mul24.(lo/hi).(t=u32/s32) d:$t, a:$t, b:$t;
mad24.(lo/hi).(t=u32/s32) d:$t, a:$t, b:$t, c:$t;
mad24.hi.sat.s32 d:s32, a:s32, b:s32, c:s32;
sad.(t={ANY}) d:$t, a:$t, b:$t, c:$t;
(div/rem).(t={ANY}) d:$t, a:$t, (1/3/7/10/16/641/255);
not.(t=b16/b32/b64) d:$t, a:$t;
""")
NOT_BY_ZERO = parse("""
(div/rem).(t=u/s)16 d:$t16, a:$t16, b:nonzero16;
(div/rem).(t=u/s)32 d:$t32, a:$t32, b:nonzero32;
(div/rem).(t=u/s)64 d:$t64, a:$t64, b:nonzero64;
""")
OF_WORDS = parse("""
(min/max).(relu.s32/u16x2/s16x2/relu.s16x2) d:u32, a:b32, b:b32;
add.(u16x2/s16x2) d:u32, a:b32, b:b32;
dp4a.(u32/s32).(u32/s32) d:u32, a:b32, b:b32, c:b32;
dp2a.(lo/hi).(u32/s32).(u32/s32) d:u32, a:b32, b:b32, c:b32;
""")
SATURATING = parse("(add/sub).sat.s32 d:s32, a:s32, b:s32;")
SIGNS = parse("(abs/neg).(t=s16/s32/s64) d:$t, a:$t;")
TABLES = [
    (ARITHMETIC, PLAIN), (NOT_BY_ZERO, How(constants=False)), (OF_WORDS, How(constants=False)),
    (SATURATING, How(fresh="operands of saturating sums")), (SIGNS, How(last="results of abs and neg")),
]  # fmt: skip


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    program = generate_straight(rng, category, TABLES, (15, 45))
    for _ in range(int(rng.integers(1, 6))):
        _long_sums(program)
    return program


def _long_sums(program: Program) -> None:
    """Add a sum, difference or product of several words, whose carry goes from word to word."""
    operation, t = program.pick("add", "sub", "mad"), program.pick("u32", "s32", "u64", "s64")
    words, bits = 1 + program.below(4), DOMAINS[t].bits
    sources: list[Source] = []
    lines, sums = [], []

    def operand() -> str:
        sources.append(program.source(t))
        return sources[-1].text

    for i in range(words + 1):
        carries = ".cc" if i < words or program.chance(0.3) else ""
        target, with_carry = program.register(bits), "c" if i else ""
        if operation == "mad" and (not i or program.chance(0.7)):
            half = program.pick("lo", "hi")
            line = f"mad{with_carry}.{half}{carries}.{t} {target}, {operand()}, {operand()}, {operand()};"
            lines.append(line if program.note_factors(line) else line.replace(".hi", ".lo"))
        else:
            name = "add" if operation == "mad" else operation
            lines.append(f"{name}{with_carry}{carries}.{t} {target}, {operand()}, {operand()};")
        sums.append((target, t))
    if ".cc." in lines[-1]:
        sums.append((program.register(bits), t))
        lines.append(f"{'sub' if operation == 'sub' else 'add'}c.{t} {sums[-1][0]}, 0, 0;")
    program.sequence(lines, f"{operation} of words", sums, tuple(sources), is_pure=True)
