"""Kinds of programs, by name: what makes one, and how often."""

import numpy as np

from tests.fuzz.categories import (
    approximate,
    atomics,
    barriers,
    bits,
    bulk,
    chains,
    clusters,
    comparisons,
    control,
    conversions,
    copies,
    floats,
    fragments,
    integers,
    matrices,
    mbarriers,
    memory,
    mixed,
    roundings,
    tensors,
    video,
    warps,
    wgmmas,
)
from tests.fuzz.program import Program

CATEGORIES = {
    "integers": (integers.generate, 12),
    "bits": (bits.generate, 12),
    "compare": (comparisons.generate, 10),
    "video": (video.generate, 10),
    "floats": (floats.generate, 14),
    "approximate": (approximate.generate, 3),
    "conversions": (conversions.generate, 13),
    "warps": (warps.generate, 9),
    "mixed": (mixed.generate, 8),
    "control": (control.generate, 12),
    "memory": (memory.generate, 9),
    "atomics": (atomics.generate, 8),
    "barriers": (barriers.generate, 4),
    "mma": (matrices.generate, 10),
    "mma_lines": (matrices.generate_lines, 5),
    "mma_quarters": (matrices.generate_quarters, 1),
    "mma_roundings": (roundings.generate, 4),
    "ldmatrix": (fragments.generate, 4),
    "wmma": (fragments.generate_wmma, 4),
    "cp_async": (copies.generate, 4),
    "bulk": (bulk.generate, 5),
    "mbarriers": (mbarriers.generate, 4),
    "wgmma": (wgmmas.generate, 6),
    "tensors": (tensors.generate, 6),
    "clusters": (clusters.generate, 5),
    "chains": (chains.generate, 4),
}


def generate(rng: np.random.Generator, category: str = "") -> Program:
    """Make a program of a category, or of any."""
    if not category:
        weights = np.array([weight for _, weight in CATEGORIES.values()], float)
        category = list(CATEGORIES)[int(rng.choice(len(weights), p=weights / weights.sum()))]
    make, _ = CATEGORIES[category]
    return make(rng, category)
