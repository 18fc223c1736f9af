"""`attention_kv4` without a GPU: on host arrays in the emulator, and on a GPU that isn't one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels import operation
from ptxlab.kernels.attention import ladder, steps
from ptxlab.spec.dtypes import numbers, stored
from ptxlab.spec.tolerance import within
from tests.support import attention_problems as problems
from tests.support.attention_calls import CACHE, CONTRACT, LENGTHS, SM80, SM90, TEACHING, Q, hold, on_device, sent
from tests.support.fake_gpu import FakeGpu


@pytest.mark.parametrize("kernel", [SM90, SM80])
@pytest.mark.parametrize("case", CONTRACT, ids=lambda c: "-".join(map(str, c.values())))
def test_the_whole_contract_on_the_host_and_on_the_device(fake: FakeGpu, case: dict[str, Any], kernel: str) -> None:
    window, dtype = case["window"], case["dtype"]
    sizes = {name: size for name, size in case.items() if name not in ("window", "dtype")}
    q, cache = problems.problem(1, LENGTHS, **sizes)
    q = stored(q, dtype)
    how: dict[str, Any] = {"window": window or None, "return_lse": True, "kernel": kernel}
    out, lse = ptxlab.attention_kv4(q, cache, backend="emulator", **how)
    hold(q, cache, out, lse, window=window)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    out, lse = ptxlab.attention_kv4(sent(q), on_device(cache), **how)
    hold(q, cache, out.host, lse.host, window=window)
    assert fake.launched == [(kernel, 7)]


@pytest.mark.parametrize("kernel", TEACHING)
def test_every_teaching_step_by_name(fake: FakeGpu, kernel: str) -> None:
    q, cache = problems.problem(2, (70, 0, 1), Hq=4, Hkv=2, scheme="kv8" if kernel == "attention_kv8" else "kv4")
    q = q.astype(np.float16)
    spec = next(spec for spec in ladder.SPECS if spec.name == kernel)
    logical = {"q": q[:, 0], "cache": cache, "softmax_scale": 128**-0.5}
    wanted, allowed = spec.expected(logical), spec.allowed(logical)
    for queries in (q, q[:, 0]):
        got = ptxlab.attention_kv4(queries, cache, kernel=kernel, backend="emulator")
        assert got.shape == queries.shape
        assert within({"out": got.reshape(wanted["out"].shape)}, wanted, allowed) is None
    workspace = ptxlab.attention_workspace(on_device(cache), kernel=kernel)
    assert workspace.nbytes == 0 and fake.allocations == 0
    out = ptxlab.attention_kv4(sent(q), on_device(cache), kernel=kernel, workspace=workspace)
    assert np.array_equal(out.host[:, 0], got) and fake.launched == [(kernel, 7)]


def forget() -> None:
    """As if the device were another one."""
    operation._prepared.clear()
    operation._ready.clear()


def test_which_kernel_is_taken(fake: FakeGpu) -> None:
    assert steps.choose(None, backend="emulator").spec.name == SM90
    q, cache = sent(Q), on_device(CACHE)
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
    hold(Q, CACHE, ptxlab.attention_kv4(Q, CACHE, backend="emulator"))


def test_one_query_needs_no_axis(fake: FakeGpu) -> None:
    out, lse = ptxlab.attention_kv4(Q, CACHE, return_lse=True, backend="emulator")
    flat, flat_lse = ptxlab.attention_kv4(Q[:, 0], CACHE, return_lse=True, backend="emulator")
    assert np.array_equal(flat, out[:, 0]) and np.array_equal(flat_lse, lse[:, 0])
    flat, flat_lse = ptxlab.attention_kv4(sent(Q[:, 0]), on_device(CACHE), return_lse=True)
    assert flat.shape == (4, 4, 128) and flat_lse.shape == (4, 4)
    hold(Q, CACHE, flat.host[:, None], flat_lse.host[:, None])


def test_scale_and_windows_wider_than_the_cache() -> None:
    out = ptxlab.attention_kv4(Q, CACHE, scale=0.5, backend="emulator")
    hold(Q, CACHE, out, scale=0.5)
    assert not np.array_equal(out, ptxlab.attention_kv4(Q, CACHE, backend="emulator"))
    for window in (CACHE.max_pages * 32, 2**31, np.int64(2**40)):
        assert np.array_equal(ptxlab.attention_kv4(Q, CACHE, scale=0.5, window=window, backend="emulator"), out)


@pytest.mark.parametrize("on_host", [True, False])
def test_results_are_written_where_they_are_wanted(fake: FakeGpu, on_host: bool) -> None:
    to, cache = (np.array, CACHE) if on_host else (sent, on_device(CACHE))
    backend = "emulator" if on_host else None
    wanted, wanted_lse = ptxlab.attention_kv4(to(Q), cache, return_lse=True, backend=backend)
    out, lse = to(np.zeros_like(Q)), to(np.zeros(Q.shape[:-1], np.float32))
    assert ptxlab.attention_kv4(to(Q), cache, out=out, backend=backend) is out
    both = ptxlab.attention_kv4(to(Q), cache, out=(out, lse), return_lse=True, backend=backend)
    assert both[0] is out and both[1] is lse
    made = ptxlab.attention_kv4(to(Q), cache, out=out, return_lse=True, backend=backend)
    assert made[0] is out and made[1] is not lse
    for got, expected in ((out, wanted), (lse, wanted_lse), (made[1], wanted_lse)):
        assert np.array_equal(getattr(got, "host", got), getattr(expected, "host", expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_on_the_cpu(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(Q.astype(np.float32)).to(getattr(torch, dtype))
    pool, table, lengths = map(torch.from_numpy, (CACHE.pool, CACHE.block_table, CACHE.lengths))
    cache = replace(CACHE, pool=pool, block_table=table, lengths=lengths)
    out, lse = ptxlab.attention_kv4(q, cache, return_lse=True, backend="emulator")
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    wanted = ptxlab.attention_kv4(stored(q.float().numpy(), dtype), CACHE, return_lse=True, backend="emulator")
    assert np.array_equal(out.float().numpy(), numbers(wanted[0], dtype)) and np.array_equal(lse.numpy(), wanted[1])


def test_no_sequences_launch_nothing(fake: FakeGpu) -> None:
    empty = replace(CACHE, block_table=CACHE.block_table[:0], lengths=CACHE.lengths[:0])
    out, lse = ptxlab.attention_kv4(Q[:0], empty, return_lse=True, backend="emulator")
    assert (out.shape, out.dtype, lse.shape) == ((0, 1, 4, 128), np.float16, (0, 1, 4))
    out, lse = ptxlab.attention_kv4(sent(Q[:0]), on_device(empty), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 1, 4, 128), (0, 1, 4)) and fake.launched == [] and fake.loads == 0


def test_a_programmatic_call_has_a_plan_of_its_own(fake: FakeGpu) -> None:
    q, cache = sent(Q), on_device(CACHE)
    for programmatic in (False, True, False, True):
        hold(Q, CACHE, ptxlab.attention_kv4(q, cache, programmatic=programmatic).host)
    assert [geometry.programmatic for geometry in fake.geometries] == [False, True, False, True] and fake.loads == 2
    for kernel in (SM80, TEACHING[0]):
        with pytest.raises(ArgumentError, match=rf"programmatic: only for kernels that wait .*{SM90}\) \(got {kernel}"):
            ptxlab.attention_kv4(q, cache, kernel=kernel, programmatic=True)
