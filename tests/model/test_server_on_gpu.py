"""Endurance on a GPU: every one of thousands of requests gets the tokens of itself alone, and memory stays as it is."""

import os
import time
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.bench.models import random_model
from ptxlab.model import Config, FloatModel, KernelRunner, QuantizedModel, Server
from tests.support.serving import Served, random_requests, soak

HOPPER = pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="the products need sm_90a")
pytestmark = [pytest.mark.gpu, HOPPER]

SMALL = Config(hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, layers=4, vocabulary=1000, rope_base=1e5)
SECONDS = float(os.environ.get("PTXLAB_SOAK_SECONDS", "300"))  # of the long one


def in_use() -> int:
    """Bytes of CuPy's pool."""
    import cupy

    return int(cupy.get_default_memory_pool().total_bytes())


def endured(model: QuantizedModel, count: int, seconds: float, context: int, **how: Any) -> Served:
    """A soak of up to `count` requests or `seconds`."""
    runner = KernelRunner(model, context=context, batch_invariant=True, **how)
    alone = KernelRunner(runner.model, 1, context, chunk=how["chunk"], batch_invariant=True)
    these = Served(Server(runner), alone)
    rng = np.random.default_rng(1)
    for size in runner.sizes:  # every graph, and all that cuBLAS and CuPy take once
        these.submit(prompt=rng.integers(0, 1000, min(size, context - 4)).tolist(), tokens=3)
        these.server.run()
    for _ in range(runner.batch):
        these.submit(prompt=[1, 2, 3], tokens=12, temperature=1.0)
    these.finish()
    before, begin, served = in_use(), time.perf_counter(), 0
    for _ in soak(these, random_requests(count, model.config.vocabulary, context), cancels=max(0.05, 10 / count)):
        served += 1
        if time.perf_counter() - begin > seconds:
            break
    while these.server.running or these.server.waiting:
        these.step()
    after = in_use()
    these.finish()
    print(
        f"{served} requests, {len(these.preempted)} preempted, {len(these.cancelled)} cancelled; {before} B, {after} B"
    )
    assert these.preempted and these.cancelled
    assert after <= before * 1.02 + (64 << 20)
    return these


def test_a_long_soak_on_a_small_model() -> None:
    """2,000 requests, or 5 minutes (PTXLAB_SOAK_SECONDS)."""
    model = QuantizedModel.rounded(FloatModel.random(SMALL))
    endured(model, 2000, SECONDS, 400, batch=24, pages=64, chunk=128)


def test_a_soak_on_a_model_of_7b() -> None:
    """50 requests; the weights are random."""
    endured(random_model(Config.named("LLaMA-2-7B")), 50, SECONDS, 600, batch=16, pages=48, chunk=256)
