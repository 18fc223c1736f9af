"""What KV4 attention did, as nobody measured it: for the tables, figures and targets made of records of the suite."""

from collections.abc import Iterator
from typing import Any

from benchmarks.stored import stored_attention
from ptxlab.bench.record import Record, Row
from ptxlab.lowbit.bench import attention
from ptxlab.lowbit.bench.attention import append, merge
from ptxlab.lowbit.bench.attention.problem import scheme_of
from ptxlab.lowbit.bench.shapes import HEADS, Batch, batches, even_batch_like, ragged_batch
from ptxlab.lowbit.kernels.attention.steps import STEPS
from tests.support import fake_rows

SLOWDOWN = 1.04  # time over the floor, of all that is ours
EARLY = 1.02  # the same, launched before the launch before has ended
READ, COPY = 4.6, 4.2  # TB/s


def row(measure: str, sizes: dict[str, int], nbytes: int, slowdown: float, tbps: float = READ, **fields: Any) -> Row:
    fields = {"kernel": "attention_kv4_sm90", "limit": "read", **fields}
    return fake_rows.row(nbytes / tbps / 1e6, slowdown, nbytes, measure=measure, sizes=sizes, **fields)


def batch_row(measure: str, batch: Batch, slowdown: float = SLOWDOWN, scheme: str = "kv4", **fields: Any) -> Row:
    return row(measure, batch.sizes, batch.kv_bytes(scheme), slowdown, **fields)


def batch_rows(batch: Batch) -> Iterator[Row]:
    """Make up a batch's rows.

    PyTorch took 2% longer than when the other peers were stored, and 10% longer at 128 sequences.
    """
    slower = 1.1 if len(batch.lengths) == 128 else 1.02
    peers = {"sdpa_flash_f16": slower * stored_attention().get(batch.place, {}).get("sdpa_flash_f16", 1e4)}
    early = {attention.PROGRAMMATIC: batch_row("", batch).floor_us * EARLY}
    yield batch_row("attention", batch, peers=peers, more=early, face="attention_kv4")
    yield batch_row(attention.WITH_APPEND, batch, 1.1, more={"plain_us": 1.0}, face="attention_kv4")


def rows() -> Iterator[Row]:
    for pair in HEADS:
        for batch in batches(pair):
            yield from batch_rows(batch)
        uneven = ragged_batch(pair)
        yield batch_row(attention.RAGGED, uneven, 1.2, face="attention_kv4")
        yield batch_row(attention.EVEN, even_batch_like(uneven), 1.1, face="attention_kv4")
    for place, step in enumerate(STEPS):
        yield batch_row(attention.LADDER, attention.ABLATION, 8 - place, scheme_of(step), kernel=step.spec.name)
    for batch in merge.BATCHES:
        yield batch_row(
            merge.MEASURE, batch, 1.5, kernel="attention_kv4_mma_sm80, attention_merge", more={"fused_us": 10.0}
        )
    for heads in append.HEADS:
        for tokens, _ in append.POINTS:
            for rotated in (True, False):
                sizes = {"T": tokens, "H": heads, "bits": 4, "channel": 0, "R": tokens * rotated}
                nbytes = append.moved_bytes(tokens, heads, "kv4", rotated)
                yield row("append", sizes, nbytes, 1.2, COPY, kernel="append_kv4")


def record() -> Record:
    device = {"name": "NVIDIA H200", "slug": "h200"}
    ceilings = {"read_tbps": READ, "copy_tbps": COPY}
    return Record(
        "attention", device, {}, ceilings, tuple(rows()), commit="0123456789abcdef", date="2026-11-20T00:00:00"
    )
