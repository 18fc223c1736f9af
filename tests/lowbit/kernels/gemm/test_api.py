"""`gemm_w4a8` without a GPU: on host arrays in the emulator."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.gemm import ladder
from ptxlab.lowbit.kernels.gemm.common import DTYPES, GemmStep
from ptxlab.lowbit.kernels.gemm.options import GemmOptions
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device
from tests.support.gemm_calls import (
    BIAS,
    CHANNEL,
    GROUPED,
    LQQ,
    RNG,
    SCHEMES,
    STRIPS,
    WEIGHTS,
    X_SCALE,
    K,
    M,
    N,
    X,
    expected_product,
    product,
)


@pytest.mark.default_cases("int32-qoq_channel")
@pytest.mark.parametrize("scheme", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_on_the_host(scheme: str, dtype: str) -> None:
    y = ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS[scheme], bias=BIAS, out_dtype=dtype, backend="emulator")
    expected = expected_product(scheme, dtype, BIAS)
    assert y.dtype == expected.dtype and np.array_equal(y, expected)


def test_accumulators_need_no_scale() -> None:
    y = ptxlab.gemm_w4a8(X, weight=WEIGHTS["qoq"], out_dtype="int32", backend="emulator")
    assert np.array_equal(y, expected_product("qoq", "int32"))


@pytest.mark.full
def test_quantised_activations_bring_scale_and_sum() -> None:
    activations = ptxlab.quantize_activations(RNG.standard_normal((M, K), dtype=np.float32), backend="emulator")
    for weight in WEIGHTS.values():
        y = ptxlab.gemm_w4a8(activations, weight=weight, backend="emulator")
        by_parts = ptxlab.gemm_w4a8(
            activations.x_q, activations.scale, weight, x_sum=activations.token_sum, backend="emulator"
        )
        assert np.array_equal(y, by_parts)


@pytest.mark.full
@pytest.mark.parametrize("rows", [8, 16])
def test_lqq_weights_take_activations_in_tiles(rows: int) -> None:
    floats = RNG.standard_normal((M, K), dtype=np.float32)
    tiles = ptxlab.quantize_activations(floats, layout="tiles", rows=rows, backend="emulator")
    plain = ptxlab.quantize_activations(floats, backend="emulator")
    y = ptxlab.gemm_w4a8(tiles, weight=WEIGHTS["lqq"], bias=BIAS, backend="emulator")
    assert np.array_equal(y, ptxlab.gemm_w4a8(plain, weight=WEIGHTS["lqq"], bias=BIAS, backend="emulator"))


def test_a_kernel_for_two_orders_is_named_once() -> None:
    fragments = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="fragment", backend="emulator")
    with pytest.raises(ArgumentError, match=r"x_q: must be row_major or tiles for [^()]* \(got fragment\)") as raised:
        ptxlab.gemm_w4a8(fragments, weight=WEIGHTS["lqq"], backend="emulator")
    assert str(raised.value).count("gemm_w4a8_lqq_imfp_sm90") == 1


def test_tiles_that_no_wgmma_has_are_refused() -> None:
    tiles = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="tiles", rows=24, backend="emulator")
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_lqq_imfp_sm90: rows in \(8, 16, 32, 64, 128, 256\)"):
        ptxlab.gemm_w4a8(tiles, weight=WEIGHTS["lqq"], backend="emulator")


def test_out_is_written_and_returned_and_decides_the_dtype() -> None:
    out = np.zeros((M, N), np.float32)
    assert ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS["qoq"], out=out, backend="emulator") is out
    assert np.array_equal(out, expected_product("qoq", "float32"))


STEPS = list(dict.fromkeys((step.spec.name, step.scheme, step.packing) for step in ladder.LADDER))


@pytest.mark.default_cases(
    "gemm_w4a8_qoq_channel_sm80-qoq_channel-qserve",
    "gemm_w4a8_qoq_sm80-qoq-qserve",
    "gemm_w4a8_small_sm90-qoq-strips",
    "gemm_w4a8_lqq_imfp_sm90-lqq-dual_mma",
)
@pytest.mark.parametrize(("kernel", "scheme", "packing"), STEPS, ids=["-".join(step) for step in STEPS])
def test_every_step_by_name_and_of_no_tokens(kernel: str, scheme: str, packing: str) -> None:
    weight = ptxlab.pack(SCHEMES[scheme], packing)
    y = ptxlab.gemm_w4a8(X, X_SCALE, weight, bias=BIAS, kernel=kernel, backend="emulator")
    assert np.array_equal(y, expected_product(scheme, bias=BIAS))
    y = ptxlab.gemm_w4a8(X[:0], X_SCALE[:0], weight, kernel=kernel, backend="emulator")
    assert y.shape == (0, N) and y.dtype == np.float16


def test_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    x, scale = torch.from_numpy(X), torch.from_numpy(X_SCALE)
    y = ptxlab.gemm_w4a8(x, scale, WEIGHTS["qoq_channel"], out_dtype="bfloat16", backend="emulator")
    assert y.dtype == torch.bfloat16
    assert np.array_equal(y.view(torch.uint16).numpy(), expected_product("qoq_channel", "bfloat16"))


def test_the_accumulators_kernel_reads_no_scale() -> None:
    """The kernel is given a null pointer on the GPU then; in the emulator that faults if it is read."""
    spec, (source, *_) = ptxlab.find("gemm_w4a8_qoq_sm80")
    logical = spec.example(np.random.default_rng(0), M=2, N=8, K=64, g=64)
    inputs = spec.pack(logical)
    del inputs["x_scale"]
    args = tuple(replace(a, optional=True) if a.name == "x_scale" else a for a in spec.args)
    outcome = ptxlab.runtime.run_spec(replace(spec, args=args), source, inputs, backend="emulator")
    assert np.array_equal(outcome.outputs["y"], spec.reference(logical["weight"], logical["x"]))


FEW = X[:, :128]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weight": GROUPED}, r"gemm_w4a8: weight: must be a PackedWeight \(layout.pack\) \(got QoQWeight\)"),
    (
        {"weight": None, "x_scale": WEIGHTS["qoq"]},
        r"gemm_w4a8: weight: must be given by name, as weight=w \(got a PackedW",
    ),
    ({"weight": None}, r"gemm_w4a8: weight: must be a PackedWeight .*\(got NoneType\)"),
    ({"x_q": X[0]}, r"gemm_w4a8: x_q: must be an array \[M, K\] or PackedActivations \(got shape \(256,\)\)"),
    ({"x_q": FEW}, r"gemm_w4a8: x_q: K must be 256 as the weight's \(got shape \(5, 128\)\)"),
    ({"x_q": X.astype(np.int16)}, r"gemm_w4a8: x_q: dtype int8 \(got int16\)"),
    ({"x_q": np.full((M, K), np.nan), "weight": WEIGHTS["qoq_channel"]}, r"x_q: must be quantised: .*\(got float64\)"),
    (
        {"x_q": X.astype(np.float16)},
        r"x_q: must be quantised: pass quantize_activations\(x\) .*\(got float16\)",
    ),
    ({"x_q": np.asfortranarray(X)}, r"gemm_w4a8: x_q: C-contiguous \(got strides \(1, 5\)\)"),
    ({"x_scale": None}, r"gemm_w4a8: x_scale: must be given unless the output is int32 \(got nothing\)"),
    ({"x_scale": X_SCALE[:3]}, r"gemm_w4a8: x_scale: shape \[5\] \(got \[3\]\)"),
    ({"bias": BIAS[:8]}, r"gemm_w4a8: bias: shape \[40\] \(got \[8\]\)"),
    ({"bias": 1.0}, r"gemm_w4a8: bias: an array: NumPy, .*\(got float\)"),
    ({"x_sum": BIAS[:M], "weight": WEIGHTS["qoq_channel"]}, r"gemm_w4a8: x_sum: dtype int32 \(got float32\)"),
    ({"out": np.zeros((M, 8), np.float16)}, r"gemm_w4a8: out: shape \[5, 40\] \(got \[5, 8\]\)"),
    ({"out": np.zeros((M, N))}, r"gemm_w4a8: out: dtype must be one of float16, .*\(got float64\)"),
    ({"out": np.zeros((M, N), np.float16), "out_dtype": "float32"}, r"out: dtype float32 \(got float16\)"),
    ({"out": np.frombuffer(bytes(2 * M * N), np.float16).reshape(M, N)}, r"out: must be writeable \(got a read-only"),
    ({"out_dtype": ""}, r"gemm_w4a8: out_dtype: must be one of float16"),
    ({"out_dtype": "int8"}, r"gemm_w4a8: out_dtype: must be one of float16, bfloat16, float32, int32 \(got int8\)"),
    (
        {"kernel": "gemm"},
        r"gemm_w4a8: kernel: must be one of gemm_w4a8_qoq_sm80, .*, gemm_w4a8_small_sm90 \(got gemm\)",
    ),
    (
        {"kernel": "gemm_w4a8_qoq_channel_sm80"},
        r"gemm_w4a8: weight: must be qoq_channel in qserve \(gemm_w4a8_qoq_channel_sm80\) \(got qoq in qserve\)",
    ),
    ({"weight": ptxlab.pack(GROUPED, "comet")}, r"gemm_w4a8: weight: must be qoq in qserve .*\(got qoq in comet\)"),
    ({"programmatic": 1}, r"gemm_w4a8: programmatic: must be True or False \(got 1\)"),
    ({"backend": "tpu"}, r"backend: one of gpu, emulator \(got tpu\)"),
    ({"workspace": 5}, r"gemm_w4a8: workspace: must come from gemm_workspace \(got int\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_bad_input_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {"x_q": X, "x_scale": X_SCALE, "weight": WEIGHTS["qoq"], "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.gemm_w4a8(**arguments)
    assert "\n" not in str(raised.value)


def test_packed_activations_have_their_own_scale_and_an_order() -> None:
    tiles = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="tiles", rows=8, backend="emulator")
    with pytest.raises(ArgumentError, match=r"x_scale: must be None: PackedActivations have theirs"):
        ptxlab.gemm_w4a8(tiles, X_SCALE, WEIGHTS["qoq"])
    with pytest.raises(ArgumentError, match=r"x_q: must be row_major for gemm_w4a8_qoq_sm80 \(got tiles\)"):
        ptxlab.gemm_w4a8(tiles, weight=WEIGHTS["qoq"])


def with_wait(step: GemmStep, after_wait: tuple[str, ...]) -> GemmStep:
    """Return the step with these arguments in its spec's `after_wait`."""
    return replace(step, spec=replace(step.spec, after_wait=after_wait))


def call(scheme: str = "qoq", x: np.ndarray = X, **options: Any) -> Any:
    return ptxlab.gemm_w4a8(DeviceArray(x), DeviceArray(X_SCALE[: len(x)]), on_device(WEIGHTS[scheme]), **options)


@pytest.mark.default_cases("bfloat16-qoq_channel", "float16-qoq")
@pytest.mark.parametrize("scheme", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_from_device_arrays(fake: FakeGpu, scheme: str, dtype: str) -> None:
    y = call(scheme, bias=DeviceArray(BIAS), out_dtype=dtype)
    expected = expected_product(scheme, dtype, BIAS)
    assert y.dtype == expected.dtype and np.array_equal(y.host, expected)
    sums = [("sum_activations_s8", 7)] if scheme == "qoq_channel" else []
    name = "gemm_w4a8_lqq_imfp_sm90" if scheme == "lqq" else f"gemm_w4a8_{scheme}_sm80"
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
    assert np.array_equal(out.host, expected_product("qoq_channel"))
    fake.stream = 9  # calls on another stream may run at the same time: they get memory of their own
    call("qoq_channel", out=out)
    assert (fake.loads, fake.allocations) == (loads, allocations + 1)
    assert fake.launched[-1] == ("gemm_w4a8_qoq_channel_sm80", 9)


@pytest.mark.full
def test_a_tensor_map_is_encoded_once_for_each_address(fake: FakeGpu) -> None:
    weight, scale = on_device(WEIGHTS["lqq"]), DeviceArray(X_SCALE)
    first_x, second_x = DeviceArray(X), DeviceArray(X[::-1])
    for x in (first_x, second_x, first_x, second_x):
        y = ptxlab.gemm_w4a8(x, scale, weight)
        assert np.array_equal(y.host, expected_product("lqq", x=x.host))
    assert fake.encoded == 2 and fake.loads == 1


def test_a_given_sum_or_packed_activations_need_no_other_kernel(fake: FakeGpu) -> None:
    y = call("qoq_channel", x_sum=DeviceArray(X.sum(axis=1, dtype=np.int32)))
    assert [name for name, _ in fake.launched] == ["gemm_w4a8_qoq_channel_sm80"]
    assert np.array_equal(y.host, expected_product("qoq_channel"))


def test_accumulators_from_device_arrays_need_no_scale(fake: FakeGpu) -> None:
    y = ptxlab.gemm_w4a8(DeviceArray(X), weight=on_device(WEIGHTS["qoq"]), out_dtype="int32")
    assert np.array_equal(y.host, expected_product("qoq", "int32"))


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_a_kernel_that_does_not_wait_is_not_launched_programmatically(fake: FakeGpu, scheme: str) -> None:
    name = ladder.choose(WEIGHTS[scheme], "row_major", M, GemmOptions(backend="gpu")).spec.name
    rule = r"only for kernels that wait for the one before them \(gemm_w4a8_sm90, gemm_w4a8_small_sm90\)"
    message = rf"gemm_w4a8: programmatic: {rule} \(got {name}\)"
    with pytest.raises(ArgumentError, match=message):
        call(scheme, programmatic=True)
    with pytest.raises(ArgumentError, match=r"programmatic: only for kernels that wait"):
        ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS[scheme], backend="emulator", programmatic=True)
    assert fake.launched == [] and fake.loads == 0


@pytest.mark.default_cases("lqq")
@pytest.mark.parametrize("scheme", WEIGHTS)
def test_a_programmatic_call_has_a_plan_of_its_own(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """The token sums, which do not wait, are launched plainly before it: they wait for all that comes before."""
    monkeypatch.setattr(ladder, "LADDER", tuple(with_wait(step, ("x",)) for step in ladder.LADDER))
    sums = [False] if scheme == "qoq_channel" else []
    for programmatic in (False, True, False, True):
        y = call(scheme, programmatic=programmatic)
        assert np.array_equal(y.host, expected_product(scheme))
        assert [geometry.programmatic for geometry in fake.geometries] == [*sums, programmatic]
        fake.geometries.clear()
    assert fake.loads == 2 * (1 + len(sums))
    y = ptxlab.gemm_w4a8(X, X_SCALE, WEIGHTS[scheme], backend="emulator", programmatic=True)
    assert np.array_equal(y, expected_product(scheme))


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
        assert np.array_equal(y.host, expected_product("qoq_channel", x=X[:tokens]))
    with pytest.raises(
        ArgumentError, match=r"workspace: must be gemm_workspace\(weight, 5\) or larger \(got one for M=2"
    ):
        call("qoq_channel", workspace=ptxlab.gemm_workspace(weight, 2))
    on_device_1 = gpu.view("x_sum", DeviceArray(np.zeros(M, np.int32), device=1))
    elsewhere = replace(workspace, views={"x_sum": on_device_1})
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
    assert fake.allocations == allocations and np.array_equal(out.host, expected_product("qoq_channel"))


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
    arguments = {"x_q": DeviceArray(X), "x_scale": DeviceArray(X_SCALE), "weight": on_device(WEIGHTS["qoq"]), **change}
    with pytest.raises(ArgumentError, match=message):
        ptxlab.gemm_w4a8(**arguments)
    assert fake.launched == [] and fake.loads == 0


def test_host_activations_and_a_weight_on_the_gpu_are_refused(fake: FakeGpu) -> None:
    with pytest.raises(ArgumentError, match=r"gemm_w4a8: weight: must be on the host, as x_q is"):
        ptxlab.gemm_w4a8(X, X_SCALE, on_device(WEIGHTS["qoq"]))


@pytest.fixture
def hopper_step(monkeypatch: pytest.MonkeyPatch) -> GemmStep:
    """Add another step for Hopper alone, for the same activations and the weight in another packing."""
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
        ladder.choose(weight, "row_major", M, GemmOptions(backend="gpu"))
    assert ladder.choose(weight, "row_major", M, GemmOptions(backend="emulator")) is hopper_step
    fake.arch = 75
    with pytest.raises(UnavailableError, match=r'this is sm_75; pass backend="emulator"'):
        ladder.choose(weight, "row_major", M, GemmOptions(backend="gpu"))


def test_the_highest_step_that_suits_and_runs_is_taken(
    fake: FakeGpu, hopper_step: GemmStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    higher = replace(hopper_step, packing="qserve", suits=lambda s: s["M"] >= 16)
    monkeypatch.setattr(ladder, "LADDER", (*ladder.LADDER[:2], higher))

    def choose_kernel(M: int, **options: Any) -> str:
        options = {"kernel": None, "backend": None, **options}
        return ladder.choose(WEIGHTS["qoq"], "row_major", M, GemmOptions(**options)).spec.name

    assert choose_kernel(16) == "gemm_w4a8_qoq_sm90" and choose_kernel(15) == "gemm_w4a8_qoq_sm80"
    assert choose_kernel(16, kernel="gemm_w4a8_qoq_sm80") == "gemm_w4a8_qoq_sm80"
    assert choose_kernel(15, kernel="gemm_w4a8_qoq_sm90") == "gemm_w4a8_qoq_sm90"
    fake.arch = 89
    assert choose_kernel(16) == choose_kernel(16, backend="gpu") == "gemm_w4a8_qoq_sm80"
    assert choose_kernel(16, backend="emulator") == "gemm_w4a8_qoq_sm90"


def test_shapes_are_remembered_up_to_a_limit(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "MAX_ENTRIES", 2)
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
    with pytest.raises(ArgumentError, match=r"packed: must be of PackedWeight, .* or KVCache \(got ndarray\)"):
        ptxlab.to_device(X)


STRIPS_ORDERS: dict[str, dict[str, Any]] = {
    "row_major": {},
    "tiles": {"layout": "tiles", "rows": 16},
    "fragment": {"layout": "fragment"},
}


def chosen_kernel(weight: Any, order: str, M: int, **options: Any) -> str:
    """Return the name of the kernel that would be launched."""
    return ladder.choose(weight, order, M, GemmOptions(**{"backend": "emulator", **options})).spec.name


@pytest.mark.default_cases("row_major-8-qoq", "row_major-1-lqq")
@pytest.mark.parametrize("scheme", STRIPS)
@pytest.mark.parametrize(
    ("order", "tokens"),
    [(order, M) for order in STRIPS_ORDERS for M in (1, 8, 9, 16, 17, 32, 33, 40) if order != "fragment" or M <= 32],
)
def test_strips_of_any_number_of_tokens(scheme: str, order: str, tokens: int) -> None:
    """The numbers cross from one kernel to the other, and exceed the limit of one of them."""
    x = np.random.default_rng(tokens).standard_normal((tokens, K), dtype=np.float32)
    packed = ptxlab.quantize_activations(x, **STRIPS_ORDERS[order], backend="emulator")
    plain = quant.quantize_activations(x)
    y = ptxlab.gemm_w4a8(packed, weight=STRIPS[scheme], bias=BIAS, backend="emulator")
    expected = product(SCHEMES[scheme], plain.q, plain.scale, BIAS, "float16")
    assert y.shape == (tokens, N) and np.array_equal(y, expected)


@pytest.mark.default_cases("bfloat16-5-qoq")
@pytest.mark.parametrize("scheme", STRIPS)
@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strips_with_token_sums_and_without(scheme: str, tokens: int, dtype: str) -> None:
    """The two variants give the same bits.

    Sums that are not those of x would give others, and are refused.
    """
    x = np.random.default_rng(0).integers(-128, 128, (tokens, K), dtype=np.int8)
    x_scale, x_sum = np.full(tokens, 0.01, np.float32), x.sum(axis=1, dtype=np.int32)

    def multiply(sums: np.ndarray | None) -> np.ndarray:
        return ptxlab.gemm_w4a8(x, x_scale, STRIPS[scheme], x_sum=sums, bias=BIAS, out_dtype=dtype, backend="emulator")

    assert np.array_equal(multiply(x_sum), multiply(None))
    with pytest.raises(ArgumentError, match=r"^gemm_w4a8: x_sum: the sum of token 0 over K is -?\d+ \(got x_sum\[0\]"):
        multiply(x_sum + 1)


def test_tiles_that_no_wgmma_has_are_refused_before_any_launch(fake: FakeGpu) -> None:
    tiles = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="tiles", rows=24, backend="emulator")
    for weight, name in ((WEIGHTS["lqq"], "gemm_w4a8_lqq_imfp_sm90"), (STRIPS["lqq"], "gemm_w4a8_sm90")):
        with pytest.raises(ArgumentError, match=rf"^{name}: rows in \(8, 16, .*\) \(got rows=24\)$"):
            ptxlab.gemm_w4a8(on_device(tiles), weight=on_device(weight))
    assert fake.launched == [] and fake.loads == 0


def test_which_kernel_strips_take() -> None:
    for weight in STRIPS.values():
        chosen = {M: chosen_kernel(weight, "row_major", M) for M in range(41)}
        assert set(chosen.values()) == {"gemm_w4a8_small_sm90", "gemm_w4a8_sm90"}
        assert {M for M, name in chosen.items() if name == "gemm_w4a8_small_sm90"} == set(range(17))
        assert (
            chosen_kernel(weight, "tiles", 4) == "gemm_w4a8_sm90"
            and chosen_kernel(weight, "fragment", 32) == "gemm_w4a8_small_sm90"
        )
        assert chosen_kernel(weight, "row_major", 32, kernel="gemm_w4a8_small_sm90") == "gemm_w4a8_small_sm90"
        assert chosen_kernel(weight, "row_major", 4, kernel="gemm_w4a8_sm90") == "gemm_w4a8_sm90"
    deep = ptxlab.pack(quant.quantize_lqq(np.ones((8, 16384), np.float32), group=128), "strips")
    assert [chosen_kernel(deep, "row_major", M) for M in (8, 9)] == ["gemm_w4a8_small_sm90", "gemm_w4a8_sm90"], (
        "room for X"
    )


def test_what_kernels_for_strips_do_not_take() -> None:
    x = np.zeros((33, K), np.int8)
    call: dict[str, Any] = {"weight": STRIPS["lqq"], "out_dtype": "int32", "backend": "emulator"}
    with pytest.raises(ArgumentError, match=r"^gemm_w4a8_small_sm90: M <= 32 \(got M=33\)$"):
        ptxlab.gemm_w4a8(x, kernel="gemm_w4a8_small_sm90", **call)
    floats = np.ones((33, K), np.float32)
    fragments = ptxlab.quantize_activations(floats, layout="fragment", backend="emulator")
    with pytest.raises(ArgumentError, match=r"^gemm_w4a8_small_sm90: M <= 32 \(got M=33\)$"):
        ptxlab.gemm_w4a8(fragments, weight=STRIPS["lqq"], backend="emulator")
    message = r"x_q: must be row_major or tiles for gemm_w4a8_sm90 \(got fragment\)"
    with pytest.raises(ArgumentError, match=message):
        ptxlab.gemm_w4a8(fragments, weight=STRIPS["lqq"], kernel="gemm_w4a8_sm90", backend="emulator")
    tiles = ptxlab.quantize_activations(floats, layout="tiles", rows=24, backend="emulator")
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_sm90: rows in \(8, 16, 32, 48, .*, 256\) \(got rows=24\)"):
        ptxlab.gemm_w4a8(tiles, weight=STRIPS["lqq"], backend="emulator")
    with pytest.raises(ArgumentError, match=r"gemm_w4a8: x_sum: shape \[33\] \(got \[5\]\)"):
        ptxlab.gemm_w4a8(x, x_sum=np.zeros(5, np.int32), **call)
    with pytest.raises(
        ArgumentError,
        match=r"weight: must be (\w+ in strips \S+ or ){2}qoq_channel in strips .*\(got lqq in dual_mma",
    ):
        ptxlab.gemm_w4a8(x, kernel="gemm_w4a8_sm90", **{**call, "weight": WEIGHTS["lqq"]})


@pytest.mark.full
@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize("tokens", [5, 40])
def test_strips_from_device_arrays(fake: FakeGpu, tokens: int, with_sum: bool) -> None:
    """There is one launch, with token sums or without, plainly and programmatically."""
    x = np.random.default_rng(0).integers(-128, 128, (tokens, K), dtype=np.int8)
    sums = DeviceArray(x.sum(axis=1, dtype=np.int32)) if with_sum else None
    expected = x.astype(np.int32) @ LQQ.exact_level1().T
    weight, name = on_device(STRIPS["lqq"]), "gemm_w4a8_small_sm90" if tokens == 5 else "gemm_w4a8_sm90"
    for programmatic in (False, True):
        y = ptxlab.gemm_w4a8(DeviceArray(x), weight=weight, x_sum=sums, out_dtype="int32", programmatic=programmatic)
        assert np.array_equal(y.host, expected) and fake.launched.pop() == (name, 7)
        assert fake.geometries.pop().programmatic == programmatic
    assert fake.launched == [] and ptxlab.gemm_workspace(weight, tokens).nbytes == 0
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_small_sm90: M <= 32 \(got M=40"):
        ptxlab.gemm_workspace(weight, 40, kernel="gemm_w4a8_small_sm90")


@pytest.mark.full
@pytest.mark.parametrize("tokens", [5, 40])
def test_strips_per_channel_from_device_arrays(fake: FakeGpu, tokens: int) -> None:
    """There is one launch with token sums.

    Without them another launch computes them, into memory that a workspace may bring.
    """
    x = np.random.default_rng(0).integers(-128, 128, (tokens, K), dtype=np.int8)
    expected = x.astype(np.int32) @ (CHANNEL.q4.astype(np.int32) - CHANNEL.zero[:, None]).T
    weight = on_device(STRIPS["qoq_channel"])
    name = "gemm_w4a8_small_sm90" if tokens == 5 else "gemm_w4a8_sm90"
    call: dict[str, Any] = {"weight": weight, "out_dtype": "int32"}
    y = ptxlab.gemm_w4a8(DeviceArray(x), x_sum=DeviceArray(x.sum(axis=1, dtype=np.int32)), **call)
    assert np.array_equal(y.host, expected) and fake.launched == [(name, 7)]
    y = ptxlab.gemm_w4a8(DeviceArray(x), workspace=ptxlab.gemm_workspace(weight, tokens), **call)
    assert np.array_equal(y.host, expected) and fake.launched[1:] == [("sum_activations_s8", 7), (name, 7)]
