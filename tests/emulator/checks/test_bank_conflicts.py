"""Counting wavefronts: the accesses of a run, by the bank model."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.hardware.banks import collisions
from tests.support.small_kernels import STORE, kernel_text, line_of, run_text

SHARED = ".shared .align 128 .b8 pad[256]; .shared .align 128 .b8 buf[4096];"
START = "mov.u32 %r0, %tid.x; mov.u32 %s, pad; mov.u32 %r2, buf; and.b32 %r9, %r0, 31;\n"


def accesses(body: str, threads: int = 64, blocks: int = 1) -> tuple[tuple[emulator.SharedAccess, ...], str]:
    text = kernel_text(START + body + STORE, outside=SHARED)
    out = np.zeros(threads * blocks, np.uint32)
    return run_text(text, out, threads=threads, blocks=blocks, count_banks=True).shared, text


@pytest.mark.parametrize(
    ("stride", "access", "wavefronts", "conflicts"),
    [
        (4, "st.shared.u32 [%r3], %r0;", 1, 0),
        (8, "st.shared.u32 [%r3], %r0;", 2, 1),
        (128, "ld.shared.u32 %r4, [%r3];", 32, 31),
        (0, "ld.shared.u32 %r4, [%r3];", 1, 0),
        (16, "ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3];", 4, 0),
        (16, "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%r3];", 2, 0),
        (128, "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%r3];", 16, 14),
        (32, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {%r4, %r5, %r6, %r7};", 8, 4),
    ],
)
def test_wavefronts_and_conflicts_of_an_access(stride, access, wavefronts, conflicts):
    (counted_accesses,), text = accesses(f"mad.lo.u32 %r3, %r9, {stride}, %r2;\n{access}\n", blocks=3)
    assert (counted_accesses.requests, counted_accesses.wavefronts, counted_accesses.conflicts) == (
        6,
        6 * wavefronts,
        6 * conflicts,
    )
    assert counted_accesses.line == line_of(text, access) and counted_accesses.text == access.rstrip(";")
    rows = 16 if ".x2" in access else 32
    assert counted_accesses.addresses == (*(256 + stride * i for i in range(rows)), *[-1] * (32 - rows))
    if rows == 32:
        drawn = collisions(counted_accesses.addresses, counted_accesses.width, store=counted_accesses.store)
        assert bool(drawn) == bool(conflicts)


def test_lanes_that_take_no_part():
    (counted_accesses,), _ = accesses("setp.lt.u32 %p, %r0, 40; shl.b32 %r4, %r0, 3; add.u32 %r3, %r2, %r4;\n"
                             "@%p st.shared.u32 [%r3], %r0;\n")  # fmt: skip
    assert (counted_accesses.requests, counted_accesses.wavefronts) == (
        2,
        3,
    )  # 32 lanes: two words per bank; 8 lanes: one


def test_only_what_touches_shared_memory_counts():
    counted_accesses, _ = accesses("st.shared.u32 [%r2], 1;\natom.shared.add.u32 %r4, [%r2], 1;\n")
    assert [access.text for access in counted_accesses] == ["st.shared.u32 [%r2], 1"]
    assert run_text(kernel_text(STORE), np.zeros(32, np.uint32), count_banks=False).shared == ()
