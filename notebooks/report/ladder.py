"""The GEMM ladder as recorded: what each step gained, how near it is to the floor and to others, what limits it."""

import math
from collections.abc import Iterable, Sequence

from ptxlab import bench, kernels
from ptxlab.bench import counts
from ptxlab.bench.gemm.limits import STALL
from ptxlab.bench.gemm.steps import MEASURE
from ptxlab.bench.record import Record, Row
from ptxlab.bench.shapes import DISSECTED, DISSECTED_TOKENS, LAYERS, TOKENS, Layer
from ptxlab.bench.stored import SAME, Place, Stored, stored_peers, stored_times
from report import RESULTS

PREFIX = "gemm_w4a8_"
QSERVE = "qserve_w4a8_g128"
NOT_RECORDED = "Not measured yet."
_SHOWN_TOKENS = (16, 64, 256)
_REASONS = 3
_COUNTED_LOOP = "Instructions per weight: those of every iteration of the main loop, M = {} / {}.".format(
    *DISSECTED_TOKENS
)


def recorded(gpu: str = "h200") -> Record | None:
    """The record of the suite on that GPU, if there is one."""
    path = RESULTS / gpu / "gemm.json"
    return bench.load(path) if path.is_file() else None


def rows_of(record: Record | None) -> tuple[Row, ...]:
    """The ladder's rows of a record of the suite; none of no record."""
    return tuple(row for row in record.rows if row.measure == MEASURE) if record else ()


def steps(rows: Iterable[Row]) -> list[str]:
    """The kernels that were measured, in the order of the ladder."""
    measured = {row.kernel for row in rows}
    return [spec.name for spec in kernels.gemm.STEPS if spec.name in measured]


def short(name: str) -> str:
    """A kernel's name without what all have in common."""
    return name.removeprefix(PREFIX)


def place_of(row: Row) -> Place:
    """Matrix and tokens."""
    return row.sizes["N"], row.sizes["K"], row.sizes["M"]


def layer_of(row: Row) -> Layer:
    """The matrix by name."""
    return next(layer for layer in LAYERS if place_of(row)[:2] == (layer.N, layer.K))


def mean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def fraction_cell(value: float) -> str:
    """A figure as tables have it; nothing of NaN."""
    return "" if math.isnan(value) else f"{value:.2f}"


def times_cell(value: float) -> str:
    """How many times as fast, likewise."""
    return "" if math.isnan(value) else f"{value:.2f}x"


def speed_over(rows: Sequence[Row], kernel: str, base: str, M: int) -> float:
    """How much faster a step is than another at M tokens, over all matrices where both were measured."""
    times = {place_of(row): row.time_us for row in rows if row.kernel == base and row.sizes["M"] == M}
    return mean(times[p] / row.time_us for row in rows if row.kernel == kernel and (p := place_of(row)) in times)


def step_fraction(rows: Sequence[Row], kernel: str, M: int) -> float:
    """Of the floor, over all matrices."""
    return mean(row.fraction for row in rows if row.kernel == kernel and row.sizes["M"] == M)


def peers_of(row: Row, stored: Stored) -> dict[str, float]:
    """Microseconds of everyone else at a point: measured beside it, and stored."""
    return {**row.peers, **stored_peers(place_of(row), row.peers, stored)[0]}


def speed_over_peer(rows: Sequence[Row], kernel: str, peer: str, stored: Stored) -> float:
    """How much faster a step is than a peer, over all matrices and tokens where the peer's time is known."""
    ratios = []
    for row in rows:
        times = peers_of(row, stored)
        if row.kernel == kernel and peer in times:
            ratios.append(times[peer] / row.time_us)
    return mean(ratios)


def figures(kernel: str) -> str:
    """What was measured of a step, in a line; empty where it is not recorded."""
    record = recorded()
    rows = rows_of(record)
    if record is None or kernel not in steps(rows):
        return ""
    of_floor = ", ".join(f"{step_fraction(rows, kernel, M):.2f}" for M in _SHOWN_TOKENS)
    tokens = ", ".join(map(str, _SHOWN_TOKENS))
    over = speed_over_peer(rows, kernel, "cublas_fp8", stored_times())
    device = record.device["name"].removeprefix("NVIDIA ")
    return f"{of_floor} of the floor at M = {tokens} on an {device}; {over:.2f} times as fast as cuBLAS FP8 (means)."


def ladder_table(record: Record | None = None) -> str:
    """Every step: what it shows, its main loop, how near to the floor, what it gained, and against whom."""
    record = record or recorded()
    rows, stored = rows_of(record), stored_times()
    columns = ["step", "shows", "instructions per weight"]
    columns += [f"of the floor, M = {M}" for M in _SHOWN_TOKENS]
    columns += [f"over the step before, M = {M}" for M in DISSECTED_TOKENS] + ["over QServe g128", "over cuBLAS FP8"]
    before, lines = "", []
    for name in steps(rows) or [spec.name for spec in kernels.gemm.STEPS]:
        gained = [speed_over(rows, name, before, M) if before else math.nan for M in DISSECTED_TOKENS]
        others = [speed_over_peer(rows, name, peer, stored) for peer in (QSERVE, "cublas_fp8")]
        lines.append(
            [f"`{short(name)}`", kernels.specs()[name].summary, _per_weight(name)]
            + [_number(step_fraction(rows, name, M), "{:.2f}") for M in _SHOWN_TOKENS]
            + [_number(value, "{:.2f}x") for value in [*gained, *others]]
        )
        before = name
    note = _origin(record) if record else f"{NOT_RECORDED} {_COUNTED_LOOP}"
    return f"{markdown(columns, lines, left=2)}\n{note}\n"


def loop_table() -> str:
    """The main loop of every step in machine code, per weight, at few and at many tokens."""
    columns = ["step", "M", "weights", "all", "ALU", "FMA", "shared and global", "tensor", "beside, per iteration"]
    lines = []
    for spec in kernels.gemm.STEPS:
        for M, loop in counts.load()["main_loops"][kernels.find(spec.name)[1][0].label].items():
            weights, pipes = loop["weights"], loop["pipes"]
            per_weight = [sum(pipes.values()), pipes.get("alu", 0), pipes.get("fma", 0) + pipes.get("fmaheavy", 0)]
            per_weight += [pipes.get("lsu", 0), pipes.get("tensor", 0)]
            numbers = [f"{count / weights:.2f}" for count in per_weight]
            lines.append([f"`{short(spec.name)}`", M, str(weights), *numbers, str(loop["beside"])])
    return markdown(columns, lines)


def limits_table(record: Record | None = None) -> str:
    """What ncu counted of every step on the matrix that is taken apart."""
    record = record or recorded()
    counted = [row for row in rows_of(record) if "tensor_pct" in row.more]
    if not counted:
        return f"{NOT_RECORDED}\n"
    units = ("tensor", "issue", "alu", "fma", "lsu", "dram", "l2")
    columns = ["step", "M", "µs", "registers", "SM MHz", "executed per weight", *(f"{u} %" for u in units)]
    columns += ["warps wait for (per issue)"]
    lines = []
    for row in sorted(counted, key=lambda row: (steps(counted).index(row.kernel), row.sizes["M"])):
        more = row.more
        executed = 32 * more["warp_instructions"] / (row.sizes["N"] * row.sizes["K"])
        stalls = {name.removeprefix(STALL): value for name, value in more.items() if name.startswith(STALL)}
        worst = sorted(stalls, key=lambda name: -stalls[name])[:_REASONS]
        lines.append(
            [f"`{short(row.kernel)}`", str(row.sizes["M"]), f"{more['ncu_ns'] / 1e3:.1f}", f"{more['registers']:.0f}"]
            + [f"{1e3 * more['ncu_cycles'] / more['ncu_ns']:.0f}", f"{executed:.2f}"]
            + [f"{more[f'{unit}_pct']:.0f}" for unit in units]
            + [", ".join(f"{name.replace('_', ' ')} {stalls[name]:.1f}" for name in worst)]
        )
    return markdown(columns, lines) + f"\n{DISSECTED}: {DISSECTED.N} x {DISSECTED.K}, counted by ncu, caches cold.\n"


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the first `left` columns are text, the others numbers."""
    rule = ["---" if n < left else "---:" for n in range(len(columns))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, rule, *lines))


def _per_weight(name: str) -> str:
    label = kernels.find(name)[1][0].label
    loops = counts.load()["main_loops"].get(label, {})
    return " / ".join(f"{sum(loop['pipes'].values()) / loop['weights']:.1f}" for loop in loops.values() if loop)


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value)


def _origin(record: Record) -> str:
    """Where the figures come from and what they are means of."""
    rows, stored = rows_of(record), stored_times()
    matrices = len({place_of(row)[:2] for row in rows})
    factors = {place_of(row): stored_peers(place_of(row), row.peers, stored) for row in rows}
    scaled = [factor for times, factor in factors.values() if times and factor != 1.0]
    known = sum(bool(times) for times, _ in factors.values())
    tokens = ", ".join(map(str, TOKENS))
    run = f"`ptxlab bench gemm`, {record.date[:10]}, commit {record.revision}"
    sentences = [
        f"Geometric means over {matrices} matrices; over QServe and cuBLAS also over M = {tokens}.",
        _COUNTED_LOOP,
        f"Measured on one {record.device['name']}: {run}; cuBLAS in the same run, QServe before that on an H200 too.",
    ]
    if scaled:
        ratios = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(scaled), max(scaled))))
        sentences.append(
            f"At {len(scaled)} of {known} points cuBLAS differed by more than {SAME:.0%} between the two runs: there"
            f" QServe's times are scaled by its ratio, {ratios}."
        )
    return " ".join(sentences)
