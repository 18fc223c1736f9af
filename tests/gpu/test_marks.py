"""Ranges for profilers around plan, pack and launch; nothing where there is no CuPy."""

import pytest

from ptxlab import gpu, registry
from ptxlab.gpu import marks
from ptxlab.runtime.plan import Plan
from tests.support.fake_gpu import FakeGpu


def test_a_mark_is_a_range_that_ends_with_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(marks, "_nvtx", lambda: (seen.append, lambda: seen.append("end")))
    mark = gpu.NamedRange("launch k")
    with mark, gpu.NamedRange("within"):
        pass
    with pytest.raises(ZeroDivisionError), mark:
        _ = 1 // 0
    assert seen == ["launch k", "within", "end", "end", "launch k", "end"]


@pytest.mark.smoke
def test_a_plan_is_marked_once_and_its_launches_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(marks, "_nvtx", lambda: (seen.append, lambda: None))
    fake = FakeGpu(monkeypatch)
    fake.runs = False
    spec, sizes = registry.specs()["gemm_w4a8_qoq_sm80"], {"M": 8, "N": 32, "K": 128, "g": 128}
    plan = Plan(spec, spec.config_for(sizes), sizes)
    assert seen == ["plan gemm_w4a8_qoq_sm80"]
    plan(7, {})
    plan(7, {})
    assert seen[1:] == ["launch gemm_w4a8_qoq_sm80"] * 2


def test_without_cupy_a_mark_is_nothing() -> None:
    marks._nvtx.cache_clear()
    with gpu.NamedRange("k"):
        pass
