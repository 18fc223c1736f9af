"""Perplexity after each step of the recipes, as `ptxlab accuracy` recorded it: points, table and picture."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ptxlab.io.files import read_record
from ptxlab.llm.accuracy.steps import SCHEMA
from ptxlab.plot import BLUE, GREY, ORANGE, RED
from report import RESULTS
from report.frames import MISSING, markdown
from report.style import bare, title

COLOURS = {"channel": ORANGE, "g64": BLUE, "g32": RED}
NAMES = {"channel": "per channel", "g64": "groups of 64", "g32": "groups of 32"}

ORDER = (
    "round to nearest", "rotation", "rotation of heads", "smoothing", "SmoothAttention", "groups", "reordering",
    "clipping", "GPTQ",
)  # fmt: skip


@dataclass(frozen=True)
class Accuracy:
    """A record, and where it lies."""

    path: Path
    record: dict[str, Any]


def load_record(name: str = "h200/accuracy.json") -> Accuracy | None:
    """Read a record of `ptxlab accuracy` at `results/NAME`, or return None; by default that of every ladder's steps."""
    path = RESULTS / name
    return Accuracy(path, read_record(path, "a record of ptxlab accuracy", SCHEMA)) if path.is_file() else None


def points(accuracy_record: Accuracy | None) -> pd.DataFrame:
    """Return one row per step of a ladder: perplexity per text, mean over the calibration seeds, and `ratio`, `spread`.

    `ratio` to floats and `spread` of the seeds are of the first text; the spread is the largest less the smallest, NaN
    for one seed. `bytes` are those that the GEMMs of 1,024 tokens read.
    """
    rows = accuracy_record.record["rows"] if accuracy_record else []
    if not rows:
        return pd.DataFrame(columns=["ladder", "step", "ratio", "spread", "bytes"])
    texts = list(rows[0]["perplexity"])
    perplexities = pd.DataFrame([{"ladder": row["ladder"], "step": row["step"], **row["perplexity"]} for row in rows])
    grouped = perplexities.groupby(["ladder", "step"], sort=False)
    means = grouped.mean().reset_index()
    seeds = grouped[texts[0]]
    spread = (seeds.max() - seeds.min()).where(seeds.count() > 1).to_numpy()
    nbytes = (
        pd.Series([row.get("bytes", math.nan) for row in rows])
        .groupby([perplexities.ladder, perplexities.step], sort=False)
        .mean()
    )
    return means.assign(ratio=means[texts[0]] / means[texts[0]].iloc[0], spread=spread, bytes=nbytes.to_numpy())


def section() -> str:
    """Return the perplexity table, where its figures come from, and the link to the picture, as Markdown."""
    accuracy_record = load_record()
    rows = points(accuracy_record)
    if accuracy_record is None or rows.empty:
        return MISSING
    picture = "" if steps(rows).empty else "\n![Perplexity by step](notebooks/figures/accuracy_steps.png)\n"
    return f"{table(rows)}\n{origin(accuracy_record)}\n{picture}"


def table(rows: pd.DataFrame) -> str:
    """Return points as a table: every text, the first beside floats; the seeds' spread if a row has several."""
    texts = [column for column in rows if column not in ("ladder", "step", "ratio", "spread", "bytes")]
    format_by_column = {"ladder": "{}", "step": "{}", **dict.fromkeys(texts, "{:.2f}"), "ratio": "{:.3f}x"}
    if rows.spread.notna().any():
        format_by_column["spread"] = "{:.2f}"
    columns = rows[[*format_by_column]].astype(object)
    names = {"ratio": "of float32", "spread": "seeds' spread"}
    return markdown(
        columns.rename(columns=names), {names.get(column, column): form for column, form in format_by_column.items()}
    )


def steps_figure(accuracy_record: Accuracy) -> Figure:
    """Plot perplexity after each step of the W4A8KV4 ladders, as QServe's Fig. 16 in another order."""
    rows = steps(points(accuracy_record))
    text = next(iter(accuracy_record.record["rows"][0]["perplexity"]))
    steps_in_order = [step for step in ORDER if (rows.step == step).any()]
    ladders = {ladder: rows[rows.ladder == ladder] for ladder in COLOURS if (rows.ladder == ladder).any()}
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for rank, (ladder, ladder_points) in enumerate(ladders.items()):
        places = [steps_in_order.index(step) for step in ladder_points.step]
        axes.plot(places, ladder_points[text], "o-", color=COLOURS[ladder], label=NAMES[ladder])
        for place, perplexity in zip(places, ladder_points[text], strict=True):
            is_lowest, is_last = rank == len(ladders) - 1, place == len(steps_in_order) - 1
            # At the last step the ladders come close.
            offset, align = ((8, 5 - 9 * rank), "left") if is_last else ((0, -14 if is_lowest else 6), "center")
            axes.annotate(
                f"{perplexity:.2f}", (place, perplexity), offset, textcoords="offset points", ha=align, fontsize=8
            )
    exact = points(accuracy_record)[text].iloc[0]
    axes.axhline(exact, color=GREY, linestyle="--", label=f"float32, {exact:.2f}")
    axes.set_xticks(range(len(steps_in_order)), steps_in_order, rotation=25, ha="right")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.margins(y=0.1)
    axes.set_ylabel(f"perplexity on {text}")
    removed = [
        _removed_share(ladder_points[text], exact) for ladder_points in ladders.values() if len(ladder_points) > 1
    ]
    share = f"{min(removed):.0%} to {max(removed):.0%}" if removed else "part"
    title(axes, f"W4A8KV4: the recipe removes {share} of what rounding to nearest adds")
    axes.legend(frameon=False)
    bare(axes)
    return figure


def _removed_share(values: Any, exact: float) -> float:
    """Return the share of the first step's added perplexity (over the exact one) that the last step removes."""
    first, last = np.asarray(values)[[0, -1]]
    return float((first - last) / (first - exact))


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the points of the W4A8KV4 ladders; return none unless some ladder has steps between its ends."""
    ladder_points = rows[rows.ladder.isin(list(COLOURS))]
    return ladder_points if (ladder_points.ladder.value_counts() > 2).any() else ladder_points[:0]


def origin(accuracy_record: Accuracy) -> str:
    """Describe the record: model, texts and windows, calibration, device, date and commit."""
    record = accuracy_record.record
    windows = "; ".join(f"{text_name}: {W:,} windows of {T:,}" for text_name, (W, T) in record["windows"].items())
    samples, length = record["calibration"]
    return (
        f"{record['model']}, {windows}; calibrated on {samples} samples of {length:,} tokens of other articles; start"
        f" `{record['start']}`. Measured on one {record['device']}: `ptxlab accuracy`, {record['date']}, commit"
        f" {record['commit'][:10]}."
    )
