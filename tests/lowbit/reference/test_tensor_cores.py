"""The model of Hopper's tensor cores against their instruction, and against what is known of it."""

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.lowbit.reference.tensor_cores import hopper_mma
from tests.golden.hopper_mma import CASES, RECORDED, Case, instruction

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def differences(a: np.ndarray, b: np.ndarray, c: np.ndarray, model: np.ndarray, right: np.ndarray) -> str:
    """Describe how many bits differ, and everything about the first difference; NaN equals NaN."""
    same = (model.view(np.uint32) == right.view(np.uint32)) | (np.isnan(model) & np.isnan(right))
    if same.all():
        return ""
    n, i, j = np.argwhere(~same)[0]
    terms = [f"{x}*{y}" for x, y in zip(a[n, i].astype(float), b[n, :, j].astype(float), strict=True)]
    sizes = f"{(~same).sum()} of {same.size} differ, the first at {n, i, j}"
    values = f"{float(model[n, i, j]).hex()} by the model, {float(right[n, i, j]).hex()} by the instruction"
    return f"{sizes}: {values}; c = {float(c[n, i, j]).hex()}, products {' '.join(terms)}"


@every_case
def test_equal_to_what_was_recorded(case: Case) -> None:
    """The record is of an H200, by `tests/golden/record_hopper_mma.py`."""
    with np.load(RECORDED) as archive:
        a, b, c, d = (archive[f"{case.__name__}_{name}"] for name in "abcd")
    assert differences(a, b, c, hopper_mma(a, b, c), d) == ""


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="a model of Hopper")
@every_case
def test_equal_to_the_instruction(case: Case) -> None:
    operands = case(np.random.default_rng(0), 12_500)
    assert differences(*operands, hopper_mma(*operands), instruction(*operands, "gpu")) == ""


@pytest.mark.gpu
@every_case
def test_the_same_on_the_gpu(case: Case) -> None:
    operands = case(np.random.default_rng(1), 500)
    on_gpu = gpu.to_host(hopper_mma(*map(gpu.to_device, operands)))
    assert differences(*operands, hopper_mma(*operands), on_gpu) == ""


def test_integers_are_exact() -> None:
    """Nothing is cut off of them; and the instruction has its operands in the right places."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 10, (3, *shape)).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = rng.integers(-9, 10, (3, 16, 8)).astype(np.float32)
    exact = a.astype(np.float32) @ b.astype(np.float32) + c
    assert np.array_equal(hopper_mma(a, b, c), exact)
    assert np.array_equal(instruction(a, b, c, "emulator"), exact)


@every_case
def test_near_the_exact_sum(case: Case) -> None:
    """Off by 17 terms' last bits and the result's, no more, and towards zero where all terms have one sign."""
    a, b, c = case(np.random.default_rng(2), 20)
    a, b, c = (np.where(np.isfinite(x), x, 0).astype(x.dtype) for x in (a, b, c))
    rounded = hopper_mma(a, b, c).astype(np.float64)
    products = a[..., None].astype(np.float64) * b[:, None].astype(np.float64)
    exact, largest = products.sum(axis=2) + c, np.maximum(np.abs(products).max(axis=2), np.abs(c))
    a_size, b_size = (np.exp2(np.maximum(np.frexp(np.abs(x).astype(float))[1], -13)) * (x != 0) for x in (a, b))
    unit = np.maximum((a_size[..., None] * b_size[:, None]).max(axis=2), largest * 2) * 2.0**-25
    assert (np.abs(rounded - exact) <= 17 * unit + np.abs(exact) * 2.0**-23).all()
    if (products >= 0).all() and (c >= 0).all():
        assert (rounded <= exact).all() and (rounded < exact).any()


@pytest.mark.parametrize(
    ("products", "c", "expected"),
    [
        ([(1.0, 1.0), (1.0, 2.0**-24)], 0.0, 1.0),  # cut off to FP32
        ([(1.0, 1.0), (1.0, 2.0**-24), (1.0, 2.0**-24)], 0.0, 1 + 2.0**-23),  # though not before they are added up
        ([(1.0, 1.0), (2.0**-12, 2.0**-14), (2.0**-12, 2.0**-14)], 0.0, 1.0),  # 26 bits below: each is cut off
        ([(1.0, 1.0), (-(2.0**-12), 2.0**-14)], 0.0, 1.0),  # towards zero
        ([(1.5, 1.5)], 2.0**-25, 2.25),  # the product of 2.25 has the exponent of 1
        ([(0.0, 1.0)], 2.0**-60, 2.0**-60),  # a zero has no exponent
        ([(0.0, 1.0)], -0.0, 0.0),
        ([(2.0**-24, 2.0**-24)], 2.0**-54, 2.0**-48),  # subnormals have that of 2^-14
    ],
)
def test_bits_that_the_model_cuts_off(products: list[tuple[float, float]], c: float, expected: float) -> None:
    a, b = np.zeros((1, 16), np.float16), np.zeros((16, 1), np.float16)
    for k, (x, y) in enumerate(products):
        a[0, k], b[k, 0] = x, y
    rounded = hopper_mma(a, b, np.array([[c]], np.float32)).item()
    assert (rounded, np.signbit(rounded)) == (expected, np.signbit(expected))
