"""A row of a record that nobody measured: for the tables, figures and targets that are made of such records."""

from typing import Any

from ptxlab.bench.record import Row


def row(floor: float, slowdown: float, nbytes: int, operations: int = 0, **fields: Any) -> Row:
    """`slowdown` times the floor, in microseconds, at a rate of operations, or of bytes where there are none."""
    time = floor * slowdown
    return Row(
        time_us=time,
        fastest_us=time,
        slowest_us=time,
        bytes=nbytes,
        operations=operations,
        floor_us=floor,
        fraction=floor / time,
        **{
            "source": "cu",
            "rate": operations / time / 1e6 if operations else nbytes / time / 1e3,
            "rate_unit": "TOPS" if operations else "GB/s",
            "sm_mhz": 1755.0,
            "checked": "nothing: this row is made up",
            **fields,
        },
    )
