"""`gemm_w4a8_grouped` without a GPU, on host arrays and on a GPU that isn't one; and on a GPU, in CUDA graphs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels.gemm.common import DTYPES
from ptxlab.lowbit.kernels.gemm.grouped import GROUPED, offsets_of
from ptxlab.lowbit.layout import PackedActivations, to_swizzled_tiles
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device

E, M, N, K = 4, 11, 40, 192
RNG = np.random.default_rng(0)
QUANTIZED = [quant.quantize_lqq(RNG.standard_normal((N, K), dtype=np.float32), group=64) for _ in range(E)]
PACKED = [ptxlab.pack(weight, "strips") for weight in QUANTIZED]
WEIGHTS = ptxlab.stack_experts(PACKED)
CHANNEL = [quant.quantize_qoq_channel(RNG.standard_normal((N, K), dtype=np.float32)) for _ in range(E)]
QOQ = quant.quantize_qoq(RNG.standard_normal((N, K), dtype=np.float32), group=64)
X = RNG.integers(-128, 128, (M, K), dtype=np.int8)
X_SCALE = RNG.uniform(1e-3, 1e-2, M).astype(np.float32)
X_SUM = X.sum(axis=1, dtype=np.int32)
BIAS = RNG.standard_normal((E, N), dtype=np.float32)
OFFSETS = offsets_of([3, 0, 7, 1])


def expected_product(
    dtype: str = "float16", bias: np.ndarray | None = None, offsets: np.ndarray = OFFSETS
) -> np.ndarray:
    y: np.ndarray = GROUPED.reference(QUANTIZED, X, offsets, X_SCALE, bias, DTYPES.index(dtype))
    return y


def call(**options: Any) -> Any:
    """Call `gemm_w4a8_grouped` on device arrays."""
    arrays = {"x_q": X, "x_scale": X_SCALE, "weights": WEIGHTS, "offsets": OFFSETS}
    return ptxlab.gemm_w4a8_grouped(**{name: on_device(array) for name, array in arrays.items()}, **options)


@pytest.mark.default_cases("no sums-float16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_sum", [X_SUM, None], ids=["sums", "no sums"])
def test_every_output_on_the_host_and_on_the_device(fake: FakeGpu, dtype: str, x_sum: np.ndarray | None) -> None:
    expected = expected_product(dtype, BIAS)
    y = ptxlab.gemm_w4a8_grouped(
        X, X_SCALE, WEIGHTS, OFFSETS, x_sum=x_sum, bias=BIAS, out_dtype=dtype, backend="emulator"
    )
    assert y.dtype == expected.dtype and np.array_equal(y, expected)
    sums = None if x_sum is None else DeviceArray(x_sum)
    y = call(x_sum=sums, bias=DeviceArray(BIAS), out_dtype=dtype)
    assert y.dtype == expected.dtype and np.array_equal(y.host, expected)
    assert fake.launched == [(GROUPED.name, 7)]


@pytest.mark.full
def test_accumulators_need_no_scale(fake: FakeGpu) -> None:
    """The kernel is given a null pointer on the GPU then, which faults if it is read."""
    y = ptxlab.gemm_w4a8_grouped(X, weights=WEIGHTS, offsets=OFFSETS, out_dtype="int32", backend="emulator")
    assert np.array_equal(y, expected_product("int32"))
    y = ptxlab.gemm_w4a8_grouped(
        DeviceArray(X), weights=on_device(WEIGHTS), offsets=DeviceArray(OFFSETS), out_dtype="int32"
    )
    assert np.array_equal(y.host, expected_product("int32"))


@pytest.mark.full
def test_quantised_activations_bring_scale_and_sum() -> None:
    activations = ptxlab.quantize_activations(RNG.standard_normal((M, K), dtype=np.float32), backend="emulator")
    y = ptxlab.gemm_w4a8_grouped(activations, weights=WEIGHTS, offsets=OFFSETS, backend="emulator")
    by_parts = ptxlab.gemm_w4a8_grouped(activations.x_q, activations.scale, WEIGHTS, OFFSETS, backend="emulator")
    assert np.array_equal(y, by_parts)


@pytest.mark.full
def test_experts_of_qoq_and_out() -> None:
    out = np.zeros((M, N), np.float32)
    weights = ptxlab.stack_experts([ptxlab.pack(QOQ, "strips")] * 2)
    y = ptxlab.gemm_w4a8_grouped(X, X_SCALE, weights, offsets_of([5, 6]), out=out, backend="emulator")
    assert y is out and np.array_equal(out, GROUPED.reference([QOQ] * 2, X, offsets_of([5, 6]), X_SCALE, None, 2))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_per_channel(fake: FakeGpu, dtype: str) -> None:
    """Their zero points leave with the token sums, which have to be given."""
    weights = ptxlab.stack_experts([ptxlab.pack(weight, "strips") for weight in CHANNEL])
    expected = GROUPED.reference(CHANNEL, X, OFFSETS, X_SCALE, BIAS, DTYPES.index(dtype))
    y = ptxlab.gemm_w4a8_grouped(
        X, X_SCALE, weights, OFFSETS, x_sum=X_SUM, bias=BIAS, out_dtype=dtype, backend="emulator"
    )
    assert y.dtype == expected.dtype and np.array_equal(y, expected)
    arrays = X, X_SCALE, weights, OFFSETS
    options = {"bias": DeviceArray(BIAS), "out_dtype": dtype}
    y = ptxlab.gemm_w4a8_grouped(*map(on_device, arrays), x_sum=DeviceArray(X_SUM), **options)
    assert np.array_equal(y.host, expected) and fake.launched == [(GROUPED.name, 7)]
    with pytest.raises(ArgumentError, match=r"grouped: x_sum: must be given for weights per channel \(got nothing\)"):
        ptxlab.gemm_w4a8_grouped(*map(on_device, arrays), **options)


@pytest.mark.full
def test_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    x, scale, offsets = (torch.from_numpy(array) for array in (X, X_SCALE, OFFSETS))
    y = ptxlab.gemm_w4a8_grouped(x, scale, WEIGHTS, offsets, out_dtype="bfloat16", backend="emulator")
    assert y.dtype == torch.bfloat16
    assert np.array_equal(y.view(torch.uint16).numpy(), expected_product("bfloat16"))


def test_other_offsets_need_no_other_kernel(fake: FakeGpu) -> None:
    out, offsets = fake.empty((M, N), "float16"), DeviceArray(OFFSETS.copy())
    arguments = DeviceArray(X), DeviceArray(X_SCALE), on_device(WEIGHTS), offsets
    ptxlab.gemm_w4a8_grouped(*arguments, out=out)
    fake.capturing, allocations = True, fake.allocations
    for counts in ([11, 0, 0, 0], [0, 0, 0, 11], [1, 9, 1, 0]):
        offsets.host[:] = offsets_of(counts)
        assert ptxlab.gemm_w4a8_grouped(*arguments, out=out) is out
        assert np.array_equal(out.host, expected_product(offsets=offsets.host))
    assert (fake.loads, fake.allocations) == (1, allocations)


def test_no_rows_launch_nothing(fake: FakeGpu) -> None:
    none, x, scale = np.zeros(E + 1, np.int32), X[:0], X_SCALE[:0]
    y = ptxlab.gemm_w4a8_grouped(x, scale, WEIGHTS, none, backend="emulator")
    assert y.shape == (0, N) and y.dtype == np.float16
    y = ptxlab.gemm_w4a8_grouped(DeviceArray(x), DeviceArray(scale), on_device(WEIGHTS), DeviceArray(none))
    assert y.shape == (0, N) and fake.launched == [] and fake.loads == 0


def test_a_programmatic_call_has_a_plan_of_its_own(fake: FakeGpu) -> None:
    for programmatic in (False, True, False, True):
        assert np.array_equal(call(programmatic=programmatic).host, expected_product())
    assert [geometry.programmatic for geometry in fake.geometries] == [False, True, False, True] and fake.loads == 2


def test_a_capture_is_told_what_to_make_before_it(fake: FakeGpu) -> None:
    out, fake.capturing = fake.empty((M, N), "float16"), True
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_grouped: out: must be given in a capture: .* \[11, 40\] of fl"):
        call()
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_grouped: the first call of a shape .*\(got M=11, N=40, K=192,"):
        call(out=out)
    assert fake.launched == [] and fake.loads == 0


def test_another_gpu_is_told_what_the_kernel_runs_on(fake: FakeGpu) -> None:
    fake.arch = 80
    with pytest.raises(UnavailableError, match=r"gemm_w4a8_grouped: gemm_w4a8_grouped_sm90: it runs on sm_90a"):
        call()


IN_TILES = PackedActivations(
    layout="tiles", M=M, K=K, rows=8, x_q=to_swizzled_tiles(X, 8), scale=X_SCALE, token_sum=X_SUM
)
OTHER = ptxlab.stack_experts([ptxlab.pack(QUANTIZED[0], "dual_mma")])
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": PACKED}, r"gemm_w4a8_grouped: weights: must be ExpertWeights \(stack_experts\) \(got list\)"),
    (
        {"weights": OTHER},
        r"weights: must be lqq or qoq or qoq_channel in strips \(got lqq in dual_mma\)",
    ),
    ({"x_q": X[0]}, r"x_q: must be an array \[M, K\] or row-major PackedActivations \(got shape \(192,\)\)"),
    ({"x_q": IN_TILES, "x_scale": None}, r"x_q: must be an array .*\(got tiles\)"),
    ({"x_q": IN_TILES}, r"gemm_w4a8_grouped: x_scale: must be None: PackedActivations have theirs"),
    ({"x_q": X[:, :128]}, r"gemm_w4a8_grouped: x_q: K must be 192 as the weights' \(got shape \(11, 128\)\)"),
    ({"x_q": X.view(np.uint8)}, r"gemm_w4a8_grouped: x_q: dtype int8 \(got uint8\)"),
    ({"x_scale": None}, r"gemm_w4a8_grouped: x_scale: must be given unless the output is int32 \(got nothing\)"),
    ({"x_sum": X_SUM[:4]}, r"gemm_w4a8_grouped: x_sum: shape \[11\] \(got \[4\]\)"),
    ({"offsets": None}, r"gemm_w4a8_grouped: offsets: must be s32 \[5\] \(got nothing\)"),
    ({"offsets": OFFSETS[:4]}, r"gemm_w4a8_grouped: offsets: shape \[5\] \(got \[4\]\)"),
    ({"offsets": OFFSETS.astype(np.int64)}, r"gemm_w4a8_grouped: offsets: dtype int32 \(got int64\)"),
    ({"offsets": offsets_of([3, 0, 7, 2])}, r"offsets: .* \(got offsets\[4\] = 12\)"),
    ({"offsets": offsets_of([3, -1, 8, 1])}, r"offsets: offsets\[1:\] >= offsets\[:-1\] \(got offsets\[1\] = 3\)"),
    ({"bias": BIAS[0]}, r"gemm_w4a8_grouped: bias: shape \[4, 40\] \(got \[40\]\)"),
    ({"out": np.zeros((M, 8), np.float16)}, r"gemm_w4a8_grouped: out: shape \[11, 40\] \(got \[11, 8\]\)"),
    ({"out_dtype": "int8"}, r"gemm_w4a8_grouped: out_dtype: must be one of float16, .* \(got int8\)"),
    ({"programmatic": 1}, r"gemm_w4a8_grouped: programmatic: must be True or False \(got 1\)"),
    ({"backend": "tpu"}, r"backend: one of gpu, emulator \(got tpu\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_bad_input_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {"x_q": X, "x_scale": X_SCALE, "weights": WEIGHTS, "offsets": OFFSETS, "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.gemm_w4a8_grouped(**arguments)
    assert "\n" not in str(raised.value)


def test_experts_that_do_not_fit_together_are_refused() -> None:
    for weights, message in (
        ([], r"weights: must be one PackedWeight or more \(got none\)"),
        ([PACKED[0], QOQ], r"weights\[1\]: must be a PackedWeight \(layout.pack\) \(got QoQWeight\)"),
        ([PACKED[0], ptxlab.pack(QOQ, "strips")], r"weights\[1\]: must have scheme lqq as the first \(got qoq\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ptxlab.stack_experts(weights)
    with pytest.raises(ArgumentError, match=r"buffers: must have 3 experts in front"):
        replace(WEIGHTS, E=3)
    with pytest.raises(ArgumentError, match=r"expert: must be in 0..3 \(got 4\)"):
        WEIGHTS.expert(4)


def test_an_expert_is_the_weight_that_was_stacked() -> None:
    for index, packed in enumerate(PACKED):
        alone = WEIGHTS.expert(index)
        assert all(np.array_equal(alone.buffers[name], buffer) for name, buffer in packed.buffers.items())
    assert WEIGHTS.nbytes == sum(packed.nbytes for packed in PACKED)


ON_HOPPER = pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="wgmma needs sm_90a")


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_of_every_library(library: str, dtype: str) -> None:
    module = pytest.importorskip(library)
    sent = module.asarray if library == "cupy" else lambda array: module.from_numpy(array.copy()).cuda()
    x, scale, offsets, bias = map(sent, (X, X_SCALE, OFFSETS, BIAS))
    y = ptxlab.gemm_w4a8_grouped(x, scale, ptxlab.to_device(WEIGHTS), offsets, bias=bias, out_dtype=dtype)
    assert type(y) is type(x)
    expected = expected_product(dtype, BIAS)
    bits = f"u{expected.itemsize}"
    assert np.array_equal(gpu.to_host(gpu.as_array("y", y)).view(bits), expected.view(bits))


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("programmatic", [False, True])
def test_a_graph_is_replayed_on_other_offsets(cupy: Any, programmatic: bool) -> None:
    """The kernel before it in the graph writes the offsets, for which a programmatic launch has to wait."""
    x, scale, weights = cupy.asarray(X), cupy.asarray(X_SCALE), ptxlab.to_device(WEIGHTS)
    source, offsets, out = cupy.asarray(OFFSETS), cupy.asarray(OFFSETS), cupy.empty((M, N), cupy.float16)

    def layer() -> None:
        cupy.multiply(source, 1, out=offsets)
        ptxlab.gemm_w4a8_grouped(x, scale, weights, offsets, out=out, programmatic=programmatic)

    layer()
    graph = gpu.capture([layer])
    for seed in range(20):
        counts = np.random.default_rng(seed).multinomial(M, [0.5, 0, 0.1, 0.4])
        source[...] = cupy.asarray(offsets_of(counts))
        out.fill(0)
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        assert np.array_equal(out.get(), expected_product(offsets=offsets_of(counts)))
