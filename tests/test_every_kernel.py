"""Every kernel of the registry is executed in `pytest` and again in `pytest -m full`, and its numbers are compared."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab import registry
from ptxlab.lowbit.kernels.attention import ladder
from ptxlab.runtime import verify
from tests.support import attention_problems as problems

SPECS = registry.specs()
NO_CASE = SimpleNamespace(params={})
SOURCES = [source.label for name in SPECS for source in registry.find(name)[1]]


def jobs_of(label: str) -> list[verify.Job]:
    """List what `ptxlab verify` does with a source in the emulator; examples grow."""
    jobs, skipped = verify.plan([label], "emulator")
    if skipped:
        pytest.skip(skipped[0])
    return jobs


class Executions:
    """Counts what the emulator executes and what is compared, by kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.values = Counter[str](), Counter[str]()
        run, compare = verify.run_spec, verify.compare

        def counted_run(spec: Any, *args: Any, **options: Any) -> Any:
            outcome = run(spec, *args, **options)
            self.runs[spec.name] += 1
            return outcome

        def counted_compare(spec: Any, outputs: Any, *args: Any) -> None:
            compare(spec, outputs, *args)
            self.values[spec.name] += sum(array.size for array in outputs.values())

        monkeypatch.setattr(verify, "run_spec", counted_run)
        monkeypatch.setattr(verify, "compare", counted_compare)


@pytest.fixture
def executions(monkeypatch: pytest.MonkeyPatch) -> Executions:
    return Executions(monkeypatch)


def check(job: verify.Job, executions: Executions) -> None:
    verdict = verify.verify(job)
    assert verdict.passed, verdict.detail
    assert executions.runs[job.spec.name] >= 2 and executions.values[job.spec.name] > 0


@pytest.mark.smoke_cases(
    "dequant_lqq.ptx",
    "load_ldmatrix_s8.ptx",
    "quantize_activations_s8.cu",
    "gemm_w4a8_small_sm90.cu",
    "attention_kv4_naive.cu",
    "choose_experts.cu",
)
@pytest.mark.parametrize("label", SOURCES)
def test_a_small_example_gives_the_reference(label: str, executions: Executions) -> None:
    """Take the second example: the first one is often a single row."""
    check(jobs_of(label)[1], executions)


@pytest.mark.full
@pytest.mark.parametrize("label", SOURCES)
def test_every_other_example_gives_the_reference(label: str, executions: Executions) -> None:
    """Run all sizes, and every dtype of the outputs."""
    jobs = jobs_of(label)
    assert len(jobs) > 2
    for job in jobs[:1] + jobs[2:]:
        check(job, executions)


@pytest.mark.default_cases("attention_kv8", "attention_kv4_fp16")
@pytest.mark.parametrize("spec", ladder.SPECS, ids=lambda spec: spec.name)
def test_steps_of_attention_beyond_four_pages(spec: Any) -> None:
    """They take four whole pages of 64 tokens at a time from 256 tokens on; 300 end within a fifth."""
    assert ladder.PAGE == 64
    q, cache = problems.problem(7, (300, 256), Hq=2, Hkv=1, scheme=spec.name.split("_")[1])
    logical = {"q": q[:, 0].astype(np.float16), "cache": cache, "softmax_scale": 128**-0.5}
    problems.check(spec, logical, "emulator")


def test_each_tier_executes_every_kernel(request: pytest.FixtureRequest) -> None:
    """The tests that this file collects show it if a kernel is added, or a test changes its tier."""
    module = request.node.getparent(pytest.Module)
    cases = [case for case in module.collect() if "label" in vars(case).get("callspec", NO_CASE).params]
    executed: dict[str, set[str]] = {"default": set(), "full": set(), "smoke": set()}
    for case in cases:
        name = case.callspec.params["label"].rpartition(".")[0]
        executed["full" if case.get_closest_marker("full") else "default"].add(name)
        if case.get_closest_marker("smoke"):
            executed["smoke"].add(name)
    assert executed["default"] == executed["full"] == set(SPECS)
    assert {SPECS[name].family for name in executed["smoke"]} == {spec.family for spec in SPECS.values()}


def test_a_kernel_that_is_wrong_or_not_executed_fails(executions: Executions, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs_of("dequant_lqq.ptx")[1]
    wrong = replace(job.source, text=job.source.text.replace("%d3, 0x80808080", "%d3, 0x80808081"))
    with pytest.raises(AssertionError, match="differ from the reference"):
        check(replace(job, source=wrong), executions)
    executions.runs.clear()
    monkeypatch.setattr(verify, "_check", lambda *_: "nothing was executed")
    with pytest.raises(AssertionError):
        check(job, executions)
