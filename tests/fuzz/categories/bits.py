"""Logic, shifts, bit fields, permutations, packing."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.forms import parse
from tests.fuzz.program import PLAIN, How, Program

TABLE = parse("""
(and/or/xor).(t=b32/b64) d:$t, a:$t, b:$t;
shl.(t=b16/b32/b64) d:$t, a:$t, b:count;
shr.(t=b16/b32/b64/u16/u32/u64/s16/s32/s64) d:$t, a:$t, b:count;
shf.(l/r).(wrap/clamp).b32 d:b32, a:b32, b:b32, c:count;
(popc/clz).(t=b32/b64) d:u32, a:$t;
brev.(t=b32/b64) d:$t, a:$t;
bfind(/.shiftamt).(t=u32/s32/u64/s64) d:u32, a:$t;
bmsk.(clamp/wrap).b32 d:b32, a:count, b:count;
szext.(clamp/wrap).(t=u32/s32) d:$t, a:$t, b:count;
prmt.b32(/.f4e/.b4e/.rc8/.ecl/.ecr/.rc16) d:b32, a:b32, b:b32, c:b32;
""")
OF_REGISTERS = parse("""
(and/or/xor).b16 d:b16, a:b16, b:b16;
not.(t=b16/b32/b64) d:$t, a:$t;
lop3.b32 d:b32, a:b32, b:b32, c:b32, #0-255;
lop3.b32 d:b32, a:b32, b:b32, c:b32, #0-255;
bfe.(t=u32/s32/u64/s64) d:$t, a:$t, b:count, c:count;
bfe.(t=u32/s32/u64/s64) d:$t, a:$t, #0-255, (0/1/8/31/32/64/255);
bfi.b32 d:b32, a:b32, b:b32, c:count, g:count;
fns.b32 d:b32, a:b32, b:lane, c:step;
mov.b32 d:b32, {a:b16, b:b16};
mov.b64 d:b64, {a:b32, b:b32};
mov.b64 d:b64, {a:b16, b:b16, c:b16, g:b16};
mov.b32 {d:b16, e:b16}, a:b32;
mov.b64 {d:b32, e:b32}, a:b64;
mov.b64 {d:b16, e:b16, u:b16, v:b16}, a:b64;
""")
CNOT = parse("cnot.(t=b16/b32/b64) d:$t, a:$t;")
WITH_PREDICATE = parse("lop3.(or/and).b32 d:b32|p:pred, a:b32, b:b32, c:b32, (0/128/234/150), (/!)g:pred;")
LONG_FIELDS = parse("bfi.b64 d:b64, a:b64, b:b64, c:byte, g:byte;")
TABLES = [
    (TABLE, PLAIN), (OF_REGISTERS, How(constants=False)), (CNOT, How(last="results of cnot")),
    (WITH_PREDICATE, How(constants=False, last="results of lop3 with a predicate")),
    (LONG_FIELDS, How(constants=False, rule="counts of bfi.b64")),
]  # fmt: skip


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    return generate_straight(rng, category, TABLES, (20, 60))
