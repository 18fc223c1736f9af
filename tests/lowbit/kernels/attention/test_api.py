"""`attention_kv4` without a GPU: on host arrays in the emulator, and on a GPU that isn't one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.attention import ladder, sm90, steps
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.steps import choose
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.spec.dtypes import convert_to_dtype, numbers
from ptxlab.spec.tolerance import describe_mismatch
from tests.support import attention_problems as problems
from tests.support.attention_calls import (
    CACHE,
    CONTRACT,
    LENGTHS,
    SM80,
    SM90,
    TEACHING,
    Q,
    assert_within_bound,
    copy_with,
    on_device,
    to_device_array,
)
from tests.support.attention_problems import map_arrays
from tests.support.fake_gpu import FakeGpu


@pytest.mark.full
@pytest.mark.parametrize("kernel", [SM90, SM80])
@pytest.mark.parametrize("case", CONTRACT, ids=lambda c: "-".join(map(str, c.values())))
def test_the_whole_contract_on_the_host_and_on_the_device(fake: FakeGpu, case: dict[str, Any], kernel: str) -> None:
    window, dtype = case["window"], case["dtype"]
    sizes = {name: size for name, size in case.items() if name not in ("window", "dtype")}
    q, cache = problems.problem(1, LENGTHS, **sizes)
    q = convert_to_dtype(q, dtype)
    options: dict[str, Any] = {"window": window or None, "return_lse": True, "kernel": kernel}
    out, lse = ptxlab.attention_kv4(q, cache, backend="emulator", **options)
    assert_within_bound(q, cache, out, lse, window=window)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    out, lse = ptxlab.attention_kv4(to_device_array(q), on_device(cache), **options)
    assert_within_bound(q, cache, out.host, lse.host, window=window)
    assert fake.launched == [(kernel, 7)]


@pytest.mark.default_cases("attention_kv8")
@pytest.mark.parametrize("kernel", TEACHING)
def test_every_teaching_step_by_name(fake: FakeGpu, kernel: str) -> None:
    q, cache = problems.problem(2, (70, 0, 1), Hq=4, Hkv=2, scheme="kv8" if kernel == "attention_kv8" else "kv4")
    q = q.astype(np.float16)
    spec = next(spec for spec in ladder.SPECS if spec.name == kernel)
    logical = {"q": q[:, 0], "cache": cache, "softmax_scale": 128**-0.5}
    expected, allowed = spec.expected(logical), spec.allowed(logical)
    for queries in (q, q[:, 0]):
        got = ptxlab.attention_kv4(queries, cache, kernel=kernel, backend="emulator")
        assert got.shape == queries.shape
        assert describe_mismatch({"out": got.reshape(expected["out"].shape)}, expected, allowed) is None
    workspace = ptxlab.attention_workspace(on_device(cache), kernel=kernel)
    assert workspace.nbytes == 0 and fake.allocations == 0
    out = ptxlab.attention_kv4(to_device_array(q), on_device(cache), kernel=kernel, workspace=workspace)
    assert np.array_equal(out.host[:, 0], got) and fake.launched == [(kernel, 7)]


def forget() -> None:
    """Clear the caches of prepared calls, as if the device were another one."""
    operation._prepared.clear()
    operation._ready.clear()


@pytest.mark.full
def test_which_kernel_is_taken(fake: FakeGpu) -> None:
    assert steps.choose(AttentionOptions(backend="emulator")).spec.name == SM90
    q, cache = to_device_array(Q), on_device(CACHE)
    ptxlab.attention_kv4(q, cache)
    forget()
    fake.arch = 80
    ptxlab.attention_kv4(q, cache)
    assert fake.launched == [(SM90, 7), (SM80, 7)]
    forget()
    with pytest.raises(
        UnavailableError, match=r"attention_kv4_sm90: it runs on sm_90a, and .*; here run attention_kv8"
    ):
        ptxlab.attention_kv4(q, cache, kernel=SM90)
    fake.arch = 75
    with pytest.raises(UnavailableError, match=r"attention_kv4_sm90: it runs on .* sm_75; pass backend=\"emulator\""):
        ptxlab.attention_kv4(q, cache)
    assert_within_bound(Q, CACHE, ptxlab.attention_kv4(Q, CACHE, backend="emulator"))


@pytest.mark.full
def test_one_query_needs_no_axis(fake: FakeGpu) -> None:
    out, lse = ptxlab.attention_kv4(Q, CACHE, return_lse=True, backend="emulator")
    flat, flat_lse = ptxlab.attention_kv4(Q[:, 0], CACHE, return_lse=True, backend="emulator")
    assert np.array_equal(flat, out[:, 0]) and np.array_equal(flat_lse, lse[:, 0])
    flat, flat_lse = ptxlab.attention_kv4(to_device_array(Q[:, 0]), on_device(CACHE), return_lse=True)
    assert flat.shape == (4, 4, 128) and flat_lse.shape == (4, 4)
    assert_within_bound(Q, CACHE, flat.host[:, None], flat_lse.host[:, None])


@pytest.mark.full
def test_scale_and_windows_wider_than_the_cache() -> None:
    out = ptxlab.attention_kv4(Q, CACHE, scale=0.5, backend="emulator")
    assert_within_bound(Q, CACHE, out, scale=0.5)
    assert not np.array_equal(out, ptxlab.attention_kv4(Q, CACHE, backend="emulator"))
    for window in (CACHE.max_pages * 32, 2**31, np.int64(2**40)):
        assert np.array_equal(ptxlab.attention_kv4(Q, CACHE, scale=0.5, window=window, backend="emulator"), out)


@pytest.mark.full
@pytest.mark.parametrize("on_host", [True, False])
def test_results_are_written_where_they_are_wanted(fake: FakeGpu, on_host: bool) -> None:
    to, cache = (np.array, CACHE) if on_host else (to_device_array, on_device(CACHE))
    backend = "emulator" if on_host else None
    expected_out, expected_lse = ptxlab.attention_kv4(to(Q), cache, return_lse=True, backend=backend)
    out, lse = to(np.zeros_like(Q)), to(np.zeros(Q.shape[:-1], np.float32))
    assert ptxlab.attention_kv4(to(Q), cache, out=out, backend=backend) is out
    both = ptxlab.attention_kv4(to(Q), cache, out=(out, lse), return_lse=True, backend=backend)
    assert both[0] is out and both[1] is lse
    lse_allocated = ptxlab.attention_kv4(to(Q), cache, out=out, return_lse=True, backend=backend)
    assert lse_allocated[0] is out and lse_allocated[1] is not lse
    for got, expected in ((out, expected_out), (lse, expected_lse), (lse_allocated[1], expected_lse)):
        assert np.array_equal(getattr(got, "host", got), getattr(expected, "host", expected))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_on_the_cpu(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(Q.astype(np.float32)).to(getattr(torch, dtype))
    pool, table, lengths = map(torch.from_numpy, (CACHE.pool, CACHE.block_table, CACHE.lengths))
    cache = replace(CACHE, pool=pool, block_table=table, lengths=lengths)
    out, lse = ptxlab.attention_kv4(q, cache, return_lse=True, backend="emulator")
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    on_numpy = ptxlab.attention_kv4(
        convert_to_dtype(q.float().numpy(), dtype), CACHE, return_lse=True, backend="emulator"
    )
    assert np.array_equal(out.float().numpy(), numbers(on_numpy[0], dtype)) and np.array_equal(lse.numpy(), on_numpy[1])


def test_no_sequences_launch_nothing(fake: FakeGpu) -> None:
    empty = replace(CACHE, block_table=CACHE.block_table[:0], lengths=CACHE.lengths[:0])
    out, lse = ptxlab.attention_kv4(Q[:0], empty, return_lse=True, backend="emulator")
    assert (out.shape, out.dtype, lse.shape) == ((0, 1, 4, 128), np.float16, (0, 1, 4))
    out, lse = ptxlab.attention_kv4(to_device_array(Q[:0]), on_device(empty), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 1, 4, 128), (0, 1, 4)) and fake.launched == [] and fake.loads == 0


@pytest.mark.full
def test_a_programmatic_call_has_a_plan_of_its_own(fake: FakeGpu) -> None:
    q, cache = to_device_array(Q), on_device(CACHE)
    for programmatic in (False, True, False, True):
        assert_within_bound(Q, CACHE, ptxlab.attention_kv4(q, cache, programmatic=programmatic).host)
    assert [geometry.programmatic for geometry in fake.geometries] == [False, True, False, True] and fake.loads == 2
    for kernel in (SM80, TEACHING[0]):
        with pytest.raises(ArgumentError, match=rf"programmatic: only for kernels that wait .*{SM90}\) \(got {kernel}"):
            ptxlab.attention_kv4(q, cache, kernel=kernel, programmatic=True)


@pytest.mark.full
@pytest.mark.parametrize("kernel", [SM90, SM80])
def test_a_captured_call_allocates_nothing_and_reads_what_is_there_then(fake: FakeGpu, kernel: str) -> None:
    """The kernel stays the same for other lengths and other pages.

    The zeros that every call has to find are there.
    """
    fake.sms = 5
    cache, q = on_device(CACHE), to_device_array(Q)
    out, lse = to_device_array(np.zeros_like(Q)), to_device_array(np.zeros(Q.shape[:-1], np.float32))
    workspace = ptxlab.attention_workspace(cache, kernel=kernel)
    options: dict[str, Any] = {"out": (out, lse), "return_lse": True, "workspace": workspace, "kernel": kernel}
    ptxlab.attention_kv4(q, cache, **options)
    fake.capturing, allocations = True, fake.allocations
    for lengths in ([10, 64, 1, 20], [75, 0, 0, 257], [0, 0, 0, 0]):
        new_cache = replace(CACHE, lengths=np.array(lengths, np.int32), block_table=CACHE.block_table.copy())
        new_cache.block_table[1, :2] = new_cache.block_table[3, :2]  # where the original has nothing
        cache.lengths.host[...], cache.block_table.host[...] = new_cache.lengths, new_cache.block_table
        parts = workspace.views["partial"].owner.host
        parts[...] = 0  # SM80 leaves them
        ptxlab.attention_kv4(q, cache, **options)
        assert_within_bound(Q, new_cache, out.host, lse.host)
        if kernel == SM80:
            assert parts.any() == (max(lengths) > 64)
        zero_buffers = steps.choose(AttentionOptions(kernel=kernel)).zero_buffers
        assert zero_buffers and not any(workspace.views[name].owner.host.any() for name in zero_buffers)
    assert fake.loads == 1 and fake.allocations == allocations


@pytest.mark.full
def test_a_sequence_has_the_same_bits_in_any_batch(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is alone, the last of three, or in a wider table.

    It runs on the host, and on devices of other sizes.
    """
    monkeypatch.setattr(sm90, "PART", 1)
    q, cache = problems.problem(4, (200, 0, 70, 130), Hq=4, Hkv=2, scheme="kv4")
    q = q.astype(np.float16)
    options: dict[str, Any] = {"batch_invariant": True, "return_lse": True}
    whole = ptxlab.attention_kv4(q, cache, backend="emulator", **options)
    assert_within_bound(q, cache, *whole)
    for chosen in ([3], [2, 0]):
        table = np.pad(cache.block_table[chosen], [(0, 0), (0, 40)])
        chosen_cache = replace(cache, block_table=table, lengths=cache.lengths[chosen])
        for actual, right in zip(
            ptxlab.attention_kv4(q[chosen], chosen_cache, backend="emulator", **options), whole, strict=True
        ):
            assert np.array_equal(actual, right[chosen])
    for sms in (1, 3):
        fake.sms = sms
        forget()
        for actual, right in zip(
            ptxlab.attention_kv4(to_device_array(q), on_device(cache), **options), whole, strict=True
        ):
            assert np.array_equal(actual.host, right)


@pytest.mark.full
def test_the_invariant_variant_has_a_plan_and_more_memory_of_its_own(fake: FakeGpu) -> None:
    q, cache, out = to_device_array(Q), on_device(CACHE), to_device_array(np.zeros_like(Q))
    for invariant in (False, True, False, True):
        assert_within_bound(Q, CACHE, ptxlab.attention_kv4(q, cache, batch_invariant=invariant).host)
    assert fake.loads == 2
    workspace = ptxlab.attention_workspace(cache, batch_invariant=True)
    small = ptxlab.attention_workspace(cache)
    assert workspace.nbytes == 32 * small.nbytes
    for invariant in (False, True):
        ptxlab.attention_kv4(q, cache, out=out, workspace=workspace, batch_invariant=invariant)
    with pytest.raises(ArgumentError, match=r"must be attention_workspace\(cache, batch_invariant=True\) of this"):
        ptxlab.attention_kv4(q, cache, workspace=small, batch_invariant=True)
    rule = rf"batch_invariant: only for kernels that cut a sequence by its own length \({SM90}\) \(got {SM80}\)"
    with pytest.raises(ArgumentError, match=rule):
        ptxlab.attention_kv4(q, cache, kernel=SM80, batch_invariant=True)
    with pytest.raises(ArgumentError, match=r"attention_workspace: batch_invariant: must be True or False \(got 1\)"):
        ptxlab.attention_workspace(cache, batch_invariant=1)  # type: ignore[arg-type]
    forget()
    fake.arch = 80
    with pytest.raises(UnavailableError, match=rf"{SM90}: it runs on sm_90a, .*; here run .*{SM80}"):
        ptxlab.attention_kv4(q, cache, batch_invariant=True)


@pytest.mark.long(80)
@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["kv4", "kv8_channel"])
@pytest.mark.parametrize(("Hq", "Hkv"), [(32, 32), (64, 8)])
def test_a_sequence_has_the_same_bits_in_any_batch_on_the_gpu(cupy: Any, Hq: int, Hkv: int, scheme: str) -> None:
    if SM90 not in HERE:
        pytest.skip(f"{SM90} does not run here")
    rng = np.random.default_rng(0)
    lengths = np.array([1024, 40_000, 1, 5000, 0, 2048, 1025, *rng.integers(0, 3000, 60)], np.int32)
    _, small = problems.problem(5, (16384,), Hq=Hq, Hkv=Hkv, scheme=scheme)
    pages = np.flatnonzero(np.bincount(small.block_table[0, : 16384 // 64], minlength=len(small.pool)))
    tables = rng.choice(pages, (len(lengths), 40_000 // 64)).astype(np.int32)  # sequences share pages, which are read
    q = cupy.asarray(rng.standard_normal((len(lengths), 1, Hq, 128)).astype(np.float16))
    cache = map_arrays(replace(small, block_table=tables, lengths=lengths), cupy.asarray)
    options: dict[str, Any] = {"batch_invariant": True, "return_lse": True}
    whole = [array.get() for array in ptxlab.attention_kv4(q, cache, **options)]
    for chosen in ([0], [1], [3], [6, 0], [5, 1, 2, 4], rng.permutation(len(lengths))[:33].tolist()):
        chosen_cache = replace(cache, block_table=cache.block_table[chosen], lengths=cache.lengths[chosen])
        for _ in range(3):
            for actual, right in zip(ptxlab.attention_kv4(q[chosen], chosen_cache, **options), whole, strict=True):
                assert np.array_equal(actual.get(), right[chosen])


@pytest.mark.full
def test_calls_on_a_stream_share_their_memory(fake: FakeGpu) -> None:
    cache, q, out = on_device(CACHE), to_device_array(Q), to_device_array(np.zeros_like(Q))
    for _ in range(3):
        ptxlab.attention_kv4(q, cache, out=out)
    assert fake.allocations == 2 and fake.loads == 1  # partial, stats
    fake.stream = 8
    ptxlab.attention_kv4(q, cache, out=out)
    assert fake.allocations == 4 and fake.launched == [(SM90, 7)] * 3 + [(SM90, 8)]
    assert_within_bound(Q, CACHE, out.host)


def test_a_workspace_does_for_any_queries() -> None:
    """It suffices for any choice of blocks and columns."""
    for step in (*steps.STEPS[-2:], *steps.INVARIANT_STEPS):
        for D in (64, 128, 256):
            capacity = {buffer.name: buffer.nbytes for buffer in step.max_memory(D, 132)}
            for bits, B, T, ratio, tokens in np.ndindex(2, 3, 3, 3, 3):
                sizes = {"D": D, "bits": 4 << bits, "B": 4**B * 8, "T": (1, 3, 8)[T], "Hkv": 8, "P": 8**tokens}
                sizes |= {"Hq": (8, 40, 128)[ratio], "page": 64, "pages": 1, "channel": 0, "window": 0}
                assert step.blocks is not None
                sizes["blocks"] = step.blocks(sizes, 132)
                needed = {buffer.name: buffer.nbytes for buffer in step.memory(sizes)}
                assert needed.keys() == capacity.keys() and all(needed[name] <= capacity[name] for name in capacity)


def test_what_a_workspace_must_be(fake: FakeGpu) -> None:
    q, cache = to_device_array(Q), on_device(CACHE)
    with pytest.raises(ArgumentError, match=r"attention_workspace: cache: must be a KVCache \(got ndarray\)"):
        ptxlab.attention_workspace(Q)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"attention_kv4: workspace: must come from attention_workspace \(got dict"):
        ptxlab.attention_kv4(q, cache, workspace={})  # type: ignore[arg-type]
    narrow = ptxlab.attention_workspace(KVCache.empty(1, 1, 1, 64))
    message = r"attention_kv4: workspace: must be attention_workspace\(cache\) of .* \(got \d+ bytes for partial\)"
    with pytest.raises(ArgumentError, match=message):
        ptxlab.attention_kv4(q, cache, workspace=narrow)
    for kernel, workspace_kernel, maker in ((None, SM80, "cache"), (SM80, SM90, f"cache, kernel='{SM80}'")):
        workspace = ptxlab.attention_workspace(cache, kernel=workspace_kernel)
        message = rf"workspace: must be attention_workspace\({maker}\) \(got that of {workspace_kernel}\)"
        with pytest.raises(ArgumentError, match=message):
            ptxlab.attention_kv4(q, cache, workspace=workspace, kernel=kernel)
    elsewhere = ptxlab.attention_workspace(cache)
    elsewhere.views["stats"] = elsewhere.views["stats"]._replace(device=1)
    with pytest.raises(ArgumentError, match=r"workspace: on the current device 0 \(got device 1\)"):
        ptxlab.attention_kv4(q, cache, workspace=elsewhere)
    assert fake.launched == []


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("own_workspace", [True, False])
def test_a_call_that_fails_leaves_nothing_behind(
    fake: FakeGpu, own_workspace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, cache = to_device_array(Q), on_device(CACHE)
    workspace = ptxlab.attention_workspace(cache) if own_workspace else None
    ptxlab.attention_kv4(q, cache, workspace=workspace)
    wild = on_device(CACHE)
    wild.block_table.host[...] = 2**30
    with pytest.raises(ptxlab.errors.EmulationError):
        ptxlab.attention_kv4(q, wild, workspace=workspace)
    if own_workspace:
        with pytest.raises(ArgumentError, match=r"workspace: must be .* used by no call that failed \(got 0 bytes for"):
            ptxlab.attention_kv4(q, cache, workspace=workspace)
    else:
        assert_within_bound(Q, CACHE, ptxlab.attention_kv4(q, cache).host)


def test_what_a_call_has_left_is_found_if_asked_for(fake: FakeGpu) -> None:
    q, cache = to_device_array(Q), on_device(CACHE)
    workspace = ptxlab.attention_workspace(cache)
    assert_within_bound(Q, CACHE, ptxlab.attention_kv4(q, cache, workspace=workspace, check=True).host)
    workspace.views["stats"].owner.host[0, 0, 1] = 1
    message = r"workspace: must be all zeros between calls: .* \(got 1 words that are not\)"
    with pytest.raises(ArgumentError, match=message):
        ptxlab.attention_kv4(q, cache, workspace=workspace, check=True)
    with pytest.raises(ArgumentError, match=r"workspace: must be .* \(got 0 bytes for partial\)"):
        ptxlab.attention_kv4(q, cache, workspace=workspace)


def test_an_error_in_a_capture_says_what_to_prepare_before_it(fake: FakeGpu) -> None:
    q, cache, out = to_device_array(Q), on_device(CACHE), to_device_array(np.zeros_like(Q))
    workspace, fake.capturing = ptxlab.attention_workspace(cache), True
    for options, message in (
        ({"out": out}, r"workspace: must be given in a capture: make attention_workspace\(cache\) before"),
        ({"workspace": workspace}, r"out: must be given in a capture: make an array \[4, 1, 4, 128\] of float16"),
        (
            {"out": out, "workspace": workspace, "return_lse": True},
            r"out: must be \(out, lse\) in a capture: make an array \[4, 1, 4\] of float32 before \(got one array\)",
        ),
        ({"out": out, "workspace": workspace}, r"the first call of a shape loads its kernel.*\(got B=4, T=1, Hq=4,"),
        ({"out": out, "workspace": workspace, "check": True}, r"check: must be False in a capture, .* \(got True\)"),
    ):
        with pytest.raises(ArgumentError, match=f"attention_kv4: {message}"):
            ptxlab.attention_kv4(q, cache, **options)
    assert fake.launched == [] and fake.loads == 0


CHANNEL = problems.problem(0, (3, 0, 1, 2), Hq=4, Hkv=2, scheme="kv4_channel", page_size=32)[1]
ROOM = CACHE.max_pages * 32
VALUES: list[tuple[KVCache, str]] = [
    (
        replace(CACHE, lengths=copy_with(CACHE.lengths, 2, ROOM + 1)),
        rf"attention_kv4: cache.lengths: must lie in 0..{ROOM} \(got lengths\[2\] is {ROOM + 1}\)",
    ),
    (replace(CACHE, lengths=copy_with(CACHE.lengths, 0, -1)), r"cache.lengths: must .* \(got lengths\[0\] is -1\)"),
    (
        replace(CACHE, block_table=copy_with(CACHE.block_table, (3, 9), CACHE.pages)),
        rf"cache.block_table: pages in use must lie in 0..{CACHE.pages - 1} \(got block_table\[3, 9\] is {CACHE.pages}",
    ),
    (
        replace(CHANNEL, k_channel=(copy_with(CHANNEL.k_channel[0], (1, 5), np.nan), CHANNEL.k_channel[1])),
        r"attention_kv4: cache.k_channel",
    ),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"cache": cache}, message) for cache, message in VALUES),
    ({"cache": Q}, r"attention_kv4: cache: must be a KVCache \(got ndarray\)"),
    ({"q": Q[:3]}, r"attention_kv4: q: must be \[4, Hq, 128\] or \[4, T, Hq, 128\] for .* \(got shape \[3, 1, 4, 1"),
    ({"q": Q[..., :64]}, r"attention_kv4: q: must be \[4, Hq, 128\] or .* \(got shape \[4, 1, 4, 64\]\)"),
    ({"q": Q[0, 0]}, r"attention_kv4: q: must be \[4, Hq, 128\] or .* \(got shape \[4, 128\]\)"),
    ({"q": Q.astype(np.float32)}, r"attention_kv4: q: dtype float16 or bfloat16 \(got float32\)"),
    ({"q": Q.repeat(9, 1)}, r"attention_kv4: q: T must lie in 1..8 \(got T=9\)"),
    ({"q": Q[:, :0]}, r"attention_kv4: q: T must lie in 1..8 \(got T=0\)"),
    ({"q": Q[:, :, :3]}, r"attention_kv4: q: Hq must be 1 to 16 times the cache's 2 \(got Hq=3\)"),
    ({"q": Q.repeat(9, 2)}, r"attention_kv4: q: Hq must be 1 to 16 times the cache's 2 \(got Hq=36\)"),
    ({"q": Q[:, :, :0]}, r"attention_kv4: q: Hq must be 1 to 16 times the cache's 2 \(got Hq=0\)"),
    ({"q": Q[:, :, ::-1]}, r"attention_kv4: q: C-contiguous \(got strides"),
    ({"window": 0}, r"attention_kv4: window: must be an integer, 1 or more, or None \(got 0\)"),
    ({"window": 2.0}, r"attention_kv4: window: must be an integer, 1 or more, or None \(got 2.0\)"),
    ({"scale": 0.0}, r"attention_kv4: scale: must be above 0 and finite in float32 \(got 0.0\)"),
    ({"scale": np.nan}, r"attention_kv4: scale: must be above 0 and finite in float32 \(got nan\)"),
    ({"scale": 1e39}, r"attention_kv4: scale: must be above 0 and finite in float32 \(got 1e\+39\)"),
    (
        {"out": np.zeros((4, 1, 4, 64), np.float16)},
        r"attention_kv4: out: shape \[4, 1, 4, 128\] \(got \[4, 1, 4, 64\]\)",
    ),
    ({"out": np.zeros(Q.shape, np.float32)}, r"attention_kv4: out: dtype float16 \(got float32\)"),
    ({"out": (Q.copy(), Q.copy())}, r"attention_kv4: out: must be one array without return_lse \(got a tuple of 2\)"),
    ({"out": (Q.copy(),), "return_lse": True}, r"attention_kv4: out: must be \(out, lse\) \(got a tuple of 1\)"),
    (
        {"out": (Q.copy(), np.zeros((4, 4), np.float32)), "return_lse": True},
        r"attention_kv4: out lse: shape \[4, 1, 4\] \(got \[4, 4\]\)",
    ),
    ({"return_lse": 1}, r"attention_kv4: return_lse: must be True or False \(got 1\)"),
    ({"check": None}, r"attention_kv4: check: must be True or False \(got None\)"),
    ({"programmatic": 1}, r"attention_kv4: programmatic: must be True or False \(got 1\)"),
    ({"backend": "tpu"}, r"backend: one of gpu, emulator \(got tpu\)"),
    ({"kernel": "append_kv4"}, rf"attention_kv4: kernel: must be one of attention_kv8, .*, {SM90} \(got append_kv4\)"),
    ({"kernel": "attention_kv8"}, r"attention_kv4: cache: scheme must be kv8 for attention_kv8 \(got kv4\)"),
    ({"kernel": TEACHING[1]}, rf"attention_kv4: cache: page_size must be 64 for {TEACHING[1]} \(got 32\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_bad_input_is_refused_by_name_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    out = np.zeros_like(Q)
    arguments = {"q": Q, "cache": CACHE, "out": out, "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.attention_kv4(**arguments)
    assert "\n" not in str(raised.value) and not out.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5}, r"window: must be None for attention_kv4_naive \(got 5\)"),
        ({"return_lse": True}, r"return_lse: must be False for attention_kv4_naive \(got True\)"),
        ({"T": 2}, r"q: T must be 1 for attention_kv4_naive \(got 2\)"),
        ({"D": 64}, r"cache: head_dim must be 128 for attention_kv4_naive \(got 64\)"),
        ({"dtype": "bfloat16"}, r"q: dtype float16 for attention_kv4_naive \(got bfloat16\)"),
        ({"scheme": "kv4_channel"}, r"cache: scheme must be kv4 for attention_kv4_naive \(got kv4_channel\)"),
    ],
)
def test_what_is_not_a_teaching_steps_is_refused(options: dict[str, Any], message: str) -> None:
    sizes = {name: options.pop(name) for name in ("T", "D", "scheme") if name in options}
    q, cache = problems.problem(0, (70, 1), **{"Hq": 2, "Hkv": 2, "scheme": "kv4", **sizes})
    q = convert_to_dtype(q, options.pop("dtype", "float16"))
    with pytest.raises(ArgumentError, match=f"attention_kv4: {message}"):
        ptxlab.attention_kv4(q, cache, kernel="attention_kv4_naive", backend="emulator", **options)


@pytest.mark.full_cases("3")
@pytest.mark.parametrize(("cache", "message"), VALUES, ids=[str(i) for i in range(len(VALUES))])
def test_numbers_on_a_device_are_looked_at_if_asked_for(fake: FakeGpu, cache: KVCache, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ptxlab.attention_kv4(to_device_array(Q), on_device(cache), check=True)
    assert fake.launched == []


def test_arrays_in_different_places_are_refused(fake: FakeGpu) -> None:
    with pytest.raises(ArgumentError, match=r"attention_kv4: cache.pool: must be on the host, as the other arrays are"):
        ptxlab.attention_kv4(Q, on_device(CACHE), backend="emulator")
    elsewhere = on_device(CACHE)
    elsewhere.pool.device = 1
    with pytest.raises(ArgumentError, match=r"attention_kv4: cache.pool: on the current device 0 \(got device 1\)"):
        ptxlab.attention_kv4(to_device_array(Q), elsewhere)
    with pytest.raises(ArgumentError, match=r"backend: arrays on the CPU \(NumPy\) for the emulator"):
        ptxlab.attention_kv4(to_device_array(Q), on_device(CACHE), backend="emulator")
    assert fake.launched == []


ON_GPU = pytest.mark.skipif(gpu.why_not("sm_80") is not None, reason="the kernels run from sm_80 on")
HERE = [name for name in (SM90, SM80) if gpu.why_not("sm_90a" if name == SM90 else "sm_80", exact=name == SM90) is None]


def read(array: Any) -> np.ndarray:
    return gpu.to_host(gpu.as_array("array", array))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("case", CONTRACT, ids=lambda c: "-".join(map(str, c.values())))
def test_every_library(case: dict[str, Any], kernel: str, library: str) -> None:
    """Two calls give the same bits; PyTorch has a bfloat16 of its own."""
    module = pytest.importorskip(library)
    to = module.asarray if library == "cupy" else lambda array: module.from_numpy(array.copy()).cuda()
    sizes = {name: size for name, size in case.items() if name not in ("window", "dtype")}
    host, cache = problems.problem(1, (*LENGTHS, 5000), **sizes)
    host = convert_to_dtype(host, case["dtype"])
    q = to(host)
    if library == "torch" and case["dtype"] == "bfloat16":
        q = q.view(module.bfloat16)
    options: dict[str, Any] = {"window": case["window"] or None, "return_lse": True, "kernel": kernel, "check": True}
    out, lse = ptxlab.attention_kv4(q, map_arrays(cache, to), **options)
    again, _ = ptxlab.attention_kv4(q, map_arrays(cache, to), **options)
    assert out.dtype == q.dtype and type(out) is type(q)
    assert_within_bound(host, cache, read(out), read(lse), window=case["window"])
    assert np.array_equal(read(out), read(again))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize(
    ("kernel", "programmatic"),
    # The kernel for Ampere does not wait by itself.
    [*((kernel, False) for kernel in HERE), *((kernel, True) for kernel in HERE if kernel != SM80)],
)
def test_a_graph_is_replayed_on_other_lengths(kernel: str, programmatic: bool) -> None:
    """The kernel before it in the graph writes the queries, for which a programmatic launch has to wait."""
    cupy = pytest.importorskip("cupy")
    source, q, cache = cupy.asarray(Q), cupy.zeros_like(cupy.asarray(Q)), map_arrays(CACHE, cupy.asarray)
    out, lse = cupy.zeros_like(q), cupy.zeros(q.shape[:-1], cupy.float32)
    workspace = ptxlab.attention_workspace(cache, kernel=kernel)

    def layer() -> None:
        cupy.multiply(source, 1, out=q)
        options: dict[str, Any] = {"kernel": kernel, "programmatic": programmatic, "workspace": workspace}
        ptxlab.attention_kv4(q, cache, out=(out, lse), return_lse=True, **options)

    layer()
    graph = gpu.capture([layer])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = [rng.integers(0, length + 1) for length in LENGTHS]
        queries = rng.standard_normal(Q.shape).astype(np.float16)
        source[...], cache.lengths[...] = cupy.asarray(queries), cupy.asarray(lengths)
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        assert_within_bound(queries, replace(CACHE, lengths=np.array(lengths, np.int32)), out.get(), lse.get())
        assert not any(
            workspace.views[name].owner.any()
            for name in choose(AttentionOptions(kernel=kernel, backend="gpu")).zero_buffers
        )


@pytest.mark.gpu
@pytest.mark.timing
@ON_GPU
@pytest.mark.parametrize("kernel", HERE)
def test_a_call_goes_to_the_callers_stream_and_does_not_wait(cupy: Any, kernel: str) -> None:
    """Nothing is allocated after the first call; with the stream busy, the call is back before the stream is done."""
    q, cache = cupy.asarray(Q), map_arrays(CACHE, cupy.asarray)
    out, workspace = cupy.zeros_like(q), ptxlab.attention_workspace(cache, kernel=kernel)
    ptxlab.attention_kv4(q, cache, out=out, workspace=workspace, kernel=kernel)
    big = cupy.zeros(1 << 30, cupy.uint8)
    big += 1  # so that its kernel is loaded, and the next one
    cupy.negative(cupy.negative(q, out=q), out=q)
    cupy.cuda.Device().synchronize()
    pool, stream = cupy.get_default_memory_pool(), cupy.cuda.Stream(non_blocking=True)
    used_before = pool.used_bytes(), pool.total_bytes()
    with stream:
        for _ in range(20):
            big += 1
        cupy.negative(q, out=q)
        ptxlab.attention_kv4(q, cache, out=out, workspace=workspace, kernel=kernel)
        assert not stream.done
    stream.synchronize()
    assert_within_bound(-Q, CACHE, out.get())
    assert (pool.used_bytes(), pool.total_bytes()) == used_before


@pytest.mark.gpu
@ON_GPU
def test_torch_captures_and_replays() -> None:
    torch = pytest.importorskip("torch")

    def to(array: np.ndarray) -> Any:
        return torch.from_numpy(array.copy()).cuda()

    q, cache = to(Q), map_arrays(CACHE, to)
    out, workspace = torch.empty_like(q), ptxlab.attention_workspace(cache)
    ptxlab.attention_kv4(q, cache, out=out, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ptxlab.attention_kv4(q, cache, out=out, workspace=workspace)
    lengths = np.array([3, 0, 1, 290], np.int32)
    cache.lengths.copy_(to(lengths))
    graph.replay()
    torch.cuda.synchronize()
    assert_within_bound(Q, replace(CACHE, lengths=lengths), read(out))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("scheme", KV_SCHEMES)
def test_the_bound_is_worked_out_on_the_device_too(scheme: str) -> None:
    """Benchmarks do so, though CuPy lacks some of NumPy's functions."""
    q, cache = problems.problem(0, (75, 300), Hq=4, Hkv=2, scheme=scheme, page_size=32)
    q, sizes = q.astype(np.float16), {"softmax_scale": 0.1, "blocks": 1}
    assert sm90.SM90.bound is not None
    on_host = sm90.SM90.bound(q, cache, **sizes)
    on_device = sm90.SM90.bound(gpu.to_device(q), map_arrays(cache, gpu.to_device), **sizes)
    for host_bound, device_bound in zip(on_host[:2], on_device[:2], strict=True):
        np.testing.assert_allclose(read(device_bound.per_element), host_bound.per_element, rtol=1e-6)
        np.testing.assert_allclose(read(device_bound.rms), host_bound.rms, rtol=1e-6)
