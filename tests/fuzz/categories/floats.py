"""Floating-point arithmetic that is rounded as IEEE 754 has it."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.forms import parse
from tests.fuzz.program import PLAIN, How, Program

MODES = "rn/rz/rm/rp"
ARITHMETIC = parse(f"""
(add/sub/mul).({MODES})(/.ftz)(/.sat).f32 d:f32, a:f32, b:f32;
(add/sub/mul).({MODES})(/.ftz)(/.sat).f32 d:f32, a:f32, b:f32;
(add/sub/mul).({MODES}).f64 d:f64, a:f64, b:f64;
(add/sub/mul).rn(/.ftz)(/.sat).(t=f16/f16x2) d:$t, a:$t, b:$t;
(add/sub/mul).rn.(t=bf16/bf16x2) d:$t, a:$t, b:$t;
fma.({MODES})(/.ftz)(/.sat).f32 d:f32, a:f32, b:f32, c:f32;
mad.({MODES})(/.ftz)(/.sat).f32 d:f32, a:f32, b:f32, c:f32;
fma.({MODES}).f64 d:f64, a:f64, b:f64, c:f64;
fma.rn(/.ftz)(/.sat/.relu).(t=f16/f16x2) d:$t, a:$t, b:$t, c:$t;
fma.rn(/.relu).(t=bf16/bf16x2) d:$t, a:$t, b:$t, c:$t;
fma.rn.oob(/.relu).(t=f16/f16x2/bf16/bf16x2) d:$t, a:$t, b:$t, c:$t;
div.({MODES})(/.ftz).f32 d:f32, a:f32, b:f32;
div.({MODES}).f64 d:f64, a:f64, b:f64;
(rcp/sqrt).({MODES})(/.ftz).f32 d:f32, a:f32;
(rcp/sqrt).({MODES}).f64 d:f64, a:f64;
testp.(finite/infinite/number/notanumber/normal/subnormal).(t=f32/f64) p:pred, a:$t;
""")
OF_REGISTERS = parse("""
(abs/neg)(/.ftz).(t=f32/f16/f16x2) d:$t, a:$t;
(abs/neg).(t=f64/bf16/bf16x2) d:$t, a:$t;
(min/max)(/.ftz)(/.NaN).(t=f32/f16/f16x2) d:$t, a:$t, b:$t;
(min/max)(/.NaN).(t=bf16/bf16x2) d:$t, a:$t, b:$t;
(min/max).f64 d:f64, a:f64, b:f64;
copysign.(t=f32/f64) d:$t, a:$t, b:$t;
""")
SIGNED_EXTREMES = parse("""
(min/max)(/.ftz)(/.NaN).xorsign.abs.(t=f32/f16/f16x2) d:$t, a:$t, b:$t;
(min/max)(/.NaN).xorsign.abs.(t=bf16/bf16x2) d:$t, a:$t, b:$t;
""")
TABLES = [
    (ARITHMETIC, PLAIN), (OF_REGISTERS, How(constants=False)),
    (SIGNED_EXTREMES, How(constants=False, fresh="operands of min and max")),
]  # fmt: skip


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    return generate_straight(rng, category, TABLES, (20, 55))
