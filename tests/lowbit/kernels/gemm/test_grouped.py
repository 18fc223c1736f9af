"""The grouped GEMM: exact for any share of the rows among the experts, early and late; built and chosen as meant."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.bench.shapes import MIXTRAL
from ptxlab.lowbit.kernels.gemm import grouped
from ptxlab.lowbit.kernels.gemm.grouped import GROUPED, GROUPED_CHANNEL, most_tiles, offsets_of
from ptxlab.lowbit.quant import TwoLevelWeight
from tests.support import gemm_checks as checks
from tests.support import gemm_problems
from tests.support.axes import on_every_backend

(SOURCE,) = registry.find(GROUPED.name)[1]
# Tiles that the emulator runs in a moment: few tokens, a short ring, rows that are no multiple of a warp group's.
TILES = (
    {"BM": 8, "WN": 2, "MN": 1, "STRIPS": 8, "BK": 128, "STAGES": 2},
    {"BM": 16, "WN": 1, "MN": 1, "STRIPS": 3, "BK": 256, "STAGES": 3},
    {"BM": 32, "WN": 2, "MN": 2, "STRIPS": 11, "BK": 128, "STAGES": 2},
    {"BM": 64, "WN": 1, "MN": 2, "STRIPS": 8, "BK": 256, "STAGES": 2},
    {"BM": 8, "WN": 3, "MN": 1, "STRIPS": 12, "BK": 512, "STAGES": 2},
)
OUTPUT_TILES = (*TILES[:3], {"BM": 128, "WN": 2, "MN": 1, "STRIPS": 8, "BK": 128, "STAGES": 2})


def output(logical: Mapping[str, Any], backend: str, config: Mapping[str, int], **options: Any) -> np.ndarray:
    """Run the grouped GEMM under the emulator's checks and return Y; `config` overrides chosen constants."""
    (M, K), first = logical["x"].shape, logical["weights"][0]
    spec, groups = (GROUPED, {"g": first.group}) if isinstance(first, TwoLevelWeight) else (GROUPED_CHANNEL, {})
    sizes = {"M": M, "N": first.shape[0], "K": K, "E": len(logical["weights"]), **groups}
    config = {**spec.config_for(sizes), **config} | ({} if groups else {"SIGNED": 0})
    return checks.run_checked(spec, spec.pack(dict(logical)), backend, sizes=groups, config=config, **options)


@pytest.mark.full
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile['BM']}-{tile['STRIPS']}")
@given(
    logical=gemm_problems.grouped_experts(experts=5, tokens=40, rows=300, groups=7),
    signed=st.integers(0, 1),
    mode=st.sampled_from(emulator.MODES),
    sms=st.sampled_from((1, 3, 132)),
)
@settings(max_examples=6)
def test_accumulators_are_exact_in_the_emulator(
    tile: dict[str, int], logical: dict[str, Any], signed: int, mode: str, sms: int
) -> None:
    """A block has many tiles on few SMs, and the ring goes on from one to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "SMS", sms)
        y = output(logical, "emulator", {**tile, "SIGNED": signed}, mode=mode)
    assert np.array_equal(y, GROUPED.reference(**logical))


@pytest.mark.default_cases("33-emulator")
@on_every_backend
@pytest.mark.parametrize("experts", [32, 33, 100])
def test_more_experts_than_a_warp_has_lanes(experts: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most experts have no rows, among them the first and the last, and one has several tiles.

    There are few SMs.
    """
    monkeypatch.setattr(grouped, "SMS", 3)
    counts = np.zeros(experts, np.int64)
    counts[[3, 31, experts - 3]] = 1, 19, 4
    logical = GROUPED.example(np.random.default_rng(0), M=24, N=24, K=64, E=experts, g=64)
    logical["offsets"] = offsets_of(counts)
    assert np.array_equal(output(logical, backend, TILES[0]), GROUPED.reference(**logical))


@pytest.mark.long(20)
@pytest.mark.gpu
@given(
    logical=gemm_problems.grouped_experts(experts=12, tokens=200, rows=1200, groups=12),
    tile=st.sampled_from(({}, *TILES)),
)
def test_accumulators_are_exact_on_the_gpu(logical: dict[str, Any], tile: dict[str, int]) -> None:
    checks.assert_exact_twice(lambda: output(logical, "gpu", tile), GROUPED.reference(**logical))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 16, 64, 128, 300, 1024, 2050])
@pytest.mark.parametrize("N", [1088, 4096])
def test_every_chosen_tile_is_exact(M: int, N: int) -> None:
    """N leaves the last tile ragged, and K the last stage."""
    for groups in ({"g": 32}, {}):
        logical = GROUPED.example(np.random.default_rng(M), M=M, N=N, K=1184, E=8, **groups)
        assert np.array_equal(output(logical, "gpu", {}), GROUPED.reference(**logical)), groups


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("tile", OUTPUT_TILES, ids=lambda tile: f"{tile['BM']} tokens")
@checks.every_output
def test_scaled_outputs_are_the_epilogue_in_float32(
    variant: int, dtype: Any, tile: dict[str, int], backend: str
) -> None:
    """The bits are those of acc * x_scale * w_scale + bias.

    Each operation is rounded to float32, then once to the output.
    """
    with_bias = (variant + OUTPUT_TILES.index(tile)) % 2 == 0
    logical = GROUPED.example(np.random.default_rng(variant), M=50, N=136, K=384, E=3, g=64)
    logical = checks.with_zeros(logical, with_bias)
    y = output(logical, backend, {**tile, "OUT": variant})
    expert = np.repeat(np.arange(3), np.diff(logical["offsets"]))
    level1 = np.stack([weight.exact_level1() for weight in logical["weights"]]).astype(np.int32)
    exact = np.einsum("mk,mnk->mn", logical["x"].astype(np.int32), level1[expert])
    w_scale = np.stack([weight.channel_scale for weight in logical["weights"]])[expert]
    bias = logical["bias"][expert] if with_bias else None
    checks.assert_scaled_in_float32(y, exact, dtype, logical["x_scale"], w_scale, bias)
    bits = f"u{y.itemsize}"
    assert np.array_equal(y.view(bits), GROUPED.expected(logical, {"OUT": variant})["y"].view(bits))


def chosen_constants(M: int, N: int, K: int, g: int, signed: int) -> dict[str, int]:
    return {**GROUPED.config_for({"M": M, "N": N, "K": K, "E": 8, "g": g}), "OUT": 0, "SIGNED": signed}


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    list(
        dict.fromkeys(
            tuple(chosen_constants(M, layer.N, layer.K, g, signed).items())
            for layer in MIXTRAL
            for M in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
            for g, signed in ((128, 0), (32, 1))
        )
    ),
    ids=lambda config: "-".join(f"{name}{constant}" for name, constant in config),
)
def test_no_tile_spills_or_waits_for_its_own_wgmma(config: tuple[tuple[str, int], ...]) -> None:
    sizes = {"M": 256, "N": 4096, "K": 4096, "E": 8}
    image = checks.compile_checked(GROUPED, dict(config), sizes)
    assert image.warnings == ()
    shared = GROUPED.launch({**sizes, **dict(config)}).shared_bytes
    assert image.resources[GROUPED.name].shared + shared <= 232_448


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("experts", [1, 8, 40])
@pytest.mark.parametrize("BM", [8, 64])
def test_no_share_of_the_rows_makes_more_tiles_than_there_are_blocks_for(BM: int, experts: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    tile_limit = most_tiles({"M": rows, "E": experts, "N": 128, "BM": BM, "STRIPS": 8})
    shares = [
        rng.multinomial(rows, rng.dirichlet(np.full(experts, spread))) for spread in (0.1, 1, 100) for _ in range(30)
    ]
    active = min(rows, experts)
    worst = np.ones(active, np.int64)
    worst[0] += rows - active
    assert max(sum(ceil_div(shares, BM)) for shares in shares) <= tile_limit == sum(ceil_div(worst, BM))


@pytest.mark.parametrize("offsets", [[1, 3, 5], [0, 3, 2], [0, 6, 5], [0, 2, 4], [0, 2, 6]], ids=str)
def test_offsets_that_do_not_share_out_the_rows_are_refused(offsets: list[int]) -> None:
    logical = GROUPED.example(np.random.default_rng(0), M=5, N=8, K=64, E=2, g=64)
    with pytest.raises(ArgumentError, match=f"{GROUPED.name}: offsets: .*got offsets"):
        output({**logical, "offsets": np.array(offsets, np.int32)}, "emulator", TILES[0])
