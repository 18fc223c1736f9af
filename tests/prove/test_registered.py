"""Claims on quantisers, sums and layouts: decided as they say, and able to fail."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab import layout, quant
from ptxlab.prove import layouts, quantisers
from ptxlab.prove.claims import Claim, decide

MAKERS = (
    quantisers.ranges, quantisers.predicate, quantisers.sums,
    layouts.fragments, layouts.packings, layouts.swizzles,
)  # fmt: skip
CLAIMS = [claim for maker in MAKERS for claim in maker()]


def claim(subject: str, name: str) -> Claim:
    (found,) = (each for each in CLAIMS if (each.subject, each.name) == (subject, name))
    return found


def test_a_map_with_a_place_twice_is_refuted() -> None:
    fragment = layout.fragments.mma_a(32)
    rows = fragment.rows.copy()
    rows[0, 0, 0] = 1
    outcome = decide(replace(CLAIMS[0], build=lambda: layouts._is_bijection(rows * fragment.shape[1] + fragment.cols)))
    assert outcome.verdict == "refuted"


@pytest.mark.parametrize("scheme", [quant.LQQWeight, quant.QoQWeight, quant.QoQChannelWeight])
def test_two_nibbles_exchanged_are_refuted(scheme: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(packed: layout.PackedWeight) -> Any:
        weight = layout.unpack(packed)
        q4 = weight.q4.copy()
        q4[-1, [3, 4]] = q4[-1, [4, 3]]
        return replace(weight, q4=q4)

    monkeypatch.setattr(layouts, "unpack", wrong)
    outcome = decide(claim("packing strips", f"{scheme.__name__} comes back"))
    assert outcome.verdict == "refuted" and "q4" in outcome.counterexample


def test_rows_that_are_not_swizzled_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "swizzle", lambda addresses, span: np.asarray(addresses))
    outcome = decide(claim("swizzles", "128 bytes: no bank conflict"))
    assert outcome.verdict == "refuted" and outcome.counterexample == {"column": 0}


def test_the_papers_group_is_what_refutes_qoq_at_120() -> None:
    outcome = decide(claim("quantiser qoq", "restored bytes fit s8 at range 120"))
    assert outcome.counterexample["restored"] == 128 and outcome.counterexample["scale"] == 16
