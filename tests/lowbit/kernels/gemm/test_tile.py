"""The hand-written main loop: exact to the last byte that does not carry, and found out at the first that does."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab import registry
from ptxlab.errors import PtxlabError
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.gemm.common import GROUPS
from ptxlab.runtime import run_spec
from ptxlab.sources import Source
from tests.support import strategies
from tests.support.axes import on_every_backend
from tests.support.mutation import SIBLINGS, mutants
from tests.support.random_weights import weight_of

TILE, (SOURCE,) = registry.find("gemm_tile_lqq_sm80")
CHECKS = ("lanes", "race", "init", "async")


def lqq(q4: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> quant.LQQWeight:
    minimum = (offset ^ np.uint8(0x80)).view(np.int8)
    return weight_of(quant.LQQWeight, q4, scale, minimum=minimum)


@st.composite
def problems(draw: st.DrawFn, tiles: int) -> dict[str, Any]:
    """Draw bytes up to 255 and no further, activations at the edges, and all shapes of the rules."""
    g = draw(st.sampled_from(GROUPS))
    M, N, K = 8 * draw(st.integers(1, tiles)), 16 * draw(st.integers(1, tiles)), 128 * draw(st.integers(1, tiles))
    scale = draw(hnp.arrays(np.uint8, (N, K // g), elements=strategies.near_edges((1, 15, 16), 1, 16)))
    offset = draw(hnp.arrays(np.uint8, scale.shape, elements=strategies.near_edges((0, 9, 15, 247, 255), 0, 255)))
    q4 = np.minimum(draw(strategies.q4_matrix(N, K)), np.repeat((255 - offset) // scale, g, axis=1))
    x = draw(strategies.mostly_constant(np.int8, (M, K), strategies.near_edges((-128, -127, 127), -128, 127)))
    return {"weight": lqq(q4, scale, offset), "x": x}


def run(logical: dict[str, Any], backend: str = "emulator", source: Source = SOURCE, **options: Any) -> Any:
    (M, K), (N, _) = logical["x"].shape, logical["weight"].q4.shape
    sizes = {"M": M, "N": N, "K": K, "g": logical["weight"].group}
    checks = CHECKS if backend == "emulator" else ()
    return run_spec(TILE, source, TILE.pack(logical), sizes=sizes, backend=backend, **{"checks": checks, **options})


@pytest.mark.full
@given(logical=problems(tiles=3))
@settings(max_examples=30)
def test_exact_up_to_the_last_byte_that_does_not_carry(logical: dict[str, Any]) -> None:
    outcome = run(logical)
    assert outcome.findings == () and np.array_equal(outcome.outputs["y"], TILE.reference(**logical))


@pytest.mark.gpu
@given(logical=problems(tiles=8))
def test_exact_on_the_gpu(logical: dict[str, Any]) -> None:
    assert np.array_equal(run(logical, "gpu").outputs["y"], TILE.reference(**logical))


def test_the_widest_products_add_up() -> None:
    K = 4096
    weight = lqq(np.full((16, K), 15, np.uint8), np.full((16, 32), 16, np.uint8), np.full((16, 32), 15, np.uint8))
    y = run({"weight": weight, "x": np.full((8, K), -128, np.int8)}, checks=()).outputs["y"]
    assert (y == -128 * 127 * K).all()


@on_every_backend
def test_without_the_protective_range_the_lane_check_names_the_line(backend: str) -> None:
    """Weights quantised to ±127 carry. The result is that of the carrying words, and the check says where."""
    rng = np.random.default_rng(0)
    weight = quant.quantize_lqq(rng.standard_normal((16, 256), dtype=np.float32), group=64, protective_range=127)
    assert weight.overflows().any()
    logical = {"weight": weight, "x": rng.integers(-128, 128, (8, 256), dtype=np.int8)}
    outcome = run(logical, backend, unchecked=True)
    carried = reference.gemm_accumulators(logical["x"], weight.level1().astype(np.int32))
    assert np.array_equal(outcome.outputs["y"], carried)
    assert not np.array_equal(carried, TILE.reference(**logical))
    if backend == "emulator":
        lines = SOURCE.text.split("\n")
        carries = [finding for finding in outcome.findings if finding.kind == "carry"]
        assert carries and all("mad.lo.u32" in lines[finding.line - 1] for finding in carries)
        assert re.search(r"gemm_tile_lqq_sm80\.ptx:\d+: `mad\.lo\.u32 +%a\d, ", str(carries[0]))


# `TILE`'s own opcodes, beside those of the dequantisers.
MORE = {
    "add.u32": "sub.u32",
    "bra": "bra",
    "ld.global.nc.u16": "ld.global.nc.u8",
    "ld.global.nc.v2.u32": "ld.global.nc.v2.u16",
    "ld.global.nc.v4.u32": "ld.global.nc.v4.u16",
    "mad.lo.u64": "mad.hi.u64",
    "mov.s32": "not.b32",
    "mul.wide.u32": "mul.wide.u16",
    "setp.lt.u32": "setp.le.u32",
    "st.global.s32": "st.global.b16",
}
# (what survives, why nothing can tell): regular expressions over "old line => new line".
SURVIVORS = (
    (r"mad\.wide\.u32 => .*mad\.wide\.s32", "indices stay below 2^31"),
    (r"cvt\.u64\.u32 => .*cvt\.s64\.s32", "so do they here"),
    (r"(ld\.param\.u32 => .*ld\.param\.u16)|(mul\.wide\.u32 => .*mul\.wide\.u16)", "the sizes here are below 2^16"),
    (r"prmt\.b32 +%o\d, %pair, 0, .* => 1$", "the selectors take nothing of the second source"),
)


def is_killed(text: str, battery: list[dict[str, Any]]) -> bool:
    try:
        return any(
            not np.array_equal(run(logical, source=replace(SOURCE, text=text), checks=("init",)).outputs["y"], expected)
            for logical, expected in battery
        )
    except PtxlabError:
        return True


@pytest.mark.full
def test_every_changed_opcode_and_immediate_is_noticed() -> None:
    rng = np.random.default_rng(0)
    battery = []
    for g, N, K in ((32, 48, 192), (128, 64, 256)):
        logical = TILE.example(rng, M=24, N=N, K=K, g=g)
        battery.append((logical, TILE.reference(**logical)))
    survivors = [change for change, text in mutants(SOURCE.text, SIBLINGS | MORE) if not is_killed(text, battery)]
    unexplained = [change for change in survivors if not any(re.search(pattern, change) for pattern, _ in SURVIVORS)]
    assert unexplained == []
