"""W4Ax on mma.sync: blocks of INT4 and INT8 activations, equal to the reference bit for bit, whatever the tile."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab import emulator, kernels, layout, toolchain
from ptxlab.kernels.gemm.w4a4 import TILES, WIDEST
from ptxlab.kernels.gemm.w4ax import NAIVE, gemm_blocks
from ptxlab.layout import atom
from ptxlab.layout.fragments import mma_a
from ptxlab.quant import BlockRows
from tests.support import gemm_checks as checks
from tests.support import strategies
from tests.support.axes import on_every_backend

Q4, Q8 = strategies.near_edges((-8, -7, 0, 7), -8, 7), strategies.near_edges((-128, -127, 0, 127), -128, 127)
SCALES = st.sampled_from((2.0**-24, 2.0**-14, 1.0, 60000.0)) | st.floats(2.0**-14, 2.0, width=16)


def output(logical: dict[str, Any], backend: str, config: Any = None, **options: Any) -> np.ndarray:
    """Y, after the emulator's checks; `config` over the constants that are chosen."""
    x, w = logical["x"], logical["w"]
    sizes = {"M": len(x.q), "N": len(w.q), "K4": x.channels4, "K8": 128 * x.int8}
    config = {**NAIVE.config_for(sizes), **(config or {})}
    return checks.output(NAIVE, NAIVE.pack(logical), backend, config=config, sizes=sizes, **options)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Integers at their limits, scales at FP16's; blocks of one kind or of both."""
    M, N, blocks = draw(st.integers(1, 40)), 8 * draw(st.integers(1, 9)), draw(st.integers(1, 3))
    int8 = draw(st.integers(0, blocks))
    four, eight = ((R, 128 * count) for R, count in ((M, blocks - int8), (M, int8)))
    q = [draw(strategies.filled(np.int8, shape, of)) for shape, of in ((four, Q4), (eight, Q8))]
    w = draw(strategies.filled(np.int8, (N, 128 * blocks), Q4))
    scales = [draw(hnp.arrays(np.float16, (R, blocks), elements=SCALES, fill=SCALES)) for R in (M, N)]
    return {"x": BlockRows(np.concatenate(q, axis=1), scales[0], int8), "w": BlockRows(w, scales[1])}


@given(logical=problems(), mode=st.sampled_from(emulator.MODES), tile=st.sampled_from([*TILES.values()]))
@settings(max_examples=10)
def test_any_problem_is_exact_in_the_emulator(logical: dict[str, Any], mode: str, tile: Any) -> None:
    y = output(logical, "emulator", tile._asdict() | {"STAGES": 3}, mode=mode)
    assert np.array_equal(y.view(np.uint32), gemm_blocks(**logical).view(np.uint32))


@on_every_backend
@pytest.mark.parametrize("M", [33, 130])
def test_chosen_tiles_are_exact(M: int, backend: str) -> None:
    """With M and N that leave the last tile ragged, more blocks than the ring has slots, of both kinds."""
    logical = NAIVE.example(np.random.default_rng(M), M=M, N=136, K4=384, K8=256)
    for variant, dtype in checks.OUTPUTS[:3]:
        y = output(logical, backend, {"OUT": variant})
        right = (gemm_blocks(logical["w"], logical["x"]) + logical["bias"]).astype(dtype)
        assert np.array_equal(y.view(f"u{y.itemsize}"), right.view(f"u{y.itemsize}"))


def test_what_a_lane_loads_for_int8() -> None:
    """Sixteen times its weights by an AND, or a shift and the same AND, of the words that ldmatrix brings."""
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


def test_no_tile_spills() -> None:
    source = kernels.find(NAIVE.name)[1][0]
    for tile in (*TILES.values(), WIDEST):
        config = {**tile._asdict(), "STAGES": 3, "OUT": 0}
        resources = toolchain.compile_cuda(source, NAIVE.arch, defines=config).resources[NAIVE.name]
        assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0), config
        assert NAIVE.launch({"M": 999, "N": 999, **config}).shared_bytes <= 99 * 1024
