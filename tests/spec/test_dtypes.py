"""Dtypes that a variant decides, and bfloat16 between libraries that have it and those that have not."""

import numpy as np
import pytest

from ptxlab import gpu, registry
from ptxlab.runtime import verify
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, dtype_in, storage


def test_a_constant_decides() -> None:
    y = ByVariant("OUT", ("float16", "bfloat16"))
    assert [dtype_in(y, {"OUT": i, "BM": 8}) for i in (0, 1)] == ["float16", "bfloat16"]
    assert dtype_in("int8", {}) == "int8" and str(y) == "float16|bfloat16 by OUT"
    assert storage("bfloat16") == np.uint16 and storage("int32") == np.int32


def test_values_are_rounded_to_the_dtype_that_stores_them() -> None:
    values = np.array([1.0, 1 + 2**-9, 70000], np.float32)
    with np.errstate(over="ignore"):
        assert convert_to_dtype(values, "float16").tolist() == [1, 1 + 2**-9, np.inf]
    assert convert_to_dtype(values, "bfloat16").tolist() == [0x3F80, 0x3F80, 0x4789]
    assert convert_to_dtype(values, "float32") is values
    integers = np.arange(3)
    assert convert_to_dtype(integers, "int8") is integers


def test_bfloat16_crosses_dlpack_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.bfloat16)
    bits = gpu.as_array("x", tensor)
    assert bits.dtype == np.uint16 and bits.tolist() == [[0x3F80, 0xC000], [0x3F00, 0x4040]]
    bits[0, 0] = 0x4000
    assert tensor[0, 0] == 2
    back = gpu.like(bits, tensor, "bfloat16")
    assert back.dtype == torch.bfloat16 and back.data_ptr() == tensor.data_ptr()


def test_numpys_bfloat16_is_seen_as_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1, 2], ml_dtypes.bfloat16)
    bits = gpu.as_array("x", values)
    assert bits.dtype == np.uint16 and np.shares_memory(bits, values)


def test_verification_goes_through_every_output() -> None:
    jobs, _ = verify.plan(["gemm_w4a8_qoq_sm80"], "emulator")
    outputs = [job.config["OUT"] for job in jobs if job.config]
    assert outputs[:3] == [3, 3, 3] and sorted(outputs[3:]) == [0, 1, 2]
    spec = registry.specs()["gemm_w4a8_qoq_sm80"]
    sizes = {"M": 4, "N": 8, "K": 64, "g": 64}
    half = spec.bytes_moved({**sizes, "OUT": 0})
    assert spec.bytes_moved(sizes) - half == 2 * 4 * 8
