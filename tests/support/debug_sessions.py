"""Small kernels for the debugger's tests, and sessions on them."""

from typing import Any

import numpy as np

from ptxlab import runtime
from ptxlab.debugger import Session
from ptxlab.sources import Source
from tests.support.small_kernels import HEADER

# y = x / (x - 3) through shared memory, turned around in each warp; odd threads take a step more.
SCALE = f"""{HEADER}
.visible .entry scale(.param .u64 x, .param .u64 y, .param .f32 by)
{{
    .reg .pred %odd;
    .reg .b32 %t, %at, %bit, %turned;
    .reg .b64 %x, %y, %off;
    .reg .f32 %v, %w, %d, %by;
    .shared .align 4 .f32 row[128];
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.f32 %by, [by];
    mov.u32 %t, %tid.x;
    mul.wide.u32 %off, %t, 4;
    add.u64 %x, %x, %off;
    add.u64 %y, %y, %off;
    ld.global.f32 %v, [%x];
    mov.u32 %at, row;
    mad.lo.u32 %at, %t, 4, %at;
    st.shared.f32 [%at], %v;
    bar.sync 0;
    xor.b32 %turned, %at, 124;
    ld.shared.f32 %w, [%turned];
    and.b32 %bit, %t, 1;
    setp.eq.u32 %odd, %bit, 1;
    @!%odd bra EVEN;
    add.f32 %w, %w, %by;
EVEN:
    sub.f32 %d, %w, 0f40400000;
    div.rn.f32 %w, %w, %d;
    st.global.f32 [%y], %w;
    ret;
}}
"""

# Warp 0 counts to `n`, warp 1 does nothing: they come apart.
COUNT = f"""{HEADER}
.visible .entry count(.param .u64 out, .param .u32 n)
{{
    .reg .pred %more, %second;
    .reg .b32 %t, %i, %n;
    .reg .b64 %out;
    mov.u32 %t, %tid.x;
    mov.u32 %i, 0;
    ld.param.u32 %n, [n];
    setp.ge.u32 %second, %t, 32;
    @%second bra DONE;
AGAIN:
    add.u32 %i, %i, 1;
    setp.lt.u32 %more, %i, %n;
    @%more bra AGAIN;
DONE:
    ld.param.u64 %out, [out];
    st.global.u32 [%out], %i;
    ret;
}}
"""


def load_text(text: str, name: str = "k.ptx") -> runtime.Kernel:
    return runtime.load(Source.from_text(text, name))


def start_session(
    text: str, *args: Any, block: Any = 32, grid: Any = 1, checks: Any = "all", **options: Any
) -> Session:
    return Session.of(load_text(text), *args, block=block, grid=grid, checks=checks, **options)


def start_scale_session(**options: Any) -> Session:
    """Debug `scale` on 0 .. 127, with 3 / 0 in one place."""
    x = np.arange(128, dtype=np.float32)
    return start_session(SCALE, x, np.zeros(128, np.float32), np.float32(0.5), block=128, **options)
