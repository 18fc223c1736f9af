"""wmma: every shape and type against NumPy, both layouts, wide strides; and what there is not."""

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.errors import EmulationError, MemoryFault, UnknownInstruction
from tests.support.axes import on_every_backend
from tests.support.small_kernels import HEADER, line_of, run_text
from tests.support.wmma import DTYPES, FORMS, LAYOUTS, kernel, run_wmma

REGISTERS = {"f16": (8, "b32"), "f64": (1, "f64"), "tf32": (4, "b32")}


@on_every_backend
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(("shape", "t", "d"), FORMS)
def test_every_form(shape: str, t: str, d: str, layouts: tuple[str, str, str], backend: str) -> None:
    for options in [{"checks": "all", "mode": mode} for mode in emulator.MODES] if backend == "emulator" else [{}]:
        np.testing.assert_array_equal(*run_wmma(shape, t, d, layouts, backend, **options))


def test_f64_is_rounded_to_nearest_even_if_nothing_is_said() -> None:
    a, out = np.eye(8, 4), np.zeros((8, 8))
    text = kernel("m8n8k4", "f64", "f64", ("row", "col", "row"), (4, 4, 8)).replace(".rn ", " ")
    run_text(text, a, a, out.copy(), out)
    np.testing.assert_array_equal(out, a @ a.T)


@pytest.mark.parametrize(
    ("d", "planted", "kinds"), [("f32", 65504, []), ("f16", 65504, ["overflow"]), ("f32", np.inf, ["nan"])]
)
def test_where_a_nan_arises(d: str, planted: float, kinds: list[str]) -> None:
    """65504 * 65504 fits f32, not f16; infinity * 0."""
    a, c = np.zeros((16, 16), np.float16), np.zeros((16, 16), DTYPES[d])
    a[3, 3] = planted
    text = kernel("m16n16k16", "f16", d, ("row", "col", "row"), (16, 16, 16))
    findings = run_text(text, a, a, c, c.copy(), checks=["float"]).findings
    assert [(f.kind, f.line) for f in findings] == [(kind, line_of(text, "wmma.mma")) for kind in kinds]


def test_integers_wrap_or_are_clamped() -> None:
    a, b = np.full((16, 16), 127, np.int8), np.full((16, 16), 127, np.int8)
    c, d = np.full((16, 16), 2**31 - 1, np.int32), np.zeros((16, 16), np.int32)
    text = kernel("m16n16k16", "s8", "s32", ("row", "col", "row"), (16, 16, 16))
    run_text(text, a, b, c, d)
    assert (d == 2**31 - 1 + 16 * 127 * 127 - 2**32).all()
    run_text(text.replace(".s8.s8.s32", ".s8.s8.s32.satfinite"), a, b, c, d)
    assert (d == 2**31 - 1).all()


SMALL = [("m8n8k32", "s4", 8), ("m8n8k32", "u4", 8), ("m8n8k128", "b1", 32)]  # elements of a word


def sub_byte_kernel(shape: str, t: str, operation: str, satfinite: str = "") -> str:
    """Write a kernel of one wmma of elements below a byte, A by rows, B and C by columns."""
    return f"""{HEADER}.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd) {{
    .reg .b64 %x<4>; .reg .b32 %a, %b, %s; .reg .s32 %c<2>, %d<2>;
    ld.param.u64 %x0, [pa]; ld.param.u64 %x1, [pb]; ld.param.u64 %x2, [pc]; ld.param.u64 %x3, [pd]; mov.b32 %s, 256;
    wmma.load.a.sync.aligned.row.{shape}.{t} {{%a}}, [%x0];
    wmma.load.b.sync.aligned.col.{shape}.global.{t} {{%b}}, [%x1], %s;
    wmma.load.c.sync.aligned.col.{shape}.s32 {{%c0, %c1}}, [%x2], 8;
    wmma.mma{operation}.sync.aligned.row.col.{shape}.s32.{t}.{t}.s32{satfinite}
        {{%d0, %d1}}, {{%a}}, {{%b}}, {{%c0, %c1}};
    wmma.store.d.sync.aligned.row.{shape}.s32 [%x3], {{%d0, %d1}}, 8;
    ret; }}"""


@on_every_backend
@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize(("shape", "t", "per_word"), SMALL)
def test_elements_of_less_than_a_byte(shape: str, t: str, per_word: int, operation: str, backend: str) -> None:
    rng, k = np.random.default_rng(2), int(shape.split("k")[1])
    a, b = (
        rng.integers(0, 2**32, (8, k // per_word), np.uint32),
        rng.integers(0, 2**32, (8, 256 // per_word), np.uint32),
    )
    c, d = rng.integers(-(2**31), 2**31, (8, 8)).astype(np.int32), np.zeros((8, 8), np.int32)
    text = sub_byte_kernel(
        shape, t, f".{operation}.popc" if t == "b1" else "", ".satfinite" * (t != "b1" and operation == "and")
    )
    ptxlab.load(text)(a, b, c.T.copy(), d, grid=1, block=32, backend=backend)
    left, right = ((x[:, : k // per_word, None] >> np.arange(0, 32, 32 // per_word) & 2 ** (32 // per_word) - 1)
                   .reshape(8, k).astype(np.int64) for x in (a, b))  # fmt: skip
    if t == "b1":
        both = left[:, None] ^ right if operation == "xor" else left[:, None] & right
        sums = both.sum(axis=2)
    else:
        left, right = ((x ^ 8) - 8 if t == "s4" else x for x in (left, right))
        sums = left @ right.T
    exact = c + sums
    expected = exact.clip(-(2**31), 2**31 - 1) if ".satfinite" in text else exact
    np.testing.assert_array_equal(d, expected.astype(np.int32))


def test_a_stride_within_a_word_is_refused() -> None:
    text = sub_byte_kernel("m8n8k32", "s4", "").replace("mov.b32 %s, 256", "mov.b32 %s, 36")
    with pytest.raises(EmulationError, match="the stride is no multiple of 8"):
        run_text(text, *np.zeros((4, 64), np.uint32))


def test_f64_is_a_chain_of_fused_products() -> None:
    a, b, c, out = np.zeros((8, 4)), np.ones((8, 4)), np.full((8, 8), -0.0), np.ones((8, 8))
    a[1], a[2, 3] = -0.0, 2.0**-60
    c[2] = 1
    text = kernel("m8n8k4", "f64", "f64", ("row", "col", "row"), (4, 4, 8))
    run_text(text.replace(".rn ", ".rp "), a, b, c, out)
    assert not np.signbit(out[0]).any() and np.signbit(out[1]).all() and (out[2] == 1 + 2.0**-52).all()


def test_a_matrix_that_reaches_beyond_its_buffer() -> None:
    text = kernel("m16n16k16", "f16", "f32", ("row", "col", "row"), (24, 16, 16))
    a, c = np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float32)
    with pytest.raises(MemoryFault, match="out of bounds"):
        run_text(text, a, a, c, c.copy())


@pytest.mark.parametrize("form", [
    ("wmma.load.a", "wmma.prefetch.a"), ("m16n16k16.global.f16", "m16n16k8.global.f16"),
    ("m16n16k16.f32.f32", "m16n16k16.f32.bf16.f16.f32"), ("wmma.mma.sync.aligned", "wmma.mma.sync"),
    ("m16n16k16.f32.f32", "m16n16k16.f32.f32.rn"), ("row.col.m16n16k16.f32.f32", "row.row.m8n8k32.s32.s4.s4.s32"),
    ("load.a.sync.aligned.row.m16n16k16.global.f16", "load.a.sync.aligned.col.m8n8k32.s4"),
    ("row.col.m16n16k16.f32.f32", "row.col.m8n8k128.s32.b1.b1.s32"),
])  # fmt: skip
def test_unknown_forms_are_refused(form: tuple[str, str]) -> None:
    text = kernel("m16n16k16", "f16", "f32", ("row", "col", "row"), (16, 16, 16)).replace(*form)
    c = np.zeros((16, 16), np.float32)
    with pytest.raises(UnknownInstruction):
        run_text(text, c, c, c, c)
