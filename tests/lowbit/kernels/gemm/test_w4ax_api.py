"""`gemm_w4ax`: arrays of every kind, on the host and on a GPU that isn't one; what it refuses beyond `gemm_w4a4`."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.kernels.gemm.w4ax import gemm_blocks
from ptxlab.spec.dtypes import convert_to_dtype
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device

M, N, K = 5, 40, 384
RNG = np.random.default_rng(0)
W = quant.quantize_block_weight(RNG.standard_normal((N, K), dtype=np.float32))
FLOATS = RNG.standard_normal((M, K), dtype=np.float32)
BIAS = RNG.standard_normal(N, dtype=np.float32)
KERNELS = {"strips": "gemm_w4ax_sm90", "rows": "gemm_w4ax_naive_sm80"}
every = pytest.mark.parametrize("name", KERNELS)


def operands(name: str, int8: int = 1) -> dict[str, Any]:
    """Pack both operands, and add the backend."""
    x = layout.pack_block_activations(quant.quantize_blocks(FLOATS, int8), layout.BLOCK_ORDERS[name])
    return {"x": x, "weight": ptxlab.pack_block_weight(W, int8, name), "backend": "emulator"}


def expected_product(dtype: str, int8: int = 1) -> np.ndarray:
    return convert_to_dtype(gemm_blocks(W, quant.quantize_blocks(FLOATS, int8)) + BIAS, dtype)


@pytest.mark.default_cases("float16-0-emulator-strips", "float32-3-emulator-rows")
@every
@on_every_backend
@pytest.mark.parametrize(("dtype", "int8"), [("float16", 0), ("bfloat16", 1), ("float32", 3)])
def test_every_output_and_blocks_of_one_kind(name: str, dtype: str, int8: int, backend: str) -> None:
    y = ptxlab.gemm_w4ax(**{**operands(name, int8), "backend": backend}, bias=BIAS, out_dtype=dtype)
    assert y.dtype == expected_product(dtype).dtype and np.array_equal(y, expected_product(dtype, int8))


@pytest.mark.default_cases("rows")
@every
def test_into_a_given_array_of_torch_and_of_no_tokens(name: str) -> None:
    torch = pytest.importorskip("torch")
    arguments = operands(name)
    of_torch = {part: torch.from_numpy(array) for part, array in arguments["x"].arrays.items()}
    out = torch.empty((M, N), dtype=torch.bfloat16)
    assert (
        ptxlab.gemm_w4ax(
            **{**arguments, "x": replace(arguments["x"], **of_torch)}, bias=torch.from_numpy(BIAS), out=out
        )
        is out
    )
    assert np.array_equal(out.view(torch.int16).numpy().view(np.uint16), expected_product("bfloat16"))
    none = replace(arguments["x"], M=0, **{part: array[:0] for part, array in arguments["x"].arrays.items()})
    assert ptxlab.gemm_w4ax(**{**arguments, "x": none}).shape == (0, N)


@pytest.mark.default_cases("rows")
@every
def test_device_arrays(fake: FakeGpu, name: str) -> None:
    fake.arch = 90 if name == "strips" else 86
    arguments = operands(name)
    x, weight, bias = on_device(arguments["x"]), on_device(arguments["weight"]), DeviceArray(BIAS)
    y = ptxlab.gemm_w4ax(x, weight, bias=bias, programmatic=name == "strips")
    assert np.array_equal(y.host, expected_product("float16"))
    out = DeviceArray(np.empty((M, N), np.float32))
    assert ptxlab.gemm_w4ax(x, weight, bias=bias, out=out) is out and np.array_equal(
        out.host, expected_product("float32")
    )
    assert {kernel for kernel, _ in fake.launched} == {KERNELS[name]}
    assert fake.geometries[0].programmatic == (name == "strips")


STRIPS, ROWS = operands("strips"), operands("rows")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": W}, "weight: must be a BlockWeight (layout.pack_block_weight) (got BlockRows)"),
        ({"x": FLOATS}, "x: must be BlockActivations (layout.pack_block_activations) (got ndarray)"),
        ({"x": ROWS["x"]}, "x: must be joined for a weight in strips (got pairs)"),
        ({"weight": ROWS["weight"]}, "x: must be pairs for a weight in rows (got joined)"),
        ({"x": operands("strips", 2)["x"]}, "x: must have K4=256, K8=128 as the weight has (got K4=128, K8=256)"),
        ({"x": replace(STRIPS["x"], x=STRIPS["x"].x.view(np.int8))}, "x.x: dtype uint8 (got int8)"),
        ({"bias": BIAS[:8]}, "bias: shape [40] (got [8])"),
        ({"out_dtype": "int32"}, "out_dtype: must be one of float16, bfloat16, float32 (got int32)"),
        ({"out": np.empty((M, N + 8), np.float16)}, "out: shape [5, 40] (got [5, 48])"),
        (
            {**ROWS, "programmatic": True},
            "programmatic: only for gemm_w4ax_sm90, which waits (got gemm_w4ax_naive_sm80)",
        ),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"gemm_w4ax: {message}")) as error:
        ptxlab.gemm_w4ax(**{**STRIPS, **change})
    assert "\n" not in str(error.value)
