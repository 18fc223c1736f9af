"""The Hopper steps of the GEMM ladder: exact in every tile, with K split or not, early and late; and built as meant."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.gemm import sm90
from ptxlab.spec import KernelSpec
from tests.support import gemm_checks as checks
from tests.support import gemm_problems
from tests.support.axes import both_modes, on_every_backend

SPECS = {spec.name: spec for spec in sm90.SPECS}
CHECKS = ("race", "init", "async")
# Tiles that the emulator runs in a moment: few tokens, a short ring, clusters of one, two and four.
TILES = (
    {"BM": 8, "STAGES": 2, "CLUSTER": 1, "WN": 2, "BK": 128},
    {"BM": 16, "STAGES": 3, "CLUSTER": 2, "WN": 1, "BK": 256},
    {"BM": 32, "STAGES": 2, "CLUSTER": 4, "WN": 1, "BK": 128},
    {"BM": 32, "STAGES": 3, "CLUSTER": 2, "WN": 2, "BK": 128},
)


def groups_of(spec: KernelSpec) -> list[int]:
    return [g for g in (32, 64, 128) if str(g) in spec.rules[0]]


def problems(spec: KernelSpec, **limits: int) -> st.SearchStrategy[dict[str, Any]]:
    return (gemm_problems.qoq if "_qoq_" in spec.name else gemm_problems.lqq)(group_sizes=groups_of(spec), **limits)


def group(logical: Mapping[str, Any]) -> int:
    return int(logical["weight"].group)


def accumulators(
    spec: KernelSpec, logical: dict[str, Any], backend: str, tile: Mapping[str, int], **options: Any
) -> Any:
    M, K = logical["x"].shape
    sizes = {"M": M, "N": len(logical["weight"].q4), "K": K, "g": group(logical)}
    usual = spec.config_for(sizes)
    config = {**usual, **{name: constant for name, constant in tile.items() if name in usual}}
    return checks.run_checked(spec, spec.pack(logical), backend, sizes={"g": sizes["g"]}, config=config, **options)


@pytest.mark.full
@pytest.mark.parametrize("name", SPECS)
@given(data=st.data(), tile=st.sampled_from(TILES), mode=st.sampled_from(emulator.MODES))
@settings(max_examples=15)
def test_accumulators_are_exact_in_the_emulator(
    name: str, data: st.DataObject, tile: dict[str, int], mode: str
) -> None:
    spec = SPECS[name]
    logical = data.draw(problems(spec, tokens=40, rows=200, groups=6))
    assert np.array_equal(accumulators(spec, logical, "emulator", tile, mode=mode), spec.reference(**logical))


@pytest.mark.full
@both_modes
def test_warp_groups_share_the_tasks_of_tile_after_tile(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Give one block three tiles and the other two, each of four tasks, through a ring of two slots."""
    monkeypatch.setattr(sm90, "_SMS", 2)
    logical = sm90.DYNAMIC.example(np.random.default_rng(0), M=8, N=264, K=448, g=64)
    tile = {"BM": 8, "BK": 128, "STAGES": 2, "RESIDENT": 1}
    y = accumulators(sm90.DYNAMIC, logical, "emulator", tile, mode=mode)
    assert np.array_equal(y, sm90.DYNAMIC.reference(**logical))


@pytest.mark.long(20)
@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
@given(data=st.data(), tile=st.sampled_from(({}, *TILES)))
def test_accumulators_are_exact_on_the_gpu(name: str, data: st.DataObject, tile: dict[str, int]) -> None:
    spec = SPECS[name]
    logical = data.draw(problems(spec, tokens=300, rows=640, groups=12))
    checks.assert_exact_twice(lambda: accumulators(spec, logical, "gpu", tile), spec.reference(**logical))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("M", [1, 8, 9, 16, 32, 64, 65, 128, 129, 256, 300])
@pytest.mark.parametrize("N", [1088, 30016])
def test_every_chosen_tile_is_exact(name: str, M: int, N: int) -> None:
    """Both columns of the table of tiles are tried.

    M and N leave the last tile ragged, and K the last stage.
    """
    spec = SPECS[name]
    logical = spec.example(np.random.default_rng(M), M=M, N=N, K=448, g=64)
    assert np.array_equal(accumulators(spec, logical, "gpu", {}), spec.reference(**logical))


@pytest.mark.full
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("N", "tokens"), [(4096, (1, 32, 128)), (57344, (16, 64, 256))])
def test_no_tile_spills_or_waits_for_its_own_wgmma(name: str, N: int, tokens: tuple[int, ...]) -> None:
    """Both columns of the table of tiles take turns, with groups of each size in turns."""
    spec = SPECS[name]
    for M, g in zip(tokens, itertools.cycle(groups_of(spec))):
        sizes = {"M": M, "N": N, "K": 8192, "g": g}
        config = {**spec.config_for(sizes), "OUT": 0}
        checks.compile_checked(spec, config, sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"M": 2, "N": 64, "K": 64, "g": 32}, r"gemm_w4a8_lqq_sm90: g in \(64, 128\)"),
        ({"M": 2, "N": 12, "K": 64, "g": 64}, r"N % 8 == 0"),
        ({"M": 2, "N": 64, "K": 96, "g": 64}, r"K % g == 0"),
    ],
)
def test_sizes_beyond_the_contract_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SPECS["gemm_w4a8_lqq_sm90"].sizes_of(
            {"x": (sizes["M"], sizes["K"]), "w_scale": (sizes["N"],)}, {"g": sizes["g"]}
        )


@pytest.mark.full
@on_every_backend
@given(data=st.data(), rows=st.sampled_from((8, 16, 32)), mode=st.sampled_from(emulator.MODES))
@settings(max_examples=15)
def test_activations_in_tiles(backend: str, data: Any, rows: int, mode: str) -> None:
    """The same kernel runs on swizzled tiles, whatever M and K leave of the last one."""
    spec = sm90.IMFP_TILES
    logical = data.draw(gemm_problems.lqq(tokens=40, rows=200, groups=6))
    M, K = logical["x"].shape
    sizes = {"M": M, "N": len(logical["weight"].q4), "K": K, "g": group(logical), "rows": rows}
    options = {"mode": mode} if backend == "emulator" else {}
    config, inputs = {**spec.config_for(sizes), "STAGES": 3}, spec.pack({**logical, "rows": rows})
    y = checks.run_checked(spec, inputs, backend, sizes=sizes, config=config, **options)
    assert np.array_equal(y, spec.reference(**logical))
