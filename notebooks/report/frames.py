"""Records as pandas tables, their geometric means, and tables as Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain

import numpy as np
import pandas as pd

from benchmarks.stored import OURS, Place, Stored
from ptxlab import bench
from ptxlab.bench.record import Record, Row
from ptxlab.errors import FileError
from ptxlab.lowbit.bench.shapes import LAYERS, Layer
from report import RESULTS

NOT_RECORDED = "Not measured yet."
MISSING = f"{NOT_RECORDED}\n"
GEMM_PEERS = {  # name -> how tables call it
    "cublas_fp8": "FP8",
    "cublas_int8": "INT8",
    "cublas_fp16": "FP16",
    "fp8_row": "FP8 per row",
    "qserve_w8a8": "QServe W8A8",
    "qserve_w4a8_chn": "QServe per channel",
    "qserve_w4a8_g128": "QServe g128",
    "qqq_w4a8_chn": "QQQ per channel",
    "qqq_w4a8_g128": "QQQ g128",
    "humming_w4a8_chn": "humming per channel",
    "humming_w4a8_g128": "humming g128",
}
ATTENTION_PEERS = {
    "sdpa_flash_f16": "PyTorch flash FP16",
    "sdpa_cudnn_f16": "PyTorch cuDNN FP16",
    "fi_cc_f16": "FlashInfer FP16",
    "fi_tc_f16": "FlashInfer tensor FP16",
    "fi_xqa_f16": "FlashInfer XQA FP16",
    "fi_cc_fp8": "FlashInfer FP8",
    "fi_tc_fp8": "FlashInfer tensor FP8",
    "fi_xqa_fp8": "FlashInfer XQA FP8",
    "qserve_kv8": "QServe KV8",
    "qserve_kv4": "QServe KV4",
    "lserve_kv4": "LServe KV4",
}
_PEERS = GEMM_PEERS | ATTENTION_PEERS
_LIBRARIES = {"cublas": "cuBLAS", "humming": "humming", "sdpa": "PyTorch"}  # first word of a peer's name -> whose it is
_PLACE = ("N", "K", "M", "Hq", "Hkv", "B", "L")  # of a GEMM the first three, of an attention the others
_COLUMNS = [  # that every table has, NaN where no row does
    *(field.name for field in fields(Row)),
    *("N", "K", "M", "g", "hidden", "tokens", "Hq", "Hkv", "B", "L", "T", "H", "R", "bits", "channel"),
    *("packed_bytes", "plain_us", "programmatic_us", "fused_us", "launches", "tensor_pct"),
    *("layer", "model", "best", "over", *(f"over {peer}" for peer in _PEERS)),
]


class NotMeasuredError(FileError):
    """There is no record yet of what a picture shows."""


def load_record(suite: str, gpu: str = "h200") -> Record | None:
    """Load the record of a suite on a GPU, or return None if there is none."""
    path = RESULTS / gpu / f"{suite}.json"
    return bench.load(path) if path.is_file() else None


def frame(
    record: Record | None, measure: str, layers: Sequence[Layer] = LAYERS, stored: Stored | None = None
) -> pd.DataFrame:
    """Return the rows of one measure as a frame, empty if there is no record.

    Peers are those of the record's run, and those in `stored` that it lacks. Columns are the fields of `Row`, the
    sizes, what is in `more`, the matrix among `layers` and its model by name, how many times as fast as each peer a row
    is (`over NAME`), as the fastest one that was measured there (`over`), and which that is (`best`).
    """
    layer_by_size = {(layer.N, layer.K): layer for layer in layers}
    fields_by_row = (
        [_fields_of(row, layer_by_size, stored or {}) for row in record.rows if row.measure == measure]
        if record
        else []
    )
    return pd.DataFrame(fields_by_row, columns=list(dict.fromkeys(chain(_COLUMNS, *fields_by_row))))


def _fields_of(row: Row, by_size: Mapping[tuple[int, int], Layer], stored: Stored) -> dict[str, object]:
    """Return a row of `frame`: what the columns hold, by name."""
    layer = by_size.get((row.sizes.get("N", 0), row.sizes.get("K", 0)))
    stored_peers = {peer: us for peer, us in stored.get(_place_of(row), {}).items() if peer != OURS}
    peers = {**stored_peers, **row.peers}
    ratio_fields = {f"over {peer}": us / row.time_us for peer, us in peers.items()}
    best_peer = min(peers, key=peers.__getitem__, default="")
    layer_columns = {"layer": str(layer), "model": layer.model} if layer else {}
    best_fields = {"best": best_peer, "over": ratio_fields.get(f"over {best_peer}", math.nan)}
    return {**row.more, **vars(row), "peers": peers, **row.sizes, **layer_columns, **ratio_fields, **best_fields}


def _place_of(row: Row) -> Place:
    """Return the sizes by which stored times are found: of a row's GEMM, or of its attention."""
    return tuple(row.sizes[size] for size in _PLACE if size in row.sizes)


def over_all(rows: pd.DataFrame, peers: Iterable[str]) -> pd.Series:
    """Return each row's speed-up over the fastest of some peers; NaN if any of them was not measured."""
    return rows[[f"over {peer}" for peer in peers]].min(axis=1, skipna=False)


def over(rows: pd.DataFrame, peer: str = "") -> pd.Series:
    """Return the speed-ups over a peer, by default over each point's fastest one, without points that lack its time."""
    return rows[f"over {peer}".strip()].dropna()


def slower(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the points at which some peer is faster."""
    return rows[rows["over"] < 1]


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean of the values that are not NaN; NaN if there are none."""
    return math.exp(np.log(pd.Series(values, dtype=float)).mean())


def means(rows: pd.DataFrame, by: str, columns: Sequence[str]) -> pd.DataFrame:
    """Return geometric means of columns, grouped by the values of column `by`, in order of appearance."""
    return np.exp(np.log(rows.set_index(by)[list(columns)].astype(float)).groupby(level=0, sort=False).mean())


def fraction(rows: pd.DataFrame) -> float:
    """Return the geometric mean of the fractions of the floor."""
    return mean(rows.fraction)


def markdown(table: pd.DataFrame, formats: Mapping[str, str] | None = None, left: int = 1, text: str = "") -> str:
    """Format a table as Markdown, each column in its format, `{}` by default; cells of NaN stay empty.

    The first `left` columns are text and so is the one named `text`; the others are numbers.
    """
    forms = [(formats or {}).get(column, "{}") for column in table]
    rule = ["---" if n < left or column == text else "---:" for n, column in enumerate(table)]
    lines = (
        ["" if pd.isna(cell) else form.format(cell) for form, cell in zip(forms, line, strict=True)]
        for line in table.itertuples(index=False, name=None)
    )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (map(str, table), rule, *lines))


def cells(rows: pd.DataFrame) -> list[str]:
    """Format a cell per row: time, fraction of the floor, and speed-up over the fastest peer, with that peer's name."""
    return [
        f"{us:.{1 if us < 100 else 0}f} µs, {floor_fraction:.2f}"
        + (f", **{speed:.2f}x** {_PEERS[best_peer]}" if best_peer else "")
        for us, floor_fraction, speed, best_peer in zip(
            rows.time_us, rows.fraction, rows["over"], rows.best, strict=True
        )
    ]


def mean_cell(rows: pd.DataFrame) -> str:
    """Format the geometric means of the fraction of the floor and of the speed-up over all peers; empty if no rows."""
    speed = mean(rows["over all"])
    return "" if rows.empty else f"{fraction(rows):.2f}" + ("" if math.isnan(speed) else f", **{speed:.2f}x**")


def slower_points(rows: pd.DataFrame, place: str) -> str:
    """List the points at which some peer is faster, in a sentence; `place` formats a point from its columns."""
    slow_rows = slower(rows).to_dict("records")
    descriptions = "; ".join(f"{place.format(**row)} ({row['over']:.2f}x {_PEERS[row['best']]})" for row in slow_rows)
    return f"Slower than a peer: {descriptions}." if slow_rows else "No peer is faster at any point."


def origin_of_peers(record: Record, measure: str, stored: Stored) -> str:
    """Say which peers ran with the record and which earlier, and compare the times of those that ran in both."""
    rows = [row for row in record.rows if row.measure == measure]
    run_libraries = {_LIBRARIES.get(peer.partition("_")[0], peer): None for row in rows for peer in row.peers}
    time_ratios = {
        (_place_of(row), peer): stored[_place_of(row)][peer] / us
        for row in rows
        for peer, us in row.peers.items()
        if peer in stored.get(_place_of(row), {})
    }
    if not time_ratios:
        return ""
    libraries, ratios = " and ".join(run_libraries), time_ratios.values()
    return (
        f"{libraries} ran beside `ptxlab`. The other peers were timed in one earlier run, also on an H200"
        f" ([peers](notebooks/results/h200/peers/README.md)). Times of {libraries} in that run are {mean(ratios):.2f}"
        f" of those in this one (geometric mean; {min(ratios):.2f} to {max(ratios):.2f} at single points)."
    )
