"""Verification itself: it has to notice what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab import registry, toolchain
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.runtime import Kernel, run_spec, verify
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec, WrongByDesign

LQQ, (PTX, *_) = registry.find("dequant_lqq")
SIZES = LQQ.example_sizes[2]


def run_verify(spec: KernelSpec = LQQ, source: Source = PTX) -> verify.Verdict:
    return verify.verify(verify.Job(spec, source, "emulator", SIZES))


def edit_source(edit: Callable[[str], str]) -> Source:
    text = edit(PTX.text)
    assert text != PTX.text
    return replace(PTX, text=text)


def short(text: str) -> str:
    """Change a kernel so that the last thread writes nothing."""
    return text.replace("setp.ge.u32     %done", "sub.u32 %count, %count, 1;\n    setp.ge.u32 %done")


def test_a_right_kernel_passes() -> None:
    verdict = run_verify()
    assert (
        verdict.passed
        and verdict.detail == "equal to the reference, checks clean"
        and verdict.to_json()["sizes"] == SIZES
    )


def test_a_wrong_result_names_the_first_place() -> None:
    verdict = run_verify(source=edit_source(lambda text: text.replace("%d3, 0x80808080", "%d3, 0x80808081")))
    assert not verdict.passed and "elements differ from the reference, first at [0, 12]" in verdict.detail


def test_an_unwritten_element_is_noticed() -> None:
    verdict = run_verify(source=edit_source(short))
    assert not verdict.passed and "differ from the reference, first at [7, 1008]" in verdict.detail


def test_an_unwritten_element_that_should_be_the_poison_is_noticed() -> None:
    """Outputs are poisoned in two ways, one after the other: no byte is right under both unless somebody wrote it."""

    def reference(**logical: np.ndarray) -> np.ndarray:
        right = LQQ.reference(**logical)
        right[7, 1008:] = np.uint8(0xA5).view(np.int8)
        return right

    verdict = run_verify(replace(LQQ, reference=reference), edit_source(short))
    assert not verdict.passed and "first at [7, 1008]: 90 instead of -91" in verdict.detail


@pytest.mark.parametrize("at", [verify._GUARD - 1, -1])
def test_bytes_written_outside_the_array_are_noticed(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU lets a kernel do so: the emulator faults."""

    def run(*args: Any, out: dict[str, np.ndarray], **how: Any) -> Any:
        outcome = run_spec(*args, out=out, **how)
        out["out"].base[at] ^= 1
        return outcome

    monkeypatch.setattr(verify, "run_spec", run)
    assert run_verify().detail == "out: 1 bytes written outside the array"


def test_a_fault_is_a_failed_verdict() -> None:
    verdict = run_verify(source=edit_source(lambda text: text.replace("%out, %index, 16", "%out, %index, 32")))
    assert not verdict.passed and "out of bounds" in verdict.detail


def test_a_finding_fails_a_kernel_whose_results_are_right() -> None:
    """An annotation that does not hold: q4 * scale + offset is not a signed byte."""
    verdict = run_verify(source=edit_source(lambda text: text.replace("@lanes d:u8x4 a", "@lanes d:s8x4 a")))
    assert not verdict.passed and "findings, first: range" in verdict.detail


def test_a_kernel_wrong_by_design_must_be_wrong_where_its_model_says() -> None:
    spec, (source, *_) = registry.find("dequant_qoq_presub")
    assert spec.wrong is not None
    assert run_verify(spec, source).passed
    nowhere = WrongByDesign(spec.wrong.truth, lambda q4, scale, zero: np.zeros(q4.shape, bool), "")
    verdict = run_verify(replace(spec, wrong=nowhere), source)
    assert not verdict.passed and "misses the truth in other places than its model says" in verdict.detail


def test_floats_are_compared_within_the_stated_tolerance_only() -> None:
    spec = registry.specs()["dequant_u4_f16"]
    logical = {"q4": np.full((1, 8), 10, np.uint8)}
    loose = replace(spec, tolerance=0.01)
    verify.compare(loose, {"out": np.full((1, 8), 10.05, np.float16)}, logical)
    for bad in (10.2, np.nan):
        with pytest.raises(verify.VerificationError):
            verify.compare(loose, {"out": np.full((1, 8), bad, np.float16)}, logical)
    with pytest.raises(verify.VerificationError):
        verify.compare(spec, {"out": np.full((1, 8), 10.01, np.float16)}, logical)


def test_floats_may_have_a_bound_for_each_element() -> None:
    """And of an infinity only itself is near."""
    spec = replace(
        registry.specs()["dequant_u4_f16"],
        reference=lambda q4: np.array([[1.0, 1.0, -np.inf]]),
        bound=lambda q4: np.array([[0.1, 0.01, 0.01]]),
    )
    verify.compare(spec, {"out": np.array([[1.09, 1.0, -np.inf]])}, {"q4": np.zeros((1, 8), np.uint8)})
    inf = np.inf
    for bad in ([1.2, 1, -inf], [1, 1.09, -inf], [1, 1, -60000], [1, 1, inf], [1, 1, np.nan], [1, inf, -inf]):
        with pytest.raises(verify.VerificationError, match="1 of 3 elements differ"):
            verify.compare(spec, {"out": np.array([bad])}, {"q4": np.zeros((1, 8), np.uint8)})


def test_a_source_whose_compiler_is_missing_is_skipped_by_name_of_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda: {"nvrtc": "install it so"})
    jobs, skipped = verify.plan(["dequant_lqq"], "emulator")
    assert {job.source.language for job in jobs} == {"ptx"}
    assert skipped == ["dequant_lqq.cu: NVRTC is not installed; install it so"]
    with pytest.raises(UnavailableError, match=r"dequant_lqq\.cu: NVRTC is not installed; install it so"):
        verify.plan(["dequant_lqq.cu"], "emulator")


def test_backends_are_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"backend: one of gpu, emulator \(got tpu\)"):
        verify.plan(["dequant_lqq"], "tpu")
    monkeypatch.setattr(verify.gpu, "why_not", lambda *a, **k: "no NVIDIA driver found")
    with pytest.raises(UnavailableError, match="no GPU backend here: no NVIDIA driver found"):
        verify.plan(["dequant_lqq"], "gpu")


@pytest.mark.smoke
def test_asynchronous_kernels_are_verified_early_and_late() -> None:
    """A copy that nobody waits for is there in time only if it happens early."""
    spec, (source, *_) = registry.find("load_cp_async")
    job = verify.Job(spec, source, "emulator", {"P": 11, "B": 2})
    verdict = verify.verify(job)
    assert verdict.passed and verdict.detail == "equal to the reference, checks clean, early and late"
    source_without_wait = replace(source, text=source.text.replace("cp.async.wait_group 3;", ""))
    verdict = verify.verify(replace(job, source=source_without_wait))
    assert not verdict.passed and "256 of 256 elements differ from the reference" in verdict.detail


def test_a_wrong_order_is_nothing_that_checks_find() -> None:
    spec, (source, *_) = registry.find("load_ldmatrix_u4")
    assert verify.verify(verify.Job(spec, source, "emulator", {"T": 1})).passed
    racing = replace(source, text=source.text.replace("st.shared.v4.u32 [%at]", "st.shared.v4.u32 [stage]"))
    verdict = verify.verify(verify.Job(spec, racing, "emulator", {"T": 1}))
    assert not verdict.passed


def test_a_kernel_that_waits_is_emulated_where_there_is_such_a_wait() -> None:
    """Compiled for the Ampere that `attention_merge` runs on as well, nothing would come behind a wait."""
    spec, (source,) = registry.find("attention_merge")
    job = verify.Job(spec, source, "emulator", spec.example_sizes[0])
    assert verify.verify(job).passed
    verdict = verify.verify(replace(job, source=replace(source, text=source.text.replace("ptxlab::wait_for_p", "// "))))
    assert not verdict.passed and "ahead of griddepcontrol.wait" in verdict.detail


def test_a_kernel_of_one_architecture_is_emulated_as_that() -> None:
    spec, (source,) = registry.find("attention_kv4_sm90")
    kernel = Kernel.of(spec, source, spec.config_for(spec.example_sizes[0]))
    assert kernel.module.target == "sm_90a"


def rows_alone(name: str, **changes: Any) -> verify.Verdict:
    """Return the verdict of `verify --batch-invariant` on a kernel, whose spec may be changed first."""
    spec, sources = registry.find(name)
    (job,), _ = verify.plan_rows([verify.Job(replace(spec, **changes), sources[-1], "emulator", {})])
    return verify.check_rows(job)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("quantize_activations_s8", "rows 0, 100, 299 of 300"),
        ("rmsnorm_quantize", "rows 0, 21, 63 of 64"),
        ("gemm_w4a8_grouped_sm90", "rows 0, 100, 299 of 300"),
        ("rope_append_kv4", "rows 0, 100, 299 of 300"),
        ("gemm_w4a8_small_sm90", "rows 0, 5, 15 of 16"),
        ("attention_kv4_sm90", "rows 0, 1, 4 of 5"),
    ],
)
def test_rows_have_the_same_bits_alone(name: str, rows: str) -> None:
    verdict = rows_alone(name)
    assert verdict.passed and verdict.detail == f"same bits alone: {rows}"


@pytest.mark.full
def test_rows_that_depend_on_the_batch_are_noticed() -> None:
    """Attention as it is by default shares its work out by all lengths; a scale that is the batch's is not a row's."""
    invariant = registry.find("attention_kv4_sm90")[0].invariant
    assert invariant is not None
    verdict = rows_alone("attention_kv4_sm90", invariant=None, batch="B", batch_sizes=invariant.batch_sizes)
    assert not verdict.passed and "alone differs from itself among 5 in" in verdict.detail
    verdict = rows_alone("gemm_w4a8_grouped_sm90", one_row=lambda arrays, row: {"x_scale": arrays["x_scale"][:1]})
    assert not verdict.passed


def test_what_has_no_rows_says_so_in_one_line() -> None:
    jobs, _ = verify.plan(["dequant_lqq", "gemm_tile_lqq_sm80", "attention_merge"], "emulator")
    jobs_of_rows, refused = verify.plan_rows(jobs)
    assert jobs_of_rows == [] and all("\n" not in line for line in refused)
    assert "dequant_lqq.ptx: batch: the spec must have a size that counts rows (got M)" in refused
    tile = replace(registry.find("gemm_tile_lqq_sm80")[0], rules=())
    _, (line,) = verify.plan_rows([replace(job, spec=tile) for job in jobs if job.spec.name == tile.name][:1])
    assert line.endswith("x: its first axis alone must count M rows (got [K/64, M/8, 512])")


ROWLESS = {  # kernels whose work has no rows, or is that of a whole batch, besides all of `dequant` and `load`
    "gemm_tile_lqq_sm80",
    "attention_kv4_mma_sm80",
    "attention_kv4_prefill_mma_sm80",
    "attention_kv4_prefill_sm90",
    "attention_merge",
    "gather_tokens",
}


def test_no_kernel_escapes_the_question_for_a_batch() -> None:
    jobs, _ = verify.plan([*registry.specs()], "emulator")
    names = {job.spec.name for job in verify.plan_rows(jobs)[0]}
    expected = {name for name, spec in registry.specs().items() if spec.family not in ("dequant", "load")}
    assert expected - names == ROWLESS
