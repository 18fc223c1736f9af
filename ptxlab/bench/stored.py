"""Times of other projects' GEMMs that were measured once (`notebooks/results/<gpu>/peers`), beside a run of ours."""

import csv
import statistics
from collections.abc import Mapping
from functools import cache

from ptxlab import sources
from ptxlab.bench.peers import CUBLAS

SAME = 0.05  # stored times stand as they are where cuBLAS took the same in both runs
FACTOR = "stored_factor"  # in a row's `more`: what the stored times among its peers were scaled by

Place = tuple[int, int, int]  # N, K, M
Stored = Mapping[Place, Mapping[str, float]]


@cache
def stored_times(gpu: str = "h200") -> dict[Place, dict[str, float]]:
    """Microseconds of other projects' kernels and of cuBLAS, as measured once on such a GPU; empty without the file."""
    path = sources.results_dir() / gpu / "peers" / "gemm.csv"
    times: dict[Place, dict[str, float]] = {}
    if path.is_file():
        for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            place = int(line["N"]), int(line["K"]), int(line["M"])
            times.setdefault(place, {})[line["peer"]] = float(line["us_median"])
    return times


def stored_peers(place: Place, cublas: Mapping[str, float], stored: Stored) -> tuple[dict[str, float], float]:
    """Stored times of other projects' kernels for the same work, as this run would have measured them.

    Args:
        place: matrix and tokens.
        cublas: what cuBLAS took there in this run, microseconds by the names of `peers.CUBLAS`.
        stored: from `stored_times`.

    Returns:
        Microseconds by peer, and the factor by which they were scaled: what cuBLAS took in this run over what it took
        then, or 1 where that is within 5%. Empty where cuBLAS was not measured in both.
    """
    then = stored.get(place, {})
    ratios = [cublas[ours] / then[theirs] for ours, theirs in CUBLAS.items() if ours in cublas and theirs in then]
    if not ratios:
        return {}, 1.0
    factor = statistics.geometric_mean(ratios)
    factor = 1.0 if abs(factor - 1) <= SAME else factor
    return {peer: us * factor for peer, us in then.items() if peer not in CUBLAS.values()}, factor
