"""The suite `prefill`, as far as it needs no GPU: its grid, its checks, and its peers' tensors."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError, BenchmarkError, UnavailableError
from ptxlab.lowbit.bench.attention import problem as attention_problem
from tests.support.emulated_gpu import emulated_gpu

pytest.importorskip("torch", reason="torch is not installed: it comes with the extra `torch`")

from benchmarks import chunks, peers_prefill, prefill, prefill_bytes
from benchmarks.chunks import GRID, Chunk, part

__all__ = ["emulated_gpu"]

SMALL = Chunk(9, 70, (2, 1), 64)


@pytest.fixture
def problem(emulated_gpu: pytest.MonkeyPatch) -> prefill.ChunkProblem:
    """Make a small chunk over two copies of its cache, in NumPy; calls run in the emulator."""
    emulated_gpu.setattr(gpu, "why_not", lambda arch, exact=False: "made up")
    emulated_gpu.setattr(prefill, "copies_beyond_l2", lambda nbytes: 2)
    emulated_gpu.setattr(attention_problem, "_RANDOM", 1 << 16)
    return prefill.random_chunk(SMALL)


def test_pairs_are_those_of_causal_attention() -> None:
    seen = sum(SMALL.context + query + 1 for query in range(SMALL.queries))
    assert SMALL.operations == 4 * seen * 2 * 64


def test_parts_are_those_of_the_words() -> None:
    assert part([]) == chunks.ChunkSelection(GRID, peers=True)
    assert {chunk.heads for chunk in part(["64/8", "32/32"]).chunks} == {(64, 8), (32, 32)}
    assert {(chunk.queries, chunk.D) for chunk in part(["T=512", "D=64"]).chunks} == {(512, 64)}
    short = part(["short", "alone"])
    assert not short.peers and Chunk(128, 131072, (32, 8)) in short.chunks and len(short.chunks) < len(GRID)


@pytest.mark.parametrize("words", [["16/8"], ["T=128", "D=64"]])
def test_words_that_name_no_chunk(words: list[str]) -> None:
    with pytest.raises(ArgumentError, match="only: "):
        part(words)


@pytest.mark.full
def test_results_are_held_against_float64(problem: prefill.ChunkProblem) -> None:
    ours = prefill.our_launches(problem)
    for call in ours.calls:
        call()
    samples = prefill.sampled_queries(problem)
    assert "within the spec's bound" in prefill.check_ours(ours, samples, SMALL)
    ours.outputs[0, 0, 0, 0] += np.float16(0.5)
    with pytest.raises(BenchmarkError, match="differ"):
        prefill.check_ours(ours, samples, SMALL)
    ours.outputs[1] = ours.outputs[0]
    with pytest.raises(BenchmarkError, match="wrong results for query 0"):
        prefill.check_ours(ours, samples, SMALL)


def test_tokens_are_found_in_their_pages() -> None:
    import torch

    from benchmarks.peers_prefill import FloatCache

    tokens = torch.arange(79.0).view(79, 1, 1).expand(79, 1, 64).contiguous()
    cache = FloatCache(SMALL, torch.zeros(9, 2, 64), tokens, tokens, 3)
    pages = cache.pages(tokens)
    for table in cache.tables():
        assert torch.equal(pages[table[0].long()].view(-1, 1, 64)[:79], tokens)


def test_a_peer_that_is_missing_is_named(problem: prefill.ChunkProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    times = prefill.measure_peers(problem, prefill.our_launches(problem), prefill.sampled_queries(problem))
    assert not times.us and {*times.left_out} == {"fa3_f16", "fa3_fp8"}
    assert "vllm" in times.left_out["fa3_f16"]


def test_a_peer_with_wrong_results_is_left_out(problem: prefill.ChunkProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 in FP16 alone ends the suite: it is what all our results are compared with."""
    import torch

    peer = SimpleNamespace(outputs=torch.full((1, *problem.q.shape), torch.nan), calls=[])
    monkeypatch.setattr(peers_prefill, "launches", lambda name, cache: peer)
    monkeypatch.setattr(peers_prefill, "measure_peer", lambda peer, replays: SimpleNamespace(us=1.0, sm_mhz=1.0))
    ours, samples = prefill.our_launches(problem), prefill.sampled_queries(problem)
    with pytest.raises(BenchmarkError, match=r"fa3_f16: .*: wrong results, relative error nan"):
        prefill.measure_peers(problem, ours, samples)
    monkeypatch.setattr(peers_prefill, "names_for", lambda chunk: ["fa3_fp8"])
    times = prefill.measure_peers(problem, ours, samples)
    assert not times.us and times.left_out == {"fa3_fp8": "wrong results, relative error nan"}


def test_bytes_are_split_by_side() -> None:
    metrics = dict.fromkeys(prefill_bytes.METRICS, 3.0)
    ours, theirs = [("attention_kv4_prefill_sm90", metrics)], [("prepare", metrics), ("device_kernel", metrics)]
    sides = prefill_bytes.split_by_side((ours + theirs) * len(prefill_bytes.CHUNKS))
    assert [(len(a), len(b)) for a, b in sides] == [(1, 2)] * len(prefill_bytes.CHUNKS)
    row = prefill_bytes._row(prefill_bytes.CHUNKS[0], *sides[0], SimpleNamespace(read_tbps=4.0))  # type: ignore[arg-type]
    assert row.more["over_fa3"] == 6 / 12
    with pytest.raises(UnavailableError, match="attention_kv4_prefill_sm90"):
        prefill_bytes.split_by_side(ours)
