"""Times of other projects' kernels that were measured once (`notebooks/results/<gpu>/peers`), as they were measured."""

import csv
from collections.abc import Mapping
from functools import cache

from ptxlab import sources

OURS = "ptxlab"  # among the stored times: what this project took in that run

Place = tuple[int, ...]  # N, K, M of a GEMM; Hq, Hkv, batch, length of an attention
Stored = Mapping[Place, Mapping[str, float]]


@cache
def stored_times(gpu: str = "h200") -> dict[Place, dict[str, float]]:
    """Return the microseconds of GEMMs by place and name, as measured once on such a GPU.

    Empty without the file.
    """
    return _read_csv(gpu, "gemm", ("N", "K", "M"))


@cache
def stored_attention(gpu: str = "h200") -> dict[Place, dict[str, float]]:
    """Return the microseconds of decode attention by place and name, as measured once on such a GPU.

    Empty without the file.
    """
    return _read_csv(gpu, "attn", ("hq", "hkv", "batch", "seq"))


def _read_csv(gpu: str, name: str, axes: tuple[str, ...]) -> dict[Place, dict[str, float]]:
    """Read the microseconds of a CSV file of peers, by the values of the columns `axes` and by name."""
    path = sources.results_dir() / gpu / "peers" / f"{name}.csv"
    times: dict[Place, dict[str, float]] = {}
    if path.is_file():
        for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            place = tuple(int(line[axis]) for axis in axes)
            times.setdefault(place, {})[line["peer"]] = float(line["us"])
    return times
