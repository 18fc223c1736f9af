"""Models in vLLM as recorded, with the plugin and with vLLM's own FP8: the guide's table, and the README's line."""

import pandas as pd

from benchmarks.serving import ARRIVALS, LAUNCHES, PROFILE, SERVING
from benchmarks.serving_arrivals import LIMIT_MS
from benchmarks.serving_engine import BASELINE, MODELS, OURS, Rule
from benchmarks.serving_profile import LONG, PARTS, SHORT
from ptxlab.bench.record import Record, Row
from report import frames
from report.frames import MISSING, markdown

WAYS = {
    BASELINE: "vLLM's FP8, FP8 cache",
    OURS: "ptxlab W4A8, KV4",
    "kv8": "ptxlab W4A8, KV8",
    "head8": "ptxlab W4A8, KV4, head in INT8",
    "int4": "vLLM's FP8, int4 cache",
}
STEPS = Rule().batches
_RATE = f"requests/s at {LIMIT_MS:g} ms a token"
FIRST = MODELS["7B"]  # the model of the README


def section() -> str:
    """Build the table of every model and way of serving, and that of where a step goes if it is recorded.

    A row has the throughput, the steps, the tokens in the cache and the seconds to start.
    """
    record = frames.load_record("vllm")
    if record is None or record.invalid:
        return MISSING
    table = table_of(record)
    formats = {
        "tokens/s": "{:,.0f}",
        "over FP8": "{:.2f}x",
        "tokens in the cache": "{:,.0f}",
        "start": "{:.0f} s",
        _RATE: "{:.1f}",
    }
    steps = {f"step, batch {batch}": "{:.2f} ms" for batch in STEPS}
    rule = f"{Rule().prompts} prompts of {Rule().tokens:,} random tokens at once, {Rule().new} new ones each"
    origin = f"`python -m benchmarks vllm`, {record.device['name']}, commit {record.revision}, {record.date[:10]}"
    versions = f"vLLM {record.versions['vllm']}, PyTorch {record.versions['torch']}"
    throughput = f"{markdown(table, formats | steps)}\n{rule}; prefill is inside. {origin}, {versions}.\n"
    return "\n".join([throughput, *profile_section(record)])


def table_of(record: Record) -> pd.DataFrame:
    """Return one row for each model and way."""
    steps = {(row.kernel, row.sizes["B"]): row.time_us / 1e3 for row in record.rows if row.measure == "step"}
    rows = [row for row in record.rows if row.measure == SERVING]
    rates = {row.kernel: row.rate for row in record.rows if row.measure == ARRIVALS}
    table = pd.DataFrame(
        {
            "model": _model(row),
            "served as": WAYS[_way(row)],
            "tokens/s": row.rate,
            "over FP8": row.more["over_fp8"],
            **{f"step, batch {batch}": steps.get((row.kernel, batch)) for batch in STEPS},
            "tokens in the cache": row.more["cache_tokens"],
            "start": row.more["load_seconds"],
            _RATE: rates.get(row.kernel),
        }
        for row in rows
    )
    return table if rates else table.drop(columns=_RATE)


def profile_section(record: Record) -> list[str]:
    """Build the table of a step's parts, and the sentence that explains it; nothing if none is recorded."""
    rows = [row for row in record.rows if row.measure == PROFILE]
    if not rows:
        return []
    table = pd.DataFrame(
        {
            "batch": row.sizes["B"],
            "served as": WAYS[_way(row)],
            "step": row.time_us,
            **{kind: row.more[kind] for kind in PARTS},
            LAUNCHES: row.more[LAUNCHES],
        }
        for row in sorted(rows, key=lambda row: row.sizes["B"])
    )
    origin = (
        f"Where a step goes, in µs, under PyTorch's profiler: the difference of {LONG} and {SHORT} new tokens. Kernels"
        " that overlap count twice; in `no kernel` the GPU waits for the host, or between kernels."
    )
    return [f"{markdown(table, dict.fromkeys(('step', *PARTS, LAUNCHES), '{:,.0f}'))}\n{origin}\n"]


def headline() -> str:
    """Say in the README how fast a model of 7B is served, as recorded."""
    record = frames.load_record("vllm")
    if record is None or record.invalid:
        return MISSING
    (row,) = [row for row in record.rows if row.measure == SERVING and row.kernel == f"{FIRST} in vLLM, {OURS}"]
    return (
        f"In vLLM {record.versions['vllm']} [`--quantization ptxlab`](notebooks/guide/vllm.md) serves {FIRST} at"
        f" {row.rate:,.0f} tokens/s on one {record.device['name']}: {row.more['over_fp8']:.1f} times as many as vLLM's"
        f" FP8, with {row.more['cache_over_fp8']:.1f} times the tokens in the cache.\n"
    )


def _model(row: Row) -> str:
    return row.kernel.partition(" in vLLM, ")[0]


def _way(row: Row) -> str:
    return row.kernel.partition(" in vLLM, ")[2]
