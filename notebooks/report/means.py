"""The README's two tables of means: a GEMM's and attention's speed beside the fastest peer and the floor."""

import statistics
from collections.abc import Iterable

from ptxlab import bench, sources
from ptxlab.bench import attention, headline
from ptxlab.bench.kvshapes import BATCHES, LENGTHS
from ptxlab.bench.record import Row
from ptxlab.bench.shapes import GROUP


def gemm_table() -> str:
    """`gemm_w4a8` by tokens: geometric means over the matrices of LLaMA-2-7B and -70B."""
    rows = [
        row
        for row in _recorded("gemm")
        if (row.measure, row.activations, row.sizes.get("g")) == (headline.MEASURE, headline.ORDER, GROUP)
    ]
    return _table("tokens M", "M", rows)


def attention_table() -> str:
    """`attention_kv4` by batch size: geometric means over heads and lengths that every peer was measured at."""
    rows = [
        row
        for row in _recorded("attention")
        if row.measure == attention.MEASURE and row.sizes["B"] in BATCHES and row.sizes["L"] in LENGTHS
    ]
    return _table("batch", "B", rows)


def _recorded(suite: str, gpu: str = "h200") -> tuple[Row, ...]:
    """The rows of a suite's record; none where it was not recorded."""
    path = sources.results_dir() / gpu / f"{suite}.json"
    return bench.load(path).rows if path.is_file() else ()


def _table(label: str, size: str, rows: Iterable[Row]) -> str:
    """One line per value of a size, one mean per cell; a size that no peer was measured at has no speed-up."""
    by_size: dict[int, list[Row]] = {}
    for row in rows:
        by_size.setdefault(row.sizes[size], []).append(row)
    lines = [f"| {label} | speed-up over the fastest peer | fraction of the floor |", "| ---: | ---: | ---: |"]
    for value, group in sorted(by_size.items()):
        speedups = [min(row.peers.values()) / row.time_us for row in group if row.peers]
        speedup = f"{statistics.geometric_mean(speedups):.2f}x" if speedups else ""
        lines.append(f"| {value:,} | {speedup} | {statistics.geometric_mean(row.fraction for row in group):.2f} |")
    return "\n".join(lines) + "\n"
