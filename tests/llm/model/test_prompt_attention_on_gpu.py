"""Prompts attended by PyTorch on a GPU: NumPy's logits, any caller's stream, the same bits again, graphs in between."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import PtxlabError
from ptxlab.llm.model import FloatModel, KernelRunner, QuantizedModel
from ptxlab.llm.server import Server
from tests.support.float_prompts import FloatPromptsRunner
from tests.support.small_prompts import SMALL, relative, some_prompts

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
HOPPER = pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="the products need sm_90a")
pytestmark = [pytest.mark.gpu, HOPPER]

OF_ROUNDING = 0.15  # of logits, as in test_generate_on_gpu
EQUAL, MIXED = (90, 90, 90, 90), (40, 90, 90, 1, 150, 150)


def by_torch(model: QuantizedModel, batch: int, **how: Any) -> KernelRunner:
    try:
        return KernelRunner(model, batch, 200, prompt_attention="torch", **how)
    except PtxlabError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model() -> QuantizedModel:
    return QuantizedModel.rounded(FloatModel.random(SMALL))


@pytest.mark.parametrize("lengths", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize(
    "how", [{}, {"dtype": "bfloat16", "scheme": "qoq_channel", "window": 100}], ids=["f16", "bf16"]
)
def test_logits_and_caches(how: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Prompts in chunks that cut some, and ten steps of the graph. Those beyond the window see the cache."""
    window, how = how.get("window"), {name: value for name, value in how.items() if name != "window"}
    model = QuantizedModel.rounded(FloatModel.random(replace(SMALL, window=window)), **how)
    prompts, B = some_prompts(lengths), len(lengths)
    twin, kernels = FloatPromptsRunner(model, B, 200, chunk=180), by_torch(model, B, chunk=180)
    right, found = twin.prefill(prompts), gpu.to_host(kernels.prefill(prompts))
    for _ in range(10):
        print(f"logits: {relative(found, right):.5f}")
        assert relative(found, right) < OF_ROUNDING
        tokens = right.argmax(axis=1)
        right, found = twin.decode(tokens), gpu.to_host(kernels.decode(tokens))
    assert np.array_equal(gpu.to_host(kernels.caches[0].pool), twin.caches[0].pool)
    assert np.array_equal(gpu.to_host(kernels.caches[0].lengths), twin.lengths)


@contextmanager
def working_on(stream: str) -> Iterator[None]:
    """The default stream, or one of CuPy's or PyTorch's own."""
    import cupy

    if stream == "cupy":
        with cupy.cuda.Stream(non_blocking=True) as ours:
            yield
            ours.synchronize()
    elif stream == "torch":
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
            torch.cuda.synchronize()
    else:
        yield


def test_the_same_bits_on_any_stream(model: QuantizedModel) -> None:
    """Captured there, too; beside another stream that keeps taking memory of PyTorch's and giving it back."""
    prompts, other = some_prompts(EQUAL), torch.cuda.Stream()
    parts = [{0: prompts[0], 1: prompts[1]}, {2: prompts[2], 3: prompts[3]}]
    right: list[Any] = []
    for stream in ("default", "cupy", "torch"):
        runner = by_torch(model, 4, chunk=180)
        gpu.synchronize()
        for turn in range(3):
            with working_on(stream):
                found = []
                for part in parts:
                    for b in part if turn else ():
                        runner.release(b)
                    with torch.cuda.stream(other):
                        for _ in range(20):
                            torch.full((1 << 20,), float("nan"), device="cuda")
                    with gpu.caller_stream():  # CuPy's own work, the head's product, follows PyTorch's stream only so
                        found.append(gpu.to_host(runner.extend(part)).view(np.uint16))
            right = right or found
            assert np.array_equal(found, right), (stream, turn)
        assert [len(step.pieces) for step in runner._steps.values()].count(SMALL.layers + 1) == 1


def test_a_launch_that_is_captured_late_leaves_the_cache_as_it_is(model: QuantizedModel) -> None:
    """Its size was a step's before: the tokens that follow in that step's pages, and on the next page, stay."""
    runner = by_torch(model, 5, chunk=180)
    runner.extend(dict(enumerate(some_prompts((63, 30, 63, 5)))))  # at the ends of pages, and inside
    runner.decode([1, 2, 3, 4], range(4))
    gpu.synchronize()
    before = [gpu.to_host(pool).copy() for pool in runner._pools]
    assert not runner._steps[4].pieces
    runner.extend({4: [1, 2, 3, 4]})
    assert runner._steps[4].pieces
    others = np.setdiff1d(np.arange(runner.pages), runner.table[4, :1])
    for pool, known in zip(runner._pools, before, strict=True):
        assert np.array_equal(gpu.to_host(pool)[others], known[others])


def test_a_server_gives_its_memory_back(model: QuantizedModel) -> None:
    """Prompts of any length, some cut: every request ends, and PyTorch holds no more than after the first ones."""
    server, rng = Server(by_torch(model, 8, chunk=256)), np.random.default_rng(0)
    before, held = torch.cuda.memory_allocated(), 0
    for turn in range(20):
        requests = [
            server.submit(rng.integers(0, SMALL.vocabulary, rng.integers(1, 190)).tolist(), tokens=5) for _ in range(8)
        ]
        server.run()
        assert all(request.error is None and len(request.tokens) == 5 for request in requests)
        assert torch.cuda.memory_allocated() <= before + (1 << 20), "no array outlives its launch"
        held = torch.cuda.memory_reserved() if turn == 9 else held
    assert torch.cuda.memory_reserved() <= 2 * held
