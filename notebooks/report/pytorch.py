"""PyTorch users' figures: the record of `python -m benchmarks torch`."""

import pandas as pd

from report import frames
from report.frames import MISSING, markdown

_OWN = "W4A8KV4"


def table() -> str:
    """Build the tables of the PyTorch operators.

    They show tokens/s of `generate` by batch beside FP16 and FP8, and the host time of every operator beside one that
    allocates.
    """
    record = frames.load_record("torch")
    if record is None or record.invalid:
        return MISSING
    calls = [row for row in record.rows if row.measure == "host time"]
    steps = [row for row in record.rows if len(row.peers) == 2]  # ours
    rates = pd.DataFrame(
        {"batch": row.sizes["B"], _OWN: row.rate}
        | {mode: row.rate * row.time_us / us for mode, us in row.peers.items()}
        for row in steps
    )
    for mode in steps[0].peers:
        rates[f"over {mode}"] = rates[_OWN] / rates[mode]
    formats = {column: "{:.2f}x" if column.startswith("over") else "{:,.0f}" for column in rates}
    hosts = pd.DataFrame(
        {"operator": f"`{row.kernel}`", "us": row.time_us, "that only allocates": row.floor_us} for row in calls
    )
    hosts["beyond"] = hosts["us"] - hosts["that only allocates"]
    us = dict.fromkeys(("us", "that only allocates", "beyond"), "{:.0f}")
    origin = f"`python -m benchmarks torch`, {record.device['name']}, commit {record.revision}, {record.date[:10]}."
    return (
        f"Tokens/s of `generate`, {steps[0].kernel}'s shape with random weights, compiled, prompts of "
        f"{steps[0].sizes['prompt']} tokens:\n\n{markdown(rates, formats)}\n"
        f"Microseconds of the host for a call of an operator, median:\n\n{markdown(hosts, us)}\n{origin}\n"
    )
