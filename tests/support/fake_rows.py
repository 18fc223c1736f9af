"""Rows of records that nobody measured: for the tables, figures and targets that are made of such records."""

from typing import Any

from ptxlab.bench.record import Row
from ptxlab.lowbit import cost

ACCURACY = {  # of a record of `ptxlab accuracy`, without its rows and texts
    "schema": 1,
    "model": "small",
    "start": "mixed",
    "device": "NVIDIA H200",
    "date": "2026-11-23",
    "commit": "0123456789ab",
}
CUBLAS = {"cublas_fp8": 1.7, "cublas_int8": 2.2, "cublas_fp16": 3.1}  # time over our floor


def row(floor: float, slowdown: float, nbytes: int, operations: int = 0, **fields: Any) -> Row:
    """Make up a row that takes `slowdown` times the floor, in microseconds.

    Its rate counts operations, or bytes if there are no operations.
    """
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


def gemm(nbytes: int, operations: int, slowdown: float, **fields: Any) -> Row:
    """Make up the row of a GEMM on an H200, beside cuBLAS."""
    stream = cost.sheet("h200").stream_us(nbytes)
    floor, limit = cost.gemm_floor(stream, operations, "h200")
    peers = {peer: floor * factor for peer, factor in CUBLAS.items()}
    fields = {"limit": limit, "peers": peers, "activations": "row_major", **fields}
    fields["more"] = {"stream_us": stream, "packed_bytes": nbytes, **fields.get("more", {})}
    return row(floor, slowdown, nbytes, operations, **fields)
