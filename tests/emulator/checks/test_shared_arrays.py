"""The check "overrun": accesses by the address of one array in shared memory that reach another."""

import numpy as np
import pytest

from tests.support.small_kernels import STORE, kernel_text, run_text

ARRAYS = ".shared .align 4 .b8 a[256]; .shared .align 4 .b8 b[256]; .shared .align 16 .b8 c[256];\n"
START = "mov.u32 %r7, a; mov.u32 %r8, b; mov.u32 %r9, c;\n"
START += "mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; ld.param.u64 %x0, [out]; mov.u32 %s, 0; setp.lt.u32 %p, %r0, 8;\n"


def findings(body: str, outside: str = ARRAYS) -> list[tuple[int, str]]:
    """Return how many threads each finding counts, and what it says."""
    text = kernel_text(START + body + STORE, outside=outside)
    outcome = run_text(text, np.zeros(64, np.uint32), threads=64, shared_bytes=512, checks=["overrun"])
    return [(finding.count, finding.message) for finding in outcome.findings]


@pytest.mark.parametrize(
    ("body", "count", "words"),
    [
        ("mov.u32 %r2, b; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2+12], %s;", 3,
         "byte 512 of shared memory of block 0 of the wave (c + 0) by an address of b (256 bytes), 4 bytes past"),
        ("mad.lo.u32 %r2, %r0, 8, b; ld.shared.v2.u32 {%r3, %r4}, [%r2];", 32, "reads"),
        ("mov.u32 %r2, b; sub.u32 %r2, %r2, %r1; ld.shared.u32 %r3, [%r2];", 63, "ahead of its first byte"),
        ("ld.shared.u32 %r3, [a+256];", 64, "4 bytes past its end"),
        ("st.shared.u32 [c], %s; ld.shared.u32 %r4, [c]; mad.lo.u32 %r2, %r4, 4, %r7; ld.shared.u32 %s, [%r2+256];", 64,
         "4 bytes past its end"),
        ("mov.u32 %r2, a; add.u32 %r2, %r2, %r1; atom.shared.add.u32 %r3, [%r2+4], 1;", 1, "changes"),
        ("cvta.shared.u64 %x1, a; mul.wide.u32 %x2, %r0, 4; add.u64 %x1, %x1, %x2; st.u32 [%x1+8], %s;", 2, "writes"),
        ("mov.u32 %r2, a; mad.lo.u32 %r2, %r0, 16, %r2; @%p cp.async.ca.shared.global [%r2+192], [%x0], 16;", 4,
         "copies to"),
        ("mov.u32 %r2, b;\nL: add.u32 %r2, %r2, 128; st.shared.u32 [%r2], %s; xor.b32 %r5, %r5, 1;\n"
         "setp.eq.u32 %q, %r5, 1; @%q bra L;", 64, "4 bytes past its end"),
    ],
)  # fmt: skip
def test_an_access_beyond_its_array(body: str, count: int, words: str) -> None:
    ((counted, message),) = findings(body)
    assert counted == count and words in message


@pytest.mark.parametrize(
    "body",
    [
        "mov.u32 %r2, b; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], %s;",
        "mov.u32 %r2, b; ld.shared.u32 %r3, [%r2+252]; st.shared.u32 [c+252], %s;",
        # of two arrays, of an address that was in memory, and in dynamic shared memory nothing is known
        "mov.u32 %r2, a; mov.u32 %r3, b; selp.b32 %r2, %r2, %r3, %p; ld.shared.u32 %r3, [%r2+256];",
        "mov.u32 %r2, a; st.shared.u32 [b], %r2; ld.shared.u32 %r2, [b]; st.shared.u32 [%r2+256], %s;",
        "mov.u32 %r2, d; st.shared.u32 [%r2+256], %s;",
        "mov.u32 %r2, a; st.shared.u32 [b], %r8; ld.shared.u32 %r4, [b]; @%p mov.u32 %r2, %r4;\n"
        "ld.shared.u32 %r3, [%r2+256];",
        "shfl.sync.idx.b32 %r4, %r7, 0, 31, -1; mov.u32 %r2, a; @%p mov.u32 %r2, %r4; ld.shared.u32 %r3, [%r2+256];",
    ],
)
def test_an_access_within(body: str) -> None:
    assert findings(body, ARRAYS + ".extern .shared .align 4 .b8 d[];\n") == []


def test_an_access_to_a_peer() -> None:
    body = "mov.u32 %r2, a; mapa.shared::cluster.u32 %r2, %r2, 1; ld.shared::cluster.u32 %r3, [%r2+256];"
    text = kernel_text(START + body + "barrier.cluster.arrive; barrier.cluster.wait;\n" + STORE, outside=ARRAYS)
    outcome = run_text(text, np.zeros(128, np.uint32), threads=64, blocks=2, cluster=2, checks=["overrun"])
    assert outcome.findings == ()
