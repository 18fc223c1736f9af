"""The real dequantisers, every source on every backend, against the references."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.layout.nibbles import pack_u4
from ptxlab.runtime import Outcome, run_spec
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec
from tests.support import strategies
from tests.support.axes import on_every_backend

SPECS = [spec for spec in registry.specs().values() if spec.name.startswith("dequant_")]
ALL = {source.label: (spec, source) for spec in SPECS for source in registry.find(spec.name)[1]}
LQQ = [label for label in ALL if label.startswith("dequant_lqq")]
QOQ = [label for label in ALL if label.startswith("dequant_qoq_vadd4")]
PACKED = [label for label in ALL if label.startswith(("dequant_lqq", "dequant_qoq")) and "channel" not in label]


@st.composite
def inputs_of(draw: st.DrawFn, spec: KernelSpec, checked: bool) -> dict[str, np.ndarray]:
    """Draw logical inputs of any dequantiser: `checked` ones obey its rules, the others are any bytes.

    A kernel without a strategy gets examples of its spec.
    """
    names = {a.name for a in spec.inputs}
    if spec.name == "dequant_s4_f16":
        return draw(strategies.int4_inputs())
    if names == {"qweight"}:
        shape = draw(strategies.shapes())
        q4 = draw(strategies.q4_matrix(shape.rows, shape.K))
        return {"q4": q4.view(np.int8) - np.int8(8) if spec.name == "dequant_comet" else q4}
    if f"{spec.name}.ptx" in PACKED:
        family = strategies.lqq_inputs if "lqq" in spec.name else strategies.qoq_inputs
        drawn = draw(family(checked=checked))
        return {n: a for n, a in drawn.items() if n in names or n == "q4"}
    sizes, seed = draw(st.sampled_from(spec.example_sizes)), draw(st.integers(0, 2**32 - 1))
    return spec.example(np.random.default_rng(seed), **sizes)


def launch(spec: KernelSpec, source: Source, logical: dict[str, np.ndarray], backend: str, **options: Any) -> Outcome:
    checks = emulator.CHECKS if backend == "emulator" else ()
    return run_spec(spec, source, spec.pack(logical), backend=backend, checks=checks, **options)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("label", ALL)
@given(data=st.data())
def test_equals_its_reference_and_is_clean_within_its_rules(label: str, backend: str, data: st.DataObject) -> None:
    spec, source = ALL[label]
    logical = data.draw(inputs_of(spec, checked=True))
    outcome = launch(spec, source, logical, backend)
    assert np.array_equal(bits(outcome.outputs["out"]), bits(spec.reference(**logical)))
    if spec.wrong is None:
        assert [str(f) for f in outcome.findings] == []


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("label", PACKED)
@given(data=st.data())
def test_reference_models_the_whole_word_when_lanes_overflow(label: str, backend: str, data: st.DataObject) -> None:
    spec, source = ALL[label]
    logical = data.draw(inputs_of(spec, checked=False))
    outcome = launch(spec, source, logical, backend, unchecked=True)
    assert np.array_equal(outcome.outputs["out"], spec.reference(**logical))


@pytest.mark.full
@on_every_backend
@given(data=st.data())
def test_presub_is_wrong_exactly_where_the_borrow_model_says(backend: str, data: st.DataObject) -> None:
    spec, source = ALL["dequant_qoq_presub.ptx"]
    logical = data.draw(inputs_of(spec, checked=True))
    outcome = launch(spec, source, logical, backend)
    missed = outcome.outputs["out"] != reference.exact_qoq(**logical)
    assert np.array_equal(missed, reference.presub_wrong(**logical))
    if backend == "emulator":
        assert bool(outcome.findings) >= bool(missed.any()), "elements are wrong, and the lane check is silent"


@pytest.mark.full
@pytest.mark.parametrize("label", LQQ)
@given(logical=strategies.lqq_inputs(checked=False))
@settings(max_examples=50)
def test_a_lane_that_carries_is_found(label: str, logical: dict[str, np.ndarray]) -> None:
    spec, source = ALL[label]
    outcome = launch(spec, source, logical, "emulator", unchecked=True)
    per_lane = reference.exact_lqq(**logical) + 128
    carries = (per_lane > 255).reshape(-1, 4)[:, :3].any()  # a carry out of the top byte disturbs nobody
    assert carries == any(f.kind == "carry" for f in outcome.findings)
    assert (per_lane > 255).any() == any(f.kind == "range" for f in outcome.findings)
    for finding in outcome.findings:
        assert "mad.lo" in finding.text


def every_lane(constants: int, neighbour: int) -> np.ndarray:
    """Make q4 u8 [constants, 128] with each of 16 values at each of the eight places of a word.

    The other places hold `neighbour`.
    """
    words = np.full((16, 8, 8), neighbour, np.uint8)
    for place in range(8):
        words[:, place, place] = np.arange(16)
    return np.tile(words.reshape(1, -1), (constants, 1))


@pytest.mark.default_cases("dequant_lqq.ptx-15-emulator", "dequant_lqq.ptx-7-emulator")
@on_every_backend
@pytest.mark.parametrize("neighbour", (0, 7, 15))
@pytest.mark.parametrize("label", LQQ)
def test_every_q4_scale_and_offset_in_every_lane(label: str, neighbour: int, backend: str) -> None:
    scale, offset = (a.reshape(-1, 1).astype(np.uint8) for a in np.mgrid[1:17, 0:256])
    q4 = every_lane(len(scale), neighbour)
    logical = {"q4": q4, "scale": np.repeat(scale, 8, 1), "offset": np.repeat(offset, 8, 1)}
    spec, source = ALL[label]
    outcome = run_spec(spec, source, spec.pack(logical), backend=backend, unchecked=True)
    got = outcome.outputs["out"]
    assert np.array_equal(got, spec.reference(**logical))
    wide = q4.astype(np.int32) * scale + offset
    undisturbed = (wide.reshape(-1, 4) <= 255).all(axis=1).repeat(4).reshape(q4.shape)
    truth = wide if spec.name.endswith("unsigned") else wide - 128
    assert np.array_equal(got[undisturbed], truth[undisturbed])
    assert undisturbed.mean() > 0.1


@on_every_backend
@pytest.mark.parametrize("neighbour", (0, 7, 15))
@pytest.mark.parametrize("label", QOQ)
def test_every_q4_scale_and_zero_in_every_lane(label: str, neighbour: int, backend: str) -> None:
    scale, zero = (a.reshape(-1, 1).astype(np.uint8) for a in np.mgrid[1:18, 0:16])
    q4 = every_lane(len(scale), neighbour)
    offset = (-(zero.astype(np.int32) * scale)).astype(np.uint8).view(np.int8)
    logical = {"q4": q4, "scale": np.repeat(scale, 8, 1), "offset": np.repeat(offset, 8, 1)}
    spec, source = ALL[label]
    got = run_spec(spec, source, spec.pack(logical), backend=backend, unchecked=True).outputs["out"]
    wide = (q4.astype(np.int32) - zero) * scale
    assert np.array_equal(got, wide.astype(np.uint8).view(np.int8)), "wraps by lane, disturbs nobody"


@pytest.mark.default_cases("7-emulator")
@on_every_backend
@pytest.mark.parametrize("neighbour", (0, 7, 15))
def test_every_scale_and_zero_saturates_by_lane(neighbour: int, backend: str) -> None:
    scale, zero = (a.reshape(-1, 1).astype(np.uint8) for a in np.mgrid[1:18, 0:16])
    q4 = every_lane(len(scale), neighbour)
    logical = {"q4": q4, "scale": np.repeat(scale, 8, 1), "zero": np.repeat(zero, 8, 1)}
    outcome = launch(*ALL["dequant_qoq_saturating.ptx"], logical, backend)
    exact = (q4.astype(np.int32) - zero) * scale
    assert np.array_equal(outcome.outputs["out"], exact.clip(-128, 127)) and (exact > 127).any()
    assert [str(finding) for finding in outcome.findings] == []


def test_weights_of_the_whole_range_come_back_saturated() -> None:
    """An outlier that plain QoQ would wrap at a protective range of 127 is cut to 127."""
    w = np.full((1, 32), -113 / 127, np.float32)
    w[0, 1:4] = 120 / 127, 0, 1
    weight = quant.quantize_qoq(w, group=32, protective_range=127)
    assert weight.overflows().any()
    logical = {"q4": weight.q4, "scale": weight.group_scale, "zero": weight.zero}
    out = launch(*ALL["dequant_qoq_saturating.ptx"], logical, "emulator").outputs["out"]
    assert np.array_equal(out, weight.exact_level1().clip(-128, 127)) and out.max() == 127


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("label", [*LQQ, *QOQ])
@given(groups=strategies.weight_groups())
@settings(max_examples=50)  # of words; every value in every lane is above
def test_quantised_weights_come_back_as_the_exact_integers(
    label: str, backend: str, groups: strategies.WeightGroups
) -> None:
    spec, source = ALL[label]
    quantize = quant.quantize_lqq if "lqq" in label else quant.quantize_qoq
    weight = quantize(groups.w, group=groups.group)
    inputs = {"qweight": pack_u4(weight.q4), "scale": weight.group_scale, "offset": weight.offset}
    got = run_spec(spec, source, inputs, backend=backend).outputs["out"].astype(np.int32)
    assert np.array_equal(got - 128 if spec.name.endswith("unsigned") else got, weight.exact_level1())
