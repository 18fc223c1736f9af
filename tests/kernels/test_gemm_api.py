"""`gemm_w4a8` without a GPU: on host arrays in the emulator."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import quant
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm import ladder
from ptxlab.kernels.gemm.common import DTYPES
from tests.support.gemm_calls import (
    BIAS,
    CHANNEL,
    GROUPED,
    LQQ,
    RNG,
    WEIGHTS,
    X_SCALE,
    K,
    M,
    N,
    W,
    X,
    expected,
)


@pytest.mark.parametrize("scheme", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_on_the_host(scheme: str, dtype: str) -> None:
    y = ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS[scheme], bias=BIAS, out_dtype=dtype, backend="emulator")
    wanted = expected(scheme, dtype, BIAS)
    assert y.dtype == wanted.dtype and np.array_equal(y, wanted)


def test_accumulators_need_no_scale() -> None:
    y = ptxlab.gemm_w4a8(X, weight=WEIGHTS["qoq"], out_dtype="int32", backend="emulator")
    assert np.array_equal(y, expected("qoq", "int32"))


def test_quantised_activations_bring_scale_and_sum() -> None:
    activations = ptxlab.quantize_activations(RNG.standard_normal((M, K), dtype=np.float32), backend="emulator")
    for weight in WEIGHTS.values():
        y = ptxlab.gemm_w4a8(activations, weight=weight, backend="emulator")
        given = ptxlab.gemm_w4a8(
            activations.x_q, activations.scale, weight, x_sum=activations.token_sum, backend="emulator"
        )
        assert np.array_equal(y, given)


@pytest.mark.parametrize("rows", [8, 16])
def test_lqq_weights_take_activations_in_tiles(rows: int) -> None:
    floats = RNG.standard_normal((M, K), dtype=np.float32)
    tiles = ptxlab.quantize_activations(floats, layout="tiles", rows=rows, backend="emulator")
    plain = ptxlab.quantize_activations(floats, backend="emulator")
    y = ptxlab.gemm_w4a8(tiles, weight=WEIGHTS["lqq"], bias=BIAS, backend="emulator")
    assert np.array_equal(y, ptxlab.gemm_w4a8(plain, weight=WEIGHTS["lqq"], bias=BIAS, backend="emulator"))


def test_a_kernel_for_two_orders_is_named_once() -> None:
    fragments = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="fragment", backend="emulator")
    with pytest.raises(ArgumentError, match=r"x_q: must be row_major or tiles for [^()]* \(got fragment\)") as raised:
        ptxlab.gemm_w4a8(fragments, weight=WEIGHTS["lqq"], backend="emulator")
    assert str(raised.value).count("gemm_w4a8_lqq_imfp_sm90") == 1


def test_tiles_that_no_wgmma_has_are_refused() -> None:
    tiles = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="tiles", rows=24, backend="emulator")
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_lqq_imfp_sm90: rows in \(8, 16, 32, 64, 128, 256\)"):
        ptxlab.gemm_w4a8(tiles, weight=WEIGHTS["lqq"], backend="emulator")


def test_out_is_written_and_returned_and_decides_the_dtype() -> None:
    out = np.zeros((M, N), np.float32)
    assert ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS["qoq"], out=out, backend="emulator") is out
    assert np.array_equal(out, expected("qoq", "float32"))


STEPS = list(dict.fromkeys((step.spec.name, step.scheme, step.packing) for step in ladder.LADDER))


@pytest.mark.parametrize(("kernel", "scheme", "packing"), STEPS, ids=["-".join(step) for step in STEPS])
def test_every_step_by_name_and_of_no_tokens(kernel: str, scheme: str, packing: str) -> None:
    weight = ptxlab.pack({"qoq": GROUPED, "lqq": LQQ, "qoq_channel": CHANNEL}[scheme], packing)
    y = ptxlab.gemm_w4a8(X, X_SCALE, weight, bias=BIAS, kernel=kernel, backend="emulator")
    assert np.array_equal(y, expected(scheme, bias=BIAS))
    y = ptxlab.gemm_w4a8(X[:0], X_SCALE[:0], weight, kernel=kernel, backend="emulator")
    assert y.shape == (0, N) and y.dtype == np.float16


def test_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    x, scale = torch.from_numpy(X), torch.from_numpy(X_SCALE)
    y = ptxlab.gemm_w4a8(x, scale, WEIGHTS["qoq_channel"], out_dtype="bfloat16", backend="emulator")
    assert y.dtype == torch.bfloat16
    assert np.array_equal(y.view(torch.uint16).numpy(), expected("qoq_channel", "bfloat16"))


def test_the_accumulators_kernel_reads_no_scale() -> None:
    """On the GPU it is given a null pointer then; in the emulator that faults if it is read."""
    spec, (source, *_) = ptxlab.find("gemm_w4a8_qoq_sm80")
    logical = spec.example(np.random.default_rng(0), M=2, N=8, K=64, g=64)
    inputs = spec.pack(logical)
    del inputs["x_scale"]
    args = tuple(replace(a, optional=True) if a.name == "x_scale" else a for a in spec.args)
    outcome = ptxlab.runtime.run_spec(replace(spec, args=args), source, inputs, backend="emulator")
    assert np.array_equal(outcome.outputs["y"], spec.reference(logical["weight"], logical["x"]))


FEW = X[:, :128]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weight": GROUPED}, r"gemm_w4a8: weight: must be a PackedWeight \(layout.pack\) \(got QoQWeight\)"),
    ({"weight": None}, r"gemm_w4a8: weight: must be a PackedWeight .*\(got NoneType\)"),
    ({"x_q": X[0]}, r"gemm_w4a8: x_q: must be an array \[M, K\] or PackedActivations \(got shape \(256,\)\)"),
    ({"x_q": FEW}, r"gemm_w4a8: x_q: K must be 256 as the weight's \(got shape \(5, 128\)\)"),
    ({"x_q": X.astype(np.int16)}, r"gemm_w4a8: x_q: dtype int8 \(got int16\)"),
    ({"x_q": np.full((M, K), np.nan), "weight": WEIGHTS["qoq_channel"]}, r"x_q: dtype int8 \(got float64\)"),
    ({"x_q": np.asfortranarray(X)}, r"gemm_w4a8: x_q: C-contiguous \(got strides \(1, 5\)\)"),
    ({"x_scale": None}, r"gemm_w4a8: x_scale: must be given unless the output is int32 \(got nothing\)"),
    ({"x_scale": X_SCALE[:3]}, r"gemm_w4a8: x_scale: shape \[5\] \(got \[3\]\)"),
    ({"bias": BIAS[:8]}, r"gemm_w4a8: bias: shape \[40\] \(got \[8\]\)"),
    ({"bias": 1.0}, r"gemm_w4a8: bias: an array: NumPy, .*\(got float\)"),
    ({"x_sum": BIAS[:M], "weight": WEIGHTS["qoq_channel"]}, r"gemm_w4a8: x_sum: dtype int32 \(got float32\)"),
    ({"out": np.zeros((M, 8), np.float16)}, r"gemm_w4a8: out: shape \[5, 40\] \(got \[5, 8\]\)"),
    ({"out": np.zeros((M, N))}, r"gemm_w4a8: out: dtype must be one of float16, .*\(got float64\)"),
    ({"out": np.zeros((M, N), np.float16), "out_dtype": "float32"}, r"out: dtype float32 \(got float16\)"),
    ({"out": np.frombuffer(bytes(2 * M * N), np.float16).reshape(M, N)}, r"out: must be writeable \(got a read-only"),
    ({"out_dtype": ""}, r"gemm_w4a8: out_dtype: must be one of float16"),
    ({"out_dtype": "int8"}, r"gemm_w4a8: out_dtype: must be one of float16, bfloat16, float32, int32 \(got int8\)"),
    (
        {"kernel": "gemm"},
        r"gemm_w4a8: kernel: must be one of gemm_w4a8_qoq_sm80, .*, gemm_w4a8_small_sm90 \(got gemm\)",
    ),
    (
        {"kernel": "gemm_w4a8_qoq_channel_sm80"},
        r"gemm_w4a8: weight: must be qoq_channel in qserve \(gemm_w4a8_qoq_channel_sm80\) \(got qoq in qserve\)",
    ),
    ({"weight": ptxlab.pack(GROUPED, "comet")}, r"gemm_w4a8: weight: must be qoq in qserve .*\(got qoq in comet\)"),
    (
        {"weight": ptxlab.pack(quant.quantize_lqq(W, group=64, protective_range=127), "dual_mma")},
        r"gemm_w4a8: weight: must have a protective_range of at most 119, .*\(got 127\)",
    ),
    ({"programmatic": 1}, r"gemm_w4a8: programmatic: must be True or False \(got 1\)"),
    ({"backend": "tpu"}, r"backend: one of gpu, emulator \(got tpu\)"),
    ({"workspace": 5}, r"gemm_w4a8: workspace: must come from gemm_workspace \(got int\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_bad_input_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    given = {"x_q": X, "x_scale": X_SCALE, "weight": WEIGHTS["qoq"], "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.gemm_w4a8(**given)
    assert "\n" not in str(raised.value)


def test_packed_activations_have_their_own_scale_and_an_order() -> None:
    tiles = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="tiles", rows=8, backend="emulator")
    with pytest.raises(ArgumentError, match=r"x_scale: must be None: PackedActivations have theirs"):
        ptxlab.gemm_w4a8(tiles, X_SCALE, WEIGHTS["qoq"])
    with pytest.raises(ArgumentError, match=r"x_q: must be row_major for gemm_w4a8_qoq_sm80 \(got tiles\)"):
        ptxlab.gemm_w4a8(tiles, weight=WEIGHTS["qoq"])
