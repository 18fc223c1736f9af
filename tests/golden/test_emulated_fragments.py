"""The emulator runs the kernels that the fragment vectors were recorded with: its results must be the GPU's.

All sums of these floating-point mma are exact, so that the results have to be equal. Where sums are not exact, hardware
shifts the addends of several products to the largest exponent, truncates them there, and truncates the sum (f32) or
rounds it (f16); the emulator rounds the exact sum once. With 2^-23 of the largest addend lost at most per addend, the
two differ by at most `bound` below. (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ CS 7:e330, 2021;
a model of the H100 to the bit: Khattak and Mikaitis, arXiv:2512.07004.)
"""

from pathlib import Path

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.layout.fragments import mma_a, mma_b, mma_c
from tests.golden.fragments import FragmentCase, fragment_cases, rounded_cases

VECTORS = Path(__file__).parent / "fragments.npz"
CASES = {case.name: case for case in fragment_cases()}
ROUNDED = {case.name: case for case in rounded_cases()}


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


def numbers(registers: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of a matrix, or registers, as float64."""
    if dtype == "bf16":
        return (registers.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return registers.view({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float64)


def exact_and_bound(case: FragmentCase) -> tuple[np.ndarray, np.ndarray]:
    """The exact results [16, 8] (to float64), and how far the hardware's may be from them."""
    d, k = case.facts["d"], case.facts["k"]
    a = numbers(mma_a(k).gather(case.inputs["a"]), case.facts["a"])
    b = numbers(mma_b(k).gather(case.inputs["b"]), case.facts["b"])
    c = numbers(mma_c(16 if d == "f16" else 32).gather(case.inputs["c"]), d)
    exact, sizes = c + a @ b, np.abs(c) + np.abs(a) @ np.abs(b)
    return exact, (k + 2) * 2.0**-23 * sizes + (2.0**-10 * np.abs(exact) if d == "f16" else 0)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded(name: str) -> None:
    case = ROUNDED[name]
    fragment, (exact, bound) = mma_c(16 if case.facts["d"] == "f16" else 32), exact_and_bound(case)
    emulated = numbers(fragment.gather(emulate(case, "early")), case.facts["d"])
    half = 2.0 ** (-11 if case.facts["d"] == "f16" else -24)
    assert (np.abs(emulated - exact) <= half * np.abs(exact)).all() and (emulated != exact).any()
    with np.load(VECTORS) as vectors:
        if name not in vectors:
            pytest.skip("not recorded yet: python -m tests.golden.record_fragments, on an H100 or H200")
        assert int(vectors[f"{name}.checksum"]) == case.checksum()
        recorded = numbers(fragment.gather(vectors[name]), case.facts["d"])
    assert (np.abs(recorded - exact) <= bound).all()
