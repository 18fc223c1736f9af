"""The stream floor: how long weights take from device memory into shared memory, with nothing else done."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.bench.record import Row
from ptxlab.errors import BenchmarkError
from ptxlab.hardware import sheets
from ptxlab.hardware.words import U32
from ptxlab.runtime.launching import allocate_poisoned
from ptxlab.runtime.timing import copies_beyond_l2, measure
from ptxlab.sources import Source
from ptxlab.spec import Launch

ALLOWED_EXCESS = 0.03
SLOT, SLOTS, LINE = 16384, 12, 128  # bytes of a slot of the ring, slots, granule of a chunk
_CHUNKS = (SLOT, SLOT // 2)  # the faster counts: large chunks cost less, small ones start earlier
_RANDOM = 64 << 20  # distinct random bytes; repeated where a matrix is larger
_REPLAYS = 10


def source() -> Source:
    """Read the kernel `stream_bulk`."""
    return Source.read(Path(__file__).with_name("stream.ptx"))


def geometry(blocks: int) -> Launch:
    """Return the launch of one warp and the whole ring per block."""
    return Launch((blocks, 1, 1), (32, 1, 1), SLOT * SLOTS)


def even_chunk(nbytes: int, blocks: int, limit: int = SLOT) -> int:
    """Compute the largest chunk of at most `limit` bytes with which every block gets equally many."""
    rounds = math.ceil(nbytes / (blocks * limit))
    return math.ceil(nbytes / (blocks * rounds) / LINE) * LINE


def digest(words: U32, chunk: int, blocks: int) -> U32:
    """Compute what the kernel has to write for u32 `words`: [blocks, 32]."""
    sums = np.zeros((blocks, 32), np.uint32)
    for index, start in enumerate(range(0, words.size, chunk // 4)):
        chunk_words = words[start : start + chunk // 4]
        sums[index % blocks] += chunk_words[:32] + chunk_words[-32:]
    return sums


def measure_stream(nbytes: int) -> float:
    """Measure the microseconds to stream `nbytes` (rounded up to 128) on this device, rotated beyond the L2."""
    nbytes = math.ceil(nbytes / LINE) * LINE
    block = np.frombuffer(np.random.default_rng(0).bytes(min(nbytes, _RANDOM)), np.uint32)
    words = np.resize(block, nbytes // 4)
    copies = [gpu.to_device(words)]
    for _ in range(copies_beyond_l2(nbytes) - 1):
        copies.append(gpu.empty(words.shape, words.dtype))
        gpu.copy_bytes(copies[-1], copies[0])
    return min(_time_chunks(words, copies, limit) for limit in _CHUNKS)


def _time_chunks(words: U32, copies: list[Any], limit: int) -> float:
    blocks = gpu.device_info().sms
    chunk = even_chunk(words.nbytes, blocks, limit)
    kernel = gpu.load(source(), "stream_bulk")
    calls, digests = [], []
    for copy in copies:
        digests.append(allocate_poisoned((blocks, 32), np.uint32))
        args = [copy, digests[-1], np.uint32(words.nbytes), np.uint32(chunk)]
        calls.append(gpu.prepare(kernel, args, geometry(blocks)))
    us = measure(calls, replays=_REPLAYS).us
    expected = digest(words, chunk, blocks)
    if not all((gpu.to_host(copy_digest) == expected).all() for copy_digest in digests):
        raise BenchmarkError("stream floor: the digests of the timed launches are wrong")
    return us


def shortfall(rows: Iterable[Row], device: str) -> str:
    """Explain why rows with these stream floors are not valid: slower than the card's sheet says.

    The comparison is the geometric mean over the sizes. The text is empty if the rows are valid, if no floor was
    measured, or if there is no sheet.
    """
    measured_us = {row.more["packed_bytes"]: row.more["stream_us"] for row in rows if "stream_us" in row.more}
    if not measured_us or device not in sheets.SHEETS:
        return ""
    sheet = sheets.sheet(device)
    excess = math.exp(sum(math.log(us / sheet.stream_us(n)) for n, us in measured_us.items()) / len(measured_us)) - 1
    if excess <= ALLOWED_EXCESS:
        return ""
    return f"streaming the weights takes {excess:.1%} longer than on this card's sheet, over {len(measured_us)} sizes"
