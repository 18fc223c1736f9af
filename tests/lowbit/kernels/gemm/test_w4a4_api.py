"""`gemm_w4a4`: arrays of every library and kind, on the host and on a GPU that isn't one; and what is refused."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.kernels.gemm.w4a4 import gemm_atom
from ptxlab.spec.dtypes import convert_to_dtype
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device

M, N, K, OUTLIERS, GROUP = 5, 40, 192, 64, 64
RNG = np.random.default_rng(0)
W = quant.quantize_atom_weight(RNG.standard_normal((N, K + OUTLIERS), dtype=np.float32), GROUP, OUTLIERS)
X = quant.quantize_atom_activations(RNG.standard_normal((M, K + OUTLIERS), dtype=np.float32), GROUP, OUTLIERS)
BIAS = RNG.standard_normal(N, dtype=np.float32)
WEIGHTS = {name: layout.pack_atom(W, name) for name in layout.ATOM_LAYOUTS}
TOKENS = {name: layout.pack_atom_activations(X, order) for name, order in layout.ATOM_ORDERS.items()}
KERNELS = {"strips": "gemm_w4a4_sm90", "rows": "gemm_w4a4_atom_sm80"}
every = pytest.mark.parametrize("name", WEIGHTS)


def expected_product(dtype: str = "float16", bias: np.ndarray | None = None) -> np.ndarray:
    total = gemm_atom(W, X)
    return convert_to_dtype(total if bias is None else total + bias, dtype)


@pytest.mark.full
@every
@on_every_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_output(name: str, dtype: str, backend: str) -> None:
    y = ptxlab.gemm_w4a4(TOKENS[name], WEIGHTS[name], bias=BIAS, out_dtype=dtype, backend=backend)
    expected = expected_product(dtype, BIAS)
    assert y.dtype == expected.dtype and np.array_equal(y, expected)


@every
def test_into_a_given_array_and_of_no_tokens(name: str) -> None:
    out = np.empty((M, N), np.float32)
    assert ptxlab.gemm_w4a4(TOKENS[name], WEIGHTS[name], out=out, backend="emulator") is out
    assert np.array_equal(out, expected_product("float32"))
    tokens = TOKENS[name]
    none = replace(tokens, M=0, **{part: array[:0] for part, array in tokens.arrays.items()})
    assert ptxlab.gemm_w4a4(none, WEIGHTS[name], backend="emulator").shape == (0, N)


@pytest.mark.default_cases("rows")
@every
def test_torch_keeps_its_kind(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = replace(TOKENS[name], **{part: torch.from_numpy(array) for part, array in TOKENS[name].arrays.items()})
    y = ptxlab.gemm_w4a4(x, WEIGHTS[name], bias=torch.from_numpy(BIAS), out_dtype=torch.float32, backend="emulator")
    assert np.array_equal(np.asarray(y), expected_product("float32", BIAS))
    out = torch.empty((M, N), dtype=torch.bfloat16)
    assert ptxlab.gemm_w4a4(x, WEIGHTS[name], out=out, backend="emulator") is out
    assert np.array_equal(out.view(torch.int16).numpy().view(np.uint16), expected_product("bfloat16"))


@pytest.mark.full
@every
def test_device_arrays(fake: FakeGpu, name: str) -> None:
    fake.arch = 90 if name == "strips" else 86
    x, weight = on_device(TOKENS[name]), on_device(WEIGHTS[name])
    y = ptxlab.gemm_w4a4(x, weight, bias=DeviceArray(BIAS), programmatic=name == "strips")
    assert np.array_equal(y.host, expected_product("float16", BIAS))
    out = DeviceArray(np.empty((M, N), np.float32))
    loads = fake.loads
    assert ptxlab.gemm_w4a4(x, weight, out=out) is out and np.array_equal(out.host, expected_product("float32"))
    assert fake.loads == loads + 1
    fake.capturing = True
    assert ptxlab.gemm_w4a4(x, weight, out=out) is out and fake.loads == loads + 1
    with pytest.raises(ArgumentError, match="gemm_w4a4: out: must be given in a capture"):
        ptxlab.gemm_w4a4(x, weight)
    assert {kernel for kernel, _ in fake.launched} == {KERNELS[name]}
    assert fake.geometries[0].programmatic == (name == "strips")


def test_the_kernel_is_the_weights(fake: FakeGpu) -> None:
    """A cached call of one layout is not taken for the other, though the sizes are equal."""
    for name in WEIGHTS:
        ptxlab.gemm_w4a4(on_device(TOKENS[name]), on_device(WEIGHTS[name]))
    assert [kernel for kernel, _ in fake.launched] == list(KERNELS.values())


def test_an_older_or_newer_gpu_is_said(fake: FakeGpu) -> None:
    for fake.arch in (80, 100):
        with pytest.raises(
            UnavailableError, match=r"gemm_w4a4: gemm_w4a4_sm90: it runs on sm_90a, and this is sm_.*pass backend="
        ):
            ptxlab.gemm_w4a4(on_device(TOKENS["strips"]), on_device(WEIGHTS["strips"]))


STRIPS = {"x": TOKENS["strips"], "weight": WEIGHTS["strips"], "backend": "emulator"}
OTHER = layout.pack_atom_activations(quant.quantize_atom_activations(np.ones((M, K), np.float32), GROUP, OUTLIERS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": W}, "gemm_w4a4: weight: must be an AtomWeight (layout.pack_atom) (got AtomRows)"),
        ({"x": X}, "gemm_w4a4: x: must be AtomActivations (ptxlab.reorder_quantize) (got AtomRows)"),
        ({"x": TOKENS["rows"]}, "gemm_w4a4: x: must be bytes for a weight in strips (got pairs)"),
        ({"weight": WEIGHTS["rows"]}, "gemm_w4a4: x: must be pairs for a weight in rows (got bytes)"),
        ({"x": OTHER}, "must have K=192, outliers=64, group=64 as the weight has (got K=128, outliers=64, group=64)"),
        ({"x": replace(STRIPS["x"], x=X.q4[:, :1].repeat(256, 1).astype(np.int16))}, "x.x: dtype int8 (got int16)"),
        ({"x": replace(STRIPS["x"], scale=np.ones((M, 8), np.float32))}, "x.scale: dtype float16 (got float32)"),
        ({"bias": BIAS[:8]}, "gemm_w4a4: bias: shape [40] (got [8])"),
        ({"bias": BIAS.astype(np.float16)}, "gemm_w4a4: bias: dtype float32 (got float16)"),
        ({"out_dtype": "int32"}, "gemm_w4a4: out_dtype: must be one of float16, bfloat16, float32 (got int32)"),
        (
            {"out": np.empty((M, N), np.int32)},
            "gemm_w4a4: out: dtype must be one of float16, bfloat16, float32 (got in",
        ),
        ({"out": np.empty((M, N + 8), np.float16)}, "gemm_w4a4: out: shape [5, 40] (got [5, 48])"),
        ({"out": np.empty((M, N), np.float32), "out_dtype": "float16"}, "gemm_w4a4: out: dtype float16 (got float32)"),
        ({"backend": "cpu"}, "backend: one of gpu, emulator (got cpu)"),
        ({"programmatic": 1}, "gemm_w4a4: programmatic: must be True or False (got 1)"),
        (
            {"x": TOKENS["rows"], "weight": WEIGHTS["rows"], "programmatic": True},
            "gemm_w4a4: programmatic: only for gemm_w4a4_sm90, which waits (got gemm_w4a4_atom_sm80)",
        ),
        ({"weight": on_device(WEIGHTS["strips"])}, "gemm_w4a4: weight: "),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)) as error:
        ptxlab.gemm_w4a4(**{**STRIPS, **change})
    assert "\n" not in str(error.value)
