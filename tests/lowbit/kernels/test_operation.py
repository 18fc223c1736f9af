"""What public calls share: a repeat call is quick and checked, and memory per stream can be given back."""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError, LaunchError
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.gemm import gemm_w8a8
from ptxlab.lowbit.layout import KVCache
from tests.support import attention_calls, gemm_calls, host_time
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device

M, N, K, E, HEADS, D = 5, 40, 256, 2, 2, 64
PACKAGE = str(Path(ptxlab.__file__).parent)
ATOM = np.ones((M + 3, K), np.float32)
ATOM_WEIGHT = ptxlab.pack_atom(quant.quantize_atom_weight(np.tile(ATOM, (N // 8, 1)), 64, 64))
BLOCK_WEIGHT = ptxlab.pack_block_weight(quant.quantize_block_weight(np.tile(ATOM, (N // 8, 1))), 1)
BLOCK_TOKENS = layout.pack_block_activations(quant.quantize_blocks(ATOM[:M], 1))
ATOM_TOKENS = layout.pack_atom_activations(quant.quantize_atom_activations(ATOM[:M], 64, 64))
Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


def array(shape: tuple[int, ...], dtype: Any = np.float16) -> DeviceArray:
    return DeviceArray(np.zeros(shape, dtype))


@pytest.fixture
def calls(fake: FakeGpu) -> Calls:
    """List every public call with arguments that it takes, results included; nothing runs."""
    fake.runs = False
    experts = on_device(ptxlab.stack_experts([gemm_calls.STRIPS["lqq"]] * E))
    cache = attention_calls.on_device(KVCache.empty(M, 2, HEADS, D, page_size=16))
    gemm = {"x_q": array((M, K), np.int8), "x_scale": array((M,), np.float32), "out": array((M, N))}
    new = array((M, HEADS, D))
    floats = array((M, K))
    return {
        "gemm_w4a8": (ptxlab.gemm_w4a8, {**gemm, "weight": on_device(gemm_calls.STRIPS["lqq"])}),
        "gemm_w4a8_grouped": (
            ptxlab.gemm_w4a8_grouped,
            {**gemm, "weights": experts, "offsets": array((E + 1,), np.int32)},
        ),
        "gemm_w4a4": (
            ptxlab.gemm_w4a4,
            {"out": array((M, N)), "x": on_device(ATOM_TOKENS), "weight": on_device(ATOM_WEIGHT)},
        ),
        "gemm_w8a8": (
            gemm_w8a8,
            {
                "out": array((M, N)),
                "x": ptxlab.quantize_activations(floats),
                "weight": quant.Level1Weight(array((N, K), np.int8), array((N,), np.float32), 127),
            },
        ),
        "gemm_w4ax": (
            ptxlab.gemm_w4ax,
            {"out": array((M, N)), "x": on_device(BLOCK_TOKENS), "weight": on_device(BLOCK_WEIGHT)},
        ),
        "attention_kv4": (
            ptxlab.attention_kv4,
            {"q": array((M, HEADS, D)), "cache": cache, "out": array((M, HEADS, D))},
        ),
        "append_kv4": (ptxlab.append_kv4, {"k": new, "v": new, "cache": cache, "slots": array((M,), np.int32)}),
        "rope_append_kv4": (
            ptxlab.rope_append_kv4,
            {
                "qkv": array((M, 3 * HEADS * D)),
                "cache": cache,
                "slots": array((M,), np.int32),
                "rope": (array((M, D // 2), np.float32),) * 2,
                "out": new,
            },
        ),
        "quantize_activations": (
            ptxlab.quantize_activations,
            {"x": floats, "out": ptxlab.quantize_activations(floats)},
        ),
    }


NAMES = (
    "gemm_w4a8",
    "gemm_w4a8_grouped",
    "gemm_w4a4",
    "gemm_w8a8",
    "gemm_w4ax",
    "attention_kv4",
    "append_kv4",
    "rope_append_kv4",
    "quantize_activations",
)


COMPREHENSIONS = ("<listcomp>", "<dictcomp>")  # functions of their own up to Python 3.11 only


@pytest.mark.default_cases("quantize_activations", "append_kv4")
@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_call_is_a_few_functions(calls: Calls, name: str) -> None:
    """A decoder repeats a call some hundred times per token: it once took 27 to 46 package functions, without `gpu`."""
    call, arguments = calls[name]
    call(**arguments)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and name not in COMPREHENSIONS:
            called.append(name)

    sys.setprofile(note)
    try:
        call(**arguments)
    finally:
        sys.setprofile(None)
    assert 2 <= len(called) <= 16, called


@pytest.mark.full_cases("gemm_w4ax", "attention_kv4")
@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_call_loads_and_allocates_nothing(calls: Calls, fake: FakeGpu, name: str) -> None:
    call, arguments = calls[name]
    call(**arguments)
    loads, allocations, launched = fake.loads, fake.allocations, len(fake.launched)
    fake.capturing = name != "attention_kv4"  # whose shared memory a graph may not have
    for _ in range(3):
        call(**arguments)
    assert (fake.loads, fake.allocations, len(fake.launched)) == (loads, allocations, launched + 3)


@pytest.mark.full
def test_what_host_time_measures_are_repeat_calls(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.runs = False
    monkeypatch.setattr(ptxlab, "to_device", on_device)
    for name, call in host_time.calls(DeviceArray, 512).items():
        call()
        loads, launched = fake.loads, len(fake.launched)
        call()
        assert fake.loads == loads and 1 <= len(fake.launched) - launched <= 2, name


def elsewhere(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    return DeviceArray(np.zeros(shape, dtype), device=1)


def make_misaligned(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    flat = np.zeros(int(np.prod(shape)) + 1, dtype)
    return DeviceArray(flat[1:].reshape(shape))


F32, S32, F16 = np.float32, np.int32, np.float16
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("gemm_w4a8", {"x_q": array((M, K), np.uint8)}, r"x_q: dtype int8 \(got uint8\)"),
    ("gemm_w4a8", {"x_q": array((M, K - 64), np.int8)}, r"x_q: K must be 256 as the weight's"),
    ("gemm_w4a8", {"x_q": array((M, K, 1), np.int8)}, r"x_q: must be an array \[M, K\]"),
    ("gemm_w4a8", {"x_q": elsewhere((M, K), np.int8)}, r"x_q: on the current device 0 \(got device 1\)"),
    ("gemm_w4a8", {"x_q": make_misaligned((M, K), np.int8)}, r"x_q: aligned to 16 bytes on the GPU"),
    ("gemm_w4a8", {"x_scale": array((M - 1,), F32)}, r"x_scale: shape \[5\] \(got \[4\]\)"),
    ("gemm_w4a8", {"x_scale": None}, r"x_scale: must be given unless the output is int32"),
    ("gemm_w4a8", {"x_sum": array((M,), F32)}, r"x_sum: dtype int32 \(got float32\)"),
    ("gemm_w4a8", {"bias": array((N,), F16)}, r"bias: dtype float32 \(got float16\)"),
    ("gemm_w4a8", {"out": array((N, M))}, r"out: shape \[5, 40\] \(got \[40, 5\]\)"),
    ("gemm_w4a8", {"out": array((M, N), np.int8)}, r"out: dtype must be one of"),
    ("gemm_w4a8", {"out": make_misaligned((M, N), F16)}, r"out: aligned to 16 bytes on the GPU"),
    ("gemm_w4a8", {"out_dtype": "float32"}, r"out: dtype float32 \(got float16\)"),
    ("gemm_w4a8", {"out_dtype": []}, r"out_dtype: must be one of"),
    ("gemm_w4a8", {"kernel": "gemm_w4a8_qoq_sm80"}, r"weight: must be qoq in qserve"),
    ("gemm_w4a8", {"backend": "emulator"}, r"backend: arrays on the CPU"),
    ("gemm_w4a8", {"backend": "tpu"}, r"backend: one of gpu, emulator"),
    ("gemm_w4a8", {"programmatic": 0}, r"programmatic: must be True or False \(got 0\)"),
    ("gemm_w4a8", {"weight": None}, r"weight: must be a PackedWeight"),
    ("gemm_w4a8", {"workspace": 5}, r"workspace: must come from gemm_workspace"),
    ("gemm_w4a8_grouped", {"offsets": array((E,), S32)}, r"offsets: shape \[3\] \(got \[2\]\)"),
    ("gemm_w4a8_grouped", {"offsets": None}, r"offsets: must be s32 \[3\] \(got nothing\)"),
    ("gemm_w4a8_grouped", {"x_q": make_misaligned((M, K), np.int8)}, r"x_q: aligned to 16 bytes on the GPU"),
    ("gemm_w4a8_grouped", {"bias": array((N,), F32)}, r"bias: shape \[2, 40\] \(got \[40\]\)"),
    ("gemm_w4a8_grouped", {"programmatic": 0.0}, r"programmatic: must be True or False \(got 0.0\)"),
    ("attention_kv4", {"q": array((M, HEADS, D), F32)}, r"q: dtype float16 or bfloat16 \(got float32\)"),
    ("attention_kv4", {"q": array((M + 1, HEADS, D))}, r"q: must be \[5, Hq, 64\]"),
    ("attention_kv4", {"q": elsewhere((M, HEADS, D), F16)}, r"q: on the current device 0 \(got device 1\)"),
    ("attention_kv4", {"out": make_misaligned((M, HEADS, D), F16)}, r"out: aligned to 16 bytes on the GPU"),
    ("attention_kv4", {"out": array((M, HEADS, D), np.uint16)}, r"out: dtype float16 \(got uint16\)"),
    ("attention_kv4", {"window": True}, r"window: must be an integer, 1 or more, or None \(got True\)"),
    ("attention_kv4", {"return_lse": 0}, r"return_lse: must be True or False \(got 0\)"),
    ("attention_kv4", {"scale": -1.0}, r"scale: must be above 0 and finite"),
    ("attention_kv4", {"check": 0}, r"check: must be True or False \(got 0\)"),
    ("append_kv4", {"v": array((M, HEADS, D), np.uint16)}, r"v: dtype float16 \(got uint16\)"),
    ("append_kv4", {"slots": array((M + 1,), S32)}, r"slots: shape \[5\] \(got \[6\]\)"),
    ("append_kv4", {"slots": elsewhere((M,), S32)}, r"slots: on the current device 0 \(got device 1\)"),
    ("append_kv4", {"rope": (array((2, D // 2), F32),) * 2}, r"rope cos: must have 5 rows or more"),
    ("append_kv4", {"check": 0}, r"check: must be True or False \(got 0\)"),
    ("append_kv4", {"programmatic": 1.0}, r"programmatic: must be True or False \(got 1.0\)"),
    ("quantize_activations", {"x": array((M, K), np.float64)}, r"x: dtype float16 or .* \(got float64\)"),
    ("quantize_activations", {"x": array((M, K + 32))}, r"out: must have M=5, K=288"),
    ("quantize_activations", {"x": make_misaligned((M, K), F16)}, r"x: aligned to 16 bytes on the GPU"),
    ("quantize_activations", {"rows": True}, r"rows: row_major has 1 \(got True\)"),
    ("quantize_activations", {"rows": 1.0}, r"rows: row_major has 1 \(got 1.0\)"),
    ("quantize_activations", {"layout": "tiles", "rows": 8}, r"out: must have M=5, K=256, layout=tiles, rows=8"),
]
ALIKE = {"window": 1, "rows": 1}  # what is equal to a change, and right


@pytest.mark.parametrize(("name", "change", "message"), CHANGES, ids=[f"{n}-{next(iter(c))}" for n, c, _ in CHANGES])
def test_a_repeat_call_is_refused_what_a_first_one_is(
    calls: Calls, fake: FakeGpu, name: str, change: dict[str, Any], message: str
) -> None:
    """It is refused twice, since a refusal is not remembered either."""
    call, arguments = calls[name]
    call(**arguments)
    call(**{**arguments, **{option: ALIKE[option] for option in change if option in ALIKE and len(change) == 1}})
    launched = len(fake.launched)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message):
            call(**{**arguments, **change})
    assert len(fake.launched) == launched
    call(**arguments)
    assert len(fake.launched) == launched + 1


def test_one_weight_that_lies_badly_lets_nothing_else_through(calls: Calls) -> None:
    """The buffers of a weight need no alignment; activations do, whatever the weight of the call before."""
    call, arguments = calls["gemm_w4a8_grouped"]
    weights = arguments["weights"]
    scale = weights.buffers["channel_scale"]
    misplaced = copy.copy(weights)
    object.__setattr__(misplaced, "buffers", {**weights.buffers, "channel_scale": make_misaligned(scale.shape, F32)})
    call(**{**arguments, "weights": misplaced})
    with pytest.raises(ArgumentError, match=r"x_scale: aligned to 16 bytes"):
        call(**{**arguments, "x_scale": make_misaligned((M,), F32)})


@pytest.mark.parametrize("name", ["gemm_w4a8", "attention_kv4", "quantize_activations"])
def test_a_repeat_call_in_a_capture_is_told_what_lacks(calls: Calls, fake: FakeGpu, name: str) -> None:
    """Though it ran before: outside of a capture it could allocate."""
    call, arguments = calls[name]
    arguments = {**arguments, "out": None}
    call(**arguments)
    fake.capturing, allocations = True, fake.allocations
    with pytest.raises(ArgumentError, match=rf"{name}: (out|workspace): must be given in a capture: "):
        call(**arguments)
    assert fake.allocations == allocations


@pytest.mark.parametrize("name", NAMES)
def test_calls_with_and_without_out_share_a_kernel(calls: Calls, fake: FakeGpu, name: str) -> None:
    call, arguments = calls[name]
    call(**arguments)
    loads = fake.loads
    call(**{**arguments, "out": None} if "out" in arguments else arguments)
    assert fake.loads == loads


def test_a_call_keeps_no_array_alive(calls: Calls, fake: FakeGpu) -> None:
    for name, (call, arguments) in calls.items():
        first_name = next(iter(arguments))
        ours = DeviceArray(arguments[first_name].host.copy())
        call(**{**arguments, first_name: ours})
        gone = weakref.ref(ours)
        fake._memory.clear()
        del ours
        if gone() is not None:  # until the cycles that it may be in are looked for, which takes a second
            gc.collect()
        assert gone() is None, name


@pytest.mark.full
def test_memory_of_streams_is_given_back_and_made_again(fake: FakeGpu) -> None:
    """Two streams, two calls that need some: after the release the next call makes its own, and results are right."""
    x, scale, weight = (on_device(a) for a in (gemm_calls.X, gemm_calls.X_SCALE, gemm_calls.WEIGHTS["qoq_channel"]))
    q, cache = attention_calls.to_device_array(attention_calls.Q), attention_calls.on_device(attention_calls.CACHE)
    assert ptxlab.release_memory() == 0
    for fake.stream in (7, 8):
        ptxlab.gemm_w4a8(x, scale, weight)
    per_stream = ptxlab.release_memory()
    assert per_stream == 2 * 4 * gemm_calls.M
    ptxlab.attention_kv4(q, cache)
    assert ptxlab.release_memory() == ptxlab.attention_workspace(cache).nbytes
    assert ptxlab.release_memory() == 0
    for _ in range(2):
        out, loads = ptxlab.gemm_w4a8(x, scale, weight), fake.loads
        assert np.array_equal(out.host, gemm_calls.expected_product("qoq_channel"))
        attention_calls.assert_within_bound(
            attention_calls.Q, attention_calls.CACHE, ptxlab.attention_kv4(q, cache).host
        )
        assert ptxlab.release_memory() > 0 and fake.loads == loads  # kernels stay


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_80") is not None, reason="the kernels run from sm_80 on")
def test_memory_on_a_gpu_goes_back_to_the_pool(cupy: Any) -> None:
    x, scale = cupy.asarray(gemm_calls.X), cupy.asarray(gemm_calls.X_SCALE)
    weight, out = ptxlab.to_device(gemm_calls.WEIGHTS["qoq_channel"]), cupy.zeros((M, N), np.float16)
    ptxlab.release_memory()
    cupy.cuda.Device().synchronize()
    pool, stream = cupy.get_default_memory_pool(), cupy.cuda.Stream(non_blocking=True)
    used = pool.used_bytes()
    for _ in range(2):
        out.fill(0)
        cupy.cuda.Device().synchronize()
        with stream:
            ptxlab.gemm_w4a8(x, scale, weight, out=out)
        assert pool.used_bytes() > used and ptxlab.release_memory() == 4 * M and pool.used_bytes() == used
        stream.synchronize()
        assert np.array_equal(out.get(), gemm_calls.expected_product("qoq_channel"))


@pytest.mark.smoke
def test_a_workspace_is_its_owners(fake: FakeGpu) -> None:
    q, cache = attention_calls.to_device_array(attention_calls.Q), attention_calls.on_device(attention_calls.CACHE)
    workspace = ptxlab.attention_workspace(cache)
    ptxlab.attention_kv4(q, cache, workspace=workspace)
    assert ptxlab.release_memory() == 0 and workspace.nbytes > 0


def test_a_launch_that_fails_is_not_remembered(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    call, arguments = calls["gemm_w4a8"]

    def refuse(*_: Any) -> None:
        raise LaunchError("the driver refused the launch")

    with monkeypatch.context() as broken:
        broken.setattr("ptxlab.runtime.plan.Plan.__call__", refuse)
        with pytest.raises(LaunchError):
            call(**arguments)
    assert len(operation._ready) == 1  # the fixture's own
    call(**arguments)
    assert len(operation._ready) == 2


def test_attention_imports_nothing_of_a_gemm() -> None:
    modules = sorted((Path(PACKAGE) / "lowbit" / "kernels" / "attention").rglob("*.py"))
    assert modules and [str(path) for path in modules if "kernels.gemm" in path.read_text()] == []
