"""Where a step of vLLM goes, without a GPU and vLLM: kernels by what they do, and the difference of two runs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import serving, serving_profile
from benchmarks.serving import PROFILE, part, rows
from benchmarks.serving_profile import IDLE, OTHER, PARTS, KernelTime, Run, StepProfile, compare_runs, part_of
from ptxlab import gpu
from ptxlab.errors import ArgumentError, BenchmarkError

CEILINGS: Any = SimpleNamespace(read_tbps=4.0)


@pytest.mark.parametrize(
    ("kernel", "expected_part"),
    [
        ("gemm_w4a8_small_sm90", "products"),
        ("attention_kv4_sm90", "attention"),
        ("append_kv4", "append"),
        ("quantize_activations_s8", "quantisers"),
        ("triton_red_fused_fused_add_rms_norm_0", "norms, RoPE, gates"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "norms, RoPE, gates"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "head"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("never_seen", OTHER),
    ],
)
def test_a_kernel_is_known_by_its_name(kernel: str, expected_part: str) -> None:
    assert part_of(kernel) == expected_part


def launch_steps(steps: int, prefill_us: float = 300.0) -> list[KernelTime]:
    """Return the kernels of a prefill, and of steps of 100 us each in which two kernels overlap by 10 us."""
    times = [KernelTime("attention_kv4_prefill_sm90", 0, prefill_us)]
    for step in range(steps):
        start = prefill_us + 100 * step
        times += [
            KernelTime("gemm_w4a8_sm90", start, start + 60),
            KernelTime("attention_kv4_sm90", start + 50, start + 80),
        ]
        times.append(KernelTime("never_seen", start + 85, start + 90))
    return times


def test_a_step_is_the_difference_of_two_runs() -> None:
    runs = [Run((300 + 100 * steps) / 1e6, launch_steps(steps)) for steps in (4, 12)]
    step = compare_runs(*runs, 8)
    assert step.step_us == pytest.approx(100) and step.launches == 3 and step.unknown == ("never_seen",)
    expected_us = {"products": 60, "attention": 30, OTHER: 5, IDLE: 15}
    assert step.part_us == {part: pytest.approx(expected_us.get(part, 0)) for part in PARTS}
    with pytest.raises(BenchmarkError, match=r"^80 tokens took no longer than 16: "):
        compare_runs(*runs[::-1], 8)


@pytest.mark.parametrize("counts", [(0, 0), (0, 12), (4, 0)])
def test_a_run_without_kernels_is_refused_in_one_line(counts: tuple[int, int]) -> None:
    """It was a ValueError of NumPy's."""
    short, long = (Run(1.0 + count, [KernelTime("append_kv4", 0, 1)] * count) for count in counts)
    message = r"^the profiler must see kernels in the runs of 16 and 80 tokens \(got {} and {} kernels\)$"
    with pytest.raises(BenchmarkError, match=message.format(*counts)):
        compare_runs(short, long, 64)


def test_rows_name_the_tokens_of_the_prompts_that_were_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows had the tokens of another rule, that of throughput."""
    monkeypatch.setattr(serving_profile, "RULE", replace(serving_profile.RULE, tokens=256))
    profiles = {64: StepProfile(2500.0, dict.fromkeys(PARTS, 100.0), 400.0)}
    (row,) = serving.profile_rows("7B", "fp8", profiles, profiles, CEILINGS)
    assert row.sizes == {"B": 64, "tokens": 256}


def test_rows_have_the_parts_beside_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(model: str, name: str) -> dict[int, StepProfile]:
        step_us = 3500.0 if name == "fp8" else 2500.0
        return {1: StepProfile(step_us, dict.fromkeys(PARTS, step_us / len(PARTS)), 400.0, ("never_seen",))}

    monkeypatch.setattr(serving_profile, "measure", profile)
    monkeypatch.setattr(gpu, "free_pool", lambda: None)
    base, ours = rows((), CEILINGS, lambda label: None, [PROFILE], [])
    assert (base.kernel, base.measure, base.peers) == ("LLaMA-2-7B in vLLM, fp8", PROFILE, {})
    assert (ours.time_us, ours.peers, ours.more["launches"]) == (2500.0, {"fp8": 3500.0}, 400.0)
    assert sum(ours.more[part] for part in PARTS) == pytest.approx(2500.0)
    assert ours.checked == "every request made its tokens; other kernels: never_seen"
    assert [*rows((), CEILINGS, lambda label: None, [PROFILE], [base, ours])] == [base, ours]  # nothing is left


def test_one_kind_is_measured_at_a_time() -> None:
    assert part([PROFILE, "8B"]) == [("8B", "ptxlab")]
    with pytest.raises(ArgumentError, match=r"^only: arrivals or profile \(got both\)"):
        part(["arrivals", PROFILE])
    assert serving.SUITE.record_name([PROFILE]) == "vllm"
