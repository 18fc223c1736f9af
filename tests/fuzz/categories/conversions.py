"""cvt between all types, also to and from fp8 and tf32, and cvt.pack."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.forms import parse
from tests.fuzz.program import How, Program

INTEGERS = "u16/s16/u32/s32/u64/s64"
NEAREST, WHOLE = "rn/rz/rm/rp", "rni/rzi/rmi/rpi"
BETWEEN_INTEGERS = parse(f"""
cvt.(t=u32/s32/u64/s64).(s={INTEGERS}) d:$t, a:$s;
cvt.(t=u16/s16).(s={INTEGERS}) d:$t, a:$s;
cvt.(u8/s8).(s={INTEGERS}) d:(b16/b32/b64), a:$s;
cvt.(t={INTEGERS}).(u8/s8) d:$t, a:(b16/b32/b64);
""")
TO_FLOATS = parse(f"""
cvt.({NEAREST})(//.sat).(t=f16/f32/f64).(s={INTEGERS}) d:$t, a:$s;
cvt.({NEAREST}).bf16.(s={INTEGERS}) d:bf16, a:$s;
""")
SATURATING_INTEGERS = parse("""
cvt.sat.(u8/s8).(s=s16/u16/s32/u32/s64/u64) d:b32, a:$s;
cvt.sat.(t=u16/s16).(s=s32/u32/s64/u64) d:$t, a:$s;
cvt.sat.(t=u32/s32).(s=s64/u64) d:$t, a:$s;
cvt.sat.u32.s32 d:u32, a:s32;
cvt.sat.u64.s64 d:u64, a:s64;
cvt.pack.sat.(u16/s16).s32 d:u32, a:s32, b:s32;
cvt.pack.sat.(u8/s8/u4/s4/u2/s2).s32.b32 d:u32, a:s32, b:s32, c:b32;
""")
OF_FLOATS = parse(f"""
cvt.({WHOLE})(/.ftz)(//.sat).(t={INTEGERS}).f32 d:$t, a:f32;
cvt.({WHOLE})(/.ftz)(//.sat).(u8/s8).f32 d:b32, a:f32;
cvt.({WHOLE})(//.sat).(t={INTEGERS}).(s=f16/f64) d:$t, a:$s;
cvt.({WHOLE}).(t={INTEGERS}).bf16 d:$t, a:bf16;
cvt.({NEAREST})(//.sat).f16.(s=f32/f64) d:f16, a:$s;
cvt.({NEAREST}).ftz.f16.f32 d:f16, a:f32;
cvt.(rn/rz)(.relu/.satfinite/.relu.satfinite).(t=f16/bf16).f32 d:$t, a:f32;
cvt.({NEAREST})(//.sat/.ftz).f32.f64 d:f32, a:f64;
cvt.({NEAREST}).bf16.(s=f16/f32/f64) d:bf16, a:$s;
cvt.({NEAREST}).f16.bf16 d:f16, a:bf16;
cvt(//.sat).(t=f32/f64).f16 d:$t, a:f16;
cvt(/.ftz).f32.f16 d:f32, a:f16;
cvt(//.sat/.ftz).f64.f32 d:f64, a:f32;
cvt.(t=f32/f64).bf16 d:$t, a:bf16;
cvt.({WHOLE})(//.sat).(t=f16/f32/f64).$t d:$t, a:$t;
cvt.({WHOLE}).ftz.f32.f32 d:f32, a:f32;
cvt.({WHOLE}).bf16.bf16 d:bf16, a:bf16;
cvt.(rn/rz)(/.relu)(//.satfinite).(t=f16x2/bf16x2).f32 d:$t, a:f32, b:f32;
cvt.rn.satfinite(/.relu).(e4m3x2/e5m2x2).f32 d:b16, a:f32, b:f32;
cvt.rn.satfinite(/.relu).(e4m3x2/e5m2x2).f16x2 d:b16, a:f16x2;
cvt.rn(/.relu).f16x2.(e4m3x2/e5m2x2) d:f16x2, a:b16;
""")
TF32 = parse("cvt.(rna/rna.satfinite/rn/rz/rn.relu/rz.relu).tf32.f32 d:f32, a:number;")
OWN = How(constants=False, fresh="operands of conversions")
TABLES = [
    (BETWEEN_INTEGERS, How(constants=False)), (TO_FLOATS, How(constants=False)), (SATURATING_INTEGERS, OWN),
    (OF_FLOATS, OWN), (TF32, How(constants=False, rule="NaNs to tf32")),
]  # fmt: skip


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    return generate_straight(rng, category, TABLES, (25, 65))
