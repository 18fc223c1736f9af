"""How fast the emulator is: `python -m tests.emulator.benchmark`, on one core, parse and copies included."""

import time

import numpy as np

from ptxlab import emulator

from .kernels import HEADER

LQQ = """
.visible .entry dequant(.param .u64 words, .param .u64 scales, .param .u64 offsets, .param .u64 out, .param .u32 n)
{
    .reg .pred %p; .reg .b32 %i, %n, %w, %lo, %hi, %s, %a, %g, %t; .reg .b64 %q, %ps, %pa, %o, %x;
    ld.param.u32 %n, [n];
    mov.u32 %i, %ctaid.x;
    mov.u32 %t, %ntid.x;
    mov.u32 %g, %tid.x;
    mad.lo.u32 %i, %i, %t, %g;
    setp.ge.u32 %p, %i, %n;
    @%p bra DONE;
    ld.param.u64 %q, [words];
    ld.param.u64 %ps, [scales];
    ld.param.u64 %pa, [offsets];
    ld.param.u64 %o, [out];
    mul.wide.u32 %x, %i, 4;
    add.u64 %q, %q, %x;
    shr.u32 %g, %i, 3;
    cvt.u64.u32 %x, %g;
    add.u64 %ps, %ps, %x;
    add.u64 %pa, %pa, %x;
    ld.global.nc.u32 %w, [%q];
    ld.global.nc.u8 %s, [%ps];
    ld.global.nc.u8 %a, [%pa];
    mul.lo.u32 %a, %a, 0x01010101;
    and.b32 %lo, %w, 0x0f0f0f0f;
    shr.u32 %hi, %w, 4;
    and.b32 %hi, %hi, 0x0f0f0f0f;
    mad.lo.u32 %lo, %lo, %s, %a;   // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4
    mad.lo.u32 %hi, %hi, %s, %a;   // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4
    xor.b32 %lo, %lo, 0x80808080;  // @lanes d:s8x4 a:u8x4
    xor.b32 %hi, %hi, 0x80808080;  // @lanes d:s8x4 a:u8x4
    mul.wide.u32 %x, %i, 8;
    add.u64 %o, %o, %x;
    st.global.v2.u32 [%o], {%lo, %hi};
DONE:
    ret;
}
"""


def lane_instructions_per_second(lanes: int, checks=()) -> float:
    """The best of five runs of an LQQ dequantiser."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, lanes, dtype=np.uint32)
    scales, offsets = rng.integers(1, 16, (2, lanes // 8), dtype=np.uint8)
    out = np.zeros(2 * lanes, np.uint32)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        module = emulator.parse(HEADER + LQQ, "dequant.ptx")
        args = [words, scales, offsets, out, np.uint32(lanes)]
        result = emulator.run(module, "dequant", args, grid=lanes // 128, block=128, checks=checks)
        best = max(best, result.lane_instructions / (time.perf_counter() - started))
        assert not result.findings
    return best


if __name__ == "__main__":
    for lanes in (4096, 1 << 16, 1 << 20):
        plain, checked = (lane_instructions_per_second(lanes, c) / 1e6 for c in ((), emulator.CHECKS))
        print(f"{lanes:8} lanes: {plain:5.0f} million lane-instructions a second, {checked:4.0f} with all checks")
