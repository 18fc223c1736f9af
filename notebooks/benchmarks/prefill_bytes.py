"""Bytes that attention of chunks moves from and to device memory, ours beside FlashAttention 3, counted by ncu.

The counters are read in a process that runs `launch_marked`; caches of the GPU are empty before each kernel.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, product

from benchmarks import peers_prefill
from benchmarks.chunks import CONTEXTS, HEADS, QUERIES, Chunk
from benchmarks.peers_prefill import FA3, FloatCache
from benchmarks.prefill import DRAM, our_launches, random_chunk
from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.errors import UnavailableError
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.profile import nsight

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")
CHUNKS = tuple(Chunk(T, C, HEADS[0]) for T, C in product(QUERIES, CONTEXTS[2:]))
_LAUNCH = "from benchmarks import prefill_bytes; prefill_bytes.launch_marked()"


def byte_rows(ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Count bytes of long contexts, two of which have a target.

    Raises UnavailableError where ncu or FlashAttention 3 is missing.
    """
    progress("ncu")
    launches = nsight.marked_launches([sys.executable, "-c", _LAUNCH], METRICS)
    for chunk, (kernel_launches, peer_launches) in zip(CHUNKS, split_by_side(launches), strict=True):
        yield _row(chunk, kernel_launches, peer_launches, ceilings)


def split_by_side(
    launches: Sequence[tuple[str, dict[str, float]]],
) -> list[tuple[list[dict[str, float]], list[dict[str, float]]]]:
    """Split launches, in order, into ours and FlashAttention 3's of each chunk; raises UnavailableError for others."""
    groups = [
        (is_ours, [numbers for _, numbers in group])
        for is_ours, group in groupby(launches, key=lambda launch: launch[0].startswith(PREFILL.name))
    ]
    if [is_ours for is_ours, _ in groups] != [True, False] * len(CHUNKS):
        names = ", ".join(dict.fromkeys(kernel for kernel, _ in launches)) or "nothing"
        raise UnavailableError(f"ncu: saw launches of {names}, not of ours and FlashAttention 3 in turn")
    return [(groups[n][1], groups[n + 1][1]) for n in range(0, len(groups), 2)]


def launch_marked() -> None:
    """Launch ours and FlashAttention 3 once on every chunk, warmed up, where the profiler looks."""
    for chunk in CHUNKS:
        problem = random_chunk(chunk)
        our_calls = our_launches(problem).calls
        peer_calls = peers_prefill.launches(FA3, FloatCache.of(chunk, problem.q, problem.cached, once=True)).calls
        for call in (our_calls[0], peer_calls[0]):
            call()
            with gpu.profiling():
                call()


def _row(
    chunk: Chunk, ours: Sequence[dict[str, float]], peer_launches: Sequence[dict[str, float]], ceilings: Ceilings
) -> Row:
    read_bytes, written_bytes, ns = (sum(launch[metric] for launch in ours) for metric in METRICS)
    peer_bytes = sum(launch[metric] for launch in peer_launches for metric in METRICS[:2])
    needed_bytes = chunk.batch.kv_bytes() + 2 * chunk.query_bytes
    floor_us, us = needed_bytes / ceilings.read_tbps / 1e6, ns / 1e3
    return Row(
        kernel=PREFILL.name,
        source="cu",
        measure=DRAM,
        sizes=chunk.sizes,
        time_us=us,
        fastest_us=us,
        slowest_us=us,
        rate=needed_bytes / (read_bytes + written_bytes),
        rate_unit="of the bytes needed",
        bytes=needed_bytes,
        operations=chunk.operations,
        floor_us=floor_us,
        fraction=floor_us / us,
        limit="read",
        sm_mhz=0.0,
        checked="counted, not timed: time is ncu's with empty caches",
        more={
            "dram_bytes": read_bytes + written_bytes,
            f"{FA3}_dram_bytes": peer_bytes,
            "over_fa3": (read_bytes + written_bytes) / peer_bytes,
        },
    )
