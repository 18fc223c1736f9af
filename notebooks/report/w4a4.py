"""W4A4 and W4Ax: as recorded beside W4A8; on GPUs that were not measured the cost model, beside what papers report."""

import math
from functools import cache

import pandas as pd
from matplotlib.figure import Figure

from ptxlab.bench.record import Record
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.gemm import headline, steps
from ptxlab.lowbit.bench.gemm.w4a4 import COMPARED, PART
from ptxlab.lowbit.bench.shapes import LLAMA, decoder
from ptxlab.lowbit.cost import SCHEMES, gemm_cost, published, tables
from ptxlab.lowbit.cost.plot import schedule_figure
from ptxlab.lowbit.cost.schedule import (
    COMET,
    COMET_INT4,
    COMET_SMS,
    COMET_TOKENS,
    SCHEDULES,
    TILE,
    Costs,
    Tile,
    grid,
    int8_blocks,
    layer_speedups,
    rate_bound,
    ratio_needed,
)
from ptxlab.plot import BLUE, GREY, ORANGE, RED
from report import accuracy, frames
from report.frames import MISSING, fraction, frame, markdown, mean, over
from report.style import bare, title

_PRECISIONS = {  # rows of `ptxlab accuracy` -> what they are called here
    ("float", "float32"): "W16A16",
    ("alone", "W8A8"): "W8A8",
    ("g64", "round to nearest"): "W4A8KV4, rounded to nearest",
    ("g64", "GPTQ"): "W4A8KV4, the whole recipe",
    ("Atom", "KV4"): "W4A4KV4, Atom",
}
_MEASURES = {headline.MEASURE: "W4A8", steps.W8A8: "W8A8", "w4a4": "W4A4", "w4ax": "W4Ax"}
FOUR_BITS = ("W4A4", "W4Ax")
MOST_OVER_W4A8, STRETCH = 1.25, 1.15  # of W4A8's time
_GPUS = ("rtx3090", "rtx4090", "l40s", "a100")
_MANY = 4096  # tokens, and channels
_PLAIN = Costs(1.0, 2.0)
_ORDERS = {  # how the INT8 blocks lie and which tiles are neighbours -> arguments of `layer_speedups`
    "INT8 last, neighbours share k": {},
    "INT8 spread, neighbours share k": {"spread": True},
    "INT8 spread, neighbours share a tile of Y": {"spread": True, "k_first": True},
}


def load_record() -> Record | None:
    """Load the record of `python -m benchmarks gemm --only w4a4`, or return None if there is none."""
    return frames.load_record(f"gemm_{PART}")


def points(record: Record | None) -> pd.DataFrame:
    """Return the times of the kernels for Hopper, by `scheme` (`_MEASURES`), matrix (`name`) and M.

    Columns beyond those of `frame`: `of W4A8`, the time over W4A8's; `bytes of W4A8`, the bytes over W4A8's; `of W8A8`.
    The kernels for INT4 tensor cores, which Hopper runs in software, are left out.
    """
    rows = pd.concat([frame(record, measure).assign(scheme=scheme) for measure, scheme in _MEASURES.items()])
    rows = rows[~rows.kernel.astype(str).str.endswith("_sm80") & rows.M.isin(COMPARED)]
    sizes = [{"K4": 0, "K8": 0, "outliers": 0, "K": 0} | dict(row_sizes) for row_sizes in rows.sizes]
    layer_by_size = {(layer.N, layer.K): str(layer) for layer in LLAMA}
    channels = [row_sizes["K"] + row_sizes["outliers"] + row_sizes["K4"] + row_sizes["K8"] for row_sizes in sizes]
    rows = rows.assign(name=[layer_by_size.get(place) for place in zip(rows.N, channels, strict=True)])
    for scheme in ("W4A8", "W8A8"):
        reference = rows[rows.scheme == scheme].set_index(["name", "M"])[["time_us", "bytes"]]
        rows = rows.join(
            reference.rename(columns={"time_us": f"{scheme} us", "bytes": f"{scheme} bytes"}), ["name", "M"]
        )
        rows[f"of {scheme}"] = rows.time_us / rows[f"{scheme} us"]
    return rows.assign(**{"bytes of W4A8": rows.bytes / rows["W4A8 bytes"]})


def measured_table(record: Record | None) -> str:
    """Build the table of W4A4 and W4Ax by tokens.

    A row has the fraction of the floor, the time beside W4A8, W8A8 and cuBLAS, and the bytes saved.
    """
    rows = points(record)
    if record is None or rows.empty:
        return MISSING
    lines = []
    for scheme in FOUR_BITS:
        for M in COMPARED:
            scheme_rows = rows[(rows.scheme == scheme) & (rows.M == M)]
            lines.append(
                {
                    "scheme": scheme,
                    "M": M,
                    "of the floor": fraction(scheme_rows),
                    "of W4A8's time": mean(scheme_rows["of W4A8"]),
                    "worst matrix": scheme_rows["of W4A8"].max(),
                    "of W8A8's time": mean(scheme_rows["of W8A8"]),
                    "over cuBLAS INT8": mean(over(scheme_rows, "cublas_int8")),
                    "worst": over(scheme_rows, "cublas_int8").min(),
                    "over cuBLAS FP8": mean(over(scheme_rows, "cublas_fp8")),
                    "bytes fewer than W4A8": 1 - mean(scheme_rows["bytes of W4A8"]),
                }
            )
    table = pd.DataFrame(lines)
    formats = dict.fromkeys(table.columns[2:], "{:.2f}x") | {"of the floor": "{:.2f}"}
    formats |= {"M": "{:,}", "bytes fewer than W4A8": "{:.1%}"}
    note = (
        f"Means over {rows.name.nunique()} matrices of LLaMA-2, one run, groups of 128, FP16 results; a fifth of W4Ax's"
        " blocks is INT8. Bytes: weights, activations, scales and results. Quantising the activations is in none of the"
        " times; cuBLAS INT8 ends with INT32 sums."
    )
    origin = f"`python -m benchmarks gemm --only {PART}`, {record.date[:10]}, commit {record.revision}"
    picture = "![Time of W4A4 and W4Ax over that of W4A8](notebooks/figures/w4a4_measured.png)"
    return (
        f"{markdown(table, formats)}\n{note} Measured on one {record.device['name']}: {origin}.{_in_software(record)}"
        f"\n\n{picture}\n"
    )


def _in_software(record: Record) -> str:
    """Say that the record also has the kernels for INT4 tensor cores, if it has; empty otherwise."""
    if not any(row.kernel.endswith("_sm80") and row.measure in ("w4a4", "w4ax") for row in record.rows):
        return ""
    return (
        " The record also has the kernels for INT4 tensor cores (`_sm80`). Hopper runs their MMAs in software, so those"
        " times say nothing about a GPU that has such tensor cores, and no table or picture shows them."
    )


def measured_picture(record: Record) -> Figure:
    """Plot time over W4A8's by tokens, means over the matrices, and the limit that was set."""
    rows = points(record)
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    lines = {scheme: rows[rows.scheme == scheme].groupby("M")["of W4A8"] for scheme in (*FOUR_BITS, "W8A8")}
    speedups_by_scheme = {scheme: of.agg(mean) for scheme, of in lines.items()}
    for peer, peer_name in {"cublas_int8": "cuBLAS INT8", "cublas_fp8": "cuBLAS FP8"}.items():
        speedups_by_scheme[peer_name] = rows[rows.scheme == "W4A8"].groupby("M")[f"over {peer}"].agg(mean)
    styles = ((RED, "s-"), (ORANGE, "D-"), (GREY, "^-"), (BLUE, "v--"), (BLUE, "o--"))
    for (label, speedups), (colour, style) in zip(speedups_by_scheme.items(), styles, strict=True):
        axes.plot(speedups.index, speedups.to_numpy(float), style, color=colour, label=label)
    axes.axhline(MOST_OVER_W4A8, color=GREY, linestyle=":", label=f"limit for W4A4, {MOST_OVER_W4A8}x")
    axes.axhline(1, color="black", linewidth=0.8, label="W4A8")
    axes.set_xscale("log", base=2)
    axes.set_xticks(COMPARED, [f"{M:,}" for M in COMPARED])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens M")
    axes.set_ylabel("time, of W4A8's")
    axes.legend(frameon=False, fontsize=9, ncols=2)
    summary = " and ".join(f"{scheme} {mean(rows[rows.scheme == scheme]['of W4A8']):.2f}x" for scheme in FOUR_BITS)
    title(axes, f"{summary} W4A8's time on an H200, in the mean")
    bare(axes)
    return figure


def choice_table() -> str:
    """Build the table of GPUs: up to which M W4A8 waits for weights, and each scheme's speed-up over INT8.

    The speed-up is for many tokens.
    """
    lines = []
    for gpu in map(cost.device, _GPUS):
        line = {"GPU": gpu.name, "W4A8 waits for weights up to M": cost.transition(gpu, SCHEMES["W4A8 sm80"])}
        w8a8_cost = _cost(gpu, "W8A8")
        for scheme in ("W4A8 sm80", "W4Ax token", "W4Ax g128", "W4A4 Atom"):
            scheme_cost = _cost(gpu, scheme)
            serial_speedup = w8a8_cost.in_turn_us / scheme_cost.in_turn_us
            overlapped_speedup = w8a8_cost.overlapped_us / scheme_cost.overlapped_us
            line[scheme] = f"{serial_speedup:.2f} to {overlapped_speedup:.2f}x"
        lines.append(line)
    table = pd.DataFrame(lines)
    note = (
        f"Speed over W8A8 at INT8's peak, in turn to overlapped, {_MANY:,} tokens, {_MANY} x {_MANY}. Predicted, not"
        " measured: data-sheet rates, and the main loops of `gemm_w4a8_qoq_sm80` and of Atom's kernels in machine code"
        " for each GPU. W4Ax has a quarter of its blocks in INT8; token: one scale per token and precision, g128: one"
        " per block of 128 channels. Atom: groups of 128 and 128 outlier channels in INT8."
    )
    return f"{markdown(table, dict(zip(table.columns, ('{}', '{:.0f}', *['{}'] * 4), strict=True)))}\n{note}\n"


def _cost(gpu: cost.Device, scheme: str) -> cost.Cost:
    loop_counts = counts.loop_counts(SCHEMES[scheme], gpu.arch)
    return gemm_cost(gpu, SCHEMES[scheme], _MANY, _MANY, _MANY, counts=loop_counts)


def figures_table() -> str:
    """Build the table of papers' figures beside the model's predictions, with the errors."""
    predicted = published.predictions(counts.loop_counts)
    table = pd.DataFrame(
        tables.published_lines(predicted), columns=[column.rstrip(">") for column in tables.PUBLISHED_COLUMNS]
    )
    issue_slots = {
        p.figure.device: published.instructions_per_sum(p.figure, counts.loop_counts)
        for p in predicted
        if p.figure.source == "APEX4"
    }
    per_sum = counts.load_mma_loops()["archs"]["sm_80"]["per_sum"]
    note = (
        "Error: from the nearer end of what is reported. A baseline is at its peak rate, FP16 with sums in FP32."
        f" Our kernel has {sum(per_sum.values()):.1f} instructions per sum and group; APEX4's figures need"
        f" {issue_slots['a100']:.0f} issue slots on the A100 and {issue_slots['rtx3090']:.0f} on the RTX 3090, if in "
        "turn."
    )
    return f"{markdown(table, left=5)}\n{note}\n"


@cache
def _speedups(model: str, order: str, costs: Costs = _PLAIN) -> dict[str, float]:
    """Return each schedule's speed-up over W4A8, the geometric mean over COMET's batches.

    Batches that fill the same number of tiles are simulated once.
    """
    matrices = [(layer.N, layer.K) for layer in decoder(model)]
    speedups_by_rows = {
        rows: layer_speedups(matrices, rows * TILE, COMET_SMS, costs, int4_share=COMET_INT4, **_ORDERS[order])
        for rows in {math.ceil(M / TILE) for M in COMET_TOKENS}
    }
    return {
        schedule: mean(speedups_by_rows[math.ceil(M / TILE)][schedule] for M in COMET_TOKENS) for schedule in SCHEDULES
    }


def schedule_table() -> str:
    """Build the table of COMET's Fig. 10 beside the simulation, with the INT8 tile's cost that each figure implies."""
    lines = []
    for model, reported_times in COMET.items():
        for schedule, times in reported_times.items():
            line: dict[str, object] = {"model": model, "schedule": schedule, "COMET": times}
            line |= {order: _speedups(model, order)[schedule] for order in _ORDERS}
            line["error, the first"] = line[next(iter(_ORDERS))] / times - 1  # type: ignore[operator]
            line["INT8 tile needed, in INT4 tiles"] = ratio_needed(COMET_INT4, times)
            lines.append(line)
    table = pd.DataFrame(lines)
    formats = dict(zip(table.columns[2:], (*["{:.2f}x"] * 4, "{:+.0%}", "{:.2f}"), strict=True))
    note = (
        f"Over W4A8; {COMET_SMS} SMs, {COMET_INT4:.0%} INT4, mean of batches {', '.join(map(str, COMET_TOKENS))}; an"
        f" INT8 tile takes 2 INT4 tiles, which bounds the gain by {rate_bound(COMET_INT4, 2):.2f}x while all SMs are"
        " busy in both. Needed: the ratio at which all SMs busy would give COMET's figure."
    )
    return f"{markdown(table, formats, left=2)}\n{note}\n"


def schedules_picture() -> Figure:
    """Plot the schedules of COMET's Fig. 8, and of an output projection of LLaMA-3-8B on an A100.

    Fig. 8 has the 18 tiles that COMET's text counts.
    """
    fig8_tiles = [Tile(0, tile // 3, tile % 3, tile % 2 == 0) for tile in range(18)]
    layer = decoder("LLaMA-3-8B")[1]
    tiles = grid(64, layer.N, layer.K, int8_blocks(layer.K // TILE, 1 - COMET_INT4, spread=True), k_first=False)
    problems = {"COMET's Fig. 8": (fig8_tiles, 4, _PLAIN), f"{layer}, A100": (tiles, COMET_SMS, _PLAIN)}
    return schedule_figure(problems, SCHEDULES)


def precisions(accuracy_record: accuracy.Accuracy | None) -> pd.DataFrame:
    """Return perplexity over that of floats (`ratio`) and bytes read, by precision.

    `group` names the line of the picture that joins the points, `name` the point.
    """
    rows = accuracy.points(accuracy_record).dropna(subset=["bytes"])
    lines = []
    for row in rows.itertuples():
        precision = _PRECISIONS.get((row.ladder, row.step))
        if row.ladder == "FMPQ":
            precision = f"W4AxKV4, {row.step}"
        elif row.ladder == "Atom" and precision is None:
            precision = f"W4A4, Atom: {row.step}"
        if precision is not None:
            lines.append(
                {"group": row.ladder, "name": precision, "step": row.step, "ratio": row.ratio, "bytes": row.bytes}
            )
    return pd.DataFrame(lines, columns=["group", "name", "step", "ratio", "bytes"])


def accuracy_table() -> str:
    """Build the table of perplexity beside the bytes that the GEMMs of 1,024 tokens read, fewest bytes first."""
    accuracy_record = accuracy.load_record()
    perplexity_rows = precisions(accuracy_record)
    if accuracy_record is None or perplexity_rows.empty:
        return MISSING
    table = perplexity_rows.sort_values("bytes", kind="stable")[["name", "bytes", "ratio"]].assign(
        bytes=lambda t: t.bytes / 1e6
    )
    table.columns = pd.Index(["precision", "MB read", "perplexity, of float32"])
    text = markdown(table, dict(zip(table, ("{}", "{:.0f}", "{:.2f}x"), strict=True)))
    note = "MB read by all GEMMs of 1,024 tokens: weights and activations with their scales, floats counted as FP16."
    picture = "![Perplexity by bytes](notebooks/figures/w4a4_accuracy.png)"
    return f"{text}\n{note} {accuracy.origin(accuracy_record)}\n\n{picture}\n"


def accuracy_picture(accuracy_record: accuracy.Accuracy) -> Figure:
    """Plot perplexity against bytes: COMET's line by the share of INT8 blocks, Atom, W4A8KV4, W8A8 and floats."""
    rows = precisions(accuracy_record)
    figure = Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    comet = rows[(rows.group == "FMPQ") & rows.step.str.contains("% of the blocks")].sort_values("bytes")
    styles = {"Atom": ("s", RED, "W4A4KV4: Atom"), "g64": ("o", BLUE, "W4A8KV4"), "alone": ("^", GREY, "W8A8")}
    axes.plot(comet.bytes / 1e6, comet.ratio, "D-", color=ORANGE, label="W4AxKV4: COMET's FMPQ")
    for point in comet.itertuples():
        label = point.step.partition(" ")[0] + " INT8"
        axes.annotate(label, (point.bytes / 1e6, point.ratio), (5, 5), textcoords="offset points", fontsize=8)
    for group, (marker, colour, label) in styles.items():
        group_rows = rows[(rows.group == group) & rows.name.isin(list(_PRECISIONS.values()))]
        axes.plot(
            group_rows.bytes / 1e6, group_rows.ratio, marker, color=colour, label=label, linestyle="none", markersize=7
        )
        for point in group_rows.itertuples():
            note = point.name.partition(", ")[2] if group == "g64" else ""
            axes.annotate(note, (point.bytes / 1e6, point.ratio), (7, -3), textcoords="offset points", fontsize=8)
    axes.axhline(1, color=GREY, linestyle="--", label="float32")
    axes.set_xlabel("MB read by the GEMMs of 1,024 tokens")
    axes.set_ylabel("perplexity, of float32")
    axes.legend(frameon=False, fontsize=9)
    title(axes, _finding(rows))
    bare(axes)
    return figure


def _finding(rows: pd.DataFrame) -> str:
    best_row = rows[(rows.group == "g64") & (rows.step == "GPTQ")]
    kv4_row = rows[rows.name == _PRECISIONS["Atom", "KV4"]]
    if best_row.empty or kv4_row.empty:
        return "Perplexity by the bytes that the GEMMs read"
    bytes_saved_share = 1 - kv4_row.bytes.iloc[0] / best_row.bytes.iloc[0]
    perplexity_ratio = kv4_row.ratio.iloc[0] / best_row.ratio.iloc[0]
    return f"Atom's W4A4 reads {bytes_saved_share:.0%} fewer bytes than W4A8, at {perplexity_ratio:.2f}x its perplexity"
