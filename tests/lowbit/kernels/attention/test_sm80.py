"""Attention on tensor cores from Ampere on: the whole contract against float64, in one piece and in parts of blocks."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry, toolchain
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention.merge import MERGE
from ptxlab.lowbit.kernels.attention.sm80 import MMA
from ptxlab.runtime import Kernel, verify
from ptxlab.spec import Arrays
from ptxlab.spec.dtypes import numbers
from ptxlab.spec.tolerance import describe_mismatch
from tests.support import attention_problems as problems
from tests.support import sync_mutants
from tests.support.attention_variants import AMPERE, Variant, parametrize_variants, problem_strategies
from tests.support.axes import both_modes, on_every_backend

SOURCE = registry.find(MMA.name)[1][0]


def run_in_parts(
    variant: Variant, logical: Arrays, arrays: Arrays, backend: str, blocks: int, fused: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Compute (out, lse) by many blocks.

    The partial results of a block are merged in float64, unless `fused`.
    """
    B, T, Hq, D = logical["q"].shape
    config = {**variant.config, "FUSED": fused}
    columns = min(config["COLUMNS"], variant.ratio * T)
    sizes = MMA.sizes_of(
        {name: array.shape for name, array in arrays.items()},
        variant.sizes(logical["window"], blocks),
    )
    buffers = {
        "out": np.full((B, T, Hq, D), 0x7FFF, np.uint16),  # a NaN, in either dtype
        "lse": np.full((B, T, Hq), np.nan, np.float32),
        "partial": np.full((blocks, 2, columns, D), np.nan, np.float32),
        "stats": np.full((blocks, 2, columns, 2), np.nan, np.float32),
        "segments": np.zeros((blocks, columns), np.int32) if fused else np.full((blocks, 2), -1, np.int32),
    }
    args = MMA.arguments({**arrays, **buffers}, {**sizes, **config})
    positions = [i for i, arg in enumerate(MMA.args) if arg.name in buffers and not (fused and arg.name == "segments")]
    options: dict[str, Any] = {"checks": emulator.CHECKS, "uninitialised": positions} if backend == "emulator" else {}
    kernel = Kernel.of(MMA, SOURCE, config)
    outcome = kernel.launch(args, MMA.launch({**sizes, **config}), backend=backend, **options)
    assert outcome is None or [str(finding) for finding in outcome.findings] == []
    out = numbers(buffers["out"].view("uint16" if variant.BF16 else "float16"), variant.dtype)
    if fused:
        assert not buffers["segments"].any(), "counters are as they were, for the next launch"
        return out, buffers["lse"]
    parts = {name: buffers[name] for name in ("partial", "stats", "segments", "lse")}
    of = {"out": out.astype(np.float32), "Hkv": logical["cache"].num_kv_heads, "tile": config["COLUMNS"]}
    assert MERGE.reference is not None
    merged: tuple[np.ndarray, np.ndarray] = MERGE.reference(**parts, **of, BF16=variant.BF16)
    for by_blocks, whole in zip((out, buffers["lse"]), merged, strict=True):
        written = ~np.isnan(by_blocks)
        assert np.array_equal(whole[written], by_blocks[written]), "no block has written a unit in parts"
    return merged


def assert_within_bound(variant: Variant, logical: Arrays, out: np.ndarray, lse: np.ndarray) -> None:
    """Assert that (out, lse) are within the spec's bound of the reference."""
    config = {"BF16": variant.BF16}
    assert (
        describe_mismatch({"out": out, "lse": lse}, MMA.expected(logical, config), MMA.allowed(logical, config)) is None
    )


@pytest.mark.full
@parametrize_variants(*AMPERE)
@on_every_backend
@pytest.mark.parametrize(("blocks", "fused"), [(2, 1), (7, 0), (40, 1)])
def test_parts_of_many_blocks_are_the_whole(variant: Variant, backend: str, blocks: int, fused: int) -> None:
    """The blocks have several work items, part of one, or none.

    Lengths are ragged, and a window leaves tiles out.
    """
    window = 100 if variant.T == 3 else 0
    logical, arrays = variant.problem(blocks, (300, 0, 5, 130), window=window)
    assert_within_bound(variant, logical, *run_in_parts(variant, logical, arrays, backend, blocks, fused))


@pytest.mark.default_cases("3-2-10-2-64-9-8-8-emulator", "2-1-4-2-128-5-2-8-emulator")
@on_every_backend
@pytest.mark.parametrize("sizes", MERGE.example_sizes, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_the_second_kernel_merges_parts_and_writes_nothing_else(sizes: dict[str, int], backend: str) -> None:
    verdict = verify.verify(verify.Job(MERGE, registry.find(MERGE.name)[1][0], backend, sizes))
    assert verdict.passed, verdict.detail


@pytest.mark.default_cases("15-emulator")
@on_every_backend
@pytest.mark.parametrize("tiles", [8, 9, 15])
def test_more_parts_than_are_read_at_a_time(tiles: int, backend: str) -> None:
    """Every tile is a part, as there are blocks enough; eight parts are on their way at a time."""
    variant = AMPERE[5]
    logical, arrays = variant.problem(0, (tiles * problems.TILE - 3,), problems.a_sign_per_tile)
    assert_within_bound(variant, logical, *run_in_parts(variant, logical, arrays, backend, blocks=tiles, fused=1))


@pytest.mark.gpu
@parametrize_variants(*AMPERE)
@given(**problem_strategies(2000, 8, gpu=True, fused=st.integers(0, 1)))
@settings(max_examples=20)
def test_near_float64_on_the_gpu(variant: Variant, seed: int, blocks: int, fused: int, **how: Any) -> None:
    logical, arrays = variant.problem(seed, **how)
    first, second = (run_in_parts(variant, logical, arrays, "gpu", blocks, fused) for _ in range(2))
    assert_within_bound(variant, logical, *first)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)), "two runs, the same bits"


@pytest.mark.full
@parametrize_variants(*AMPERE)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nothing_is_spilled_and_every_gpu_has_room(variant: Variant, arch: str) -> None:
    config = variant.config
    resources = toolchain.compile_cuda(SOURCE, arch, defines=config).resources[MMA.name]
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0)
    sizes = {**variant.shape(2), "blocks": 1, **config}
    assert MMA.launch(sizes).shared_bytes + resources.shared <= 99 * 1024


@pytest.mark.default_cases("sm80-128-64-4-0-1-1-0")
@parametrize_variants(*AMPERE)
def test_fragments_are_loaded_without_bank_conflicts(variant: Variant) -> None:
    """Loads of keys, values and their constants have no conflicts; accesses made once for a work item may have some."""
    logical, arrays = variant.problem(0, (200,))
    outcome = variant.run(logical, arrays, count_banks=True)
    loads = [access for access in outcome.shared if not access.store and ".u32" in access.text]
    assert len(loads) > 10 and not any(access.conflicts for access in loads)


def test_lengths_beyond_the_table_are_refused() -> None:
    variant = AMPERE[1]
    logical, arrays = variant.problem(0, (30, 5))
    arrays["lengths"] = np.array([30, 65], np.int32)
    with pytest.raises(ArgumentError, match=r"lengths: lengths <= P\*page \(got lengths\[1\] = 65\)"):
        variant.run(logical, arrays)


# Every statement that makes threads or copies wait is taken out in turn: the tests must notice.
MUTATED = AMPERE[1]


@functools.cache
def mutated_kernel() -> Kernel:
    return Kernel.of(MMA, SOURCE, MUTATED.config)


def diagnosis(module: emulator.Module, mode: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Check a mutated kernel on a problem of several work items that goes around each warp's ring; return the error."""
    problem = MUTATED.problem(0, (600, 40))
    return sync_mutants.diagnosis(module, lambda: MUTATED.check(*problem, mode=mode), monkeypatch)


@both_modes
def test_the_kernel_itself_survives(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnosis(mutated_kernel().module, mode, monkeypatch) == ""


@pytest.mark.full
def test_every_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def notices(module: emulator.Module) -> bool:
        return any(diagnosis(module, mode, monkeypatch) for mode in emulator.MODES)

    assert sync_mutants.unnoticed_removals(mutated_kernel(), notices) == []
