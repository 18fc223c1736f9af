"""`gemm_w4a8` as recorded, beside its floor and everyone else: points and tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.stored import stored_times
from ptxlab.bench.record import Record
from ptxlab.lowbit.bench.gemm import chain, grouped, quantiser, steps
from ptxlab.lowbit.bench.gemm.headline import MEASURE, ORDER, UNTUNED_MEASURE
from ptxlab.lowbit.bench.shapes import (
    ALL_TOKENS,
    CHAINS,
    CHOSEN_EXPERTS,
    EXPERTS,
    FEW_TOKENS,
    GROUP,
    LLAMA,
    MIXTRAL,
    SWEPT,
    UNTUNED,
)
from ptxlab.lowbit.kernels.gemm.strips_tiles import NO_GROUPS
from report.frames import (
    GEMM_PEERS,
    MISSING,
    fraction,
    frame,
    markdown,
    mean,
    means,
    origin_of_peers,
    over,
    over_all,
    slower_points,
)

PLACE = ["N", "K", "M"]
KINDS = {  # column -> how tables call it, and its peers: per channel the error of a weight is 1.4 times as large
    "over g128": ("W4A8, groups of 128", tuple(name for name in GEMM_PEERS if name.endswith("w4a8_g128"))),
    "over channel": ("W4A8 per channel", tuple(name for name in GEMM_PEERS if name.endswith("w4a8_chn"))),
    "over wide": ("FP8, INT8, FP16", tuple(name for name in GEMM_PEERS if "w4a8" not in name)),
    "over all": ("all eleven", tuple(GEMM_PEERS)),
}
_SHOWN_TOKENS = (16, 64, 128, 256, 512)


def points(record: Record | None, group: int = GROUP) -> pd.DataFrame:
    """Return the headline's points: every point of LLaMA-2 with row-major activations, by matrix and tokens.

    The token sums come from the quantiser. `otherwise` has the same points for activations in other orders. Columns
    beyond those of `frame` are those of `KINDS`: the speed-up over the fastest peer of that kind.
    """
    rows = frame(record, MEASURE, LLAMA, stored_times())
    rows = rows[(rows.g.fillna(NO_GROUPS) == group) & (rows.activations == ORDER)]
    rows = rows.assign(**{kind: over_all(rows, names) for kind, (_, names) in KINDS.items()})
    layer_order = {str(layer): number for number, layer in enumerate(LLAMA)}
    return rows.sort_values(
        ["layer", "M"], key=lambda column: column.replace(layer_order) if column.name == "layer" else column
    )


def otherwise(record: Record | None, group: int = GROUP) -> pd.DataFrame:
    """Return the points with other activation orders, or without token sums, beside the headline's time."""
    rows = frame(record, MEASURE, LLAMA)
    rows = rows[(rows.g == group) & (rows.activations != ORDER)]
    return rows.merge(points(record, group)[[*PLACE, "time_us"]], on=PLACE, suffixes=("", "_usual"))


def at_tokens(rows: pd.DataFrame, *tokens: int) -> pd.DataFrame:
    """Select the rows whose number of tokens M is among `tokens`."""
    return rows[rows.M.isin(tokens)]


def chains(record: Record | None) -> pd.DataFrame:
    """Return the chains: the GEMMs of a decoder layer launched in a row, in groups of 128.

    `over_best` is the speed-up over the sum of the best peers' times for each GEMM alone.
    """
    rows = frame(record, chain.MEASURE)
    models = {layers[0].K: layers[0].model for layers in CHAINS}
    rows = rows[rows.g == GROUP].assign(model=lambda table: table.hidden.map(models))
    single_launches = points(record).assign(best_us=lambda table: table["over all"] * table.time_us)
    rows = rows.join(single_launches.groupby(["model", "M"]).best_us.sum(min_count=len(CHAINS[0])), on=["model", "M"])
    return rows.assign(over_best=rows.best_us / rows.time_us)


def experts(record: Record | None) -> pd.DataFrame:
    """Return Mixtral's experts: the loop of single GEMMs beside the grouped kernel where it was measured.

    `gain` is the loop's time over the grouped kernel's.
    """
    key_columns = ["tokens", "N", "K"]
    grouped_rows = frame(record, grouped.MEASURE)[[*key_columns, "time_us", "fraction"]]
    rows = frame(record, grouped.LOOP, MIXTRAL).merge(
        grouped_rows, how="left", on=key_columns, suffixes=("", "_grouped")
    )
    return rows.assign(gain=rows.time_us / rows.time_us_grouped)


def untuned_points(record: Record | None) -> pd.DataFrame:
    """Return the points of other models' matrices, at numbers of tokens that were not tuned."""
    return frame(record, UNTUNED_MEASURE, UNTUNED)


def eight_bit(record: Record | None) -> pd.DataFrame:
    """Return the points of the GEMM with 8-bit weights."""
    return frame(record, steps.W8A8, LLAMA)


def dequantising(record: Record | None, *tokens: int) -> pd.Series:
    """Return the time with 4-bit over that with 8-bit weights, by the same skeleton, at these numbers of tokens."""
    merged_rows = at_tokens(points(record), *tokens).merge(
        eight_bit(record)[[*PLACE, "time_us"]], on=PLACE, suffixes=("", "_8")
    )
    return merged_rows.time_us / merged_rows.time_us_8


def reordering(record: Record | None) -> pd.DataFrame:
    """Return the quantiser's rows for every size and order; `ratio` is the time over that of the row-major order."""
    rows, key_columns = frame(record, quantiser.MEASURE), ["M", "K"]
    row_major_times = rows[rows.activations == "row_major"][[*key_columns, "time_us"]]
    rows = rows.merge(row_major_times, on=key_columns, suffixes=("", "_plain"))
    return rows.assign(ratio=rows.time_us / rows.time_us_plain)


def matrices_table(record: Record | None) -> str:
    """Build the table of matrices: time, fraction of the floor, and speed-up over the best peer of each kind."""
    rows = at_tokens(points(record), *_SHOWN_TOKENS)
    if record is None or rows.empty:
        return MISSING
    lines: list[dict[str, object]] = []
    for row in rows.to_dict("records"):
        line = {"": f"{row['layer']}, {row['N']} x {row['K']}", "M": row["M"]}
        line |= {"µs": f"{row['time_us']:.{1 if row['time_us'] < 100 else 0}f}", "of the floor": row["fraction"]}
        lines.append(line | {heading: _over_best(row, names) for heading, names in _kinds_apart()})
    for M in _SHOWN_TOKENS:
        token_rows = at_tokens(rows, M)
        line = {"": "**mean**", "M": M, "µs": "", "of the floor": fraction(token_rows)}
        lines.append(line | {KINDS[kind][0]: _times(mean(token_rows[kind])) for kind in KINDS if kind != "over all"})
    return f"{markdown(pd.DataFrame(lines), {'of the floor': '{:.2f}'})}\n{_origin(record)}\n"


def means_table(record: Record | None) -> str:
    """Build the table of means by tokens, and over all up to 256: fraction of the floor, speed-up over peers."""
    rows, rows_g64 = points(record), points(record, group=64)
    if rows.empty:
        return MISSING
    lines = [
        {
            "M": label,
            "of the floor": fraction(token_rows),
            "in groups of 64": fraction(at_tokens(rows_g64, *tokens)),
            **{f"over {heading}": mean(token_rows[kind]) for kind, (heading, _) in KINDS.items()},
            "over cuBLAS FP8": mean(over(token_rows, "cublas_fp8")),
            "slower than a peer": f"{(token_rows['over'] < 1).sum()} of {len(token_rows)}",
        }
        for label, tokens in [
            *((str(M), (M,)) for M in ALL_TOKENS),
            (f"{FEW_TOKENS[0]} to {FEW_TOKENS[-1]}", FEW_TOKENS),
        ]
        for token_rows in [at_tokens(rows, *tokens)]
    ]
    table = pd.DataFrame(lines)
    formats = {column: "{:.2f}x" if column.startswith("over") else "{:.2f}" for column in table.columns[1:-1]}
    note = "Means of the points where all of these peers were measured."
    return f"{markdown(table, formats)}\n{note} {slower_points(rows, '{layer}, M = {M}')}\n"


def per_channel_table(record: Record | None) -> str:
    """Build the table of weights per channel by tokens.

    A row has the fraction of the floor, and the speed-up over weights in groups and over a peer's weights per channel.
    """
    rows = points(record, group=NO_GROUPS).merge(
        points(record)[[*PLACE, "time_us"]], on=PLACE, suffixes=("", "_in_groups")
    )
    if rows.empty:
        return MISSING
    lines = []
    for M in ALL_TOKENS:
        token_rows = at_tokens(rows, M)
        gain = token_rows.time_us_in_groups / token_rows.time_us
        speedup_over_humming = over(token_rows, "humming_w4a8_chn")
        line = {"M": M, "of the floor": fraction(token_rows), f"over groups of {GROUP}": mean(gain)}
        line |= {"over humming per channel": mean(speedup_over_humming)}
        lines.append(line | {"over humming per channel, worst matrix": speedup_over_humming.min()})
    table = pd.DataFrame(lines)
    return markdown(table, {"of the floor": "{:.2f}", **dict.fromkeys(table.columns[2:], "{:.2f}x")}, left=0)


def orders_table(record: Record | None) -> str:
    """Build the table of costs of other activation orders and absent token sums, in the GEMM and in the quantiser."""
    quantised, multiplied = reordering(record), otherwise(record)
    quantised = quantised[quantised.activations != "row_major"]
    multiplied["ratio"] = multiplied.time_us / multiplied.time_us_usual
    ratio_rows = pd.concat([
        quantised.assign(time="quantising: " + quantised.activations.astype(str) + " over row_major"),
        multiplied.assign(time="GEMM: " + multiplied.activations.astype(str) + " over row_major"),
    ])  # fmt: skip
    if ratio_rows.empty:
        return MISSING
    table = means(ratio_rows, "time", ["ratio"]).set_axis(["mean"], axis=1)
    table["at most"] = ratio_rows.groupby("time").ratio.max()
    return markdown(table.reset_index(), {"mean": "{:.3f}", "at most": "{:.3f}"})


def chains_table(record: Record | None) -> str:
    """Build the table of a decoder layer's GEMMs launched in a row."""
    columns = {
        "model": ("model", "{}"),
        "M": ("M", "{}"),
        "time_us": ("µs", "{:.1f}"),
        "plain_us": ("launched plainly, µs", "{:.1f}"),
        "over cublas_fp8": ("over cuBLAS FP8's chain", "{:.2f}x"),
        "over_best": ("over the best peers alone", "{:.2f}x"),
    }
    return _format_columns(chains(record), columns)


def experts_table(record: Record | None) -> str:
    """Build the table of Mixtral's experts: the loop of single GEMMs beside the grouped kernel."""
    rows = experts(record)
    rows["best_fraction"] = rows.fraction_grouped.fillna(rows.fraction)
    columns = {
        "layer": ("matrix", "{}"),
        "tokens": ("tokens", "{}"),
        "launches": ("experts with tokens", f"{{:.0f}} of {EXPERTS}"),
        "time_us": ("loop, µs", "{:.1f}"),
        "time_us_grouped": ("grouped, µs", "{:.1f}"),
        "best_fraction": ("of the floor", "{:.2f}"),
        "gain": ("over the loop", "{:.2f}x"),
    }
    note = f"\nEach token takes {CHOSEN_EXPERTS} of {EXPERTS} experts, at random.\n"
    return _format_columns(rows, columns) + ("" if rows.empty else note)


def _format_columns(rows: pd.DataFrame, shown: dict[str, tuple[str, str]]) -> str:
    """Format columns of `rows` as a table; `shown` maps a column to its heading and format."""
    table = rows[list(shown)].set_axis([heading for heading, _ in shown.values()], axis=1)
    return MISSING if rows.empty else markdown(table, dict(shown.values()))


def untuned_table(record: Record | None) -> str:
    """Build the table of other models at numbers of tokens that were not tuned, one row per model."""
    rows, tuned_rows = untuned_points(record), at_tokens(points(record), *FEW_TOKENS)
    if rows.empty:
        return MISSING
    unswept_rows = rows[[place not in SWEPT for place in zip(rows.N, rows.K, strict=True)]]
    parts = {model: rows[rows.model == model] for model in dict.fromkeys(layer.model for layer in UNTUNED)}
    models = set(parts)
    parts |= {"matrices in no sweep": unswept_rows, "all": rows, f"tuned, M <= {FEW_TOKENS[-1]}": tuned_rows}
    lines = [
        [
            part_name,
            fraction(part_rows),
            mean(fp8 := over(part_rows, "cublas_fp8")),
            fp8.min() if part_name in models else None,
        ]
        for part_name, part_rows in parts.items()
    ]
    table = pd.DataFrame(lines, columns=["", "of the floor", "over cuBLAS FP8, mean", "at least"])
    return markdown(table, {"of the floor": "{:.2f}", "over cuBLAS FP8, mean": "{:.2f}x", "at least": "{:.2f}x"})


def _kinds_apart() -> list[tuple[str, tuple[str, ...]]]:
    return [kind for column, kind in KINDS.items() if column != "over all"]


def _over_best(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Format the speed-up over the fastest of some peers, with its name; empty if any of them was not measured."""
    best_peer = min(names, key=lambda peer: row["peers"].get(peer, math.inf))
    are_all_measured = all(peer in row["peers"] for peer in names)
    peer_name = GEMM_PEERS[best_peer].removesuffix(" per channel").removesuffix(" g128")
    return f"{_times(row[f'over {best_peer}'])} {peer_name}" if are_all_measured else ""


def _times(speed: float) -> str:
    return "" if math.isnan(speed) else f"{speed:.2f}x"


def _origin(record: Record) -> str:
    """Describe how the figures were measured, and name the record they come from."""
    return (
        f"Groups of {GROUP}, FP16 out, {ORDER.replace('_', '-')} activations with their token sums from the quantiser."
        f" Measured on one {record.device['name']}: `python -m benchmarks gemm`, {record.date[:10]}, commit"
        f" {record.revision}. {origin_of_peers(record, MEASURE, stored_times())}"
    )
