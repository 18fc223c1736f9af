"""Times of others that were measured once, as a later run would have measured them."""

import pytest

from ptxlab.bench.peers import CUBLAS
from ptxlab.bench.shapes import LAYERS, TOKENS
from ptxlab.bench.stored import stored_peers, stored_times

STORED = stored_times()
PLACE = (12288, 4096, 16)
QSERVE = "qserve_w4a8_g128"


def test_stored_times_cover_the_llama_matrices() -> None:
    for layer in LAYERS:
        for M in TOKENS:
            assert ((layer.N, layer.K, M) in STORED) == (layer.model != "Mixtral")
    assert STORED[12288, 4096, 16]["qserve_w4a8_g128"] == 20.33
    assert set(CUBLAS.values()) <= set(STORED[12288, 4096, 16])


@pytest.mark.parametrize(("ratio", "factor"), [(1.0, 1.0), (0.96, 1.0), (1.049, 1.0), (1.06, 1.06), (0.5, 0.5)])
def test_stored_times_are_scaled_where_cublas_differs(ratio: float, factor: float) -> None:
    ours = {name: ratio * STORED[PLACE][theirs] for name, theirs in CUBLAS.items()}
    times, scaled_by = stored_peers(PLACE, ours, STORED)
    assert scaled_by == pytest.approx(factor)
    assert times[QSERVE] == pytest.approx(factor * STORED[PLACE][QSERVE])
    assert not set(times) & set(CUBLAS.values())


def test_without_cublas_in_both_runs_stored_times_do_not_count() -> None:
    ours = {"cublas_fp8": 16.0}
    assert stored_peers(PLACE, {}, STORED) == ({}, 1.0)
    assert stored_peers((LAYERS[-1].N, LAYERS[-1].K, 16), ours, STORED) == ({}, 1.0), "Mixtral was not measured then"
    assert stored_peers(PLACE, ours, {}) == ({}, 1.0)
