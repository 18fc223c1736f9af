"""The real GEMM kernels on every backend: accumulators equal to the reference, bit for bit."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab import emulator, kernels, quant
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm.common import GROUPS
from ptxlab.runtime import Kernel, run_spec
from tests import strategies

BACKENDS = ("emulator", pytest.param("gpu", marks=pytest.mark.gpu))
QOQ, (SOURCE, *_) = kernels.find("gemm_w4a8_qoq_sm80")


@st.composite
def problems(draw: st.DrawFn, tokens: int, rows: int, groups: int) -> dict[str, Any]:
    """Weights at the limits of a byte, activations at -128, -127 and 127, of any shape that the contract has."""
    g = draw(st.sampled_from(GROUPS))
    M, N, K = draw(st.integers(1, tokens)), 8 * draw(st.integers(1, rows // 8)), g * draw(st.integers(1, groups))
    scale = draw(hnp.arrays(np.uint8, (N, K // g), elements=strategies.near_edges((1, 15, 16), 1, 16)))
    zero = np.minimum(draw(hnp.arrays(np.uint8, scale.shape, elements=st.integers(0, 15))), 127 // scale)
    most = np.repeat(zero + 127 // scale, g, axis=1)
    q4 = np.minimum(draw(strategies.q4_matrix(N, K)), most)
    edges = strategies.near_edges((-128, -127, 127), -128, 127)
    weight = quant.QoQWeight(
        q4=q4, group_scale=scale, zero=zero, channel_scale=np.ones(N, np.float32), protective_range=119
    )
    return {"weight": weight, "x": draw(strategies.filled(np.int8, (M, K), edges))}


def accumulators(logical: dict[str, Any], backend: str, **options: Any) -> np.ndarray:
    checks = ("race", "init", "async") if backend == "emulator" else ()
    outcome = run_spec(QOQ, SOURCE, QOQ.pack(logical), backend=backend, checks=checks, **options)
    assert outcome.findings == ()
    return outcome.outputs["y"]


@given(logical=problems(tokens=40, rows=72, groups=3), mode=st.sampled_from(emulator.MODES))
@settings(max_examples=25)
def test_accumulators_are_exact_in_the_emulator(logical: dict[str, Any], mode: str) -> None:
    assert np.array_equal(accumulators(logical, "emulator", mode=mode), QOQ.reference(**logical))


@pytest.mark.gpu
@given(logical=problems(tokens=300, rows=320, groups=12))
def test_accumulators_are_exact_on_the_gpu(logical: dict[str, Any]) -> None:
    first = accumulators(logical, "gpu")
    assert np.array_equal(first, QOQ.reference(**logical))
    assert np.array_equal(first, accumulators(logical, "gpu")), "two runs, the same bits"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("M", "N"), [(1, 8), (16, 8200), (33, 8200), (64, 64), (65, 72), (300, 136)])
def test_every_tile_shape_is_exact(M: int, N: int, backend: str) -> None:
    """One problem for each branch of the rule that chooses the tile, with M and N that leave the last tile ragged."""
    logical = QOQ.example(np.random.default_rng(M), M=M, N=N, K=160 if N < 1000 else 64, g=32)
    assert np.array_equal(accumulators(logical, backend), QOQ.reference(**logical))


def test_the_extremes_add_up_without_a_rounding() -> None:
    """Every product at its largest magnitude: -128 times 127, over all of K, in float64 exact and in int32 too."""
    K = 4096
    ones = np.ones((8, K // 128), np.uint8)
    weight = quant.QoQWeight(
        q4=np.full((8, K), 15, np.uint8),
        group_scale=ones * 16,
        zero=ones * 8,
        channel_scale=np.ones(8, np.float32),
        protective_range=127,
    )
    x = np.full((3, K), -128, np.int8)
    expected = np.full((3, 8), -128 * 7 * 16 * K, np.int32)
    assert np.array_equal(accumulators({"weight": weight, "x": x}, "emulator"), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 96), np.int8)}, r"gemm_w4a8_qoq_sm80: .*K"),
        ({"x": np.zeros((2, 128), np.uint8)}, "gemm_w4a8_qoq_sm80: x: dtype int8"),
        ({"w_scale": np.zeros(7, np.float32)}, r"N % 8 == 0|shape"),
        ({"x_scale": np.zeros(3, np.float32)}, r"x_scale: shape \[M\]"),
    ],
)
def test_bad_input_is_refused_before_any_launch(change: dict[str, np.ndarray], message: str) -> None:
    inputs = QOQ.pack(QOQ.example(np.random.default_rng(0), M=2, N=8, K=128, g=32))
    with pytest.raises(ArgumentError, match=message):
        run_spec(QOQ, SOURCE, {**inputs, **change}, backend="emulator")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("variant", "dtype"), [(0, np.float16), (1, ml_dtypes.bfloat16), (2, np.float32)])
def test_scaled_outputs_are_the_epilogue_in_float32(variant: int, dtype: Any, backend: str) -> None:
    """acc * x_scale * w_scale + bias, each operation rounded to float32, then once to the output: the same bits."""
    rng = np.random.default_rng(variant)
    sizes = {"M": 5, "N": 40, "K": 256, "g": 128}
    logical = QOQ.example(rng, **sizes)
    inputs = QOQ.pack(logical)
    inputs["x_scale"] = rng.uniform(1e-3, 1e-2, 5).astype(np.float32)
    inputs["bias"] = rng.standard_normal(40, dtype=np.float32)
    config = {**QOQ.config_for(sizes), "OUT": variant}
    y = np.zeros((5, 40), dtype)
    bits = y.view(f"u{y.itemsize}")  # what the kernel is given: NumPy knows no bfloat16
    arrays = {**inputs, "y": bits}
    args = QOQ.arguments(arrays, sizes)
    Kernel.of(QOQ, SOURCE, config).launch(args, QOQ.launch({**sizes, **config}), backend=backend)
    accumulators = QOQ.reference(**logical).astype(np.float32)
    scaled = accumulators * inputs["x_scale"][:, None] * inputs["w_scale"] + inputs["bias"]
    assert np.array_equal(bits, scaled.astype(dtype).view(bits.dtype))
    assert len(np.unique(bits)) > 100
