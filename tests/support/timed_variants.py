"""The variants of the GEMMs that tests time on a GPU."""

import numpy as np
import pytest

from ptxlab.lowbit.bench.gemm import grouped, headline, points, problem
from ptxlab.lowbit.bench.shapes import LAYERS, Layer
from ptxlab.lowbit.kernels.gemm import STEPS

EXPERT = Layer("Mixtral", "down", 4096, 14336)


def compile_timed_variants() -> None:
    """Compile them side by side, or find them in the cache."""
    steps_here = problem.steps_of([spec.name for spec in STEPS])
    timed = [(step, problem.sizes_at(step.spec, LAYERS[1], M)) for step in steps_here for M in (4, 100)]
    if headline.steps():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(headline, "LLAMA", LAYERS[1:2])
            patch.setattr(headline, "ALL_TOKENS", (1, 100))
            patch.setattr(headline, "UNTUNED", ())
            timed += headline.points([step.spec.name for step in headline.steps()])
        timed += [headline.point_at(layer, 16) for layer in LAYERS[:4]]
        timed += [headline.point_at(EXPERT, int(M)) for M in np.diff(grouped.route_at_random(16)) if M]
        timed.append((grouped.STEP, grouped.sizes_at(EXPERT, 32)))
    points.compile_all(timed)
