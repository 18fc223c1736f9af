"""Suite `prefill`: `attention_kv4` of whole chunks over a 4-bit cache, beside FlashAttention 3 and others.

All run on one card in one call, on the same tokens: peers get the dequantised cache. A row's rate counts
4 · pairs · Hq · D operations; a pair is a query and a key that the query sees. The floor is the longer of two times:
these operations at the rate of cuBLAS's FP16 GEMM of the same run, and one read of the cache, the queries and the
results at the read bandwidth. Each kernel runs for a while before it is timed, so that it is timed at the clock that
its own power leaves it. `--only bytes` counts bytes from DRAM instead (`prefill_bytes`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import ptxlab
from benchmarks import peers, peers_prefill
from benchmarks.chunks import BYTES, Chunk, ChunkSelection, part
from benchmarks.peers_prefill import FA3, SETTLE_MS, TOLERANCES, FloatCache
from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.suite import Suite
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit.bench.attention import kvdata
from ptxlab.lowbit.bench.attention.problem import Problem, random_problem
from ptxlab.lowbit.bench.shapes import PAGE
from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.prefill import PREFILL, roundings_of
from ptxlab.lowbit.layout import KVCache
from ptxlab.runtime.launching import allocate_poisoned
from ptxlab.runtime.timing import REPLAYS, copies_beyond_l2, measure
from ptxlab.spec.tolerance import Allowed, describe_mismatch

MEASURE, ROOFLINE, DRAM = "prefill", "roofline", "DRAM bytes"
ROOFLINE_WIDTH = 8192  # of the square FP16 GEMM
LONG_OPERATIONS, LONG_REPLAYS = 1e12, 5  # a launch of milliseconds: one copy of the cache, fewer replays
SAMPLES = 6  # queries that are held against float64
_NAN = 0xFF  # a byte: FP16 numbers made of it are NaN


def rows(
    names: Sequence[str],
    ceilings: Ceilings,
    progress: Callable[[str], None],
    only: Sequence[str] = (),
    done: Sequence[Row] = (),
) -> Iterator[Row]:
    """Measure the suite, or the part that the words of `only` name; rows in `done` are taken as they are."""
    selection = part(only)
    if BYTES in only:
        from benchmarks.prefill_bytes import byte_rows

        yield from byte_rows(ceilings, progress)
        return
    progress("FP16 GEMM")
    roofline = roofline_row()
    yield roofline
    measured = {row.key: row for row in done}
    for chunk in selection.chunks:
        row = measured.get(row_key(chunk))
        if row is None:
            progress(str(chunk))
            row = chunk_row(chunk, selection, ceilings, roofline.rate)
        yield row


def row_key(chunk: Chunk) -> tuple[object, ...]:
    """Return the `Row.key` of a chunk."""
    return PREFILL.name, "cu", MEASURE, "", tuple(sorted(chunk.sizes.items())), ()


def roofline_row() -> Row:
    """Time cuBLAS's FP16 GEMM: the rate of wgmma on FP16 that this card sustains now."""
    N = ROOFLINE_WIDTH
    us = peers.cublas(N, N, (N,), ["cublas_fp16"])[N]["cublas_fp16"]
    tflops = 2 * N**3 / us / 1e6
    return Row(
        kernel="cublas_fp16",
        source="torch",
        measure=ROOFLINE,
        sizes={"N": N, "K": N, "M": N},
        time_us=us,
        fastest_us=us,
        slowest_us=us,
        rate=tflops,
        rate_unit="TFLOPS",
        bytes=6 * N * N,
        operations=2 * N**3,
        floor_us=us,
        fraction=1.0,
        limit="itself",
        sm_mhz=0.0,
        # By `peers.cublas`, which raises for a wrong result.
        checked="256 columns within 1% of float64",
    )


@dataclass(frozen=True)
class ChunkProblem:
    """A chunk on the device.

    Attributes:
        chunk: its sizes.
        q: f16 [T, Hq, D].
        starts: s32 [2], where the chunk begins and ends.
        cached: copies of the cache, so many that no launch finds its own in the L2.
        long: whether a launch takes milliseconds; then there is one copy, and fewer replays.
    """

    chunk: Chunk
    q: Any
    starts: Any
    cached: Problem
    long: bool

    @property
    def replays(self) -> int:
        """Replays of the timed graph."""
        return LONG_REPLAYS if self.long else REPLAYS


def random_chunk(chunk: Chunk) -> ChunkProblem:
    """Draw queries and a cache in which every page counts (`kvdata`)."""
    is_long = chunk.operations > LONG_OPERATIONS
    copies = 1 if is_long else copies_beyond_l2(chunk.batch.kv_bytes() + chunk.query_bytes)
    q = kvdata.random_queries(np.random.default_rng(1), (chunk.queries, chunk.heads[0], chunk.D))
    starts = gpu.to_device(np.array([0, chunk.queries], np.int32))
    return ChunkProblem(chunk, gpu.to_device(q), starts, random_problem(chunk.batch, copies=copies), is_long)


@dataclass(frozen=True)
class Ours:
    """Calls of `attention_kv4`, one per copy of the cache, and what they write, f16 [copies, T, Hq, D]."""

    calls: list[Callable[[], Any]]
    outputs: Any


def our_launches(problem: ChunkProblem) -> Ours:
    """Prepare calls of `attention_kv4` as an engine makes them, to be captured."""
    caches = problem.cached.caches
    outputs = allocate_poisoned((len(caches), *problem.q.shape), np.float16, _NAN)
    space = ptxlab.attention_workspace(caches[0], kernel=PREFILL.name) if gpu.is_device_array(problem.q) else None
    attend = partial(ptxlab.attention_kv4, query_start_loc=problem.starts, workspace=space)
    pairs = zip(caches, outputs, strict=True)
    return Ours([partial(attend, problem.q, cache, out=out) for cache, out in pairs], outputs)


def chunk_row(chunk: Chunk, selection: ChunkSelection, ceilings: Ceilings, tflops: float) -> Row:
    """Time ours, then the peers; what the timed launches wrote is checked.

    Raises BenchmarkError for wrong results of ours or of FlashAttention 3 in FP16.
    """
    problem = random_chunk(chunk)
    ours = our_launches(problem)
    measured = measure(ours.calls, replays=problem.replays, settle_ms=SETTLE_MS)
    samples = sampled_queries(problem)
    check_note = check_ours(ours, samples, chunk)
    peer_times = (
        measure_peers(problem, ours, samples) if selection.peers else PeerTimes({}, {}, {"peers": "not asked for"})
    )
    if peer_times.left_out:
        check_note += "; left out: " + ", ".join(f"{peer}: {reason}" for peer, reason in peer_times.left_out.items())
    nbytes = chunk.batch.kv_bytes() + 2 * chunk.query_bytes
    floors = (chunk.operations / tflops / 1e6, "FP16 GEMM"), (nbytes / ceilings.read_tbps / 1e6, "read")
    return row_of(
        PREFILL,
        MEASURE,
        chunk.sizes,
        measured,
        floor=max(floors),
        checked=check_note,
        nbytes=nbytes,
        rate=(chunk.operations / measured.us / 1e6, "TFLOPS"),
        operations=chunk.operations,
        peers=peer_times.us,
        more=peer_times.figures,
    )


@dataclass(frozen=True)
class Sample:
    """Expected output of one query, for the heads that share a KV head.

    Attributes:
        query: its place in the chunk.
        heads: query heads.
        out: f64 [1, 1, heads, D] on the dequantised integers.
        allowed: how far off the kernel may be.
    """

    query: int
    heads: slice
    out: Any
    allowed: Allowed


def sampled_queries(problem: ChunkProblem) -> list[Sample]:
    """Attend in float64 for queries from the first to the last, each with another KV head."""
    chunk, samples = problem.chunk, []
    ratio = chunk.heads[0] // chunk.heads[1]
    for n, query in enumerate(np.linspace(0, chunk.queries - 1, SAMPLES).astype(int).tolist()):
        head = n * chunk.heads[1] // SAMPLES
        heads = slice(head * ratio, (head + 1) * ratio)
        cache = cache_of_head(problem.cached.caches[0], chunk.context + query + 1, head)
        q, scale = problem.q[None, query : query + 1, heads], chunk.D**-0.5
        out, _ = common.attention(q, cache, scale)
        max_error, _ = common.bound_error(q, cache, scale, roundings_of(chunk.D))
        samples.append(Sample(query, heads, out, max_error))
    return samples


def cache_of_head(cache: KVCache, length: int, head: int) -> KVCache:
    """Copy the first tokens of one KV head of a cache with one sequence."""
    pages = cache.block_table[0, : ceil_div(length, PAGE)]
    return KVCache(
        pool=cache.pool[pages][:, :, head : head + 1].copy(),
        block_table=gpu.to_device(np.arange(len(pages), dtype=np.int32)[None]),
        lengths=gpu.to_device(np.array([length], np.int32)),
        page_size=PAGE,
        head_dim=cache.head_dim,
    )


def check_ours(ours: Ours, samples: Sequence[Sample], chunk: Chunk) -> str:
    """Compare the results of every timed launch with the samples, and launches with each other.

    Returns what was checked. Raises BenchmarkError for a result that is further off than the spec allows.
    """
    if not bool((ours.outputs == ours.outputs[:1]).all()):
        raise BenchmarkError(f"{PREFILL.name}: {chunk}: launches on copies of one cache differ")
    for sample in samples:
        output = ours.outputs[:1, sample.query : sample.query + 1, sample.heads]
        if problem := describe_mismatch({"out": output}, {"out": sample.out}, {"out": sample.allowed}):
            raise BenchmarkError(f"{PREFILL.name}: {chunk}: wrong results for query {sample.query}: {problem}")
    summary = f"{len(ours.calls)} launches gave equal results"
    return f"{summary}; {len(samples)} queries within the spec's bound of float64"


@dataclass(frozen=True)
class PeerTimes:
    """Microseconds by peer, further figures for a row's `more`, and why others were left out."""

    us: dict[str, float]
    figures: dict[str, float]
    left_out: dict[str, str]


def measure_peers(problem: ChunkProblem, ours: Ours, samples: Sequence[Sample]) -> PeerTimes:
    """Time the chunk's peers on the dequantised cache; results of the timed launches are checked.

    A peer whose library raises, or whose results are wrong, is left out, with the reason. FlashAttention 3 in FP16 is
    what all our results are compared with: BenchmarkError if it is wrong.
    """
    import torch

    times = PeerTimes({}, {}, {})
    cache = FloatCache.of(problem.chunk, problem.q, problem.cached, once=problem.long)
    for name in peers_prefill.names_for(problem.chunk):
        try:
            peer = peers_prefill.launches(name, cache)
            measured = peers_prefill.measure_peer(peer, problem.replays)
        except BenchmarkError:
            raise
        except Exception as error:
            times.left_out[name] = f"{type(error).__name__} {str(error).partition(chr(10))[0]}"
            continue
        relative_error = sampled_error(peer.outputs[-1], samples)
        if not relative_error <= TOLERANCES[name]:
            reason = f"wrong results, relative error {relative_error:.2g}"
            if name == FA3:
                raise BenchmarkError(f"{name}: {problem.chunk}: {reason}")
            times.left_out[name] = reason
            continue
        if name == FA3:  # every query of ours beside every one of an independent kernel
            expected = peer.outputs[-1].double()
            peers.check_close(PREFILL.name, torch.from_dlpack(ours.outputs[0]).double(), expected, TOLERANCES[FA3])
        times.us[name] = measured.us
        times.figures.update({f"{name}_mhz": measured.sm_mhz, f"{name}_error": relative_error})
        del peer
        torch.cuda.empty_cache()
    return times


def sampled_error(out: Any, samples: Sequence[Sample]) -> float:
    """Return the largest error of a peer's results [T, Hq, D] at the samples, relative to the largest result there."""
    import torch

    expected = [torch.from_dlpack(sample.out)[0, 0] for sample in samples]
    errors = [(out[s.query, s.heads].double() - x).abs().max() for s, x in zip(samples, expected, strict=True)]
    return float(max(errors) / max(x.abs().max() for x in expected))


SUITE = Suite(
    "prefill",
    rows,
    part=part,
    record_of=lambda only: "prefill_bytes" if BYTES in only else "",
    resumes=True,
)
