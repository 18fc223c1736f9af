"""W4A4 on mma.sync and wgmma: integer sums exact, float sums equal to the reference bit for bit, whatever the tile."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab import emulator, registry, toolchain
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.gemm import strips_tiles
from ptxlab.lowbit.kernels.gemm.common import SUM_PAD
from ptxlab.lowbit.kernels.gemm.w4a4 import ATOM, ATOM_HALVES, OUTLIER, S4, SM90, TILES, WIDEST, gemm_atom
from ptxlab.lowbit.kernels.gemm.w4a4_tiles import W4A4, GroupCost, GroupTile, choose
from ptxlab.lowbit.quant import AtomRows
from ptxlab.runtime import run_spec
from ptxlab.spec import KernelSpec
from tests.support import gemm_checks as checks
from tests.support import strategies
from tests.support.axes import on_every_backend

SM80, WITH_OUTLIERS = (S4, OUTLIER, ATOM), (OUTLIER, ATOM, SM90)
# Tiles that the emulator runs in a moment: every one that is chosen for few tokens, and one of two warps of tokens.
SMALL_TILES = (*(TILES[tokens]._asdict() for tokens in (16, 32)), {"BN": 32, "BM": 32, "WM": 2, "STAGES": 3})
TINY_TILES = (
    {"BM": 8, "WN": 1, "TOGETHER": 2, "STAGES": 3},
    {"BM": 32, "WN": 2, "TOGETHER": 1, "STAGES": 2},
    {"BM": 16, "WN": 4, "TOGETHER": 4, "STAGES": 4},
)
Q4, Q8 = strategies.near_edges((-8, -7, 0, 7), -8, 7), strategies.near_edges((-128, -127, 0, 127), -128, 127)
# At both ends of FP16, its subnormals too: products of two are exact in float32.
SCALES = st.sampled_from((2.0**-24, 2.0**-14, 0.1, 1.0, 1.5, 60000.0)) | st.floats(2.0**-14, 2.0, width=16)
every = pytest.mark.parametrize("spec", (*SM80, SM90), ids=lambda spec: spec.name)
with_outliers = pytest.mark.parametrize("spec", WITH_OUTLIERS, ids=lambda spec: spec.name)


def output(spec: KernelSpec, logical: dict[str, Any], backend: str, config: Any = None, **options: Any) -> np.ndarray:
    """Run a W4A4 kernel under the emulator's checks and return Y; `config` overrides chosen constants."""
    sizes = sizes_of(spec, **logical)
    config = {**spec.config_for(sizes), **(config or {})}
    return checks.run_checked(spec, spec.pack(logical), backend, config=config, sizes=sizes, **options)


def sizes_of(spec: KernelSpec, x: Any, w: Any, **_: Any) -> dict[str, int]:
    if spec is S4:
        return {"M": len(x), "N": len(w), "K": x.shape[1]}
    sizes = {"M": len(x.q4), "N": len(w.q4), "K": x.q4.shape[1], "outliers": x.q8.shape[1], "g": w.group}
    return {name: size for name, size in sizes.items() if name in spec.symbols}


@st.composite
def rows(draw: st.DrawFn, R: int, K: int, outliers: int, group: int) -> AtomRows:
    """Draw rows with integers at their limits and scales at FP16's."""
    q4, q8 = (
        draw(strategies.mostly_constant(np.int8, (R, K), Q4)),
        draw(strategies.mostly_constant(np.int8, (R, outliers), Q8)),
    )
    scale = draw(hnp.arrays(np.float16, (R, K // group + 1), elements=SCALES, fill=SCALES))
    return AtomRows(q4, scale[:, 1:], q8, scale[:, 0].copy() if outliers else np.ones(R, np.float16))


@st.composite
def problems(draw: st.DrawFn, spec: KernelSpec, tokens: int, rows_of_w: int, groups: int) -> dict[str, Any]:
    M, N = draw(st.integers(1, tokens)), 8 * draw(st.integers(1, rows_of_w // 8))
    if spec is S4:
        K = 32 * draw(st.integers(1, 4 * groups))
        x, w = (draw(strategies.mostly_constant(np.int8, (R, K), Q4)) for R in (M, N))
        return {"x": x, "w": w}
    group, outliers = draw(st.sampled_from((64, 128))), draw(st.sampled_from(quant.ATOM_OUTLIERS))
    K = group * (2 * draw(st.integers(0, groups)) + 1 if group == 64 else draw(st.integers(1, groups)))
    of = (K, outliers, group if spec is not OUTLIER else K)
    return {"x": draw(rows(M, *of)), "w": draw(rows(N, *of))}


@pytest.mark.full
@every
@given(data=st.data(), mode=st.sampled_from(emulator.MODES), sms=st.sampled_from((1, 132)))
@settings(max_examples=10)
def test_any_problem_is_exact_in_the_emulator(spec: KernelSpec, data: st.DataObject, mode: str, sms: int) -> None:
    """A block for Hopper has many tiles on few SMs, and the ring goes on from one to the next."""
    logical = data.draw(problems(spec, tokens=40, rows_of_w=72, groups=3))
    tile = data.draw(st.sampled_from(TINY_TILES if spec is SM90 else SMALL_TILES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips_tiles, "SMS", sms)
        y = output(spec, logical, "emulator", tile, mode=mode)
    assert np.array_equal(y.view(np.uint32), spec.reference(**logical).view(np.uint32))


@pytest.mark.gpu
@every
@given(data=st.data())
def test_any_problem_is_exact_on_the_gpu(spec: KernelSpec, data: st.DataObject) -> None:
    logical = data.draw(problems(spec, tokens=300, rows_of_w=320, groups=8))
    checks.assert_exact_twice(lambda: output(spec, logical, "gpu"), spec.reference(**logical))


@pytest.mark.default_cases("16-gemm_w4a4_s4_sm80-emulator")
@on_every_backend
@every
@pytest.mark.parametrize("M", [16, 33, 130])
def test_every_chosen_tile_is_exact(spec: KernelSpec, M: int, backend: str) -> None:
    """M and N leave the last tile ragged, there are more stages than the ring has, and outliers.

    Both group sizes are tried.
    """
    sizes = {"M": M, "N": 136, "K": 640, "outliers": 128, "g": 64 if M == 33 else 128}
    logical = spec.example(np.random.default_rng(M), **{name: sizes[name] for name in spec.example_sizes[0]})
    assert np.array_equal(output(spec, logical, backend), spec.reference(**logical))


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("tile", W4A4.costs, ids=lambda tile: "-".join(map(str, tile)))
def test_every_tile_for_hopper_is_exact(tile: GroupTile, backend: str) -> None:
    """Two tiles have fewer tokens than they have room for.

    The last rows are missing, and there are more stages than slots.
    """
    sizes = {"M": tile.BM + 10, "N": 136, "K": 640, "outliers": 128, "g": 64 if tile.WN == 2 else 128}
    logical = SM90.example(np.random.default_rng(tile.BM), **sizes)
    y = output(SM90, logical, backend, {**tile._asdict(), "STAGES": max(3, tile.TOGETHER)})
    assert np.array_equal(y, SM90.reference(**logical))


def test_the_tile_is_that_of_the_shortest_rounds() -> None:
    """A tile of twice the rows takes half as long again.

    It is chosen as soon as the smaller one needs a second round of all SMs.
    """
    low, high = GroupTile(64, 1, 1), GroupTile(64, 2, 1)
    stages = W4A4._replace(costs={low: GroupCost(1.0, 0.0), high: GroupCost(1.5, 0.0)})
    for rows, best in ((64 * 132, low), (64 * 132 + 8, high)):
        assert choose(stages, {"M": 64, "N": rows}, 1280)["WN"] == best.WN
    tile_too = W4A4._replace(costs={low: GroupCost(1.0, 9.0), high: GroupCost(1.5, 0.0)})
    for channels, best in ((1280, high), (12_800, low)):
        assert choose(tile_too, {"M": 64, "N": 64}, channels)["WN"] == best.WN


def test_the_reference_is_what_it_says() -> None:
    """The reference equals a computation by hand: sums of two groups and of the outliers, then one rounding each."""
    x = AtomRows(
        np.full((1, 128), -8, np.int8), np.float16([[1, 0.1]]), np.full((1, 64), -128, np.int8), np.float16([3])
    )
    w = AtomRows(np.full((1, 128), 7, np.int8), np.float16([[2, 0.1]]), np.full((1, 64), 127, np.int8), np.float16([1]))
    sums = reference.gemm_group_sums(x.q4, w.q4, x.q8, w.q8, 64)
    assert [exact.item() for exact in sums] == [-8 * 7 * 64, -8 * 7 * 64, -128 * 127 * 64]
    tenth = np.float32(np.float16(0.1)) ** 2  # exact
    second = np.float32(np.float64(-3584) * np.float64(tenth) - 7168)
    assert gemm_atom(w, x).item() == np.float32(np.float64(second) - 3 * 128 * 127 * 64)


@pytest.mark.default_cases("gemm_w4a4_sm90-emulator")
@on_every_backend
@with_outliers
def test_the_order_of_additions_shows(spec: KernelSpec, backend: str) -> None:
    """A large group, a small one that it swallows, and its opposite: what is left tells the order, and the fma."""
    group = 192 if spec is OUTLIER else 64
    x = AtomRows(np.ones((2, 192), np.int8), np.ones((2, 192 // group), np.float16), np.ones((2, 64), np.int8),
                 np.float16([1, 1]))  # fmt: skip
    q4 = np.repeat(np.int8([7, 1, -7]), 64)[None] * np.ones((8, 1), np.int8)
    scale = np.float16([[60000, 2.0**-20, 60000]] if group == 64 else [[60000]])
    w = AtomRows(q4, np.repeat(scale, 8, axis=0), np.full((8, 64), 3, np.int8), np.full(8, 2.0**-10, np.float16))
    expected = 0.1875 if group == 64 else np.float32(64 * 60000 + 0.1875)
    assert (gemm_atom(w, x) == expected).all()
    assert (output(spec, {"w": w, "x": x}, backend) == expected).all()


@on_every_backend
def test_atoms_code_rounds_the_product_of_two_scales(backend: str) -> None:
    """The product is rounded to FP16, where small ones lose bits, as Atom's reference does; it is far from exact."""
    logical = ATOM.example(np.random.default_rng(0), M=5, N=40, K=256, outliers=64, g=128)
    y = output(ATOM_HALVES, logical, backend)
    assert np.array_equal(y.view(np.uint32), ATOM_HALVES.reference(**logical).view(np.uint32))
    assert not np.array_equal(y, gemm_atom(**logical))
    x, w = logical["x"].scales, logical["w"].scales
    by_hand = np.float32(0)
    sums = reference.gemm_group_sums(*(getattr(logical[of], q)[:1] for q in ("q4", "q8") for of in "xw"), 128)
    for g, exact in enumerate(sums):
        by_hand = reference.fma(exact[0].astype(np.float32), np.float32([x[0, g] * w[0, g]]), np.float32([by_hand]))[0]
    assert y[0, 0] == by_hand + logical["bias"][0]


@pytest.mark.default_cases("no outlier-gemm_w4a4_atom_sm80-emulator", "no outlier-gemm_w4a4_outlier_sm80-emulator")
@on_every_backend
@with_outliers
@pytest.mark.parametrize("rows", ["zeros", "outliers alone", "no outlier", "saturated"])
def test_rows_at_the_ends(spec: KernelSpec, rows: str, backend: str) -> None:
    """The rows have groups of zeros, all their numbers among the outliers, no outliers, or extremes alone.

    The extremes are -8 and 7 times -128 and 127.
    """
    rng, outliers = np.random.default_rng(0), 0 if rows == "no outlier" else 128
    x, w = (rng.standard_normal((R, 256 + outliers), dtype=np.float32) for R in (5, 16))
    if rows == "zeros":
        x[:, 64:192], w[3] = 0, 0
    if rows == "outliers alone":
        x[:, :256] = 0
    if rows == "saturated":
        x, w = np.sign(x) * 100, np.sign(w)
    group = None if spec is OUTLIER else 128
    logical = {
        "x": quant.quantize_atom_activations(x, group, outliers),
        "w": quant.quantize_atom_weight(w, group, outliers),
    }
    y = output(spec, logical, backend)
    assert np.array_equal(y, spec.reference(**logical))
    assert np.array_equal(y[:, 3] == 0, np.full(5, rows == "zeros"))
    if rows == "saturated":
        q4, q8 = logical["x"].q4, logical["x"].q8
        assert set(np.unique(q4)) == {-8, 7} and set(np.unique(q8)) == {-128, 127}


@pytest.mark.default_cases("2-float32-False-gemm_w4a4_outlier_sm80-emulator")
@on_every_backend
@with_outliers
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("variant", "dtype"), checks.OUTPUTS[:3])
def test_outputs_are_rounded_once(spec: KernelSpec, variant: int, dtype: Any, with_bias: bool, backend: str) -> None:
    sizes = {"M": 5, "N": 40, "K": 256, "outliers": 64, "g": 128}
    logical = spec.example(np.random.default_rng(variant), **{name: sizes[name] for name in spec.example_sizes[0]})
    if not with_bias:
        del logical["bias"]
    y = output(spec, logical, backend, {"OUT": variant})
    single = gemm_atom(logical["w"], logical["x"]) + (logical["bias"] if with_bias else np.float32(0))
    assert np.array_equal(y.view(f"u{y.itemsize}"), single.astype(dtype).view(f"u{y.itemsize}"))
    assert len(np.unique(y)) > 100


@pytest.mark.default_cases("3-int32-emulator")
@on_every_backend
@checks.every_output
def test_pure_int4_has_the_epilogue_of_w4a8(variant: int, dtype: Any, backend: str) -> None:
    logical = S4.example(np.random.default_rng(variant), M=5, N=40, K=96)
    y = output(S4, logical, backend, {"OUT": variant})
    exact = logical["x"].astype(np.int32) @ logical["w"].T.astype(np.int32)
    checks.assert_scaled_in_float32(y, exact, dtype, logical["x_scale"], logical["w_scale"], logical["bias"])


@pytest.mark.full
@pytest.mark.parametrize("spec", SM80, ids=lambda spec: spec.name)
def test_no_tile_spills(spec: KernelSpec) -> None:
    source = registry.find(spec.name)[1][0]
    for tile in (*TILES.values(), WIDEST):
        for constants in ({"GROUP": 64, "HALVES": 0}, {"GROUP": 128, "HALVES": 1}) if spec is ATOM else ({},):
            config = {**tile._asdict(), **constants, "OUT": 0, "SUM_PAD": SUM_PAD}
            resources = toolchain.compile_cuda(source, spec.arch, defines=config).resources[spec.name]
            assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0), config
            sizes = {"M": 999, "N": 999, **config}
            assert spec.launch(sizes).shared_bytes <= 99 * 1024, "what every architecture from sm_80 on has"


@pytest.mark.full
@pytest.mark.parametrize("tile", W4A4.costs, ids=lambda tile: "-".join(map(str, tile)))
@pytest.mark.parametrize("g", [64, 128])
def test_no_tile_for_hopper_spills_or_waits_for_its_own_wgmma(tile: GroupTile, g: int) -> None:
    sizes = {"M": 128, "N": 4096, "K": 3968, "outliers": 128, "g": g}
    config = {**choose(W4A4._replace(costs={tile: W4A4.costs[tile]}), sizes, 4096), "GROUP": g, "OUT": 0}
    assert checks.compile_checked(SM90, config, sizes).warnings == ()
    assert config["STAGES"] >= 6 and SM90.launch({**sizes, **config}).shared_bytes <= strips_tiles.ROOM


@pytest.mark.full
@on_every_backend
def test_hopper_has_the_bits_of_int4_tensor_cores(backend: str) -> None:
    """The bits agree on an H200 as well, where those MMAs are software, and with more tokens than one band of tiles."""
    logical = ATOM.example(np.random.default_rng(0), M=136, N=72, K=64, outliers=64, g=64)
    assert np.array_equal(output(SM90, logical, backend, TINY_TILES[0]), output(ATOM, logical, backend))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x4": np.zeros((2, 64), np.int8)}, "gemm_w4a4_atom_sm80: x4: dtype uint8"),
        ({"x8": np.zeros((2, 128), np.int8)}, r"gemm_w4a4_atom_sm80: x8: shape \[M, outliers\]"),
        ({"x_scale": np.zeros((2, 16), np.float16)}, r"gemm_w4a4_atom_sm80: x_scale: shape \[M, ceil_div"),
        ({"w_scale": np.zeros((8, 8), np.float32)}, "gemm_w4a4_atom_sm80: w_scale: dtype float16"),
    ],
)
def test_bad_input_is_refused_before_any_launch(change: dict[str, np.ndarray], message: str) -> None:
    logical = ATOM.example(np.random.default_rng(0), M=2, N=8, K=128, outliers=64, g=64)
    sizes = {"M": 2, "N": 8, "K": 128, "outliers": 64, "g": 64}
    with pytest.raises(ArgumentError, match=message):
        source = registry.find(ATOM.name)[1][0]
        run_spec(ATOM, source, {**ATOM.pack(logical), **change}, sizes=sizes, backend="emulator")
