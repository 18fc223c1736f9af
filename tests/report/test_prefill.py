"""Tables and picture of the suite `prefill`. The record is made up."""

import re

from benchmarks.chunks import CONTEXTS, HEAD_DIM, HEADS, QUERIES
from benchmarks.peers_prefill import FA3
from benchmarks.prefill import MEASURE
from ptxlab.bench.record import Record
from report import prefill
from tests.support import fake_rows

FLOOR, OPERATIONS = 10.0, 6 * 10**9


def record(*, checked: str = "") -> Record:
    """Return rows in which later panels are faster than the first; a peer takes half our time."""
    rows = tuple(
        fake_rows.row(
            FLOOR, 8 / (1 + at), 0, OPERATIONS, kernel="attention_kv4_prefill_sm90", measure=MEASURE, limit="MMA",
            sizes={"T": T, "C": C, "Hq": Hq, "Hkv": Hkv, "D": HEAD_DIM}, peers={FA3: FLOOR * 4 / (1 + at)},
            checked=checked,
        )
        for Hq, Hkv in HEADS
        for at, C in enumerate(CONTEXTS)
        for T in QUERIES
    )  # fmt: skip
    return Record("prefill", {"name": "made-up H200", "slug": "h200", "driver": "0", "sms": 132}, {}, {}, rows)


def test_every_point_of_the_picture_lies_between_its_axes() -> None:
    rows = prefill.points(record())
    figure = prefill.rates_figure(rows)
    limits = {axes.get_ylim() for axes in figure.axes}
    ((bottom, top),) = limits
    assert bottom == 0 and top > rows[["ours", FA3]].max().max()


def test_peers_that_failed_are_named_with_their_reason() -> None:
    assert prefill.failure_lines(record()) == []
    lines = prefill.failure_lines(record(checked="6 queries; left out: fa3_f16: ImportError no module"))
    assert len(lines) == len(HEADS) * len(CONTEXTS) * len(QUERIES)
    assert re.fullmatch(
        r"Left out with 128 queries behind 0 tokens \(heads 32/8 of 128\): `fa3_f16: ImportError no module`\.\n",
        lines[0],
    )


def test_chunks_of_many_queries_are_counted_against_the_target() -> None:
    rows = prefill.points(record())
    chunks = len(HEADS) * len(CONTEXTS) * sum(T >= prefill.FROM_QUERIES for T in QUERIES)
    assert prefill.target(rows) == (
        f"Target: 0.80 of FA3 FP16's rate; 0 of {chunks} chunks of 512 queries or more meet it, the slowest has 0.50."
    )
    rows.loc[rows["T"] == QUERIES[-1], "ours"] *= 1.6
    assert f"; {len(HEADS) * len(CONTEXTS)} of {chunks} chunks" in prefill.target(rows)
