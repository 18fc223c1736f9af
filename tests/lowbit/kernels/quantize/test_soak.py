"""Endurance: 20,000 calls of the quantisers in Atom's and COMET's order, every bit checked on the GPU."""

from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.lowbit.kernels.quantize import atom
from ptxlab.spec import KernelSpec
from tests.support import soak

CASES = 6  # widths, each with its own order, per kernel
TOKENS, MOST_GROUPS = (1, 7, 64, 257), 224
OTHERS: dict[str, tuple[Any, ...]] = {"added": (0,), "kept": (0, 1), "eps": (1e-5,), "activation": (0, 1)}


def draw_sizes(spec: KernelSpec, rng: np.random.Generator) -> dict[str, Any]:
    """Draw sizes in either order and of any width, small ones as often as large ones."""
    groups, code = int(np.exp2(rng.uniform(1, np.log2(MOST_GROUPS)))), int(rng.integers(3))
    if code == atom.COMET:
        int8 = int(rng.integers(groups + 1))
        drawn = {"K": 128 * (groups - int8), "outliers": 128 * int8, "g": 128, "pairs": int(rng.integers(1, 3))}
    else:
        g = int(rng.choice((64, 128)))
        drawn = {"K": g * groups, "outliers": int(rng.choice((0, 64, 128))), "g": g, "pairs": int(rng.integers(2))}
    drawn |= {"M": int(rng.choice(TOKENS)), "code": code, "clip": 1.0 if code == atom.COMET else 0.9}
    drawn |= {name: values[int(rng.integers(len(values)))] for name, values in OTHERS.items()}
    spec.check_sizes(sizes := {name: drawn[name] for name in spec.example_sizes[0]})
    return sizes


@pytest.mark.default_cases("silu_mul_reorder_quantize")
@pytest.mark.parametrize("spec", atom.SPECS, ids=lambda spec: spec.name)
def test_a_case_has_the_same_bits_each_time(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    soak.emulate_launches(monkeypatch)
    rng = np.random.default_rng(0)
    for sizes in (draw_sizes(spec, rng) for _ in range(200)):
        assert sizes["M"] in TOKENS
    case = soak.SpecLaunch.of(spec, spec.example_sizes[1] | ({"added": 0} if "added" in spec.symbols else {}), rng)
    assert np.array_equal(case.call(), case.expected)
    assert {"x_q", "x8", "x_scale"} <= {*case.outputs(case.expected)}


@pytest.mark.long(40)
@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90") is not None, reason="needs sm_90")
def test_twenty_thousand_rows_in_order_beside_a_busy_stream() -> None:
    rng = np.random.default_rng(0)
    soak.endure(
        [soak.SpecLaunch.of(spec, draw_sizes(spec, rng), rng) for spec in atom.SPECS for _ in range(CASES)], rng
    )
