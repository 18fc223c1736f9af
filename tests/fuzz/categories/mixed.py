"""Instructions of all tables that only compute, in one program."""

import numpy as np

from tests.fuzz.categories import bits, comparisons, conversions, floats, integers, video, warps
from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.program import Program

TABLES = [
    table
    for tables in (integers.TABLES, bits.TABLES, comparisons.TABLES, floats.TABLES, conversions.TABLES)
    for table in tables
]
TABLES += [*video.TABLES, (warps.TABLE, warps.HOW)]


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    return generate_straight(rng, category, TABLES, (30, 75), (32, 64))
