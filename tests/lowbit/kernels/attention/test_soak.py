"""Endurance: 20,000 calls of decode attention, any kernel, any batch, beside a busy stream; every bit as at first."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu, registry
from ptxlab.lowbit.kernels.attention.sm80 import scheme_of
from ptxlab.lowbit.kernels.attention.steps import STEPS, AttentionStep, why_not
from ptxlab.lowbit.layout import KVCache
from ptxlab.spec.tolerance import describe_mismatch
from tests.support import attention_problems as problems
from tests.support import soak

pytestmark = pytest.mark.gpu

CASES = 6  # batches, each with its own cache, per kernel
MOST_SEQUENCES, MOST_TOKENS = 24, 3000


@dataclass(frozen=True)
class Case:
    """A kernel on one batch, on the device."""

    kernel: str
    q: Any
    cache: KVCache
    window: int | None
    expected: Any  # pairs of results, as int32
    wrong: Any  # uint64 [1]: pairs that were not as expected, so far

    def call(self) -> Any:
        """Return the bits of attention's output, on the current stream."""
        out = ptxlab.attention_kv4(self.q, self.cache, window=self.window, kernel=self.kernel)
        return out.view(np.int32)

    def __str__(self) -> str:
        return f"{self.kernel}(q={list(self.q.shape)}, {self.cache.scheme}, page={self.cache.page_size})"


def draw_case(step: AttentionStep, rng: np.random.Generator) -> Case:
    """Draw any problem that the kernel takes.

    The first result is within the spec's bound, and all others are expected to equal it.
    """
    spec = step.spec
    lengths = tuple(int(n) for n in np.exp(rng.uniform(0, np.log(MOST_TOKENS), rng.integers(1, MOST_SEQUENCES))))
    shape = {"Hkv": int(rng.choice((1, 2, 8))), "D": 128, "T": 1, "page_size": 64}
    scheme, window = ("kv8" if spec.name == "attention_kv8" else "kv4"), None
    if step.blocks is not None:
        shape |= {
            "D": int(rng.choice((64, 128, 256))),
            "T": int(rng.integers(1, 9)),
            "page_size": int(rng.choice((16, 32, 64))),
        }
        scheme = scheme_of(int(rng.choice((4, 8))), int(rng.integers(2)))
        window = int(rng.choice((100, 1000))) if rng.integers(2) else None
    ratio = int(rng.choice((1, 4, 8)))
    q, host = problems.problem(int(rng.integers(1000)), lengths, scheme=scheme, Hq=ratio * shape["Hkv"], **shape)
    q = q.astype(np.float16)
    cache, on_device = ptxlab.to_device(host), gpu.to_device(q if step.blocks is not None else q[:, 0])
    case = Case(spec.name, on_device, cache, window, None, gpu.to_device(np.zeros(1, np.uint64)))
    first = case.call()
    logical = {"q": q if step.blocks is not None else q[:, 0], "cache": host, "softmax_scale": shape["D"] ** -0.5}
    if step.blocks is not None:
        logical |= {"window": window or 0}
    oracle = registry.find(spec.name)[0]
    if "partial" in {arg.name for arg in oracle.outputs}:  # 0 afterwards, for as many blocks
        logical["blocks"] = 1
    got = {"out": gpu.to_host(first).view(np.float16)}
    assert describe_mismatch(got, oracle.expected(logical), oracle.allowed(logical)) is None, str(case)
    return Case(spec.name, on_device, cache, window, first, case.wrong)


@pytest.mark.long(100)
def test_twenty_thousand_calls_beside_a_busy_stream() -> None:
    rng = np.random.default_rng(0)
    steps = [step for step in STEPS if why_not(step) is None]
    soak.endure([draw_case(step, rng) for step in steps for _ in range(CASES)], rng)
