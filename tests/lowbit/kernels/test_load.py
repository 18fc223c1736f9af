"""The load kernels, on every backend: what arrives in the registers is the matrix that was packed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.hardware import fragments
from ptxlab.lowbit import layout
from ptxlab.lowbit.bench import loads
from ptxlab.lowbit.kernels.load import operand_a
from ptxlab.lowbit.quant import GROUPS, quantize_lqq
from ptxlab.runtime import run_spec
from tests.support.axes import on_every_backend

RIGHT = ("load_ldmatrix_s8", "load_lds32_u4", "load_dual_mma", "load_comet_interleave")
RINGS = ("load_cp_async", "load_bulk_sm90")

modes, seeds = st.sampled_from(emulator.MODES), st.integers(0, 2**16)


def launch(name: str, logical: dict[str, Any], backend: str, mode: str = "early", seed: int = 0) -> np.ndarray:
    """Run a kernel and return its output; in the emulator all checks are on and have to find nothing."""
    spec, (source, *_) = registry.find(name)
    sizes = {"B": logical["B"]} if "B" in logical else None
    checks = emulator.CHECKS if backend == "emulator" else ()
    outcome = run_spec(
        spec, source, spec.pack(logical), sizes=sizes, backend=backend, checks=checks, mode=mode, seed=seed
    )
    assert [str(finding) for finding in outcome.findings] == []
    return outcome.outputs[spec.outputs[0].name]


@st.composite
def tiles_of(draw: st.DrawFn, name: str) -> dict[str, np.ndarray]:
    """Draw tiles of a kernel: random ones, of one value, or with a single element that differs."""
    low, high, dtype = {"load_ldmatrix_s8": (-128, 128, "i1"), "load_comet_interleave": (-8, 8, "i1")}.get(
        name, (0, 16, "u1")
    )
    shape = draw(st.integers(1, 5)), 64, 64
    if draw(st.booleans()):
        tiles = np.random.default_rng(draw(seeds)).integers(low, high, shape).astype(dtype)
    else:
        tiles = np.full(shape, draw(st.integers(low, high - 1)), dtype)
        place = tuple(draw(st.integers(0, size - 1)) for size in shape)
        tiles[place] = draw(st.integers(low, high - 1))
    return {"q8" if name == "load_ldmatrix_s8" else "q4": tiles}


def matrix_of(registers: np.ndarray) -> np.ndarray:
    """Gather the tiles [T, 64, 64] by the fragment map.

    `registers` are the [T, 128, 32] bytes that two wgmma.m64nNk32 take as operand A.
    """
    words = registers.view(np.uint32)
    steps = [fragments.wgmma_a().gather(np.ascontiguousarray(words[..., i : i + 4])) for i in (0, 4)]
    return np.concatenate(steps, axis=-1).view(registers.dtype)


@pytest.mark.default_cases("load_dual_mma-emulator")
@on_every_backend
@pytest.mark.parametrize("name", RIGHT)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_the_fragment_is_the_matrix(name: str, backend: str, data: st.DataObject) -> None:
    logical = data.draw(tiles_of(name))
    (tiles,) = logical.values()
    factor = 16 if name == "load_comet_interleave" else 1  # zero extension leaves the nibble in the upper half
    assert np.array_equal(matrix_of(launch(name, logical, backend)), tiles * np.int8(factor))


@on_every_backend
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_qserve_holds_a_tile_of_32_x_32_per_warp(backend: str, data: st.DataObject) -> None:
    logical = data.draw(tiles_of("load_qserve_reorder"))
    words = launch("load_qserve_reorder", logical, backend).view(np.uint32).reshape(-1, 4, 32, 8)
    for warp, (row, column) in enumerate(((0, 0), (0, 32), (32, 0), (32, 32))):
        for first in (0, 16):
            registers = np.ascontiguousarray(words[:, warp, :, first // 4 : first // 4 + 4])
            expected = logical["q4"][:, row + first : row + first + 16, column : column + 32]
            assert np.array_equal(fragments.mma_a(32).gather(registers), expected)


@on_every_backend
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_ldmatrix_on_4_bits_misses_where_its_model_says(backend: str, data: st.DataObject) -> None:
    logical = data.draw(tiles_of("load_ldmatrix_u4"))
    spec = registry.specs()["load_ldmatrix_u4"]
    assert spec.wrong is not None
    got = launch("load_ldmatrix_u4", logical, backend)
    assert np.array_equal(got != operand_a(logical["q4"]), spec.wrong.misses(**logical))


def test_ldmatrix_on_4_bits_is_right_in_a_quarter_of_the_places() -> None:
    """The numbers differ wherever places do.

    A place is right only if its channel happens to be the one that is needed.
    """
    place = np.arange(64 * 64).reshape(64, 64)
    tiles = np.stack([place >> 4 * digit & 15 for digit in range(3)]).astype(np.uint8)  # three digits name a place
    right = (launch("load_ldmatrix_u4", {"q4": tiles}, "emulator") == operand_a(tiles)).all(axis=0)
    assert right.mean() == 0.25
    t, register = np.arange(128)[:, None] % 4, np.arange(32)[None] // 4 % 4
    assert np.array_equal(right, ((t == 0) & (register < 2)) | ((t == 3) & (register >= 2)))


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("name", RINGS)
@given(P=st.integers(1, 14), B=st.integers(1, 4), seed=seeds, mode=modes)
@settings(max_examples=20, deadline=None)
def test_every_word_passes_the_ring_in_order(name: str, backend: str, P: int, B: int, seed: int, mode: str) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, (P, 8, 128, 4), dtype=np.uint32)
    got = launch(name, {"words": words, "B": B}, backend, mode, seed)
    for block in range(B):
        hashed = np.zeros(128, np.uint64)
        for word in words[block::B].transpose(0, 1, 3, 2).reshape(-1, 128):
            hashed = (hashed * np.uint64(0x9E3779B1) + word) % np.uint64(1 << 32)
        assert np.array_equal(got[block], hashed)


@pytest.mark.parametrize("name", RINGS)
def test_the_stage_four_rounds_on_is_a_u32(name: str) -> None:
    spec = registry.specs()[name]
    spec.check_sizes({"P": 2**31 - 1, "B": 2**29 - 1})
    assert 4 * (2**29 - 1) + 2**31 - 2 < 2**32
    with pytest.raises(ArgumentError, match=rf"B < 2\*\*29 \(got B={2**29}\)"):
        spec.check_sizes({"P": 1, "B": 2**29})


def tiles_of_packed(packed: layout.PackedWeight) -> np.ndarray:
    """Return the words of a packed matrix as tiles of 64 x 64, u32 [rows, columns, 512], with padding."""
    if packed.layout == "dual_mma":  # blocks of one or two units of 2048 bytes, and constants behind them
        blocks = packed.buffers["blocks"]
        units = max(1, packed.group // 64)
        words = blocks[..., : units * 2048].view(np.uint32)
        return np.ascontiguousarray(words).reshape(len(blocks), -1, 512)
    words = packed.buffers["qweight"]
    down, across = {"qserve": (2, 2), "comet": (4, 1), "row_major": (64, 8)}[packed.layout]  # pieces of a 64 x 64
    pieces = words.reshape(*words.shape[:2], -1)
    whole = np.pad(pieces, [(0, -words.shape[0] % down), (0, -words.shape[1] % across), (0, 0)])
    split = whole.reshape(whole.shape[0] // down, down, whole.shape[1] // across, across, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(split.shape[0], split.shape[2], 512)


@on_every_backend
@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("load_lds32_u4", "row_major"),
        ("load_qserve_reorder", "qserve"),
        ("load_dual_mma", "dual_mma"),
        ("load_comet_interleave", "comet"),
    ],
)
@given(N=st.sampled_from((8, 24, 40, 64, 72, 136)), groups=st.integers(1, 3), g=st.sampled_from(GROUPS), seed=seeds)
@settings(max_examples=15, deadline=None)
def test_a_packed_weight_arrives_as_the_map_says(
    name: str, packing: str, N: int, groups: int, g: int, seed: int, backend: str
) -> None:
    """A quantised matrix of any shape is packed as a checkpoint would be.

    Every tile of it is tried, at every position.
    """
    weight = quantize_lqq(np.random.default_rng(seed).standard_normal((N, g * groups)), group=g)
    tiles = tiles_of_packed(layout.pack(weight, packing))
    spec, (source, *_) = registry.find(name)
    inputs = {"tiles": tiles.reshape(spec.inputs[0].resolve({"T": tiles.shape[0] * tiles.shape[1]}))}
    got = run_spec(spec, source, inputs, backend=backend).outputs["fragments"]
    padded = np.zeros((64 * tiles.shape[0], 64 * tiles.shape[1]), np.uint8)
    padded[:N, : g * groups] = weight.q4
    positions = padded.reshape(tiles.shape[0], 64, tiles.shape[1], 64).swapaxes(1, 2).reshape(-1, 64, 64)
    inside = np.zeros_like(padded)
    inside[:N, : g * groups] = 1
    mask = inside.reshape(tiles.shape[0], 64, tiles.shape[1], 64).swapaxes(1, 2).reshape(-1, 64, 64)
    if packing == "comet":  # its kernel reads the same nibbles as signed ones
        positions, mask = (positions << 4).view(np.int8) >> 4, mask.view(np.int8)
    expected, relevant = spec.reference(q4=positions), spec.reference(q4=mask).astype(bool)
    assert np.array_equal(got[relevant], expected[relevant])
    assert relevant.sum() == N * g * groups


TILES = [name for name, spec in registry.specs().items() if spec.family == "load" and "T" in spec.example_sizes[0]]


@pytest.mark.gpu
@pytest.mark.timing  # counters of the device, which count others' launches too
def test_wavefronts_and_conflicts_are_those_that_ncu_counts() -> None:
    """The bank model equals the hardware's counters: this needs ncu, with permission to count."""
    specs = [registry.specs()[name] for name in TILES]
    try:
        counted = dict(zip(TILES, loads.counted_banks(*specs), strict=True))
    except UnavailableError as reason:
        pytest.skip(str(reason))
    modelled = {
        name: loads.modelled_banks(*((spec_and_sources := registry.find(name))[0], spec_and_sources[1][0]))
        for name in TILES
    }
    assert modelled == counted and len(TILES) == 6
    conflicts_per_warp = {name: 8 if name == "load_lds32_u4" else 0 for name in TILES}
    assert all(modelled[name]["conflicts"] == conflicts_per_warp[name] * 4 * loads.BANK_TILES for name in TILES)
