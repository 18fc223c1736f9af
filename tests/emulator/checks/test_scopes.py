"""Scopes: what reaches the threads that it is to order, and what does not."""

import numpy as np
import pytest

from ptxlab import emulator
from tests.support.axes import both_modes
from tests.support.small_kernels import STORE, kernel_text, line_of, run_text

# Block 0 writes a word and sets a flag, block 1 waits for the flag and reads the word.
HAND_OVER = """ld.param.u64 %x1, [a]; mov.u32 %r0, %ctaid.x; mov.u32 %s, 0; setp.ne.u32 %p, %r0, 0;
@%p bra READ;
st.global.u32 [%x1], 7;
RELEASE
bra DONE;
READ:
ACQUIRE
setp.eq.u32 %q, %r1, 0;
@%q bra READ;
BEHIND
ld.global.u32 %s, [%x1];
DONE:
"""
RELEASES = {
    "st.release": "st.release.{}.global.u32 [%x1+4], 1;",
    "red.release": "red.release.{}.global.add.u32 [%x1+4], 1;",
    "fence": "fence.acq_rel.{};\nst.relaxed.gpu.global.u32 [%x1+4], 1;",
    "fence and flag": "fence.acq_rel.gpu;\nst.relaxed.{}.global.u32 [%x1+4], 1;",
}
ACQUIRES = {
    "ld.acquire": ("ld.acquire.{}.global.u32 %r1, [%x1+4];", ""),
    "atom.acquire": ("atom.acquire.{}.global.or.b32 %r1, [%x1+4], 0;", ""),
    "fence": ("ld.relaxed.gpu.global.u32 %r1, [%x1+4];", "fence.acq_rel.{};"),
    "flag and fence": ("ld.relaxed.{}.global.u32 %r1, [%x1+4];", "fence.acq_rel.gpu;"),
}


def hand_over(release: str, acquire: str, scopes: tuple[str, str], cluster: int = 1, blocks: int = 2) -> list:
    acquire_code, after_acquire = (part.format(scopes[1]) for part in ACQUIRES[acquire])
    body = HAND_OVER.replace("RELEASE", RELEASES[release].format(scopes[0])).replace("ACQUIRE", acquire_code)
    text = kernel_text(body.replace("BEHIND", after_acquire) + STORE, ".param .u64 out, .param .u64 a")
    out, a = np.zeros(blocks, np.uint32), np.zeros(2, np.uint32)
    options = {"checks": emulator.CHECKS, "cluster": cluster}
    launch = run_text(text, out, a, threads=1, blocks=blocks, **options)
    assert out[1] == 7
    load_line = line_of(text, "ld.global.u32 %s")
    return [f.message for f in launch.findings if f.line == load_line and f.kind == "race"]


@pytest.mark.default_cases(
    "red.release-atom.acquire",
    "st.release-fence",
    "fence and flag-atom.acquire",
    "red.release-ld.acquire",
    "red.release-fence",
)
@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("release", RELEASES)
def test_scopes_between_blocks(release, acquire):
    """Either side's `.cta` spoils it between blocks; `.cluster` between those of one cluster does not."""
    assert not hand_over(release, acquire, ("gpu", "gpu"))
    assert not hand_over(release, acquire, ("sys", "gpu"))
    for scopes in (("cta", "gpu"), ("gpu", "cta"), ("cluster", "gpu")):
        (message,) = hand_over(release, acquire, scopes)
        narrow = "cluster" if "cluster" in scopes else "cta"
        assert f"in scope .{narrow} only, which does not reach the other block" in message
    assert not hand_over(release, acquire, ("cluster", "cluster"), cluster=2)
    assert hand_over(release, acquire, ("cluster", "cta"), cluster=2)


def test_a_wider_fence_holds_beside_a_narrower_one():
    release = "fence.acq_rel.gpu;\nfence.acq_rel.cta;\nst.relaxed.gpu.global.u32 [%x1+4], 1;"
    body = HAND_OVER.replace("RELEASE", release).replace("ACQUIRE", "ld.acquire.gpu.global.u32 %r1, [%x1+4];")
    text = kernel_text(body.replace("BEHIND", "") + STORE, ".param .u64 out, .param .u64 a")
    assert not run_text(
        text, np.zeros(2, np.uint32), np.zeros(2, np.uint32), threads=1, blocks=2, checks=["race"]
    ).findings


@pytest.mark.parametrize(
    ("access", "blocks", "cluster", "races"),
    [
        ("red.relaxed.cta.global.add.u32 [%x1], 1;", 2, 1, True),
        ("red.relaxed.cta.global.add.u32 [%x1], 1;", 1, 1, False),
        ("red.relaxed.gpu.global.add.u32 [%x1], 1;", 2, 1, False),
        ("red.global.add.u32 [%x1], 1;", 2, 1, False),  # .gpu
        ("red.relaxed.cluster.global.add.u32 [%x1], 1;", 2, 2, False),
        ("red.relaxed.cluster.global.add.u32 [%x1], 1;", 4, 2, True),
        ("st.volatile.global.u32 [%x1], 1;", 2, 1, False),
    ],
)
def test_atomics_of_a_narrow_scope_race(access, blocks, cluster, races):
    text = kernel_text(f"ld.param.u64 %x1, [a]; mov.u32 %s, 0;\n{access}\n" + STORE, ".param .u64 out, .param .u64 a")
    a = np.zeros(1, np.uint32)
    options = {"checks": ["race"], "cluster": cluster}
    findings = run_text(text, np.zeros(32 * blocks, np.uint32), a, threads=32, blocks=blocks, **options).findings
    assert [(f.kind, f.line) for f in findings] == ([("race", line_of(text, access))] if races else [])
    assert all("as a scope does not reach the other block" in f.message for f in findings)


REMOTE = """mov.u32 %r0, %cluster_ctarank; mov.u32 %r5, bar; mov.u32 %r6, buf; setp.eq.u32 %q, %r0, 0; mov.u32 %s, 0;
@%q mbarrier.init.shared.b64 [%r5], 1;
barrier.cluster.arrive; barrier.cluster.wait;
@%q bra READ;
mapa.shared::cluster.u32 %r7, %r5, 0; mapa.shared::cluster.u32 %r8, %r6, 0;
st.shared::cluster.u32 [%r8], 7;
mbarrier.arrive{}.shared::cluster.b64 _, [%r7];
bra DONE;
READ:
mbarrier.try_wait.parity{}.shared::cta.b64 %p, [%r5], 0;
@!%p bra READ;
ld.shared.u32 %s, [%r6];
DONE:
barrier.cluster.arrive; barrier.cluster.wait;
"""


def remote_findings(body: str, mode: str) -> tuple[str, list]:
    outside = ".shared .align 128 .b8 buf[128]; .shared .align 8 .b64 bar[1];"
    text = kernel_text(body + STORE, outside=outside)
    out = np.zeros(2, np.uint32)
    findings = run_text(text, out, threads=1, blocks=2, cluster=2, checks=emulator.CHECKS, mode=mode).findings
    assert out[0] == 7
    return text, list(findings)


@both_modes
@pytest.mark.parametrize(
    ("arrive", "wait", "side"),
    [
        ("", "", ""),  # the ISA says .cta; see `scopes`
        (".release.cluster", ".acquire.cluster", ""),
        (".release.cta", ".acquire.cluster", "finds a release"),
        (".release.cluster", ".acquire.cta", "acquires"),
    ],
)
def test_arrivals_from_another_block(arrive, wait, side, mode):
    body = REMOTE.format(arrive, wait)
    text, findings = remote_findings(body, mode)
    assert [(f.kind, f.line) for f in findings] == ([("race", line_of(text, "ld.shared"))] if side else [])
    waits = line_of(text, "try_wait")
    assert all(
        f"line {waits} {side} in scope .cta only, which does not reach the other block" in f.message for f in findings
    )


@both_modes
@pytest.mark.parametrize(
    ("wait", "fence", "reason"),
    [
        ("relaxed.cluster", "fence.acq_rel.cluster;", None),
        ("relaxed.cluster", "fence.acquire.gpu;", None),
        ("relaxed.cluster", "fence.acquire.sync_restrict::shared::cluster.cluster;", None),
        ("relaxed.cluster", "", ""),
        ("relaxed.cluster", "fence.release.cluster;", ""),
        ("relaxed.cluster", "fence.proxy.async.shared::cta;", ""),
        ("relaxed.cluster", "mbarrier.arrive.release.cluster.shared::cta.b64 _, [%r5];", ""),
        ("relaxed.cluster", "bar.sync 0;", "nobody has fenced between the read of the flag or mbarrier and the"),
        ("relaxed.cluster", "fence.acq_rel.cta;", "line {fence} acquires in scope .cta only"),
        ("relaxed.cta", "fence.acq_rel.cluster;", "line {wait} acquires in scope .cta only"),
    ],
)
@pytest.mark.parametrize("kind", ["try_wait", "test_wait"])
def test_a_relaxed_wait_acquires_behind_a_fence(
    kind: str, wait: str, fence: str, reason: str | None, mode: str
) -> None:
    body = REMOTE.format(".release.cluster", f".{wait}").replace("try_wait", kind)
    text, findings = remote_findings(body.replace("ld.shared", f"{fence}\nld.shared"), mode)
    assert [(f.kind, f.line) for f in findings] == [("race", line_of(text, "ld.shared"))] * (reason is not None)
    lines = {"wait": line_of(text, kind), "fence": line_of(text, fence)}
    assert all((reason or "").format(**lines) in finding.message for finding in findings)


@both_modes
@pytest.mark.parametrize(
    ("fence", "arrive", "wait", "acquire", "clean"),
    [
        ("fence.release.cluster;", "relaxed.cluster", "acquire.cluster", "", True),
        ("fence.release.sync_restrict::shared::cta.cluster;", "relaxed.cluster", "acquire.cluster", "", True),
        ("fence.release.cluster;", "relaxed.cluster", "relaxed.cluster", "fence.acquire.cluster;", True),
        ("fence.acquire.cluster;", "relaxed.cluster", "acquire.cluster", "", False),
        ("fence.release.cta;", "relaxed.cluster", "acquire.cluster", "", False),
        ("fence.release.cluster;", "relaxed.cta", "acquire.cluster", "", False),
        ("fence.release.cluster;", "relaxed.cluster", "relaxed.cluster", "fence.acquire.cta;", False),
    ],
)
def test_a_relaxed_arrival_releases_behind_a_fence(
    fence: str, arrive: str, wait: str, acquire: str, clean: bool, mode: str
) -> None:
    body = REMOTE.format(f".{arrive}", f".{wait}").replace("ld.shared", f"{acquire}\nld.shared")
    text, findings = remote_findings(body.replace("mbarrier.arrive", f"{fence}\nmbarrier.arrive"), mode)
    assert [(f.kind, f.line) for f in findings] == ([] if clean else [("race", line_of(text, "ld.shared"))])


# In block 0 all threads write a word, and thread 0 sets a flag; in block 1 it waits for that, and all read.
BLOCKS = """ld.param.u64 %x1, [a]; mov.u32 %r0, %ctaid.x; mov.u32 %r2, %tid.x; mov.u32 %s, 0; setp.ne.u32 %p, %r0, 0;
mul.wide.u32 %x2, %r2, 4; add.u64 %x2, %x1, %x2; setp.ne.u32 %q, %r2, 0;
@%p bra READ;
st.global.u32 [%x2+4], 7;
WRITTEN
bar.sync 0;
@%q bra DONE;
SET
st.relaxed.gpu.global.u32 [%x1], 1;
bra DONE;
READ: @%q bra MEET;
LOOK: ld.relaxed.gpu.global.u32 %r1, [%x1]; setp.eq.u32 %p, %r1, 0;
@%p bra LOOK;
SEEN
MEET: bar.sync 0;
MET
ld.global.u32 %s, [%x2+4];
DONE:
"""
FENCE = "fence.acq_rel.gpu;"


@pytest.mark.parametrize(
    ("written", "set_", "seen", "met", "reason"),
    [
        ("", FENCE, FENCE, "", None),
        (FENCE, FENCE, FENCE, "", None),
        ("", FENCE, "fence.acq_rel.sys;", "", None),
        ("", FENCE, "", "", "as nobody has fenced between the read of the flag or mbarrier and the barrier, "
         "which is no fence between blocks"),
        ("", FENCE, "", FENCE, "as nobody has fenced between the read of the flag or mbarrier and the barrier"),
        (FENCE, "", FENCE, "", "which has a fence behind that, but line 16, `st.relaxed.gpu.global.u32 [%x1], 1`, sets "
         "the flag in thread (0,0,0): by the letter of PTX that thread needs a fence of its own"),
        ("", "", FENCE, "", "of block (0,0,0),"),
    ],
)  # fmt: skip
def test_a_barrier_is_no_fence_between_blocks(written: str, set_: str, seen: str, met: str, reason: str | None) -> None:
    body = BLOCKS.replace("WRITTEN", written).replace("SET", set_).replace("SEEN", seen).replace("MET", met)
    text = kernel_text(body + STORE, ".param .u64 out, .param .u64 a")
    outcome = run_text(text, np.zeros(128, np.uint32), np.zeros(65, np.uint32), threads=64, blocks=2, checks=["race"])
    assert [f.line for f in outcome.findings] == [line_of(text, "ld.global.u32 %s")] * (reason is not None)
    assert reason is None or reason in outcome.findings[0].message


def test_a_barrier_is_a_fence_in_its_block() -> None:
    """Thread 0 hands a word to thread 32 by a flag, and leaves; a barrier follows the relaxed read."""
    body = """mov.u32 %r2, %tid.x; mov.u32 %s, 0; setp.eq.u32 %p, %r2, 32; setp.eq.u32 %q, %r2, 0;
@%p bra LOOK;
@!%q bra MEET;
st.shared.u32 [buf+4], 7; fence.acq_rel.cta; st.relaxed.cta.shared.u32 [buf], 1;
bra DONE;
LOOK: ld.relaxed.cta.shared.u32 %r1, [buf]; setp.ne.u32 %q, %r1, 1;
@%q bra LOOK;
MEET: bar.sync 0;
ld.shared.u32 %s, [buf+4];
DONE:
"""
    text = kernel_text(body + STORE, outside=".shared .align 16 .b8 buf[128];")
    assert run_text(text, np.zeros(128, np.uint32), threads=64, blocks=2, checks=["race"]).findings == ()
