"""Video instructions, of whole registers and of parts."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.forms import parse
from tests.fuzz.program import How, Program

T, PART = "(u32/s32)", "(//.b0/.b1/.b2/.b3/.h0/.h1)"
TO, ORDER = "(.b0/.b1/.b2/.b3/.h0/.h1)", "(eq/ne/lt/le/gt/ge)"
HALVES, BYTES = "(//.h01/.h10/.h23/.h32/.h13/.h00)", "(//.b0123/.b3210/.b7654/.b1357/.b0000/.b7531/.b2637)"
MANY = "(vadd/vsub/vavrg/vabsdiff/vmin/vmax)"
TABLE = parse(f"""
(vadd/vsub/vabsdiff/vmin/vmax).{T}.{T}.{T}(/.sat) d:u32, a:b32{PART}, b:b32{PART};
(vadd/vsub/vabsdiff/vmin/vmax).{T}.{T}.{T}(/.sat).(add/add/min/max) d:u32, a:b32{PART}, b:b32{PART}, c:b32;
(vadd/vsub/vabsdiff/vmin/vmax).{T}.{T}.{T}(/.sat) d:u32{TO}, a:b32{PART}, b:b32{PART}, c:b32;
(vshl/vshr).{T}.{T}.u32(/.sat).(clamp/wrap) d:u32, a:b32{PART}, b:count{PART};
(vshl/vshr).{T}.{T}.u32.(clamp/wrap).add d:u32, a:b32{PART}, b:count{PART}, c:b32;
(vshl/vshr).{T}.{T}.u32.(clamp/wrap) d:u32{TO}, a:b32{PART}, b:count{PART}, c:b32;
vset.{T}.{T}.{ORDER} d:u32, a:b32{PART}, b:b32{PART};
vset.{T}.{T}.{ORDER}.(add/add/min/max) d:u32, a:b32{PART}, b:b32{PART}, c:b32;
vset.{T}.{T}.{ORDER} d:u32{TO}, a:b32{PART}, b:b32{PART}, c:b32;
vmad.{T}.{T}.{T}(/.sat)(/.shr7/.shr15) d:u32, (/-)a:b32{PART}, b:b32{PART}, c:b32;
vmad.{T}.{T}.{T}(/.sat)(/.shr7/.shr15) d:u32, a:b32{PART}, b:b32{PART}, (/-)c:b32;
vmad.{T}.{T}.{T}.po(/.sat)(/.shr7/.shr15) d:u32, a:b32{PART}, b:b32{PART}, c:b32;
{MANY}2.{T}.{T}.{T}(/.sat/.add) d:u32(///.h10), a:b32{HALVES}, b:b32{HALVES}, c:b32;
{MANY}4.{T}.{T}.{T}(/.sat/.add) d:u32(//.b0/.b20/.b321/.b3), a:b32{BYTES}, b:b32{BYTES}, c:b32;
vset2.{T}.{T}.{ORDER}(/.add) d:u32(///.h10), a:b32{HALVES}, b:b32{HALVES}, c:b32;
vset4.{T}.{T}.{ORDER}(/.add) d:u32(//.b0/.b20/.b321/.b3), a:b32{BYTES}, b:b32{BYTES}, c:b32;
""")
HALF_WRITTEN = parse(f"""
{MANY}2.{T}.{T}.{T}(/.sat) d:u32(.h0/.h1), a:b32{HALVES}, b:b32{HALVES}, c:b32;
vset2.{T}.{T}.{ORDER} d:u32(.h0/.h1), a:b32{HALVES}, b:b32{HALVES}, c:b32;
""")
TABLES = [
    (TABLE, How(constants=False)),
    (HALF_WRITTEN, How(constants=False, last="operands of mad.hi")),
]


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    return generate_straight(rng, category, TABLES, (20, 55))
