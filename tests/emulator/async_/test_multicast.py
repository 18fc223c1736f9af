"""A ring that the blocks of a cluster fill for each other: boxes by multicast, and slots given back across blocks."""

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.emulator.sync.mbarrier import MBarrier
from ptxlab.errors import Deadlock
from ptxlab.lowbit.layout import TensorMap
from tests.support.axes import both_modes, on_every_backend

seeds = pytest.mark.parametrize("seed", range(3))
STEPS, BLOCKS = 5, 4
MATRIX = np.random.default_rng(0).integers(0, 2**31, (16 * STEPS, 32), dtype=np.uint32)
# Each block of two brings 8 rows of every 16 for both. Block 0 expects a stage only once block 1 has asked for its
# half, which may have come by then: block 0's mbarrier has seen more bytes than it was told of.
SOURCE = r"""
#include "cluster.cuh"
using namespace ptxlab;
constexpr int STAGES = 2, BOX = 1024;
__device__ void arrive_at(u64* barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(address_in_block(barrier, rank))
                 : "memory");
}
__device__ void wait_for(u64* barrier, unsigned parity) {
    asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;"
                 "@!done bra AGAIN; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64)
ring(const __grid_constant__ ptxlab::TensorMap map, unsigned* out, int steps) {
    __shared__ __align__(1024) unsigned char slots[STAGES][2 * BOX];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES], asked;
    const unsigned rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 2);
        mbarrier_init(&asked, 1);
        fence_mbarrier_init();
    }
    cluster_arrive(), cluster_wait();
    Slot<STAGES> slot;
    if (threadIdx.x == 0) {
        for (int step = 0; step < steps; ++step, slot.advance()) {
            wait_for(&empty[slot.index], slot.parity ^ 1);
            if (rank == 0) wait_for(&asked, step & 1);
            mbarrier_arrive_expect(&full[slot.index], 2 * BOX);
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                         ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                         :: "r"(shared_address(slots[slot.index]) + rank * BOX), "l"(&map), "r"(0),
                            "r"(step * 16 + rank * 8), "r"(shared_address(&full[slot.index])), "h"((short)3)
                         : "memory");
            if (rank == 1) arrive_at(&asked, 0);
        }
    } else if (threadIdx.x >= 32) {
        unsigned sum = 0;
        for (int step = 0; step < steps; ++step, slot.advance()) {
            wait_for(&full[slot.index], slot.parity);
            const unsigned* words = reinterpret_cast<const unsigned*>(slots[slot.index]) + threadIdx.x - 32;
            for (int i = 0; i < 16; ++i) sum = sum * 3 + words[i * 32];
            __syncwarp();
            if (threadIdx.x == 32) for (int r = 0; r < 2; ++r) arrive_at(&empty[slot.index], r);
        }
        out[blockIdx.x * 32 + threadIdx.x - 32] = sum;
    }
    __syncwarp();
    cluster_arrive(), cluster_wait();
}
"""


def outcome(source: str = SOURCE, **options) -> tuple[bool, list[str]]:
    """Run the ring; return whether the result is right, and the findings."""
    out = np.zeros((BLOCKS, 32), np.uint32)
    kernel = ptxlab.load(source, arch="sm_90a")
    findings = kernel(TensorMap(MATRIX, (8, 32), 0), out, np.int32(STEPS), grid=BLOCKS, block=64, **options).findings
    expected = np.zeros(32, np.uint32)
    for row in MATRIX:
        expected = expected * np.uint32(3) + row
    return bool((out == expected).all()), [str(finding) for finding in findings]


@on_every_backend
def test_a_ring_with_multicast_has_the_right_result(backend: str) -> None:
    assert outcome(backend=backend) == (True, [])


@pytest.mark.smoke
@both_modes
@seeds
def test_a_ring_with_multicast_has_no_findings(mode: str, seed: int) -> None:
    assert outcome(backend="emulator", checks=emulator.CHECKS, mode=mode, seed=seed) == (True, [])


@pytest.mark.default_cases("one reader-1-early")
@both_modes
@seeds
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mbarrier_init(&empty[s], 2)", "mbarrier_init(&empty[s], 1)"),  # the other block's reader may not be done
        ("arrive.release.cluster", "arrive.relaxed.cluster"),
        ("try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster"),
        ("            __syncwarp();\n            if (threadIdx.x == 32)", "            if (threadIdx.x == 32)"),
    ],
    ids=["one reader", "relaxed arrival", "relaxed wait", "one lane's arrival"],
)
def test_a_missing_step_of_the_ring_is_found(old: str, new: str, mode: str, seed: int) -> None:
    assert SOURCE.count(old) == 1
    source = SOURCE.replace(old, new)
    if "[s], 1" in new:
        source = source.replace("for (int r = 0; r < 2; ++r) arrive_at(&empty[slot.index], r)",
                                "arrive_at(&empty[slot.index], rank)")  # fmt: skip
    _, findings = outcome(source, backend="emulator", checks=["race", "async"], mode=mode, seed=seed)
    assert any(line.startswith(("race: ", "async: ")) for line in findings)


def test_bytes_may_come_before_they_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    byte_counts, expect = set(), MBarrier.expect

    def record_bytes(barrier: MBarrier, size: int) -> None:
        expect(barrier, size)
        byte_counts.add(barrier.bytes)

    monkeypatch.setattr(MBarrier, "expect", record_bytes)
    assert outcome(backend="emulator", checks=emulator.CHECKS) == (True, [])
    assert byte_counts == {-1024, 0, 1024, 2048}


@pytest.mark.default_cases("0-late", "1-late")
@both_modes
@seeds
def test_bytes_that_nobody_expects_are_found(mode: str, seed: int) -> None:
    source = SOURCE.replace("&full[slot.index], 2 * BOX", "&full[slot.index], BOX")
    try:
        findings = outcome(source, backend="emulator", checks=["async"], mode=mode, seed=seed)[1]
        assert any("still being written" in line for line in findings)
    except Deadlock as error:
        assert "bytes came that nobody expected" in str(error)


@both_modes
def test_bytes_that_do_not_come_are_found(mode: str) -> None:
    source = SOURCE.replace("&full[slot.index], 2 * BOX", "&full[slot.index], 3 * BOX")
    with pytest.raises(Deadlock, match="1024 bytes"):
        outcome(source, backend="emulator", mode=mode)
