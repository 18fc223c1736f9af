"""Attention on Hopper: the whole contract against float64, ragged and in parts; built as meant; no wait too few."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from ptxlab import emulator, registry, toolchain
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import CompileError
from ptxlab.lowbit.kernels.attention import sm90
from ptxlab.lowbit.kernels.attention.sm90 import SM90, TILE, AttentionTileSm90
from ptxlab.runtime import Kernel
from ptxlab.runtime.verify import compare
from ptxlab.spec.dtypes import convert_to_dtype, numbers
from tests.support import attention_problems as problems
from tests.support import sync_mutants
from tests.support.attention_variants import HOPPER, Variant, parametrize_variants, problem_strategies
from tests.support.axes import both_modes, on_every_backend

SOURCE = registry.find(SM90.name)[1][0]


@pytest.mark.full
@on_every_backend
@parametrize_variants(HOPPER[0], HOPPER[5])
@pytest.mark.parametrize("promote", [0, 1])
def test_scores_that_rise_from_tile_to_tile(
    variant: Variant, promote: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums so far are scaled down, those in registers and those that were promoted."""
    config = {**variant.config, "PROMOTE": promote * 2 * variant.tile.TOKENS}
    monkeypatch.setattr(Variant, "config", config)
    variant.check(*variant.problem(6, (9 * TILE,), problems.rising_scores), backend)


@pytest.mark.full
@on_every_backend
@parametrize_variants(HOPPER[0], HOPPER[5])
@pytest.mark.parametrize("begin", [TILE - 1, TILE])
def test_windows_that_begin_at_the_edge_of_a_tile(variant: Variant, begin: int, backend: str) -> None:
    """The first query's window begins with the last token of a tile, or with the first of the next one."""
    length = 2 * TILE + 9
    window = length - variant.T + 1 - begin
    variant.check(*variant.problem(5, (length,), window=window, blocks=2), backend)


@pytest.mark.full
@on_every_backend
@parametrize_variants(HOPPER[0], HOPPER[2])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_query_that_is_no_number_shows_and_spoils_no_other(variant: Variant, wrong: float, backend: str) -> None:
    """A NaN or an infinity shows though queries become integers, none of which stands for it."""
    logical, arrays = variant.problem(1, (75, 130), blocks=2)
    right = variant.check(logical, arrays, backend)
    q = logical["q"].copy()
    q[1, -1, 0, 3] = wrong
    arrays = {**arrays, "q": convert_to_dtype(q, variant.dtype)}
    outputs = variant.run(logical, arrays, backend).outputs
    assert np.isnan(numbers(outputs["out"][1, -1, 0], variant.dtype)).all()
    assert np.isnan(outputs["lse"][1, -1, 0])
    for name in ("out", "lse"):
        outputs[name][1, -1, 0] = right[name][1, -1, 0]
        assert np.array_equal(outputs[name], right[name])


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ratio", [3, 8])
def test_no_sum_of_integers_overflows(ratio: int, bits: int, sign: int, backend: str) -> None:
    """The 256 dims but one are at the highest level, and queries have no smaller element.

    This holds in one operand and in two.
    """
    variant = Variant(256, 16, bits, 0, T=1, ratio=ratio, tile=AttentionTileSm90(16, 4, 1, 1))

    def change(rng: np.random.Generator, q: np.ndarray, k: problems.Tokens, v: problems.Tokens) -> None:
        q[:] = sign
        for keys in k:
            keys[:], keys[..., 0] = 1, 0

    variant.check(*variant.problem(0, (40, 16), change, blocks=2), backend)


@pytest.mark.full
@pytest.mark.parametrize(
    ("constants", "problem"),
    [
        ({"PART": 16}, "-D PART needs -D MOST_PARTS: the parts that a unit has at most"),
        ({"LARGEST": 32767}, "the high byte of a query's largest integer is a signed one"),
        ({"TILE_TOKENS": 32}, "TILE_TOKENS"),
        ({"SUM_PAD": 2}, "SUM_PAD"),
    ],
)
def test_constants_that_the_host_counts_with_are_checked(constants: dict[str, int], problem: str) -> None:
    """They are written in Python alone: the kernel says what it takes."""
    with pytest.raises(CompileError, match=re.escape(problem)):
        toolchain.compile_cuda(SOURCE, "sm_90a", defines={**HOPPER[0].config, **constants})


@pytest.mark.full
def test_memory_is_what_the_constants_need() -> None:
    """The rule holds for constants that are not chosen, too.

    A sweep may ask for room for 8 columns where there are 2.
    """
    variant = Variant(64, 64, 4, 0, T=1, ratio=2, tile=AttentionTileSm90(32, 4, 2, 1))
    logical, arrays = variant.problem(0, (75, 130), blocks=2)
    for constants in ({"COLUMNS": 8}, {"SLOTS": 1}):
        compare(SM90, variant.run(logical, arrays, constants=constants).outputs, logical, variant.config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("lengths", "Hkv", "shape", "blocks", "window"),
    [
        ((70,), 5, {"T": 8, "ratio": 8}, 3, 0),
        ((130, *[0] * 20, *[5] * 14, 200), 1, {"T": 1, "ratio": 1}, 2, 5),
        ((*[0] * 33, 66), 1, {"T": 1, "ratio": 1}, 2, 20),
    ],
    ids=["40 units of a sequence", "36 sequences", "empty ones first"],
)
def test_more_than_a_warp_has_lanes(
    lengths: tuple[int, ...], Hkv: int, shape: dict[str, int], blocks: int, window: int
) -> None:
    """There are more sequences, or more work items of a sequence, than lanes.

    A lane takes several, one after the other.
    """
    variant = Variant(64, 64, 4, 0, **shape, tile=AttentionTileSm90(32, 4, 2, 1))
    variant.check(*variant.problem(0, lengths, Hkv=Hkv, window=window, blocks=blocks))


@pytest.mark.long(90)
@pytest.mark.gpu
@parametrize_variants(*HOPPER)
@given(**problem_strategies(3000, 40, gpu=True))
@settings(max_examples=20)
def test_near_float64_on_the_gpu(variant: Variant, seed: int, window: int, blocks: int, **how: Any) -> None:
    """The chosen tile is near too; and two runs give the same bits."""
    logical, arrays = variant.problem(seed, window=window, blocks=blocks, **how)
    shapes = SM90.sizes_of({n: a.shape for n, a in arrays.items()}, variant.sizes(window, blocks))
    for tile in (variant.tile, sm90.choose_tile(shapes)):
        variant._replace(tile=tile).check(logical, arrays, "gpu", runs=2)


IN_PARTS = HOPPER[3], (1000, 64), 7  # sequences, of which one is in parts; blocks


# Every tile is a part, as there are blocks enough: a unit of n tiles takes n - 1 parts over, 4 or 8 at a time.
SMALLEST_PARTS = Variant(64, 64, 4, 0, T=1, ratio=1, tile=AttentionTileSm90(16, 4, 1, 1))


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("tiles", [5, 6, 9, 10, 14])
def test_more_parts_than_are_taken_over_at_a_time(tiles: int, backend: str) -> None:
    lengths, blocks = (tiles * TILE - 3,), tiles + 4  # a unit of few tiles costs up to 4 more
    logical, arrays = SMALLEST_PARTS.problem(0, lengths, problems.a_sign_per_tile, blocks=blocks)
    for mode in emulator.MODES if backend == "emulator" else emulator.MODES[:1]:
        SMALLEST_PARTS.check(logical, arrays, backend, mode=mode)


@pytest.mark.full
@on_every_backend
def test_a_nan_is_handed_over(backend: str) -> None:
    """The NaN may have all bits set, whose word would say that no result has come.

    Arithmetic makes another NaN of it.
    """
    variant, lengths, blocks = IN_PARTS
    logical, arrays = variant.problem(0, lengths, blocks=blocks)
    right = variant.check(logical, arrays, backend)
    arrays = {**arrays, "v_scale": arrays["v_scale"].copy()}
    arrays["v_scale"].view(np.uint32)[0, 5] = 2**32 - 1
    outputs = variant.run(logical, arrays, backend).outputs
    assert np.isnan(outputs["out"][..., 5]).all()
    outputs["out"][..., 5] = right["out"][..., 5]
    assert all(np.array_equal(outputs[name], right[name]) for name in right)


@pytest.mark.full
def test_a_part_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a block that has one begins when those before have ended; what it leaves, `check` would find."""
    variant, lengths, blocks = IN_PARTS
    logical, arrays = variant.problem(0, lengths, blocks=blocks)
    right = variant.check(logical, arrays)
    monkeypatch.setattr("ptxlab.emulator.launch.WAVE_LANES", 1)
    outputs = variant.run(logical, arrays, constants={"PATIENCE": 3}).outputs
    assert np.isnan(outputs["lse"][0]).all() and np.isnan(outputs["out"][0]).all()
    assert all(np.array_equal(outputs[name][1], right[name][1]) for name in ("out", "lse"))
    assert outputs["partial"].any() and outputs["stats"].any()


CHOSEN = [
    {"D": D, "page": page, "bits": bits, "channel": channel, "T": T, "Hq": Hq, "Hkv": 8, "B": B, "P": 4096 // page}
    for D, page, bits, channel, T, Hq, B in (
        (128, 64, 4, 0, 1, 8, 64),
        (128, 64, 4, 0, 1, 64, 64),
        (128, 16, 4, 1, 8, 128, 1),
        (64, 32, 8, 0, 1, 32, 256),
        (256, 64, 4, 0, 1, 64, 64),
        (256, 16, 8, 0, 2, 128, 16),
        (256, 16, 8, 1, 1, 8, 256),
    )
]


@pytest.mark.full
@pytest.mark.parametrize("sizes", CHOSEN, ids=lambda s: "-".join(map(str, s.values())))
def test_the_chosen_tile_fits_and_spills_little(sizes: dict[str, int]) -> None:
    """The loops of head dims 64 and 128 spill nothing, those of 256 a few registers."""
    tile = sm90.choose_tile(sizes)
    assert tile.STAGES % tile.groups == 0 and tile.WARPS * tile.TOKENS % sm90.TILE == 0
    constants = {**SM90.config_for(sizes), "BF16": 1}
    resources = toolchain.compile_cuda(SOURCE, "sm_90a", defines=constants).resources[SM90.name]
    assert resources.spill_stores <= (64 if sizes["D"] == 256 else 0)
    launch = SM90.launch({**sizes, **constants, "blocks": 1})
    shared = launch.shared_bytes + resources.shared
    assert tile.RESIDENT * (shared + 1024) <= 228 * 1024
    warps = ceil_div(launch.block[0] // 32 * tile.RESIDENT, 4) * 4  # four schedulers have equally many registers
    assert warps * 32 * resources.registers <= 65536


@pytest.mark.default_cases("4")
@pytest.mark.parametrize("ratio", [4, 8])
def test_vectors_go_to_all_banks(ratio: int) -> None:
    """Keys, queries, and the warps' sums of a head dim of 128 go there and back without conflicts."""
    variant = Variant(128, 64, 4, 0, T=1, ratio=ratio, tile=AttentionTileSm90(64, 2, 4, 1))
    outcome = variant.run(*variant.problem(0, (200,)), count_banks=True)
    vectors = [access for access in outcome.shared if access.width == 16 and min(access.addresses) >= 0]
    assert {access.store for access in vectors} == {True, False}
    assert [access.text for access in vectors if access.conflicts] == []
    singles = [access.text for access in outcome.shared if access.store and ".f32" in access.text and access.width == 4]
    assert singles == [], "sums are stored as vectors"


# Every statement that makes threads or copies wait is taken out in turn: the tests must notice. There are units enough
# for the ring, the records and the sums to go around, and one is in parts.
MUTATED = Variant(64, 64, 4, 0, T=1, ratio=2, tile=AttentionTileSm90(32, 4, 2, 1))
SHARES = 4  # of the mutants, tests that run side by side


@functools.cache
def mutated_kernel() -> Kernel:
    return Kernel.of(SM90, SOURCE, {**MUTATED.config, "PATIENCE": 400})


def mutants() -> Iterator[tuple[str, emulator.Module]]:
    """Yield each change with the kernel that has it."""
    kernel = mutated_kernel()
    for (opcode, place), copies in sync_mutants.statements_by_place(kernel).items():
        line = next(line for path, line in place if path == SOURCE.path)
        text = SOURCE.text.splitlines()[line - 1].strip()
        for change in (
            (sync_mutants.remove, sync_mutants.expect_no_bytes) if ".expect_tx" in opcode else (sync_mutants.remove,)
        ):
            yield f"{line}: {text} {change.__name__} {opcode}", sync_mutants.apply_change(kernel, copies, change)


def diagnosis(module: emulator.Module, mode: str, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> str:
    """Check a mutated kernel on ragged sequences, and return the error; empty if there is none."""
    problem = MUTATED.problem(0, (130, 1, 300, 200, 40), Hkv=3, blocks=2)
    return sync_mutants.diagnosis(module, lambda: MUTATED.check(*problem, mode=mode, seed=seed), monkeypatch)


@pytest.mark.full
@both_modes
def test_the_kernel_itself_survives(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnosis(mutated_kernel().module, mode, monkeypatch) == ""


@pytest.mark.full
@pytest.mark.parametrize("share", range(SHARES))
def test_every_missing_wait_is_noticed(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    share_of_mutants = list(mutants())[share::SHARES]
    unnoticed = [
        name
        for name, mutant in share_of_mutants
        if not any(diagnosis(mutant, mode, monkeypatch) for mode in emulator.MODES)
    ]
    assert share_of_mutants and unnoticed == []


@pytest.mark.full
def test_lanes_that_do_not_wait_for_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warp that takes a part over looks until all of its lanes have seen all: some clear what others look at."""
    kernel = mutated_kernel()
    votes = sync_mutants.statements_by_place(kernel, re.compile(r"vote\.sync\.any"))
    copies = [i for (_, place), them in votes.items() if place[0][0].endswith("parts.cuh") for i in them]
    mutant, seeds = sync_mutants.apply_change(kernel, copies, sync_mutants.count_own_vote), (1, 8)
    assert copies and any(diagnosis(mutant, "late", monkeypatch, seed) for seed in seeds)
    assert not any(diagnosis(kernel.module, "late", monkeypatch, seed) for seed in seeds)
