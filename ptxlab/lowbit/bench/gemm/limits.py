"""What limits each step of the GEMM ladder, counted by ncu in a process that runs `launch_once`."""

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ptxlab import gpu
from ptxlab.bench.record import Row
from ptxlab.errors import UnavailableError
from ptxlab.lowbit.bench.gemm.problem import first_tokens, launches, problem, sizes_at, steps_of
from ptxlab.lowbit.bench.gemm.steps import MEASURE
from ptxlab.lowbit.bench.shapes import DISSECTED, DISSECTED_TOKENS
from ptxlab.profile import nsight

# Name in a row's `more` -> ncu's metric. Percentages are of what the unit could do while it was active.
METRICS = {
    "ncu_ns": "gpu__time_duration.sum",
    "ncu_cycles": "sm__cycles_elapsed.max",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "lsu_pct": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "warp_instructions": "smsp__inst_executed.sum",
    "active_warps": "smsp__warps_active.avg.per_cycle_active",
}
_LAUNCH = "import sys; from ptxlab.lowbit.bench.gemm import limits; limits.launch_once(sys.argv[1:])"
STALL = "stall_"  # more["stall_barrier"]: warps that wait for a barrier, per issued instruction
_STALLED = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_NO_REASON = re.compile(r"(not_)?selected|.*_not_issued")


def with_limits(rows: Sequence[Row]) -> list[Row]:
    """Add ncu's counters to the rows of the dissected matrix; where ncu cannot count, a warning says why."""
    places = [n for n, row in enumerate(rows) if _is_counted(row)]
    if not places:
        return list(rows)
    names = list(dict.fromkeys(rows[n].kernel for n in places))
    command = [sys.executable, "-c", _LAUNCH, *names]
    try:
        launch_metrics = nsight.launches(
            command, [rows[n].kernel for n in places], list(METRICS.values()), ["WarpStateStats"]
        )
        counters = {n: figures(numbers) for n, numbers in zip(places, launch_metrics, strict=True)}
    except UnavailableError as reason:
        warnings.warn(f"no counters in the record: {reason}", stacklevel=2)
        return list(rows)
    return [replace(row, more={**row.more, **counters.get(n, {})}) for n, row in enumerate(rows)]


def figures(numbers: dict[str, float]) -> dict[str, float]:
    """Select ncu's numbers for a row's `more`; raise UnavailableError if they tell no reason for stalls."""
    reasons = {match[1]: share for name, share in numbers.items() if (match := _STALLED.fullmatch(name))}
    stalls = {STALL + name: share for name, share in reasons.items() if not _NO_REASON.fullmatch(name)}
    if not stalls:
        raise UnavailableError("ncu: its section WarpStateStats has no smsp__average_warps_issue_stalled_*")
    return {name: numbers[metric] for name, metric in METRICS.items()} | stalls


def launch_once(names: Iterable[str]) -> None:
    """Launch every step once at each number of tokens of the dissected matrix, in this order."""
    for step in steps_of(list(names)):
        logical = problem(step.spec, DISSECTED, max(DISSECTED_TOKENS))
        for M in DISSECTED_TOKENS:
            ready = launches(step, sizes_at(step.spec, DISSECTED, M), first_tokens(logical, M))
            ready.calls[0]()
            gpu.to_host(ready.outputs[0])  # waits


def _is_counted(row: Row) -> bool:
    if row.measure != MEASURE:
        return False
    sizes = row.sizes["N"], row.sizes["K"], row.sizes["M"]
    return sizes in [(DISSECTED.N, DISSECTED.K, M) for M in DISSECTED_TOKENS]
