"""W4Ax: blocks of INT4 and INT8 activations, equal to the reference bit for bit, whatever the tile and its SM."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab import emulator, registry, toolchain
from ptxlab.hardware.fragments import mma_a
from ptxlab.lowbit import layout
from ptxlab.lowbit.kernels.gemm import strips_tiles
from ptxlab.lowbit.kernels.gemm.w4a4 import TILES
from ptxlab.lowbit.kernels.gemm.w4a4_tiles import W4AX, GroupTile, choose
from ptxlab.lowbit.kernels.gemm.w4ax import COMET, INORDER, NAIVE, REMAP, SM90, SPECS, STEAL, gemm_blocks
from ptxlab.lowbit.layout import atom
from ptxlab.lowbit.quant import BlockRows
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.runtime import run_spec
from ptxlab.spec import KernelSpec
from tests.support import gemm_checks as checks
from tests.support import strategies
from tests.support.axes import on_every_backend

Q4, Q8 = strategies.near_edges((-8, -7, 0, 7), -8, 7), strategies.near_edges((-128, -127, 0, 127), -128, 127)
SCALES = st.sampled_from((2.0**-24, 2.0**-14, 1.0, 60000.0)) | st.floats(2.0**-14, 2.0, width=16)


SHARED = (INORDER, REMAP, COMET, STEAL)  # whose blocks share tiles
SM80 = (NAIVE, *SHARED)
every = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
CHOSEN = [(NAIVE, 33), (NAIVE, 130), (INORDER, 33), (REMAP, 33), (COMET, 130), (STEAL, 130), (SM90, 33), (SM90, 130)]
TINY_TILES = (
    {"BM": 8, "WN": 1, "TOGETHER": 2, "STAGES": 3},
    {"BM": 32, "WN": 2, "TOGETHER": 1, "STAGES": 2},
    {"BM": 16, "WN": 4, "TOGETHER": 4, "STAGES": 4},
)
TILES_OF = {
    **dict.fromkeys((spec.name for spec in SHARED), ({"BN": 64, "BM": 32, "WM": 1, "STAGES": 3},)),
    NAIVE.name: tuple(tile._asdict() | {"STAGES": 3} for tile in TILES.values()),
    SM90.name: TINY_TILES,
}


def output(spec: KernelSpec, logical: dict[str, Any], backend: str, config: Any = None, **options: Any) -> np.ndarray:
    """Run a W4Ax kernel under the emulator's checks and return Y; `config` overrides chosen constants."""
    sizes = sizes_of(spec, **logical)
    config = {**spec.config_for(sizes), **(config or {})}
    return checks.run_checked(spec, spec.pack(logical), backend, config=config, sizes=sizes, **options)


def sizes_of(spec: KernelSpec, x: BlockRows, w: BlockRows, blocks: int = 0, **_: Any) -> dict[str, int]:
    sizes = {"M": len(x.q), "N": len(w.q), "K4": x.channels4, "K8": 128 * x.int8, "blocks": blocks}
    return {name: size for name, size in sizes.items() if name in spec.symbols}


def add_blocks(spec: KernelSpec, logical: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Add the number of blocks to the problem, if the kernel's blocks share tiles."""
    return {**logical, "blocks": blocks} if "blocks" in spec.symbols else logical


@st.composite
def problems(draw: st.DrawFn, tokens: int = 40, rows: int = 72, blocks: int = 3) -> dict[str, Any]:
    """Draw integers at their limits and scales at FP16's, in blocks of one kind or of both."""
    M, N, blocks = draw(st.integers(1, tokens)), 8 * draw(st.integers(1, rows // 8)), draw(st.integers(1, blocks))
    int8 = draw(st.integers(0, blocks))
    four, eight = ((R, 128 * count) for R, count in ((M, blocks - int8), (M, int8)))
    q = [draw(strategies.mostly_constant(np.int8, shape, of)) for shape, of in ((four, Q4), (eight, Q8))]
    w = draw(strategies.mostly_constant(np.int8, (N, 128 * blocks), Q4))
    scales = [draw(hnp.arrays(np.float16, (R, blocks), elements=SCALES, fill=SCALES)) for R in (M, N)]
    return {"x": BlockRows(np.concatenate(q, axis=1), scales[0], int8), "w": BlockRows(w, scales[1])}


@pytest.mark.full
@every
@given(logical=problems(), mode=st.sampled_from(emulator.MODES), sms=st.integers(1, 7), data=st.data())
@settings(max_examples=6)
def test_any_problem_is_exact_in_the_emulator(
    spec: KernelSpec, logical: dict[str, Any], mode: str, sms: int, data: st.DataObject
) -> None:
    """A block has many tiles on few SMs, and the ring goes on from one to the next."""
    tile = data.draw(st.sampled_from(TILES_OF[spec.name]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips_tiles, "SMS", sms)
        y = output(spec, add_blocks(spec, logical, sms), "emulator", tile, mode=mode)
    assert np.array_equal(y.view(np.uint32), gemm_blocks(**logical).view(np.uint32))


@pytest.mark.gpu
@every
@given(logical=problems(tokens=300, rows=320, blocks=8), blocks=st.integers(1, 200))
def test_any_problem_is_exact_on_the_gpu(spec: KernelSpec, logical: dict[str, Any], blocks: int) -> None:
    shared_problem = add_blocks(spec, logical, blocks)
    checks.assert_exact_twice(lambda: output(spec, shared_problem, "gpu"), gemm_blocks(**logical))


class DeviceArray(np.ndarray):
    """Stand in for an array of CuPy: what is made like it is one too."""


@pytest.mark.parametrize("spec", SHARED, ids=lambda spec: spec.name)
def test_counters_are_made_where_the_operands_are(spec: KernelSpec) -> None:
    """The benchmark packs on the GPU, and what the reference says is compared there."""
    logical = spec.example(np.random.default_rng(0), **spec.example_sizes[0])
    placed = with_arrays(logical, lambda array: array.view(DeviceArray))
    counters = [arg.name for arg in spec.args if arg.role == "inout"]
    packed, right = spec.pack(placed), spec.reference(**placed)
    assert counters and all(isinstance(packed[name], DeviceArray) for name in counters)
    assert all(isinstance(counter, DeviceArray) and not counter.any() for counter in right[1:])


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize(("spec", "M"), CHOSEN, ids=lambda case: getattr(case, "name", case))
def test_chosen_tiles_are_exact(spec: KernelSpec, M: int, backend: str) -> None:
    """M and N leave the last tile ragged, and there are more blocks than the ring has slots, of both kinds."""
    logical = NAIVE.example(np.random.default_rng(M), M=M, N=136, K4=384, K8=256)
    right = gemm_blocks(logical["w"], logical["x"]) + logical["bias"]
    for variant, dtype in checks.OUTPUTS[: 3 if spec is NAIVE and M == 33 else 1]:
        y = output(spec, add_blocks(spec, logical, 3), backend, {"OUT": variant})
        assert np.array_equal(y.view(f"u{y.itemsize}"), right.astype(dtype).view(f"u{y.itemsize}"))


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("tile", W4AX.costs, ids=lambda tile: "-".join(map(str, tile)))
def test_every_tile_for_hopper_is_exact(tile: GroupTile, backend: str) -> None:
    """Two tiles have fewer tokens than they have room for.

    The last rows are missing, and there are more blocks than slots.
    """
    logical = SM90.example(np.random.default_rng(tile.BM), M=tile.BM + 10, N=136, K4=384, K8=256)
    y = output(SM90, logical, backend, {**tile._asdict(), "STAGES": max(3, tile.TOGETHER)})
    assert np.array_equal(y, gemm_blocks(**logical))


@pytest.mark.default_cases("2-gemm_w4ax_naive_sm80-emulator", "0-gemm_w4ax_remap_sm80-emulator")
@on_every_backend
@every
@pytest.mark.parametrize("int8", [0, 2])
def test_rows_at_the_ends(spec: KernelSpec, int8: int, backend: str) -> None:
    """Blocks are zeros, or -8 and 7 by -8, 7, -128 and 127 throughout.

    In some problems all blocks are of one kind.
    """
    rng = np.random.default_rng(int8)
    x, w = (
        rng.choice(ends, (R, 256)).astype(np.int8) for ends, R in (((-128, 127) if int8 else (-8, 7), 5), ((-8, 7), 16))
    )
    x[:, 128:], w[3] = 0, 0
    logical = {
        "x": BlockRows(x, np.ones((5, 2), np.float16), int8),
        "w": BlockRows(w, np.full((16, 2), 0.5, np.float16)),
    }
    y = output(spec, add_blocks(spec, logical, 2), backend)
    assert np.array_equal(y, x.astype(np.float32) @ w.T.astype(np.float32) / 2)
    assert not y[:, 3].any() and y[:, :3].all()


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("spec", SHARED, ids=lambda spec: spec.name)
def test_a_launch_leaves_its_counters_to_the_next(spec: KernelSpec, backend: str) -> None:
    """They are zeros in the caller's arrays, though `sums` still holds its numbers.

    The sixth tile is one that can be cut.
    """
    sizes = {"M": 40, "N": 72, "K4": 640, "K8": 128, "blocks": 3}
    logical = spec.example(np.random.default_rng(0), **sizes)
    inputs = spec.pack(logical)
    counters = {arg.name: inputs.pop(arg.name) for arg in spec.args if arg.role == "inout"}
    for _ in range(2):
        arrays = {**inputs, **counters}
        outcome = run_spec(spec, registry.find(spec.name)[1][0], arrays, sizes=sizes, backend=backend)
        assert np.array_equal(outcome.outputs["y"], spec.reference(**logical)[0])
        counters = {name: outcome.outputs[name] for name in counters}
        assert not any(map(np.any, counters.values()))


def test_what_a_lane_loads_for_int8() -> None:
    """A lane gets sixteen times its weights by an AND, or a shift and the same AND.

    It takes the words that ldmatrix brings.
    """
    w = BlockRows(np.random.default_rng(0).integers(-8, 8, (16, 256), np.int8), np.ones((16, 2), np.float16))
    rows = atom.pack_comet_rows(w, 1)
    np.testing.assert_array_equal(layout.unpack_pairs(rows[:, :64]), w.q[:, :128])
    mask = np.uint32(0xF0F0F0F0)
    for step in range(4):
        words = np.ascontiguousarray(rows[:, 64 + 16 * step : 80 + 16 * step]).view(np.uint32)  # [row, lane of four]
        top, below = words[:8].reshape(32), words[8:].reshape(32)
        shifted = (top << np.uint32(4), below << np.uint32(4))
        registers = np.stack([top, below, *shifted], axis=-1) & mask
        k = 128 + 32 * step
        np.testing.assert_array_equal(mma_a(32).gather(registers, np.int8), 16 * w.q[:, k : k + 32])


@pytest.mark.full
@pytest.mark.parametrize("spec", SM80, ids=lambda spec: spec.name)
def test_no_tile_spills(spec: KernelSpec) -> None:
    source = registry.find(spec.name)[1][0]
    for tokens in (*TILES, 999):
        config = spec.config_for({"M": tokens, "N": 999}) | {"OUT": 0}
        resources = toolchain.compile_cuda(source, spec.arch, defines=config).resources[spec.name]
        assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0), config
        sizes = {"M": 999, "N": 999, "blocks": 1, **config}
        assert spec.launch(sizes).shared_bytes <= 99 * 1024, "what every architecture from sm_80 on has"


@pytest.mark.full
@pytest.mark.parametrize("tile", W4AX.costs, ids=lambda tile: "-".join(map(str, tile)))
def test_no_tile_for_hopper_spills_or_waits_for_its_own_wgmma(tile: GroupTile) -> None:
    sizes = {"M": 128, "N": 4096, "K4": 3328, "K8": 768}
    config = {**choose(W4AX._replace(costs={tile: W4AX.costs[tile]}), sizes, 4096), "OUT": 0}
    checks.compile_checked(SM90, config, sizes)
    assert config["STAGES"] >= 6 and SM90.launch({**sizes, **config}).shared_bytes <= strips_tiles.ROOM


@pytest.mark.full
def test_pairs_are_unpacked_without_bank_conflicts() -> None:
    sizes = {"M": 16, "N": 16, "K4": 128, "K8": 0}
    inputs = SM90.pack(SM90.example(np.random.default_rng(0), **sizes))
    source = registry.find(SM90.name)[1][0]
    options: dict[str, Any] = {"config": TINY_TILES[1] | {"OUT": 2}, "backend": "emulator", "count_banks": True}
    accesses = [
        access for access in run_spec(SM90, source, inputs, sizes=sizes, **options).shared if "v4" in access.text
    ]
    assert {access.store for access in accesses} == {False, True} and not any(access.conflicts for access in accesses)


def test_how_pairs_are_unpacked() -> None:
    """The low nibbles of 16 bytes lie before the high ones, and each counts 16 times."""
    q = np.random.default_rng(0).integers(-8, 8, (3, 128), np.int8)
    pairs = atom.join_blocks(BlockRows(q, np.ones((3, 1), np.float16))).reshape(3, 4, 16)
    unpacked = np.concatenate([pairs << np.uint8(4), pairs & np.uint8(0xF0)], axis=2)
    np.testing.assert_array_equal(unpacked.reshape(3, 128).view(np.int8), 16 * atom.unpacked_pairs(q))
