"""mma of f64 and of single bits: every shape against NumPy, registers as the PTX manual's tables have them."""

import numpy as np
import pytest

from ptxlab.errors import UnknownInstruction
from tests.support.axes import on_every_backend
from tests.support.emulated import run
from tests.support.mma_words import BITS, F64, bits, f64, kernel


@on_every_backend
@pytest.mark.parametrize("shape", F64)
def test_f64(shape: str, backend: str) -> None:
    np.testing.assert_array_equal(*f64(shape, backend))


@on_every_backend
@pytest.mark.parametrize(("shape", "op"), BITS)
def test_bits(shape: str, op: str, backend: str) -> None:
    np.testing.assert_array_equal(*bits(shape, op, backend))


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
def test_forms_that_there_are_not(form: str, counts: tuple[int, int, int], word: str, d: str) -> None:
    with pytest.raises(UnknownInstruction):
        run(kernel(form, counts, word, d), np.zeros(999), np.zeros(999))
