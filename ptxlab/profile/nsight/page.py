"""`Profile`: one launch on a page. Figures out of a report's metrics, why warps waited, and at which lines."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ptxlab.errors import FileError
from ptxlab.io.files import read_record, write_text
from ptxlab.profile.nsight.report import ISSUING, ProfiledLaunch

SCHEMA = 1
MAX_CARRIERS = 10
WEIGHTS = "weights"  # beside ncu's metrics: 4-bit (or 8-bit) elements that the launch works on, where they are known


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Attributes:
        name: key in a profile.
        label: for people.
        unit: `µs`, `%` (of what the unit could do) ...
        metrics: of ncu (or `WEIGHTS`) that it is made of.
        compute: their values -> the figure; NaN where they make none, which a profile leaves out.
    """

    name: str
    label: str
    unit: str
    metrics: tuple[str, ...]
    compute: Callable[..., float] = lambda value: value


_PEAK = "avg.pct_of_peak_sustained_active"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
FIGURES = (
    Figure("time_us", "time", "µs", ("gpu__time_duration.sum",), lambda ns: ns / 1e3),
    Figure(
        "sm_mhz",
        "SM clock",
        "MHz",
        ("sm__cycles_elapsed.max", "gpu__time_duration.sum"),
        lambda cycles, ns: 1e3 * cycles / ns,
    ),
    Figure(
        "dram_mb", "DRAM traffic", "MB", ("dram__bytes_read.sum", "dram__bytes_write.sum"), lambda r, w: (r + w) / 1e6
    ),
    Figure("dram_pct", "DRAM", "%", ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",)),
    Figure("l2_pct", "L2", "%", ("lts__throughput.avg.pct_of_peak_sustained_elapsed",)),
    # ncu counts hits and sectors in two passes: of a launch with little traffic the quotient may be no share at all.
    Figure(
        "l2_hit_pct",
        "L2 hits",
        "% of sectors",
        ("lts__t_sector_hit_rate.pct",),
        lambda pct: pct if pct <= 100 else math.nan,
    ),
    Figure("tensor_pct", "tensor pipe", "%", (f"sm__pipe_tensor_cycles_active.{_PEAK}",)),
    Figure("issue_pct", "issue slots", "%", (f"smsp__issue_active.{_PEAK}",)),
    Figure("alu_pct", "ALU", "%", (f"sm__inst_executed_pipe_alu.{_PEAK}",)),
    Figure("fma_pct", "FMA", "%", (f"sm__inst_executed_pipe_fma.{_PEAK}",)),
    Figure("lsu_pct", "LSU", "%", (f"sm__inst_executed_pipe_lsu.{_PEAK}",)),
    Figure("warp_instructions", "warp instructions", "", ("smsp__inst_executed.sum",)),
    Figure(
        "per_weight",
        "thread instructions per weight",
        "",
        ("smsp__inst_executed.sum", WEIGHTS),
        lambda instructions, weights: 32 * instructions / weights,
    ),
    Figure("wavefronts", "shared memory wavefronts", "", (_WAVEFRONTS,)),
    Figure("conflicts", "bank conflicts", "", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",)),
    Figure("occupancy_pct", "occupancy", "% of warps", (f"sm__warps_active.{_PEAK}",)),
    Figure("occupancy_limit_pct", "occupancy, at most", "% of warps", ("sm__maximum_warps_per_active_cycle_pct",)),
    Figure("registers", "registers", "per thread", ("launch__registers_per_thread",)),
    Figure(
        "shared_kb",
        "shared memory",
        "KB per block",
        ("launch__shared_mem_per_block_dynamic", "launch__shared_mem_per_block_static"),
        lambda dynamic, static: (dynamic + static) / 1e3,
    ),
    Figure("blocks", "blocks", "", ("launch__grid_size",)),
    Figure("threads", "threads", "per block", ("launch__block_size",)),
)
METRICS = tuple(dict.fromkeys(m for figure in FIGURES for m in figure.metrics if m != WEIGHTS))
BUSY = tuple(figure.name for figure in FIGURES if figure.unit == "%")  # shares of what a unit could do


@dataclass(frozen=True)
class Carrier:
    """A source line, or an instruction without one, at which warps stalled, with its share of the sampled stalls.

    Attributes:
        where: `dequant.cuh:59`, or without a line table the instruction's offset.
        text: the source line; empty where there is none.
        sass: of its instructions the one that most stalls were sampled at.
        share: of all stalls that were sampled.
        reasons: the same by reason, the most frequent first.
    """

    where: str
    text: str
    sass: str
    share: float
    reasons: dict[str, float]


@dataclass(frozen=True)
class Profile:
    """A profile of one launch of a kernel, warmed up, with the caches empty.

    Attributes:
        kernel: its entry symbol.
        sizes: of the problem, where they are known.
        figures: by the names of `FIGURES`; one that would need unknown sizes, or that is no share, is left out.
        stalls: reason -> share of all stalls: what a sampled warp that did not issue waited for.
        issuing: share of the sampled warps that issued.
        samples: how many warps were sampled.
        carriers: the lines that stalls are at, most first.
        device: name of the GPU.
        origin: commit, date, versions.
    """

    kernel: str
    sizes: dict[str, Any]
    figures: dict[str, float]
    stalls: dict[str, float]
    issuing: float
    samples: int
    carriers: tuple[Carrier, ...]
    device: str
    origin: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={size}" for name, size in self.sizes.items())])


def profile_of(
    launch: ProfiledLaunch,
    *,
    sizes: Mapping[str, Any] | None = None,
    weights: int | None = None,
    origin: Mapping[str, str] | None = None,
) -> Profile:
    """Make the page of a launch.

    Args:
        launch: of a report that has `METRICS`.
        sizes: of the problem.
        weights: how many elements the figures per weight count.
        origin: commit, date, versions.

    Raises:
        UnavailableError: the report lacks a metric; it is named.
    """
    figures = {}
    for figure in FIGURES:
        if WEIGHTS not in figure.metrics or weights:
            values = (float(weights or 0) if name == WEIGHTS else launch.number(name) for name in figure.metrics)
            figures[figure.name] = figure.compute(*values)
    figures = {name: number for name, number in figures.items() if not math.isnan(number)}
    reasons = Counter[str]()
    for instruction in launch.instructions:
        reasons.update(instruction.samples)
    samples, issuing_samples = reasons.total(), reasons.pop(ISSUING, 0)
    return Profile(
        kernel=launch.kernel,
        sizes=dict(sizes or {}),
        figures=figures,
        stalls=_shares(reasons, reasons.total()),
        issuing=issuing_samples / max(1, samples),
        samples=samples,
        carriers=carriers(launch),
        device=launch.names.get("device__attribute_display_name", ""),
        origin=dict(origin or {}),
    )


def carriers(launch: ProfiledLaunch) -> tuple[Carrier, ...]:
    """Return the source lines at which most stalls were sampled.

    Where there is no line table these are instructions.
    """
    waits_by_place: dict[tuple[str, int], Counter[str]] = {}
    hottest_instructions: dict[tuple[str, int], str] = {}
    most_stalled = Counter[tuple[str, int]]()
    for instruction in launch.instructions:
        place = (instruction.file, instruction.line) if instruction.file else ("", instruction.offset)
        waits_by_place.setdefault(place, Counter()).update(
            {r: n for r, n in instruction.samples.items() if r != ISSUING}
        )
        if instruction.stalled >= most_stalled[place]:
            most_stalled[place], hottest_instructions[place] = instruction.stalled, instruction.sass
    stalls = sum(counts.total() for counts in waits_by_place.values())
    ranked_places = sorted(waits_by_place, key=lambda place: -waits_by_place[place].total())[:MAX_CARRIERS]
    return tuple(
        Carrier(
            where=f"{file}:{line}" if file else f"+{line:#x}",
            text=launch.text_of(file, line),
            sass=hottest_instructions[file, line],
            share=waits_by_place[file, line].total() / stalls,
            reasons=_shares(waits_by_place[file, line], stalls),
        )
        for file, line in ranked_places
        if waits_by_place[file, line]
    )


def save(profile: Profile, path: Path) -> None:
    """Write a profile as JSON, whole or not at all."""
    write_text(path, json.dumps(profile.to_json(), indent=1) + "\n")


def load(path: Path) -> Profile:
    """Read a profile from JSON; raises `FileError`, which says why in one line, for any other file."""
    record = read_record(path, "a profile", SCHEMA)
    try:
        return Profile(**{**record, "carriers": tuple(Carrier(**carrier) for carrier in record["carriers"])})
    except KeyError as error:
        raise FileError(f"{path}: not a profile: it has no {error}") from None
    except TypeError as error:
        raise FileError(f"{path}: not a profile: {error}") from None


def _shares(counts: Counter[str], total: int) -> dict[str, float]:
    return {reason: count / total for reason, count in counts.most_common() if count}
