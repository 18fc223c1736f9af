"""RMSNorm and the gate of an FFN with INT8: the kernels against references in f64 and in their own order; the calls."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator, gpu, registry
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import layout, quant, reference
from ptxlab.lowbit.kernels.quantize import RMSNORM, SILU_MUL
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalize_rows
from ptxlab.lowbit.kernels.quantize.specs import row_geometry
from ptxlab.lowbit.layout.packed_activations import ORDERS
from ptxlab.runtime import Kernel, run_spec
from ptxlab.runtime.verify import Job, verify
from tests.support import chains, sync_mutants
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import DeviceArray, FakeGpu
from tests.support.strategies import floats

DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
EPS = 1e-5
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float16") -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def tokens_of(packed: layout.PackedActivations) -> quant.QuantizedActivations:
    """Unpack activations to a matrix, and assert what holds of any.

    Sums are those of the integers written, and the largest magnitude of a row is 127.
    """
    activations = layout.unpack_activations(packed)
    assert np.array_equal(activations.token_sum, activations.q.sum(axis=1, dtype=np.int32))
    assert (np.isin(np.abs(activations.q.astype(np.int32)).max(axis=1), (0, 127))).all()
    return activations


def same(a: quant.QuantizedActivations, b: quant.QuantizedActivations) -> bool:
    """Tell whether every bit is equal."""
    scales = np.array_equal(a.scale.view(np.uint32), b.scale.view(np.uint32))
    return scales and np.array_equal(a.q, b.q) and np.array_equal(a.token_sum, b.token_sum)


def assert_near_float64(actual: quant.QuantizedActivations, y: np.ndarray, relative: Any) -> None:
    """Assert that integers are the INT8 of y f64, which the kernel knows to a `relative` error.

    They are at most a step off, and only if a tie is that near.
    """
    scale = np.abs(y).max(axis=1) / 127
    of_scale = np.max(relative * np.abs(y) / np.abs(y).max(axis=1, keepdims=True), axis=1) + 2.0**-23
    assert (np.abs(actual.scale - scale) <= of_scale * scale).all()
    quotient = y / scale[:, None]
    off = np.abs(quotient) * (relative + of_scale[:, None] + 2.0**-23)
    tie = np.abs(np.abs(quotient) % 1 - 0.5) <= off
    assert (np.abs(actual.q - np.rint(quotient)) <= tie).all()


@st.composite
def problems(draw: st.DrawFn, chunks: int) -> dict[str, Any]:
    """Draw rows of any magnitude that have a scale, with and without residual."""
    order = draw(st.sampled_from(ORDERS))
    rows = draw(st.sampled_from((8, 16, 72))) if order == "tiles" else None
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.integers(1, 12)), 32 * draw(st.integers(1, chunks))
    x = draw(floats(dtype, shape))
    middle = np.ldexp(np.frexp(wide(x))[0], draw(st.integers(-8, 8))).astype(dtype)  # of one exponent
    x = np.where(np.abs(wide(x)).max(axis=1, keepdims=True) < 2.0**14, x, middle) if draw(st.booleans()) else middle
    gamma = np.random.default_rng(draw(st.integers(0, 99))).uniform(-2, 2, shape[1]).astype(dtype)
    residual = normal(*shape).astype(dtype) if draw(st.booleans()) else None
    extent = np.abs(normalize_rows(wide(x), wide(gamma), EPS)).max(axis=1, keepdims=True)
    x = np.where(extent > 2.0**-90, x, np.zeros_like(x))  # far from subnormal numbers, which f64 does not have there
    return {"x": x, "gamma": gamma, "residual": residual, "layout": order, "rows": rows}


def check_norm(backend: str, x: np.ndarray, gamma: np.ndarray, residual: np.ndarray | None, **how: Any) -> None:
    """Assert that the kernel's bits are those of `normalize_rows`, and that these are near the f64 reference."""
    normed, new_residual = np.empty_like(x), None if residual is None else residual.copy()
    packed = ptxlab.rmsnorm_quantize(x, gamma, residual=new_residual, eps=EPS, normed=normed, backend=backend, **how)
    v = x if residual is None else (wide(x) + wide(residual)).astype(x.dtype)
    assert new_residual is None or np.array_equal(new_residual.view(np.uint16), v.view(np.uint16))
    y = normalize_rows(wide(v), wide(gamma), EPS)
    activations = tokens_of(packed)
    assert same(activations, quant.quantize_activations(y))
    assert np.array_equal(normed.view(np.uint16), y.astype(x.dtype).view(np.uint16))
    right = reference.rms_norm(wide(v), wide(gamma), EPS)
    assert (np.abs(y - right) <= 2.0**-19 * np.abs(right) + 2.0**-130).all()  # some 30 additions, halved by the root
    if np.abs(right).max(axis=1).min() > 0:
        assert_near_float64(activations, right, 2.0**-19)


@pytest.mark.full
@given(problem=problems(chunks=12))
@settings(max_examples=25)
def test_every_bit_of_a_normed_row(problem: dict[str, Any]) -> None:
    check_norm("emulator", **problem)


@pytest.mark.long(20)
@pytest.mark.gpu
@given(problem=problems(chunks=200))
@settings(max_examples=200)
def test_every_bit_of_a_normed_row_on_the_gpu(problem: dict[str, Any]) -> None:
    check_norm("gpu", **problem)


@pytest.mark.default_cases("128-emulator")
@on_every_backend
@pytest.mark.parametrize("K", [128, 4096, 8192, 8224, 16384, 32768])
def test_rows_of_any_width(K: int, backend: str) -> None:
    """A row takes a block of one warp up to one of 16, or clusters of two and of four.

    The last warps of a cluster have nothing to do.
    """
    M = max(2, 32768 // K)  # tokens enough that another order of the sum would show
    check_norm(backend, normal(M, K), normal(K), normal(M, K))
    check_gate(backend, normal(M, 2 * K), "silu")


def test_a_row_is_of_as_many_blocks_as_its_width_takes() -> None:
    assert [tuple(row_geometry(K).values()) for K in (32, 4096, 8192, 8224, 11008, 28672, 32768)] == [
        (32, 1), (256, 1), (512, 1), (288, 2), (352, 2), (448, 4), (512, 4),
    ]  # fmt: skip


def check_gate(backend: str, gate_up: np.ndarray, activation: str, **how: Any) -> None:
    activations = tokens_of(ptxlab.silu_mul_quantize(gate_up, activation=activation, backend=backend, **how))
    x = wide(gate_up)
    turns = np.maximum(reference.exponent(x[:, : x.shape[1] // 2].astype(np.float64), activation), 0)
    assert_near_float64(activations, reference.apply_gate(x, activation), 2.0**-20 + 2.0**-22 * turns)


@pytest.mark.default_cases("row_major-None-silu-float16-emulator")
@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize(("order", "rows"), [("row_major", None), ("fragment", None), ("tiles", 8)])
def test_gates(order: str, rows: int | None, activation: str, dtype: str, backend: str) -> None:
    """The gates have all sizes, also nearly shut ones, where exp is infinite."""
    gate_up = (wide(normal(9, 448)) * np.geomspace(0.01, 60, 9, dtype=np.float32)[:, None]).astype(DTYPES[dtype])
    check_gate(backend, gate_up, activation, layout=order, rows=rows)


@on_every_backend
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_an_open_gate_is_exact(activation: str, backend: str) -> None:
    """The sum 1 + exp(-20) is 1: the product remains, of which every bit is known."""
    gate = (20 + np.abs(wide(normal(6, 512)))).astype(np.float16)
    up = normal(6, 512) * np.float16(2.0) ** np.arange(-20, 10, 5).astype(np.float16)[:, None]
    packed = ptxlab.silu_mul_quantize(np.concatenate([gate, up], axis=1), activation=activation, backend=backend)
    assert same(tokens_of(packed), quant.quantize_activations(wide(gate) * wide(up)))


def test_the_references_are_what_they_say() -> None:
    g, up = np.linspace(-6, 6, 25), np.linspace(1, 2, 25)
    both = np.concatenate([g, up])
    tanh = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    assert np.allclose(reference.apply_gate(both, "gelu_tanh"), tanh * up, rtol=1e-12)
    assert np.allclose(reference.apply_gate(both), g / (1 + np.exp(-g)) * up, rtol=1e-12)
    x = np.array([[3.0, -4.0]])
    assert np.allclose(reference.rms_norm(x, np.array([1.0, 2.0]), 0.5), [[3 / np.sqrt(13), -8 / np.sqrt(13)]])
    with pytest.raises(ValueError, match="activation: one of silu, gelu_tanh"):
        reference.apply_gate(both, "relu")


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("K", [160, 8224])
def test_a_row_has_the_same_bits_in_any_batch_and_order(K: int, backend: str) -> None:
    M = 300 if K == 160 or backend == "gpu" else 3
    x, residual, gamma, gate_up = normal(M, K), normal(M, K), normal(K), normal(M, 2 * K)
    m = M - 2

    def both(part: slice, **how: Any) -> list[quant.QuantizedActivations]:
        packed = ptxlab.rmsnorm_quantize(x[part], gamma, residual=residual[part].copy(), backend=backend, **how)
        return [tokens_of(packed), tokens_of(ptxlab.silu_mul_quantize(gate_up[part], backend=backend, **how))]

    alone = both(slice(m, m + 1))
    for options in ({}, {"layout": "fragment"}, {"layout": "tiles", "rows": 16}):
        for one, all_of_them in zip(alone, both(slice(None), **options), strict=True):
            row = (array[m : m + 1] for array in (all_of_them.q, all_of_them.scale, all_of_them.token_sum))
            assert same(one, quant.QuantizedActivations(*row))


@pytest.mark.full
@on_every_backend
def test_tokens_that_no_host_lets_through(backend: str) -> None:
    """A NaN or an infinity shows in the scale of its own row, and a row that is too small counts as zeros."""
    K = 8224
    x = np.ones((6, K), np.float32)
    x[1, 3], x[2, K - 1], x[3, 7], x[4] = np.nan, np.inf, -np.inf, 0
    sizes = {"rows": 1, "span": 32, "added": 0, "kept": 0, "eps": EPS}
    nothing = np.empty((0, K), np.float16)

    def run(spec: Any, inputs: Any, **sizes: Any) -> dict[str, np.ndarray]:
        return run_spec(spec, registry.find(spec.name)[1][0], inputs, sizes=sizes, backend=backend).outputs

    one = np.ones(K, np.float16)
    normed = run(RMSNORM, {"x": x.astype(np.float16), "gamma": one, "residual": nothing}, **sizes)
    gated = run(SILU_MUL, {"gate_up": np.tile(x, 2).astype(np.float16)}, K=K, rows=1, span=32, activation=0)
    for outputs in (normed, gated):
        assert np.isfinite(outputs["scale"]).tolist() == [True, False, False, False, True, True]
        assert outputs["scale"][4] == 1 and not outputs["x_q"][4].any() and outputs["token_sum"][4] == 0
        assert (outputs["x_q"][[0, 5]] == 127).all() and (outputs["token_sum"][[0, 5]] == 127 * K).all()
    # Beyond the range of f32: squares without a finite sum, and rows below the smallest scale (of bfloat16)
    bits = reference.bfloat16_bits(np.array([[1e30], [1.0], [1e-38]], np.float32).repeat(32, axis=1))
    gamma = reference.bfloat16_bits(np.full(32, 1e-38, np.float32))
    outputs = run(RMSNORM, {"x": bits, "gamma": gamma, "residual": np.empty((0, 32), np.uint16)}, **sizes)
    assert not np.isfinite(outputs["scale"][0]) and (outputs["scale"][1:] == 1).all() and not outputs["x_q"][1:].any()


@on_every_backend
def test_quotients_of_small_rows_are_exact(backend: str) -> None:
    """Row and scale are lifted by 2^64 where a correction would underflow."""
    x = normal(4, 512, dtype="bfloat16")
    gamma = (wide(normal(512)) * np.float32(1e-30)).astype(DTYPES["bfloat16"])
    check_norm(backend, x, gamma, None)


# --- the calls -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_into_given_arrays_and_of_no_tokens() -> None:
    x, gamma = normal(5, 64), normal(64)
    for order, rows in (("row_major", None), ("tiles", 8)):
        options: dict[str, Any] = {"layout": order, "rows": rows, "backend": "emulator"}
        out = ptxlab.quantize_activations(np.ones_like(x), **options)
        assert ptxlab.rmsnorm_quantize(x, gamma, out=out, **options) is out
        assert same(tokens_of(out), quant.quantize_activations(normalize_rows(wide(x), wide(gamma), EPS)))
        assert ptxlab.silu_mul_quantize(np.concatenate([x, x], axis=1), out=out, **options) is out
        assert_near_float64(tokens_of(out), reference.apply_gate(np.concatenate([wide(x)] * 2, axis=1)), 2.0**-19)
        empty = ptxlab.rmsnorm_quantize(x[:0], gamma, residual=x[:0].copy(), **options)
        assert empty.M == 0 and empty.K == 64 and empty.x_q.size == 0
        assert ptxlab.silu_mul_quantize(x[:0], **options).K == 32


def test_torch_keeps_its_kind_and_its_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    x, residual, gamma = (torch.from_numpy(wide(normal(*shape))).bfloat16() for shape in ((3, 96), (3, 96), (96,)))
    v = (x.float() + residual.float()).bfloat16()
    got = ptxlab.rmsnorm_quantize(x, gamma, residual=residual, layout="fragment", backend="emulator")
    expected = quant.quantize_activations(normalize_rows(v.float().numpy(), gamma.float().numpy(), EPS))
    assert torch.equal(residual, v) and got.x_q.dtype == torch.int8
    assert np.array_equal(layout.from_fragment_order(got.x_q.numpy(), 3, 96), expected.q)


X, GAMMA, NAN = np.ones((2, 64), np.float16), np.ones(64, np.float16), np.ones((2, 64), np.float16)
NAN[1, 7] = np.nan
BITS, THREE = np.ones((2, 64), np.uint16), np.ones((3, 64), np.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, r"rmsnorm_quantize: x: must be a matrix \[M, K\] \(got shape \(64,\)\)"),
        ({"x": X[:, :48].copy(), "gamma": GAMMA[:48]}, r"rmsnorm_quantize: K % 32 == 0 \(got K=48\)"),
        ({"x": np.ones((1, 32800), np.float16), "gamma": np.ones(32800, np.float16)}, r"1 <= K <= 32768 \(got K=32800"),
        ({"x": X.astype(np.float32)}, r"rmsnorm_quantize: x: dtype float16 or bfloat16 \(got float32\)"),
        ({"gamma": GAMMA[:32]}, r"rmsnorm_quantize: gamma: shape \[64\] \(got \[32\]\)"),
        ({"gamma": GAMMA.astype(np.float32)}, r"rmsnorm_quantize: gamma: dtype float16 \(got float32\)"),
        ({"gamma": None}, r"rmsnorm_quantize: gamma: an array.*\(got NoneType\)"),
        ({"residual": X[:1].copy()}, r"rmsnorm_quantize: residual: shape \[2, 64\] \(got \[1, 64\]\)"),
        ({"residual": BITS}, r"rmsnorm_quantize: residual: dtype float16 \(got uint16\)"),
        ({"residual": X}, r"rmsnorm_quantize: residual: must not share memory with x"),
        ({"x": THREE[:2], "residual": THREE[1:]}, r"rmsnorm_quantize: residual: must not share memory with x"),
        ({"x": THREE[1:], "residual": THREE[:2]}, r"rmsnorm_quantize: residual: must not share memory with x"),
        ({"normed": X}, r"rmsnorm_quantize: normed: must not share memory with x"),
        ({"residual": BITS, "normed": BITS[:1]}, r"rmsnorm_quantize: normed: must not share memory with residual"),
        ({"normed": np.broadcast_to(np.float16(0), (2, 64))}, r"rmsnorm_quantize: normed: C-contiguous"),
        ({"residual": np.frombuffer(X.tobytes(), np.float16).reshape(2, 64)}, r"residual: must be writeable"),
        ({"eps": 0}, r"rmsnorm_quantize: eps: a number in 1e-30..1 \(got 0\)"),
        ({"eps": float("nan")}, r"rmsnorm_quantize: eps: a number in 1e-30..1 \(got nan\)"),
        ({"eps": "small"}, r"rmsnorm_quantize: eps: a number in 1e-30..1 \(got 'small'\)"),
        ({"programmatic": 1}, r"rmsnorm_quantize: programmatic: must be True or False \(got 1\)"),
        ({"x": NAN}, r"x: must be finite in float32 \(got x\[1, 7\] is nan\)"),
        ({"residual": NAN}, r"residual: must be finite in float32 \(got residual\[1, 7\] is nan\)"),
        (
            {"x": np.full_like(X, 40000), "residual": np.full_like(X, 30000)},
            r"x \+ residual: must be finite in float32 \(got x \+ residual\[0, 0\] is inf\)",
        ),
        ({"gamma": NAN[1]}, r"gamma: must be finite in float32 \(got gamma\[7\] is nan\)"),
        ({"layout": "tiles"}, r"rows: must be a multiple of 8 in 8..256 for tiles \(got None"),
        ({"out": X}, r"rmsnorm_quantize: out: must be PackedActivations \(got ndarray\)"),
    ],
)
def test_bad_input_to_the_norm_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"x": X.copy(), "gamma": GAMMA, "backend": "emulator", **change}
    original_arrays = {name: array.copy() for name, array in arguments.items() if isinstance(array, np.ndarray)}
    with pytest.raises(ArgumentError, match=message):
        ptxlab.rmsnorm_quantize(**{**arguments, "x": change.get("x", X)})
    assert all(np.array_equal(arguments[name], array, equal_nan=True) for name, array in original_arrays.items())


@pytest.mark.parametrize(
    ("gate_up", "options", "message"),
    [
        (X[:, :33].copy(), {}, r"silu_mul_quantize: gate_up: must be a matrix \[M, 2·K\] \(got shape \(2, 33\)\)"),
        (X[:, :32].copy(), {}, r"silu_mul_quantize: K % 32 == 0 \(got K=16\)"),
        (X, {"activation": "relu"}, r"activation: must be one of silu, gelu_tanh \(got relu\)"),
        (X, {"activation": None}, r"activation: must be one of silu, gelu_tanh \(got None\)"),
        (X.astype(np.float32), {}, r"silu_mul_quantize: gate_up: dtype float16 or bfloat16 \(got float32\)"),
        (X, {"programmatic": 1}, r"silu_mul_quantize: programmatic: must be True or False \(got 1\)"),
        (X, {"out": X}, r"silu_mul_quantize: out: must be PackedActivations \(got ndarray\)"),
        (np.ones((1, 65600), np.float16), {}, r"silu_mul_quantize: 1 <= K <= 32768 \(got K=32800\)"),
        (NAN, {}, r"gate_up: must be finite in float32 \(got gate_up\[1, 7\] is nan\)"),
        (X, {"layout": "rows"}, r"layout: must be one of row_major, fragment, tiles \(got rows"),
    ],
)
def test_bad_input_to_the_gate_is_refused(gate_up: np.ndarray, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ptxlab.silu_mul_quantize(gate_up, backend="emulator", **options)


# --- the GPU side, on a GPU that isn't one ---------------------------------------------------------------------------


@pytest.mark.full
def test_device_arrays(fake: FakeGpu) -> None:
    x, residual, gamma = normal(5, 96), normal(5, 96), normal(96)
    v = x + residual
    arrays = [DeviceArray(array) for array in (x, gamma, residual)]
    got = ptxlab.rmsnorm_quantize(arrays[0], arrays[1], residual=arrays[2], programmatic=True)
    expected = quant.quantize_activations(normalize_rows(wide(v), wide(gamma), EPS))
    assert np.array_equal(got.x_q.host, expected.q) and np.array_equal(arrays[2].host, v)
    gate_up = DeviceArray(normal(5, 192))
    assert ptxlab.silu_mul_quantize(gate_up, out=got) is got
    assert ptxlab.quantize_activations(arrays[0], out=got, programmatic=True) is got
    names = ("rmsnorm_quantize", "silu_mul_quantize", "quantize_activations_s8")
    assert [name for name, _ in fake.launched] == list(names)
    assert [geometry.programmatic for geometry in fake.geometries] == [True, False, True]


def test_shared_memory_is_found_in_a_call_like_one_before(fake: FakeGpu) -> None:
    """Such a call skips the checks."""
    x, gamma = DeviceArray(normal(4, 64)), DeviceArray(normal(64))
    out = ptxlab.rmsnorm_quantize(x, gamma, residual=DeviceArray(x.host.copy()))
    ptxlab.rmsnorm_quantize(x, gamma, residual=DeviceArray(x.host.copy()), out=out)
    for residual in (x, DeviceArray(x.host)):
        with pytest.raises(ArgumentError, match=r"residual: must not share memory with x"):
            ptxlab.rmsnorm_quantize(x, gamma, residual=residual, out=out)
    with pytest.raises(ArgumentError, match=r"rmsnorm_quantize: gamma: on the current device 0 \(got device 1\)"):
        ptxlab.rmsnorm_quantize(x, DeviceArray(gamma.host, device=1), out=out)
    with pytest.raises(ArgumentError, match=r"rmsnorm_quantize: gamma: an array \[64\] of float16 \(got NoneType\)"):
        ptxlab.rmsnorm_quantize(x, None)
    assert len(fake.launched) == 2


def test_a_capture_needs_out(fake: FakeGpu) -> None:
    x, gamma = DeviceArray(X), DeviceArray(GAMMA)
    out = ptxlab.rmsnorm_quantize(x, gamma)
    fake.capturing = True
    with pytest.raises(ArgumentError, match=r"rmsnorm_quantize: out: must be given in a capture"):
        ptxlab.rmsnorm_quantize(x, gamma)
    assert ptxlab.rmsnorm_quantize(x, gamma, out=out) is out


def test_an_older_gpu_is_said(fake: FakeGpu) -> None:
    fake.arch = 75
    with pytest.raises(
        UnavailableError, match=r"silu_mul_quantize: it runs on sm_80, and this is sm_75; pass backend="
    ):
        ptxlab.silu_mul_quantize(DeviceArray(X))


# --- what synchronises -----------------------------------------------------------------------------------------------

SYNCHRONISED = {  # in a block, and in a cluster of two
    "norm": (RMSNORM, {"M": 2, "K": 1024, "rows": 1, "span": 32, "added": 1, "kept": 0, "eps": EPS}),
    "norm in a cluster": (RMSNORM, {"M": 2, "K": 8224, "rows": 1, "span": 32, "added": 1, "kept": 0, "eps": EPS}),
    "gate in a cluster": (SILU_MUL, {"M": 2, "K": 8224, "rows": 1, "span": 32, "activation": 0}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SYNCHRONISED)
def test_every_missing_wait_is_noticed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks or a wrong result show it, early or late."""
    spec, sizes = SYNCHRONISED[case]
    (source,) = registry.find(spec.name)[1]
    logical = spec.example(np.random.default_rng(0), **sizes)
    config = spec.config_for(sizes)
    arrays = {name: array.astype(np.float16) for name, array in spec.pack(logical).items()}
    kernel = Kernel.of(spec, source, config)

    def check() -> None:
        for mode in emulator.MODES:
            inputs = {name: array.copy() for name, array in arrays.items()}
            outcome = run_spec(
                spec, source, inputs, sizes=sizes, backend="emulator", checks=emulator.CHECKS, mode=mode, config=config
            )
            assert outcome.findings == ()
            ptxlab.runtime.verify.compare(spec, outcome.outputs, logical, config)

    check()
    for (opcode, place), copies in sync_mutants.statements_by_place(kernel).items():
        with monkeypatch.context() as patch:
            assert sync_mutants.diagnosis(sync_mutants.apply_change(kernel, copies), check, patch), (
                f"{opcode} of {place}"
            )


@pytest.mark.default_cases("quantize_activations_s8")
@pytest.mark.parametrize("name", ["rmsnorm_quantize", "silu_mul_quantize", "quantize_activations_s8"])
def test_the_kernel_before_is_waited_for(name: str) -> None:
    """Without the wait every input but gamma is read too early."""
    spec, (source,) = registry.find(name)
    wait = "    ptxlab::wait_for_predecessors();\n"
    assert source.text.count(wait) == 1 and "gamma" not in spec.after_wait
    sizes = spec.example_sizes[1]
    job = Job(spec, replace(source, text=source.text.replace(wait, "")), "emulator", sizes)
    assert "ahead of griddepcontrol.wait" in verify(job).detail


# --- on a GPU --------------------------------------------------------------------------------------------------------

ON_GPU = pytest.mark.skipif(gpu.why_not("sm_90") is not None, reason="needs sm_90")


@pytest.mark.long(20)
@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("K", [4096, 28672])
@pytest.mark.parametrize("M", [1, 33, 1000])
def test_a_programmatic_chain_is_the_plain_chain(M: int, K: int) -> None:
    """A norm reads the rows of the norm before it, written while the gate between them runs.

    So a stale byte goes on to the end.
    """
    import cupy

    x, gamma = cupy.asarray(normal(M, K)), cupy.asarray(normal(K))
    first, second, residual = (cupy.zeros((M, K), cupy.float16) for _ in range(3))
    out, gated = ptxlab.quantize_activations(x), ptxlab.silu_mul_quantize(x)

    def chain(programmatic: bool) -> None:
        inputs = [x, *[first, second] * 6]
        for read, written in pairwise(inputs):
            options = {"out": out, "programmatic": programmatic}
            ptxlab.rmsnorm_quantize(read, gamma, residual=residual, normed=written, **options)
            ptxlab.silu_mul_quantize(written, **{**options, "out": gated})
            ptxlab.quantize_activations(written, **options)

    written = (residual, first, second, out.x_q, out.scale, out.token_sum, gated.x_q, gated.scale, gated.token_sum)
    chains.assert_same_bits_as_plain(chain, written)
