"""PyTorch: the record of `ptxlab bench torch`, host times of the operators and `generate` beside FP16 and FP8."""

import pandas as pd

from ptxlab.bench.record import Record
from report.frames import MISSING, markdown

_MODELS = {"": "W4A8KV4", "fp16": "FP16", "fp8": "FP8"}


def host_table(record: Record | None) -> str:
    """Host time of a call, of PyTorch's share in it, and what is left."""
    lines = [
        {
            "operator": f"`{row.kernel}`",
            "us": row.time_us,
            "PyTorch alone, us": row.floor_us,
            "beyond it, us": row.time_us - row.floor_us,
        }
        for row in record.rows if row.measure == "host time"
    ] if record else []  # fmt: skip
    if not record or not lines:
        return MISSING
    note = (
        "Median host time of a call that enqueues its kernel. PyTorch alone: the operator of a schema in Python "
        f"that only allocates the results. {_origin(record)}"
    )
    return f"{markdown(pd.DataFrame(lines), dict.fromkeys(list(lines[0])[1:], '{:.1f}'))}\n{note}\n"


def generate_table(record: Record | None) -> str:
    """Tokens per second of compiled decoding, by batch."""
    rows = [row for row in record.rows if row.measure == "generate"] if record else []
    if not record or not rows:
        return MISSING
    lines, formats = [], {"step, ms": "{:.2f}"}
    for row in rows:
        times = {"": row.time_us, **row.peers}
        rates = {f"{shown}, tokens/s": row.sizes["B"] / times[name] * 1e6 for name, shown in _MODELS.items()}
        over = {f"over {shown}": times[name] / row.time_us for name, shown in list(_MODELS.items())[1:]}
        lines.append({"batch": row.sizes["B"], "step, ms": row.time_us / 1e3, **rates, **over})
        formats |= dict.fromkeys(rates, "{:,.0f}") | dict.fromkeys(over, "{:.2f}x")
    note = (
        f"{rows[0].kernel} with random weights, prompts of {rows[0].sizes['prompt']} tokens, static caches, compiled "
        f"as `generate` does it; wall clock. FP8: E4M3 linears by cuBLAS. {_origin(record)}"
    )
    return f"{markdown(pd.DataFrame(lines), formats)}\n{note}\n"


def _origin(record: Record) -> str:
    return f"`ptxlab bench torch`, {record.device['name']}, {record.date[:10]}, commit {record.revision}."
