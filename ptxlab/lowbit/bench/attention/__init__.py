"""Suite `attention`: what `attention_kv4` launches beside its floor and the peers given, its ladder, `append_kv4`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.suite import Keep, Suite, measure_section
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.bench.attention import append, merge
from ptxlab.lowbit.bench.attention.problem import (
    AttentionLaunches,
    Expected,
    Problem,
    launches,
    random_problem,
    scheme_of,
    sizes_at,
)
from ptxlab.lowbit.bench.peers import NO_PEERS, Peers
from ptxlab.lowbit.bench.shapes import HEADS, TABLE1, Batch, batches, even, even_batch_like, ragged_batch
from ptxlab.lowbit.kernels.attention.append import APPEND
from ptxlab.lowbit.kernels.attention.call import NAME as FACE
from ptxlab.lowbit.kernels.attention.merge import MERGE
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.steps import STEPS, AttentionStep, choose, why_not
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.runtime import launching
from ptxlab.runtime.timing import Measured, chain_calls, measure
from ptxlab.sources import sources_of_kernel

MEASURE, WITH_APPEND, LADDER = "attention", "append and attention", "ladder"
RAGGED, EVEN = "ragged", "even"
PROGRAMMATIC = "programmatic_us"  # in `more`: launched before the launch before has ended
TABLE1_MEASURE, TABLE1_PART = "table 1", "table1"  # QServe's Table 1: of the rows; the word of `--only`
TABLE1_STEPS = ("attention_kv8", "attention_kv4_naive", "attention_kv4_prefetch")
TABLE1_CACHES = ("kv8", "kv8_channel", "kv4")  # of the kernel that `attention_kv4` chooses
ROTATION_MEASURE = ROTATION_PART = "rotation"  # of rows; the word of `--only`
ROTATED = tuple(even(heads, *of) for heads in HEADS[:2] for of in ((1, 1024), (1, 4096), (64, 4096)))
UNROTATED = "unrotated_us"  # in `more`: the same with keys as they come
_PAIRS = 5  # readings of rotated and unrotated launches, in turns, whose medians count
ABLATION = even((32, 32), 64, 1024)  # where QServe took its steps apart


def rows(
    names: Sequence[str],
    ceilings: Ceilings,
    progress: Callable[[str], None],
    peers: Peers = NO_PEERS,
    only: Sequence[str] = (),
    keep: Keep = measure_section,
) -> list[Row]:
    """Measure kernels of the family by name, as far as this GPU runs them.

    Batches are measured if the kernel that `attention_kv4` chooses is among them, with an appended token where
    `append_kv4` is too. With `only` the part that it names alone (`part`). A batch, a step of the ladder, and what else
    is measured together is a section.
    """
    steps = [step for step in STEPS if step.spec.name in names and why_not(step) is None]
    chosen_step = choose(AttentionOptions(backend="gpu")) if steps else None
    measures_append = APPEND.name in names and gpu.why_not(APPEND.arch, exact=APPEND.exact_arch) is None
    measures_merge = MERGE.name in names and gpu.why_not(MERGE.arch) is None
    if not steps and not measures_append and not measures_merge:
        raise ArgumentError("suite", "a kernel of attention that this GPU runs", ", ".join(names))
    progress("compiling")
    launched_step = chosen_step if chosen_step in steps else None
    tabled = [step for step in steps if step.spec.name in TABLE1_STEPS or step is launched_step]
    table_points = [(step, batch) for step in tabled for batch in TABLE1]
    if only:
        parts = {
            TABLE1_PART: (TABLE1_MEASURE, partial(table1_rows, steps, launched_step, ceilings, progress)),
            ROTATION_PART: (ROTATION_MEASURE, partial(rotation_rows, launched_step, ceilings, progress)),
        }
        part(only)
        compile_all(table_points if TABLE1_PART in only else (), appending=False)
        return [row for word, part_job in parts.items() if word in only for row in keep(*part_job)]
    planned_points = [
        *((step, ABLATION) for step in steps),
        *((launched_step, batch) for batch in _batches() if launched_step),
    ]
    compile_all([*planned_points, *table_points], measures_append)
    measured_rows: list[Row] = []
    if launched_step:
        for heads in HEADS:
            for batch in batches(heads):
                one = partial(batch_rows, launched_step, batch, ceilings, progress, peers, appending=measures_append)
                measured_rows += keep(str(batch), one)
            ragged = ragged_batch(heads)
            measured_rows += keep(
                f"{ragged}, {RAGGED}", partial(ragged_rows, launched_step, ragged, ceilings, progress)
            )
    for step in steps:
        measured_rows += keep(step.spec.name, partial(ladder_rows, step, ceilings, progress))
    measured_rows += keep(TABLE1_MEASURE, partial(table1_rows, steps, launched_step, ceilings, progress))
    measured_rows += keep(ROTATION_MEASURE, partial(rotation_rows, launched_step, ceilings, progress))
    if measures_merge:
        measured_rows += keep(merge.MEASURE, partial(merge.rows, ceilings, progress))
    if measures_append:
        measured_rows += keep(append.MEASURE, partial(append.rows, ceilings, progress))
    return measured_rows


def part(words: Sequence[str]) -> tuple[Batch, ...]:
    """Return the batches of the parts that words name, Table 1 and rotation. Raise ArgumentError for others."""
    batches_by_part = {TABLE1_PART: TABLE1, ROTATION_PART: ROTATED}
    for word in words:
        if word not in batches_by_part:
            raise ArgumentError("only", f"one of {', '.join(batches_by_part)}", word)
    return tuple(batch for word in dict.fromkeys(words) for batch in batches_by_part[word])


def table1_rows(
    steps: Sequence[AttentionStep],
    launched: AttentionStep | None,
    ceilings: Ceilings,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure QServe's Table 1: its three kernels, and what `attention_kv4` launches with 8 and with 4 bits.

    QServe's 8-bit cache has static scales (TensorRT-LLM's): per tensor there, per channel in `kv8_channel`; those of
    `kv8` are per token and head.
    """
    for batch in TABLE1:
        for step in steps:
            if step.spec.name in TABLE1_STEPS:
                progress(f"{batch}: {step.spec.name}")
                yield time_step(step, random_problem(batch, scheme_of(step)), TABLE1_MEASURE, ceilings)
        for scheme in TABLE1_CACHES if launched is not None else ():
            assert launched is not None
            progress(f"{batch}: {FACE}, {scheme}")
            kv_scheme = KV_SCHEMES[scheme]  # tells the rows of one kernel apart
            row_config = {"bits": kv_scheme.bits, **({"channel": 1} if kv_scheme.by_channel else {})}
            yield time_step(
                launched, random_problem(batch, scheme), TABLE1_MEASURE, ceilings, face=FACE, config=row_config
            )


def rotation_rows(step: AttentionStep | None, ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure rotation of keys and queries: in a decoder's step of append and attention, and in attention alone.

    Launches on a rotated cache and on the same pages unrotated take turns; a row has the median of each.
    """
    for batch in ROTATED if step is not None else ():
        assert step is not None
        progress(f"{batch}: {FACE}, rotated and not")
        plain_problem = random_problem(batch)
        rotated_problem = replace(
            plain_problem, caches=[replace(cache, rotated=True) for cache in plain_problem.caches]
        )
        for with_append in (True, False):
            readings: dict[bool, list[Measured]] = {False: [], True: []}
            for is_rotated in (False, True) * _PAIRS:
                timed_problem = rotated_problem if is_rotated else plain_problem
                measured, ready = _time_step(step, timed_problem, with_append)
                readings[is_rotated].append(measured)
                if not is_rotated and len(readings[False]) == _PAIRS:
                    # Before other keys are appended; `build_row` checks the last rotated ones.
                    ready.check(plain_problem)
            unrotated, measured = (sorted(timings, key=lambda m: m.us)[_PAIRS // 2] for timings in readings.values())
            config, extra_figures = {"appended": int(with_append)}, {UNROTATED: unrotated.us}
            yield build_row(
                ready,
                rotated_problem,
                ROTATION_MEASURE,
                measured,
                ceilings,
                face=FACE,
                config=config,
                more=extra_figures,
            )


def _time_step(step: AttentionStep, problem: Problem, appended: bool) -> tuple[Measured, AttentionLaunches]:
    if appended:
        measured, ready, _ = measure_behind_append(step, problem)
        return measured, ready
    ready = launches(step, problem)
    return measure(ready.calls), ready


def batch_rows(
    step: AttentionStep,
    batch: Batch,
    ceilings: Ceilings,
    progress: Callable[[str], None],
    peers: Peers = NO_PEERS,
    *,
    appending: bool = True,
) -> Iterator[Row]:
    """Measure one batch of equal lengths: attention beside its peers, and attention right behind `append_kv4`."""
    progress(f"{batch}: peers")
    peer_times = peers.attention(batch)
    progress(f"{batch}: {FACE}")
    problem, expected = random_problem(batch), None
    if appending:  # the same tokens every time, so that what is expected stays
        measured, ready, plain_timing = measure_behind_append(step, problem)
        expected = ready.compute_expected(problem)
        yield build_row(
            ready, problem, WITH_APPEND, measured, ceilings, expected, more={"plain_us": plain_timing.us}, face=FACE
        )
    ready = launches(step, problem)
    expected = expected or ready.compute_expected(problem)
    measured, extra_figures = measure(ready.calls), programmatic(step, problem, expected)
    yield build_row(
        ready, problem, MEASURE, measured, ceilings, expected, peers=peer_times, more=extra_figures, face=FACE
    )


def programmatic(step: AttentionStep, problem: Problem, expected: Expected | None = None) -> dict[str, float]:
    """Measure launches that begin before the ones before them have ended; empty for kernels that do not wait."""
    if not step.spec.after_wait:
        return {}
    ready = launches(step, problem, programmatic=True)
    time_us = measure(ready.calls).us
    ready.check(problem, expected)
    return {PROGRAMMATIC: time_us}


def ragged_rows(
    step: AttentionStep, batch: Batch, ceilings: Ceilings, progress: Callable[[str], None]
) -> Iterator[Row]:
    """Measure a ragged batch, and one of equal lengths with as many bytes."""
    for measure_name, same_size in ((RAGGED, batch), (EVEN, even_batch_like(batch))):
        progress(f"{same_size}: {FACE}, {measure_name}")
        yield time_step(step, random_problem(same_size), measure_name, ceilings, face=FACE)


def ladder_rows(step: AttentionStep, ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure a step of the ladder on the batch of QServe's own ablation."""
    progress(f"{ABLATION}: {step.spec.name}")
    yield time_step(step, random_problem(ABLATION, scheme_of(step)), LADDER, ceilings)


def time_step(step: AttentionStep, problem: Problem, measured_as: str, ceilings: Ceilings, **further: Any) -> Row:
    """Time one step on one problem, and check the results of the timed launches.

    `further` are fields of `Row`.
    """
    ready = launches(step, problem)
    measured = measure(ready.calls)
    return build_row(ready, problem, measured_as, measured, ceilings, **further)


def measure_behind_append(step: AttentionStep, problem: Problem) -> tuple[Measured, AttentionLaunches, Measured]:
    """Measure a decoder's step: `append_kv4` rotates and writes every sequence's new token, then attention runs.

    Returns:
        (launched programmatically where they wait by themselves, the launches of attention then, launched plainly).
    """

    def together(programmatic: bool) -> tuple[Measured, AttentionLaunches]:
        attention = launches(step, problem, programmatic=programmatic)
        return measure(chain_calls(appending.calls(programmatic), attention.calls)), attention

    appending = append.Appending(problem)
    plain_timing, _ = together(False)
    measured, ready = together(True)
    appending.check()
    return measured, ready, plain_timing


def build_row(
    ready: AttentionLaunches,
    problem: Problem,
    measured_as: str,
    measured: Measured,
    ceilings: Ceilings,
    expected: Expected | None = None,
    *,
    more: dict[str, float] | None = None,
    **further: Any,
) -> Row:
    """Build the row of timed launches; the floor is reading keys and values once."""
    checked, worst_error = ready.check(problem, expected)
    nbytes = problem.batch.kv_bytes(problem.scheme)
    return row_of(
        ready.spec,
        measured_as,
        problem.batch.sizes,
        measured,
        floor=(nbytes / ceilings.read_tbps / 1e6, "read"),
        checked=checked,
        nbytes=nbytes,
        operations=4 * problem.batch.tokens * problem.batch.Hq * problem.q.shape[-1],
        variant=ready.variant,
        more={"tokens": problem.batch.tokens, "error": worst_error, **ready.resources, **(more or {})},
        **further,
    )


def compile_all(planned: Sequence[tuple[AttentionStep, Batch]], appending: bool) -> None:
    """Compile every variant that will run."""
    variants = [
        (step.spec, step.config(sizes_at(step, batch, scheme, sum(batch.pages())), "float16"))
        for step, batch in planned
        for scheme in (TABLE1_CACHES if batch in TABLE1 and step.blocks else (scheme_of(step),))
    ]
    variants += [(APPEND, config) for config in append.variants() if appending]
    launching.compile_all((sources_of_kernel(spec.name)[0], config) for spec, config in variants)


def _batches() -> list[Batch]:
    return [
        batch
        for heads in HEADS
        for batch in (*batches(heads), ragged_batch(heads), even_batch_like(ragged_batch(heads)))
    ]


def _record_of(only: Sequence[str]) -> str:
    return f"attention_{only[0]}" if len({*only}) == 1 else ""


SUITE = Suite("attention", rows, takes=frozenset({"peers"}), part=part, record_of=_record_of, keeps=True)
