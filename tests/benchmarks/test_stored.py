"""Times of others that were measured once."""

from benchmarks.peers import CUBLAS, HUMMING, SDPA_BACKENDS
from benchmarks.stored import OURS, stored_attention, stored_times
from ptxlab.lowbit.bench.shapes import LLAMA

STORED = stored_times()


def test_stored_times_cover_the_llama_matrices() -> None:
    tokens = (1, 16, 32, 64, 128, 256, 512, 1024)
    assert set(STORED) == {(layer.N, layer.K, M) for layer in LLAMA for M in tokens}
    assert STORED[12288, 4096, 16]["qserve_w4a8_g128"] == 20.03
    further_peers = {"fp8_row", "qserve_w8a8", "qserve_w4a8_chn", "qserve_w4a8_g128", "qqq_w4a8_chn", "qqq_w4a8_g128"}
    for (_, _, M), times in STORED.items():
        assert set(times) == {OURS, *CUBLAS, *further_peers, *(() if M in (32, 1024) else HUMMING)}


def test_names_are_those_of_the_peers_that_can_run() -> None:
    assert all(set(SDPA_BACKENDS) < set(times) for times in stored_attention().values())


def test_another_gpu_has_none() -> None:
    assert stored_times("a100") == stored_attention("a100") == {}
