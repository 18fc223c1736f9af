"""Comparison, selection, predicates."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.forms import parse
from tests.fuzz.program import PLAIN, How, Program

ORDER, UNSIGNED = "eq/ne/lt/le/gt/ge", "lo/ls/hi/hs"
FLOATS = f"{ORDER}/equ/neu/ltu/leu/gtu/geu/num/nan"
TO = "(p:pred/p:pred|q:pred)"
WITH = "(and/or/xor)"
TABLE = parse(f"""
setp.({ORDER}).(t=u16/s16/u32/s32/u64/s64) {TO}, a:$t, b:$t;
setp.({UNSIGNED}).(t=u16/u32/u64) {TO}, a:$t, b:$t;
setp.(eq/ne).(t=b32/b64) {TO}, a:$t, b:$t;
setp.({ORDER}).{WITH}.(t=u16/s16/u32/s32/u64/s64) {TO}, a:$t, b:$t, (/!)c:pred;
setp.({FLOATS})(/.ftz).f32 {TO}, a:f32, b:f32;
setp.({FLOATS}).{WITH}(/.ftz).f32 {TO}, a:f32, b:f32, (/!)c:pred;
setp.({FLOATS}).f64 {TO}, a:f64, b:f64;
setp.({FLOATS}).{WITH}.f64 {TO}, a:f64, b:f64, (/!)c:pred;
setp.({FLOATS})(/.ftz).f16 p:pred, a:f16, b:f16;
setp.({FLOATS}).{WITH}.(t=f16/bf16) p:pred, a:$t, b:$t, (/!)c:pred;
setp.({FLOATS}).bf16 p:pred, a:bf16, b:bf16;
""")
OF_REGISTERS = parse(f"""
setp.(eq/ne).b16 {TO}, a:b16, b:b16;
setp.({FLOATS})(/.ftz).f16x2 p:pred|q:pred, a:f16x2, b:f16x2;
setp.({FLOATS}).bf16x2 p:pred|q:pred, a:bf16x2, b:bf16x2;
setp.({FLOATS}).{WITH}.(t=f16x2/bf16x2) p:pred|q:pred, a:$t, b:$t, (/!)c:pred;
set.({ORDER}).(r=u32/s32/f32).(t=u16/s16/u32/s32/u64/s64) d:$r, a:$t, b:$t;
set.({ORDER}).{WITH}.(r=u32/s32/f32).(t=u16/s16/u32/s32/u64/s64) d:$r, a:$t, b:$t, (/!)c:pred;
set.({FLOATS})(/.ftz).(r=u32/s32/f32/f16).f32 d:$r, a:f32, b:f32;
set.({FLOATS}).bf16.f32 d:bf16, a:f32, b:f32;
set.({FLOATS}).{WITH}.(r=u32/s32/f32/f16/bf16).f64 d:$r, a:f64, b:f64, (/!)c:pred;
set.({FLOATS})(/.ftz).(r=u16/s16/u32/s32/f16).f16 d:$r, a:f16, b:f16;
set.({FLOATS}).(r=u16/s16/u32/s32/bf16).bf16 d:$r, a:bf16, b:bf16;
set.({FLOATS}).{WITH}.(r=u16/s16/u32/s32/f16).f16 d:$r, a:f16, b:f16, (/!)c:pred;
set.({FLOATS}).{WITH}.(r=u16/s16/u32/s32/bf16).bf16 d:$r, a:bf16, b:bf16, (/!)c:pred;
set.({FLOATS})(/.ftz).(r=u32/s32/f16x2).f16x2 d:$r, a:f16x2, b:f16x2;
set.({FLOATS}).{WITH}.(r=u32/s32/bf16x2).bf16x2 d:$r, a:bf16x2, b:bf16x2, (/!)c:pred;
selp.(t=b16/b32/b64/u16/s32/u64/f32/f64) d:$t, a:$t, b:$t, c:pred;
slct.(t=b16/b32/b64/u16/s32/u64/f32/f64).s32 d:$t, a:$t, b:$t, c:s32;
slct(/.ftz).(t=b16/b32/b64/u16/s32/u64/f32/f64).f32 d:$t, a:$t, b:$t, c:f32;
(and/or/xor).pred p:pred, a:pred, b:pred;
not.pred p:pred, a:pred;
""")
TABLES = [(TABLE, PLAIN), (OF_REGISTERS, How(constants=False))]


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    return generate_straight(rng, category, TABLES, (20, 60))
