"""Decoder layers as recorded, beside their floor and public mixes: points, tables, pictures and targets."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.layer import (
    BATCHES,
    CONFIGS,
    D64,
    EPILOGUES,
    FUSED,
    MEASURE,
    NARROW,
    TIMELINE,
    TIMELINE_LAYERS,
    config_of,
)
from benchmarks.layer.ends import ALL as ENDS
from benchmarks.layer.ends import Ends
from ptxlab.bench.record import Record, Row
from ptxlab.llm.model import Config
from ptxlab.plot import BLUE, GREY, ORANGE, PALE, RED
from report import frames
from report.frames import MISSING, markdown, mean
from report.style import bare, title

KINDS = {  # of mixes -> the mixes by the beginning of their names
    "FP16": "fp16/",
    "FP8": "fp8_",
    "humming per channel": "humming_chn/",
    "humming g128": "humming_g128/",
}
PARTS = {"gemm": BLUE, "attention": ORANGE, "others": RED}
DRAWN = ("LLaMA-2-7B", "LLaMA-2-70B")  # beside a mix
TRACED = tuple(model for model, _ in TIMELINE_LAYERS)
BESIDE = "FP8"  # the mix that is drawn
_ATTENTION = {
    "sdpa": "PyTorch's over an FP16 cache, in the mix's own graph",
    "xqa_fp8": "FlashInfer's XQA over an FP8 cache, in the mix's own graph",
    "xqa_stored": "FlashInfer's XQA, its stored time ([peers](notebooks/results/h200/peers/README.md)) added to that of"
    " the mix's graph without attention",
}
_COLUMNS = ["model", "B", "time_us", "floor_us", "fraction", "gemm_us", "attention_us", "others_us", "others_share"]
_FUSED = ["kernel", "M", "width", "time_us", "floor_us", "fraction", "copy_us", "l2_us", "chain_us", "copy_l2_us"]
_PUBLIC = {"over torch": "torch_compile", "over Liger": "liger_f16"}  # how many times as fast as which peer


def load_record(suite: str = "layer") -> Record | None:
    """Load the record of the suite, or of its `layer_epilogues`, on the H200, or return None if there is none."""
    return frames.load_record(suite)


def points(record: Record | None) -> pd.DataFrame:
    """Return one row per model and batch.

    Columns beyond times and parts, for each kind of mix: `KIND`, the name of the fastest mix of that kind, and
    `over KIND`, the speed-up over it; empty and NaN where none was measured.
    """
    rows = [row for row in record.rows if row.measure == MEASURE] if record else []
    lines = []
    for row in rows:
        config = config_of(row.sizes)
        point: dict[str, Any] = {"model": config.name if config else "", **row.more, **vars(row), "B": row.sizes["B"]}
        for kind, prefix in KINDS.items():
            peer = fastest(row.peers, prefix)
            point |= {kind: peer, f"over {kind}": row.peers[peer] / row.time_us if peer else math.nan}
        lines.append(point)
    columns = [*_COLUMNS, *KINDS, *(f"over {kind}" for kind in KINDS), "peers", "more"]
    return pd.DataFrame(lines, columns=list(dict.fromkeys([*columns, *(key for point in lines for key in point)])))


def fastest(peers: Mapping[str, float], start: str) -> str:
    """Return the name of the fastest peer whose name begins with `start`, or an empty string if there is none."""
    return min((peer for peer in peers if peer.startswith(start)), key=peers.__getitem__, default="")


def fused_points(record: Record | None) -> pd.DataFrame:
    """Return the rows of the kernels between GEMMs.

    `width` is that of a row; for `rope_append_kv4` it is that of q, k and v together.
    """
    rows = [row for row in record.rows if row.measure == FUSED] if record else []
    lines = []
    for row in rows:
        sizes = row.sizes
        head_dims = sizes.get("D", 128) * (sizes.get("Hq", 0) + 2 * sizes.get("Hkv", 0))  # some records do not say 128
        width = sizes["K"] + sizes.get("outliers", 0) if "K" in sizes else head_dims
        speedup_by_kind = {kind: row.peers.get(peer, math.nan) / row.time_us for kind, peer in _PUBLIC.items()}
        point = {**row.more, **vars(row), "M": sizes["M"], "width": width, **speedup_by_kind}
        lines.append(point)
    return pd.DataFrame(
        lines, columns=list(dict.fromkeys([*_FUSED, *_PUBLIC, *(key for point in lines for key in point)]))
    )


def timelines(record: Record | None) -> dict[str, pd.DataFrame]:
    """Return the launches of one layer in order, by model, for the models of `TRACED` that were traced.

    `face` is the call; `start_us`, `end_us`; `gap_us` to the launch before, below 0 where the two overlap.
    """
    launches: dict[str, list[dict[str, Any]]] = {model: [] for model in TRACED}
    for row in record.rows if record else ():
        if row.measure == TIMELINE:
            config = config_of({size_name: size for size_name, size in row.sizes.items() if size_name != "launch"})
            if config and config.name in launches:
                launches[config.name].append({**vars(row), **row.more, **row.sizes})
    return {model: pd.DataFrame(rows) for model, rows in launches.items() if rows}


def layers_table(record: Record | None) -> str:
    """Build the table of every model and batch, with means below.

    A row has the time, the fraction of the floor, the share of other operations, and the speed-up over each kind of
    mix.
    """
    rows = points(record)
    if record is None or rows.empty:
        return MISSING
    format_by_column = {
        "model": "{}",
        "B": "{}",
        "time_us": "{:.1f} µs",
        "fraction": "{:.2f}",
        "others_share": "{:.0%}",
    }
    format_by_column |= {f"over {kind}": "{:.2f}x" for kind in KINDS}
    config_order = {config.name: place for place, config in enumerate(CONFIGS)}
    rows = rows.sort_values(
        ["model", "B"], key=lambda column: column.map(config_order) if column.name == "model" else column
    )
    last = {
        "model": "**mean**",
        "B": "",
        "time_us": math.nan,
        "fraction": mean(rows.fraction),
        "others_share": math.nan,
    }
    last |= {f"over {kind}": mean(rows[f"over {kind}"]) for kind in KINDS}
    table = pd.concat([rows[[*format_by_column]].astype(object), pd.DataFrame([last], dtype=object)])
    names = {"B": "batch", "time_us": "time", "fraction": "of the floor", "others_share": "others"}
    table.columns = pd.Index([names.get(column, column) for column in format_by_column])
    return f"{markdown(table, dict(zip(table, format_by_column.values(), strict=True)))}\n{_origin(record, rows)}\n"


def _origin(record: Record, rows: pd.DataFrame) -> str:
    """Describe how the figures were measured, and name the record they come from."""
    attentions = dict.fromkeys(mix.partition("/")[2] for peers in rows.peers for mix in peers)
    attention_notes = "; ".join(f"`{mix}`: {_ATTENTION[mix]}" for mix in _ATTENTION if mix in attentions)
    rows_without_xqa = rows[~rows.peers.map(lambda peers: any("/xqa" in mix for mix in peers))]
    batches = ", ".join(str(B) for B in sorted(set(rows_without_xqa[rows_without_xqa.model.isin(DRAWN)].B)))
    counts_note = f" Without it, at batch {batches} and for shares, only PyTorch's counts, which flatters our layer."
    return (
        "Sequences of 1,024 tokens, KV4, LQQ weights in groups of 128, FP16 between the kernels; 1/n is one of n GPUs'"
        " share, without the all-reduce. The floor is the sum over operations of the longer of reading weights and"
        " cache once and of the products at 1,920 TOPS. Others is their share of all operations, each timed alone. The"
        f" fastest mix of each kind counts, its attention being the best of: {attention_notes or 'none measured'}."
        f"{counts_note if batches else ''}"
        f" Measured on one {record.device['name']}: `python -m benchmarks layer`, {record.date[:10]},"
        f" commit {record.revision},"
        f" read ceiling {record.ceilings['read_tbps']:.2f} TB/s."
    )


def fused_table(record: Record | None) -> str:
    """Build the table of every fused kernel by width and tokens.

    A row compares the kernel with a copy from memory, and gives its time on data in the L2.
    """
    rows = fused_points(record)
    if rows.empty:
        return MISSING
    columns = {
        "kernel": ("kernel", "`{}`"),
        "width": ("width", "{:,}"),
        "M": ("tokens", "{:,}"),
        "time_us": ("time", "{:.2f} µs"),
        "fraction": ("of the copy ceiling", "{:.2f}"),
        "of copy": ("of a copy of its bytes", "{:.2f}"),
        "l2_us": ("in the L2", "{:.2f} µs"),
        "chain_us": ("and overlapped", "{:.2f} µs"),
        "over torch": ("over torch.compile", "{:.2f}x"),
        "over Liger": ("over Liger, FP16 out", "{:.2f}x"),
    }
    table = rows.assign(**{"of copy": rows.copy_us / rows.time_us}).sort_values(["kernel", "width", "M"])[[*columns]]
    table.columns = pd.Index([heading for heading, _ in columns.values()])
    table, formats = table.dropna(axis="columns", how="all"), dict(columns.values())  # without peers that nobody has
    return markdown(table, {heading: formats[heading] for heading in table})


def timeline_table(record: Record | None) -> str:
    """Build the tables of the launches of one layer, each with the gap or overlap before it."""
    tables = []
    for model, rows in timelines(record).items():
        table = pd.DataFrame(
            {
                f"{model}, batch {rows.B.iloc[0]}": "`" + rows.face + "`",
                "begins": rows.start_us,
                "lasts": rows.time_us,
                "before it": [
                    f"{abs(gap_us):.2f} µs {'idle' if gap_us > 0 else 'overlapped'}" for gap_us in rows.gap_us
                ],
            }
        )
        formats = {"begins": "{:.2f} µs", "lasts": "{:.2f} µs"}
        note = f"One layer in a graph of several takes {rows.layer_us.iloc[0]:.2f} µs without tracing."
        tables.append(f"{markdown(table, formats)}\n{note}\n")
    return "\n".join(tables) or MISSING


def d64_table(record: Record | None) -> str:
    """Build the table of a layer with heads of 64, its head-related times beside those of as many heads of 128."""
    d128_config = Config.named("LLaMA-3-8B")
    rows_by_measure: dict[str, dict[int, Row]] = {D64: {}, MEASURE: {}}
    for row in record.rows if record else ():
        if row.measure == D64 or (row.measure == MEASURE and config_of(row.sizes) == d128_config):
            rows_by_measure[row.measure][row.sizes["B"]] = row
    lines = []
    for B, row in rows_by_measure[D64].items():
        line: dict[str, Any] = {"batch": B, "time": row.time_us, "of the floor": row.fraction}
        for D, layer_row in ((64, row), (128, rows_by_measure[MEASURE].get(B))):
            figures = layer_row.more if layer_row else {}
            us = figures.get("attention", math.nan)
            line[f"attention, {D}"], line[f"its floor, {D}"] = us, figures.get("floor attention", math.nan) / us
            line[f"rope_append_kv4, {D}"] = figures.get("rope_append_kv4 q", math.nan)
        lines.append(line)
    if record is None or not lines:
        return MISSING
    formats = {
        column: "{:.2f}" if "floor" in column else "{}" if column == "batch" else "{:.1f} µs" for column in lines[0]
    }
    note = (
        f"Time of a {NARROW.name} layer. Attention and `rope_append_kv4`, each alone, for {NARROW.heads} query heads"
        f" and {NARROW.kv_heads} of keys and values: of 64 dimensions, and of 128 ({d128_config.name}), which have 1.9 "
        "times"
        f" the bytes in the cache. Measured on one {record.device['name']}: `python -m benchmarks layer`,"
        f" {record.date[:10]}, commit {record.revision}."
    )
    return f"{markdown(pd.DataFrame(lines), formats)}\n{note}\n"


def epilogues_table(record: Record | None) -> str:
    """Build the table of layers with and without the GEMMs' epilogues: measured time, prediction, faster one."""
    rows = [row for row in record.rows if row.measure == EPILOGUES] if record else []
    if record is None or not rows:
        return MISSING
    no_epilogues, *other_choices = ENDS
    lines: dict[tuple[str, int], dict[Ends, Row]] = {}
    for row in rows:
        config = config_of(
            {size_name: size for size_name, size in row.sizes.items() if size_name not in no_epilogues._fields}
        )
        B = row.sizes["B"]
        line = lines.setdefault((config.name if config else "", B), {})
        line[Ends(*(bool(row.sizes[size_name]) for size_name in no_epilogues._fields))] = row
    table_lines = []
    for (model, B), rows_by_choice in lines.items():
        line_cells: dict[str, Any] = {
            "model": model,
            "batch": B,
            "neither": f"{rows_by_choice[no_epilogues].time_us:.1f} µs",
        }
        for ends in other_choices:
            change_us, predicted = (
                us - rows_by_choice[no_epilogues].time_us
                for us in (rows_by_choice[ends].time_us, rows_by_choice[ends].more["predicted_us"])
            )
            line_cells[_name_epilogues(ends)] = f"{change_us:+.2f} µs (predicted {predicted:+.2f})"
        line_cells["wins"] = _name_epilogues(min(rows_by_choice, key=lambda ends: rows_by_choice[ends].time_us))
        table_lines.append(line_cells)
    table = pd.DataFrame(table_lines)
    note = (
        "Change of a whole layer's time; each in turn, twice, the faster counts. The residual add gives the same bits,"
        f" SiLU·mul others. Measured on one {record.device['name']}: `python -m benchmarks layer --only epilogues`,"
        f" {record.date[:10]}, commit {record.revision}."
    )
    return f"{markdown(table, {})}\n{note}\n"


def _name_epilogues(ends: Ends) -> str:
    """List the epilogues that a choice turns on, or say `neither`."""
    names = [epilogue for epilogue, enabled in zip(("residual add", "SiLU·mul"), ends, strict=True) if enabled]
    return " and ".join(names) or "neither"


def breakdown_figure(record: Record) -> Figure:
    """Plot stacked bars by batch: every operation alone, ours beside the fastest FP8 mix, whose time is 1."""
    rows = points(record)
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    panels = figure.subplots(1, len(DRAWN), sharey=True)
    for axes, model in zip(panels, DRAWN, strict=True):
        model_rows = rows[rows.model == model].set_index("B").reindex(BATCHES)
        _plot_bars(axes, model_rows)
        title(axes, f"{model}: {mean(model_rows[f'over {BESIDE}']):.2f}x the {BESIDE} mix in the mean", size=10)
    panels[0].set_ylabel(f"time, of the {BESIDE} mix's")
    speed = mean(rows[rows.model.isin(DRAWN)][f"over {BESIDE}"])
    finding = f"A decoder layer is {speed:.2f}x as fast as the fastest {BESIDE} mix (geometric mean)"
    figure.suptitle(finding, x=0.01, ha="left", weight="bold", fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    return figure


def _plot_bars(axes: Axes, rows: pd.DataFrame) -> None:
    places, mix_us = np.arange(len(rows)), rows.time_us * rows[f"over {BESIDE}"]
    for bar_offset, label, hatch in ((-0.2, "ptxlab", None), (0.2, f"{BESIDE} mix", "///")):
        bottoms = np.zeros(len(rows))
        for part, colour in PARTS.items():
            us = [_part(row, part, "" if bar_offset < 0 else row[BESIDE]) for _, row in rows.iterrows()]
            heights = np.nan_to_num(np.array(us) / mix_us.to_numpy(dtype=float))
            axes.bar(places + bar_offset, heights, 0.38, bottoms, color=colour, hatch=hatch, edgecolor="white")
            bottoms = bottoms + heights
        axes.bar([0], [0], color=PALE, hatch=hatch, edgecolor=GREY, label=label)
    for part, colour in PARTS.items():
        axes.bar([0], [0], color=colour, label=part)
    marks: dict[str, Any] = {"linestyle": "", "marker": "_", "markersize": 18}
    axes.plot(places - 0.2, rows.time_us / mix_us, color="black", label="as one graph", **marks)
    axes.plot(places - 0.2, rows.floor_us / mix_us, color=GREY, markeredgewidth=2.5, label="floor", **marks)
    for place, (us, speed) in enumerate(zip(rows.time_us, rows[f"over {BESIDE}"], strict=True)):
        if not math.isnan(us * speed):
            axes.text(place, 1.14, f"{us:.{1 if us < 100 else 0}f} µs", ha="center", fontsize=8)
    axes.set_xticks(places, [str(batch) for batch in rows.index])
    axes.set_xlabel("sequences in the batch; above, the time of our layer")
    axes.set_ylim(0, 1.25)
    bare(axes)


def _part(row: pd.Series, part: str, mix: str) -> float:
    """Return the microseconds of a part of our layer, or of a mix; NaN if it was not measured."""
    if not isinstance(row.more, dict) or (not isinstance(mix, str)):
        return math.nan
    return float(row.more.get(f"{mix} {part}_us".strip(), math.nan))


def timeline_figure(record: Record) -> Figure:
    """Plot every launch of one layer on one time axis, a panel per model."""
    launches = timelines(record)
    figure = Figure(figsize=(12, 0.2 + 3 * len(launches)), layout="constrained")
    panels = figure.subplots(len(launches), 1, squeeze=False)[:, 0]
    for axes, (model, rows) in zip(panels, launches.items(), strict=True):
        colours = [PARTS[_part_of(face)] for face in rows.face]
        axes.barh(range(len(rows)), rows.time_us, left=rows.start_us, color=colours, height=0.7)
        for place, row in enumerate(rows.itertuples()):
            if row.gap_us > 0 and place:
                axes.text(row.start_us, place, f"{row.gap_us:.1f} µs idle ", ha="right", va="center", fontsize=7)
        axes.set_yticks(range(len(rows)), [*rows.face], fontsize=8)
        axes.invert_yaxis()
        idle = sum(gap_us for gap_us in rows.gap_us[1:] if gap_us > 0)
        title(axes, f"{model}, batch {rows.B.iloc[0]}: {idle:.1f} µs of {rows.end_us.max():.1f} idle", size=10)
        bare(axes)
    panels[-1].set_xlabel("µs")
    return figure


def _part_of(face: str) -> str:
    return "gemm" if face.startswith("gemm") else "attention" if face.startswith("attention") else "others"
