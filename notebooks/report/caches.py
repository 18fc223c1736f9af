"""Perplexity by the format of the KV cache, as `ptxlab accuracy --only 'cache/*'` recorded it: table and picture."""

import pandas as pd
from matplotlib.figure import Figure

from ptxlab.plot import BLUE, GREY, ORANGE, PURPLE, RED
from report import accuracy, attention
from report.frames import ATTENTION_PEERS, MISSING, markdown
from report.style import bare, title

PLACE = {"Hq": 32, "Hkv": 8, "B": 64, "L": 4096}  # of the decode step whose time stands in the table
OURS = ("KV4", "KV4, SmoothAttention")  # run on the attention kernel of plain KV4 as it is
ROTATED = ("KV4, keys rotated", "KV4, keys rotated, SmoothAttention", "KV4, rotation")  # on that of rotated caches
UNRECORDED = (*ROTATED, "KV8")  # unless the record of rotation has `PLACE`
PEERS = {"float32": "f16", "FP8 e4m3, scale 1": "fp8"}  # rows whose time is that of the fastest such peer
COLOURS = {"KV4, keys rotated": BLUE, "KV4": ORANGE, "KIVI": PURPLE, "K8V4": RED}  # by the beginning of a row's name


def load_record() -> accuracy.Accuracy | None:
    """Read the record of the cache's rows, if there is one."""
    return accuracy.load_record("accuracy_cache.json")


def points(accuracy_record: accuracy.Accuracy | None) -> pd.DataFrame:
    """Return a row per format, the float cache first: `step`, `cache_bytes` of a token, `perplexity`, `ratio`, `time`.

    The perplexity is that of the record's first text, `ratio` to floats; `time` is text (`decode_times`).
    """
    recorded_rows = (
        [row for row in accuracy_record.record["rows"] if row["ladder"] in ("float", "cache")]
        if accuracy_record
        else []
    )
    times = decode_times()
    table = [
        (row["step"], row["cache_bytes"], next(iter(row["perplexity"].values())), times.get(row["step"], "no kernel"))
        for row in recorded_rows
    ]
    frame = pd.DataFrame(table, columns=["step", "cache_bytes", "perplexity", "time"])
    return frame.assign(ratio=frame.perplexity / frame.perplexity.iloc[0] if recorded_rows else [])


def decode_times() -> dict[str, str]:
    """Return the time of a decode step's attention by format: of this project's kernel, or of the fastest peer."""
    times = dict.fromkeys(UNRECORDED, "not recorded")
    if (rotated := attention.rotated_us(PLACE)) is not None:
        times |= dict.fromkeys(ROTATED, f"{rotated:.0f} µs")
    measured = attention.points(attention.load_record())
    measured = measured[(measured[list(PLACE)] == list(PLACE.values())).all(axis=1)]
    if measured.empty:
        return times
    row = measured.iloc[0]
    times |= dict.fromkeys(OURS, f"{row.time_us:.0f} µs")
    for step, ending in PEERS.items():
        us_by_peer = {peer: us for peer, us in row.peers.items() if peer.endswith(ending)}
        if us_by_peer:
            fastest_peer = min(us_by_peer, key=us_by_peer.__getitem__)
            times[step] = f"{us_by_peer[fastest_peer]:.0f} µs, {ATTENTION_PEERS[fastest_peer]}"
    return times


def section() -> str:
    """Return the table, what its figures are of, and the picture."""
    accuracy_record = load_record()
    rows = points(accuracy_record)
    if accuracy_record is None or rows.empty:
        return MISSING
    table = rows[["step", "cache_bytes", "perplexity", "ratio", "time"]].astype(object)
    table.columns = pd.Index(["cache", "bytes per token", "perplexity", "of float32", "attention of a decode step"])
    formats = dict(zip(table, ("{}", "{:,.0f}", "{:.2f}", "{:.3f}x", "{}"), strict=True))
    text = markdown(table, formats, text="attention of a decode step")
    note = (
        "Bytes of a token in all layers, with scales and zeros; float32 is counted as FP16. `rotation` is of keys and"
        " values. Times on one H200: 64"
        f" sequences of {PLACE['L']:,} tokens, heads {PLACE['Hq']}/{PLACE['Hkv']} of 128, without the append."
    )
    picture = "![Perplexity by bytes](notebooks/figures/accuracy_cache.png)"
    return f"{text}\n{note} {accuracy.origin(accuracy_record)}\n\n{picture}\n"


def cache_figure(accuracy_record: accuracy.Accuracy) -> Figure:
    """Plot how far each format's perplexity lies above that of floats, with the bytes of a token."""
    rows = points(accuracy_record).iloc[::-1]
    figure = Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    colours = [
        next((colour for prefix, colour in COLOURS.items() if step.startswith(prefix)), GREY) for step in rows.step
    ]
    bars = axes.barh(rows.step, 100 * (rows.ratio - 1), color=colours, height=0.6)
    axes.bar_label(bars, [f"{size:,.0f} bytes" for size in rows.cache_bytes], padding=4, fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel("perplexity above that of float32, %; bytes of a token in the cache of all layers")
    title(axes, _finding(rows))
    bare(axes)
    return figure


def _finding(rows: pd.DataFrame) -> str:
    ratio = rows.set_index("step").ratio
    kv4_ratio, rotated_ratio = ratio.get("KV4"), ratio.get("KV4, keys rotated")
    if kv4_ratio is None or rotated_ratio is None:
        return "Perplexity by the bytes of a token in the cache"
    return f"Rotated keys: {kv4_ratio:.3f}x of float perplexity becomes {rotated_ratio:.3f}x"
