"""Programmatic dependent launch: a GEMM that waits by itself, in the emulator's check, and in chains on a GPU."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator, gpu, quant
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm import device, ladder
from ptxlab.runtime import run_spec
from tests import waiting
from tests.fake_gpu import DeviceArray, FakeGpu, on_device

RNG = np.random.default_rng(0)
SIZES = {"M": 5, "N": 136, "K": 768, "g": 128}
both_modes = pytest.mark.parametrize("mode", emulator.MODES)
in_clusters = pytest.mark.parametrize("cluster", [1, 2])


def found(mode: str, cluster: int, **options: Any) -> tuple[emulator.Finding, ...]:
    """What the check for races finds; without findings the result is right."""
    spec = waiting.spec()
    logical = spec.example(np.random.default_rng(0), **SIZES)
    config = {**spec.config_for(SIZES), "BM": 8, "BK": 128, "STAGES": 3, "CLUSTER": cluster}
    outcome = run_spec(spec, waiting.source(**options), spec.pack(logical), sizes={"g": SIZES["g"]}, mode=mode,
                       backend="emulator", checks=("race", "init", "async"), config=config)  # fmt: skip
    assert outcome.findings or np.array_equal(outcome.outputs["y"], spec.expected(logical)["y"])
    return outcome.findings


@both_modes
@in_clusters
def test_the_thread_that_loads_waits_for_its_block(mode: str, cluster: int) -> None:
    assert found(mode, cluster) == ()


@both_modes
@in_clusters
def test_a_wait_that_comes_late_is_found(mode: str, cluster: int) -> None:
    findings = found(mode, cluster, late=True)
    assert {finding.kind for finding in findings} == {"race"}
    messages = [finding.message for finding in findings]
    for what, may in (("read of byte 0 of argument 2 ", "write"), ("write to byte 0 of argument 5 ", "use")):
        ahead = f"ahead of griddepcontrol.wait: the kernel before may still {may} it,"
        assert any(message.startswith(what) and message.endswith(ahead) for message in messages)
    assert all("ahead of griddepcontrol.wait" in message for message in messages)
    copies = [finding for finding in findings if "cp.async.bulk.tensor" in finding.text]
    assert copies and all(finding.thread == (0, 0, 0) for finding in copies)
    assert not any("argument 0 " in message for message in messages)  # weights may be read at once


def test_a_call_launches_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting.install(monkeypatch)
    monkeypatch.setattr(device, "_prepared", {})
    fake = FakeGpu(monkeypatch)
    weight = quant.quantize_lqq(RNG.standard_normal((40, 256), dtype=np.float32), group=64)
    packed, x = ptxlab.pack(weight, "dual_mma"), RNG.integers(-128, 128, (5, 256), dtype=np.int8)
    y = ptxlab.gemm_w4a8(DeviceArray(x), weight=on_device(packed), out_dtype="int32", programmatic=True)
    assert np.array_equal(y.host, x.astype(np.int32) @ weight.exact_level1().T)
    assert fake.launched == [(waiting.NAME, 7)] and fake.geometries[0].programmatic
    with pytest.raises(
        ArgumentError, match=rf"that wait for the one before them \({waiting.NAME}\) \(got gemm_w4a8_lqq_sm"
    ):
        ptxlab.gemm_w4a8(x, weight=packed, out_dtype="int32", kernel="gemm_w4a8_lqq_sm90", programmatic=True)


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="wgmma needs sm_90a")
@pytest.mark.parametrize(("tokens", "channels"), [(1, 2048), (16, 4096), (200, 2048)])
def test_a_chain_of_programmatic_calls_is_the_plain_chain(
    monkeypatch: pytest.MonkeyPatch, tokens: int, channels: int
) -> None:
    """Each call multiplies the bytes of the accumulators before it, so that one stale byte changes all that follows."""
    import cupy

    waiting.install(monkeypatch)
    monkeypatch.setattr(device, "_prepared", {})
    weight = quant.quantize_lqq(RNG.standard_normal((channels // 4, channels), dtype=np.float32), group=128)
    packed = ptxlab.to_device(ptxlab.pack(weight, "dual_mma"))
    start = cupy.asarray(RNG.integers(-128, 128, (tokens, channels), dtype=np.int8))
    buffers = [cupy.empty((tokens, channels // 4), cupy.int32) for _ in range(2)]

    def chain(programmatic: bool) -> list[Any]:
        inputs = [start, *(buffers[i % 2].view(cupy.int8) for i in range(19))]
        return [
            lambda x=x, i=i: ptxlab.gemm_w4a8(x, weight=packed, out=buffers[i % 2], programmatic=programmatic)
            for i, x in enumerate(inputs)
        ]

    for call in chain(programmatic=False):
        call()
    cupy.cuda.Device().synchronize()
    wanted = buffers[1].get()
    graph = gpu.capture(chain(programmatic=True))
    for _ in range(200):
        graph.run(lambda: [buffer.fill(-1) for buffer in buffers])
        graph.replay()
        graph.synchronize()
        assert np.array_equal(buffers[1].get(), wanted)
    assert ladder.LADDER[-1].spec.after_wait and len(device._prepared) == 2  # it was another plan that ran
