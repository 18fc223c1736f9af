"""The emulator's speed: the record of `ptxlab bench emulator`, beside one of an older commit."""

import pandas as pd

from ptxlab import bench
from report import RESULTS
from report.frames import MISSING, markdown

RECORD, BEFORE = (RESULTS / "cpu" / name for name in ("emulator.json", "emulator_before.json"))
RATE = "million lane-instructions/s"
CHECKS = {"emulator": "none", "emulator +all": "all"}


def table() -> str:
    """Build the table of whole kernels: emulated lane-instructions per second and time of a call, now and before."""
    if not RECORD.is_file() or not BEFORE.is_file():
        return MISSING
    current_record, earlier_record = bench.load(RECORD), bench.load(BEFORE)
    earlier_rows = {row.key: row for row in earlier_record.rows}
    lines = [
        {
            "kernel": f"`{row.kernel}`",
            "checks": CHECKS[row.measure],
            "ms": row.fastest_us / 1e3,
            RATE: row.rate * row.time_us / row.fastest_us,
            "ms before": earlier_rows[row.key].fastest_us / 1e3,
            "times as fast": earlier_rows[row.key].fastest_us / row.fastest_us,
        }
        for row in current_record.rows
        if row.measure in CHECKS and "lanes" not in row.sizes and row.key in earlier_rows
    ]
    formats = {
        "ms": "{:.0f}",
        RATE: "{:.1f}",
        "ms before": "{:.0f}",
        "times as fast": "{:.2f}",
    }
    note = (
        f"The fastest of seven calls, in CPU time, at commit {current_record.revision}, and before at "
        f"{earlier_record.revision}; two "
        "cores that other work shared. GEMM at M=64, N=128, K=512, Triton's matmul at 128 x 128 x 128."
    )
    return f"{markdown(pd.DataFrame(lines), formats, left=2)}\n{note}\n"
