"""The fragment maps and the emulator against what a GPU did: both must give its results, to the bit."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ptxlab import emulator, toolchain
from ptxlab.hardware.descriptors import MatrixDescriptor
from ptxlab.hardware.fragments import Fragment, ldmatrix, mma_a, mma_b, mma_c, wgmma_a, wgmma_d
from ptxlab.sources import Source
from tests.golden.fragments import (
    BITS,
    FragmentCase,
    fragment_cases,
    further_mma_cases,
    narrow_cases,
    rounding_cases,
    s4_cases,
)

VECTORS = Path(__file__).parent / "fragments.npz"
CASES = {case.name: case for case in fragment_cases()}
NARROW = {case.name: case for case in [*s4_cases(), *narrow_cases(), *further_mma_cases()]}
INTEGERS = {"s8": np.int8, "u8": np.uint8, "s4": np.int8, "u4": np.uint8}
FLOATS = {
    "f16": np.float16, "f32": np.float32, "s32": np.int32, "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


@pytest.fixture(scope="session")
def vectors():
    if not VECTORS.exists():
        pytest.fail(f"{VECTORS.name} is missing: run `python -m tests.golden.record_fragments` on an H100 or H200")
    with np.load(VECTORS) as archive:
        return dict(archive)


def values(fragment: Fragment, registers: np.ndarray, dtype: str) -> np.ndarray:
    """Gather the matrix that registers hold, as float64: exact for every type and sum here."""
    if dtype == "bf16":
        return (fragment.gather(registers).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return fragment.gather(registers, (INTEGERS | FLOATS)[dtype]).astype(np.float64)


def predict(case: FragmentCase) -> np.ndarray:
    """Predict by the fragment maps the result that the kernel of `case` leaves."""
    kind, inputs, facts = case.name.split("_")[0], case.inputs, case.facts
    if kind == "ldmatrix":
        return ldmatrix(facts["count"], facts["trans"]).scatter(inputs["source"][: 8 * facts["count"]])
    if kind == "stmatrix":
        rows = ldmatrix(facts["count"], facts["trans"]).gather(inputs["source"])
        return np.pad(rows, ((0, 32 - len(rows)), (0, 0))).view(np.uint32)
    if kind == "mma":
        k, bits = facts["k"], 16 if facts["d"] == "f16" else 32
        map_a, map_b = (of(k, BITS[facts["a"]]) for of in (mma_a, mma_b))
        a, b = values(map_a, inputs["a"], facts["a"]), values(map_b, inputs["b"], facts["b"])
        d = a @ b + values(mma_c(bits), inputs["c"], facts["d"])
        return mma_c(bits).scatter(d.astype(FLOATS[facts["d"]]))
    registers = np.split(inputs["a"], len(facts["starts"]), axis=1)
    a = np.hstack([values(wgmma_a(), r, facts["a"]) for r in registers])
    starts = [MatrixDescriptor(s, facts["stride"], facts["leading"], facts["span"]) for s in facts["starts"]]
    b = np.hstack([inputs["image"][start.addresses(facts["n"])] for start in starts])
    return wgmma_d(facts["n"]).scatter((a @ b.T.astype(np.float64)).astype(np.int32))


@pytest.mark.parametrize("name", CASES)
def test_recorded(name: str, vectors) -> None:
    case = CASES[name]
    assert name in vectors, f"{name} is not recorded"
    assert int(vectors[f"{name}.checksum"]) == case.checksum(), f"{name}: recorded with another kernel or other inputs"
    np.testing.assert_array_equal(vectors[name], predict(case), strict=True)


@pytest.mark.full
def test_kernels_assemble() -> None:
    """A recording on a GPU then cannot fail for a reason that this machine could have found."""
    for case in (CASES | NARROW).values():
        assert toolchain.assemble(Source.from_text(case.ptx, f"{case.name}.ptx"), "sm_90a").warnings == (), case.name


ROUNDED = {case.name: case for case in rounding_cases()}


def emulate(case: FragmentCase, mode: str) -> np.ndarray:
    out = np.full(case.out, 0xDEADBEEF, np.uint32)
    arguments = [*(array.copy() for array in case.inputs.values()), out]
    module = emulator.parse(case.ptx, f"{case.name}.ptx")
    outcome = emulator.run(module, case.name, arguments, grid=1, block=case.threads, checks=emulator.CHECKS, mode=mode)
    assert [str(finding) for finding in outcome.findings] == []
    return out


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str, vectors) -> None:
    for mode in emulator.MODES if name.startswith("wgmma") else emulator.MODES[:1]:
        np.testing.assert_array_equal(emulate(CASES[name], mode), vectors[name], strict=True)


def exact_and_bound(case: FragmentCase) -> tuple[np.ndarray, np.ndarray]:
    """Compute the exact results [16, 8] (to float64), and how far the hardware's may be from them.

    Hardware shifts the addends of several products to the largest exponent, truncates them there, and truncates the sum
    (f32) or rounds it (f16); the emulator rounds the exact sum once. At most 2^-23 of the largest addend is lost per
    addend. (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ CS 7:e330, 2021; a model of the H100 to the
    bit: Khattak and Mikaitis, arXiv:2512.07004.)
    """
    d, k = case.facts["d"], case.facts["k"]
    a, b = values(mma_a(k), case.inputs["a"], case.facts["a"]), values(mma_b(k), case.inputs["b"], case.facts["b"])
    c = values(mma_c(16 if d == "f16" else 32), case.inputs["c"], d)
    exact, sizes = c + a @ b, np.abs(c) + np.abs(a) @ np.abs(b)
    return exact, (k + 2) * 2.0**-23 * sizes + (2.0**-10 * np.abs(exact) if d == "f16" else 0)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded(name: str, vectors) -> None:
    case = ROUNDED[name]
    fragment, (exact, bound) = mma_c(16 if case.facts["d"] == "f16" else 32), exact_and_bound(case)
    emulated = values(fragment, emulate(case, "early"), case.facts["d"])
    half = 2.0 ** (-11 if case.facts["d"] == "f16" else -24)
    assert (np.abs(emulated - exact) <= half * np.abs(exact)).all() and (emulated != exact).any()
    assert int(vectors[f"{name}.checksum"]) == case.checksum()
    assert (np.abs(values(fragment, vectors[name], case.facts["d"]) - exact) <= bound).all()


@pytest.mark.parametrize("name", NARROW)
def test_every_form_of_4_bits_tf32_and_fp8(name: str, vectors) -> None:
    case = NARROW[name]
    expected = predict(case)
    np.testing.assert_array_equal(emulate(case, "early"), expected, strict=True)
    assert int(vectors[f"{name}.checksum"]) == case.checksum()
    np.testing.assert_array_equal(vectors[name], expected, strict=True)
