"""The memory behind `attention_kv4`: workspaces and what they keep, streams, captures, on a GPU that isn't one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError
from ptxlab.kernels.attention import steps
from ptxlab.layout import KVCache
from tests.support.attention_calls import CACHE, SM80, SM90, Q, hold, on_device, sent
from tests.support.fake_gpu import FakeGpu


@pytest.mark.parametrize("kernel", [SM90, SM80])
def test_a_captured_call_allocates_nothing_and_reads_what_is_there_then(fake: FakeGpu, kernel: str) -> None:
    """Other lengths, other pages: the same kernel, and zeros where every call has to find them."""
    fake.sms = 5
    cache, q = on_device(CACHE), sent(Q)
    out, lse = sent(np.zeros_like(Q)), sent(np.zeros(Q.shape[:-1], np.float32))
    workspace = ptxlab.attention_workspace(cache, kernel=kernel)
    options: dict[str, Any] = {"out": (out, lse), "return_lse": True, "workspace": workspace, "kernel": kernel}
    ptxlab.attention_kv4(q, cache, **options)
    fake.capturing, allocations = True, fake.allocations
    for lengths in ([10, 64, 1, 20], [75, 0, 0, 257], [0, 0, 0, 0]):
        here = replace(CACHE, lengths=np.array(lengths, np.int32), block_table=CACHE.block_table.copy())
        here.block_table[1, :2] = here.block_table[3, :2]  # where the original has nothing
        cache.lengths.host[...], cache.block_table.host[...] = here.lengths, here.block_table
        parts = workspace.views["partial"].owner.host
        parts[...] = 0  # SM80 leaves them
        ptxlab.attention_kv4(q, cache, **options)
        hold(Q, here, out.host, lse.host)
        if kernel == SM80:
            assert parts.any() == (max(lengths) > 64)
        kept = steps.choose(kernel, backend=None).kept
        assert kept and not any(workspace.views[name].owner.host.any() for name in kept)
    assert fake.loads == 1 and fake.allocations == allocations


def test_calls_on_a_stream_share_their_memory(fake: FakeGpu) -> None:
    cache, q, out = on_device(CACHE), sent(Q), sent(np.zeros_like(Q))
    for _ in range(3):
        ptxlab.attention_kv4(q, cache, out=out)
    assert fake.allocations == 2 and fake.loads == 1  # partial, stats
    fake.stream = 8
    ptxlab.attention_kv4(q, cache, out=out)
    assert fake.allocations == 4 and fake.launched == [(SM90, 7)] * 3 + [(SM90, 8)]
    hold(Q, CACHE, out.host)


def test_a_workspace_does_for_any_queries() -> None:
    """However many blocks and columns are chosen."""
    for step in steps.STEPS[-2:]:
        for D in (64, 128, 256):
            room = {item.name: item.nbytes for item in step.most_memory(D, 132)}
            for bits, B, T, ratio, tokens in np.ndindex(2, 3, 3, 3, 3):
                sizes = {"D": D, "bits": 4 << bits, "B": 4**B * 8, "T": (1, 3, 8)[T], "Hkv": 8, "P": 8**tokens}
                sizes |= {"Hq": (8, 40, 128)[ratio], "page": 64, "pages": 1, "channel": 0, "window": 0}
                assert step.blocks is not None
                sizes["blocks"] = step.blocks(sizes, 132)
                needed = {item.name: item.nbytes for item in step.memory(sizes)}
                assert needed.keys() == room.keys() and all(needed[name] <= room[name] for name in room)


def test_what_a_workspace_must_be(fake: FakeGpu) -> None:
    q, cache = sent(Q), on_device(CACHE)
    with pytest.raises(ArgumentError, match=r"attention_workspace: cache: must be a KVCache \(got ndarray\)"):
        ptxlab.attention_workspace(Q)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"attention_kv4: workspace: must come from attention_workspace \(got dict"):
        ptxlab.attention_kv4(q, cache, workspace={})  # type: ignore[arg-type]
    narrow = ptxlab.attention_workspace(KVCache.empty(1, 1, 1, 64))
    message = r"attention_kv4: workspace: must be attention_workspace\(cache\) of .* \(got \d+ bytes for partial\)"
    with pytest.raises(ArgumentError, match=message):
        ptxlab.attention_kv4(q, cache, workspace=narrow)
    for kernel, other, maker in ((None, SM80, "cache"), (SM80, SM90, f"cache, kernel='{SM80}'")):
        made = ptxlab.attention_workspace(cache, kernel=other)
        message = rf"workspace: must be attention_workspace\({maker}\) \(got that of {other}\)"
        with pytest.raises(ArgumentError, match=message):
            ptxlab.attention_kv4(q, cache, workspace=made, kernel=kernel)
    elsewhere = ptxlab.attention_workspace(cache)
    elsewhere.views["stats"] = elsewhere.views["stats"]._replace(device=1)
    with pytest.raises(ArgumentError, match=r"workspace: on the current device 0 \(got device 1\)"):
        ptxlab.attention_kv4(q, cache, workspace=elsewhere)
    assert fake.launched == []


@pytest.mark.parametrize("own", [True, False])
def test_a_call_that_fails_leaves_nothing_behind(fake: FakeGpu, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = sent(Q), on_device(CACHE)
    workspace = ptxlab.attention_workspace(cache) if own else None
    ptxlab.attention_kv4(q, cache, workspace=workspace)
    wild = on_device(CACHE)
    wild.block_table.host[...] = 2**30
    with pytest.raises(ptxlab.errors.EmulationError):
        ptxlab.attention_kv4(q, wild, workspace=workspace)
    if own:
        with pytest.raises(ArgumentError, match=r"workspace: must be .* used by no call that failed \(got 0 bytes for"):
            ptxlab.attention_kv4(q, cache, workspace=workspace)
    else:
        hold(Q, CACHE, ptxlab.attention_kv4(q, cache).host)


def test_what_a_call_has_left_is_found_if_asked_for(fake: FakeGpu) -> None:
    q, cache = sent(Q), on_device(CACHE)
    workspace = ptxlab.attention_workspace(cache)
    hold(Q, CACHE, ptxlab.attention_kv4(q, cache, workspace=workspace, check=True).host)
    workspace.views["stats"].owner.host[0, 0, 1] = 1
    message = r"workspace: must be all zeros between calls: .* \(got 1 words that are not\)"
    with pytest.raises(ArgumentError, match=message):
        ptxlab.attention_kv4(q, cache, workspace=workspace, check=True)
    with pytest.raises(ArgumentError, match=r"workspace: must be .* \(got 0 bytes for partial\)"):
        ptxlab.attention_kv4(q, cache, workspace=workspace)


def test_a_capture_is_told_what_to_do_before_it(fake: FakeGpu) -> None:
    q, cache, out = sent(Q), on_device(CACHE), sent(np.zeros_like(Q))
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
