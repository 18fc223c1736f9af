"""The real GEMM kernels on every backend: accumulators equal to the reference, bit for bit."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry, toolchain
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant
from ptxlab.runtime import run_spec
from ptxlab.spec import KernelSpec
from tests.support import gemm_checks as checks
from tests.support import gemm_problems
from tests.support.axes import on_every_backend
from tests.support.random_weights import weight_of

QOQ, (SOURCE, *_) = registry.find("gemm_w4a8_qoq_sm80")
LQQ, CHANNEL = (registry.specs()[f"gemm_w4a8_{scheme}_sm80"] for scheme in ("lqq", "qoq_channel"))


PROBLEMS = {QOQ.name: gemm_problems.qoq, LQQ.name: gemm_problems.lqq, CHANNEL.name: gemm_problems.channel}


def sizes_of(spec: KernelSpec, **sizes: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name in spec.symbols}


def accumulators(spec: KernelSpec, logical: dict[str, Any], backend: str, **options: Any) -> np.ndarray:
    return checks.run_checked(spec, spec.pack(logical), backend, **options)


@pytest.mark.full
@pytest.mark.parametrize("name", PROBLEMS)
@given(data=st.data(), mode=st.sampled_from(emulator.MODES))
@settings(max_examples=15)
def test_accumulators_are_exact_in_the_emulator(name: str, data: st.DataObject, mode: str) -> None:
    spec, logical = registry.specs()[name], data.draw(PROBLEMS[name](tokens=40, rows=72, groups=3))
    assert np.array_equal(accumulators(spec, logical, "emulator", mode=mode), spec.reference(**logical))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
@given(data=st.data())
def test_accumulators_are_exact_on_the_gpu(name: str, data: st.DataObject) -> None:
    spec, logical = registry.specs()[name], data.draw(PROBLEMS[name](tokens=300, rows=320, groups=12))
    checks.assert_exact_twice(lambda: accumulators(spec, logical, "gpu"), spec.reference(**logical))


@pytest.mark.default_cases("72-9-gemm_w4a8_qoq_channel_sm80-emulator")
@on_every_backend
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(("N", "M"), [*((72, M) for M in (1, 9, 17, 33, 65, 130)), (12296, 1), (12296, 65)])
def test_every_tile_shape_is_exact(name: str, M: int, N: int, backend: str) -> None:
    """Both columns of the table of tiles are tried, with M and N that leave the last tile ragged."""
    spec = registry.specs()[name]
    sizes = sizes_of(spec, M=M, N=N, K=160 if N < 1000 else 64, g=32)
    logical = spec.example(np.random.default_rng(M), **sizes)
    assert np.array_equal(accumulators(spec, logical, backend), spec.reference(**logical))


@pytest.mark.full
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("N", [4096, 57344])
def test_no_tile_spills_where_registers_are_fewest(name: str, N: int) -> None:
    """Registers are fewest on sm_80, and groups of 32 have the most constants."""
    spec, (source, *_) = registry.find(name)
    for M in (1, 16, 32, 64, 128, 256):
        config = {**spec.config_for(sizes_of(spec, M=M, N=N, K=8192, g=32)), "OUT": 0}
        resources = toolchain.compile_cuda(source, spec.arch, defines=config).resources[name]
        assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0), config


@on_every_backend
def test_the_zero_point_leaves_with_the_token_sum(backend: str) -> None:
    """The product with the token sum is that of q4 - zero.

    Another sum is refused, or subtracted in an unchecked call.
    """
    logical = CHANNEL.example(np.random.default_rng(0), M=5, N=40, K=96)
    weight, x = logical["weight"], logical["x"]
    centred = x.astype(np.int64) @ (weight.q4.astype(np.int64) - weight.zero[:, None]).T
    assert np.array_equal(accumulators(CHANNEL, logical, backend), centred)
    logical["x_sum"] = x.sum(axis=1, dtype=np.int32) + np.arange(5, dtype=np.int32)
    shifted = centred - np.arange(5)[:, None] * weight.zero.astype(np.int64)
    with pytest.raises(ArgumentError, match=r"x_sum: the sum of token 1 over K is -?\d+ \(got x_sum\[1\] = "):
        accumulators(CHANNEL, logical, backend)
    assert np.array_equal(accumulators(CHANNEL, logical, backend, unchecked=True), shifted)


def test_the_extremes_add_up_without_a_rounding() -> None:
    """Every product has its largest magnitude, -128 times 127, over all of K.

    The sums are exact in float64, and in int32 too.
    """
    K = 4096
    ones = np.ones((8, K // 128), np.uint8)
    weight = weight_of(quant.QoQWeight, np.full((8, K), 15, np.uint8), ones * 16, 127, zero=ones * 8)
    x = np.full((3, K), -128, np.int8)
    expected = np.full((3, 8), -128 * 7 * 16 * K, np.int32)
    assert np.array_equal(accumulators(QOQ, {"weight": weight, "x": x}, "emulator"), expected)


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


@pytest.mark.default_cases(
    "1-bfloat16-False-gemm_w4a8_qoq_channel_sm80-emulator",
    "2-float32-False-gemm_w4a8_qoq_channel_sm80-emulator",
    "0-float16-True-gemm_w4a8_qoq_channel_sm80-emulator",
    "2-float32-False-gemm_w4a8_lqq_sm80-emulator",
)
@on_every_backend
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("variant", "dtype"), [(0, np.float16), (1, ml_dtypes.bfloat16), (2, np.float32)])
def test_scaled_outputs_are_the_epilogue_in_float32(
    variant: int, dtype: Any, with_bias: bool, name: str, backend: str
) -> None:
    """The bits are those of acc * x_scale * w_scale + bias.

    Each operation is rounded to float32, then once to the output.
    """
    spec, (source, *_) = registry.find(name)
    sizes = sizes_of(spec, M=5, N=40, K=256, g=128)
    logical = spec.example(np.random.default_rng(variant), **sizes)
    if not with_bias:
        del logical["bias"]  # the kernel is given a null pointer
    config = {**spec.config_for(sizes), "OUT": variant}
    inputs = spec.pack(logical)
    y = run_spec(spec, source, inputs, backend=backend, config=config).outputs["y"]
    assert np.array_equal(y, spec.expected(logical, config)["y"])
    scaled = spec.reference(logical["weight"], logical["x"]).astype(np.float32)
    scaled = scaled * inputs["x_scale"][:, None] * inputs["w_scale"] + inputs.get("bias", np.float32(0))
    assert np.array_equal(y, scaled.astype(dtype).view(y.dtype))  # NumPy knows no bfloat16: y is its bits
    assert len(np.unique(y)) > 100


@pytest.mark.default_cases("int32-3")
@pytest.mark.parametrize(("dtype", "variant"), [("float16", 0), ("bfloat16", 1), ("float32", 2), ("int32", 3)])
def test_the_array_to_write_into_decides_the_output(dtype: str, variant: int) -> None:
    logical = QOQ.example(np.random.default_rng(0), M=3, N=8, K=64, g=64)
    y = np.zeros((3, 8), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    outcome = run_spec(QOQ, SOURCE, QOQ.pack(logical), out={"y": y}, backend="emulator")
    assert outcome.outputs["y"] is y
    expected = QOQ.expected(logical, {"OUT": variant})["y"]
    assert np.array_equal(y.view(expected.dtype), expected)


def test_an_output_of_another_dtype_is_refused() -> None:
    inputs = QOQ.pack(QOQ.example(np.random.default_rng(0), M=2, N=8, K=64, g=64))
    rule = r"gemm_w4a8_qoq_sm80: y: dtype float16 or bfloat16 or float32 or int32 \(got float64\)"
    with pytest.raises(ArgumentError, match=rule):
        run_spec(QOQ, SOURCE, inputs, out={"y": np.zeros((2, 8))}, backend="emulator")
    config = {**QOQ.config_for({"M": 2, "N": 8, "K": 64, "g": 64}), "OUT": 2}
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_qoq_sm80: y: dtype float32 \(got float16\)"):
        run_spec(QOQ, SOURCE, inputs, config=config, out={"y": np.zeros((2, 8), np.float16)}, backend="emulator")


@pytest.mark.full
def test_torch_gets_bfloat16_as_its_own() -> None:
    torch = pytest.importorskip("torch")
    logical = QOQ.example(np.random.default_rng(0), M=3, N=8, K=64, g=64)
    inputs = {name: torch.from_numpy(array) for name, array in QOQ.pack(logical).items()}
    config = {**QOQ.config_for({"M": 3, "N": 8, "K": 64, "g": 64}), "OUT": 1}
    y = run_spec(QOQ, SOURCE, inputs, backend="emulator", config=config).outputs["y"]
    assert y.dtype == torch.bfloat16
    assert np.array_equal(y.view(torch.uint16).numpy(), QOQ.expected(logical, config)["y"])
    out = torch.zeros(3, 8, dtype=torch.bfloat16)
    assert run_spec(QOQ, SOURCE, inputs, backend="emulator", out={"y": out}).outputs["y"] is out
    assert torch.equal(out, y)
