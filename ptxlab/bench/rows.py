"""How every suite makes a `Row` of what it measured."""

from typing import Any

from ptxlab.bench.record import Row
from ptxlab.bench.timing import Measured
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec


def row_of(
    spec: KernelSpec,
    source: Source,
    measure: str,
    sizes: dict[str, int],
    measured: Measured,
    *,
    floor: tuple[float, str],
    checked: str,
    nbytes: int | None = None,
    rate: tuple[float, str] | None = None,
    **further: Any,
) -> Row:
    """The row of one measurement.

    Args:
        spec: the kernel, and its `source`.
        measure: what was measured, `"streaming"` ...
        sizes: symbols of the spec.
        measured: the times.
        floor: microseconds, and what sets them.
        checked: how the results of the timed kernel were checked.
        nbytes: traffic of one call, by default the compulsory one.
        rate: what rows are compared by and its unit, by default the traffic per second.
        further: other fields of `Row` by name; `kernel` where a call launches others too.
    """
    nbytes = spec.bytes_moved(sizes) if nbytes is None else nbytes
    value, unit = rate or (nbytes / measured.us / 1e3, "GB/s")
    floor_us, limit = floor
    return Row(
        source=source.language,
        measure=measure,
        sizes=sizes,
        time_us=measured.us,
        fastest_us=measured.fastest,
        slowest_us=measured.slowest,
        rate=value,
        rate_unit=unit,
        bytes=nbytes,
        floor_us=floor_us,
        fraction=floor_us / measured.us,
        limit=limit,
        sm_mhz=measured.sm_mhz,
        checked=checked,
        **{"kernel": spec.name, "operations": 0, **further},
    )
