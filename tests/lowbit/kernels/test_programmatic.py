"""Programmatic dependent launch: GEMMs that wait by themselves, in the emulator's check, and in chains on a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu, registry
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.gemm.strips import LARGE
from ptxlab.lowbit.kernels.gemm.strips_tiles import StripChoice, StripTile
from ptxlab.runtime import run_spec
from tests.support.axes import both_modes
from tests.support.fake_gpu import FakeGpu

RNG = np.random.default_rng(0)
SIZES = {"M": 5, "N": 136, "K": 768, "g": 128}
WAIT = "    ptxlab::wait_for_predecessors();\n    for (; tile_index < schedule.num_tiles;"
LOADED = "    __syncwarp();\n    if (SPLIT > 1) ptxlab::cluster_wait();\n}"


@pytest.mark.full
@both_modes
@pytest.mark.parametrize("split", [1, 2])
def test_a_wait_that_comes_late_is_found(mode: str, split: int) -> None:
    """The loading warps wait only after their loads here; the storing warps wait by themselves."""
    (source,) = registry.find(LARGE.name)[1]
    text = source.text
    for old, new in ((WAIT, WAIT.partition("\n")[2]), (LOADED, WAIT.partition("\n")[0] + "\n" + LOADED)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    tile = StripChoice(StripTile(8, WN=2, WK=1, MN=1, BK=128), 8, 3, split)
    config = {**LARGE.config_for(SIZES), **tile.constants, "SIGNED": 0}
    packed = LARGE.pack(LARGE.example(np.random.default_rng(0), **SIZES))
    options = {"sizes": {"g": SIZES["g"]}, "mode": mode, "backend": "emulator", "checks": ("race", "init", "async")}
    outcome = run_spec(LARGE, replace(source, text=text), packed, config=config, **options)
    ending = "ahead of griddepcontrol.wait: the kernel before may still write it,"
    assert outcome.findings
    for finding in outcome.findings:  # weights may be read at once, and who stores has waited
        assert finding.kind == "race" and "cp.async.bulk.tensor" in finding.text
        assert "of argument 3 " in finding.message and finding.message.endswith(ending)


def test_only_kernels_that_wait_are_launched_programmatically(fake: FakeGpu) -> None:
    weight = quant.quantize_lqq(RNG.standard_normal((40, 256), dtype=np.float32), group=64)
    x = RNG.integers(-128, 128, (5, 256), dtype=np.int8)
    names = r"gemm_w4a8_sm90, gemm_w4a8_small_sm90"
    with pytest.raises(ArgumentError, match=rf"before them \({names}\) \(got gemm_w4a8_lqq_imfp_sm90\)"):
        ptxlab.gemm_w4a8(x, weight=ptxlab.pack(weight, "dual_mma"), out_dtype="int32", programmatic=True)
    assert fake.launched == []


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="wgmma needs sm_90a")
@pytest.mark.parametrize(
    ("tokens", "channels", "kernel"),
    [
        (1, 2048, "gemm_w4a8_small_sm90"),
        (16, 4096, "gemm_w4a8_small_sm90"),
        (16, 4096, "gemm_w4a8_sm90"),
        (200, 2048, "gemm_w4a8_sm90"),
    ],
)
def test_a_chain_of_programmatic_calls_is_the_plain_chain(
    monkeypatch: pytest.MonkeyPatch, tokens: int, channels: int, kernel: str
) -> None:
    """A call multiplies the bytes of the accumulators before it.

    So one stale byte changes all that follows.
    """
    import cupy

    for name in ("_prepared", "_ready"):
        monkeypatch.setattr(operation, name, {})
    weight = quant.quantize_lqq(RNG.standard_normal((channels // 4, channels), dtype=np.float32), group=128)
    packed = ptxlab.to_device(ptxlab.pack(weight, "strips"))
    start = cupy.asarray(RNG.integers(-128, 128, (tokens, channels), dtype=np.int8))
    buffers = [cupy.empty((tokens, channels // 4), cupy.int32) for _ in range(2)]

    def chain(programmatic: bool) -> list[Any]:
        inputs = [start, *(buffers[i % 2].view(cupy.int8) for i in range(19))]
        return [
            lambda x=x, i=i: ptxlab.gemm_w4a8(
                x, weight=packed, out=buffers[i % 2], kernel=kernel, programmatic=programmatic
            )
            for i, x in enumerate(inputs)
        ]

    for call in chain(programmatic=False):
        call()
    cupy.cuda.Device().synchronize()
    plain_result = buffers[1].get()
    graph = gpu.capture(chain(programmatic=True))
    for _ in range(200):
        graph.run(lambda: [buffer.fill(-1) for buffer in buffers])
        graph.replay()
        graph.synchronize()
        assert np.array_equal(buffers[1].get(), plain_result)
    assert len(operation._prepared) == 2  # it was another plan that ran
