"""Bytes of a runner, counted from shapes, against those of arrays that exist; batches and pages that fit a memory."""

import re
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model import MODELS, Config, FloatModel, Footprint, KernelRunner, LayerWeights, QuantizedModel
from ptxlab.llm.model.memory import excess, largest_batch, launch_bytes, layer_bytes, require_batch, weights_of
from ptxlab.llm.model.runner import launch_sizes
from tests.support.layers import TINY, TINY_MODEL, layer_problem

EXPERTS = replace(TINY, experts=4, chosen_experts=2)


@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
@pytest.mark.parametrize("config", [TINY, EXPERTS, replace(TINY, qkv_bias=True, hidden=256)])
def test_bytes_of_a_layer_are_those_of_its_arrays(config: Config, scheme: str) -> None:
    assert layer_bytes(config, scheme, 64) == LayerWeights.random(config, scheme=scheme, group=64).nbytes


def arrays(part: Any) -> dict[int, np.ndarray]:
    """List every array in a dataclass, at any depth, once."""
    if isinstance(part, np.ndarray):
        return {id(part): part}
    values = [getattr(part, array_field.name) for array_field in fields(part)] if is_dataclass(part) else []
    values += part if isinstance(part, list) else []
    return {key: array for element in values for key, array in arrays(element).items()}


@pytest.mark.parametrize("config", [TINY, EXPERTS])
def test_bytes_of_a_launch_are_those_of_its_buffers(config: Config) -> None:
    buffers = layer_problem(config).buffers  # three sequences
    around = 3 * (3 * config.hidden * 2 + (5 + 7) * 4)  # stream's ends; counters and a table of seven pages
    assert launch_bytes(config, 3, 7) == sum(array.nbytes for array in arrays(buffers).values()) + around


@pytest.mark.parametrize("layout", ["strips", "rows"])
@pytest.mark.parametrize("scheme", ["atom", "fmpq"])
def test_bytes_of_a_launch_in_w4a4_are_those_of_its_buffers(scheme: str, layout: str) -> None:
    """A runner of a model asks for those of its layers."""
    config = replace(TINY, hidden=256, heads=4, ffn=384)
    problem = layer_problem(config, scheme=scheme, layout=layout)
    model = QuantizedModel(config=config, embedding=None, layers=[problem.weights], final_norm=None)
    counted = weights_of(model)
    around = 3 * (3 * config.hidden * 2 + (5 + 7) * 4)
    counted_bytes = launch_bytes(config, 3, 7, inputs=counted["inputs"])
    assert counted_bytes == sum(array.nbytes for array in arrays(problem.buffers).values()) + around
    assert counted["weights"] == problem.weights.nbytes
    assert Footprint.of_model(model, 3, 100) == Footprint.of(config, 3, 100, **counted)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "head", "own_keys"),
    [("float16", "float16", "cache"), ("bfloat16", "float16", "16-bit"), ("float16", "int8", "cache")],
)
def test_bytes_of_a_runner_are_those_of_its_arrays(tied: bool, dtype: str, head: str, own_keys: str) -> None:
    model = QuantizedModel.rounded(FloatModel.random(replace(TINY_MODEL, tied_head=tied)), group=32, dtype=dtype)
    options: dict[str, Any] = {"chunk": 5, "head": head, "own_keys": own_keys}
    runner = KernelRunner(model, 3, 100, pages=4, backend="emulator", **options)
    footprint = Footprint.of_model(model, 3, 100, **options)
    assert footprint == Footprint.of(model.config, 3, 100, group=32, dtype=dtype, **options)
    of_head = vars(runner._head.weight).values() if head == "int8" else [runner._head.weight]
    of_head = [array for array in of_head if isinstance(array, np.ndarray)]
    ends = {id(array): array for array in (runner._embedding, *of_head, runner._final_norm)}
    assert footprint.ends == sum(array.nbytes for array in ends.values())
    assert footprint.total(4) - footprint.fixed == sum(cache.pool.nbytes for cache in runner.caches)
    launches = [runner._decode_step(rows) for rows in launch_sizes(3)] + [
        runner._prompt_step(rows) for rows in launch_sizes(5)
    ]
    steps = {key: array for step in launches for key, array in arrays(step).items()}
    pools = sum(cache.pool.nbytes for cache in runner.caches)
    logits, tables = 3 * 260 * 2, sum(table.nbytes for table in runner._angles)
    shown = sum(array.nbytes for array in steps.values()) - pools
    assert footprint.buffers == shown + logits + tables


def test_the_largest_batch_fits_and_one_more_is_refused_with_the_figures() -> None:
    config = Config.named("LLaMA-2-7B")
    B = largest_batch(config, 40, 1536)
    require_batch(config, B, 40, 1536)
    assert 1 < B < 256 and excess(config, B, 40, 1536) <= 0 < excess(config, B + 1, 40, 1536)
    figures = rf"3\.\d+ GB of weights \+ 0\.52 GB of embedding and head \+ .* GB of {(B + 1) * 24} pages"
    rule = rf"must be at most {B} for sequences of 1536 tokens of LLaMA-2-7B in 40 GB"
    needed = rf"{B + 1}, which needs (40\.\d\d) GB: {figures}"
    with pytest.raises(ArgumentError, match=rf"^batch: {rule} \(got {needed}\)$") as error:
        require_batch(config, B + 1, 40, 1536)
    figure = re.search(needed, str(error.value))
    assert figure is not None
    require_batch(config, B + 1, float(figure[1]), 1536)  # rounded up, so that this works


@pytest.mark.parametrize("chunk", [None, 2048])
@pytest.mark.parametrize("pages", [None, 2])
def test_no_larger_batch_fits(pages: int | None, chunk: int | None) -> None:
    options = {"pages": pages, "chunk": chunk, "group": 64}
    config = replace(TINY_MODEL, hidden=64, ffn=64)
    needed = [excess(config, batch, 1, 100, **options) + 10**9 for batch in range(1, 41)]
    for budget in needed:
        fitting = [batch for batch, nbytes in enumerate(needed, 1) if nbytes <= budget]
        assert largest_batch(config, budget / 1e9, 100, most=40, **options) == fitting[-1]


def test_the_memory_that_an_error_asks_for_suffices() -> None:
    footprint = Footprint.of(MODELS["LLaMA-2-7B"], 16, 1536)
    with pytest.raises(
        ArgumentError, match=r"^memory: must be at least \d+\.\d\d GB: .* 1 pages \(got 1 GB\)$"
    ) as error:
        footprint.most_pages(1)
    figure = re.search(r"at least (\S+) GB", str(error.value))
    assert figure is not None and footprint.most_pages(float(figure[1])) >= 1


@pytest.mark.parametrize("name", list(MODELS))
def test_the_pages_that_fit_fill_the_memory(name: str) -> None:
    footprint = Footprint.of(MODELS[name], 16, 1536)
    pages = footprint.most_pages(80)
    assert footprint.total(pages) <= 80e9 < footprint.total(pages + 1)
    assert largest_batch(MODELS[name], 141, 1536) >= largest_batch(MODELS[name], 80, 1536) > 16


class CopiedError(Exception):
    """Weights were about to be copied to the card."""


@pytest.mark.parametrize(("spare", "raised"), [(0, CopiedError), (-1, ArgumentError)])
def test_a_runner_that_is_larger_than_the_card_is_refused_with_the_figures(
    spare: int, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before any copy to the card; a runner that just fits is accepted."""

    def fail_to_copy(weights: LayerWeights) -> None:
        raise CopiedError

    model = QuantizedModel.rounded(FloatModel.random(TINY_MODEL), group=32)
    needed = Footprint.of_model(model, 2, 128, chunk=8).total(4)
    monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(name="a small card", memory_bytes=needed + spare))
    monkeypatch.setattr(LayerWeights, "to_device", fail_to_copy)
    with pytest.raises(raised) as error:
        KernelRunner(model, 2, 128, chunk=8, pages=4)
    figures = r"0\.00 GB of weights \+ .* of reserve \+ 0\.00 GB of 4 pages"
    rule = rf"model: must fit the 1\.50 GB of a small card \(got 1\.51 GB: {figures}\)"
    assert raised is CopiedError or re.fullmatch(rule, str(error.value))


@pytest.mark.parametrize(("gigabytes", "message"), [
    (30, r"memory: must be at least 3\d\.\d\d GB: 3\d\.\d+ GB of weights \+ 1\.05 GB of embedding .* \(got 30 GB\)"),
    (0, r"memory: must be a number of gigabytes above 0, at most 10\^9 \(got 0\)"),
    (float("nan"), r"memory: must be a number of gigabytes above 0, at most 10\^9 \(got nan\)"),
    (1e300, r"memory: must be a number of gigabytes above 0, at most 10\^9 \(got 1e\+300\)"),
])  # fmt: skip
def test_a_budget_that_is_too_small(gigabytes: float, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        largest_batch(Config.named("LLaMA-2-70B"), gigabytes, 1536)
    with pytest.raises(ArgumentError, match=r"^batch: must be an integer, 1 or more \(got 0\)$"):
        require_batch(Config.named("LLaMA-2-70B"), 0, 80, 1536)
    with pytest.raises(ArgumentError, match=r"^context: must be below 2\^31 \(got 10{399} \.\.\.\)$"):
        largest_batch(Config.named("LLaMA-2-70B"), gigabytes, 10**400)
