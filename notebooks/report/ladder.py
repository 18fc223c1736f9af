"""The GEMM ladder as recorded: what each step gained, how near it is to the floor and to others, what limits it."""

import math
from collections.abc import Sequence

import pandas as pd

from benchmarks.stored import stored_times
from ptxlab import registry
from ptxlab.bench.record import Record
from ptxlab.lowbit import kernels
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.gemm import ampere, groups, headline
from ptxlab.lowbit.bench.gemm.limits import STALL
from ptxlab.lowbit.bench.gemm.steps import MEASURE
from ptxlab.lowbit.bench.shapes import CHAINS, DISSECTED, DISSECTED_TOKENS, TOKENS, Layer
from report import frames
from report.frames import MISSING, NOT_RECORDED, fraction, frame, markdown, mean, origin_of_peers, over

PREFIX = "gemm_w4a8_"
QSERVE = "qserve_w4a8_g128"
_SHOWN_TOKENS = (16, 64, 256)
_REASONS = 3
_COUNTED_LOOP = "Instructions per weight: those of every iteration of the main loop, M = {} / {}.".format(
    *DISSECTED_TOKENS
)


def load_record() -> Record | None:
    """Load the record of the suite `gemm` on the H200, or return None if there is none."""
    return frames.load_record("gemm")


def points(record: Record | None) -> pd.DataFrame:
    """Return the ladder's rows, with the peers of the same run and the stored ones."""
    return frame(record, MEASURE, stored=stored_times())


def steps(rows: pd.DataFrame) -> list[str]:
    """List the measured kernels in the order of the ladder."""
    measured = set(rows.kernel)
    return [spec.name for spec in kernels.gemm.STEPS if spec.name in measured]


def short_name(name: str) -> str:
    """Strip the prefix that the names of all steps share."""
    return name.removeprefix(PREFIX)


def select_step(rows: pd.DataFrame, kernel: str, M: int | None = None) -> pd.DataFrame:
    """Select the rows of one step, at M tokens if given."""
    return rows[(rows.kernel == kernel) & (True if M is None else rows.M == M)]


def speed_over(rows: pd.DataFrame, kernel: str, base: str, M: int) -> float:
    """Return the mean speed-up of a step over another at M tokens, over the matrices where both were measured."""
    times = (select_step(rows, step, M).set_index(["N", "K"]).time_us for step in (base, kernel))
    return mean(next(times) / next(times))


def figures(kernel: str) -> str:
    """Describe a step's measured speed in one line; empty if it is not recorded."""
    record = load_record()
    rows = select_step(points(record), kernel)
    if record is None or rows.empty:
        return ""
    floor_fractions = ", ".join(f"{fraction(select_step(rows, kernel, M)):.2f}" for M in _SHOWN_TOKENS)
    tokens = ", ".join(map(str, _SHOWN_TOKENS))
    device = record.device["name"].removeprefix("NVIDIA ")
    speed = mean(over(rows, "cublas_fp8"))
    conditions = f"at M = {tokens} on an {device}"
    return f"{floor_fractions} of the floor {conditions}; {speed:.2f} times as fast as cuBLAS FP8 (means)."


def ladder_table(record: Record | None = None) -> str:
    """Build the table of the ladder.

    A row is a step: what it shows, its main loop, the fraction of the floor, the gain over the step before, and the
    speed-up over peers.
    """
    record = record or load_record()
    rows = points(record)
    previous, lines = "", []
    for kernel in steps(rows) or [spec.name for spec in kernels.gemm.STEPS]:
        line: dict[str, object] = {"step": f"`{short_name(kernel)}`", "shows": registry.specs()[kernel].summary}
        line["instructions per weight"] = _per_weight(kernel)
        line |= {f"of the floor, M = {M}": fraction(select_step(rows, kernel, M)) for M in _SHOWN_TOKENS}
        line |= {f"over the step before, M = {M}": speed_over(rows, kernel, previous, M) for M in DISSECTED_TOKENS}
        peers = {"over QServe g128": QSERVE, "over cuBLAS FP8": "cublas_fp8"}
        line |= {column: mean(over(select_step(rows, kernel), peer)) for column, peer in peers.items()}
        lines.append(line)
        previous = kernel
    table = pd.DataFrame(lines)
    formats = {column: "{:.2f}x" if column.startswith("over") else "{:.2f}" for column in table.columns[3:]}
    note = _origin(record, rows) if record else f"{NOT_RECORDED} {_COUNTED_LOOP}"
    return f"{markdown(table, formats, left=2)}\n{note}\n"


def load_groups_record() -> Record | None:
    """Load the record of `ptxlab bench gemm --only g64` on the H200, or return None if there is none."""
    return frames.load_record(f"gemm_{groups.PART}")


def groups_table(record: Record | None) -> str:
    """Build the table of every step and of `gemm_w4a8` in LiquidGEMM's groups.

    A row has the fraction of the floor, and the summed time of a layer's matrices.
    """
    rows = points(record)
    if record is None or rows.empty:
        return MISSING
    rows_by_step = {f"`{short_name(kernel)}`": select_step(rows, kernel) for kernel in steps(rows)}
    rows_by_step[f"`{headline.FACE}`"] = frame(record, headline.MEASURE)
    return f"{_table_of_times(rows_by_step)}\nGroups of {groups.GROUP}; {_describe_part(record, rows, groups.PART)}\n"


def load_compute_80_record() -> Record | None:
    """Load the record of `ptxlab bench gemm --only compute_80` on the H200, or return None if there is none."""
    return frames.load_record(f"gemm_{ampere.PART}")


def compute_80_table(record: Record | None) -> str:
    """Build the table of the steps for Ampere, compiled for sm_80: fractions of the floor, and times of a layer."""
    rows = frame(record, ampere.MEASURE)
    if record is None or rows.empty:
        return MISSING
    rows_by_kernel = {f"`{kernel}`": rows[rows.kernel == kernel] for kernel in rows.kernel.unique()}
    return f"{_table_of_times(rows_by_kernel)}\nPTX for `sm_80`; {_describe_part(record, rows, ampere.PART)}\n"


def _table_of_times(rows_by_step: dict[str, pd.DataFrame]) -> str:
    """Build a table with the fraction of the floor of each step, and the time of its matrices added up."""
    lines = []
    for step, rows in rows_by_step.items():
        rows_by_tokens = {M: rows[rows.M == M] for M in _SHOWN_TOKENS}
        line = {"step": step} | {f"of the floor, M = {M}": fraction(rows_by_tokens[M]) for M in _SHOWN_TOKENS}
        lines.append(line | {f"µs, M = {M}": rows_by_tokens[M].time_us.sum() for M in _SHOWN_TOKENS})
    table = pd.DataFrame(lines)
    return markdown(table, {column: "{:.1f}" if column.startswith("µs") else "{:.2f}" for column in table.columns[1:]})


def _describe_part(record: Record, rows: pd.DataFrame, part: str) -> str:
    """Say which matrices `_table_of_times` adds up, and which run (`--only PART`) measured them."""
    matrices = rows.drop_duplicates(["N", "K"])
    return (
        f"µs: the {len(matrices)} matrices of a layer of {matrices.model.iloc[0]}, added up."
        f" Measured on one {record.device['name']}: `ptxlab bench gemm --only {part} --only 7B`,"
        f" {record.date[:10]}, commit {record.revision}."
    )


def documents_table(record: Record | None = None) -> str:
    """Set what documents report of these GEMMs beside the same ratio of sums over a layer's matrices in the record."""
    rows = points(record or load_record())
    if rows.empty:
        return MISSING
    baseline, lqq, excp, imfp = (f"{PREFIX}{step}_sm90" for step in ("qoq", "lqq", "lqq_excp", "lqq_imfp"))
    fig12, fig13 = "LiquidGEMM §7.3, Fig. 12", "LiquidGEMM §7.3, Fig. 13"
    small_chain, large_chain, last_tokens = CHAINS[:1], CHAINS[1:], TOKENS[-1:]
    lines = [
        (
            fig12,
            "ImFP over QServe, LLaMA-2-7B, M = 256",
            "2.75x",
            layer_ratios(rows, QSERVE, imfp, small_chain, last_tokens),
        ),
        (
            fig12,
            "ImFP over QServe, LLaMA-2-70B, M = 256",
            "2.90x",
            layer_ratios(rows, QSERVE, imfp, large_chain, last_tokens),
        ),
        (fig13, "LiquidQuant over the baseline", "up to 1.29x", layer_ratios(rows, baseline, lqq)),
        (fig13, "ExCP over the baseline", "gains at many tokens", layer_ratios(rows, baseline, excp)),
        (fig13, "ImFP over the baseline", "gains at every M", layer_ratios(rows, baseline, imfp)),
        ("QServe §4.1", "QServe's kernel over cuBLAS INT8", "1.5x", layer_ratios(rows, "cublas_int8", QSERVE)),
    ]
    comparisons = [
        (*line, " to ".join(dict.fromkeys(f"{x:.2f}x" for x in (min(ratios), max(ratios)))))
        for *line, ratios in lines
        if ratios
    ]
    table = pd.DataFrame(comparisons, columns=["document", "figure", "reported", "here"])
    note = "Here: an H200; a range is over LLaMA-2-7B and -70B and the M that were measured."
    return f"{markdown(table, left=3)}\n{note}\n"


def layer_ratios(
    rows: pd.DataFrame,
    slow: str,
    fast: str,
    layers: Sequence[Sequence[Layer]] = CHAINS,
    tokens: Sequence[int] = TOKENS,
) -> list[float]:
    """Return the time of `slow` over that of `fast` (each a step or a peer), by layer and M.

    Pairs that were not both measured are left out.
    """
    times = rows.set_index(["kernel", "M", "N", "K"]).sort_index()

    def total(name: str, layer: Sequence[Layer], M: int) -> float:
        step = name if name.startswith(PREFIX) else kernels.gemm.STEPS[0].name  # a peer stands beside every step
        measured = times.reindex([(step, M, matrix.N, matrix.K) for matrix in layer])
        return float((measured.time_us * (1 if step == name else measured[f"over {name}"])).sum(skipna=False))

    ratios = [total(slow, layer, M) / total(fast, layer, M) for layer in layers for M in tokens]
    return [ratio for ratio in ratios if not math.isnan(ratio)]


def loop_table() -> str:
    """Build the table of each step's main loop in machine code, per weight, at few and at many tokens."""
    columns = ["step", "M", "weights", "all", "ALU", "FMA", "shared and global", "tensor", "beside, per iteration"]
    lines = []
    for spec in kernels.gemm.STEPS:
        for M, loop in counts.load()["main_loops"][registry.find(spec.name)[1][0].label].items():
            weights, pipes = loop["weights"], loop["pipes"]
            per_weight = [sum(pipes.values()), pipes.get("alu", 0), pipes.get("fma", 0) + pipes.get("fmaheavy", 0)]
            per_weight += [pipes.get("lsu", 0), pipes.get("tensor", 0)]
            numbers = [f"{count / weights:.2f}" for count in per_weight]
            lines.append([f"`{short_name(spec.name)}`", M, str(weights), *numbers, str(loop["beside"])])
    return markdown(pd.DataFrame(lines, columns=columns))


def limits_table(record: Record | None = None) -> str:
    """Build the table of ncu's counters of every step, on the matrix chosen for dissection."""
    rows = points(record or load_record())
    rows = rows[rows.tensor_pct.notna()]
    if rows.empty:
        return MISSING
    units = ("tensor", "issue", "alu", "fma", "lsu", "dram", "l2")
    lines = []
    for row in sorted(rows.to_dict("records"), key=lambda row: (steps(rows).index(row["kernel"]), row["M"])):
        stalls = {n.removeprefix(STALL).replace("_", " "): us for n, us in row["more"].items() if n.startswith(STALL)}
        worst = sorted(stalls, key=lambda stall: -stalls[stall])[:_REASONS]
        line = {"step": f"`{short_name(row['kernel'])}`", "M": row["M"], "µs": f"{row['ncu_ns'] / 1e3:.1f}"}
        line["registers"] = f"{row['registers']:.0f}"
        line["SM MHz"] = f"{1e3 * row['ncu_cycles'] / row['ncu_ns']:.0f}"
        line["executed per weight"] = f"{32 * row['warp_instructions'] / (row['N'] * row['K']):.2f}"
        line |= {f"{pipe} %": f"{row[f'{pipe}_pct']:.0f}" for pipe in units}
        line["warps wait for (per issue)"] = ", ".join(f"{stall} {stalls[stall]:.1f}" for stall in worst)
        lines.append(line)
    note = f"{DISSECTED}: {DISSECTED.N} x {DISSECTED.K}, counted by ncu, caches cold."
    return f"{markdown(pd.DataFrame(lines))}\n{note}\n"


def _per_weight(name: str) -> str:
    """List the instructions per weight of each of a kernel's main loops."""
    label = registry.find(name)[1][0].label
    loops = counts.load()["main_loops"].get(label, {})
    return " / ".join(f"{sum(loop['pipes'].values()) / loop['weights']:.1f}" for loop in loops.values() if loop)


def _origin(record: Record, rows: pd.DataFrame) -> str:
    """Describe which points the means are over, and name the record they come from."""
    places = rows.drop_duplicates(["N", "K", "M"], keep="last")
    matrices, tokens = len(places.drop_duplicates(["N", "K"])), ", ".join(map(str, TOKENS))
    sentences = [
        f"Geometric means over {matrices} matrices; over QServe and cuBLAS also over M = {tokens}, as far as they were"
        " measured.",
        _COUNTED_LOOP,
        f"Measured on one {record.device['name']}: `python -m benchmarks gemm`, {record.date[:10]},"
        f" commit {record.revision}.",
        origin_of_peers(record, MEASURE, stored_times()),
    ]
    return " ".join(sentences)
