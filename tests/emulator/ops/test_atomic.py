"""Atomics: in which order lanes have their turn, and those of vectors, which are as many single ones."""

import numpy as np
import pytest

from ptxlab.errors import MemoryFault, SourceError, UnknownInstruction
from tests.support.small_kernels import STORE, kernel_text, run_text

# Two lanes share a vector, whose elements are registers of their own.
PLACE = (
    "mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 1; ld.param.u64 %x1, [a]; mad.wide.u32 %x1, %r1, 16, %x1; mov.u32 %s, 0;\n"
)
HALVES = "mov.b32 %r4, 0x3C014000; mov.b32 %r5, 0x00010001;\n"  # (2, 1 + 2^-10), (2^-24, 2^-24)


def run_body(body: str, a: np.ndarray) -> np.ndarray:
    """Run a body, which changes `a`; return what each lane has in %s."""
    text, out = kernel_text(PLACE + body + STORE, ".param .u64 out, .param .u64 a"), np.zeros(32, np.uint32)
    run_text(text, out, a, checks=("race", "init"))
    return out


def run_on(body: str, a: np.ndarray) -> np.ndarray:
    run_body(body, a)
    return a


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_are_rounded_one_by_one(kind: str) -> None:
    a = np.arange(16 * 8, dtype=np.float16)
    operands = a if kind == "f16" else (a.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    sums = run_on(f"{HALVES}red.relaxed.gpu.global.add.noftz.v4.{kind}x2 [%x1], {{%r4, %r5, %r4, %r5}};\n", operands)
    addends = np.array([0x4000, 0x3C01, 1, 1] * 2, np.uint16)
    if kind == "f16":
        once = np.resize(addends.view(np.float16), a.shape)
        expected = (np.arange(16 * 8, dtype=np.float16) + once) + once
    else:
        wide = np.resize((addends.astype(np.uint32) << 16).view(np.float32), a.shape)

        def round_to_bf16(x: np.ndarray) -> np.ndarray:  # to bf16, half to even
            bits = x.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)

        exact = np.arange(16 * 8, dtype=np.float32)
        expected = (round_to_bf16(round_to_bf16(exact + wide) + wide).view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(sums, expected)


def numbers_taken(mode: str, seed: int) -> list[int]:
    """Return what each lane gets where all add 1 to a counter."""
    numbers = np.zeros(32, np.uint32)
    body = "ld.param.u64 %x1, [a]; atom.global.add.u32 %s, [%x1], 1;\n"
    run_text(
        kernel_text(body + STORE, ".param .u64 out, .param .u64 a"),
        numbers,
        np.zeros(1, np.uint32),
        mode=mode,
        seed=seed,
    )
    return numbers.tolist()


def test_who_comes_first_in_mode_late_is_drawn_from_the_seed() -> None:
    in_order = [*range(32)]
    assert numbers_taken("early", 0) == numbers_taken("early", 1) == in_order
    first, second = numbers_taken("late", 0), numbers_taken("late", 1)
    assert first == numbers_taken("late", 0) != second
    assert sorted(first) == sorted(second) == in_order and in_order not in (first, second)


ONE_TWO = "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000; mov.f32 %f3, 0f00000001;\n"  # and a subnormal


@pytest.mark.parametrize("opcode", ["red.global.add.v4.f32", "red.global.v4.f32.add", "red.add.v4.f32"])
def test_single_numbers(opcode: str) -> None:
    sums = run_on(f"{ONE_TWO}{opcode} [%x1], {{%f1, %f2, %f1, %f3}};\n", np.zeros(64, np.float32))
    assert np.array_equal(sums, np.resize([2, 4, 2, 0], 64))


@pytest.mark.parametrize("opcode", ["atom.global.add.v4.f32", "atom.relaxed.gpu.v4.f32.add"])
def test_old_numbers_come_back(opcode: str) -> None:
    body = f"{ONE_TWO}{opcode} {{%f4, %f5, %f6, _}}, [%x1], {{%f1, %f2, %f1, %f1}};\nmov.b32 %s, %f5;\n"
    assert run_body(body, np.zeros(64, np.float32)).view(np.float32).tolist() == [0, 2] * 16


def test_no_number_comes_back_to_a_sink() -> None:
    assert np.array_equal(
        run_on(f"{ONE_TWO}atom.global.add.v2.f32 _, [%x1], {{%f1, %f2}};\n", np.zeros(64, np.float32)),
        np.resize([2, 4, 0, 0], 64),
    )


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("min.noftz.v2.f16x2", [0x4000BC00, 0x00010001]),
        ("max.noftz.v2.f16x2", [0x45003C01, 0x42004200]),
        ("v2.bf16x2.max.noftz", [0x45003C01, 0x42004200]),
    ],
)
def test_smaller_and_larger_halves(opcode: str, expected: list[int]) -> None:
    operands = np.resize(np.array([0x4500BC00, 0x42004200, 0, 0], np.uint32), 64)
    second = "mov.b32 %r8, 0x40003C01; mov.b32 %r9, 0x00010001;\n"
    assert np.array_equal(
        run_on(f"{second}red.global.{opcode} [%x1], {{%r8, %r9}};\n", operands), np.resize([*expected, 0, 0], 64)
    )


def test_a_generic_address_of_shared_memory_is_refused() -> None:
    line = "cvta.shared.u64 %x2, tile; red.add.v2.f32 [%x2], {%f1, %f1};\n"
    text = kernel_text(".shared .align 16 .b8 tile[16];\n" + line + "ret;")
    with pytest.raises(MemoryFault, match="vectors are added in global memory alone"):
        run_text(text, np.zeros(1))


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("red.global.add.v8.f32 [%x1], {%f1, %f1, %f1, %f1, %f1, %f1, %f1, %f1}", UnknownInstruction, "red|atom"),
        ("red.shared.add.v2.f32 [%r2], {%f1, %f1}", UnknownInstruction, "red|atom"),
        ("red.global.add.v2.u32 [%x1], {%r1, %r1}", UnknownInstruction, "red|atom"),
        ("red.global.max.v2.f32 [%x1], {%f1, %f1}", UnknownInstruction, "red|atom"),
        ("atom.shared.add.v2.f32 {%f1, %f1}, [%r2], {%f1, %f1}", UnknownInstruction, "red|atom"),
        ("atom.global.exch.v2.f32 {%f1, %f1}, [%x1], {%f1, %f1}", UnknownInstruction, "red|atom"),
        ("red.global.add.v2.f32 [%x1], {%f1, %f1, %f1}", SourceError, "3 registers for 2 elements"),
        ("red.global.add.v2.f32 [%x1], {%f1, %f1}, %x1", SourceError, "takes 2 operands, not 3"),
    ],
)
def test_other_forms_are_refused(line: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_on(f"{line};\n", np.zeros(64, np.float32))
