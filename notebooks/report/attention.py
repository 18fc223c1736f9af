"""`attention_kv4` as recorded, beside its floor and everyone else: points, tables and the figure."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.stored import Place, stored_attention
from ptxlab import registry
from ptxlab.bench.record import Record
from ptxlab.lowbit.bench.attention import (
    EVEN,
    LADDER,
    MEASURE,
    RAGGED,
    ROTATION_MEASURE,
    ROTATION_PART,
    TABLE1_MEASURE,
    TABLE1_PART,
    TABLE1_STEPS,
    UNROTATED,
    WITH_APPEND,
    append,
    merge,
)
from ptxlab.lowbit.bench.attention.append import POINTS
from ptxlab.lowbit.bench.shapes import BATCHES, HEADS, LENGTHS, LONG
from ptxlab.lowbit.kernels.attention.call import NAME as FACE
from ptxlab.plot import BLUE, ORANGE, PALE, RED
from report import frames
from report.frames import (
    ATTENTION_PEERS,
    MISSING,
    cells,
    fraction,
    frame,
    markdown,
    mean,
    mean_cell,
    origin_of_peers,
    over,
    over_all,
    slower_points,
)
from report.style import bare, title

BITS = {  # of an element of the cache -> peers
    bits: tuple(name for name in ATTENTION_PEERS if name.endswith(endings))
    for bits, endings in {16: ("f16",), 8: ("fp8", "kv8"), 4: ("kv4",)}.items()
}
QSERVE = "qserve_kv4"
_APPENDING = ("qserve_", "lserve_")  # peers whose time has the rotation and the appended token in it
A100_TABLE1 = {  # tokens -> QServe Table 1, on an A100: how many times as fast as KV8 a naive KV4 is, and QServe's
    128: (0.87, 1.29),
    256: (0.86, 1.32),
    512: (0.87, 1.44),
    1024: (0.88, 1.49),
    1536: (0.90, 1.51),
}
TABLE1_COLUMNS = (  # of what is launched: the row's config, and the cache in words
    ({"bits": 8}, "8 bits"),
    ({"bits": 8, "channel": 1}, "8 bits, static"),
    ({"bits": 4}, "4 bits"),
)
A100_US = {  # QServe's steps at 64 x 1024, heads 32/32, on an A100 (QServe §6.4); KV8: TensorRT-LLM's (QServe Table 1)
    "attention_kv8": 420,
    "attention_kv4_naive": 480,
    "attention_kv4_bittrick": 440,
    "attention_kv4_simple": 390,
    "attention_kv4_fp16": 330,
    "attention_kv4_prefetch": 280,
}


def load_record() -> Record | None:
    """Load the record of the suite `attention` on the H200, or return None if there is none."""
    return frames.load_record("attention")


def load_table1_record() -> Record | None:
    """Load the record of `ptxlab bench attention --only table1` on the H200, or return None if there is none."""
    return frames.load_record(f"attention_{TABLE1_PART}")


def table1(record: Record | None) -> str:
    """Build QServe's Table 1 for this GPU, by tokens.

    It has the µs of QServe's three kernels and of `attention_kv4`, and QServe's own ratios.
    """
    rows = frame(record, TABLE1_MEASURE)
    if record is None or rows.empty:
        return MISSING
    step_rows = rows[rows.face != FACE]
    times = {f"`{step}`": step_rows[step_rows.kernel == step].set_index("L").time_us for step in TABLE1_STEPS}
    kv8_us, naive_us, kv4_us = times.values()
    dispatched_rows = rows[rows.face == FACE]
    for config, cache in TABLE1_COLUMNS:
        cache_rows = dispatched_rows[[row_config == config for row_config in dispatched_rows.config]]
        if not cache_rows.empty:
            times[f"`{FACE}`, {cache}"] = cache_rows.set_index("L").time_us
    table = pd.DataFrame(times)
    naive_on_a100, prefetch_on_a100 = zip(*(A100_TABLE1[L] for L in table.index), strict=True)
    table["naive over 8 bits"], table["naive over 8 bits, A100"] = kv8_us / naive_us, naive_on_a100
    table["prefetch over 8 bits"], table["prefetch over 8 bits, A100"] = kv8_us / kv4_us, prefetch_on_a100
    table = table.reset_index(names="tokens")
    formats = {column: "{:.1f}" if "`" in column else "{:.2f}x" for column in table.columns[1:]}
    note = (
        f"µs at 64 sequences, heads 32/32. The A100's ratios are QServe's (QServe Table 1); its 8-bit kernel is"
        f" TensorRT-LLM's, with static scales. Here scales are per token and head; in the column that says static, they"
        f" are per channel. Measured on one {record.device['name']}:"
        f" `ptxlab bench attention --only {TABLE1_PART}`, {record.date[:10]}, commit {record.revision}."
    )
    return f"{markdown(table, formats)}\n{note}\n"


def load_rotation_record() -> Record | None:
    """Load the record of `ptxlab bench attention --only rotation` on the H200, or return None if there is none."""
    return frames.load_record(f"attention_{ROTATION_PART}")


def rotation_table(record: Record | None) -> str:
    """Build the table of what rotation costs: µs with and without, behind an appended token and alone."""
    rows = frame(record, ROTATION_MEASURE)
    if record is None or rows.empty:
        return MISSING
    table = pd.DataFrame(
        {
            "heads": [f"{Hq}/{Hkv}" for Hq, Hkv in zip(rows.Hq, rows.Hkv, strict=True)],
            "sequences": [f"{B} x {L:,}" for B, L in zip(rows.B, rows.L, strict=True)],
            "launches": ["append, attention" if c["appended"] else "attention" for c in rows.config],
            "unrotated": rows[UNROTATED],
            "rotated": rows.time_us,
            "cost of rotation": rows.time_us / rows[UNROTATED] - 1,
        }
    )
    note = (
        f"µs, medians of five readings in turns, on one {record.device['name']}: `ptxlab bench attention --only"
        f" {ROTATION_PART}`, {record.date[:10]}, commit {record.revision}."
    )
    return f"{markdown(table, {'unrotated': '{:.1f}', 'rotated': '{:.1f}', 'cost of rotation': '{:+.1%}'})}\n{note}\n"


def rotated_us(place: Mapping[str, int]) -> float | None:
    """Return the recorded µs of attention alone on a rotated cache at a place, or None."""
    rows = frame(load_rotation_record(), ROTATION_MEASURE)
    if rows.empty:
        return None
    is_alone = ~rows.config.map(lambda config: bool(config["appended"]))
    alone_rows = rows[(rows[list(place)] == list(place.values())).all(axis=1) & is_alone]
    return None if alone_rows.empty else float(alone_rows.time_us.iloc[0])


def points(record: Record | None, measure: str = MEASURE) -> pd.DataFrame:
    """Return the rows of one measure, by default attention alone at all heads, lengths and batches.

    Columns beyond those of `frame`: `heads` by name; `over 16`, `over 8` and `over 4`, the speed-up over the fastest
    peer with a cache of that many bits; `over all`, the speed-up over the fastest of all peers.
    """
    rows = frame(record, measure, stored=_select_stored(measure))
    rows["heads"] = [f"heads {Hq}/{Hkv}" for Hq, Hkv in zip(rows.Hq, rows.Hkv, strict=True)]
    for bits, names in BITS.items():
        rows[f"over {bits}"] = over_all(rows, names)
    return rows.assign(**{"over all": over_all(rows, ATTENTION_PEERS)})


def _select_stored(measure: str) -> dict[Place, dict[str, float]]:
    """Select the stored times of those peers that do the work of a measure, by place."""
    if measure == WITH_APPEND:
        return {
            place: {peer: us for peer, us in times.items() if peer.startswith(_APPENDING)}
            for place, times in stored_attention().items()
        }
    return stored_attention() if measure == MEASURE else {}


def behind_append(record: Record | None) -> pd.DataFrame:
    """Return the points of the same batches, timed right behind the kernel that appends a token to each sequence."""
    return points(record, WITH_APPEND)


def steps(record: Record | None) -> pd.DataFrame:
    """Return the points of every step of the ladder on QServe's batch, in the ladder's order."""
    return points(record, LADDER)


def appends(record: Record | None, tokens: int, scheme: str = "kv4") -> pd.DataFrame:
    """Return the rows of `append_kv4` at a number of tokens: 64 are a decode step, 4096 a prompt."""
    rows = frame(record, append.MEASURE)
    return rows[
        (rows["T"] == tokens) & (rows.bits == int(scheme[2])) & (rows.channel == int(scheme.endswith("channel")))
    ]


def unequal(record: Record | None) -> pd.DataFrame:
    """Return the points of ragged batches, each beside an even batch of as many bytes.

    `even_us` is the time of the even batch, `longer` the ratio of the two times.
    """
    evens = points(record, EVEN).rename(columns={"time_us": "even_us"})[["heads", "even_us"]]
    rows = points(record, RAGGED).merge(evens, on="heads")
    return rows.assign(longer=rows.time_us / rows.even_us)


def main_batches(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the batches at which most peers were measured; at 256 sequences only PyTorch was."""
    return rows[rows.B.isin(BATCHES) & rows.L.isin(LENGTHS)]


def batch_points(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the points of those batches with more than one sequence."""
    return main_batches(rows[rows.B > 1])


def single(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the points of a single long sequence."""
    return rows[(rows.B == 1) & rows.L.isin(LONG)]


def beside_all(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the points at which all peers were measured."""
    return rows[rows["over all"].notna()]


def between(rows: pd.DataFrame, least_us: float, most_us: float = math.inf) -> pd.Series:
    """Return the fractions of the floor of the rows with least_us <= floor < most_us."""
    return rows[(rows.floor_us >= least_us) & (rows.floor_us < most_us)].fraction


def batches_table(record: Record | None) -> str:
    """Build the table of all batches: time, fraction of the floor, and speed-up where all peers were measured."""
    rows = main_batches(points(record))
    if record is None or rows.empty:
        return MISSING
    rows["best"] = rows.best.where(rows["over all"].notna(), "")
    table = rows.assign(cell=cells(rows)).pivot(index=["Hq", "Hkv", "L"], columns="B", values="cell")
    table = table.reindex(index=[(*pair, length) for pair in HEADS for length in LENGTHS], columns=BATCHES)
    table.index = pd.Index([f"heads {Hq}/{Hkv}, {length} tokens" for Hq, Hkv, length in table.index], name="")
    table.loc["**mean**"] = [mean_cell(rows[batch == rows.B]) for batch in BATCHES]
    return f"{markdown(table.add_prefix('batch ').reset_index())}\n{_origin(record)}\n"


def means_table(record: Record | None) -> str:
    """Build the table of means from batch 16 on, one row per heads.

    A row has the fraction of the floor, the speed-up over each kind of peer, and with an appended token over QServe.
    """
    rows, with_append = batch_points(points(record)), batch_points(behind_append(record))
    if rows.empty:
        return MISSING
    lines = []
    for heads in (f"heads {Hq}/{Hkv}" for Hq, Hkv in HEADS):
        head_rows = rows[rows.heads == heads]
        lines.append(
            {
                "batch 16 and more, means": heads,
                "of the floor": fraction(head_rows),
                "programmatic launches": mean(head_rows.floor_us / head_rows.programmatic_us),
                "over the best peer": mean(head_rows["over all"]),
                "over the best 8-bit peer": mean(head_rows["over 8"]),
                "append + attention over QServe KV4": mean(over(with_append[with_append.heads == heads], QSERVE)),
            }
        )
    table = pd.DataFrame(lines)
    formats = dict(zip(table.columns[1:], ("{:.2f}", "{:.2f}", "{:.2f}x", "{:.2f}x", "{:.2f}x"), strict=True))
    return f"{markdown(table, formats)}\n{slower_points(points(record), '{heads}, {B} x {L}')}\n"


def single_table(record: Record | None) -> str:
    """Build the table of single long sequences, heads by number of tokens."""
    rows = single(points(record))
    if rows.empty:
        return MISSING
    table = rows.assign(cell=cells(rows)).pivot(index="heads", columns="L", values="cell")
    table = table.reindex(index=[f"heads {Hq}/{Hkv}" for Hq, Hkv in HEADS], columns=LONG)
    table.columns = pd.Index([f"{length >> 10}k tokens" for length in LONG])
    return markdown(table.rename_axis("one sequence").reset_index())


def steps_table(record: Record | None) -> str:
    """Build the table of the ladder's steps: times on an A100 (QServe's ablation) and here, then the later steps."""
    rows = steps(record)
    if rows.empty:
        return MISSING
    a100_us = rows.kernel.map(A100_US)
    table = pd.DataFrame(
        {
            "kernel": "`" + rows.kernel + "`",
            "shows": [registry.find(kernel)[0].summary for kernel in rows.kernel],
            "A100 (QServe)": a100_us / 1e3,
            "over naive": A100_US["attention_kv4_naive"] / a100_us,
            "here": rows.time_us / 1e3,
            "over naive here": rows[rows.kernel == "attention_kv4_naive"].time_us.max() / rows.time_us,
            "of the floor": rows.fraction,
        }
    )
    formats = dict(zip(table, ("{}", "{}", "{:.2f} ms", "{:.2f}x", "{:.3f} ms", "{:.2f}x", "{:.2f}"), strict=True))
    note = "64 sequences of 1024 tokens, 32 heads; the A100's times are the paper's, its KV8 is TensorRT-LLM's."
    return f"{markdown(table, formats, left=2).replace('over naive here', 'over naive')}\n{note}\n"


def others_table(record: Record | None) -> str:
    """Build the table of ragged batches, appended tokens, and parts that a second kernel combines."""
    lines: list[tuple[str, float, float, str]] = [
        (f"ragged, {r.heads}: log-uniform up to 8192 tokens beside even lengths", r.time_us, r.even_us, ".1f")
        for r in unequal(record).itertuples()
    ]
    for tokens, label in POINTS:
        for r in appends(record, tokens).itertuples():
            key_form = "rotated" if r.R else "as it is"
            label = f"append, {label} of {tokens} tokens, {r.H} heads, k {key_form}, beside a copy"
            lines.append((label, r.time_us, r.floor_us, ".2f"))
    for r in points(record, merge.MEASURE).itertuples():
        label = f"merged by a second kernel, {r.heads}, {r.B} x {r.L}, beside one launch"
        lines.append((label, r.time_us, r.fused_us, ".1f"))
    formatted_lines = [
        (label, f"{us:{form}} µs", f"{reference_us:{form}} µs", f"{us / reference_us:.2f}")
        for label, us, reference_us, form in lines
    ]
    return markdown(pd.DataFrame(formatted_lines, columns=["", "time", "beside", "ratio"])) if lines else MISSING


def _origin(record: Record) -> str:
    """Describe how the figures were measured and checked, and name the record they come from."""
    return (
        "Head dim 128, FP16, pages of 64 tokens in random order. Every result is compared with float64 and may differ"
        " by as much as the kernel's roundings can add up to. Measured on one"
        f" {record.device['name']}: `python -m benchmarks attention`,"
        f" {record.date[:10]}, commit {record.revision}, read ceiling {record.ceilings['read_tbps']:.2f} TB/s."
        f" {origin_of_peers(record, MEASURE, stored_attention())}"
    )


_STYLES: dict[int, dict[str, Any]] = {
    16: {"color": ORANGE, "marker": "s", "linestyle": "--"},
    8: {"color": BLUE, "marker": "o"},
    4: {"color": RED, "marker": "^", "linestyle": ":"},
}


def speedup_figure(rows: pd.DataFrame) -> Figure:
    """Plot the speed-up over the best peer with each cache width, by batch; a panel for heads and length."""
    rows = beside_all(rows)
    batches = sorted(rows.B.unique())
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    panels = figure.subplots(len(LENGTHS), len(HEADS), sharex=True, sharey=True)
    for (line, column), axes in np.ndenumerate(panels):
        heads, length = HEADS[column], LENGTHS[line]
        panel_rows = rows[(rows.Hq == heads[0]) & (rows.Hkv == heads[1]) & (length == rows.L)]
        _panel(axes, panel_rows.set_index("B").reindex(batches))
        title(axes, f"{heads[0]} query heads, {heads[1]} KV heads, {length:,} tokens", size=10)
        if column == 0:
            axes.set_ylabel("time of the best peer / time")
        if line == len(LENGTHS) - 1:
            axes.set_xlabel("sequences in the batch")
    means = {bits: mean(rows[f"over {bits}"]) for bits in BITS}
    figure.suptitle(
        f"attention_kv4 is {means[16]:.1f}x as fast as the best FP16 kernel, {means[8]:.1f}x as the best 8-bit and "
        f"{means[4]:.1f}x as the best 4-bit one (geometric means)",
        x=0.01,
        ha="left",
        weight="bold",
        fontsize=11,
    )
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    for bits, names in BITS.items():
        axes.plot(
            rows[f"over {bits}"].to_numpy(), label=f"over the best of {len(names)} with {bits} bits", **_STYLES[bits]
        )
    axes.axhline(1, color="black", linewidth=0.8, label="as fast as the peer")
    axes.set_xticks(range(len(rows)), [str(batch) for batch in rows.index])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    bare(axes)
