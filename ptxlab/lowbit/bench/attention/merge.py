"""Split-KV: parts put together by a second kernel, `attention_merge`, or by the last block that has one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.lowbit.bench.attention.problem import AttentionLaunches, launches, random_problem
from ptxlab.lowbit.bench.shapes import HEAD_DIM, Batch, even
from ptxlab.lowbit.kernels.attention import sm80
from ptxlab.lowbit.kernels.attention.merge import MERGE
from ptxlab.lowbit.kernels.attention.steps import STEPS, AttentionStep
from ptxlab.runtime.launching import Call, prepare_launches
from ptxlab.runtime.timing import chain_calls, measure

MEASURE = "merge"
BATCHES = (even((32, 8), 1, 4096), even((32, 8), 64, 1024))  # parts of all, and of few


def rows(ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure one launch and two launches on the same batches."""
    for batch in BATCHES:
        progress(f"{batch}: {MERGE.name}")
        yield measure_merge(batch, ceilings)


def measure_merge(batch: Batch, ceilings: Ceilings) -> Row:
    """Measure two launches, the second programmatic; `more` has the time of one launch that does the same."""
    fused = next(step for step in STEPS if step.spec is sm80.FUSED)
    problem = random_problem(batch)
    fused_launches = launches(fused, problem)
    fused_time = measure(fused_launches.calls)
    fused_launches.check(problem)
    part_launches = launches(AttentionStep(sm80.MMA, fused.blocks), problem)
    assert part_launches.logged is not None
    merge_time = measure(chain_calls(part_launches.calls, _merge_calls(part_launches, out=part_launches.outputs)))
    merges = _merge_calls(part_launches, out=part_launches.logged.outputs, lse=part_launches.logged.lse)
    logged_launches = replace(part_launches.logged, calls=chain_calls(part_launches.logged.calls, merges))
    checked, worst_error = replace(part_launches, logged=logged_launches).check(problem)
    nbytes = batch.kv_bytes()
    return row_of(
        MERGE,
        MEASURE,
        batch.sizes,
        merge_time,
        floor=(nbytes / ceilings.read_tbps / 1e6, "read"),
        checked=checked,
        nbytes=nbytes,
        kernel=f"{part_launches.spec.name}, {MERGE.name}",
        more={"fused_us": fused_time.us, "error": worst_error},
    )


def _merge_calls(parts: AttentionLaunches, **results_of_copies: Any) -> list[Call]:
    """Prepare the second launch for each of the first ones.

    `results_of_copies` are the results, f16 `out` and f32 `lse` of all copies.
    """
    sizes = {name: parts.sizes[name] for name in ("B", "T", "Hq", "Hkv", "blocks")}
    sizes |= {"D": HEAD_DIM, "tile": parts.variant["COLUMNS"], "columns": parts.scratch["stats"].shape[2]}
    MERGE.check_sizes(sizes)
    copy_outputs = ({name: array[i] for name, array in results_of_copies.items()} for i in range(len(parts.calls)))
    arrays = ({**parts.scratch, **outputs} for outputs in copy_outputs)
    return prepare_launches(MERGE, sizes, MERGE.config_for(sizes), arrays, programmatic=True)[1]
