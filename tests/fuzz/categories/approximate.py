"""Approximate functions, compared within the bounds of the golden vectors."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.forms import parse
from tests.fuzz.program import How, Program, Tolerance


def approximate_table(forms: str, relative: float, absolute: float = 0.0, fresh: str = "") -> tuple[list[str], How]:
    """Return a table of forms, and how far their results may be off."""
    return parse(forms), How(constants=False, fresh=fresh, tolerance=Tolerance(relative, absolute))


TABLES = [
    approximate_table("ex2.approx(/.ftz).f32 d:f32, a:f32;", 2.0**-21, 2.0**-148),
    approximate_table("lg2.approx(/.ftz).f32 d:f32, a:f32;", 2.0**-21, 2.0**-21),
    approximate_table("rcp.approx.f32 d:f32, a:f32;", 2.0**-22, 2.0**-148),
    approximate_table("rcp.approx.ftz.f32 d:f32, a:f32;", 2.0**-22, 2.0**-148, fresh="operands of reciprocals"),
    approximate_table("(sqrt/rsqrt).approx(/.ftz).f32 d:f32, a:f32;", 2.0**-21),
    approximate_table("(sin/cos).approx(/.ftz).f32 d:f32, a:angle;", 0.0, 2.0**-20),
    approximate_table("tanh.approx.f32 d:f32, a:f32;", 2.0**-10, 2.0**-130),
    approximate_table("div.(approx/full)(/.ftz).f32 d:f32, a:f32, b:angle;", 2.0**-21, 2.0**-147),
    approximate_table("(ex2/tanh).approx.(t=f16/f16x2) d:$t, a:$t;", 2.0**-9, 2.0**-23),
    approximate_table("(ex2.approx.ftz/tanh.approx).(t=bf16/bf16x2) d:$t, a:$t;", 2.0**-7, 2.0**-126),
    approximate_table("rsqrt.approx.f64 d:f64, a:f64;", 2.0**-50),
    approximate_table("(rcp/rsqrt).approx.ftz.f64 d:f64, a:f64;", 2.0**-18),
]


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    return generate_straight(rng, category, TABLES, (15, 35))
