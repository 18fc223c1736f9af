"""Times of other projects' kernels that were measured once (`notebooks/results/<gpu>/peers`), beside a run of ours."""

import csv
import statistics
from collections.abc import Mapping
from functools import cache

from ptxlab import sources
from ptxlab.bench.peers import CUBLAS

SAME = 0.05  # stored times stand as they are where what was measured in both runs took the same
FACTOR = "stored_factor"  # in a row's `more`: what the stored times among its peers were scaled by

Place = tuple[int, ...]  # N, K, M of a GEMM; Hq, Hkv, batch, length of an attention
Stored = Mapping[Place, Mapping[str, float]]


@cache
def stored_times(gpu: str = "h200") -> dict[Place, dict[str, float]]:
    """Microseconds of other projects' GEMMs and of cuBLAS, as measured once on such a GPU; empty without the file."""
    return _read(gpu, "gemm", ("N", "K", "M"))


@cache
def stored_attention(gpu: str = "h200") -> dict[Place, dict[str, float]]:
    """Microseconds of other projects' decode attention and of PyTorch's, likewise."""
    return _read(gpu, "attn", ("hq", "hkv", "batch", "seq"))


def stored_peers(
    place: Place, measured: Mapping[str, float], stored: Stored, names: Mapping[str, str] = CUBLAS
) -> tuple[dict[str, float], float]:
    """Stored times of other projects' kernels for the same work, as this run would have measured them.

    Args:
        place: the problem's sizes.
        measured: what the library that both runs have took there in this one, microseconds by name.
        stored: from `stored_times` or `stored_attention`.
        names: that library's names in this run, and in the stored times.

    Returns:
        Microseconds by peer, and the factor by which they were scaled: what the library took in this run over what it
        took then, or 1 where that is within 5%. Empty where it was not measured in both.
    """
    then = stored.get(place, {})
    ratios = [measured[ours] / then[theirs] for ours, theirs in names.items() if ours in measured and theirs in then]
    if not ratios:
        return {}, 1.0
    factor = statistics.geometric_mean(ratios)
    factor = 1.0 if abs(factor - 1) <= SAME else factor
    return {peer: us * factor for peer, us in then.items() if peer not in names.values()}, factor


def _read(gpu: str, name: str, axes: tuple[str, ...]) -> dict[Place, dict[str, float]]:
    path = sources.results_dir() / gpu / "peers" / f"{name}.csv"
    times: dict[Place, dict[str, float]] = {}
    if path.is_file():
        for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            place = tuple(int(line[axis]) for axis in axes)
            times.setdefault(place, {})[line["peer"]] = float(line["us_median"])
    return times
