"""`attention_kv4` as recorded: every batch beside its floor and everyone else, its ladder, what else was measured."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from ptxlab import bench
from ptxlab.bench.attention import EVEN, LADDER, MEASURE, PROGRAMMATIC, RAGGED, WITH_APPEND, append, merge
from ptxlab.bench.record import Record, Row
from ptxlab.bench.shapes import BATCHES, LENGTHS, LONG
from ptxlab.bench.stored import FACTOR
from report import RESULTS

PEERS = {  # name -> how tables call it
    "sdpa_flash_f16": "PyTorch flash FP16",
    "sdpa_cudnn_f16": "PyTorch cuDNN FP16",
    "fi_cc_f16": "FlashInfer FP16",
    "fi_tc_f16": "FlashInfer tensor FP16",
    "fi_xqa_f16": "FlashInfer XQA FP16",
    "fi_cc_fp8": "FlashInfer FP8",
    "fi_tc_fp8": "FlashInfer tensor FP8",
    "fi_xqa_fp8": "FlashInfer XQA FP8",
    "qserve_kv8": "QServe KV8",
    "lserve_kv8": "LServe KV8",
    "lserve_kv8_mb": "LServe KV8 mb",
    "qserve_kv4": "QServe KV4",
    "lserve_kv4": "LServe KV4",
}
BITS = {  # of an element of the cache -> peers
    bits: tuple(name for name in PEERS if name.endswith(endings))
    for bits, endings in {16: ("f16",), 8: ("fp8", "kv8", "kv8_mb"), 4: ("kv4",)}.items()
}
QSERVE = "qserve_kv4"
A100_US = {  # QServe's steps at 64 x 1024, heads 32/32, on an A100; the baseline is TensorRT-LLM's KV8 (QServe §5.3)
    "attention_kv8": 420,
    "attention_kv4_naive": 480,
    "attention_kv4_bittrick": 440,
    "attention_kv4_simple": 390,
    "attention_kv4_fp16": 330,
    "attention_kv4_prefetch": 280,
}


def recorded(gpu: str = "h200") -> Record | None:
    """The record of the suite on that GPU, if there is one."""
    path = RESULTS / gpu / "attention.json"
    return bench.load(path) if path.is_file() else None


def points(record: Record | None) -> list[Row]:
    """Attention alone, by heads, length and batch; [] of no record."""
    return _of(record, MEASURE)


def behind_append(record: Record | None) -> list[Row]:
    """The same batches, right behind the kernel that appends a token to each sequence."""
    return _of(record, WITH_APPEND)


def steps(record: Record | None) -> list[Row]:
    """Every step of the ladder on QServe's batch, in the ladder's order."""
    return _of(record, LADDER)


def merges(record: Record | None) -> list[Row]:
    """Parts put together by a second kernel."""
    return _of(record, merge.MEASURE)


def appends(record: Record | None, tokens: int, scheme: str = "kv4") -> list[Row]:
    """`append_kv4` of so many tokens: 64 are a step of decoding, 4096 a prompt."""
    wanted = tokens, int(scheme[2]), int(scheme.endswith("channel"))
    return [
        row
        for row in _of(record, append.MEASURE)
        if (row.sizes["T"], row.sizes["bits"], row.sizes["channel"]) == wanted
    ]


class Unequal(NamedTuple):
    """A ragged batch, and an even one of as many bytes."""

    ragged: Row
    even: Row

    @property
    def longer(self) -> float:
        """The ragged one's time over the even one's."""
        return self.ragged.time_us / self.even.time_us


def unequal(record: Record | None) -> list[Unequal]:
    """By heads."""
    evens = {heads(row): row for row in _of(record, EVEN)}
    return [Unequal(row, evens[heads(row)]) for row in _of(record, RAGGED) if heads(row) in evens]


def heads(row: Row) -> tuple[int, int]:
    """Query and kv heads."""
    return row.sizes["Hq"], row.sizes["Hkv"]


def batched_and_single(rows: Iterable[Row]) -> list[Row]:
    """Those of the stored peers' batches."""
    return [row for row in rows if row.sizes["B"] in BATCHES and row.sizes["L"] in LENGTHS]


def batched(rows: Iterable[Row]) -> list[Row]:
    """Those of them with more than one sequence."""
    return [row for row in batched_and_single(rows) if row.sizes["B"] > 1]


def single(rows: Iterable[Row]) -> list[Row]:
    """Those of a single long sequence."""
    return [row for row in rows if row.sizes["B"] == 1 and row.sizes["L"] in LONG]


def beside_all(rows: Iterable[Row]) -> list[Row]:
    """Those where the stored peers are known too."""
    return [row for row in rows if FACTOR in row.more]


def programmatic(rows: Iterable[Row]) -> list[float]:
    """Of the floor, where a launch may begin before the one before it has ended; of rows that say so."""
    return [row.floor_us / row.more[PROGRAMMATIC] for row in rows if PROGRAMMATIC in row.more]


def over_bits(rows: Iterable[Row], bits: int) -> list[float]:
    """How many times as fast as the fastest peer with a cache of so many bits, where there is one."""
    found = ((row, [us for name, us in row.peers.items() if name in BITS[bits]]) for row in rows)
    return [min(times) / row.time_us for row, times in found if times]


def between(rows: Iterable[Row], least_us: float, most_us: float = math.inf) -> list[float]:
    """Fractions of the floor of those whose floor lies in least_us <= floor < most_us."""
    return [row.fraction for row in rows if least_us <= row.floor_us < most_us]


def _of(record: Record | None, measure: str) -> list[Row]:
    return [row for row in record.rows if row.measure == measure] if record else []


def batches(record: Record | None) -> list[Row]:
    """The points at the stored peers' batches."""
    return batched_and_single(points(record))
