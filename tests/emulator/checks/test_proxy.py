"""Proxy fences: which of them order what threads have written before what the copy engine and wgmma then read."""

import re

import numpy as np
import pytest

from ptxlab import emulator
from tests.support.axes import both_modes
from tests.support.layers import TINY, layer_problem
from tests.support.small_kernels import COPY_PROLOGUE, STORE, kernel_text, line_of, run_text

OUTSIDE = ".shared .align 128 .b8 buf[2048]; .shared .align 8 .b64 bar[4];"
FENCE = "fence.proxy.async.shared::cta;"
BARRIER = "bar.sync 0;"
COPY = "cp.async.bulk.global.shared::cta.bulk_group"

# 64 threads write 512 bytes, thread 0 has them copied to global memory
SEND = """st.shared.u64 [%r7], %x9;
    BETWEEN
    @!%q bra SENT;
    cp.async.bulk.global.shared::cta.bulk_group [%x3], [%r6], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    SENT: bar.sync 1;
"""
PREPARE = "shl.b32 %r7, %r0, 3; add.u32 %r7, %r6, %r7; mov.u64 %x9, 5; and.b32 %r8, %r0, 31;\n"


def kinds_and_instructions(body: str, threads: int = 64, mode: str = "late", checks=emulator.CHECKS) -> list:
    """List the kinds of the findings, each with the instruction it is at."""
    text = kernel_text(COPY_PROLOGUE + PREPARE + body + STORE, ".param .u64 out, .param .u64 a", OUTSIDE)
    a = np.arange(1, 1025, dtype=np.uint32)
    launch = run_text(text, np.zeros(threads, np.uint32), a, threads=threads, mode=mode, checks=checks)
    return sorted({(f.kind, text.split("\n")[f.line - 1].strip().split(" ")[0]) for f in launch.findings})


@both_modes
@pytest.mark.parametrize(
    ("between", "kinds"),
    [
        (FENCE + BARRIER, []),  # every writer, then the barrier
        (BARRIER + "@%q " + FENCE, []),  # the barrier, then the issuing thread
        (BARRIER + FENCE, []),
        (BARRIER + "@%q fence.proxy.async;", []),
        ("@%q " + FENCE + BARRIER, ["async-dirty"]),  # one thread for all, which has not heard of their writes
        ("@!%q " + FENCE + BARRIER, ["async-dirty"]),  # all but one
        (BARRIER, ["async-dirty"]),
        (BARRIER + "@%q fence.proxy.async.global;", ["async-dirty"]),  # of another space
        # thread 32 has heard of the writes; but thread 0 of its fence, behind another barrier only
        (BARRIER + "setp.eq.u32 %p, %r0, 32; @%p " + FENCE, ["async-dirty"]),
        (BARRIER + "setp.eq.u32 %p, %r0, 32; @%p " + FENCE + BARRIER, []),
        (BARRIER + "setp.eq.u32 %p, %r0, 1; @%p " + FENCE, ["async-dirty"]),  # nor has it of its neighbour's
        # a fence orders what came before it
        (BARRIER + "@%q " + FENCE + "@%q st.shared.u64 [%r7], %x3;", ["async-dirty"]),
        (FENCE, ["race"]),  # nobody waits for the other warp
        ("", ["async-dirty", "race"]),
    ],
)
def test_a_fence_on_the_way_from_the_write_to_the_copy(between, kinds, mode):
    assert kinds_and_instructions(SEND.replace("BETWEEN", between), mode=mode) == [(kind, COPY) for kind in kinds]


def test_the_check_async_needs_no_other():
    for between, kinds in ((BARRIER + "@%q " + FENCE, []), ("@%q " + FENCE + BARRIER, ["async-dirty"])):
        assert kinds_and_instructions(SEND.replace("BETWEEN", between), checks=["async"]) == [
            (kind, COPY) for kind in kinds
        ]


@both_modes
@pytest.mark.parametrize(
    ("meet", "fence", "kinds"),
    [
        ("bar.warp.sync -1;", "setp.eq.u32 %p, %r8, 0; @%p", []),  # lane 0 for its warp, once they have met
        ("", "setp.eq.u32 %p, %r8, 0; @%p", ["async-dirty"]),
        ("bar.warp.sync -1;", "@%q", ["async-dirty"]),  # one warp has none
    ],
)
def test_one_lane_for_its_warp(meet, fence, kinds, mode):
    between = f"{meet} {fence} {FENCE} {BARRIER}"
    assert kinds_and_instructions(SEND.replace("BETWEEN", between), mode=mode) == [(kind, COPY) for kind in kinds]


ARRIVALS = {  # how many arrive, having done what
    "stores of the upper warp": (32, """setp.lt.u32 %p, %r0, 32; @%p bra ISSUE;
    st.shared.u64 [%r7+-256], %x9; mbarrier.arrive.shared.b64 _, [%r5]; bra END;
    ISSUE:"""),
    "cp.async of all threads": (64, """cp.async.ca.shared.global [%r7], [%x1], 8;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];"""),
}  # fmt: skip


@both_modes
@pytest.mark.parametrize(("fence", "kinds"), [(FENCE, []), ("", ["async-dirty"])])
@pytest.mark.parametrize(("count", "write"), ARRIVALS.values(), ids=ARRIVALS)
def test_an_mbarrier_tells_of_writes_to_be_fenced(count, write, fence, kinds, mode):
    """Thread 0 waits at the mbarrier, fences and issues."""
    body = f"""@%q mbarrier.init.shared.b64 [%r5], {count};
    bar.sync 0;
    {write}
    @!%q bra END;
    W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra W;
    {fence}
    cp.async.bulk.global.shared::cta.bulk_group [%x3+1024], [%r6], {8 * count};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END:
    """
    assert kinds_and_instructions(body, mode=mode) == [(kind, COPY) for kind in kinds]


@both_modes
@pytest.mark.parametrize(
    ("between", "kinds"),
    [
        ("cp.async.wait_all;" + FENCE + BARRIER, []),
        ("cp.async.wait_all;" + BARRIER + "@%q " + FENCE, []),
        ("cp.async.wait_all;" + BARRIER, ["async-dirty"]),
        (FENCE + "cp.async.wait_all;" + BARRIER, ["async-dirty"]),  # fenced before it had come
    ],
)
def test_what_cp_async_has_written_is_fenced_too(between, kinds, mode):
    """It goes by the generic proxy, as ordinary stores do (PTX ISA, cp.async), and has come once waited for."""
    copies = SEND.replace("st.shared.u64 [%r7], %x9;", "cp.async.ca.shared.global [%r7], [%x1], 8;")
    assert kinds_and_instructions(copies.replace("BETWEEN", between), mode=mode) == [(kind, COPY) for kind in kinds]


@both_modes
@pytest.mark.parametrize("issuer", [0, 32])
@pytest.mark.parametrize(
    ("between", "orders"),
    [
        ("", False),
        ("fence.proxy.async.shared::cta;", False),
        ("bar.sync 0;", True),
        ("@%q st.release.cta.shared.u32 [%r6+1024], 1; L: ld.acquire.cta.shared.u32 %r9, [%r6+1024];"
         "setp.ne.u32 %p, %r9, 1; @%p bra L;", True),
    ],
)  # fmt: skip
def test_who_may_use_an_mbarrier_for_a_copy(between, orders, issuer, mode):
    """Whoever knows of mbarrier.init: the copy uses its mbarrier by the generic proxy (PTX ISA, cp.async.bulk)."""
    body = f"""@%q mbarrier.init.shared.b64 [%r5], 1;
    {between}
    setp.ne.u32 %p, %r0, {issuer}; @%p bra MEET;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 512, [%r5];
    MEET: bar.sync 1;
    W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra W;
    """
    into = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    assert (("async", into) in kinds_and_instructions(body, mode=mode)) == (not orders and issuer == 32)


@pytest.mark.parametrize(
    ("fence", "clean"),
    [
        ("fence.proxy.async.global;", True),
        ("fence.proxy.async;", True),
        ("fence.proxy.async.shared::cta;", False),
        ("", False),
    ],
)
def test_a_flag_hands_on_what_to_fence_across_blocks(fence, clean):
    """Block 0 writes global memory and sets a flag; block 1 sees it, fences, and has the bytes copied."""
    body = f"""mov.u32 %r10, %ctaid.x; setp.eq.u32 %p, %r10, 1; @%p bra READ;
    mov.u64 %x9, 7;
    st.global.u64 [%x3+64], %x9;
    st.release.gpu.global.u32 [%x3], 0;
    bra END;
    READ: mbarrier.init.shared.b64 [%r5], 1; fence.mbarrier_init.release.cluster;
    L: ld.acquire.gpu.global.u32 %r9, [%x3]; setp.ne.u32 %p, %r9, 0; @%p bra L;
    {fence}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3+64], 16, [%r5];
    W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra W;
    END:
    """
    text = kernel_text(COPY_PROLOGUE + body + STORE, ".param .u64 out, .param .u64 a", OUTSIDE)
    a = np.arange(1, 1025, dtype=np.uint32)
    launch = run_text(text, np.zeros(2, np.uint32), a, threads=1, blocks=2, checks=emulator.CHECKS)
    copy = line_of(text, "cp.async.bulk.shared::cluster")
    assert [(f.kind, f.line) for f in launch.findings] == ([] if clean else [("async-dirty", copy)])


@pytest.mark.full
def test_what_a_decoder_layer_leaves_to_the_wait() -> None:
    """Its copy engine reads what launches before wrote, behind griddepcontrol.wait without a proxy fence: the guide's
    "Fence bugs" says so, and these are all the places."""
    problem = layer_problem(TINY)
    with emulator.chain({"proxy"}, begin="early", given=[problem.cache.pool]) as chain:
        problem.run()
    matches = [
        re.search(r"` of (\w+) .* nobody has fenced here since griddepcontrol.wait", str(f)) for f in chain.findings
    ]
    writers = [match[1] if match else "" for match in matches]
    assert {f.kind for f in chain.findings} == {"async-dirty"} and {*writers} == {
        "rmsnorm_quantize", "rope_append_kv4", "quantize_activations_s8", "silu_mul_quantize",
    }  # fmt: skip
