"""`append_kv4` without a GPU, on host arrays and on a GPU that isn't one; and on a GPU, in CUDA graphs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels.attention.append import APPEND
from ptxlab.lowbit.layout import KVCache
from tests.support.append_problems import ON_GPU, Problem
from tests.support.attention_calls import copy_with, on_device, to_device_array
from tests.support.fake_gpu import DeviceArray, FakeGpu

T, H, D, PAGE = 6, 2, 64, 16
RNG = np.random.default_rng(0)
K, V = RNG.standard_normal((2, T, H, D)).astype(np.float16)
SLOTS = np.array([3, -1, 40, 16, 47, 0], np.int32)
COS, SIN = RNG.uniform(-1, 1, (2, 30, D // 2)).astype(np.float32)
POSITIONS = np.array([29, 99, 0, 3, 3, 7], np.int32)  # of padding any
ROPE = COS, SIN, POSITIONS
CHANNEL = quant.calibrate_kv(V, "kv4_channel")
WILD = RNG.integers(0, 256, (3, 2, H, PAGE * (D // 2 + 4)), dtype=np.uint8)


def new_cache(scheme: str = "kv4") -> KVCache:
    channel = CHANNEL if scheme == "kv4_channel" else None
    cache = KVCache.empty(1, 3, H, D, page_size=PAGE, scheme=scheme, k_channel=channel, v_channel=channel)
    cache.pool[...] = WILD[..., : cache.pool.shape[-1]]
    return cache


def expected_pool(rope: Any = None, slots: np.ndarray = SLOTS, scheme: str = "kv4") -> np.ndarray:
    return Problem(K, V, new_cache(scheme), slots, rope).expected_pool


def view_with_pitch(x: np.ndarray, pitch: int) -> np.ndarray:
    """View rows that lie `pitch` elements apart, with NaN between them."""
    rows = np.full((len(x), pitch), np.nan, x.dtype)
    rows[:, : x[0].size] = x.reshape(len(x), -1)
    return np.lib.stride_tricks.as_strided(rows, x.shape, (rows.strides[0], *x.strides[1:]))


def call(cache: KVCache, slots: Any = SLOTS, rope: Any = None, **options: Any) -> None:
    """Call `append_kv4` on device arrays."""
    rope = rope and tuple(map(to_device_array, rope))
    slots = slots if isinstance(slots, DeviceArray) else to_device_array(slots)
    ptxlab.append_kv4(to_device_array(K), to_device_array(V), cache, slots, rope=rope, **options)


@pytest.mark.default_cases("None-int32-kv4")
@pytest.mark.parametrize("scheme", ["kv4", "kv4_channel"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("rope", [None, ROPE])
def test_on_the_host_and_on_the_device(fake: FakeGpu, rope: Any, index: Any, scheme: str) -> None:
    slots, rope = SLOTS.astype(index), rope and (*rope[:2], rope[2].astype(index))
    cache = new_cache(scheme)
    assert ptxlab.append_kv4(K, V, cache, slots, rope=rope, backend="emulator") is None
    assert np.array_equal(cache.pool, expected_pool(rope, scheme=scheme))
    cache = on_device(new_cache(scheme))
    call(cache, slots, rope)
    assert np.array_equal(cache.pool.host, expected_pool(rope, scheme=scheme))
    assert fake.launched == [(APPEND.name, 7)] and fake.allocations == 0


@pytest.mark.parametrize("view", ["a QKV projection's", "of any pitch"])
def test_tokens_may_lie_apart(fake: FakeGpu, view: str) -> None:
    k, v = view_with_pitch(K, 136), view_with_pitch(V, 512)
    if view != "of any pitch":
        qkv = np.concatenate([K, K, V], axis=1)
        k, v = qkv[:, 2:4], qkv[:, 4:]
    assert not k.flags.c_contiguous
    cache = new_cache()
    ptxlab.append_kv4(k, v, cache, SLOTS, rope=ROPE, backend="emulator")
    assert np.array_equal(cache.pool, expected_pool(ROPE))
    device = on_device(new_cache())
    rope = tuple(map(to_device_array, ROPE))
    for _ in range(2):
        device.pool.host[...] = WILD
        ptxlab.append_kv4(
            DeviceArray(k, has_gaps=True), DeviceArray(v, has_gaps=True), device, to_device_array(SLOTS), rope=rope
        )
        assert np.array_equal(device.pool.host, expected_pool(ROPE))
    call(device, SLOTS, ROPE)  # not with the plan of those
    assert np.array_equal(device.pool.host, expected_pool(ROPE)) and fake.loads == 2 and fake.allocations == 0


@ON_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_views_of_a_projection_on_a_gpu(library: str) -> None:
    package = pytest.importorskip(library)
    qkv = np.concatenate([K, K, V], axis=1)
    rows = package.asarray(qkv) if library == "cupy" else package.from_numpy(qkv).cuda()
    for k, v in ((rows[:, 2:4], rows[:, 4:]), (rows[:, :2], rows[:, 4:])):
        cache = ptxlab.to_device(new_cache())
        ptxlab.append_kv4(k, v, cache, gpu.to_device(SLOTS), rope=tuple(map(gpu.to_device, ROPE)))
        assert np.array_equal(gpu.to_host(cache.pool), expected_pool(ROPE))


def test_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    cache = KVCache.empty(1, 3, H, D, page_size=PAGE)
    pool = torch.from_numpy(WILD.copy())
    k, v = (torch.from_numpy(x).bfloat16() for x in (K, V))
    ptxlab.append_kv4(k, v, replace(cache, pool=pool), torch.from_numpy(SLOTS.astype(np.int64)), backend="emulator")
    assert np.array_equal(pool.numpy(), Problem(k.float().numpy(), v.float().numpy(), new_cache(), SLOTS).expected_pool)


def test_other_slots_need_no_other_kernel(fake: FakeGpu) -> None:
    cache, slots = on_device(new_cache()), to_device_array(SLOTS.copy())
    rope = COS, SIN, np.minimum(POSITIONS, 29)  # no token will be padding
    call(cache, slots, rope)
    fake.capturing = True
    for seed in range(3):
        slots.host[:] = np.random.default_rng(seed).permutation(48)[:T]
        cache.pool.host[...] = WILD
        call(cache, slots, rope)
        assert np.array_equal(cache.pool.host, expected_pool(rope, slots.host))
    assert fake.loads == 1


def test_a_programmatic_call_has_a_plan_of_its_own(fake: FakeGpu) -> None:
    for programmatic in (False, True, False, True):
        cache = on_device(new_cache())
        call(cache, programmatic=programmatic)
        assert np.array_equal(cache.pool.host, expected_pool())
    assert [geometry.programmatic for geometry in fake.geometries] == [False, True, False, True] and fake.loads == 2


def test_no_tokens_launch_nothing(fake: FakeGpu) -> None:
    cache = new_cache()
    ptxlab.append_kv4(K[:0], V[:0], cache, SLOTS[:0], rope=(COS[:0], SIN[:0]), backend="emulator")
    cache = on_device(cache)
    ptxlab.append_kv4(to_device_array(K[:0]), to_device_array(V[:0]), cache, to_device_array(SLOTS[:0]))
    assert np.array_equal(cache.pool.host, WILD) and fake.launched == []


def test_a_capture_is_told_what_to_do_before_it(fake: FakeGpu) -> None:
    cache, fake.capturing = on_device(new_cache()), True
    with pytest.raises(ArgumentError, match=r"append_kv4: the first call of a shape loads its kernel.*\(got T=6, H=2,"):
        call(cache)
    with pytest.raises(ArgumentError, match=r"append_kv4: check: must be False in a capture, .*\(got True\)"):
        call(cache, check=True)
    assert fake.launched == [] and fake.loads == 0


def test_another_gpu_is_told_what_the_kernel_runs_on(fake: FakeGpu) -> None:
    fake.arch = 75
    with pytest.raises(UnavailableError, match=r"append_kv4: it runs on sm_80, and this is sm_75; pass backend="):
        call(on_device(new_cache()))


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"slots": copy_with(SLOTS, 4, 48)}, r"slots: must be below 48, the pages' tokens \(got slots\[4\] = 48\)"),
    ({"slots": copy_with(SLOTS, 5, 40)}, r"slots: must be distinct \(got slots\[5\] = 40\)"),
    ({"rope": (COS, SIN, copy_with(POSITIONS, 2, 30))}, r"positions: must lie in 0..29 \(got positions\[2\] = 30\)"),
    ({"rope": (COS, SIN, copy_with(POSITIONS, 3, -1))}, r"positions: must lie in 0..29 \(got positions\[3\] = -1\)"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *PLACES,
    ({"cache": WILD}, r"append_kv4: cache: must be a KVCache \(got ndarray\)"),
    ({"k": K[:, 0]}, r"append_kv4: k: must be \[T, 2, 64\] for this cache \(got shape \[6, 64\]\)"),
    ({"k": K[:, :1]}, r"append_kv4: k: must be \[T, 2, 64\] for this cache \(got shape \[6, 1, 64\]\)"),
    ({"k": K.astype(np.float32)}, r"append_kv4: k: dtype float16 or bfloat16 \(got float32\)"),
    ({"v": V.view(np.uint16)}, r"append_kv4: v: dtype float16 \(got uint16\)"),
    ({"v": V[:5]}, r"append_kv4: v: shape \[6, 2, 64\] \(got \[5, 2, 64\]\)"),
    (
        {"v": V[::-1]},
        r"append_kv4: v: rows of 128 elements must lie 128 or more apart, .* \(got -128",
    ),
    (
        {"v": np.broadcast_to(V[:1], V.shape)},
        r"append_kv4: v: rows of 128 elements must .* \(got 0 elements\)",
    ),
    (
        {"k": view_with_pitch(K, 129)},
        r"append_kv4: k: rows of 128 .* a multiple of 16 bytes \(got 129 elements\)",
    ),
    (
        {"k": K.swapaxes(1, 2).copy().swapaxes(1, 2)},
        r"append_kv4: k: C-contiguous but for gaps .* \(got strides",
    ),
    ({"slots": SLOTS.astype(np.int16)}, r"append_kv4: slots: dtype int32 or int64 \(got int16\)"),
    ({"slots": SLOTS[:5]}, r"append_kv4: slots: shape \[6\] \(got \[5\]\)"),
    ({"rope": COS}, r"append_kv4: rope: must be \(cos, sin\) or \(cos, sin, positions\) \(got ndarray\)"),
    ({"rope": (COS, SIN, None)}, r"append_kv4: rope positions: must be an array \(got None\)"),
    ({"rope": (COS[:4], SIN[:4])}, r"append_kv4: rope cos: must have 6 rows or more, one for each token \(got 4\)"),
    ({"rope": (COS, SIN[:4])}, r"append_kv4: rope sin: shape \[30, 32\] \(got \[4, 32\]\)"),
    ({"rope": (COS[:, :8], SIN)}, r"append_kv4: rope cos: shape \[30, 32\] \(got \[30, 8\]\)"),
    ({"rope": (COS, SIN, POSITIONS.astype(np.int64))}, r"append_kv4: rope positions: dtype int32 \(got int64\)"),
    ({"k": copy_with(K, (2, 1, 5), np.nan)}, r"append_kv4: k: must be finite in float32 \(got k\[2, 1, 5\] is nan\)"),
    ({"v": copy_with(V, (0, 0, 9), np.inf)}, r"append_kv4: v: must be finite in float32 \(got v\[0, 0, 9\] is inf\)"),
    ({"check": 1}, r"append_kv4: check: must be True or False \(got 1\)"),
    ({"programmatic": 1}, r"append_kv4: programmatic: must be True or False \(got 1\)"),
    ({"backend": "tpu"}, r"backend: one of gpu, emulator \(got tpu\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_bad_input_is_refused_by_name_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    cache = new_cache()
    arguments = {"k": K, "v": V, "cache": cache, "slots": SLOTS, "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.append_kv4(**arguments)
    assert "\n" not in str(raised.value) and np.array_equal(cache.pool, WILD)


@pytest.mark.parametrize(("change", "message"), PLACES)
def test_places_on_a_device_are_looked_at_if_asked_for(fake: FakeGpu, change: dict[str, Any], message: str) -> None:
    cache = on_device(new_cache())
    with pytest.raises(ArgumentError, match=message):
        call(cache, **change, check=True)
    assert fake.launched == []
    call(cache, SLOTS, ROPE, check=True)
    assert np.array_equal(cache.pool.host, expected_pool(ROPE))


def test_arrays_in_different_places_are_refused(fake: FakeGpu) -> None:
    with pytest.raises(ArgumentError, match=r"append_kv4: cache.pool: must be on the host, as the other arrays are"):
        ptxlab.append_kv4(K, V, on_device(new_cache()), SLOTS, backend="emulator")
    with pytest.raises(ArgumentError, match=r"append_kv4: slots: on the current device 0 \(got device 1\)"):
        call(on_device(new_cache()), DeviceArray(SLOTS, device=1))
    with pytest.raises(ArgumentError, match=r"backend: arrays on the CPU \(NumPy\) for the emulator"):
        call(on_device(new_cache()), backend="emulator")
    assert fake.launched == []


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("scheme", ["kv4", "kv4_channel"])
def test_every_library(library: str, scheme: str) -> None:
    module = pytest.importorskip(library)
    to = module.asarray if library == "cupy" else lambda array: module.from_numpy(array.copy()).cuda()
    host = new_cache(scheme)
    channel = None if host.k_channel is None else tuple(map(to, host.k_channel))
    arrays = {name: to(getattr(host, name)) for name in ("pool", "block_table", "lengths")}
    cache = replace(host, **arrays, k_channel=channel, v_channel=channel)
    ptxlab.append_kv4(to(K), to(V), cache, to(SLOTS), rope=tuple(map(to, ROPE)), check=True)
    assert np.array_equal(gpu.to_host(gpu.as_array("pool", cache.pool)), expected_pool(ROPE, scheme=scheme))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("programmatic", [False, True])
def test_a_graph_is_replayed_on_other_slots(cupy: Any, programmatic: bool) -> None:
    """The kernel before it in the graph writes the slots, for which a programmatic launch has to wait."""
    k, v, source, slots = map(cupy.asarray, (K, V, SLOTS, SLOTS))
    cache = KVCache.empty(1, 3, H, D, page_size=PAGE, like=k)

    def layer() -> None:
        cupy.multiply(source, 1, out=slots)
        ptxlab.append_kv4(k, v, cache, slots, programmatic=programmatic)

    layer()
    graph = gpu.capture([layer])
    for seed in range(20):
        chosen = np.random.default_rng(seed).permutation(48)[:T].astype(np.int32)
        source[...] = cupy.asarray(chosen)
        cache.pool[...] = cupy.asarray(WILD)
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        assert np.array_equal(cache.pool.get(), expected_pool(slots=chosen))
