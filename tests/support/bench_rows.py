"""A row of a bench record, and rows as a slower run would have measured them."""

from dataclasses import replace

from ptxlab.bench import Row

ROW = Row(
    kernel="dequant_lqq",
    source="ptx",
    measure="streaming",
    sizes={"R": 16384, "K": 16384, "g": 128},
    time_us=100.0,
    fastest_us=99.5,
    slowest_us=101.0,
    rate=4000.0,
    rate_unit="GB/s",
    bytes=407_000_000,
    operations=536_870_912,
    floor_us=95.0,
    fraction=0.95,
    limit="copy 4.26 TB/s",
    sm_mhz=1980.0,
    checked="all",
    more={"registers": 16},
)


def slow_down(row: Row, speed: float) -> Row:
    """Slow a row down to this share of its rate, in every replay."""
    times = {name: getattr(row, name) / speed for name in ("time_us", "fastest_us", "slowest_us")}
    return replace(row, rate=speed * row.rate, fraction=speed * row.fraction, **times)
