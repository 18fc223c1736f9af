"""cvt between fp8 pairs, tf32 and wider floats: every code, and every kind of rounding, against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from ptxlab.emulator.ops.alu import alu_operation

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
each_type = pytest.mark.parametrize("name", TYPES)


@each_type
def test_every_code_becomes_its_number(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    pairs = np.stack([codes, codes[::-1]], axis=1).view(np.uint16)[:, 0]
    halves = alu_operation(f"cvt.rn.f16x2.{name}x2").compute(pairs).view(np.float16).reshape(-1, 2)
    expected = codes.view(TYPES[name]).astype(np.float16)
    np.testing.assert_array_equal(halves, np.stack([expected, expected[::-1]], axis=1))


@each_type
def test_numbers_become_the_nearest_code(name: str) -> None:
    """Codes, the middles between them, their neighbours, and numbers beyond the largest, which stay it."""
    finite = np.arange(256, dtype=np.uint8).view(TYPES[name]).astype(np.float32)
    finite = np.unique(finite[np.isfinite(finite)])
    middles = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, -np.inf)])
    x = np.concatenate([x, [-0.0, 1e-30, 1e30, -1e30, np.inf, -np.inf]]).astype(np.float32)
    packed = alu_operation(f"cvt.rn.satfinite.{name}x2.f32").compute(x, -x)
    expected = x.clip(finite[0], finite[-1]).astype(TYPES[name]).view(np.uint8)
    np.testing.assert_array_equal(packed >> 8, expected)
    np.testing.assert_array_equal(packed & 0xFF, expected ^ 0x80)
    halves = np.stack([x, x], axis=1).clip(-65504, 65504).astype(np.float16)
    small = np.abs(x) >= 2.0**-14
    from_halves = alu_operation(f"cvt.rn.satfinite.{name}x2.f16x2").compute(halves.view(np.uint32)[:, 0])
    again = halves[:, 0].astype(np.float32).clip(finite[0], finite[-1]).astype(TYPES[name]).view(np.uint8)
    np.testing.assert_array_equal((from_halves & 0xFF)[small], again[small])


@each_type
def test_nan_and_relu(name: str) -> None:
    x = np.array([np.nan, -np.nan, -1.0, -0.0, 2.0], np.float32)
    compute = alu_operation(f"cvt.rn.satfinite.relu.{name}x2.f32").compute
    two = np.float32(2).astype(TYPES[name]).view(np.uint8)
    np.testing.assert_array_equal(compute(x, x) & 0xFF, [0x7F, 0x7F, 0, 0, two])


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
    found = alu_operation(f"cvt.{mode}{relu}.tf32.f32").compute(x).view(np.float32)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_tf32_saturates() -> None:
    largest = np.uint32(0x7F7FE000).view(np.float32)
    x = np.array([np.inf, -np.inf, np.finfo(np.float32).max, largest, np.nan], np.float32)
    found = alu_operation("cvt.rna.satfinite.tf32.f32").compute(x)
    np.testing.assert_array_equal(found[:4].view(np.float32), np.array([1, -1, 1, 1], np.float32) * largest)
    assert found[4] == 0x7FFFFFFF
