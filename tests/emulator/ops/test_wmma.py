"""wmma: every shape and type against NumPy, both layouts, wide strides; and what there is not."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.errors import MemoryFault, UnknownInstruction
from tests.support.axes import on_every_backend
from tests.support.emulated import line_of, run
from tests.support.wmma import DTYPES, FORMS, LAYOUTS, kernel, multiplied

REGISTERS = {"f16": (8, "b32"), "f64": (1, "f64"), "tf32": (4, "b32")}


@on_every_backend
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(("shape", "t", "d"), FORMS)
def test_every_form(shape: str, t: str, d: str, layouts: tuple[str, str, str], backend: str) -> None:
    for how in [{"checks": "all", "mode": mode} for mode in emulator.MODES] if backend == "emulator" else [{}]:
        np.testing.assert_array_equal(*multiplied(shape, t, d, layouts, backend, **how))


def test_f64_is_rounded_to_nearest_even_if_nothing_is_said() -> None:
    a, out = np.eye(8, 4), np.zeros((8, 8))
    text = kernel("m8n8k4", "f64", "f64", ("row", "col", "row"), (4, 4, 8)).replace(".rn ", " ")
    run(text, a, a, out.copy(), out)
    np.testing.assert_array_equal(out, a @ a.T)


@pytest.mark.parametrize(
    ("d", "planted", "kinds"), [("f32", 65504, []), ("f16", 65504, ["overflow"]), ("f32", np.inf, ["nan"])]
)
def test_where_a_nan_arises(d: str, planted: float, kinds: list[str]) -> None:
    """65504 * 65504 fits f32, not f16; infinity * 0."""
    a, c = np.zeros((16, 16), np.float16), np.zeros((16, 16), DTYPES[d])
    a[3, 3] = planted
    text = kernel("m16n16k16", "f16", d, ("row", "col", "row"), (16, 16, 16))
    found = run(text, a, a, c, c.copy(), checks=["float"]).findings
    assert [(f.kind, f.line) for f in found] == [(kind, line_of(text, "wmma.mma")) for kind in kinds]


def test_integers_wrap_or_are_clamped() -> None:
    a, b = np.full((16, 16), 127, np.int8), np.full((16, 16), 127, np.int8)
    c, d = np.full((16, 16), 2**31 - 1, np.int32), np.zeros((16, 16), np.int32)
    text = kernel("m16n16k16", "s8", "s32", ("row", "col", "row"), (16, 16, 16))
    run(text, a, b, c, d)
    assert (d == 2**31 - 1 + 16 * 127 * 127 - 2**32).all()
    run(text.replace(".s8.s8.s32", ".s8.s8.s32.satfinite"), a, b, c, d)
    assert (d == 2**31 - 1).all()


def test_a_matrix_that_reaches_beyond_its_buffer() -> None:
    text = kernel("m16n16k16", "f16", "f32", ("row", "col", "row"), (24, 16, 16))
    a, c = np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float32)
    with pytest.raises(MemoryFault, match="out of bounds"):
        run(text, a, a, c, c.copy())


@pytest.mark.parametrize("form", [
    ("wmma.load.a", "wmma.prefetch.a"), ("m16n16k16.global.f16", "m16n16k8.global.f16"),
    ("m16n16k16.f32.f32", "m16n16k16.f32.bf16.f16.f32"), ("wmma.mma.sync.aligned", "wmma.mma.sync"),
    ("m16n16k16.f32.f32", "m16n16k16.f32.f32.rn"),
])  # fmt: skip
def test_forms_that_there_are_not(form: tuple[str, str]) -> None:
    text = kernel("m16n16k16", "f16", "f32", ("row", "col", "row"), (16, 16, 16)).replace(*form)
    c = np.zeros((16, 16), np.float32)
    with pytest.raises(UnknownInstruction):
        run(text, c, c, c, c)
