"""The fragment maps against what a GPU did: its results must be what the maps predict, to the bit."""

from pathlib import Path

import numpy as np
import pytest

from ptxlab import toolchain
from ptxlab.layout.descriptors import MatrixDescriptor
from ptxlab.layout.fragments import Fragment, ldmatrix, mma_a, mma_b, mma_c, wgmma_a, wgmma_d
from ptxlab.sources import Source
from tests.golden.fragments import FragmentCase, fragment_cases

VECTORS = Path(__file__).parent / "fragments.npz"
CASES = {case.name: case for case in fragment_cases()}
INTEGERS = {"s8": np.int8, "u8": np.uint8, "s4": np.int8, "u4": np.uint8}
FLOATS = {"f16": np.float16, "f32": np.float32, "s32": np.int32}


@pytest.fixture(scope="session")
def vectors():
    if not VECTORS.exists():
        pytest.fail(f"{VECTORS.name} is missing: run `python -m tests.golden.record_fragments` on an H100 or H200")
    with np.load(VECTORS) as stored:
        return dict(stored)


def values(fragment: Fragment, registers: np.ndarray, dtype: str) -> np.ndarray:
    """The matrix that registers hold, as float64: exact for every type and sum here."""
    if dtype == "bf16":
        return (fragment.gather(registers).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return fragment.gather(registers, (INTEGERS | FLOATS)[dtype]).astype(np.float64)


def predict(case: FragmentCase) -> np.ndarray:
    """What the maps say that the kernel of `case` leaves in its result."""
    kind, inputs, facts = case.name.split("_")[0], case.inputs, case.facts
    if kind == "ldmatrix":
        return ldmatrix(facts["count"], facts["trans"]).scatter(inputs["source"][: 8 * facts["count"]])
    if kind == "stmatrix":
        rows = ldmatrix(facts["count"], facts["trans"]).gather(inputs["source"])
        return np.pad(rows, ((0, 32 - len(rows)), (0, 0))).view(np.uint32)
    if kind == "mma":
        k, bits = facts["k"], 16 if facts["d"] == "f16" else 32
        a, b = values(mma_a(k), inputs["a"], facts["a"]), values(mma_b(k), inputs["b"], facts["b"])
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


def test_kernels_assemble() -> None:
    """So that a recording on a GPU cannot fail for a reason that this machine could have found."""
    for case in CASES.values():
        assert toolchain.assemble(Source.from_text(case.ptx, f"{case.name}.ptx"), "sm_90a").warnings == (), case.name
