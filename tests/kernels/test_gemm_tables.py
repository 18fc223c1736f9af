"""The tables of tiles against the sweeps that they were chosen from: how much slower than the best of each point."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterator

import pytest

from ptxlab import kernels, sources

SWEEPS = sources.results_dir() / "h200" / "sweeps"
Point = tuple[int, int, int]  # N, K, M


def swept(kernel: str) -> dict[Point, dict[tuple[tuple[str, int], ...], float]]:
    """Microseconds by point and constants."""
    arch = kernel.rpartition("_")[2]
    points: dict[Point, dict[tuple[tuple[str, int], ...], float]] = defaultdict(dict)
    with (SWEEPS / f"gemm_{arch}.csv").open() as file:
        for line in csv.DictReader(file):
            if line.pop("kernel") == kernel:
                N, K, M, us = (line.pop(name) for name in ("N", "K", "M", "us"))
                constants = tuple(sorted((name, int(value)) for name, value in line.items()))
                points[int(N), int(K), int(M)][constants] = float(us)
    return points


def losses(kernel: str) -> Iterator[tuple[int, float]]:
    """(M, time of the chosen constants over that of the best) of every point where the chosen ones were tried."""
    spec = kernels.specs()[kernel]
    for (N, K, M), times in swept(kernel).items():
        chosen = spec.config_for({"M": M, "N": N, "K": K, "g": 128})
        tried = {
            constants: us
            for constants, us in times.items()
            if all(chosen.get({"resident": "RESIDENT"}.get(name, name), value) == value for name, value in constants)
        }
        if tried:
            yield M, min(tried.values()) / min(times.values())


@pytest.mark.parametrize(
    ("kernel", "most"),
    [
        ("gemm_w4a8_qoq_sm80", 1.09),
        ("gemm_w4a8_qoq_sm90", 1.04),
        ("gemm_w4a8_lqq_sm90", 1.08),
        ("gemm_w4a8_lqq_excp_sm90", 1.05),
        ("gemm_w4a8_lqq_imfp_sm90", 1.08),
    ],
)
def test_the_chosen_tiles_are_near_the_best_of_the_sweep(kernel: str, most: float) -> None:
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for M, loss in losses(kernel):
        by_tokens[M].append(math.log(loss))
    assert set(by_tokens) == {4, 16, 32, 64, 128, 256}
    for M, logs in by_tokens.items():
        assert len(logs) >= 5, "the chosen constants were hardly tried"
        assert math.exp(sum(logs) / len(logs)) <= most, M
