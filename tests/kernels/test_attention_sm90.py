"""Attention on Hopper: the whole contract against float64, ragged and in parts; built as meant; no wait too few."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, kernels, toolchain
from ptxlab.dtypes import numbers, stored
from ptxlab.errors import ArgumentError, EmulationError, VerificationError
from ptxlab.kernels.attention import sm80, sm90
from ptxlab.kernels.attention.merge import MERGE
from ptxlab.kernels.attention.sm90 import SM90, Tile
from ptxlab.runtime import Kernel, run_spec
from ptxlab.spec import Arrays
from ptxlab.verify import compare
from tests import attention_problems as problems
from tests import waits

SOURCE = kernels.find(SM90.name)[1][0]
BACKENDS = ("emulator", pytest.param("gpu", marks=pytest.mark.gpu))


class Variant(NamedTuple):
    """Every head dim, page size, scheme, dtype is somewhere, and every number of tokens that a warp takes."""

    D: int
    page: int
    bits: int
    channel: int
    T: int
    ratio: int
    BF16: int
    tile: Tile

    def sizes(self, window: int, blocks: int) -> dict[str, Any]:
        known = {"page": self.page, "bits": self.bits, "channel": self.channel, "softmax_scale": self.D**-0.5}
        return {**known, "window": window, "blocks": blocks}

    @property
    def config(self) -> dict[str, int]:
        constants = {"D": self.D, "PAGE": self.page, "BITS": self.bits, "CHANNEL": self.channel, "BF16": self.BF16}
        room = sm90.room_for(self.T * self.ratio)
        return {**constants, "FUSED": 1, "SLOTS": sm90.SLOTS, "COLUMNS": room, **self.tile._asdict()}

    def problem(
        self, seed: int, lengths: tuple[int, ...], change: problems.Change, Hkv: int, window: int, blocks: int
    ) -> tuple[Arrays, Arrays]:
        """(logical inputs, arguments)."""
        scheme = sm80.scheme_of(self.bits, self.channel)
        shape: dict[str, int] = {"Hq": Hkv * self.ratio, "Hkv": Hkv, "T": self.T, "D": self.D, "page_size": self.page}
        q, cache = problems.problem(seed, lengths, change, scheme=scheme, **shape)
        logical = {"q": q, "cache": cache, "softmax_scale": self.D**-0.5, "window": window, "blocks": blocks}
        return logical, {**SM90.pack(logical), "q": stored(q, sm80.DTYPES[self.BF16])}


VARIANTS = (
    Variant(128, 64, 4, 0, T=1, ratio=1, BF16=0, tile=Tile(64, 2, 4, 1)),
    Variant(128, 16, 4, 0, T=3, ratio=4, BF16=1, tile=Tile(16, 4, 2, 1)),
    Variant(128, 32, 8, 0, T=1, ratio=16, BF16=0, tile=Tile(32, 4, 4, 1)),
    Variant(64, 32, 4, 1, T=8, ratio=3, BF16=0, tile=Tile(32, 2, 3, 1)),
    Variant(256, 16, 4, 0, T=1, ratio=8, BF16=1, tile=Tile(16, 8, 2, 1)),
    Variant(64, 64, 8, 1, T=2, ratio=2, BF16=0, tile=Tile(64, 3, 3, 1)),
)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v[:-1])))


def check(variant: Variant, logical: Arrays, arrays: Arrays, backend: str, **how: Any) -> Arrays:
    """What it says, held against the reference within its bound; counters are as they were."""
    sizes = variant.sizes(logical["window"], logical["blocks"])
    checks = emulator.CHECKS if backend == "emulator" else ()
    outcome = run_spec(SM90, SOURCE, arrays, sizes=sizes, config=variant.config, backend=backend, checks=checks, **how)
    assert [str(finding) for finding in outcome.findings] == []
    compare(SM90, outcome.outputs, logical, variant.config)
    return outcome.outputs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS[:3], ids=lambda v: "-".join(map(str, v[:-1])))
@pytest.mark.parametrize("change", problems.CASES, ids=lambda change: change.__name__)
def test_near_float64_in_hard_cases(variant: Variant, change: problems.Change, backend: str) -> None:
    logical, arrays = variant.problem(1, (75, 0, 1, 130), change, 1, window=0, blocks=2)
    outputs = check(variant, logical, arrays, backend)
    assert not outputs["out"][1].any() and np.isneginf(outputs["lse"][1]).all()
    assert np.isfinite(numbers(outputs["out"], sm80.DTYPES[variant.BF16])).all()
    seen = logical["cache"].lengths[:, None] - variant.T + np.arange(variant.T) >= 0
    assert np.array_equal(np.isfinite(outputs["lse"]), np.broadcast_to(seen[..., None], outputs["lse"].shape))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", (VARIANTS[0], VARIANTS[2]), ids=lambda v: "-".join(map(str, v[:-1])))
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_query_that_is_no_number_shows_and_spoils_no_other(variant: Variant, wrong: float, backend: str) -> None:
    """Though queries become integers, of which none stands for either."""
    logical, arrays = variant.problem(1, (75, 130), problems.nothing, 1, window=0, blocks=2)
    right = check(variant, logical, arrays, backend)
    q = logical["q"].copy()
    q[1, -1, 0, 3] = wrong
    arrays = {**arrays, "q": stored(q, sm80.DTYPES[variant.BF16])}
    sizes = variant.sizes(logical["window"], logical["blocks"])
    found = run_spec(SM90, SOURCE, arrays, sizes=sizes, config=variant.config, backend=backend).outputs
    assert np.isnan(numbers(found["out"][1, -1, 0], sm80.DTYPES[variant.BF16])).all()
    assert np.isnan(found["lse"][1, -1, 0])
    for name in ("out", "lse"):
        found[name][1, -1, 0] = right[name][1, -1, 0]
        assert np.array_equal(found[name], right[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ratio", [3, 8])
def test_no_sum_of_integers_overflows(ratio: int, bits: int, sign: int, backend: str) -> None:
    """Of 256 dims, all but one at the highest level, and queries with no smaller element; in one operand and in two."""
    variant = Variant(256, 16, bits, 0, T=1, ratio=ratio, BF16=0, tile=Tile(16, 4, 1, 1))

    def change(rng: np.random.Generator, q: np.ndarray, k: problems.Tokens, v: problems.Tokens) -> None:
        q[:] = sign
        for keys in k:
            keys[:], keys[..., 0] = 1, 0

    check(variant, *variant.problem(0, (40, 16), change, 1, window=0, blocks=2), backend)


def test_memory_is_what_the_constants_need() -> None:
    """Also of others than are chosen: a sweep may ask for room for 8 columns where there are 2."""
    variant = Variant(64, 64, 4, 0, T=1, ratio=2, BF16=0, tile=Tile(32, 4, 2, 1))
    logical, arrays = variant.problem(0, (75, 130), problems.nothing, 1, window=0, blocks=2)
    sizes = variant.sizes(0, 2)
    for more in ({"COLUMNS": 8}, {"SLOTS": 1}):
        outcome = run_spec(SM90, SOURCE, arrays, sizes=sizes, config={**variant.config, **more}, backend="emulator")
        compare(SM90, outcome.outputs, logical, variant.config)


@every_variant
@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    Hkv=st.integers(1, 2),
    window=st.sampled_from((0, 1, 20, 64, 1000)),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    change=st.sampled_from(problems.CASES),
    mode=st.sampled_from(emulator.MODES),
)
def test_near_float64_in_the_emulator(
    variant: Variant,
    lengths: list[int],
    Hkv: int,
    window: int,
    blocks: int,
    seed: int,
    change: problems.Change,
    mode: str,
) -> None:
    check(
        variant,
        *variant.problem(seed, tuple(lengths), change, Hkv, window, blocks),
        "emulator",
        mode=mode,
        seed=seed,
    )


@pytest.mark.gpu
@every_variant
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    Hkv=st.integers(1, 3),
    window=st.sampled_from((0, 1, 100, 1000)),
    blocks=st.sampled_from((1, 132, 264)),
    seed=st.integers(0, 2**32 - 1),
    change=st.sampled_from(problems.CASES),
)
@settings(max_examples=20)
def test_near_float64_on_the_gpu(
    variant: Variant, lengths: list[int], Hkv: int, window: int, blocks: int, seed: int, change: problems.Change
) -> None:
    """In the tile that is chosen, too; and two runs give the same bits."""
    logical, arrays = variant.problem(seed, tuple(lengths), change, Hkv, window, blocks)
    shapes = SM90.sizes_of({n: a.shape for n, a in arrays.items()}, variant.sizes(window, blocks))
    for tile in (variant.tile, sm90.choose_tile(shapes)):
        first, second = (check(variant._replace(tile=tile), logical, arrays, "gpu") for _ in range(2))
        assert all(np.array_equal(first[name], second[name], equal_nan=True) for name in first)


@every_variant
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("blocks", [2, 7])
def test_the_merge_kernel_puts_parts_together(variant: Variant, backend: str, blocks: int) -> None:
    """What the last block does with FUSED, another kernel does without: the same within the same bound."""
    window = 300 if variant.T == 3 else 0
    logical, arrays = variant.problem(blocks, (700, 0, 5, 130), problems.nothing, 1, window, blocks)
    B, T, Hq, D = logical["q"].shape
    columns = sm90.columns_of({"T": T, "Hq": Hq, "Hkv": 1})
    config = {**variant.config, "FUSED": 0}
    sizes = SM90.sizes_of({n: a.shape for n, a in arrays.items()}, variant.sizes(window, blocks))
    made = {
        "out": np.full((B, T, Hq, D), 0x7FFF, np.uint16),  # a NaN, in either dtype
        "lse": np.full((B, T, Hq), np.nan, np.float32),
        "partial": np.full((blocks, 2, columns, D), np.nan, np.float32),
        "stats": np.full((blocks, 2, columns, 2), np.nan, np.float32),
        "segments": np.full((blocks, 2), -1, np.int32),
    }
    args = SM90.arguments({**arrays, **made}, {**sizes, **config})
    how: dict[str, Any] = {"checks": emulator.CHECKS} if backend == "emulator" else {}
    result = Kernel.of(SM90, SOURCE, config).launch(args, SM90.launch({**sizes, **config}), backend=backend, **how)
    assert result is None or [str(finding) for finding in result.findings] == []
    assert blocks == 2 or made["segments"][:, 1].max() > 1, "no unit is in parts"
    made["out"] = made["out"].view("uint16" if variant.BF16 else "float16")
    outputs = run_spec(
        MERGE,
        kernels.find(MERGE.name)[1][0],
        made,
        sizes={"Hkv": 1, "tile": sm90.COLUMNS},
        config={"D": D, "BF16": variant.BF16, "COLUMNS": sm90.COLUMNS},
        backend=backend,
        checks=how.get("checks", ()),
    ).outputs
    counters = {"segments": SM90.pack(logical)["segments"]}
    compare(SM90, {**outputs, **counters}, logical, variant.config)


def test_the_logarithms_may_be_left_out() -> None:
    """The kernel is given a null pointer."""
    variant = VARIANTS[0]
    logical, arrays = variant.problem(0, (70, 0), problems.nothing, 1, 0, 2)
    with_lse = check(variant, logical, arrays, "emulator")["out"]
    sizes = SM90.sizes_of({n: a.shape for n, a in arrays.items()}, variant.sizes(0, 2))
    arrays["out"] = np.zeros_like(with_lse)
    for arg in SM90.args:
        if arg.role == "scratch":
            arrays[arg.name] = np.zeros(arg.resolve(sizes), arg.dtype)
    sizes = {**sizes, **variant.config}
    Kernel.of(SM90, SOURCE, variant.config).launch(
        SM90.arguments(arrays, sizes), SM90.launch(sizes), backend="emulator"
    )
    assert np.array_equal(arrays["out"], with_lse)


CHOSEN = [
    {
        "D": D,
        "page": page,
        "bits": bits,
        "channel": channel,
        "T": T,
        "Hq": 8 * ratio,
        "Hkv": 8,
        "B": B,
        "P": 4096 // page,
    }
    for D, page, bits, channel, T, ratio, B in (
        (128, 64, 4, 0, 1, 1, 64),
        (128, 64, 4, 0, 1, 8, 64),
        (128, 16, 4, 1, 8, 16, 1),
        (64, 32, 8, 0, 1, 4, 256),
        (256, 64, 4, 0, 1, 8, 64),
        (256, 16, 8, 0, 2, 16, 16),
        (256, 16, 8, 1, 1, 1, 256),
    )
]


@pytest.mark.parametrize("sizes", CHOSEN, ids=lambda s: "-".join(map(str, s.values())))
def test_the_chosen_tile_fits_and_spills_little(sizes: dict[str, int]) -> None:
    """Nothing in the loops of head dims 64 and 128; of 256 a few registers."""
    tile = sm90.choose_tile(sizes)
    assert tile.STAGES % tile.groups == 0 and tile.WARPS * tile.TOKENS % sm90.TILE == 0
    constants = {**SM90.config_for(sizes), "BF16": 1}
    resources = toolchain.compile_cuda(SOURCE, "sm_90a", defines=constants).resources[SM90.name]
    assert resources.spill_stores <= (64 if sizes["D"] == 256 else 0)
    shared = SM90.launch({**sizes, **constants, "blocks": 1}).shared_bytes + resources.shared
    assert tile.RESIDENT * (shared + 1024) <= 228 * 1024
    warps = -(-(tile.WARPS + 2) * tile.RESIDENT // 4) * 4  # four schedulers have equally many registers
    assert warps * 32 * resources.registers <= 65536


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"D": 96}, r"D in \(64, 128, 256\) \(got D=96\)"),
        ({"T": 9}, r"1 <= T <= 8 \(got T=9\)"),
        ({"Hq": 3}, r"Hq % Hkv == 0 \(got Hq=3, Hkv=2\)"),
        ({"blocks": 0}, r"blocks >= 1 \(got blocks=0\)"),
    ],
)
def test_sizes_beyond_the_contract_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"{SM90.name}: {message}"):
        SM90.check_sizes({**SM90.example_sizes[0], **sizes})


# Every statement that makes threads or copies wait is taken out in turn: the tests must notice. There are units enough
# for the ring, the records and the sums to go around, and one is in parts.
MUTATED = Variant(64, 64, 4, 0, T=1, ratio=2, BF16=0, tile=Tile(32, 4, 2, 1))
KERNEL = Kernel.of(SM90, SOURCE, MUTATED.config)


def mutants() -> Iterator[Any]:
    for (opcode, place), copies in waits.places(KERNEL).items():
        line = next(line for path, line in place if path == SOURCE.path)
        for change in (waits.without, waits.not_expecting) if ".expect_tx" in opcode else (waits.without,):
            yield pytest.param(waits.changed(KERNEL, copies, change), line, id=f"{change.__name__}-{opcode}-{line}")


def diagnosis(module: emulator.Module, mode: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is noticed of a kernel."""
    logical, arrays = MUTATED.problem(0, (130, 1, 300, 200, 40), problems.nothing, 3, 0, 2)
    monkeypatch.setattr(Kernel, "module", module)
    try:
        check(MUTATED, logical, arrays, "emulator", mode=mode)
    except (AssertionError, EmulationError, VerificationError) as error:
        return str(error) or "wrong"
    return ""


@pytest.mark.parametrize("mode", emulator.MODES)
def test_the_kernel_itself_survives(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnosis(KERNEL.module, mode, monkeypatch) == ""


@pytest.mark.parametrize(("module", "line"), list(mutants()))
def test_every_missing_wait_is_noticed(module: emulator.Module, line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(diagnosis(module, mode, monkeypatch) for mode in emulator.MODES), SOURCE.text.splitlines()[line - 1]
