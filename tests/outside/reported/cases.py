"""Arguments and launch of each kernel in this folder: what somebody has reported in public, made small.

A case's name is its file's stem. `-D FIXED` makes the twin, in most cases the one without the bug.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A launch, and what is said of it: words of the findings, or of the error; empty where it is clean."""

    arguments: dict[str, Any]
    report: str
    block: int = 32
    grid: int = 1
    arch: str | None = None
    shared: tuple[int, int] = (0, 0)  # bytes with the bug, and fixed
    checks: str = "all"
    fixed: str = ""  # what is said of the twin
    entry: str = "k"


def i32(*shape: int) -> np.ndarray:
    return RNG.integers(-50, 50, shape, dtype=np.int32)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 4, shape, dtype=np.uint8)


def halves(nbytes: int) -> np.ndarray:
    return RNG.integers(0, 3, nbytes // 2).astype(np.float16).view(np.uint8)


def n(size: int) -> np.int32:
    return np.int32(size)


MASK = (RNG.random((5, 128)) < 0.5).astype(np.int32)
MASK[[1, 3]] = 0
CASES = {
    "01_broadcast": Case({"x": i32(128), "y": np.zeros(128, np.int32)}, "uninitialised:13 race:8", block=128),
    "02_tile_loop": Case({"x": i32(192), "y": np.zeros(64, np.int32), "n": n(192)}, "race:7", block=64),
    "03_wmma_store": Case(
        {"a": f32(16, 16).astype(np.float16), "b": f32(16, 16).astype(np.float16), "y": np.zeros(256, np.float32)},
        "race:18",
    ),
    "04_block_reduce_reuse": Case({"x": f32(128), "y": np.zeros(128, np.float32)}, "race:4", block=128),
    "05_skip_mask": Case({"mask": MASK, "y": np.zeros(128, np.int32), "tiles": n(5)}, "race:7", block=128),
    "06_divergent_barrier": Case({"x": i32(128), "y": np.zeros(128, np.int32)}, "divergence:8", block=128),
    "07_partial_block_barrier": Case({"x": i32(384), "y": np.zeros(384, np.int32)}, "divergence:14", block=384),
    "08_named_barrier_count": Case(
        {"x": i32(256), "y": np.zeros(256, np.int32)},
        "12: `bar.sync 1, 256`: .* waits for 256 threads of its block at barrier 1",
        block=256,
    ),
    "09_arrive_twice": Case({"x": i32(256), "y": np.zeros(256, np.int32), "tiles": n(4)}, "race:10", block=128),
    "11_ring_parity": Case(
        {"x": i32(6, 128), "y": np.zeros(128, np.int32), "n": n(6)},
        "22: .* waits for phase 2 of the mbarrier",
        block=128,
        arch="sm_90",
    ),
    "12_wgmma_shared_operand": Case(
        {"a": u8(3 * 2 * 128 * 16), "b": u8(3 * 16 * 16), "y": np.zeros(1024, np.int32), "n": n(3)},
        "race:10",
        block=256,
        arch="sm_90a",
    ),
    "13_release_before_wgmma_wait": Case(
        {"a": u8(4 * 128 * 16), "b": u8(4 * 16 * 16), "y": np.zeros(512, np.int32), "n": n(4)},
        "async:7 async:7",
        block=256,
        arch="sm_90a",
    ),
    "14_wait_behind_use": Case(
        {"a": i32(128), "b": i32(128), "y": np.zeros(128, np.int32)}, "async:19", block=128, arch="sm_90"
    ),
    "15_cluster_exit": Case({"x": i32(128), "y": np.zeros(128, np.int32)}, "race:10", block=64, grid=2, arch="sm_90"),
    "16_remote_init": Case({"x": i32(32), "y": np.zeros(64, np.int32)}, "race:15", grid=2, arch="sm_90"),
    "17_local_arrive_remote": Case(
        {"x": i32(32), "y": np.zeros(64, np.int32)},
        "14: .* the address of byte 0 in block 1 of the cluster",
        grid=2,
        arch="sm_90",
    ),
    "18_semaphore": Case(
        {"x": i32(3, 64), "y": np.zeros(64, np.int32), "lock": np.zeros(1, np.int32)},
        "race:7",
        block=64,
        grid=3,
        fixed="race:7",
    ),
    "19_volatile_flag": Case(
        {"data": np.zeros(64, np.int32), "flag": np.zeros(1, np.int32), "y": np.zeros(64, np.int32)},
        "race:17",
        block=64,
        grid=2,
        fixed="race:17",
    ),
    "21_shuffle_mask": Case(
        {"x": f32(64), "y": np.zeros(64, np.float32)}, "10: .* the lane is not in its own member mask", block=64
    ),
    "22_shuffle_early_return": Case(
        {"x": f32(64), "y": np.zeros(64, np.float32), "n": n(40)}, "uninitialised:11", block=64
    ),
    "20_index_overflow": Case(
        {"x": np.zeros(1 << 16, np.int8), "y": np.zeros(32, np.int32), "stride": n(1 << 16), "row": n(1 << 15)},
        r"8: .* are out of bounds(.|\n)*narrow: .*6: .* 32768 \* 65536 = 2147483648",
        checks="narrow",
        fixed="8: .* are out of bounds",
    ),
    "23_misaligned_rows": Case(
        {"x": RNG.integers(0, 60000, (4, 64)).astype(np.uint16), "y": np.zeros(4 * 46, np.uint16), "head": n(46)},
        "8: .* is not a multiple of the 16 bytes",
        grid=4,
    ),
    "24_misaligned_shared": Case(
        {"x": f32(192), "y": np.zeros(192, np.float32)},
        "12: .* address 0x418 is not a multiple of the 16 bytes",
        block=192,
        shared=(4096, 4096),
    ),
    "25_half_sum": Case(
        {"x": (f32(4 * 32) * 100 + 3000).astype(np.float32), "y": np.zeros(4, np.float16)},
        "overflow:10",
        grid=4,
        checks="all,float",
    ),
    "26_int8_wrap": Case(
        {"x": np.linspace(-200, 200, 64).astype(np.float32), "y": np.zeros(64, np.int8), "inv": np.float32(1)},
        "narrow:8",
        block=64,
        checks="all,narrow",
    ),
    "27_scales_partial_tile": Case(
        {"w": RNG.integers(-8, 8, 100).astype(np.int8), "scale": f32(100), "y": np.zeros(100, np.float32), "n": n(100)},
        "8: .* argument 1 \\(scale\\), 4 bytes past its end",
        block=64,
        grid=2,
    ),
    "28_shared_too_small": Case(
        {"x": i32(128), "y": np.zeros(128, np.int32)}, "6: .*window of 512 bytes", block=128, shared=(512, 1024)
    ),
    "29_index_minus_one": Case(
        {"problem": i32(6), "y": np.zeros(2, np.int32), "tiles": n(2)},
        "7: .* 8 bytes before argument 0 \\(problem\\)",
        grid=4,
    ),
    "31_mailbox": Case(
        {"x": i32(5), "y": np.zeros(160, np.int32), "n": n(5)},
        "called from line 13.* waits for phase 5 of the mbarrier",
        block=64,
        arch="sm_90",
    ),
    "32_uninit_topk": Case({"x": f32(32), "y": np.zeros(1, np.float32), "topk": n(6)}, "uninitialised:12", block=128),
    "33_setmaxnreg": Case(
        {"x": i32(384), "y": np.zeros(384, np.int32)},
        "13: .* have 71680 registers, more than the 64512",
        block=384,
        arch="sm_90a",
    ),
    "34_setmaxnreg_two_blocks": Case(
        {"x": i32(256), "y": np.zeros(256, np.int32)},
        "13: .* have 33792 registers, more than the 32768",
        block=256,
        arch="sm_90a",
    ),
    "35_expect_tx": Case({"x": i32(256), "y": np.zeros(128, np.int32)}, "async:21 async:14", block=128, arch="sm_90"),
    "36_store_drain": Case(
        {"x": i32(4 * 128), "y": np.zeros(4 * 128, np.int32), "n": n(4)}, "async:17 async:20", block=128, arch="sm_90"
    ),
    "37_cp_async_order": Case({"x": i32(6 * 128), "y": np.zeros(32, np.int32), "n": n(6)}, "async:17", arch="sm_80"),
    "38_exit_before_store": Case({"x": i32(128), "y": np.zeros(128, np.int32)}, "async:10", block=128, arch="sm_90"),
    "39_ldmatrix_align": Case(
        {"x": RNG.integers(0, 60000, 64).astype(np.uint16), "y": np.zeros(32, np.uint32)},
        "14: .* is not a multiple of the 16 bytes",
        arch="sm_80",
    ),
    "40_atomic_scope": Case(
        {"x": RNG.integers(0, 4, (3, 64)).astype(np.int32), "count": np.zeros(4, np.int32)}, "race:6", block=64, grid=3
    ),
    "41_wgmma_fence": Case(
        {"a": u8(128 * 16), "b": u8(256), "y": np.zeros(512, np.int32)}, "async:16", block=128, arch="sm_90a"
    ),
    "18b_semaphore_letter": Case(
        {"x": i32(3, 64), "y": np.zeros(64, np.int32), "lock": np.zeros(1, np.int32)}, "race:9", block=64, grid=3
    ),
    "19b_volatile_letter": Case(
        {"data": np.zeros(64, np.int32), "flag": np.zeros(1, np.int32), "y": np.zeros(64, np.int32)},
        "race:20",
        block=64,
        grid=2,
    ),
    "41b_wgmma_fence_operand": Case(
        {"a": u8(128 * 16), "b": u8(256), "y": np.zeros(512, np.int32)}, "async:17", block=128, arch="sm_90a"
    ),
    "43_zero_acc": Case(
        {"a": halves(128 * 16), "b": halves(256), "y": np.zeros(512, np.float32)}, "", block=128, arch="sm_90a"
    ),
    "45_last_block": Case(
        {
            "x": i32(4 * 32),
            "partial": np.zeros(4, np.int32),
            "ticket": np.zeros(1, np.uint32),
            "y": np.zeros(1, np.int32),
        },
        "race:19",
        grid=4,
    ),
    "46_nc_load": Case({"a": i32(64), "y": np.zeros(64, np.int32)}, "race:9", block=64),
    "47_shared_overrun": Case({"x": i32(64), "y": np.zeros(64, np.int32), "n": n(3)}, "overrun:10", block=64),
    "48_bulk_misaligned": Case(
        {"x": i32(4 * 72), "y": np.zeros(4 * 72, np.int32)},
        "16: .* a multiple of 16 bytes, not 280",
        block=128,
        grid=4,
        arch="sm_90",
    ),
    "49_local_uninit": Case(
        {"at": np.array([0, 1, 2, 4, 5, 6, 7], np.int32), "y": np.zeros(32, np.float32), "n": n(7)}, "uninitialised:9"
    ),
    "50_grid_barrier": Case(
        {"a": np.zeros(40 * 32, np.int32), "count": np.zeros(1, np.uint32), "y": np.zeros(40 * 32, np.int32)},
        "race:15",
        grid=40,
    ),
    "51_mma_f16_overflow": Case(
        {
            "a": (np.abs(f32(256)) * 100).astype(np.float16).view(np.uint32),
            "b": (np.abs(f32(128)) * 100).astype(np.float16).view(np.uint32),
            "y": np.zeros(64, np.uint32),
            "scale": np.float32(1),
        },
        "overflow:12",
        checks="all,float",
    ),
    "52_too_many_arrivals": Case(
        {"x": i32(32), "y": np.zeros(32, np.int32)},
        "17: .* 32 threads that arrived at once, in line 15, .*, completed 32 phases",
        block=64,
        arch="sm_90",
    ),
    "53_syncwarp_mask": Case({"x": i32(32), "y": np.zeros(32, np.int32)}, "race:11"),
    "54_volatile_warp": Case({"x": i32(32), "y": np.zeros(1, np.int32)}, "race:8 race:12"),
    "55_dsmem_no_sync": Case({"x": i32(128), "y": np.zeros(128, np.int32)}, "race:15", block=64, grid=2, arch="sm_90"),
    "56_cluster_divergent": Case(
        {"x": i32(64), "y": np.zeros(128, np.int32)},
        "11: `barrier.cluster.wait`: .* waits for all threads of its cluster",
        block=64,
        grid=2,
        arch="sm_90",
    ),
    "50b_acquire_side": Case(
        {"data": np.zeros(1, np.int32), "flag": np.zeros(1, np.uint32), "y": np.zeros(1, np.int32)}, "race:13", grid=2
    ),
    "57_arrive_ring": Case({"x": i32(256), "y": np.zeros(256, np.int32), "tiles": n(4)}, "race:8 race:9", block=128),
    "58_spin_forever": Case({"flag": np.zeros(1, np.int32), "y": np.zeros(32, np.int32)}, "9: .* spins", grid=2),
    "59_static_divergent_bar": Case({"x": i32(64), "y": np.zeros(64, np.int32)}, "divergence:9", block=64),
    "60_warp_collectives": Case({"n": RNG.integers(1, 6, 32).astype(np.int32), "y": np.zeros(32, np.int32)}, ""),
    "61_redux_mask": Case(
        {"x": RNG.integers(0, 9, 32).astype(np.uint32), "y": np.zeros(32, np.uint32)}, "", arch="sm_80"
    ),
    "50c_acquire_bar": Case(
        {"data": np.zeros(32, np.int32), "flag": np.zeros(1, np.uint32), "y": np.zeros(32, np.int32)}, "race:20", grid=2
    ),
    "67_lock_reset": Case(
        {"data": np.zeros(1, np.int32), "lock": np.zeros(1, np.int32), "y": np.zeros(1, np.int32)}, "", grid=2
    ),
    "68_loc": Case({"x": np.zeros(64, np.int32), "y": np.zeros(64, np.int32)}, "race:5", block=64, fixed="race:5"),
    "69_template": Case({"x": i32(32), "y": np.zeros(32, np.int32)}, "", entry="k<3>"),
    "69b": Case({"x": i32(32), "y": np.zeros(32, np.int32)}, ""),
    "p1_param_address": Case(
        {"a": np.arange(32, dtype=np.int32), "b": -np.arange(32, dtype=np.int32), "y": np.zeros(32, np.int32)}, ""
    ),
    "p2_f32x2": Case(
        {"a": np.arange(64, dtype=np.float32), "b": np.ones(64, np.float32), "y": np.zeros(64, np.float32)}, ""
    ),
    "p3_wgmma_unpack": Case(
        {
            "a": RNG.integers(0, 3, 1024).astype(np.float16).view(np.uint8),
            "b": RNG.integers(0, 3, 128).astype(np.float16).view(np.uint8),
            "y": np.zeros(512, np.uint16),
        },
        "",
        block=128,
        arch="sm_90a",
    ),
    "63_tcgen05": Case(
        {"y": np.zeros(64, np.uint32)},
        "4: .* tensor memory of sm_100 is not emulated",
        block=64,
        arch="sm_100a",
        fixed="4: .* tensor memory of sm_100 is not emulated",
    ),
    "65_blockscaled": Case(
        {"x": np.zeros(6, np.uint32), "y": np.zeros(128, np.float32)},
        "5: .* block-scaled and mixed mma .* are not emulated",
        arch="sm_120a",
        fixed="5: .* block-scaled and mixed mma .* are not emulated",
    ),
    "66_clc": Case(
        {"y": np.zeros(64, np.uint32)},
        "8: .* cluster launch control of sm_100 is not emulated",
        arch="sm_100a",
        fixed="8: .* cluster launch control of sm_100 is not emulated",
    ),
}
