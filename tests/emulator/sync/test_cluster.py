"""Clusters: each other's shared memory, the barrier of all their threads, and what is found when a step is missing."""

import re

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.errors import ArgumentError, Deadlock, EmulationError, MemoryFault, UnknownInstruction
from tests.support.axes import both_modes
from tests.support.small_kernels import STORE, findings_or_error, kernel_text, line_of, run_text

BLOCKS, THREADS = 6, 64
SHARED = ".shared .align 128 .b8 buf[1024]; .shared .align 8 .b64 bar[2]; .shared .align 16 .b8 got[1024];"
# %r1 rank, %r3 the next block's rank, %r4 an own word, %r5 the same word of the next block, %r7 a number of the thread
START = """mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %cluster_nctarank;
    add.u32 %r3, %r1, 1; rem.u32 %r3, %r3, %r2; mov.u32 %r4, buf; shl.b32 %r6, %r0, 2; add.u32 %r4, %r4, %r6;
    mapa.shared::cluster.u32 %r5, %r4, %r3; mov.u32 %r6, %ctaid.x; mad.lo.u32 %r7, %r6, 1000, %r0;
    setp.eq.u32 %q, %r0, 0; mov.u32 %r8, bar; mov.u32 %s, 0; mov.u32 %r12, got; mov.u32 %r10, buf;
    mapa.shared::cluster.u32 %r9, %r8, %r3; mapa.shared::cluster.u32 %r11, %r12, %r3;
"""
MEET = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
INIT = f"@%q mbarrier.init.shared.b64 [%r8], COUNT;\n@%q fence.mbarrier_init.release.cluster;\n{MEET}"
WAIT = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [%r8], 0; @!%p bra W;\n"
# What the block before this one in its cluster (of 3) has in %r7
BEFORE = [1000 * (b // 3 * 3 + (b - 1) % 3) + t for b in range(BLOCKS) for t in range(THREADS)]


def module(body: str) -> str:
    return kernel_text(START + body + STORE, outside=SHARED)


def outcome(body: str, mode: str = "late", cluster: int = 3, checks=emulator.CHECKS) -> tuple[list[int], list[str]]:
    """Run a body; return what the threads have in %s, and the findings."""
    out = np.zeros(BLOCKS * THREADS, np.uint32)
    launch = run_text(module(body), out, threads=THREADS, blocks=BLOCKS, cluster=cluster, checks=checks, mode=mode)
    return out.tolist(), [str(finding) for finding in launch.findings]


def test_special_registers_of_clusters() -> None:
    names = ["cluster_ctarank", "cluster_nctarank", *(f"{name}.{axis}" for name in (
        "cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for axis in "xyz")]  # fmt: skip
    store = "".join(f"mov.u32 %r0, %{name}; st.global.u32 [%x0+{4 * i}], %r0;\n" for i, name in enumerate(names))
    text = kernel_text(
        "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ctaid.y; mov.u32 %r2, %nctaid.x; mad.lo.u32 %r0, %r1, %r2, %r0;"
        f"ld.param.u64 %x0, [out]; mad.wide.u32 %x0, %r0, {4 * len(names)}, %x0; {store} ret;"
    )
    out = np.zeros((6, 4, len(names)), np.uint32)
    emulator.run(text, None, [out], grid=(4, 6), block=1, cluster=(2, 3))
    for y in range(6):
        for x in range(4):
            rank = y % 3 * 2 + x % 2
            assert out[y, x].tolist() == [rank, 6, x % 2, y % 3, 0, 2, 3, 1, x // 2, y // 3, 0, 2, 2, 1]


PASS_ON = f"""st.shared::cluster.u32 [%r5], %r7;
{MEET}ld.shared.u32 %s, [%r4];
"""
FETCH = f"""st.shared.u32 [%r4], %r7;
{MEET}mapa.shared::cluster.u32 %r5, %r4, %r14;
ld.shared::cluster.u32 %s, [%r5];
{MEET}"""
LAST = "add.u32 %r14, %r3, 1; rem.u32 %r14, %r14, %r2;\n"  # of three: the one before
GENERIC = f"""cvt.u64.u32 %x1, %r4;
cvta.shared.u64 %x0, %x1;
mapa.u64 %x2, %x0, %r3;
st.u32 [%x2], %r7;
{MEET}ld.u32 %s, [%x0];
getctarank.u64 %r14, %x2; setp.ne.u32 %p, %r14, %r3; @%p trap;
getctarank.shared::cluster.u32 %r14, %r5; setp.ne.u32 %p, %r14, %r3; @%p trap;
getctarank.shared::cluster.u32 %r14, %r4; setp.ne.u32 %p, %r14, %r1; @%p trap;
isspacep.shared::cluster %p, %x2; @!%p trap;
isspacep.shared::cta %p, %x2; @%p trap;
isspacep.shared::cta %p, %x0; @!%p trap;
isspacep.global %p, %x2; @%p trap;
cvta.to.shared::cluster.u64 %x3, %x2; cvt.u64.u32 %x4, %r5; setp.ne.u64 %p, %x3, %x4; @%p trap;
cvta.shared::cluster.u64 %x3, %x4; setp.ne.u64 %p, %x3, %x2; @%p trap;
"""
WAYS = {"store": PASS_ON, "load": LAST + FETCH, "generic": GENERIC}


@both_modes
@pytest.mark.parametrize("body", WAYS.values(), ids=WAYS)
def test_memory_of_the_next_block(body: str, mode: str) -> None:
    assert outcome(body, mode) == (BEFORE, [])


@both_modes
def test_atomics_reach_other_blocks(mode: str) -> None:
    body = f"""st.shared.u32 [%r4], 5;
{MEET}red.shared::cluster.add.u32 [%r5], %r0;
atom.shared::cluster.add.u32 %r9, [%r5], 1;
{MEET}ld.shared.u32 %s, [%r4];
"""
    assert outcome(body, mode) == ([6 + i % THREADS for i in range(BLOCKS * THREADS)], [])


@both_modes
@pytest.mark.parametrize(
    ("body", "gone", "kind"),
    [(PASS_ON, MEET, "race"), (PASS_ON, ".release", ""), (LAST + FETCH, MEET, "race")],  # release is the default
)
def test_without_the_barrier_it_is_a_race(body: str, gone: str, kind: str, mode: str) -> None:
    _, findings = outcome(body.replace(gone, "", 1), mode)
    assert any(line.startswith(f"{kind}: k.ptx:") for line in findings) if kind else not findings


@both_modes
@pytest.mark.parametrize(
    ("fence", "kinds"),
    [
        ("", {"race"}),
        ("fence.acq_rel.cta;", {"race"}),
        ("fence.mbarrier_init.release.cluster;", {"race"}),  # is for mbarriers alone
        ("fence.acq_rel.cluster;", set()),
        ("fence.acq_rel.gpu;", set()),
    ],
)
def test_a_relaxed_arrival_orders_what_was_fenced(fence: str, kinds: set[str], mode: str) -> None:
    body = PASS_ON.replace("barrier.cluster.arrive.release", f"{fence}\nbarrier.cluster.arrive.relaxed")
    assert {line.partition(":")[0] for line in outcome(body, mode)[1]} == kinds


FENCE, CLUSTER_WAIT = "@%q fence.mbarrier_init.release.cluster;", "barrier.cluster.wait.acquire.aligned;"


@both_modes
@pytest.mark.parametrize(
    ("fence", "wait", "kinds"),
    [
        (FENCE, CLUSTER_WAIT, set()),
        (FENCE, f"setp.lt.u32 %p, %r0, 32;\n@%p {CLUSTER_WAIT}\nbar.sync 0;", set()),  # one warp tells the other
        ("", CLUSTER_WAIT, {"race"}),
        (FENCE, "", {"race"}),
        (FENCE, f"setp.lt.u32 %p, %r0, 32;\n@%p {CLUSTER_WAIT}", {"race"}),  # the other warp has not heard
    ],
)
def test_a_relaxed_barrier_tells_who_waits_of_mbarriers(fence: str, wait: str, kinds: set[str], mode: str) -> None:
    relaxed = f"barrier.cluster.arrive.relaxed.aligned;\n{wait}\n"
    body = f"@%q mbarrier.init.shared.b64 [%r8], {THREADS};\n{fence}\n{relaxed}"
    body += f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];\n{WAIT}"
    findings = findings_or_error(lambda: outcome(body, mode)[1])
    assert set(re.findall("^race", str(findings), re.M)) == kinds, findings


@both_modes
def test_nobody_may_end_while_others_use_its_memory(mode: str) -> None:
    body = LAST + FETCH[: FETCH.rindex("barrier.cluster.arrive")]
    place = rf"k\.ptx:{line_of(module(body), 'ld.shared::cluster')}: "
    ended = r".* shared memory of block \(\d,0,0\), which (may have|has) ended"
    assert re.search(place + ended, findings_or_error(lambda: outcome(body, mode)[1]))


ASYNC = INIT.replace("COUNT", "1") + (
    "@%q mbarrier.arrive.expect_tx.shared.b64 _, [%r8], BYTES;\nSEND\n" + WAIT + "ld.shared.u32 %s, [%r4];\n" + MEET
)
SENDS = {
    "st.async": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r7, [%r9];",
    "bulk": "mad.lo.u32 %r13, %r0, 4, %r12; st.shared.u32 [%r13], %r7; fence.proxy.async; bar.sync 0;"
            "mapa.shared::cluster.u32 %r10, %r10, %r3;\n@%q cp.async.bulk.shared::cluster.shared::cta"
            ".mbarrier::complete_tx::bytes [%r10], [%r12], 256, [%r9];",
}  # fmt: skip


@both_modes
@pytest.mark.parametrize("name", SENDS)
def test_what_is_sent_tells_an_mbarrier_there(name: str, mode: str) -> None:
    body = ASYNC.replace("BYTES", "256").replace("SEND", SENDS[name])
    assert outcome(body, mode) == (BEFORE, [])
    body_without_wait = body.replace(WAIT, "")
    assert any(
        line.startswith("async: ") and "still being written" in line for line in outcome(body_without_wait, mode)[1]
    )
    leaving = body[: body.rindex("barrier.cluster.arrive")].replace("ld.shared.u32 %s, [%r4];", "").replace(WAIT, "")
    assert re.search("which (may have|has) ended", findings_or_error(lambda: outcome(leaving, mode)[1]))


@both_modes
def test_vectors_and_sums_are_sent(mode: str) -> None:
    sends = [
        ("mad.lo.u32 %r13, %r0, 12, %r5; @%p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
         "[%r13], {%r7, %r7, %r0, %r1}, [%r9];", 512, [3000, 3000, 0, 0, 3001, 3001, 1, 0]),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r5], %r0, [%r9];\n" * 2,
         512, [i * 2 + 5 for i in range(8)]),
        ("mapa.shared::cluster.u32 %r13, %r10, %r3;\nred.async.relaxed.cluster.shared::cluster"
         ".mbarrier::complete_tx::bytes.max.u32 [%r13], %r0, [%r9];", 256, [63, *[5] * 7]),
    ]  # fmt: skip
    for send, size, first in sends:
        fill = "st.shared.u32 [%r4], 5; setp.lt.u32 %p, %r0, 32;\n"
        clean, findings = outcome(fill + ASYNC.replace("BYTES", str(size)).replace("SEND", send), mode)
        assert findings == [] and clean[4 * THREADS : 4 * THREADS + 8] == first
    assert any("uninitialised" in line and "red.async" in line for line in outcome(
        ASYNC.replace("BYTES", "512").replace("SEND", sends[1][0]), mode)[1])  # fmt: skip


@both_modes
def test_arrivals_from_other_blocks(mode: str) -> None:
    body = f"""{INIT.replace("COUNT", "64")}st.shared::cluster.u32 [%r5], %r7;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];
{WAIT}ld.shared.u32 %s, [%r4];
{MEET}"""
    assert outcome(body, mode) == (BEFORE, [])
    _, findings = outcome(body.replace(".release.cluster.s", ".relaxed.cluster.s"))
    assert any(line.startswith("race: ") for line in findings)


MULTICAST = f"""{INIT.replace("COUNT", "1")}
@%q mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;
{MEET}ld.param.u64 %x1, [out]; setp.eq.u32 %p, %r1, 1; and.pred %p, %p, %q; mov.b16 %h0, MASK;
@%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r10], [%x1], 256, [%r8], %h0;
{WAIT}ld.shared.u32 %s, [%r4];
{MEET}"""


@both_modes
def test_one_copy_for_several_blocks(mode: str) -> None:
    text = module(MULTICAST.replace("MASK", "7")).replace("st.global.u32 [%y]", "st.global.u32 [%y+256]")
    out = np.zeros((BLOCKS + 1) * THREADS, np.uint32)
    out[:THREADS] = np.arange(THREADS)
    launch = run_text(text, out, threads=THREADS, blocks=BLOCKS, cluster=3, checks=emulator.CHECKS, mode=mode)
    assert not launch.findings and (out.reshape(-1, THREADS) == np.arange(THREADS)).all()
    with pytest.raises(EmulationError, match="block 3 of a cluster of 3"):
        outcome(MULTICAST.replace("MASK", "15"), mode)
    with pytest.raises(Deadlock, match="256 bytes"):
        outcome(MULTICAST.replace("MASK", "3"), mode)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("mapa.shared::cluster.u32 %r5, %r4, %r2;", EmulationError, "block 3 of a cluster of 3"),
        ("add.u32 %r5, %r5, 4096; ld.shared::cluster.u32 %s, [%r5];", MemoryFault, "out of bounds"),
        ("add.u32 %r5, %r5, 1; ld.shared::cluster.u32 %s, [%r5];", MemoryFault, "not a multiple of the 4 bytes"),
        ("ld.shared.u32 %s, [%r5];", MemoryFault, "out of bounds"),
        ("barrier.cluster.wait;", EmulationError, r"thread \(0,0,0\).* without having arrived"),
        ("barrier.cluster.arrive;\nbarrier.cluster.arrive;", EmulationError, "again, without having waited"),
        ("@%q barrier.cluster.arrive;\n@%q barrier.cluster.wait;\n@!%q bar.sync 1, 96;", Deadlock,
         "waits for all threads of its cluster"),
        ("cvt.u64.u32 %x1, %r4; cvta.shared.u64 %x0, %x1; add.u64 %x0, %x0, 61440; ld.u32 %s, [%x0];", MemoryFault,
         "out of bounds"),
        ("mov.u64 %x0, 64; mapa.u64 %x0, %x0, %r3;", EmulationError, "an address that is not in shared memory"),
        ("barrier.cluster.arrive.acquire;", UnknownInstruction, "does not know"),
        ("barrier.cluster.sync;", UnknownInstruction, "does not know"),
        ("st.async.shared::cta.mbarrier::complete_tx::bytes.u32 [%r5], %r7, [%r9];", UnknownInstruction, "does not"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r7, [%r9];", EmulationError,
         "no initialised mbarrier"),
    ],
)  # fmt: skip
def test_invalid_accesses_and_barriers_are_refused(body: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        outcome(body + "\n", checks=())


def test_blocks_of_other_clusters_are_out_of_reach() -> None:
    """A generic address may not reach them; an address in the window of the cluster cannot name them."""
    body = "cvt.u64.u32 %x1, %r4; cvta.shared.u64 %x0, %x1; ld.param.u64 %x1, [out];\n" + (
        "setp.eq.u32 %p, %r6, 0; @%p st.global.u64 [%x1], %x0; membar.gl; W: ld.volatile.global.u64 %x0, [%x1];"
        "setp.eq.u64 %p, %x0, 0; @%p bra W;\nld.u32 %s, [%x0];\n"
    )
    with pytest.raises(MemoryFault, match=r"shared memory of block \(0,0,0\), which is of another cluster"):
        outcome(body, checks=())


BODIES = WAYS | {name: ASYNC.replace("BYTES", "256").replace("SEND", send) for name, send in SENDS.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_hardware_agrees(body: str) -> None:
    out = np.zeros(BLOCKS * THREADS, np.uint32)
    ptxlab.load(module(body))(out, grid=BLOCKS, block=THREADS, cluster=3, backend="gpu")
    assert out.tolist() == BEFORE


def test_sizes_of_clusters() -> None:
    text = kernel_text("ret;", directives=".reqnctapercluster 2, 1, 1")
    out = np.zeros(1, np.uint32)
    emulator.run(text, None, [out], grid=4, block=32)
    emulator.run(text, None, [out], grid=4, block=32, cluster=(2, 1, 1))
    with pytest.raises(ArgumentError, match=r"by \.reqnctapercluster of k"):
        emulator.run(text, None, [out], grid=4, block=32, cluster=4)
    with pytest.raises(ArgumentError, match=r"cluster: has at most 16 blocks \(got \(32, 1, 1\)\)"):
        emulator.run(kernel_text("ret;"), None, [out], grid=32, block=32, cluster=32)


def test_the_address_of_a_peer_in_a_local_form() -> None:
    with pytest.raises(
        MemoryFault, match=r"the address of byte 1152 in block 1 of the cluster, which takes .shared::cl"
    ):
        outcome("ld.shared::cta.u32 %s, [%r9+128];")
