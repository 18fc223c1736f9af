"""GEMMs with SiLU·mul or a residual add at the end: every way a tile may end, the public call, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator, gpu
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import layout, quant, reference
from ptxlab.lowbit.kernels.gemm import epilogues, strips_tiles
from ptxlab.lowbit.kernels.gemm.strips_tiles import StripChoice, StripTile
from ptxlab.lowbit.layout import PackedWeight, pack, stack_experts, unpack
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.runtime import verify
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import convert_to_dtype, floats, numbers, storage
from tests.support import gemm_checks as checks
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device
from tests.support.gemm_calls import BIAS, SCHEMES, STRIPS, WEIGHTS, X_SCALE, K, M, X, expected_product
from tests.support.random_weights import assert_equal

# One MMA column and several, and an odd number; two MMAs of a warp group; warp groups along K; clusters of 2 and 4,
# whose blocks own some columns each.
LARGE = tuple(
    StripChoice(StripTile(*tile), strips, stages, split).constants
    for tile, strips, stages, split in (
        ((8, 2, 1, 1, 128), 7, 2, 1),
        ((16, 1, 2, 1, 256), 4, 4, 2),
        ((32, 1, 1, 2, 256), 8, 2, 1),
        ((64, 1, 1, 1, 128), 4, 3, 4),
        ((80, 1, 1, 1, 128), 3, 2, 1),
    )
)
SMALL = ({"ROWS": 1, "SLICES": 4, "STAGES": 3}, {"ROWS": 4, "SLICES": 4, "STAGES": 2})
FORMS = {spec.label: spec for spec in epilogues.FORMS}
CASES = [
    (label, config)
    for label, spec in FORMS.items()
    if "channel" not in spec.form
    for config in (SMALL if "small" in spec.name else LARGE)
]


def ids(case: Any) -> str:
    return case if isinstance(case, str) else "-".join(f"{name}{choice}" for name, choice in case.items())


def check_kernel(
    spec: KernelSpec,
    logical: dict[str, Any],
    backend: str,
    config: dict[str, int],
    packed: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run a kernel under the emulator's checks, and compare the result with the reference.

    `config` overrides chosen constants.
    """
    sizes = {"M": len(logical["x"]), "N": len(logical["weight"].q4), "K": logical["x"].shape[1]}
    if "g" in spec.symbols:
        sizes["g"] = logical["weight"].group
    config = {**spec.config_for(sizes), **config}
    inputs = dict(packed or spec.pack(logical))
    if config["SIGNED"]:
        del inputs["x_sum"]
    if "y" in inputs:
        inputs["y"] = convert_to_dtype(inputs["y"], epilogues.OUTPUTS[config["OUT"]])
    y = checks.run_checked(spec, inputs, backend, sizes=sizes, config=config, **options)
    verify.compare(spec, {"y": y}, logical, config)


@pytest.mark.full
@pytest.mark.parametrize(("label", "config"), CASES, ids=ids)
def test_every_end_of_a_tile(label: str, config: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has many tiles on one SM; the options take turns over the cases."""
    spec, turn = FORMS[label], CASES.index((label, config))
    monkeypatch.setattr(strips_tiles, "SMS", 1 if turn % 2 else 132)
    BM = config.get("BM", 12)
    tokens = BM + 5 if BM < 64 else BM - 3  # of two tiles, or of one that has several batches of loads
    logical = spec.example(np.random.default_rng(turn), M=tokens, N=144, K=448, g=64)
    logical = checks.with_zeros(logical, with_bias=bool(turn % 3))
    options = {"OUT": turn % 2, "SIGNED": turn // 2 % 2}
    check_kernel(spec, logical, "emulator", {**config, **options}, mode=("late", "early")[turn % 2])


@pytest.mark.full
@pytest.mark.parametrize("label", [label for label in FORMS if "channel" in label])
@on_every_backend
def test_zero_points_of_every_row_leave(label: str, backend: str) -> None:
    spec = FORMS[label]
    check_kernel(spec, spec.example(np.random.default_rng(0), M=11, N=80, K=160), backend, {})


@pytest.mark.long(70)
@pytest.mark.gpu
@pytest.mark.parametrize("N", [1104, 30016])
@pytest.mark.parametrize("label", FORMS)
def test_every_chosen_tile_on_the_gpu(label: str, N: int) -> None:
    spec = FORMS[label]
    for tokens in (1, 3, 8, 16, 17, 31) if "small" in spec.name else (1, 9, 16, 33, 64, 100, 128, 200, 256, 300, 512):
        groups = {"g": 64} if "g" in spec.symbols else {}
        logical = spec.example(np.random.default_rng(tokens), M=tokens, N=N, K=448, **groups)
        packed = spec.pack(logical)
        for OUT in (0, 1):
            for config in ({"OUT": OUT}, {"OUT": OUT, "SIGNED": int(bool(groups))}):
                check_kernel(spec, logical, "gpu", config, packed)


@pytest.mark.full
def test_no_tile_spills_or_waits_for_its_own_wgmma() -> None:
    """SiLU·mul is compiled in the largest tile; a reduction needs no more registers than a store."""
    spec, tile, split = FORMS["gemm_w4a8_sm90:silu_mul"], StripTile(128, 2, 1, 2, 128), 1
    sizes = {"M": tile.BM, "N": 4096, "K": 4096, "g": 128}
    choice = StripChoice(tile, tile.strips, strips_tiles._stages(tile, tile.strips, split, 128), split)
    checks.compile_checked(spec, {**spec.config_for(sizes), **choice.constants, "SIGNED": 0}, sizes)


# --- the packing -----------------------------------------------------------------------------------------------------

F = 24  # features: three turns of eight
GATE_UP = {
    scheme: with_arrays(weight, lambda rows: np.concatenate([rows, rows])[: 2 * F])
    for scheme, weight in SCHEMES.items()
}
INTERLEAVED = {scheme: pack(weight, "strips", interleaved=True) for scheme, weight in GATE_UP.items()}


@pytest.mark.parametrize("scheme", GATE_UP)
def test_gate_and_up_of_a_feature_are_rows_of_a_lane(scheme: str) -> None:
    weight, packed = GATE_UP[scheme], INTERLEAVED[scheme]
    assert_equal(unpack(packed), weight)
    rows = unpack(replace(packed, interleaved=False)).q4.reshape(-1, 2, 8, K)
    assert np.array_equal(rows[:, 0].reshape(F, K), weight.q4[:F]) and np.array_equal(
        rows[:, 1].reshape(F, K), weight.q4[F:]
    )


def test_a_file_says_so(tmp_path: Any) -> None:
    layout.save(INTERLEAVED["lqq"], tmp_path / "w.safetensors")
    loaded = layout.load(tmp_path / "w.safetensors")
    assert loaded.interleaved
    assert_equal(unpack(loaded), GATE_UP["lqq"])
    layout.save(STRIPS["lqq"], tmp_path / "w.safetensors")
    assert not layout.load(tmp_path / "w.safetensors").interleaved


def test_packing_refuses_what_has_no_turns() -> None:
    weight = SCHEMES["lqq"]  # 40 rows
    for layout_, flag, message in (
        ("strips", True, r"interleaved: only in strips, N a multiple of 16 \(got strips, N=40\)"),
        ("dual_mma", True, r"interleaved: only in strips, N a multiple of 16 \(got dual_mma, N=40\)"),
        ("strips", 1, r"interleaved: must be True or False \(got 1\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            pack(weight, layout_, interleaved=flag)
    with pytest.raises(ArgumentError, match=r"weights\[1\]: must not be interleaved: grouped GEMMs have no epilogue"):
        stack_experts([pack(GATE_UP["lqq"], "strips"), INTERLEAVED["lqq"]])


# --- the call --------------------------------------------------------------------------------------------------------


each_scheme = pytest.mark.parametrize(
    ("scheme", "dtype"), [("lqq", "float16"), ("qoq", "bfloat16"), ("qoq_channel", "float16")]
)


def silu_mul(scheme: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute the expected output and the allowed error, f64; the error is 0 unless a tie lies within it."""
    spec = FORMS["gemm_w4a8_sm90:channel_silu_mul" if scheme == "qoq_channel" else "gemm_w4a8_sm90:silu_mul"]
    logical, config = {"weight": GATE_UP[scheme], "x": X, "x_scale": X_SCALE}, {"OUT": epilogues.OUTPUTS.index(dtype)}
    return spec.expected(logical, config)["y"], spec.allowed(logical, config)["y"].per_element


@pytest.mark.full
@each_scheme
def test_silu_mul_is_that_of_the_product(scheme: str, dtype: str) -> None:
    options: dict[str, Any] = {"epilogue": "silu_mul", "out_dtype": dtype, "backend": "emulator"}
    y = ptxlab.gemm_w4a8(X, X_SCALE, INTERLEAVED[scheme], **options)
    right, allowed = silu_mul(scheme, dtype)
    assert y.shape == (M, F) and (np.abs(numbers(y, dtype) - right) <= allowed).all()
    gate_up = ptxlab.gemm_w4a8(X, X_SCALE, pack(GATE_UP[scheme], "strips"), out_dtype="float32", backend="emulator")
    assert np.allclose(right, reference.apply_gate(gate_up), rtol=2.0 ** -(8 if dtype == "bfloat16" else 11), atol=1e-7)
    for kernel in ("gemm_w4a8_small_sm90", "gemm_w4a8_sm90"):
        out = np.empty((M, F), storage(dtype))
        assert ptxlab.gemm_w4a8(X, X_SCALE, INTERLEAVED[scheme], kernel=kernel, out=out, **options) is out
        assert np.array_equal(out, y)


@pytest.mark.full
@each_scheme
def test_a_residual_is_added_in_place_with_the_bits_of_a_sum(scheme: str, dtype: str) -> None:
    addend = convert_to_dtype(
        np.random.default_rng(1).standard_normal(expected_product(scheme).shape, dtype=np.float32), dtype
    )
    product = floats(expected_product(scheme, dtype, BIAS))
    for order in ("row_major", "tiles", "fragment"):
        rows = {"rows": 8} if order == "tiles" else {}
        x = layout.pack_activations(
            quant.QuantizedActivations(X, X_SCALE, X.sum(axis=1, dtype=np.int32)), order, **rows
        )
        residual = addend.copy()
        assert ptxlab.gemm_w4a8(x, weight=STRIPS[scheme], bias=BIAS, residual=residual, backend="emulator") is residual
        assert np.array_equal(residual, convert_to_dtype(product + floats(addend), dtype)), order


@pytest.mark.smoke
@given(
    M=st.integers(1, 8),
    N=st.integers(1, 15).map(lambda n: 8 * n),
    K=st.integers(1, 10).map(lambda k: 32 * k),
    seed=st.integers(0, 99),
)
@settings(max_examples=3)
def test_any_product_is_added_as_a_call_without_would_have_been(M: int, N: int, K: int, seed: int) -> None:
    """The SiLU·mul of an interleaved weight is that of the same call's gate and up in float32."""
    rng = np.random.default_rng(seed)
    x_q, x_scale = rng.integers(-128, 128, (M, K), dtype=np.int8), rng.uniform(1e-3, 1e-2, M).astype(np.float32)
    weight = quant.quantize_lqq(rng.standard_normal((2 * N, K), dtype=np.float32), group=32)
    packed, options = pack(weight, "strips"), {"backend": "emulator"}
    addend = rng.standard_normal((M, 2 * N), dtype=np.float32).astype(np.float16)
    product = ptxlab.gemm_w4a8(x_q, x_scale, packed, **options)
    assert np.array_equal(ptxlab.gemm_w4a8(x_q, x_scale, packed, residual=addend.copy(), **options), addend + product)
    gate_up = ptxlab.gemm_w4a8(x_q, x_scale, packed, out_dtype="float32", **options)
    h = ptxlab.gemm_w4a8(x_q, x_scale, pack(weight, "strips", interleaved=True), epilogue="silu_mul", **options)
    assert (np.abs(h - epilogues.silu_mul(gate_up, OUT=0)) <= epilogues.silu_mul_error(gate_up, OUT=0)).all()


@pytest.mark.default_cases("late-gemm_w4a8_small_sm90")
@pytest.mark.parametrize("kernel", ["gemm_w4a8_small_sm90", "gemm_w4a8_sm90"])
@pytest.mark.parametrize("mode", emulator.MODES)
def test_the_residual_is_added_to_behind_the_wait(mode: str, kernel: str) -> None:
    """The second begins while the first still adds."""
    residual = np.zeros((M, 40), np.float16)
    options: dict[str, Any] = {"residual": residual, "kernel": kernel, "programmatic": True, "backend": "emulator"}
    with emulator.chain(emulator.CHECKS, mode=mode, begin="early", given=[residual]) as chained:
        for _ in range(2):
            ptxlab.gemm_w4a8(X, X_SCALE, STRIPS["lqq"], **options)
    assert chained.findings == [] and len(chained.launches) == 2
    once = expected_product("lqq")
    assert np.array_equal(residual, once + once)


REFUSED: dict[str, tuple[PackedWeight, dict[str, Any], str]] = {
    "unknown": (STRIPS["lqq"], {"epilogue": "gelu"}, r"epilogue: must be silu_mul or None \(got gelu\)"),
    "in order": (STRIPS["lqq"], {"epilogue": "silu_mul"}, r"weight: must be packed with interleaved=True for silu_mul"),
    "none": (
        INTERLEAVED["lqq"],
        {},
        r"epilogue: must be silu_mul for a weight packed with interleaved=True \(got None\)",
    ),
    "both": (
        INTERLEAVED["lqq"],
        {"epilogue": "silu_mul", "residual": np.zeros((M, F), np.float16)},
        r"residual: must be None beside silu_mul",
    ),
    "bias": (
        INTERLEAVED["lqq"],
        {"epilogue": "silu_mul", "bias": np.zeros(2 * F, np.float32)},
        r"bias: must be None beside silu_mul",
    ),
    "wide": (
        INTERLEAVED["lqq"],
        {"epilogue": "silu_mul", "out_dtype": "float32"},
        r"out_dtype: must be float16 or bfloat16 with silu_mul \(got float32\)",
    ),
    "out": (
        STRIPS["lqq"],
        {"residual": np.zeros((M, 40), np.float16), "out": np.zeros((M, 40), np.float16)},
        r"out: must be None beside a residual",
    ),
    "dtype": (
        STRIPS["lqq"],
        {"residual": np.zeros((M, 40), np.float32)},
        r"residual: dtype must be float16 or bfloat16 \(got float32\)",
    ),
    "shape": (STRIPS["lqq"], {"residual": np.zeros((M, 48), np.float16)}, r"residual: "),
    "packing": (WEIGHTS["lqq"], {"residual": np.zeros((M, 40), np.float16)}, r"weight: must be lqq in strips \(gemm_"),
    "kernel": (
        STRIPS["lqq"],
        {"residual": np.zeros((M, 40), np.float16), "kernel": "gemm_w4a8_qoq_sm80"},
        r"kernel: must be one of gemm_w4a8_sm90, gemm_w4a8_small_sm90 \(got gemm_w4a8_qoq_sm80\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    weight, arguments, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=rf"^gemm_w4a8: {message}"):
        ptxlab.gemm_w4a8(X, X_SCALE, weight, backend="emulator", **arguments)
    assert all((array == 0).all() for name, array in arguments.items() if name in ("residual", "out", "bias"))


@pytest.mark.full
def test_the_same_arrays_with_another_end(fake: FakeGpu) -> None:
    """The cache of calls tells epilogues apart; nothing is allocated for either."""
    x, x_scale, y = DeviceArray(X), DeviceArray(X_SCALE), DeviceArray(np.zeros((M, 40), np.float16))
    for _ in range(2):
        assert ptxlab.gemm_w4a8(x, x_scale, on_device(STRIPS["lqq"]), out=y) is y
        assert np.array_equal(y.host, expected_product("lqq"))
        assert ptxlab.gemm_w4a8(x, x_scale, on_device(STRIPS["lqq"]), residual=y) is y
        assert np.array_equal(y.host, expected_product("lqq") + expected_product("lqq"))
    h = ptxlab.gemm_w4a8(x, x_scale, on_device(INTERLEAVED["lqq"]), epilogue="silu_mul")
    exact, allowed = silu_mul("lqq", "float16")
    assert h.shape == (M, F) and (np.abs(h.host - exact) <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", epilogues.OUTPUTS)
def test_calls_in_a_graph(dtype: str) -> None:
    """Replays add again and again, beside SiLU·mul."""
    x, x_scale = gpu.to_device(X), gpu.to_device(X_SCALE)
    weight, gate_up = ptxlab.to_device(STRIPS["lqq"]), ptxlab.to_device(INTERLEAVED["lqq"])
    residual = gpu.to_device(convert_to_dtype(np.zeros(expected_product("lqq").shape, np.float32), dtype))
    h = gpu.to_device(np.zeros((M, F), storage(dtype)))

    def call() -> None:
        arguments: dict[str, Any] = {"x_q": x, "x_scale": x_scale, "programmatic": True}
        ptxlab.gemm_w4a8(weight=gate_up, epilogue="silu_mul", out=h, out_dtype=dtype, **arguments)
        ptxlab.gemm_w4a8(weight=weight, residual=residual, out_dtype=dtype, **arguments)

    call()
    graph = gpu.capture([call])
    for _ in range(3):
        graph.replay()
    graph.synchronize()
    right = convert_to_dtype(np.zeros(residual.shape, np.float32), dtype)
    for _ in range(5):  # by itself, as `capture` calls what it captures once before, and three times again
        right = convert_to_dtype(floats(expected_product("lqq", dtype)) + floats(right), dtype)
    assert np.array_equal(gpu.to_host(residual), right)
    exact, allowed = silu_mul("lqq", dtype)
    assert (np.abs(numbers(gpu.to_host(h), dtype) - exact) <= allowed).all()
