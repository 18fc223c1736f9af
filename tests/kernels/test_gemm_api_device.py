"""`gemm_w4a8` on device arrays, on a GPU that isn't one: plans, streams, workspaces, captures, choice of kernel."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels import operation
from ptxlab.kernels.gemm import ladder
from ptxlab.kernels.gemm.common import DTYPES, GemmStep
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device
from tests.support.gemm_calls import (
    BIAS,
    GROUPED,
    WEIGHTS,
    X_SCALE,
    M,
    N,
    X,
    expected,
)


def with_wait(step: GemmStep, after_wait: tuple[str, ...]) -> GemmStep:
    """The step, with a spec that says so."""
    return replace(step, spec=replace(step.spec, after_wait=after_wait))


def call(scheme: str = "qoq", x: np.ndarray = X, **options: Any) -> Any:
    return ptxlab.gemm_w4a8(DeviceArray(x), DeviceArray(X_SCALE[: len(x)]), on_device(WEIGHTS[scheme]), **options)


@pytest.mark.parametrize("scheme", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_from_device_arrays(fake: FakeGpu, scheme: str, dtype: str) -> None:
    y = call(scheme, bias=DeviceArray(BIAS), out_dtype=dtype)
    wanted = expected(scheme, dtype, BIAS)
    assert y.dtype == wanted.dtype and np.array_equal(y.host, wanted)
    sums = [("sum_activations_s8", 7)] if scheme == "qoq_channel" else []
    name = {
        "qoq": "gemm_w4a8_qoq_sm80",
        "qoq_channel": "gemm_w4a8_qoq_channel_sm80",
        "lqq": "gemm_w4a8_lqq_imfp_sm90",
    }[scheme]
    assert fake.launched == [*sums, (name, 7)]


def test_after_the_first_call_of_a_shape_nothing_is_loaded_or_allocated(fake: FakeGpu) -> None:
    out = fake.empty((M, N), "float16")
    call("qoq_channel", out=out)
    loads, allocations = fake.loads, fake.allocations
    assert loads == 2
    for stream in (7, 7):
        fake.stream = stream
        assert call("qoq_channel", out=out) is out
    assert (fake.loads, fake.allocations) == (loads, allocations)
    assert np.array_equal(out.host, expected("qoq_channel"))
    fake.stream = 9  # calls on another stream may run at the same time: they get memory of their own
    call("qoq_channel", out=out)
    assert (fake.loads, fake.allocations) == (loads, allocations + 1)
    assert fake.launched[-1] == ("gemm_w4a8_qoq_channel_sm80", 9)


def test_a_tensor_map_is_encoded_once_for_each_address(fake: FakeGpu) -> None:
    weight, scale = on_device(WEIGHTS["lqq"]), DeviceArray(X_SCALE)
    here, there = DeviceArray(X), DeviceArray(X[::-1])
    for x in (here, there, here, there):
        y = ptxlab.gemm_w4a8(x, scale, weight)
        assert np.array_equal(y.host, expected("lqq", x=x.host))
    assert fake.encoded == 2 and fake.loads == 1


def test_a_given_sum_or_packed_activations_need_no_other_kernel(fake: FakeGpu) -> None:
    y = call("qoq_channel", x_sum=DeviceArray(X.sum(axis=1, dtype=np.int32)))
    assert [name for name, _ in fake.launched] == ["gemm_w4a8_qoq_channel_sm80"]
    assert np.array_equal(y.host, expected("qoq_channel"))


def test_accumulators_from_device_arrays_need_no_scale(fake: FakeGpu) -> None:
    y = ptxlab.gemm_w4a8(DeviceArray(X), weight=on_device(WEIGHTS["qoq"]), out_dtype="int32")
    assert np.array_equal(y.host, expected("qoq", "int32"))


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_a_kernel_that_does_not_wait_is_not_launched_programmatically(fake: FakeGpu, scheme: str) -> None:
    name = ladder.choose(WEIGHTS[scheme], "row_major", M, kernel=None, backend="gpu").spec.name
    rule = r"only for kernels that wait for the one before them \(gemm_w4a8_sm90, gemm_w4a8_small_sm90\)"
    message = rf"gemm_w4a8: programmatic: {rule} \(got {name}\)"
    with pytest.raises(ArgumentError, match=message):
        call(scheme, programmatic=True)
    with pytest.raises(ArgumentError, match=r"programmatic: only for kernels that wait"):
        ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS[scheme], backend="emulator", programmatic=True)
    assert fake.launched == [] and fake.loads == 0


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_a_programmatic_call_has_a_plan_of_its_own(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """The token sums, which do not wait, are launched plainly before it: they wait for all that comes before."""
    monkeypatch.setattr(ladder, "LADDER", tuple(with_wait(step, ("x",)) for step in ladder.LADDER))
    sums = [False] if scheme == "qoq_channel" else []
    for programmatic in (False, True, False, True):
        y = call(scheme, programmatic=programmatic)
        assert np.array_equal(y.host, expected(scheme))
        assert [geometry.programmatic for geometry in fake.geometries] == [*sums, programmatic]
        fake.geometries.clear()
    assert fake.loads == 2 * (1 + len(sums))
    y = ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS[scheme], backend="emulator", programmatic=True)
    assert np.array_equal(y, expected(scheme))


def test_a_programmatic_call_in_a_capture_is_prepared_before(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "LADDER", tuple(with_wait(step, ("x",)) for step in ladder.LADDER))
    out = fake.empty((M, N), "float16")
    call(out=out)
    fake.capturing = True
    with pytest.raises(ArgumentError, match=r"gemm_w4a8: the first call of a shape loads its kernel"):
        call(out=out, programmatic=True)
    fake.capturing = False
    call(out=out, programmatic=True)
    fake.capturing = True
    call(out=out, programmatic=True)
    assert [geometry.programmatic for geometry in fake.geometries] == [False, True, True]


def test_no_tokens_launch_nothing(fake: FakeGpu) -> None:
    assert call(x=X[:0]).shape == (0, N)
    out = fake.empty((0, N), "float16")
    assert call(x=X[:0], out=out) is out
    assert fake.launched == [] and fake.loads == 0


def test_a_workspace_serves_fewer_tokens_too(fake: FakeGpu) -> None:
    weight = on_device(WEIGHTS["qoq_channel"])
    workspace = ptxlab.gemm_workspace(weight, M)
    assert workspace.nbytes == 4 * M and ptxlab.gemm_workspace(on_device(WEIGHTS["qoq"]), M).nbytes == 0
    for tokens in (M, 2):
        y = call("qoq_channel", x=X[:tokens], workspace=workspace)
        assert np.array_equal(y.host, expected("qoq_channel", x=X[:tokens]))
    with pytest.raises(
        ArgumentError, match=r"workspace: must be gemm_workspace\(weight, 5\) or larger \(got one for M=2"
    ):
        call("qoq_channel", workspace=ptxlab.gemm_workspace(weight, 2))
    there = gpu.view("x_sum", DeviceArray(np.zeros(M, np.int32), device=1))
    elsewhere = replace(workspace, views={"x_sum": there})
    with pytest.raises(ArgumentError, match=r"workspace: on the current device 0 \(got device 1\)"):
        call("qoq_channel", workspace=elsewhere)
    for change, message in (((X, M), "weight: must be a PackedWeight"), ((weight, -1), r"M: .* \(got -1\)")):
        with pytest.raises(ArgumentError, match=f"gemm_workspace: {message}"):
            ptxlab.gemm_workspace(*change)


def test_a_capture_is_told_what_to_make_before_it(fake: FakeGpu) -> None:
    out, workspace = fake.empty((M, N), "float16"), ptxlab.gemm_workspace(on_device(WEIGHTS["qoq_channel"]), M)
    fake.capturing = True
    with pytest.raises(
        ArgumentError, match=r"gemm_w4a8: out: must be given in a capture: make an array \[5, 40\] of float"
    ):
        call()
    with pytest.raises(ArgumentError, match=r"gemm_w4a8: the first call of a shape loads .*\(got M=5, N=40, K=256\)"):
        call(out=out)
    with pytest.raises(
        ArgumentError, match=r"workspace: must be given in a capture .*make gemm_workspace\(weight, 5\)"
    ):
        call("qoq_channel", out=out)
    assert fake.launched == [] and fake.loads == 0
    fake.capturing = False
    call("qoq_channel", out=out, workspace=workspace)
    fake.capturing, allocations = True, fake.allocations
    call("qoq_channel", out=out, workspace=workspace)
    assert fake.allocations == allocations and np.array_equal(out.host, expected("qoq_channel"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_q": DeviceArray(X.astype(np.uint8))}, r"x_q: dtype int8 \(got uint8\)"),
        ({"x_q": DeviceArray(X, device=1)}, r"x_q: on the current device 0 \(got device 1\)"),
        ({"x_scale": DeviceArray(X_SCALE[:3])}, r"x_scale: shape \[5\] \(got \[3\]\)"),
        ({"x_scale": DeviceArray(X_SCALE.astype(np.float64))}, r"x_scale: dtype float32 \(got float64\)"),
        ({"bias": DeviceArray(BIAS[:8])}, r"bias: shape \[40\] \(got \[8\]\)"),
        ({"out": DeviceArray(np.zeros((N, M), np.float16))}, r"out: shape \[5, 40\] \(got \[40, 5\]\)"),
        ({"backend": "emulator"}, r"backend: arrays on the CPU"),
    ],
)
def test_bad_device_arrays_are_refused_before_any_launch(fake: FakeGpu, change: dict[str, Any], message: str) -> None:
    given = {"x_q": DeviceArray(X), "x_scale": DeviceArray(X_SCALE), "weight": on_device(WEIGHTS["qoq"]), **change}
    with pytest.raises(ArgumentError, match=message):
        ptxlab.gemm_w4a8(**given)
    assert fake.launched == [] and fake.loads == 0


def test_host_activations_and_a_weight_on_the_gpu_are_refused(fake: FakeGpu) -> None:
    with pytest.raises(ArgumentError, match=r"gemm_w4a8: weight: must be on the host, as x_q is"):
        ptxlab.gemm_w4a8(X, X_SCALE, on_device(WEIGHTS["qoq"]))


@pytest.fixture
def hopper_step(monkeypatch: pytest.MonkeyPatch) -> GemmStep:
    """As if there were another step for Hopper alone, for the same activations and the weight in another packing."""
    first = ladder.LADDER[0]
    spec = replace(first.spec, name="gemm_w4a8_qoq_sm90", arch="sm_90a", exact_arch=True)
    step = replace(first, spec=spec, packing="comet")
    monkeypatch.setattr(ladder, "LADDER", (*ladder.LADDER, step))
    return step


def test_an_arch_that_lacks_the_kernel_is_told_which_would_do(fake: FakeGpu, hopper_step: GemmStep) -> None:
    weight = ptxlab.pack(GROUPED, "comet")
    fake.arch = 80
    message = (
        r"gemm_w4a8: qoq in comet takes gemm_w4a8_qoq_sm90: it runs on sm_90a, and this is sm_80; "
        r"here a weight can be qoq in qserve \(gemm_w4a8_qoq_sm80\)"
    )
    with pytest.raises(UnavailableError, match=message):
        ladder.choose(weight, "row_major", M, kernel=None, backend="gpu")
    assert ladder.choose(weight, "row_major", M, kernel=None, backend="emulator") is hopper_step
    fake.arch = 75
    with pytest.raises(UnavailableError, match=r'this is sm_75; pass backend="emulator"'):
        ladder.choose(weight, "row_major", M, kernel=None, backend="gpu")


def test_the_highest_step_that_suits_and_runs_is_taken(
    fake: FakeGpu, hopper_step: GemmStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    higher = replace(hopper_step, packing="qserve", suits=lambda s: s["M"] >= 16)
    monkeypatch.setattr(ladder, "LADDER", (*ladder.LADDER[:2], higher))

    def chosen(M: int, **options: Any) -> str:
        options = {"kernel": None, "backend": None, **options}
        return ladder.choose(WEIGHTS["qoq"], "row_major", M, **options).spec.name

    assert chosen(16) == "gemm_w4a8_qoq_sm90" and chosen(15) == "gemm_w4a8_qoq_sm80"
    assert chosen(16, kernel="gemm_w4a8_qoq_sm80") == "gemm_w4a8_qoq_sm80"
    assert chosen(15, kernel="gemm_w4a8_qoq_sm90") == "gemm_w4a8_qoq_sm90"
    fake.arch = 89
    assert chosen(16) == chosen(16, backend="gpu") == "gemm_w4a8_qoq_sm80"
    assert chosen(16, backend="emulator") == "gemm_w4a8_qoq_sm90"


def test_shapes_are_remembered_up_to_a_limit(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "MOST", 2)
    fake.runs = False
    for tokens in (1, 2, 3, 1):
        call(x=X[:tokens])
    assert len(operation._prepared) <= 2 and len(operation._ready) <= 2 and fake.loads == 4


def test_a_packed_weight_goes_to_the_gpu_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_info", lambda: None)
    monkeypatch.setattr(gpu, "to_device", lambda array: array.copy())
    moved = ptxlab.to_device(WEIGHTS["qoq"])
    assert moved.scheme == "qoq" and moved.buffers["qweight"] is not WEIGHTS["qoq"].buffers["qweight"]
    activations = ptxlab.quantize_activations(np.ones((2, 32), np.float32), backend="emulator")
    assert np.array_equal(ptxlab.to_device(activations).x_q, activations.x_q)
    with pytest.raises(ArgumentError, match=r"packed: must be a PackedWeight, .* or KVCache \(got ndarray\)"):
        ptxlab.to_device(X)
