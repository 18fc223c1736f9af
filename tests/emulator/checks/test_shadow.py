"""Shadow memory, in units, against one number per byte."""

import subprocess
import sys

import numpy as np
import pytest

from ptxlab.emulator.checks.shadow import UNITS, Shadow, coarsest
from ptxlab.errors import ArgumentError
from tests.support.small_kernels import STORE, kernel_text, run_text

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
        np.testing.assert_array_equal(shadow.by_byte, plain)
    assert {(16, 16), (16, 4), (16, 1), (4, 4), (4, 1)} <= chosen


def test_cells_are_parted_where_something_has_been_set() -> None:
    """A large buffer of which little is touched takes little memory, whatever the size of an access."""
    shadow, sparse, units = Shadow(1 << 12), np.array([3, 200]), np.arange(256)
    shadow.put(sparse, 16, np.array([7, 9], np.uint64))
    shadow.put(np.array([4000]), 1, 5)
    expected = np.zeros(1 << 12, np.uint64)
    expected[48:64], expected[3200:3216], expected[4000] = 7, 9, 5
    np.testing.assert_array_equal(shadow.by_byte, expected)
    dense = Shadow(1 << 12)
    dense.put(units, 16, units.astype(np.uint64))
    dense.put(np.array([0]), 4, 1)
    np.testing.assert_array_equal(dense.by_byte[:16], [1] * 4 + [0] * 12)
    np.testing.assert_array_equal(dense.by_byte[16:], units[1:].repeat(16))


TOUCH_LITTLE = """
import resource
import numpy as np
from ptxlab import emulator
from tests.support.small_kernels import STORE, kernel_text, run_text

text = kernel_text("mov.u32 %r0, %tid.x; ld.param.u64 %x1, [big]; mad.wide.u32 %x1, %r0, 8111, %x1;"
                   "ld.global.u8 %s, [%x1];" + STORE, ".param .u64 out, .param .u64 big")
for size in 1 << 19, 1 << 28:
    run_text(text, np.zeros(32, np.uint32), np.zeros(size, np.uint8), threads=32, checks=emulator.CHECKS)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.full
def test_all_checks_take_memory_for_what_is_touched() -> None:
    """A thread reads a byte here and there of 256 MiB, which the emulator copies: beyond that, half as much."""
    run = subprocess.run([sys.executable, "-c", TOUCH_LITTLE], capture_output=True, text=True, check=True)
    little, much = map(int, run.stdout.split())  # KiB
    assert much - little < 1.5 * (1 << 18)


def test_memory_that_does_not_suffice_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Shadow, size: int) -> None:
        raise MemoryError

    monkeypatch.setattr(Shadow, "__init__", refuse)
    with pytest.raises(ArgumentError, match=r"memory: has to fit this machine; .*fewer checks less \(got 128 bytes of"):
        run_text(kernel_text("mov.u32 %s, 0;" + STORE), np.zeros(32, np.uint32), checks="race")
