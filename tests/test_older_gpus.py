"""Kernels as they are compiled for GPUs before Hopper: in the emulator, and by the driver of a newer GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu, registry, toolchain
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.gpu import device
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.attention import prefill_api, steps
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.gemm import gemm_w8a8, layout_here
from ptxlab.runtime import verify
from ptxlab.sources import Source
from tests.support.fake_gpu import FakeGpu, on_device

ARCHITECTURES = ("sm_80", "sm_89")


def plan(arch: str, backend: str, names: list[str] | None = None) -> tuple[list[verify.Job], list[str]]:
    with gpu.compiling_for(arch):
        return verify.plan(names or registry.families(), backend)


# What a layer needs, in the form that runs there.
OF_A_LAYER = {
    "append_kv4.cu",
    "attention_kv4_mma_sm80.cu",
    "attention_kv4_prefill_mma_sm80.cu",
    "choose_experts.cu",
    "combine_experts.cu",
    "gather_tokens.cu",
    "gemm_w4a8_lqq_sm80.cu",
    "gemm_w4a8_qoq_channel_sm80.cu",
    "gemm_w4a8_qoq_sm80.cu",
    "gemm_w8a8_sm80.cu",
    "quantize_activations_s8.cu",
    "reorder_quantize.cu:block",
    "rmsnorm_quantize.cu:block",
    "rmsnorm_reorder_quantize.cu:block",
    "rope_append_kv4.cu",
    "silu_mul_quantize.cu:block",
    "silu_mul_reorder_quantize.cu:block",
}
JOBS = {job.label: job for job in plan("sm_80", "emulator")[0]}
LABELS = [label for label in JOBS if label.endswith(".cu") or ":" in label]


def test_what_cannot_be_compiled_is_skipped_by_name() -> None:
    jobs, skipped = plan("sm_80", "emulator")
    assert {job.label for job in jobs} >= OF_A_LAYER
    line = "gemm_w4a8_sm90: it runs only on sm_90a, and kernels are compiled for sm_80"
    assert line in skipped and all("sm_90" in skipped_line for skipped_line in skipped)
    with pytest.raises(UnavailableError, match=line):
        plan("sm_80", "emulator", ["gemm_w4a8_sm90"])
    with pytest.raises(UnavailableError, match="attention_kv4_sm90: it runs only on sm_90a"):
        plan("sm_89", "emulator", ["attention_kv4_sm90:rotated"])
    with pytest.raises(ArgumentError, match=r"arch: sm_<number>, such as sm_80 or sm_90a \(got ampere\)"):
        plan("ampere", "emulator")


@pytest.mark.default_cases("gemm_w4a8_lqq_sm80.cu-sm_80")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("label", LABELS)
def test_a_kernel_gives_the_reference(label: str, arch: str) -> None:
    """Run the second example: the first one is often a single row."""
    with gpu.compiling_for(arch):
        verdict = verify.verify(plan(arch, "emulator", [label])[0][1])
        assert verdict.passed, verdict.detail


@pytest.mark.gpu
@pytest.mark.parametrize("label", LABELS)
def test_the_driver_compiles_it_for_sm_80(label: str) -> None:
    """Check on a GPU that may be newer: integers equal the reference, and the emulator's; floats are within bounds."""
    with gpu.compiling_for("sm_80"):
        for job in plan("sm_80", "gpu", [label])[0]:
            verdict = verify.verify(job)
            assert verdict.passed, verdict.detail


@pytest.mark.full
def test_it_is_compiled_for_that_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compile_cuda = toolchain.compile_cuda

    def note_arch(source: Source, arch: str, **how: Any) -> Any:
        seen.append(arch)
        return compile_cuda(source, arch, **how)

    monkeypatch.setattr(toolchain, "compile_cuda", note_arch)
    job = JOBS["append_kv4.cu"]
    for arch in (*ARCHITECTURES, None):
        with gpu.compiling_for(arch):
            assert gpu.target() == arch
            verify.verify(job)
    assert [arch for i, arch in enumerate(seen) if i == 0 or seen[i - 1] != arch] == ["sm_80", "sm_89", "sm_90"]


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (spec, sizes)
        for spec in (registry.find(label)[0] for label in sorted(OF_A_LAYER))
        for sizes in [max(spec.example_sizes, key=spec.bytes_moved)]
    ],
    ids=lambda part: getattr(part, "label", ""),
)
@pytest.mark.full
def test_no_registers_spill(spec: Any, sizes: dict[str, int]) -> None:
    (source, *_) = registry.find(spec.name)[1]
    for arch in ("sm_80", "sm_86", "sm_89"):
        resources = toolchain.build(source, arch, defines=spec.config_for(sizes)).resources[spec.name]
        assert (resources.spill_stores, resources.spill_loads) == (0, 0), arch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    for name in ("_prepared", "_ready", "_memory"):
        monkeypatch.setattr(operation, name, {})
    return FakeGpu(monkeypatch)


@pytest.mark.parametrize("arch", [80, 89, 90])
def test_calls_choose_by_the_gpu(arch: int, fake: FakeGpu) -> None:
    fake.arch = arch
    hopper = arch == 90
    attention = steps.choose(AttentionOptions(backend="gpu")).spec.name
    prompts = prefill_api._choose(AttentionOptions(), rotated=True).name
    assert attention == ("attention_kv4_sm90" if hopper else "attention_kv4_mma_sm80")
    assert prompts == ("attention_kv4_prefill_sm90" if hopper else "attention_kv4_prefill_mma_sm80")
    assert {layout_here(scheme) for scheme in ("lqq", "qoq", "qoq_channel")} == {"strips" if hopper else "qserve"}
    assert layout_here("qoq", now="qserve") == "qserve"


@pytest.mark.default_cases("89")
@pytest.mark.parametrize("arch", [80, 89])
def test_a_wide_row_is_one_blocks(arch: int, fake: FakeGpu) -> None:
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((1, 2 * 8320), dtype=np.float32).astype(np.float16)
    fake.arch = arch
    activations = ptxlab.silu_mul_quantize(on_device(gate_up))
    assert fake.geometries[-1].cluster == (1, 1, 1) and fake.geometries[-1].block == (544, 1, 1)
    fake.arch = 90
    right = ptxlab.silu_mul_quantize(gate_up, backend="emulator")
    assert np.array_equal(activations.x_q.host, right.x_q) and np.array_equal(activations.scale.host, right.scale)


def test_a_row_that_only_a_cluster_holds_is_refused(fake: FakeGpu) -> None:
    fake.arch = 80
    x = np.zeros((1, 16384), np.float16)
    place = quant.channel_places(np.arange(16384))
    limit = r"reorder_quantize: ceil_div\(K, 128\)\*128 .* <= 11776 \(got K=16256, outliers=128\)"
    with pytest.raises(ArgumentError, match=limit):
        ptxlab.reorder_quantize(on_device(x), on_device(place))
    with gpu.compiling_for("sm_80"), pytest.raises(ArgumentError, match=limit):
        ptxlab.reorder_quantize(x, place, backend="emulator")


def test_an_8_bit_head_takes_what_runs(fake: FakeGpu) -> None:
    rng = np.random.default_rng(0)
    weight = quant.quantize_level1(rng.standard_normal((16, 64), dtype=np.float32))
    x = ptxlab.quantize_activations(rng.standard_normal((3, 64)).astype(np.float16), backend="emulator")
    right = gemm_w8a8(x, weight, out_dtype="int32", backend="emulator")
    fake.arch = 80
    product = gemm_w8a8(on_device(x), on_device(weight), out_dtype="int32", programmatic=True)
    assert fake.launched[-1][0] == "gemm_w8a8_sm80" and not fake.geometries[-1].programmatic
    assert np.array_equal(product.host, right)
    with gpu.compiling_for("sm_80"):
        assert np.array_equal(gemm_w8a8(x, weight, out_dtype="int32", backend="emulator"), right)


def test_what_is_chosen_inside_is_not_kept_outside(fake: FakeGpu) -> None:
    """A call of the same kind is prepared again: the kernel may be another."""
    x = on_device(np.zeros((2, 64), np.float16))
    for _ in range(2):
        ptxlab.quantize_activations(x)
    assert fake.loads == 1
    with gpu.compiling_for("sm_80"):
        ptxlab.quantize_activations(x)
    assert fake.loads == 2


def test_a_gpu_below_the_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(name="T4", compute_capability=(7, 5))
    monkeypatch.setattr(device, "_why_no_gpu", lambda: None)
    monkeypatch.setattr(device, "device_info", lambda: older)
    with gpu.compiling_for("sm_80"):
        assert gpu.why_not("sm_75") == "this is below sm_80, T4, sm_75"
    newer = SimpleNamespace(name="H200", compute_capability=(9, 0))
    monkeypatch.setattr(device, "device_info", lambda: newer)
    assert gpu.why_not("sm_90a", exact=True) is None
    with gpu.compiling_for("sm_80"):
        assert gpu.why_not("sm_80") is None
        assert gpu.why_not("sm_90") == "it runs on sm_90 or above, and kernels are compiled for sm_80"
        assert gpu.why_not("sm_90a", exact=True) == "it runs only on sm_90a, and kernels are compiled for sm_80"
