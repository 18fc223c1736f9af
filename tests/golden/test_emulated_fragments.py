"""The emulator runs the kernels that the fragment vectors were recorded with: its results must be the GPU's."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ptxlab import emulator

sys.path.insert(0, str(Path(__file__).parent))
from fragments import FragmentCase, fragment_cases

VECTORS = Path(__file__).parent / "fragments.npz"
CASES = {case.name: case for case in fragment_cases()}


def emulate(case: FragmentCase, mode: str) -> np.ndarray:
    out = np.full(case.out, 0xDEADBEEF, np.uint32)
    arguments = [*(array.copy() for array in case.inputs.values()), out]
    module = emulator.parse(case.ptx, f"{case.name}.ptx")
    result = emulator.run(module, case.name, arguments, grid=1, block=case.threads, checks=emulator.CHECKS, mode=mode)
    assert [str(finding) for finding in result.findings] == []
    return out


@pytest.mark.parametrize("name", CASES)
def test_recorded(name: str) -> None:
    with np.load(VECTORS) as vectors:
        for mode in emulator.MODES if name.startswith("wgmma") else emulator.MODES[:1]:
            np.testing.assert_array_equal(emulate(CASES[name], mode), vectors[name], strict=True)
