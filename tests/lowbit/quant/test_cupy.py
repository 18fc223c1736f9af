"""The quantisers, packings and references dispatch on CuPy arrays: the GPU gives the CPU's integers."""

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import layout, quant, reference

pytestmark = pytest.mark.gpu

QUANTISERS = [
    quant.quantize_level1,
    quant.quantize_qoq,
    quant.quantize_qoq_channel,
    quant.quantize_activations,
    quant.quantize_lqq,
    lambda w: quant.quantize_lqq(w, rounding="ceiling"),
    lambda w: quant.quantize_lqq(w, rounding="search"),
    lambda w: quant.quantize_lqq(w, 32, rounding="levels"),
    quant.quantize_atom_weight,
    lambda w: quant.quantize_atom_activations(w, 64, 64, rules=quant.ATOM_CODE),
]


def weights():
    w = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    w[5] = 0
    return w


@pytest.mark.parametrize("quantise", QUANTISERS)
def test_quantisers(cupy, quantise):
    on_cpu, on_gpu = quantise(weights()), quantise(cupy.asarray(weights()))
    for name, expected in vars(on_cpu).items():
        if isinstance(expected, np.ndarray):
            actual = getattr(on_gpu, name)
            assert isinstance(actual, cupy.ndarray)
            np.testing.assert_array_equal(actual.get(), expected, strict=True, err_msg=name)
    np.testing.assert_array_equal(on_gpu.dequantize().get(), on_cpu.dequantize(), strict=True)


@pytest.mark.parametrize("scheme", quant.KV_SCHEMES)
def test_kv_quantisers(cupy, scheme):
    """Over magnitudes at which float16 scales are denormal, vanish, or are ordinary."""
    x = weights().reshape(64, 4, 128) * np.float32(10) ** np.linspace(-9, 4, 64, dtype=np.float32)[:, None, None]
    on_cpu, on_gpu = quant.quantize_kv(x, scheme), quant.quantize_kv(cupy.asarray(x), scheme)
    for name in ("values", "scale", "zero"):
        assert getattr(on_gpu, name).get().tobytes() == getattr(on_cpu, name).tobytes(), name
    np.testing.assert_array_equal(on_gpu.dequantize().get(), on_cpu.dequantize(), strict=True)


def test_smooth_attention(cupy):
    w, peaks = weights(), np.abs(weights()).max(axis=1).reshape(2, 32)
    on_cpu = quant.smooth_attention(w, w, peaks, head_dim=32, b_k=w[:, 0].copy())
    on_gpu = quant.smooth_attention(*map(cupy.asarray, (w, w, peaks)), head_dim=32, b_k=cupy.asarray(w[:, 0]))
    for name in ("w_q", "w_k", "b_k", "factor"):
        np.testing.assert_allclose(getattr(on_gpu, name).get(), getattr(on_cpu, name), rtol=1e-6)


@pytest.mark.parametrize("length", [0, 2, 40])
def test_attention(cupy, length):
    x = weights().reshape(-1, 4, 64)[: length + 3]
    q, k, v = x[:3], x[:length, :2], x[3 : length + 3, 2:]
    on_gpu = reference.attention(*map(cupy.asarray, (q, k, v)), scale=0.2, window=9)
    for actual, expected in zip(on_gpu, reference.attention(q, k, v, scale=0.2, window=9), strict=True):
        assert isinstance(actual, cupy.ndarray)
        np.testing.assert_allclose(actual.get(), expected, rtol=1e-12, atol=1e-14)


def test_words(cupy):
    q4 = np.random.default_rng(0).integers(0, 16, (7, 64), dtype=np.uint8)
    packed = layout.pack_u4(cupy.asarray(q4))
    np.testing.assert_array_equal(packed.get(), layout.pack_u4(q4), strict=True)
    np.testing.assert_array_equal(layout.unpack_u4(packed).get(), q4, strict=True)
    signed = q4.view(np.int8) - np.int8(8)
    np.testing.assert_array_equal(layout.unpack_comet(layout.pack_comet(cupy.asarray(signed))).get(), signed)


def test_references(cupy):
    rng = np.random.default_rng(0)
    q4 = rng.integers(0, 16, (5, 128), dtype=np.uint8)
    scale, constant = (rng.integers(0, 256, (5, 4), dtype=np.uint8) for _ in range(2))
    grouped = [reference.dequant_lqq, reference.dequant_lqq_unsigned, reference.dequant_qoq_presub]
    grouped.append(reference.dequant_qoq_saturating)
    grouped += [reference.exact_lqq, reference.exact_qoq, reference.presub_wrong]
    cases = [(function, (q4, scale, constant)) for function in grouped]
    cases.append((reference.dequant_qoq_vadd4, (q4, scale, constant.view(np.int8))))
    cases += [
        (function, (q4,))
        for function in (reference.dequant_int4_naive, reference.dequant_comet, reference.dequant_qoq_channel)
    ]
    cases += [(function, (q4,)) for function in (reference.dequant_u4_f16, reference.dequant_u4_f16_subnormal)]
    for function, arguments in cases:
        on_gpu = function(*(cupy.asarray(argument) for argument in arguments))
        np.testing.assert_array_equal(on_gpu.get(), function(*arguments), strict=True, err_msg=function.__name__)


def test_refusals_name_the_place(cupy):
    w = weights()
    w[3, 17] = np.nan
    with pytest.raises(ArgumentError, match=r"w\[3, 17\] is nan"):
        quant.quantize_lqq(cupy.asarray(w))
    with pytest.raises(ArgumentError, match=r"x\[0, 3, 17\] is nan"):
        quant.quantize_kv(cupy.asarray(w[None]))
    with pytest.raises(ArgumentError, match=r"x\[0, 0\] has 100000"):
        quant.quantize_kv(cupy.full((1, 1, 8), 15e5, cupy.float32))
    with pytest.raises(ArgumentError, match=r"q4\[0, 1\] is 16"):
        layout.pack_u4(cupy.asarray([[0, 16, 0, 0, 0, 0, 0, 0]], dtype=np.uint8))


def test_the_overflow_predicate_reads_nibbles_at_10_gb_per_second(cupy):
    """A weight of 256 MB, one byte per nibble; the median of ten runs."""
    shape = N, groups = 16384, 128
    q4 = cupy.random.randint(0, 16, (N, 128 * groups), dtype=cupy.uint8)
    group_constants = {"group_scale": cupy.full(shape, 8, cupy.uint8), "minimum": cupy.full(shape, -60, cupy.int8)}
    weight = quant.LQQWeight(q4=q4, channel_scale=cupy.ones(N, cupy.float32), protective_range=119, **group_constants)
    assert not weight.overflows().any()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(10):
        start.record()
        weight.overflows()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    assert q4.nbytes / np.median(times) * 1e-6 > 10, times  # bytes per ms -> GB/s
