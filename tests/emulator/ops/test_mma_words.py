"""mma of f64 and of single bits: every shape against NumPy, registers as the PTX manual's tables have them."""

import numpy as np
import pytest

from ptxlab.errors import UnknownInstruction
from tests.support.axes import on_every_backend
from tests.support.mma_words import BITS, F64, kernel, run_bits, run_f64, run_mma
from tests.support.small_kernels import run_text


@on_every_backend
@pytest.mark.parametrize("shape", F64)
def test_f64(shape: str, backend: str) -> None:
    np.testing.assert_array_equal(*run_f64(shape, backend))


@on_every_backend
@pytest.mark.parametrize(("rounding", "last_bit"), [("rn", 0), ("rz", 0), ("rm", 0), ("rp", 2.0**-52)])
def test_f64_rounds_each_sum(rounding: str, last_bit: float, backend: str) -> None:
    a, b, c = np.zeros((8, 4)), np.ones((4, 8)), np.ones((8, 8))
    a[:, 3] = 2.0**-60
    text = kernel(f"m8n8k4.row.col.{rounding}.f64.f64.f64.f64", (1, 1, 2), "f64", "f64")
    np.testing.assert_array_equal(run_mma(text, a, b, c, backend), c + last_bit)


@on_every_backend
@pytest.mark.parametrize(("shape", "op"), BITS)
def test_bits(shape: str, op: str, backend: str) -> None:
    np.testing.assert_array_equal(*run_bits(shape, op, backend))


@pytest.mark.parametrize(
    ("form", "counts", "word", "d"),
    [
        ("m16n8k8.row.col.f64.f64.f64", (4, 2, 4), "f64", "f64"),
        ("m16n8k8.col.col.f64.f64.f64.f64", (4, 2, 4), "f64", "f64"),
        ("m16n8k32.row.col.f64.f64.f64.f64", (4, 2, 4), "f64", "f64"),
        ("m16n8k256.row.col.s32.b1.b1.s32.or.popc", (4, 2, 4), "b32", "s32"),
        ("m16n8k256.row.col.s32.b1.b1.s32.xor", (4, 2, 4), "b32", "s32"),
    ],
)
def test_unknown_forms_are_refused(form: str, counts: tuple[int, int, int], word: str, d: str) -> None:
    with pytest.raises(UnknownInstruction):
        run_text(kernel(form, counts, word, d), np.zeros(999), np.zeros(999))
