"""The suite `gemm` without a GPU: its inputs, its checks and its rows, around launches in the emulator."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from ptxlab.bench.ceilings import Ceilings
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.lowbit.bench import gemm
from ptxlab.lowbit.bench.gemm import problem, steps
from ptxlab.lowbit.bench.shapes import LAYERS, TOKENS, Layer
from ptxlab.lowbit.kernels.gemm import STEPS
from ptxlab.lowbit.quant.tiled import BLOCK_K, BLOCK_ROWS

SMALL = Layer("test", "small", N=128, K=256)
NAMES = [spec.name for spec in STEPS]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_small_layer(name: str, emulated_gpu: pytest.MonkeyPatch) -> None:
    emulated_gpu.setattr(steps, "TOKENS", (3, 17))
    cublas = {M: {"cublas_fp8": 8.0} for M in (3, 17)}
    rows = list(steps.layer_rows(SMALL, problem.steps_of([name]), cublas, lambda nbytes: 4.0, lambda _: None))
    assert [row.sizes["M"] for row in rows] == [3, 17]
    row = rows[1]
    assert (row.kernel, row.measure, row.sizes["N"], row.sizes["K"]) == (name, "gemm", 128, 256)
    assert (row.floor_us, row.limit, row.fraction, row.time_us) == (4.0, "stream", 0.4, 10.0)
    assert row.peers == {"cublas_fp8": 8.0} and row.variant["OUT"] == 0 and row.config == {}
    assert row.operations == 2 * 17 * 128 * 256 and row.rate == pytest.approx(row.operations / 10e6)
    assert row.checked == f"all {17 * 128} results of 2 launches equal to the reference, bit for bit"
    assert row.activations == "row_major"


def test_a_wrong_result_of_a_timed_launch_is_found(emulated_gpu: pytest.MonkeyPatch) -> None:
    (step,) = problem.steps_of([NAMES[0]])
    logical = problem.problem(step.spec, SMALL, 3)
    timed = problem.launches(step, problem.sizes_at(step.spec, SMALL, 3), logical)
    right = problem.expected_bits(step.spec, logical)
    for call in timed.calls:
        call()
    assert "bit for bit" in timed.check(right)
    timed.outputs[1].view(np.uint16)[2, 127] += 1
    with pytest.raises(BenchmarkError, match="the timed launches gave wrong results at"):
        timed.check(right)


def test_what_is_no_step_is_no_suite(emulated_gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"a kernel of the GEMM suite that this GPU runs \(got gemm_tile_lqq_sm80"):
        gemm.rows(["gemm_tile_lqq_sm80"], Ceilings(4.6, 4.2), lambda _: None)


def test_packed_bytes_are_those_of_the_weight_and_its_constants() -> None:
    spec = STEPS[0]
    assert (
        problem.packed_bytes(spec, problem.sizes_at(spec, LAYERS[1], 16)) == 4096 * 4096 // 2 + 2 * 4096 * 4096 // 128
    )


@pytest.mark.parametrize("spec", STEPS, ids=lambda s: s.name)
def test_every_size_of_the_suite_obeys_the_rules(spec: Any) -> None:
    for layer in LAYERS:
        for M in TOKENS:
            sizes = problem.sizes_at(spec, layer, M)
            spec.check_sizes(sizes)
            assert spec.launch({**sizes, **problem.variant(spec, sizes)}).shared_bytes <= 227 << 10


def test_blocks_are_no_multiple_of_a_tile() -> None:
    assert BLOCK_ROWS % 16 and BLOCK_K // 128 % 2


def test_layers_are_distinct_and_divisible() -> None:
    assert len({dataclasses.astuple(layer)[2:] for layer in LAYERS}) == len(LAYERS) <= 12
    assert all(layer.N % 8 == 0 and layer.K % 128 == 0 for layer in LAYERS)
