"""The suite `attention`, measured without a GPU: launches are emulated."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers, stored
from ptxlab import bench, gpu, toolchain
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Record
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.lowbit.bench import attention, shapes
from ptxlab.lowbit.bench.attention import append, merge
from ptxlab.lowbit.bench.attention import problem as attention_problem
from ptxlab.lowbit.bench.peers import NO_PEERS
from ptxlab.lowbit.bench.shapes import Batch
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.steps import STEPS, choose
from ptxlab.lowbit.layout import gather
from ptxlab.registry import specs
from ptxlab.runtime.timing import Measured
from tests.support.bench_rows import slow_down

CEILINGS = Ceilings(4.6, 4.2)
SMALL = Batch(4, 2, (70, 70))
RAGGED = Batch(4, 2, (130, 1, 64))
CHOSEN = STEPS[-1]
FLASH = {"sdpa_flash_f16": 40.0}


def quiet(_: str) -> None:
    """Print no progress."""


@pytest.fixture
def small(emulated_gpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    emulated_gpu.setattr(attention_problem, "_RANDOM", 1 << 16)
    attention_problem.random_pages.cache_clear()
    yield emulated_gpu
    attention_problem.random_pages.cache_clear()


@pytest.mark.full
def test_a_point_and_the_same_behind_an_appended_token(small: pytest.MonkeyPatch) -> None:
    peers = replace(NO_PEERS, attention=lambda batch: FLASH)
    after_append, alone = attention.batch_rows(CHOSEN, SMALL, CEILINGS, quiet, peers)
    assert (alone.measure, after_append.measure) == ("attention", "append and attention")
    assert alone.kernel == "attention_kv4_sm90" and alone.face == after_append.face == "attention_kv4"
    assert alone.sizes == {"Hq": 4, "Hkv": 2, "B": 2, "L": 70}
    assert alone.bytes == 2 * 70 * 2 * 2 * 68 and alone.floor_us == alone.bytes / 4.6e6 and alone.limit == "read"
    assert alone.fraction == alone.floor_us / 10
    assert alone.peers == FLASH and after_append.peers == {} and after_append.more["plain_us"] == 10
    assert alone.checked.startswith("all 1024 results of 2 launches within the spec's bound of float64, at most ")
    assert "; launched again for lse: the same results, lse at most " in alone.checked
    assert 0 < alone.more["error"] < 1e-2
    assert alone.more["programmatic_us"] == 10 and "programmatic_us" not in after_append.more
    assert alone.key != after_append.key


@pytest.mark.full
def test_without_pytorch_no_others_stand_beside(small: pytest.MonkeyPatch) -> None:
    small.setattr(peers, "importable", lambda: False)
    (row,) = attention.batch_rows(CHOSEN, SMALL, CEILINGS, quiet, appending=False)
    assert row.peers == {}


@pytest.mark.full
def test_programmatic_launches_are_timed_and_checked(small: pytest.MonkeyPatch) -> None:
    drawn_problem, seen = attention_problem.random_problem(SMALL), []

    def launches(step: Any, of: Any, *, programmatic: bool) -> attention_problem.AttentionLaunches:
        seen.append(programmatic)
        return attention_problem.launches(step, of, programmatic=programmatic)

    small.setattr(attention, "launches", launches)
    assert attention.programmatic(CHOSEN, drawn_problem) == {"programmatic_us": 10.0}
    assert attention.programmatic(STEPS[5], drawn_problem) == {} and seen == [True]
    small.setattr(attention, "measure", lambda calls: Measured(10, 10, 10, 1755))  # without making them
    with pytest.raises(BenchmarkError, match="the timed launches gave wrong results"):
        attention.programmatic(CHOSEN, drawn_problem)


def test_only_kernels_that_wait_are_launched_programmatically(small: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    small.setattr(gpu, "prepare", lambda kernel, args, geometry: seen.append(geometry.programmatic))
    drawn_problem = attention_problem.random_problem(SMALL)
    for step in (STEPS[5], CHOSEN):
        for programmatic in (False, True):
            attention_problem.launches(step, drawn_problem, programmatic=programmatic)
    assert seen == [False] * 2 * 2 + [False] * 4 + [True] * 4, "with logarithms as they are timed without"


@pytest.mark.full
@pytest.mark.parametrize("batch", [RAGGED, RAGGED._replace(D=64)], ids=str)
def test_one_bit_that_the_bound_would_let_pass_is_refused(small: pytest.MonkeyPatch, batch: Batch) -> None:
    drawn_problem = attention_problem.random_problem(batch)
    ready = attention_problem.launches(CHOSEN, drawn_problem)
    for call in ready.calls:
        call()
    checked, _ = ready.check(drawn_problem)
    assert "; equal to the oracle in the kernel's order of operations, bit for bit;" in checked
    ready.outputs.view(np.uint16)[1, 2, 3, 5] ^= 1
    with pytest.raises(BenchmarkError, match="gave 1 results that differ from the oracle's of heads 4/2"):
        ready.check(drawn_problem)
    assert ready.sizes["D"] == batch.D and batch.kv_bytes() == 195 * 2 * 2 * (batch.D // 2 + 4)


@pytest.mark.parametrize("batch", [SMALL, RAGGED], ids=str)
def test_copies_are_equal_and_lie_elsewhere(small: pytest.MonkeyPatch, batch: Batch) -> None:
    drawn_problem = attention_problem.random_problem(batch)
    first, second = drawn_problem.caches
    first.check()
    second.check()
    for b, pages in enumerate(batch.pages()):
        ours, theirs = (cache.block_table[b, :pages] for cache in drawn_problem.caches)
        assert not set(ours.tolist()) & set(theirs.tolist())
        assert (first.pool[ours] == first.pool[theirs]).all()
        assert (first.block_table[b, pages:] == 0x7FFFFFF0).all()
    used = np.concatenate([first.block_table[b, :pages] for b, pages in enumerate(batch.pages())])
    assert sorted(used.tolist()) == list(range(drawn_problem.pages))


def test_no_page_is_in_a_cache_twice_and_last_tokens_stand_out(small: pytest.MonkeyPatch) -> None:
    """The rule holds though pages are drawn once, and repeated.

    Otherwise a neighbour's page would not show in place of its twin.
    """
    small.setattr(attention_problem, "_RANDOM", 5 * 2 * 2 * 4352)
    attention_problem.random_pages.cache_clear()
    drawn_problem = attention_problem.random_problem(Batch(4, 2, (2000, 700)))
    keys = drawn_problem.caches[0].pool[: drawn_problem.pages, 0].reshape(drawn_problem.pages, -1)
    assert drawn_problem.pages > 5 and len(np.unique(keys, axis=0)) == drawn_problem.pages
    for b, length in enumerate(drawn_problem.batch.lengths):
        q, cache = drawn_problem.sequence(b)
        (k,), _ = gather(cache)
        x = q[0].reshape(2, 2, 128).astype(np.float64)
        scores = (x @ k.dequantize().transpose(1, 2, 0) * attention_problem.SCALE).reshape(4, length)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        assert (weights[:, -1] / weights.sum(axis=-1) > 4 / length).all()


@pytest.mark.default_cases("nothing")
@pytest.mark.parametrize("how", ["one sequence", "another table", "nothing"])
def test_wrong_results_are_found(small: pytest.MonkeyPatch, how: str) -> None:
    drawn_problem = attention_problem.random_problem(SMALL)
    ready = attention_problem.launches(CHOSEN, drawn_problem)
    if how != "nothing":
        for call in ready.calls:
            call()
        ready.check(drawn_problem)
    if how == "one sequence":
        ready.outputs[1, 1, 3, 5] += np.float16(0.25)
    if how == "another table":
        drawn_problem.caches[0].block_table[:] = drawn_problem.caches[0].block_table[:, ::-1]
    with pytest.raises(BenchmarkError, match=r"attention_kv4_sm90 with .*: the timed launches gave wrong results"):
        ready.check(drawn_problem)


@pytest.mark.full
@pytest.mark.parametrize("of", ["lse", "out"])
def test_wrong_logarithms_are_found(small: pytest.MonkeyPatch, of: str) -> None:
    """Timed launches write none, so they are launched again with them; results must be as before."""
    problem = attention_problem.random_problem(SMALL)
    ready = attention_problem.launches(CHOSEN, problem)
    for call in ready.calls:
        call()
    assert ready.logged is not None
    checked, _ = ready.check(problem)
    assert checked.endswith(" off") and "; launched again for lse: the same results, lse at most " in checked
    array = {"lse": ready.logged.lse, "out": ready.logged.outputs}[of]
    message = {
        "lse": "wrong results for sequence 1: lse: .*",
        "out": "results other than those of launches for lse of",
    }[of]

    def spoil_element() -> None:
        array[1, 1, 3] *= array.dtype.type(1.001)

    calls = [*ready.logged.calls, spoil_element]
    with pytest.raises(
        BenchmarkError, match=rf"attention_kv4_sm90 with .*: the timed launches gave {message}.* heads 4/2"
    ):
        replace(ready, logged=replace(ready.logged, calls=calls)).check(problem)


@pytest.mark.full
def test_a_step_without_logarithms_is_checked_without(small: pytest.MonkeyPatch) -> None:
    drawn_problem = attention_problem.random_problem(SMALL)
    ready = attention_problem.launches(STEPS[5], drawn_problem)
    for call in ready.calls:
        call()
    assert ready.logged is None and "lse" not in ready.check(drawn_problem)[0]


def test_an_append_that_writes_another_byte_is_found(small: pytest.MonkeyPatch) -> None:
    drawn_problem = attention_problem.random_problem(SMALL)
    appending = append.Appending(drawn_problem)
    with pytest.raises(BenchmarkError, match="append_kv4: wrong bytes"):
        appending.check()
    for call in appending.calls(True):
        call()
    appending.check()
    slot = appending._at(1)[1]
    drawn_problem.caches[1].pool[slot // 64, 1, 1, slot % 64 * 64 + 3] ^= 16
    with pytest.raises(BenchmarkError, match="append_kv4: wrong bytes for the new tokens of heads 4/2, 2 x 70"):
        appending.check()


@pytest.mark.full
def test_a_ragged_batch_and_an_even_one(small: pytest.MonkeyPatch) -> None:
    uneven, even = attention.ragged_rows(CHOSEN, RAGGED, CEILINGS, quiet)
    assert uneven.bytes == even.bytes == 195 * 2 * 2 * 68 and uneven.more["tokens"] == even.more["tokens"] == 195
    assert (uneven.measure, even.measure) == ("ragged", "even") and (uneven.sizes["L"], even.sizes["L"]) == (130, 65)


def test_batches_cover_the_stored_peers() -> None:
    batch_places = {batch.place for heads in shapes.HEADS for batch in shapes.batches(heads)}
    peers_by_place = stored.stored_attention()
    assert set(peers_by_place) < batch_places and len(batch_places) == 36
    assert all(len(peers) == 12 for peers in peers_by_place.values()), "eleven, and what ours took in that run"
    ragged = shapes.ragged_batch((32, 8))
    assert len(ragged.lengths) == 64 and min(ragged.lengths) < 4 and 4096 < max(ragged.lengths) <= 8192
    even = shapes.even_batch_like(ragged)
    assert even.tokens == ragged.tokens and max(even.lengths) - min(even.lengths) <= 1
    assert max(batch.kv_bytes() for heads in shapes.HEADS for batch in shapes.batches(heads)) < 4.6e9
    assert shapes.even((32, 32), 64, 1024).kv_bytes() == 285_212_672, "as the stored peers count"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.spec.name)
def test_every_size_obeys_the_rules(emulated_gpu: pytest.MonkeyPatch, step: Any) -> None:
    batches = [attention.ABLATION, *(attention._batches() if step is CHOSEN else ())]
    for batch in batches:
        sizes = attention_problem.sizes_at(step, batch, attention.scheme_of(step), 2 * sum(batch.pages()))
        config = step.config(sizes, "float16")
        assert step.spec.launch({**sizes, **config}).shared_bytes <= 227 << 10


def test_every_variant_is_compiled_once(emulated_gpu: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, ...]] = []

    def compile_cuda(source: Any, arch: str, *, output: str, defines: dict[str, int]) -> None:
        compiled.append((source.label, *map(str, defines.items())))

    emulated_gpu.setattr(toolchain, "compile_cuda", compile_cuda)
    attention.compile_all([(CHOSEN, batch) for batch in attention._batches()], appending=True)
    names = Counter(label for label, *_ in compiled)
    assert len(compiled) == len(set(compiled)) and set(names) == {"attention_kv4_sm90.cu", "append_kv4.cu"}
    alone = len(compiled) - names["append_kv4.cu"]
    compiled.clear()
    attention.compile_all([(CHOSEN, batch) for batch in attention._batches()], appending=False)
    assert len(compiled) == alone


@pytest.mark.full
def test_the_row_of_the_merge(small: pytest.MonkeyPatch) -> None:
    row = merge.measure_merge(Batch(2, 1, (1100,)), CEILINGS)
    assert row.kernel == "attention_kv4_mma_sm80, attention_merge" and row.more["fused_us"] == 10


@pytest.mark.full
def test_without_its_second_kernel_parts_are_wrong(small: pytest.MonkeyPatch) -> None:
    small.setattr(merge, "_merge_calls", lambda parts, **written: [lambda: None for _ in parts.calls])
    with pytest.raises(BenchmarkError, match=r"attention_kv4_mma_sm80 with .*: the timed launches gave wrong results"):
        merge.measure_merge(Batch(2, 1, (1100,)), CEILINGS)


@pytest.mark.full
def test_the_whole_suite_on_small_batches(small: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The suite runs from its entry to a record that is compared with itself: no two rows have one key."""
    small.setattr(attention, "HEADS", ((2, 1),))
    small.setattr(attention, "batches", lambda heads: [Batch(*heads, (3,)), Batch(*heads, (66, 66))])
    small.setattr(attention, "ragged_batch", lambda heads: Batch(*heads, (70, 2)))
    small.setattr(attention, "ABLATION", Batch(2, 2, (65,)))
    small.setattr(attention, "TABLE1", (Batch(2, 2, (66, 66)),))
    small.setattr(attention, "ROTATED", (Batch(2, 2, (66,)),))
    small.setattr(attention, "compile_all", lambda planned, appending: None)
    small.setattr(merge, "BATCHES", (Batch(2, 1, (70,)),))
    small.setattr(append, "HEADS", (1,))
    small.setattr(append, "POINTS", ((5, "decode"),))
    family = [name for name, spec in specs().items() if spec.family == "attention"]
    rows = attention.rows(family, CEILINGS, quiet)
    both = {"attention": 2, "append and attention": 2}
    counts = {"ragged": 1, "even": 1, "ladder": 8, "merge": 1, "append": 5, "table 1": 6, "rotation": 2}
    assert Counter(row.measure for row in rows) == both | counts
    record = Record("attention", {"slug": "h200"}, {}, {}, tuple(rows))
    assert bench.load(bench.save(record, tmp_path / "r.json")) == record
    assert len({row.key for row in rows}) == len(rows)
    slow_record = replace(record, rows=tuple(slow_down(row, 0.5) for row in rows))
    assert len(bench.compare(slow_record, record)) == len(rows) and bench.compare(record, record) == []


@pytest.mark.full
def test_table_1_alone(small: pytest.MonkeyPatch) -> None:
    """Measure QServe's three kernels, and ours with both caches, each against the floor of its own bytes."""
    small.setattr(attention, "TABLE1", (Batch(2, 2, (3, 3)), Batch(2, 2, (66, 66))))
    family = [name for name, spec in specs().items() if spec.family == "attention"]
    rows = attention.rows(family, CEILINGS, quiet, only=["table1"])
    kernels = ["attention_kv8", "attention_kv4_naive", "attention_kv4_prefetch", *3 * ["attention_kv4_sm90"]]
    assert [(row.kernel, row.sizes["L"]) for row in rows] == [(name, L) for L in (3, 66) for name in kernels]
    assert {row.measure for row in rows} == {"table 1"} and len({row.key for row in rows}) == len(rows)
    assert [row.bytes // (2 * 2 * 2 * 66) for row in rows[6:]] == [132, 68, 68, 132, 128, 68]
    assert [row.config for row in rows[3:6]] == [{"bits": 8}, {"bits": 8, "channel": 1}, {"bits": 4}]


@pytest.mark.full
def test_rotation_alone(small: pytest.MonkeyPatch) -> None:
    """Measure rotated caches beside the same pages unrotated, behind an appended token and alone."""
    small.setattr(attention, "ROTATED", (Batch(2, 1, (66,)),))
    family = [name for name, spec in specs().items() if spec.family == "attention"]
    rows = attention.rows(family, CEILINGS, quiet, only=["rotation"])
    assert [(row.kernel, row.measure, row.config) for row in rows] == [
        ("attention_kv4_sm90", "rotation", {"appended": appended}) for appended in (1, 0)
    ]
    assert all(row.variant["ROTATED"] == 1 and row.more["unrotated_us"] == 10 for row in rows)


def test_the_lengths_of_table_1(emulated_gpu: pytest.MonkeyPatch) -> None:
    """Check QServe's lengths with 64 sequences and 32 heads, which every kernel of the table takes in both caches."""
    assert attention.part(["table1"]) == shapes.TABLE1 and attention.part([]) == ()
    assert [batch.place for batch in shapes.TABLE1] == [(32, 32, 64, L) for L in (128, 256, 512, 1024, 1536)]
    assert shapes.TABLE1[3] == attention.ABLATION and shapes.TABLE1[0].kv_bytes("kv8") == 64 * 128 * 32 * 2 * 132
    for step in STEPS:
        if step.spec.name in attention.TABLE1_STEPS or step is CHOSEN:
            for batch, scheme in product(shapes.TABLE1, attention.TABLE1_CACHES):
                sizes = attention_problem.sizes_at(step, batch, scheme, 2 * sum(batch.pages()))
                assert step.spec.launch({**sizes, **step.config(sizes, "float16")}).shared_bytes <= 227 << 10
    with pytest.raises(ArgumentError, match=r"only: one of table1, rotation \(got table2\)"):
        attention.part(["table2"])
    assert (
        attention.SUITE.record_name(["table1"]) == "attention_table1"
        and attention.SUITE.record_name([]) == "attention"
        and attention.SUITE.record_name(["rotation"]) == "attention_rotation"
    )


def test_what_is_not_asked_for_is_not_measured(small: pytest.MonkeyPatch) -> None:
    small.setattr(attention, "ABLATION", Batch(2, 2, (65,)))
    small.setattr(attention, "TABLE1", ())
    small.setattr(attention, "ROTATED", ())
    small.setattr(attention, "compile_all", lambda planned, appending: None)
    (row,) = attention.rows(["attention_kv8"], CEILINGS, quiet)
    assert (row.kernel, row.measure, row.face) == ("attention_kv8", "ladder", "") and row.bytes == 65 * 2 * 2 * 132
    small.setattr(gpu, "why_not", lambda arch, exact=False: "too old")
    with pytest.raises(ArgumentError, match="a kernel of attention that this GPU runs"):
        attention.rows(["attention_kv8"], CEILINGS, quiet)


def test_options_choose_the_kernel(emulated_gpu: pytest.MonkeyPatch) -> None:
    assert choose(AttentionOptions(backend="gpu")) is CHOSEN
