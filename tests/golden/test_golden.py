"""The emulator against vectors that a GPU has recorded, per opcode and modifier."""

from pathlib import Path

import numpy as np
import pytest

from ptxlab import emulator
from tests.golden.cases import BLOCK_THREADS, Case, cases, rows_that_agree

VECTORS = Path(__file__).parent / "vectors.npz"
CASES = cases()


@pytest.fixture(scope="session")
def vectors():
    if not VECTORS.exists():
        pytest.fail(f"{VECTORS.name} is missing: run `python -m tests.golden.record` on a machine with a GPU and CuPy")
    with np.load(VECTORS) as archive:
        return dict(archive)


def emulate(case: Case) -> dict[str, np.ndarray]:
    arrays = case.inputs()
    rows = len(next(iter(arrays.values())))
    emulator.run(
        emulator.parse(case.ptx(), f"{case.name}.ptx"),
        None,
        list(arrays.values()),
        grid=rows // BLOCK_THREADS,
        block=BLOCK_THREADS,
    )
    return {name: arrays[name] for name in case.outputs}


# one test per opcode family: a parametrised id for each of a thousand cases would take longer than the cases
@pytest.mark.full_cases("cvt")
@pytest.mark.parametrize("family", sorted({case.name.split("_")[0] for case in CASES}))
def test_recorded(family: str, vectors) -> None:
    wrong_cases = []
    for case in CASES:
        if case.name.split("_")[0] != family:
            continue
        inputs = case.inputs()
        if f"{case.name}.inputs" not in vectors:
            wrong_cases.append(f"{case.name}: not recorded")
            continue
        assert int(vectors[f"{case.name}.inputs"]) == case.checksum(inputs), f"{case.name}: recorded with other inputs"
        got = emulate(case)
        for name, actual in got.items():
            expected = vectors[f"{case.name}.{name}"]
            bad_places = np.flatnonzero(~rows_that_agree(case, name, expected, actual))
            if len(bad_places):
                row = {k: hex(int(v[bad_places[0]])) for k, v in inputs.items() if k not in "depq"}
                first = bad_places[0]
                values = f"{actual[first]:#x}, not {expected[first]:#x}"
                wrong_cases.append(f"{case.template} {row}: {name} is {values} ({len(bad_places)} rows)")
    assert not wrong_cases, "\n".join(wrong_cases)
