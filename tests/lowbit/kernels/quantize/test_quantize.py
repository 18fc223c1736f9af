"""Activations to INT8: the kernel equal to `quant.quantize_activations` in every bit and order, and the public call."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.layout.packed_activations import ORDERS, stored_shape, tile_of
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import DeviceArray, FakeGpu
from tests.support.strategies import floats

DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype("float32")}
RNG = np.random.default_rng(0)


@st.composite
def problems(draw: st.DrawFn, tokens: int, chunks: int) -> dict[str, Any]:
    order = draw(st.sampled_from(ORDERS))
    rows = draw(st.sampled_from((8, 16, 72))) if order == "tiles" else None
    shape = draw(st.integers(1, tokens)), 32 * draw(st.integers(1, chunks))
    x = draw(floats(DTYPES[draw(st.sampled_from(sorted(DTYPES)))], shape))
    # Tokens within one exponent of each other, so that more than one value of a token matters.
    x = np.where(draw(st.booleans()), x, np.ldexp(np.frexp(x.astype(np.float32))[0], 3).astype(x.dtype))
    extent = np.abs(x.astype(np.float32)).max(axis=1)
    scale = extent / np.float32(127)  # of a token that the host lets through
    usable = (extent == 0) | ((scale >= np.finfo(np.float32).tiny) & (scale <= np.finfo(np.float32).max / 128))
    return {"x": np.where(usable[:, None], x, np.zeros_like(x)), "layout": order, "rows": rows}


def check(backend: str, x: np.ndarray, layout: str, rows: int | None) -> None:
    got = ptxlab.quantize_activations(x, layout=layout, rows=rows, backend=backend)
    expected = quant.quantize_activations(x)
    assert np.array_equal(got.scale.view(np.uint32), expected.scale.view(np.uint32))
    assert np.array_equal(got.token_sum, expected.token_sum)
    packed = ptxlab.lowbit.layout.pack_activations(expected, layout, rows)
    assert got.x_q.shape == packed.x_q.shape and np.array_equal(got.x_q, packed.x_q)  # the padding is zeros too


@pytest.mark.full
@given(problem=problems(tokens=20, chunks=12))
@settings(max_examples=40)
def test_every_bit_in_the_emulator(problem: dict[str, Any]) -> None:
    check("emulator", **problem)


@pytest.mark.gpu
@given(problem=problems(tokens=40, chunks=40))
@settings(max_examples=300)
def test_every_bit_on_the_gpu(problem: dict[str, Any]) -> None:
    check("gpu", **problem)


@pytest.mark.default_cases("row_major-None-32-emulator", "fragment-None-8192-emulator")
@on_every_backend
@pytest.mark.parametrize("K", [32, 8192, 8224, 16384, 32768, 32800])
@pytest.mark.parametrize(("order", "rows"), [("row_major", None), ("fragment", None), ("tiles", 8)])
def test_rows_of_any_length(K: int, order: str, rows: int | None, backend: str) -> None:
    """The rows have one thread's worth, one chunk per thread, several, and an end that is read a second time."""
    check(backend, RNG.standard_normal((2, K), dtype=np.float32).astype(np.float16), order, rows)


def near_ties(tokens: int, K: int, exponents: tuple[int, int] = (-100, 100)) -> np.ndarray:
    """Draw values whose quotients are a half and an integer, or one rounding of float32 beside it.

    There a division can go wrong.
    """
    extent = np.ldexp(RNG.uniform(1, 2, tokens), RNG.integers(*exponents, tokens)).astype(np.float32)
    scale = extent / np.float32(127)
    halves = RNG.integers(-126, 126, (tokens, K)).astype(np.float32) + np.float32(0.5)
    x = halves * scale[:, None]
    for _ in range(3):
        towards = np.where(RNG.integers(0, 2, x.shape) == 1, np.float32(np.inf), -np.float32(np.inf))
        x = np.where(RNG.integers(0, 2, x.shape) == 1, np.nextafter(x, towards.astype(np.float32)), x)
    x[:, 0] = extent
    return x


@on_every_backend
def test_the_quotients_are_those_of_an_ieee_division(backend: str) -> None:
    """A division's rounding must result from one reciprocal per token and two corrections per value."""
    check(backend, near_ties(*((64, 2048) if backend == "emulator" else (4096, 8192))), "row_major", None)


@on_every_backend
def test_quotients_of_the_smallest_rows(backend: str) -> None:
    """Remainders of numbers next to the smallest would underflow."""
    check(backend, near_ties(64, 1024, (-118, -112)), "row_major", None)


@on_every_backend
def test_tokens_that_no_host_lets_through(backend: str) -> None:
    """The kernel itself takes a value that is too small for zero.

    A NaN or an infinity shows in the scale.
    """
    spec, (source, *_) = ptxlab.find("quantize_activations_s8")
    x = np.ones((5, 32), np.float32)
    x[1, 3], x[2, 5], x[3], x[4] = np.nan, -np.inf, 2.0**-149 * 190, 1e-36
    outcome = ptxlab.runtime.run_spec(spec, source, {"x": x}, sizes={"rows": 1, "span": 32}, backend=backend)
    scale, x_q = outcome.outputs["scale"], outcome.outputs["x_q"]
    assert scale[0] == np.float32(1) / 127 and (x_q[0] == 127).all()
    assert not np.isfinite(scale[1:3]).any()
    assert (scale[3:] == 1).all() and (x_q[3:] == 0).all() and (outcome.outputs["token_sum"][3:] == 0).all()


@pytest.mark.full
def test_torch_keeps_its_kind_and_its_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(RNG.standard_normal((3, 96), dtype=np.float32)).bfloat16()
    got = ptxlab.quantize_activations(x, layout="fragment", backend="emulator")
    expected = quant.quantize_activations(x.float().numpy())
    assert got.x_q.dtype == torch.int8 and tuple(got.x_q.shape) == (2, 1, 512)
    assert np.array_equal(layout.from_fragment_order(got.x_q.numpy(), 3, 96), expected.q)
    assert np.array_equal(got.scale.numpy(), expected.scale) and got.token_sum.dtype == torch.int32


def test_into_given_arrays_and_of_no_tokens() -> None:
    x = RNG.standard_normal((5, 64), dtype=np.float32)
    for order, rows in (("row_major", None), ("tiles", 8)):
        out = ptxlab.quantize_activations(np.ones_like(x), layout=order, rows=rows, backend="emulator")
        assert ptxlab.quantize_activations(x, layout=order, rows=rows, out=out, backend="emulator") is out
        assert np.array_equal(out.token_sum, quant.quantize_activations(x).token_sum)
        unpacked = layout.unpack_activations(out)
        assert np.array_equal(unpacked.q, quant.quantize_activations(x).q)
        empty = ptxlab.quantize_activations(x[:0], layout=order, rows=rows, backend="emulator")
        assert empty.M == 0 and empty.x_q.size == 0


NAN, SMALL = np.ones((2, 32), np.float32), np.ones((2, 32), np.float32)
NAN[1, 7], SMALL[1] = np.nan, 1e-37


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones(32, np.float32), {}, r"quantize_activations: x: must be a matrix \[M, K\] \(got shape \(32,\)\)"),
        (np.ones((2, 48), np.float32), {}, r"K % 32 == 0 \(got K=48\)"),
        (np.ones((2, 131072), np.float32), {}, r"1 <= K < 131072 \(got K=131072\)"),
        (np.ones((2, 32)), {}, r"x: dtype float16 or bfloat16 or float32 \(got float64\)"),
        (np.ones((2, 32), np.int8), {}, r"quantize_activations: x: dtype float16 or .* \(got int8\)"),
        (np.ones((2, 0), np.float32), {}, r"1 <= K < 131072 \(got K=0\)"),
        (NAN, {}, r"x: must be finite in float32 \(got x\[1, 7\] is nan\)"),
        (SMALL, {}, r"x: row scales must lie in .*\(got row 1 has"),
        (
            np.ones((2, 32), np.float32),
            {"layout": "rows"},
            r"layout: must be one of row_major, fragment, tiles \(got rows",
        ),
        (
            np.ones((2, 32), np.float32),
            {"layout": "tiles"},
            r"rows: must be a multiple of 8 in 8..256 for tiles \(got None",
        ),
        (np.ones((2, 32), np.float32), {"layout": "tiles", "rows": "8"}, r"rows: must be a multiple of 8"),
        (np.ones((2, 32), np.float32), {"out": np.zeros((2, 32))}, r"out: must be PackedActivations \(got ndarray\)"),
        (np.ones((2, 32), np.float32), {"rows": 8}, r"rows: row_major has 1 \(got 8\)"),
        (np.ones((2, 32), np.float32), {"backend": "tpu"}, r"backend: one of gpu, emulator \(got tpu\)"),
    ],
)
def test_bad_input_is_refused(x: np.ndarray, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ptxlab.quantize_activations(x, **{"backend": "emulator", **options})


def test_out_must_be_of_the_same_shape_and_order() -> None:
    x = np.ones((2, 32), np.float32)
    out = ptxlab.quantize_activations(x, layout="fragment", backend="emulator")
    with pytest.raises(ArgumentError, match=r"out: must have M=2, K=32, layout=row_major, rows=1 \(got M=2.*fragment"):
        ptxlab.quantize_activations(x, out=out, backend="emulator")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x_q: np.asfortranarray(x_q), r"out\.x_q: C-contiguous"),  # else a copy would be written into
        (lambda x_q: x_q.astype(np.int16), r"out\.x_q: dtype int8 \(got int16\)"),
        (lambda x_q: np.frombuffer(x_q.tobytes(), np.int8).reshape(x_q.shape), r"out\.x_q: must be writeable"),
    ],
)
def test_out_must_be_of_arrays_that_can_be_written(change: Any, message: str) -> None:
    x = RNG.standard_normal((20, 512), dtype=np.float32)
    out = ptxlab.quantize_activations(x, layout="tiles", rows=8, backend="emulator")
    with pytest.raises(ArgumentError, match=message):
        ptxlab.quantize_activations(
            x, layout="tiles", rows=8, out=replace(out, x_q=change(out.x_q)), backend="emulator"
        )


def test_packed_activations_check_their_shapes() -> None:
    quantized = quant.quantize_activations(RNG.standard_normal((9, 96), dtype=np.float32))
    for order in ORDERS:
        rows = 16 if order == "tiles" else None
        packed = layout.pack_activations(quantized, order, rows)
        assert packed.x_q.shape == stored_shape(order, 9, 96, rows) and packed.rows == tile_of(order, rows)[0]
        assert np.array_equal(layout.unpack_activations(packed).q, quantized.q)
    with pytest.raises(ArgumentError, match=r"scale: shape \[9\] for row_major, M=9, K=96, rows=1 \(got \[8\]\)"):
        layout.PackedActivations(
            layout="row_major", M=9, K=96, x_q=quantized.q, scale=quantized.scale[:8], token_sum=quantized.token_sum
        )


# --- the GPU side, on a GPU that isn't one ---------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_arrays(fake: FakeGpu, dtype: str) -> None:
    x = RNG.standard_normal((5, 96), dtype=np.float32).astype(DTYPES[dtype])
    bits = x.view(np.uint16) if dtype == "bfloat16" else x
    got = ptxlab.quantize_activations(DeviceArray(bits), layout="fragment")
    expected = quant.quantize_activations(x)
    assert np.array_equal(layout.from_fragment_order(got.x_q.host, 5, 96), expected.q)
    assert np.array_equal(got.scale.host, expected.scale) and np.array_equal(got.token_sum.host, expected.token_sum)
    allocations, loads = fake.allocations, fake.loads
    assert ptxlab.quantize_activations(DeviceArray(bits), layout="fragment", out=got) is got
    assert (fake.allocations, fake.loads) == (allocations, loads)
    assert fake.launched == [("quantize_activations_s8", 7)] * 2


@pytest.mark.full
def test_a_capture_needs_out_and_a_first_call(fake: FakeGpu) -> None:
    x = DeviceArray(np.ones((2, 32), np.float16))
    out = ptxlab.quantize_activations(DeviceArray(np.ones((2, 32), np.float32)))
    fake.capturing = True
    with pytest.raises(ArgumentError, match=r"out: must be given in a capture"):
        ptxlab.quantize_activations(x)
    with pytest.raises(
        ArgumentError, match=r"quantize_activations: the first call of a shape loads its kernel: .*\(got M=2, K=32"
    ):
        ptxlab.quantize_activations(x, out=out)
    fake.capturing = False
    ptxlab.quantize_activations(x, out=out)
    fake.capturing = True
    assert ptxlab.quantize_activations(x, out=out) is out


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptxlab.gpu, "why_not", lambda *a, **k: "no NVIDIA driver found")
    with pytest.raises(UnavailableError, match="no NVIDIA driver found"):
        ptxlab.quantize_activations(np.ones((2, 32), np.float32), backend="gpu")


def test_an_older_gpu_is_said(fake: FakeGpu) -> None:
    fake.arch = 75
    with pytest.raises(
        UnavailableError,
        match=r"quantize_activations: quantize_activations_s8: it runs on sm_80, and this is sm_75; pass backend=",
    ):
        ptxlab.quantize_activations(DeviceArray(np.ones((2, 32), np.float16)))
    assert fake.loads == 0
