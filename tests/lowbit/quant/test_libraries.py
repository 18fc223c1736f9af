"""Quantisers take floats of any library on the host: PyTorch's, and whatever shares its memory by DLPack."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError
from ptxlab.io.dlpack import Bits
from ptxlab.lowbit import quant
from ptxlab.lowbit.quant import inputs
from ptxlab.lowbit.reference import bfloat16_bits, from_bfloat16_bits

X = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
KV = X[:10].reshape(5, 8, 64)
QUANTISERS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "level1": (quant.quantize_level1, X),
    "lqq": (quant.quantize_lqq, X),
    "qoq": (quant.quantize_qoq, X),
    "qoq_channel": (quant.quantize_qoq_channel, X),
    "int4": (quant.quantize_int4, X),
    "activations": (quant.quantize_activations, X),
    "scales": (quant.token_scales, X),
    "matrix": (lambda x: inputs.as_float_matrix("x", x), X),
    "kv4": (quant.quantize_kv, KV),
    "kv8_channel": (lambda x: quant.quantize_kv(x, "kv8_channel"), KV),
    "calibrate": (lambda x: quant.calibrate_kv(x, "kv4_channel"), KV),
    "smooth": (lambda x: quant.smooth_attention(x, x, np.abs(X[:2, :32]), head_dim=32, b_q=x[0, :64]), X),
}


class Foreign:
    """An array of a library that NumPy knows nothing of: memory that DLPack shares, and a dtype that has a name."""

    def __init__(self, array: np.ndarray, dtype: str | None = None) -> None:
        self.array, self.dtype, self.shape = array, dtype or array.dtype.name, array.shape

    def __getitem__(self, index: Any) -> "Foreign":
        return Foreign(np.ascontiguousarray(self.array[index]), self.dtype)

    def __dlpack__(self, **options: Any) -> Any:
        source = Bits(self.array, of_bfloat16=True) if self.dtype == "bfloat16" else self.array
        return source.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return type(a) is np.ndarray and a.dtype == b.dtype and np.array_equal(a, b)
    return all(map(same, vars(a).values(), vars(b).values())) if hasattr(a, "__dict__") else a == b


@pytest.mark.parametrize("name", QUANTISERS)
def test_floats_that_dlpack_shares(name: str) -> None:
    quantise, x = QUANTISERS[name]
    assert same(quantise(Foreign(x)), quantise(x))
    bits = bfloat16_bits(x)
    assert same(quantise(Foreign(bits, "bfloat16")), quantise(from_bfloat16_bits(bits)))


@pytest.mark.parametrize("name", QUANTISERS)
def test_floats_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    quantise, x = QUANTISERS[name]
    tensor = torch.from_numpy(x)
    assert same(quantise(torch.nn.Parameter(tensor)), quantise(x))
    half = tensor.bfloat16()
    assert same(quantise(half), quantise(half.float().numpy()))


def test_a_cache_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    cache = ptxlab.KVCache.empty(2, 3, 1, 64, like=torch.zeros(1))
    assert (cache.pool.dtype, cache.block_table.dtype, cache.lengths.dtype) == (torch.uint8, torch.int32, torch.int32)
    assert cache.block_table.tolist() == [[0, 1, 2], [3, 4, 5]] and not cache.pool.any()


@pytest.mark.default_cases("int32", "float16")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32"])
def test_dtypes_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    weight = ptxlab.pack(quant.quantize_qoq_channel(X), "qserve")
    x, scale = torch.ones(2, 256, dtype=torch.int8), torch.ones(2)
    y = ptxlab.gemm_w4a8(x, scale, weight, out_dtype=getattr(torch, name), backend="emulator")
    assert y.dtype == getattr(torch, name)


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: Foreign(x.astype(np.int8)), "dtype must be one of float16, bfloat16, float32, float64 (got int8)"),
        (lambda x: np.ma.masked_less(x, 0), "an array without a mask, which would be lost"),
        (lambda x: x.astype(object), "dtype must be one of"),
    ],
)
def test_other_arrays_are_refused(name: str, change: Callable[[np.ndarray], Any], message: str) -> None:
    quantise, x = QUANTISERS[name]
    with pytest.raises(ArgumentError) as raised:
        quantise(change(x))
    assert message in str(raised.value)


@pytest.mark.parametrize("no_array", ["cupy", 1.5, [1], Foreign(X)])
def test_a_cache_of_what_is_no_library(no_array: object) -> None:
    with pytest.raises(ArgumentError, match=r"^like: must be an array of NumPy, CuPy or PyTorch \(got \w+\)$"):
        ptxlab.KVCache.empty(1, 1, 1, 64, like=no_array)


@pytest.mark.parametrize(("name", "size"), [("batch", 1.5), ("max_pages", "2"), ("num_kv_heads", None), ("batch", 0)])
def test_a_cache_of_no_whole_number(name: str, size: object) -> None:
    sizes = {"batch": 1, "max_pages": 1, "num_kv_heads": 1, "head_dim": 64}
    with pytest.raises(ArgumentError, match=rf"^{name}: must be an integer, at least 1 \(got "):
        ptxlab.KVCache.empty(**{**sizes, name: size})
