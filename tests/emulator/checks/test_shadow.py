"""Shadow memory, in units, against one number per byte."""

import numpy as np
import pytest

from ptxlab.emulator.checks.shadow import UNITS, Shadow, coarsest

SIZE = 256


@pytest.mark.full
def test_units_say_what_bytes_say() -> None:
    """Random accesses of every size: the unit that is chosen is uniform, the largest that is tried, and tells all."""
    rng, shadow, plain = np.random.default_rng(0), Shadow(SIZE), np.zeros(SIZE, np.uint64)
    chosen = set()
    for event in range(1, 2000):
        size = int(rng.choice([1, 2, 4, 8, 16, 32], p=[0.05, 0.05, 0.3, 0.1, 0.4, 0.1]))
        offsets = rng.permutation(SIZE // size)[: rng.integers(1, 5)] * size
        grain = min(size, UNITS[0])
        units = {u: (offsets[:, None] // u + np.arange(size // u)).ravel() for u in UNITS if u <= grain}
        unit, places = coarsest(grain, units.__getitem__, shadow)
        rows = plain.reshape(-1, unit)[places]
        assert (rows == rows[:, :1]).all() and (shadow.get(places, unit) == rows[:, 0]).all()
        larger = plain.reshape(-1, grain)[units[grain]]
        assert unit == grain or (larger != larger[:, :1]).any()
        chosen.add((grain, unit))
        if event % 3:
            values = np.full(len(offsets), event, np.uint64) + offsets.astype(np.uint64)
            shadow.mark(offsets, size, values)
            plain[offsets[:, None] + np.arange(size)] = values[:, None]
        elif event % 100 == 0:
            shadow.put(np.arange(SIZE // 16), 16, 0)
            plain[:] = 0
        np.testing.assert_array_equal(shadow.each, plain)
    assert {(16, 16), (16, 4), (16, 1), (4, 4), (4, 1)} <= chosen
