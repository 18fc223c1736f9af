"""Occupancy: by hand, by its definition, and as CUDA counts it on a GPU."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.hardware.occupancy import Occupancy, occupancy

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")


@pytest.mark.parametrize(
    ("kernel", "right"),
    [
        (("sm_90a", 384, 168, 200_000), Occupancy(1, 12, 64, ("registers", "shared memory"))),
        (("sm_90a", 128, 32), Occupancy(16, 64, 64, ("registers", "warps"))),
        (("sm_90a", 32, 16), Occupancy(32, 32, 64, ("blocks",))),
        (("sm_90a", 256, 32, 227 << 10), Occupancy(1, 8, 64, ("shared memory",))),
        (("sm_90a", 256, 32, (227 << 10) + 1), Occupancy(0, 0, 64, ("shared memory",))),
        (("sm_90a", 1024, 72), Occupancy(0, 0, 64, ("registers",))),
        (("sm_89", 128, 255), Occupancy(2, 8, 48, ("registers",))),
        (("sm_86", 96, 40), Occupancy(16, 48, 48, ("registers", "warps", "blocks"))),
        (("sm_75", 64, 32, 8192), Occupancy(8, 16, 32, ("shared memory",))),
    ],
)
def test_by_hand(kernel: tuple[Any, ...], right: Occupancy) -> None:
    assert occupancy(*kernel) == right


@given(st.sampled_from(ARCHES), st.integers(1, 1024), st.integers(1, 255), st.integers(0, 100_000))
def test_it_fits_and_one_more_would_not(arch: str, threads: int, registers: int, shared: int) -> None:
    """An SM never holds more when a resource grows, and some limit is always named."""
    resident = occupancy(arch, threads, registers, shared)
    assert resident.warps == resident.blocks * -(-threads // 32) <= resident.most_warps and resident.limits
    assert resident.warps * 32 * registers <= 65536
    for larger in ((threads, min(255, registers + 8), shared), (threads, registers, shared + 1024)):
        assert occupancy(arch, *larger).blocks <= resident.blocks


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (("sm_70", 32, 32), "arch: must be one of sm_75, sm_80"),
        (("", 32, 32), "arch: must be one of"),
        (("sm_80", 0, 32), "threads: must be an integer, 1 or more"),
        (("sm_80", 1025, 32), r"threads: must be at most 1024 \(got 1025\)"),
        (("sm_80", 32, 256), r"registers: must be at most 255 \(got 256\)"),
        (("sm_80", 32, 32, -1), "shared: must be an integer, 0 or more"),
    ],
)
def test_what_is_no_kernel_is_refused(kernel: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        occupancy(*kernel)


def test_sass_shows_it(cli: Any) -> None:
    code, out, _ = cli("sass", "dequant_lqq.ptx", "--block", "16,16", "--shared", 100_000)
    assert code == 0 and "An SM holds at once, in blocks of 256 threads" in out and "shared memory" in out
    output = json.loads(cli("sass", "dequant_lqq.ptx", "--block", 256, "--json")[1])
    right = occupancy("sm_90a", 256, output["registers"])
    assert output["occupancy"] == {**vars(right), "limits": [*right.limits]}
    for options, message in (
        (("--shared", 1), "--shared needs --block"),
        (("--block", "1,2,3,4"), "block: one to three positive integers"),
        (("--block", "x"), "--block expects one to three integers, x[,y[,z]], got x"),
        (("--block", 2048), "threads: must be at most 1024 (got 2048)"),
        (("--record", "--block", 32), "--block cannot be combined with --record"),
    ):
        code, _, err = cli("sass", "dequant_lqq.ptx", *options)
        assert code == 2 and message in err


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 160, 256, 384, 1000, 1024])
@pytest.mark.parametrize("shared", [0, 5000, 40_000, 100_000])
@pytest.mark.parametrize("live", [4, 40, 100])
def test_cuda_counts_the_same(cupy: Any, live: int, shared: int, threads: int) -> None:
    """The kernels keep few and many values."""
    from cuda.bindings import driver

    values = "; ".join(f"float v{i} = x[{i} * n]" for i in range(live))
    total = " + ".join(f"v{i} * v{(i * 7 + 1) % live}" for i in range(live))
    text = f'extern "C" __global__ void keep(float* x, int n) {{ {values}; __syncthreads(); x[n] = {total}; }}'
    kernel = cupy.RawKernel(text, "keep")
    kernel.max_dynamic_shared_size_bytes = shared
    status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        driver.CUfunction(kernel.kernel.ptr), threads, shared
    )
    assert status == driver.CUresult.CUDA_SUCCESS
    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    assert occupancy(arch, threads, kernel.num_regs, kernel.shared_size_bytes + shared).blocks == blocks
