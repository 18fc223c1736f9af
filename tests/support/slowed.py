"""A row of a record as a slower run would have measured it."""

from dataclasses import replace

from ptxlab.bench import Row


def slowed(row: Row, speed: float) -> Row:
    """At this part of its rate, in every replay."""
    times = {name: getattr(row, name) / speed for name in ("time_us", "fastest_us", "slowest_us")}
    return replace(row, rate=speed * row.rate, fraction=speed * row.fraction, **times)
