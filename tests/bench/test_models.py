"""The suite `decode` on a GPU made of the emulator: a tiny whole model, its steps, its rules, what is recorded."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab import bench, gpu
from ptxlab.bench import models
from ptxlab.bench.attention import problem as attention_problem
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.layer import decoder
from ptxlab.bench.peers_layer import MixTime
from ptxlab.bench.record import Row
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.model import Config, KernelRunner, LayerWeights
from tests.bench.conftest import _measure

TINY = Config(hidden=128, ffn=128, heads=1, kv_heads=1, head_dim=128, layers=1, vocabulary=600, name="tiny")
CEILINGS = Ceilings(4.6, 4.2)


@pytest.fixture
def here(emulated_gpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Prompts of 4 tokens and 2 behind each; every call is made once and takes 10 µs."""

    def call_times(call: Callable[[], Any], repeats: int, warm_up: int) -> list[float]:
        call()
        return [10.0, 12.0]

    emulated_gpu.setattr(gpu, "why_not", lambda *_, **__: "a GPU made of the emulator")
    emulated_gpu.setattr(gpu, "device_info", lambda: SimpleNamespace(sms=2, memory_bytes=141 * 10**9, slug="h200"))
    emulated_gpu.setattr(gpu, "call_times", call_times, raising=False)
    emulated_gpu.setattr(gpu, "synchronize", lambda: None)
    emulated_gpu.setattr(gpu, "elsewhere", lambda nbytes: contextlib.nullcontext())
    emulated_gpu.setattr(attention_problem, "_RANDOM", 1 << 16)
    clock = SimpleNamespace(start=lambda: None, stop=lambda: None, mhz=lambda: 1900.0)
    emulated_gpu.setattr(models, "Clock", lambda: clock)
    emulated_gpu.setattr(models, "measure", _measure)
    emulated_gpu.setattr(models, "KernelRunner", partial(KernelRunner, backend="emulator"))
    for name, value in {"PROMPT": 4, "MADE": 2, "MEAN": 5, "CHUNK": 8}.items():
        emulated_gpu.setattr(models, name, value)
    attention_problem.random_pages.cache_clear()
    yield emulated_gpu
    attention_problem.random_pages.cache_clear()


def test_a_whole_model_is_timed_taken_apart_and_checked(here: pytest.MonkeyPatch) -> None:
    runner = models.KernelRunner(models.random_model(TINY), 2, 6, chunk=8)
    beside = {"fp8_row/sdpa": MixTime(20.0, 12.0, 8.0)}
    row, head = models.decode_row(runner, 2, CEILINGS, beside, {2: 50.0})
    assert (row.time_us, row.fastest_us, row.slowest_us, head) == (11.0, 10.0, 12.0, 11.0)
    assert row.rate == pytest.approx(2 / 11e-6) and row.sizes == models.sizes_of(TINY, 2, 4)
    assert row.checked.endswith("bit for bit, and finite")
    assert row.peers == {"fp8_row/sdpa": 31.0, "without": 50.0}
    assert (row.more["gemm_us"], row.more["attention_us"], row.more["others_us"]) == (40.0, 10.0, 50.0)
    assert row.more["fp8_row/sdpa attention_us"] == 8.0 and row.more["gaps_us"] == 11.0 - 111.0
    floors = {name for name in row.more if name.startswith("floor ")}
    assert len(floors) == 6 and row.floor_us == pytest.approx(sum(row.more[name] for name in floors))

    found = models.generate_row(runner, 2, 80, {"fp8_row/sdpa": (100.0, 3)})
    assert found.rate == pytest.approx(4e6 / found.time_us) and found.sizes["L"] == 80
    assert found.more["prefill_us"] + found.more["decode_us"] == pytest.approx(found.time_us)
    assert found.more["fp8_row/sdpa tokens_per_second"] == pytest.approx(3 * 2 / 100e-6)
    assert row.key == models.row_key(TINY, models.MEASURE, 2, 4)


def test_steady_sequences_begin_anew_and_a_wrong_graph_is_found(here: pytest.MonkeyPatch) -> None:
    runner = models.KernelRunner(models.random_model(TINY), 2, 6, chunk=8)
    steady = models.Steady(runner, 2)
    assert sorted(runner.lengths.tolist()) == [3, 4] and steady.mean == 4.5
    here.setattr(runner, "decode", lambda tokens, at: grown(runner, at))
    seen = []
    for _ in range(3):
        steady.step()
        seen.append(sorted(runner.lengths.tolist()))
    assert seen == [[4, 5], [4, 5], [4, 5]]
    turn = iter(range(9))
    here.setattr(runner, "decode", lambda tokens, at: grown(runner, at) + next(turn))
    with pytest.raises(BenchmarkError, match="tiny, batch 2: other bits than its launches one by one"):
        steady.check()


def grown(runner: KernelRunner, at: list[int]) -> Any:
    runner.lengths[at] += 1
    return np.zeros((len(at), 600), np.float16)


def test_ours_with_qserves_gemm(here: pytest.MonkeyPatch) -> None:
    assert models.without_us(TINY, (1,), lambda _: None) == {1: 11.0}


def test_experts_run_as_a_whole_model_too(here: pytest.MonkeyPatch) -> None:
    config = replace(TINY, experts=2, chosen_experts=1)
    runner = models.KernelRunner(models.random_model(config), 1, 6, chunk=1)
    assert models.Steady(runner, 1).check().endswith("finite")
    work = {each.name: each for each in models.works(config, LayerWeights.random(config), 1, 5)}
    assert work["gemm down"].nbytes == pytest.approx(runner.model.layers[0].down.nbytes / 2, abs=1)


@pytest.mark.parametrize("config", models.MODELS, ids=lambda config: config.name)
def test_what_is_measured_of_a_model(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(memory_bytes=141 * 10**9))
    plan = models.ModelPlan.of(config, models.WantedModels())
    assert set(plan.budgets) == {80, 141} and plan.budgets[80] <= plan.budgets[141] <= 256
    assert {1, 4, 16} < set(plan.batches) and max(plan.batches) == plan.budgets[141]
    assert models.config_of(models.sizes_of(config, 4)) is config
    fp16, fp8 = (models.mix_batches(config, ("fp16", "fp8_row"), 80)[f"{n}/sdpa"] for n in ("fp16", "fp8_row"))
    assert 0 <= fp16 <= fp8 <= 256 and (fp16 > 0) == (config.name not in ("LLaMA-2-70B", "Mixtral-8x7B"))


def test_mixes_are_composed_at_their_best_batch() -> None:
    config = Config.named("LLaMA-2-7B")
    beside = {B: {"fp16/sdpa": MixTime(us, 0.0, 0.0)} for B, us in ((16, 100.0), (64, 150.0), (256, 160.0))}
    found = models.composed_rates(config, ("fp16",), 80, beside, {"fp16": 3.0}, {16: 50.0})
    assert models.mix_batches(config, ("fp16",), 80)["fp16/sdpa"] == 80  # 256 do not fit
    assert found == {"fp16/sdpa": (32 * (64 * 3.0 + 512 * 150.0) + 512 * 50.0, 64)}


def test_parts_of_the_suite_by_words() -> None:
    everything = models.part([])
    assert everything.models == models.MODELS and everything.without and len(everything.mixes) == 5
    some = models.part(["LLaMA-2-7B", "B=16", "fp8_row"])
    assert [config.name for config in some.models] == ["LLaMA-2-7B"] and some.batches == (16,)
    assert some.mixes == ("fp8_row",) and not some.without
    assert models.part(["alone"]).mixes == () and not models.part(["alone"]).without
    with pytest.raises(ArgumentError, match=r"only: one of LLaMA-30B, .* \(got GPT-2\)"):
        models.part(["GPT-2"])


def a_row(B: int) -> Row:
    apart = decoder.Alone({}, {})
    measured = models.Measured(10.0, 10.0, 10.0, 1900.0)
    work = [models.Work("head", 1, 1)]
    return models.row_at(models.MODELS[1], B, measured, work, apart, 1.0, CEILINGS, "made up", {}, {})


def test_a_run_goes_on_where_another_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = SimpleNamespace(name="H200", slug="h200", driver="1", sms=2, l2_bytes=1, memory_bytes=141 * 10**9)
    monkeypatch.setattr(gpu, "device_info", lambda: info)
    monkeypatch.setattr(bench, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(bench, "versions", lambda info: {})
    monkeypatch.setenv("PTXLAB_COMMIT", "abc")
    measured: list[int] = []

    def rows(names: Any, ceilings: Any, progress: Any, only: Any = (), done: Any = ()) -> Any:
        for B in (1, 4):
            known = [row for row in done if row.sizes["B"] == B]
            if not known:
                measured.append(B)
                if len(measured) == 2:
                    raise KeyboardInterrupt
            yield known[0] if known else a_row(B)

    monkeypatch.setitem(bench.SUITES, "decode", rows)
    path = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        bench.run_suite("decode", only=["LLaMA-2-7B"], resume=path)
    assert bench.load(path).invalid == "not finished" and len(bench.load(path).rows) == 1
    record = bench.run_suite("decode", only=["LLaMA-2-7B"], resume=path)
    assert measured == [1, 4, 4] and [row.sizes["B"] for row in record.rows] == [1, 4]
    assert record.suite == "decode/LLaMA-2-7B" and bench.default_path(record).name == "LLaMA-2-7B.json"
    monkeypatch.setenv("PTXLAB_COMMIT", "another")
    bench.run_suite("decode", only=["LLaMA-2-7B"], resume=path)
    assert measured == [1, 4, 4, 1, 4]
