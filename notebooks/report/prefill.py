"""`attention_kv4` of whole chunks as recorded, beside FlashAttention 3: the table, bytes from DRAM, and the picture."""

import math

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.chunks import CONTEXTS, HEADS
from benchmarks.peers_prefill import FA3, FA3_FP8, INT4, SDPA
from benchmarks.prefill import DRAM, MEASURE
from ptxlab.bench.record import Record
from ptxlab.lowbit.bench.shapes import HEAD_DIM
from ptxlab.plot import BLUE, ORANGE, PALE, RED
from report import frames
from report.frames import MISSING, markdown
from report.style import bare, title

PICTURE = "prefill_rates"
PEERS = {FA3: "FA3 FP16", FA3_FP8: "FA3 FP8", SDPA: "PyTorch FP16", INT4: "vLLM INT4"}  # name -> how tables call it
TARGET, FROM_QUERIES = 0.8, 512  # of FA3 FP16's rate; from so many queries on
_LINES = {"ours": ("ours, 4 bits", RED, "^"), FA3: ("FA3 FP16", ORANGE, "s"), FA3_FP8: ("FA3 FP8", BLUE, "o")}


def points(record: Record | None) -> pd.DataFrame:
    """Return the chunks with their TFLOPS: `ours`, and one column for each peer, NaN where it was not measured."""
    rows = [row for row in record.rows if row.measure == MEASURE] if record else []
    rates = [
        {**row.sizes, "us": row.time_us, "floor": row.fraction, "ours": row.rate}
        | {peer: row.operations / row.peers[peer] / 1e6 if peer in row.peers else math.nan for peer in PEERS}
        for row in rows
    ]
    columns = ["T", "C", "Hq", "Hkv", "D", "us", "floor", "ours", *PEERS]
    return pd.DataFrame(rates, columns=columns)


def section() -> str:
    """Build the section on prefill: every chunk beside its peers, bytes from DRAM, the picture if it is recorded."""
    record = frames.load_record("prefill")
    rows = points(record)
    if record is None or record.invalid or rows.empty:
        return MISSING
    table = pd.DataFrame(
        {
            "heads": [f"{r.Hq}/{r.Hkv} of {r.D}" for r in rows.itertuples()],
            "queries": rows["T"],
            "context": rows["C"],
            "time": rows.us,
            "of the floor": rows.floor,
            "TFLOPS": rows.ours,
            **{heading: rows[peer] for peer, heading in PEERS.items()},
            "over FA3 FP16": rows.ours / rows[FA3],
        }
    )
    formats = dict.fromkeys(("TFLOPS", *PEERS.values()), "{:,.0f}")
    formats |= {"queries": "{:,}", "context": "{:,}", "time": "{:,.0f} µs", "of the floor": "{:.2f}"}
    formats["over FA3 FP16"] = "{:.2f}x"
    origin = f"`python -m benchmarks prefill`, {record.device['name']}, commit {record.revision}, {record.date[:10]}."
    picture = f"![TFLOPS by queries and context](notebooks/figures/{PICTURE}.png)"
    parts = (
        markdown(table, formats),
        f"{origin} {target(rows)}\n",
        *failure_lines(record),
        bytes_table(),
        f"{picture}\n",
    )
    return "\n".join(parts)


def target(rows: pd.DataFrame) -> str:
    """Say how many chunks reach `TARGET`, of those with heads of 128 beside FlashAttention 3; and the slowest."""
    ratios = (rows.ours / rows[FA3])[(rows.D == HEAD_DIM) & (rows["T"] >= FROM_QUERIES)].dropna()
    verdict_note = f"{(ratios >= TARGET).sum()} of {len(ratios)} chunks of {FROM_QUERIES:,} queries or more meet it"
    return f"Target: {TARGET:.2f} of FA3 FP16's rate; {verdict_note}, the slowest has {ratios.min():.2f}."


def failure_lines(record: Record) -> list[str]:
    """Say for each chunk whose peers failed which they are, and why; one line each."""
    failed = [(row.sizes, row.checked.partition("left out: ")[2]) for row in record.rows]
    return [
        f"Left out with {sizes['T']:,} queries behind {sizes['C']:,} tokens (heads {sizes['Hq']}/{sizes['Hkv']} of"
        f" {sizes['D']}): `{reasons}`.\n"
        for sizes, reasons in failed
        if reasons
    ]


def bytes_table() -> str:
    """Build the table of bytes that ours and FlashAttention 3 move from and to device memory."""
    record = frames.load_record("prefill_bytes")
    rows = [row for row in record.rows if row.measure == DRAM] if record and not record.invalid else []
    if not rows:
        return MISSING
    table = pd.DataFrame(
        {
            "heads": f"{row.sizes['Hq']}/{row.sizes['Hkv']}",
            "queries": row.sizes["T"],
            "context": row.sizes["C"],
            "MB, ours": row.more["dram_bytes"] / 1e6,
            "MB, FA3 FP16": row.more[f"{FA3}_dram_bytes"] / 1e6,
            "ours over FA3": row.more["over_fa3"],
        }
        for row in rows
    )
    megabytes = dict.fromkeys(("MB, ours", "MB, FA3 FP16"), "{:,.1f}")
    return markdown(table, {"queries": "{:,}", "context": "{:,}", **megabytes, "ours over FA3": "{:.2f}"})


def rates_figure(rows: pd.DataFrame) -> Figure:
    """Plot TFLOPS over the number of queries: a row of panels for heads, one panel for each context."""
    rows = rows[rows.D == HEAD_DIM]
    figure = Figure(figsize=(13, 7.2), layout="constrained")
    panels = figure.subplots(len(HEADS), len(CONTEXTS), sharex=True, sharey=True, squeeze=False)
    for panel_row, (Hq, Hkv) in zip(panels, HEADS, strict=True):
        for axes, context in zip(panel_row, CONTEXTS, strict=True):
            head_rows = rows[(rows.Hq == Hq) & (rows.Hkv == Hkv) & (context == rows.C)].sort_values("T")
            for peer, (label, colour, marker) in _LINES.items():
                axes.plot(head_rows["T"], head_rows[peer], color=colour, marker=marker, label=label)
            axes.set_xscale("log", base=2)
            axes.grid(axis="y", color=PALE, linewidth=0.6)
            title(axes, f"heads {Hq}/{Hkv}, context {context:,}", size=9)
            bare(axes)
        panel_row[0].set_ylabel("TFLOPS")
    panels[0, 0].set_ylim(bottom=0)  # for all panels, which share the axis; set after all lines, as it ends autoscaling
    for axes in panels[-1]:
        axes.set_xlabel("queries")
    longer_rows = rows[rows["T"] > rows["T"].min()]
    share = frames.mean(longer_rows.ours / longer_rows[FA3])
    finding = f"attention_kv4 over a 4-bit cache reaches {share:.2f} of FlashAttention 3's FP16 rate (geometric mean)"
    figure.suptitle(finding, x=0.01, ha="left", weight="bold", fontsize=11)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure
