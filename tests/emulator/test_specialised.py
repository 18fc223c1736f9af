"""The warp-specialised GEMM: right and clean, early and late; and every step that is left out is found."""

import re

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.hardware.fragments import wgmma_d
from ptxlab.sources import Source
from ptxlab.spec import Launch
from tests.support import specialised_gemm
from tests.support.axes import both_modes
from tests.support.small_kernels import findings_or_error


def outcome(source: str, mode: str, seed: int = 0, checks=emulator.CHECKS, *, tokens: int = 40, channels: int = 128,
            depth: int = 512, blocks: int = 2, backend: str = "emulator") -> tuple[bool, list[str]]:  # fmt: skip
    """Run the GEMM; return whether the product is right, and the findings."""
    args, right, _ = specialised_gemm.problem(seed, tokens, channels, depth)
    kernel = ptxlab.load(Source.from_text(source, "gemm.cu"), arch="sm_90a")
    launch = Launch((blocks, 1, 1), (specialised_gemm.THREADS, 1, 1), specialised_gemm.SHARED_BYTES, (2, 1, 1))
    result = kernel.launch(args, launch, backend=backend, checks=checks, mode=mode, seed=seed)
    registers = args[2].reshape(-1, specialised_gemm.ACC, 2, 128).transpose(0, 2, 3, 1)
    sums = wgmma_d(specialised_gemm.BM).gather(np.ascontiguousarray(registers), np.int32)
    return np.array_equal(sums.reshape(right.shape), right), [str(f) for f in (result.findings if result else ())]


@pytest.mark.full
@both_modes
@pytest.mark.parametrize("blocks", [2, 8])
def test_the_kernel_has_the_right_result_and_no_findings(blocks: int, mode: str) -> None:
    for seed, (tokens, channels, depth) in enumerate([(19, 256, 768), (40, 128, 512), (1, 384, 256)]):
        sizes = {"tokens": tokens, "channels": channels, "depth": depth}
        assert outcome(specialised_gemm.SOURCE, mode, seed, blocks=blocks, **sizes) == (True, [])


BOX = r"cp\.async\.bulk\.tensor\.2d"
STORE = r"cp\.async\.bulk\.global\.shared::cta"
NEVER = "deadlock: "
ENDED = r"shared memory of block \(\d,0,0\), which (may have|has) ended"


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [2, 8, 132])
def test_hardware_agrees(blocks: int) -> None:
    sizes = {"tokens": 301, "channels": 1024, "depth": 4096}
    assert outcome(specialised_gemm.SOURCE, "early", blocks=blocks, backend="gpu", **sizes) == (True, [])


FENCE = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'
MISTAKES = {
    # what it would be in the source, what instead, what is found
    "mbarriers are not waited for": ("    meet_cluster();\n    const int", "    const int", r"race: .*mbarrier\.init"),
    "mbarriers are waited for by the block only": (
        "    meet_cluster();\n    const int", "    __syncthreads();\n    const int",
        r"race: .*shared::cluster\.b64 .*mbarrier\.init"),
    # fence.mbarrier_init lets the first barrier be relaxed, as in the PTX ISA's own example; the last one must release.
    "a barrier that orders nothing": ("cluster.arrive.release", "cluster.arrive.relaxed", ENDED),
    "a slot is filled while it is read": (
        "wait(at(&s.empty[stage]), phase ^ 1);", "",
        rf"(race|async): .*{BOX}.* (races with|still being)|expects 0 more in this phase"),
    "waits for the wrong phase of a slot": (
        "wait(at(&s.empty[stage]), phase ^ 1);", "wait(at(&s.empty[stage]), phase);", NEVER),
    "a slot is never given back": ("arrive(at(&s.empty[stage]));", "", NEVER),
    "a slot is given back without release": ("arrive.release.cta", "arrive.relaxed.cta", f"race: .*{BOX}"),
    "fewer bytes are expected than come": ('"r"(BM * BK + BN * BK)', '"r"(BN * BK)', NEVER),
    "more bytes are expected than come": ('"r"(BM * BK + BN * BK)', '"r"(BM * BK + BN * BK + 16)', NEVER),
    "all boxes go to one slot": ('at(s.x[stage])), "l"(&x)', 'at(s.x[0])), "l"(&x)', f"(race|async): .*{BOX}"),
    "a slot is read before it is full": (
        "wait(at(&s.full[stage]), phase);", "", r"(race|async|uninitialised): .*`ld\.shared"),
    "waits for the wrong phase of a box": (
        "wait(at(&s.full[stage]), phase);", "wait(at(&s.full[stage]), phase ^ 1);",
        r"(race|async|uninitialised): .*`ld\.shared"),
    "waits without acquire": ("parity.acquire.cluster", "parity.relaxed.cluster", r"race: .*ld\.shared"),
    "registers are not fenced": (
        FENCE, "", r"async: .*mma_async.* no wgmma\.fence"),
    "a register is written behind its fence": (
        FENCE, FENCE + 'asm volatile("shfl.sync.bfly.b32 %0, %0, 0, 31, -1;" : "+r"(d[0]));',
        r"async: .*mma_async.* takes %r\d+, which line \d+, `shfl\..* wrote, and no wgmma\.fence since"),
    "a sum is read while it is computed": (
        COMMIT, COMMIT + 'asm volatile("{ .reg .b32 t; add.u32 t, %0, 1; }" :: "r"(d[0]));',
        r"async: .*add\.u32 t.* reads %r\d+, still in use by line \d+ .*`.*mma_async"),
    "products are not committed": (
        COMMIT, "",
        r"async: .* %r\d+, still in use by line \d+ .*`.*mma_async"),
    "products are not waited for": (
        'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");', "",
        r"async: .* %r\d+, still in use by line \d+ .*`.*mma_async"),
    "the last products are not waited for": (
        "wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 1",
        r"async: .* %r\d+, still in use by line \d+ .*`.*mma_async"),
    "sums are sent over those that are read": (
        "wait(at(&s.taken), round ^ 1);", "", r"race: .*st\.shared::cluster.* write to .*`ld\.shared"),
    "sums are not announced": ("                arrive_there(of_block(at(&s.sent), 0));\n", "", NEVER),
    "sums are not waited for": (
        "                wait(at(&s.sent), round);\n", "", r"race: .*ld\.shared.* read of .*`st\.shared::cluster"),
    "sums are never given back": ("                arrive_there(of_block(at(&s.taken), 1));\n", "", NEVER),
    "sums are announced without release": (
        "arrive.release.cluster.shared", "arrive.relaxed.cluster.shared", r"race: .*ld\.shared.*`st\.shared::cluster"),
    "the copy engine does not see the result": (
        'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "", f"async-dirty: .*{STORE}"),
    "the result leaves before all have written": (
        'asm volatile("bar.sync 1, 256;" ::: "memory");', "", rf"race: .*{STORE}.* read of .*`st\.shared"),
    "the result is not committed": (
        'asm volatile("cp.async.bulk.commit_group;" ::: "memory");', "",
        rf"async: .*st\.shared.* writes .* still being read by line \d+, `{STORE}"),
    "the result is not waited for": (
        'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");', "",
        rf"async: .*st\.shared.* writes .* still being read by line \d+, `{STORE}"),
    "others do not wait until it has left": (
        'asm volatile("bar.sync 1, 256; // the tile has left" ::: "memory");', "",
        rf"race: .*st\.shared.* write to .* `{STORE}"),
    "blocks end while others use their memory": ("    __syncwarp();\n    meet_cluster();", "", ENDED),
    "more registers are taken than there are": (
        "aligned.u32 40", "aligned.u32 64", "65536 registers, more than the 64512"),
}  # fmt: skip


@pytest.mark.default_cases("more registers are taken than there are-late")
@both_modes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found(mistake: str, mode: str) -> None:
    step, instead, pattern = MISTAKES[mistake]
    assert specialised_gemm.SOURCE.count(step) == 1
    findings = findings_or_error(lambda: outcome(specialised_gemm.SOURCE.replace(step, instead), mode)[1])
    assert re.search(pattern, findings), findings or "nothing"
