"""The oracle in the kernel's own order of operations: the same bits as the kernel, in the emulator and on an H200."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.emulator import CHECKS
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.bench.attention import problem as attention_problem
from ptxlab.lowbit.bench.shapes import Batch, ragged_batch
from ptxlab.lowbit.kernels.attention import exact, sm90
from ptxlab.lowbit.kernels.attention.exact.shares import Shares
from ptxlab.lowbit.kernels.attention.sm90 import INVARIANT, SM90, AttentionTileSm90
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.reference.tensor_cores import hopper_mma
from ptxlab.runtime import run_spec
from ptxlab.runtime.verify import compare
from ptxlab.sources import sources_of_kernel
from ptxlab.spec import Arrays
from ptxlab.spec.dtypes import convert_to_dtype
from tests.support import attention_problems as problems
from tests.support import tensor_cores
from tests.support.attention_problems import map_arrays
from tests.support.attention_variants import HOPPER, Variant, parametrize_variants, problem_strategies
from tests.support.dispatching_array import DispatchingArray
from tests.support.result_bits import difference

ON_HOPPER = pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="a model of Hopper")
PLAIN, OF_SMALL_PAGES = HOPPER[:2]


def run_kernel(arrays: Arrays, sizes: dict[str, Any], config: dict[str, int], backend: str) -> Any:
    """Run the kernel, and return (out, lse) as it writes them."""
    outputs = run_spec(
        SM90, sources_of_kernel(SM90.name)[0], arrays, sizes=sizes, config=config, backend=backend
    ).outputs
    return outputs["out"], outputs["lse"]


def run_oracle(
    logical: Arrays, arrays: Arrays, config: dict[str, int], arithmetic: exact.Arithmetic | None = None
) -> tuple[Any, Any]:
    """Compute (out, lse) by the bit-exact oracle."""
    options = {name: logical[name] for name in ("cache", "softmax_scale", "window", "blocks")}
    return exact.attention(arrays["q"], **options, config=config, arithmetic=arithmetic)


def assert_emulator_equals_oracle(
    variant: Variant, logical: Arrays, arrays: Arrays, mode: str = "early", **constants: int
) -> None:
    right = variant.run(logical, arrays, mode=mode, constants=constants).outputs
    actual = run_oracle(logical, arrays, {**variant.config, **constants})
    assert difference(actual, (right["out"], right["lse"]), bool(variant.BF16)) == ""


@pytest.mark.default_cases("3-1-4-2-128-3-8-64-4-0-0-2-0.088")
@pytest.mark.parametrize("sizes", SM90.example_sizes, ids=lambda s: "-".join(map(str, s.values())))
def test_equal_at_the_spec_s_examples(sizes: dict[str, Any]) -> None:
    logical, config = SM90.example(np.random.default_rng(3), **sizes), SM90.config_for(sizes)
    arrays = {**SM90.pack(logical), "q": convert_to_dtype(logical["q"], "float16")}
    extra_sizes = {name: sizes[name] for name in ("page", "bits", "channel", "window", "blocks", "softmax_scale")}
    right = run_kernel(arrays, extra_sizes, config, "emulator")
    assert difference(run_oracle(logical, arrays, config), right) == ""


@pytest.mark.full
@parametrize_variants(*HOPPER)
def test_equal_in_parts(variant: Variant) -> None:
    """Ragged lengths, whole pages and tiles among them, are cut into more blocks than work items."""
    assert_emulator_equals_oracle(variant, *variant.problem(1, (300, 64, 0, 129), Hkv=2, blocks=9))


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "blocks"), list(zip((*HOPPER[:3], *HOPPER[4:]), (1, 2, 3, 7, 5), strict=True)), ids=str
)
def test_the_same_bits_for_a_sequence_in_any_batch(variant: Variant, blocks: int) -> None:
    """The work items are cut by their own length.

    So the oracle knows no blocks, and no other sequences.
    """
    config = {**variant.config, "PART": 1 + blocks % 2, "MOST_PARTS": sm90.MOST_PARTS}
    logical, _ = variant.problem(1, (300, 64, 0, 129), Hkv=2, window=(0, 150)[blocks < 4], blocks=blocks)
    arrays = {**INVARIANT.pack(logical), "q": convert_to_dtype(logical["q"], variant.dtype)}
    sizes = variant.sizes(logical["window"], blocks)
    outcome = run_spec(INVARIANT, variant.source, arrays, sizes=sizes, config=config, backend="emulator", checks=CHECKS)
    right = run_oracle(logical, arrays, config)
    bf16 = bool(variant.BF16)
    assert difference((outcome.outputs["out"], outcome.outputs["lse"]), right, bf16) == "" and outcome.findings == ()
    compare(INVARIANT, outcome.outputs, logical, config)
    alone = replace(logical["cache"], block_table=logical["cache"].block_table[3:4], lengths=np.array([129], np.int32))
    one = run_oracle({**logical, "cache": alone}, {**arrays, "q": arrays["q"][3:4]}, config)
    assert difference(one, tuple(array[3:4] for array in right), bf16) == ""


def test_no_batch_chooses_the_tile_of_the_invariant_form() -> None:
    """A table does not choose it either: the order of sums depends on the tile."""
    sizes = {"Hq": 8, "Hkv": 8, "T": 1, "D": 128, "page": 64, "bits": 4, "channel": 0}
    batches = ({**sizes, "B": B, "P": P} for B in (1, 16, 4096) for P in (1, 64, 2048))
    assert len({tuple(INVARIANT.config_for(batch).items()) for batch in batches}) == 1


@pytest.mark.full
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_same_bits_of_more_parts_than_a_unit_may_have(blocks: int) -> None:
    logical, _ = PLAIN.problem(0, (64 * 33, 70), blocks=blocks)
    arrays = {**INVARIANT.pack(logical), "q": logical["q"].astype(np.float16)}
    config = {**PLAIN.config, "PART": 1, "MOST_PARTS": sm90.MOST_PARTS}
    outcome = run_spec(INVARIANT, PLAIN.source, arrays, sizes=PLAIN.sizes(0, blocks), config=config, backend="emulator")
    assert difference((outcome.outputs["out"], outcome.outputs["lse"]), run_oracle(logical, arrays, config)) == ""


@pytest.mark.default_cases("one_dominant_score")
@pytest.mark.parametrize("change", problems.CASES[1:], ids=lambda change: change.__name__)
def test_equal_in_hard_cases(change: problems.Change) -> None:
    assert_emulator_equals_oracle(PLAIN, *PLAIN.problem(1, (75, 0, 1, 130), change, blocks=2))


@pytest.mark.default_cases("1500-6")
@pytest.mark.parametrize(("tokens", "parts"), [(1500, 5), (1500, 6), (6100, 9), (6100, 10), (6100, 20)])
def test_equal_in_many_parts(tokens: int, parts: int) -> None:
    """Partial results of blocks are added up to 4 at a time, or else up to 8."""
    logical, arrays = PLAIN.problem(0, (tokens,), blocks=parts)
    assert shares_of(PLAIN, logical).parts.tolist() == [min(parts, 12)]  # of 8 tiles at least
    assert_emulator_equals_oracle(PLAIN, logical, arrays)


@pytest.mark.full
def test_equal_where_sums_are_promoted_now_and_then() -> None:
    """Here after two of a warp's two or three tiles; elsewhere after each, or never in the spec's examples."""
    logical, arrays = PLAIN.problem(0, (300,), Hkv=2, blocks=2)
    assert_emulator_equals_oracle(PLAIN, logical, arrays, PROMOTE=2 * PLAIN.tile.TOKENS)


@parametrize_variants(HOPPER[0], HOPPER[5])
def test_equal_where_tensor_cores_truncate(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands that an MMA gets matter now, not only the numbers that they stand for."""
    tensor_cores.patch_emulator(hopper_mma, monkeypatch)
    logical, arrays = variant.problem(0, (300, 65), blocks=2)
    right = run_kernel(arrays, variant.sizes(0, 2), variant.config, "emulator")
    assert difference(run_oracle(logical, arrays, variant.config, exact.TRUNCATING), right) == ""
    assert difference(run_oracle(logical, arrays, variant.config), right) != ""


@pytest.mark.full
def test_equal_around_pages_and_tiles() -> None:
    lengths, variant = tuple(n + i for n in (16, 64, 128) for i in (-1, 0, 1)), OF_SMALL_PAGES
    assert_emulator_equals_oracle(variant, *variant.problem(2, lengths, blocks=3))


def test_equal_where_a_query_is_no_number() -> None:
    logical, arrays = PLAIN.problem(1, (75, 130), Hkv=2, blocks=2)
    q = logical["q"].copy()
    q[0, 0, 0, 3], q[1, 0, 1, 5] = np.nan, np.inf
    assert_emulator_equals_oracle(PLAIN, logical, {**arrays, "q": convert_to_dtype(q, "float16")})


@pytest.mark.full
@settings(max_examples=8)
@given(**problem_strategies(300, 4, variant=st.sampled_from(HOPPER)))
def test_equal_in_the_emulator(variant: Variant, seed: int, mode: str, **how: Any) -> None:
    assert_emulator_equals_oracle(variant, *variant.problem(seed, **how), mode)


def shares_of(variant: Variant, logical: Arrays) -> Shares:
    return Shares.of(
        logical["cache"].lengths.astype(np.int64),
        heads=logical["cache"].num_kv_heads,
        splits=ceil_div(variant.T * variant.ratio, variant.config["COLUMNS"]),
        queries=variant.T,
        window=logical["window"],
        groups=variant.tile.groups,
        blocks=logical["blocks"],
        part=0,
    )


@pytest.mark.full
@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=70),
    heads=st.integers(1, 9),
    splits=st.integers(1, 3),
    queries=st.integers(1, 8),
    window=st.sampled_from((0, 1, 100, 1000)),
    groups=st.sampled_from((1, 2, 4, 8)),
    blocks=st.integers(1, 300),
    part=st.sampled_from((0, 1, 2, 16)),
)
def test_every_tile_is_somebody_s(lengths: list[int], **how: int) -> None:
    """A tile belongs to exactly one segment.

    The segments of a work item follow each other, from its first tile in the window to its last.
    """
    n, units = np.array(lengths, np.int64), how["heads"] * how["splits"]
    shares = Shares.of(n, **how)
    begin = np.maximum(n - how["queries"] + 1 - how["window"], 0) // 64 if how["window"] else 0 * n
    assert shares.parts.sum() == len(shares.tiles) and (shares.tiles > 0).all()
    assert len(shares.first) == (n > 0).sum() * units
    last = shares.position + 64 * shares.tiles
    assert np.array_equal(shares.position[shares.first], 64 * begin[shares.sequence[shares.first]])
    ends = ceil_div(n, 64) * 64
    assert np.array_equal(last[shares.first + shares.parts - 1], ends[shares.sequence[shares.first]])
    within = np.setdiff1d(np.arange(len(last)), shares.first)
    assert np.array_equal(shares.position[within], last[within - 1])


@pytest.mark.parametrize(("name", "number"), [("HEAD_DIM", 64), ("PAGE", 64), ("BITS", 8), ("CHANNEL", 1), ("BF16", 1)])
def test_constants_of_other_arrays_are_refused(name: str, number: int) -> None:
    variant = Variant(128, 16, 4, 0, T=1, ratio=1, tile=AttentionTileSm90(16, 4, 2, 1))
    logical, arrays = variant.problem(0, (20,))
    config = {**variant.config, name: number}
    with pytest.raises(ArgumentError, match=rf"exact: config: {name} must be \d+ for these arrays \(got {number}\)"):
        exact.attention(arrays["q"], logical["cache"], softmax_scale=1.0, blocks=1, config=config)


def repeat_page(cache: KVCache) -> KVCache:
    """Read the second page twice, and never the third."""
    table = cache.block_table.copy()
    table[0, 2] = table[0, 1]
    return replace(cache, block_table=table)


def skip_page(cache: KVCache) -> KVCache:
    """Skip the second page: later pages move up, and the length shrinks by a page."""
    table = cache.block_table.copy()
    table[0, 1:-1] = cache.block_table[0, 2:]
    return replace(cache, block_table=table, lengths=cache.lengths - cache.page_size)


def drop_last_token(cache: KVCache) -> KVCache:
    """Shorten the sequence by its last token."""
    return replace(cache, lengths=cache.lengths - 1)


def swap_nibbles(cache: KVCache) -> KVCache:
    """Swap the nibbles of the second page's first keys and values."""
    pool, page = cache.pool.copy(), int(cache.block_table[0, 1])
    nibbles = pool[page, :, :, :16]
    pool[page, :, :, :16] = nibbles << 4 | nibbles >> 4
    return replace(cache, pool=pool)


FAULTS = (repeat_page, skip_page, drop_last_token, swap_nibbles)
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


@pytest.mark.smoke
@every_fault
def test_the_oracle_tells_a_fault_from_the_right_bits(fault: Callable[[KVCache], KVCache]) -> None:
    logical, arrays = PLAIN.problem(1, (5000,), Hkv=2, blocks=20)
    wrong = run_oracle({**logical, "cache": fault(logical["cache"])}, arrays, PLAIN.config)
    for x, y in zip(wrong, run_oracle(logical, arrays, PLAIN.config), strict=True):
        assert (x != y).any(axis=(0, 1, 3) if x.ndim == 4 else (0, 1)).all(), "of every head"


@pytest.mark.default_cases(
    "subnormal results-sm90-128-64-4-0-1-1-0",
    "ragged-sm90-128-64-4-0-1-1-0",
    "ragged-sm90-64-64-8-1-2-2-0",
    "subnormal results-sm90-64-64-8-1-2-2-0",
    "ragged-sm90-256-16-4-0-1-8-1",
)
@parametrize_variants(*HOPPER)
@pytest.mark.parametrize(
    ("lengths", "change", "window", "blocks"),
    [((300, 0, 65), problems.nothing, 100, 9), ((176,), problems.one_dominant_score, 0, 132)],
    ids=["ragged", "subnormal results"],
)
def test_the_same_on_arrays_that_are_not_numpy_s(
    variant: Variant, lengths: tuple[int, ...], change: problems.Change, window: int, blocks: int
) -> None:
    """NumPy's arrays among the device's fail here without a GPU, as CuPy would refuse them.

    The arithmetic flushes subnormals.
    """

    def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: DispatchingArray(function(*(getattr(x, "array", x) for x in arrays)))

    names = ("reciprocal", "exact_reciprocal", "exp2", "log2", "fma", "mul", "add", "sub")
    scalars = {name: on_device(getattr(exact.EMULATED, name)) for name in names}
    logical, arrays = variant.problem(1, lengths, change, 2, window=window, blocks=blocks)
    device = {**logical, "cache": map_arrays(logical["cache"], DispatchingArray)}
    arithmetic = exact.Arithmetic(**scalars, mma=hopper_mma)
    actual = run_oracle(device, {"q": DispatchingArray(arrays["q"])}, variant.config, arithmetic)
    right = run_oracle(logical, arrays, variant.config, exact.TRUNCATING)
    assert difference([x.array for x in actual], right, bool(variant.BF16)) == ""


# On an H200 --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@ON_HOPPER
@parametrize_variants(*HOPPER)
@settings(max_examples=8)
@given(**problem_strategies(3000, 20, gpu=True))
@example(lengths=(176,), Hkv=2, window=0, blocks=132, seed=1, change=problems.one_dominant_score)  # subnormal results
def test_equal_on_the_gpu(variant: Variant, seed: int, window: int, blocks: int, **how: Any) -> None:
    logical, arrays = variant.problem(seed, window=window, blocks=blocks, **how)
    logical = {**logical, "cache": map_arrays(logical["cache"], gpu.to_device)}
    arrays = {name: gpu.to_device(array) for name, array in arrays.items()}
    right = run_kernel(arrays, variant.sizes(window, blocks), variant.config, "gpu")
    assert difference(run_oracle(logical, arrays, variant.config), right, bool(variant.BF16)) == ""


BATCHES = (
    *(Batch(*heads, (n,)) for heads in ((32, 8), (64, 8), (32, 32), (8, 1)) for n in (300, 4096, 32768, 131072)),
    *(Batch(32, 8, (64 * n - 1, 64 * n, 64 * n + 1)) for n in (1, 16, 1024)),
    Batch(32, 8, (1024,) * 64),
    Batch(32, 32, (1024,) * 256),
    *(ragged_batch(heads) for heads in ((32, 8), (64, 8))),
)


def bench_problem(batch: Batch) -> tuple[Any, KVCache, dict[str, Any], dict[str, int]]:
    """Return queries, cache, sizes and constants of a batch as the benchmark measures it."""
    drawn_problem = attention_problem.random_problem(batch)
    q, cache = drawn_problem.q[:, None], drawn_problem.caches[0]
    logical = {"B": cache.batch, "T": 1, "Hq": batch.Hq, "Hkv": batch.Hkv, "D": cache.head_dim, "P": cache.max_pages}
    sizes = {"page": cache.page_size, "bits": 4, "channel": 0, "softmax_scale": attention_problem.SCALE, "window": 0}
    everything = {**logical, **sizes}
    sizes["blocks"] = sm90.blocks_for(everything, gpu.device_info().sms)
    return q, cache, sizes, SM90.config_for(everything)


def run_kernel_on_gpu(q: Any, cache: KVCache, sizes: dict[str, Any], config: dict[str, int]) -> tuple[Any, Any]:
    """Run the kernel on a GPU, and return (out, lse)."""
    columns = sm90.columns_of({"T": 1, "Hq": q.shape[2], "Hkv": cache.num_kv_heads})
    places = {"partial": (sizes["blocks"], columns, cache.head_dim), "stats": (sizes["blocks"], columns, 2)}
    arrays = {"pool": cache.pool, "table": cache.block_table, "lengths": cache.lengths, "q": q}
    arrays |= {name: gpu.zeros(shape, np.uint32) for name, shape in places.items()}
    outputs: tuple[Any, Any] = run_kernel(arrays, sizes, config, "gpu")
    return outputs


def run_oracle_on_gpu(q: Any, cache: KVCache, sizes: dict[str, Any], config: dict[str, int]) -> tuple[Any, Any]:
    """Compute (out, lse) by the oracle, on the device of the arrays."""
    options = {name: sizes[name] for name in ("softmax_scale", "blocks")}
    return exact.attention(q, cache, **options, config=config)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_equal_at_the_bench_s_batches(batch: Batch) -> None:
    problem = bench_problem(batch)
    assert difference(run_oracle_on_gpu(*problem), run_kernel_on_gpu(*problem)) == ""


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("length", [4096, 131072])
@every_fault
def test_a_fault_of_the_kernel_shows(fault: Callable[[KVCache], KVCache], length: int) -> None:
    """The fault changes the bits of out and of lse, whatever the bound says."""
    q, cache, *options = bench_problem(Batch(32, 8, (length,)))
    right, wrong = run_oracle_on_gpu(q, cache, *options), run_kernel_on_gpu(q, fault(cache), *options)
    assert difference((right[0], right[1]), run_kernel_on_gpu(q, cache, *options)) == ""
    assert all(bool((x != y).any()) for x, y in zip(wrong, right, strict=True))
