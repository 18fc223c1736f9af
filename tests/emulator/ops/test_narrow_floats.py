"""cvt between pairs of narrow floats (or powers of two, or tf32) and wider ones: every code, every kind of rounding."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptxlab.emulator.ops.alu import alu_operation

TYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
WIDTH = {"e2m3": 6, "e3m2": 6, "e2m1": 4}
each_type = pytest.mark.parametrize("name", TYPES)


def codes(name: str) -> np.ndarray:
    return np.arange(1 << WIDTH.get(name, 8), dtype=np.uint8)


def pack_pairs(name: str, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Pack pairs of codes: fp4 in a byte, the others in a byte each."""
    if name == "e2m1":
        return lower | upper << np.uint8(4)
    return lower | upper.astype(np.uint16) << np.uint16(8)


@each_type
def test_every_code_becomes_its_number(name: str) -> None:
    all_codes = codes(name)
    halves = alu_operation(f"cvt.rn.f16x2.{name}x2").compute(pack_pairs(name, all_codes[::-1].copy(), all_codes))
    expected = all_codes.view(TYPES[name]).astype(np.float16)
    np.testing.assert_array_equal(halves.view(np.float16).reshape(-1, 2), np.stack([expected, expected[::-1]], axis=1))


@each_type
def test_numbers_become_the_nearest_code(name: str) -> None:
    """Codes, the middles between them, their neighbours, and numbers beyond the largest, which stay it."""
    finite, sign = codes(name).view(TYPES[name]).astype(np.float32), np.uint8(len(codes(name)) // 2)
    finite = np.unique(finite[np.isfinite(finite)])
    middles = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, -np.inf)])
    x = np.concatenate([x, [-0.0, 1e-30, 1e30, -1e30, np.inf, -np.inf]]).astype(np.float32)
    rounded = alu_operation(f"cvt.rn.satfinite.{name}x2.f32").compute(x, -x)
    expected = x.clip(finite[0], finite[-1]).astype(TYPES[name]).view(np.uint8)
    np.testing.assert_array_equal(rounded, pack_pairs(name, expected, expected ^ sign))
    halves = np.stack([x, x], axis=1).clip(-65504, 65504).astype(np.float16)
    small = np.abs(x) >= 2.0**-14
    from_halves = alu_operation(f"cvt.rn.satfinite.{name}x2.f16x2").compute(halves.view(np.uint32)[:, 0])
    again = halves[:, 0].astype(np.float32).clip(finite[0], finite[-1]).astype(TYPES[name]).view(np.uint8)
    np.testing.assert_array_equal(from_halves[small], pack_pairs(name, again, again)[small])


@each_type
def test_nan_and_relu(name: str) -> None:
    """A NaN of fp6 and fp4, which have none, is the largest number."""
    x = np.array([np.nan, -np.nan, -1.0, -0.0, 2.0], np.float32)
    compute = alu_operation(f"cvt.rn.satfinite.relu.{name}x2.f32").compute
    nan, two = np.uint8(len(codes(name)) // 2 - 1), np.float32(2).astype(TYPES[name]).view(np.uint8)
    expected = np.array([nan, nan, 0, 0, two], np.uint8)
    np.testing.assert_array_equal(compute(x, x), pack_pairs(name, expected, expected))


def test_powers_of_two() -> None:
    """ue8m0, of f32 and of bf16: below, above, the ends of the range, and back."""
    powers = np.ldexp(1.0, np.arange(-127, 128)).astype(np.float32)
    down, up = (alu_operation(f"cvt.{mode}.ue8m0x2.f32").compute for mode in ("rz", "rp"))
    finite = alu_operation("cvt.rp.satfinite.ue8m0x2.f32").compute
    exponents, largest = np.arange(255, dtype=np.uint16), np.finfo(np.float32).max
    np.testing.assert_array_equal(down(powers, -powers * 1.5), exponents * 257)
    np.testing.assert_array_equal(up(powers * 1.25, powers), (exponents + 1) * 256 + exponents)
    x = np.array([0, 1e-45, 2.0**-128 * 1.5, largest, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(down(x, x), np.array([0, 0, 0, 254, 255, 255], np.uint16) * 257)
    np.testing.assert_array_equal(up(x, x), np.array([0, 0, 0, 255, 255, 255], np.uint16) * 257)
    np.testing.assert_array_equal(finite(x, x), np.array([0, 0, 0, 254, 254, 255], np.uint16) * 257)
    back = alu_operation("cvt.rn.bf16x2.ue8m0x2").compute(exponents * 257)
    np.testing.assert_array_equal(back.view(np.uint32) & 0xFFFF, powers.view(np.uint32) >> 16)
    again = alu_operation("cvt.rz.satfinite.ue8m0x2.bf16x2").compute(back)
    np.testing.assert_array_equal(again, exponents * 257)


def test_tf32_has_ten_bits_ties_away_from_zero() -> None:
    x = np.array([1, 1 + 2.0**-11, 1 + 2.0**-11 - 2.0**-23, -1 - 2.0**-11, np.inf, -np.inf], np.float32)
    compute = alu_operation("cvt.rna.tf32.f32").compute
    up = 1 + 2.0**-10
    np.testing.assert_array_equal(compute(x).view(np.float32), np.array([1, up, 1, -up, np.inf, -np.inf], np.float32))
    assert compute(np.array([np.nan], np.float32)) == 0x7FFFFFFF


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_tf32_to_nearest_even_and_towards_zero(mode: str, relu: str) -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x = np.concatenate([x, np.float32([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, 0, np.inf, -np.inf])])
    # of ten bits and those of the sign and exponent: as f64, cut or rounded at the eleventh
    wide = np.ldexp(1.0, np.frexp(x.astype(np.float64))[1] - 11)
    expected = np.where(np.isfinite(x), (np.rint if mode == "rn" else np.trunc)(x / wide) * wide, x)
    expected = np.where(expected < 0, 0, expected) if relu else expected
    rounded = alu_operation(f"cvt.{mode}{relu}.tf32.f32").compute(x).view(np.float32)
    np.testing.assert_array_equal(rounded, expected.astype(np.float32))


def test_tf32_saturates() -> None:
    largest = np.uint32(0x7F7FE000).view(np.float32)
    x = np.array([np.inf, -np.inf, np.finfo(np.float32).max, largest, np.nan], np.float32)
    rounded = alu_operation("cvt.rna.satfinite.tf32.f32").compute(x)
    np.testing.assert_array_equal(rounded[:4].view(np.float32), np.array([1, -1, 1, 1], np.float32) * largest)
    assert rounded[4] == 0x7FFFFFFF
