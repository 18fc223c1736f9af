"""Sweeps over a kernel's constants, emulated: every combination, each checked; what cannot run says why."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ptxlab import registry
from ptxlab.errors import ArgumentError, BenchmarkError, UnavailableError
from ptxlab.lowbit.bench import sweep
from ptxlab.lowbit.bench.gemm import problem
from ptxlab.runtime.timing import Measured
from ptxlab.spec import KernelSpec

GEMM = {"M": 2, "N": 128, "K": 256, "g": 128}
BATCH = {"B": 2, "L": 70, "Hq": 2, "Hkv": 1}


def spec_of(name: str) -> KernelSpec:
    return registry.find(name)[0]


@pytest.fixture
def variant_times(emulated_gpu: pytest.MonkeyPatch) -> list[float]:
    """Return a list to fill with the microseconds that the next variants take."""
    times: list[float] = []

    def measure(calls: Sequence[Callable[[], None]], **_: Any) -> Measured:
        for call in calls:
            call()
        us = times.pop(0)
        return Measured(us, us, us, 1900.0)

    emulated_gpu.setattr(sweep, "measure", measure)
    return times


@pytest.mark.full
def test_every_combination_of_a_gemm_quickest_first(variant_times: list[float]) -> None:
    variant_times += [10.0, 12.0, 8.0, 9.0]
    variants = sweep.sweep(spec_of("gemm_w4a8_small_sm90"), GEMM, {"STAGES": (4, 12), "RESIDENT": (1, 2)})
    assert [variant.measured.us for variant in variants] == [8.0, 9.0, 10.0, 12.0] and not variant_times
    assert sorted(tuple(variant.constants.values()) for variant in variants) == [(4, 1), (4, 2), (12, 1), (12, 2)]
    assert [variant.constants for variant in variants if variant.chosen] == [{"STAGES": 12, "RESIDENT": 2}]
    first, chosen_line = list(sweep.lines(variants))[:2]
    assert (
        first[:4] == ["12", "1", "8.00", "1.125x"]
        and chosen_line[2:4] == ["9.00", "1.000x"]
        and chosen_line[-1] == "chosen"
    )


@pytest.mark.full
def test_what_the_spec_chooses_is_measured_too(variant_times: list[float]) -> None:
    variant_times += [10.0, 11.0]
    variants = sweep.sweep(spec_of("attention_kv4_sm90"), BATCH, {"TOKENS": (32,)})
    assert [(variant.constants["TOKENS"], variant.chosen) for variant in variants] == [(16, True), (32, False)]


@pytest.mark.full
def test_a_variant_that_cannot_run_says_why(variant_times: list[float]) -> None:
    """It has more stages than fit, and is not measured."""
    variant_times += [10.0]
    variants = sweep.sweep(spec_of("attention_kv4_sm90"), BATCH, {"WARPS": (3,)})
    assert variants[0].chosen and variants[1].measured is None and "static assertion" in variants[1].why_not
    assert list(sweep.lines(variants))[1][1:3] == ["-", "-"]


@pytest.mark.full
def test_wrong_results_stop_the_sweep(variant_times: list[float], emulated_gpu: pytest.MonkeyPatch) -> None:
    variant_times += [10.0]
    emulated_gpu.setattr(problem, "expected_bits", lambda spec, logical: np.zeros((2, 128), np.uint16))
    with pytest.raises(BenchmarkError, match="the timed launches gave wrong results"):
        sweep.sweep(spec_of("gemm_w4a8_small_sm90"), GEMM, {})


def test_what_is_asked_for_must_exist(emulated_gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"-D: a constant of gemm_w4a8_small_sm90: BM, .* \(got DEPTH\)"):
        sweep.sweep(spec_of("gemm_w4a8_small_sm90"), GEMM, {"DEPTH": (1,)})
    with pytest.raises(ArgumentError, match=r"target: a kernel of a W4A8 GEMM or of attention \(got dequant_lqq\)"):
        sweep.sweep(spec_of("dequant_lqq"), {}, {})


@pytest.mark.parametrize(("name", "sizes"), [("gemm_w4a8_small_sm90", GEMM), ("attention_kv4_sm90", BATCH)])
def test_without_a_gpu_or_with_an_older_one(
    name: str, sizes: dict[str, int], emulated_gpu: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep.gpu, "why_not", lambda arch, exact=False: "this is an A100")
    with pytest.raises(UnavailableError, match=f"^{name}: this is an A100$"):
        sweep.sweep(spec_of(name), sizes, {})

    def none() -> None:
        raise UnavailableError("here is no driver")

    monkeypatch.setattr(sweep.gpu, "device_info", none)
    with pytest.raises(UnavailableError, match="here is no driver"):
        sweep.sweep(spec_of(name), sizes, {})
