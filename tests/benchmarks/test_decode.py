"""The suite `decode` on a GPU made of the emulator: a tiny whole model, its steps, its rules, what is recorded."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import decode as models
from benchmarks.layer import decoder
from benchmarks.peers_layer import MixTime
from ptxlab import bench, gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.llm.model import Config, KernelRunner, LayerWeights
from ptxlab.llm.model.memory import layer_bytes
from ptxlab.lowbit.bench.attention import problem as attention_problem
from ptxlab.lowbit.layout import page_bytes
from ptxlab.runtime.timing import Measured
from tests.support.emulated_gpu import _measure

TINY = Config(hidden=128, ffn=128, heads=1, kv_heads=1, head_dim=128, layers=1, vocabulary=600, name="tiny")
CEILINGS = Ceilings(4.6, 4.2)


@pytest.fixture
def tiny_gpu(emulated_gpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Emulate a GPU for prompts of 4 tokens and 2 behind each; every call is made once and takes 10 µs."""

    def call_times(call: Callable[[], Any], repeats: int, warm_up: int) -> list[float]:
        call()
        return [10.0, 12.0]

    emulated_gpu.setattr(gpu, "why_not", lambda *_, **__: "a GPU made of the emulator")
    emulated_gpu.setattr(gpu, "device_info", lambda: SimpleNamespace(sms=2, memory_bytes=141 * 10**9, slug="h200"))
    emulated_gpu.setattr(gpu, "call_times", call_times, raising=False)
    emulated_gpu.setattr(gpu, "synchronize", lambda: None)
    emulated_gpu.setattr(gpu, "allocating_elsewhere", lambda nbytes: contextlib.nullcontext())
    emulated_gpu.setattr(attention_problem, "_RANDOM", 1 << 16)
    clock = SimpleNamespace(start=lambda: None, stop=lambda: None, mhz=lambda: 1900.0)
    emulated_gpu.setattr(models, "Clock", lambda: clock)
    emulated_gpu.setattr(models, "measure", _measure)
    emulated_gpu.setattr(models, "KernelRunner", partial(KernelRunner, backend="emulator"))
    emulated_gpu.setattr(gpu, "card_id", lambda: "GPU-0")
    emulated_gpu.setattr(models, "first_token_times", lambda *_: ([1.0, 3.0], [10.0, 11.0]))
    for name, length in {"PROMPT": 4, "NEW_TOKENS": 2, "MEAN": 5, "CHUNK": 8}.items():
        emulated_gpu.setattr(models, name, length)
    attention_problem.random_pages.cache_clear()
    yield emulated_gpu
    attention_problem.random_pages.cache_clear()


@pytest.mark.full
def test_a_whole_model_is_timed_taken_apart_and_checked(tiny_gpu: pytest.MonkeyPatch) -> None:
    runner = models.KernelRunner(models.random_model(TINY), 2, 6, chunk=8)
    figures = {"fp8_row/sdpa gemm_us": 12.0, "fp8_row/sdpa attention_us": 8.0}
    mixes = models.peer_row(TINY, models.MIX, 2, 20.0, {"fp8_row/sdpa": 20.0}, figures)
    without = models.peer_row(TINY, models.WITHOUT, 2, 50.0)
    row = models.decode_row(runner, 2, CEILINGS, {peer.kernel: peer for peer in (mixes, without)})
    assert (row.time_us, row.fastest_us, row.slowest_us, row.more["head_us"]) == (11.0, 10.0, 12.0, 11.0)
    assert row.rate == pytest.approx(2 / 11e-6) and row.sizes == models.sizes_of(TINY, 2, 4)
    assert row.checked.endswith("bit for bit, and finite")
    assert row.peers == {"fp8_row/sdpa": 31.0, "without": 50.0}
    assert (row.more["gemm_us"], row.more["attention_us"], row.more["others_us"]) == (40.0, 10.0, 50.0)
    assert row.more["fp8_row/sdpa attention_us"] == 8.0 and row.more["gaps_us"] == 11.0 - 111.0
    assert (row.more["head_int8_us"], row.more["head_invariant_us"]) == (11.0, 11.0)
    floors = {name for name in row.more if name.startswith("floor ")}
    assert len(floors) == 6 and row.floor_us == pytest.approx(sum(row.more[name] for name in floors))
    assert 0 < row.fraction == row.floor_us / row.time_us and row.limit == "sum of its operations"

    run = models.time_rule(runner, 2)
    rule_row = models.generate_row(TINY, 2, 80, run, {"fp8_row/sdpa": (100.0, 3)})
    assert rule_row.rate == pytest.approx(4e6 / rule_row.time_us) and rule_row.sizes["L"] == 80
    assert rule_row.more["prefill_us"] + rule_row.more["decode_us"] == pytest.approx(rule_row.time_us)
    assert rule_row.more["fp8_row/sdpa tokens_per_second"] == pytest.approx(3 * 2 / 100e-6)
    assert rule_row.peers == {"fp8_row/sdpa": pytest.approx(100.0 * 2 / 3)}, "its batch is 3, ours 2"
    assert row.key == models.row_key(TINY, models.MEASURE, 2, 4)


def test_a_row_is_what_was_measured() -> None:
    """The floor is that of all its operations, and times are of the median."""
    work = [models.Work("gemm down", 46_000_000, 0), models.Work("head", 92_000_000, 7)]
    alone = decoder.Alone(
        {"a": 1.0, "b": 2.0, "c": 4.0, "d": 0.5}, {"a": "gemm", "b": "attention", "c": "gemm", "d": "others"}
    )
    config = replace(TINY, layers=3)
    measured = Measured(us=60.0, fastest=40.0, slowest=90.0, sm_mhz=1755.0)
    row = models.row_at(config, 8, measured, work, alone, 16.0, CEILINGS, "yes", {"peer": 5.0}, {"power_w": 300.0})
    assert (row.time_us, row.fastest_us, row.slowest_us, row.sm_mhz) == (60.0, 40.0, 90.0, 1755.0)
    assert (row.floor_us, row.fraction) == (pytest.approx(30.0), pytest.approx(0.5))
    assert (row.bytes, row.operations, row.rate) == (138_000_000, 7, pytest.approx(8 / 60e-6))
    parts = {"gemm_us": 15.0, "attention_us": 6.0, "others_us": 1.5, "head_us": 16.0, "gaps_us": 21.5}
    floors = {"floor gemm down": pytest.approx(10.0), "floor head": pytest.approx(20.0)}
    assert row.more == {**parts, **floors, **alone.us, "power_w": 300.0} and row.peers == {"peer": 5.0}


def test_work_of_a_step() -> None:
    """Attention multiplies every query by every key, and the weights by every value, of its head."""
    config = replace(TINY, heads=2, hidden=256, layers=3)
    weights = LayerWeights.random(config)
    work = {part.name: part for part in models.model_work(config, weights, 4, 50)}
    attention = 50 * 3 * 2 * page_bytes("kv4", 64, 128) // 64, 4 * 3 * 50 * 2 * 128
    assert (work["attention"].nbytes, work["attention"].operations) == attention
    assert (work["head"].nbytes, work["head"].operations) == (2 * 600 * 256, 2 * 4 * 600 * 256)
    assert (work["gemm down"].nbytes, work["gemm down"].operations) == (3 * weights.down.nbytes, 2 * 3 * 4 * 256 * 128)


def test_times_of_mixes_are_of_all_layers() -> None:
    times = {"fp16": MixTime(layer=5.0, without_attention=4.0, gemms=3.0), "fp8": MixTime(4.0, 2.0, 1.5)}
    row = models.mix_row(replace(TINY, layers=3), 8, times)
    assert row.time_us == 12.0 and row.peers == {"fp16": 15.0, "fp8": 12.0}
    gemms = {"fp16 gemm_us": 9.0, "fp8 gemm_us": 4.5}
    assert row.more == {**gemms, "fp16 attention_us": 3.0, "fp8 attention_us": 6.0}
    assert (row.sm_mhz, row.bytes, row.operations) == (0.0, 0, 0), "not looked at"


@pytest.mark.full
def test_nothing_is_captured_while_qserves_rule_is_timed(tiny_gpu: pytest.MonkeyPatch) -> None:
    runner, launched = models.KernelRunner(models.random_model(TINY), 3, 6, chunk=8), []

    def captured_sizes() -> tuple[set[int], set[int]]:
        return {*runner._decode_steps}, {*runner._prompt_steps}

    clock = SimpleNamespace(start=lambda: launched.append(captured_sizes()), stop=lambda: None, mhz=lambda: 1900.0)
    tiny_gpu.setattr(models, "Clock", lambda: clock)
    models.time_rule(runner, 3)
    assert launched == [captured_sizes()] == [({3}, {4, 8})]
    assert runner.lengths.tolist() == [5, 5, 5] and len(runner.page_pool.free) == 0


def test_steady_sequences_have_pages_in_any_order(tiny_gpu: pytest.MonkeyPatch) -> None:
    """A server that has run for a while has no sequence whose pages are neighbours."""
    runner = models.KernelRunner(models.random_model(TINY), 8, 6, chunk=8)
    models.SteadyBatch(runner, 8)
    pages = runner.table[:, 0].tolist()
    assert sorted(pages) == [*range(8)] != pages and not runner.page_pool.free


def test_steady_sequences_begin_anew_and_a_wrong_graph_is_found(tiny_gpu: pytest.MonkeyPatch) -> None:
    runner = models.KernelRunner(models.random_model(TINY), 2, 6, chunk=8)
    steady = models.SteadyBatch(runner, 2)
    assert sorted(runner.lengths.tolist()) == [3, 4] and steady.mean == 4.5
    tiny_gpu.setattr(runner, "decode", lambda tokens, at: advance_lengths(runner, at))
    seen = []
    for _ in range(3):
        steady.step()
        seen.append(sorted(runner.lengths.tolist()))
    assert seen == [[4, 5], [4, 5], [4, 5]]
    counter = iter(range(9))
    tiny_gpu.setattr(runner, "decode", lambda tokens, at: advance_lengths(runner, at) + next(counter))
    with pytest.raises(BenchmarkError, match="tiny, batch 2: other bits than its launches one by one"):
        steady.check()


def advance_lengths(runner: KernelRunner, at: list[int]) -> Any:
    runner.lengths[at] += 1
    return np.zeros((len(at), 600), np.float16)


def test_a_random_model_has_layers_in_places_of_their_own(tiny_gpu: pytest.MonkeyPatch) -> None:
    """Otherwise a step finds the weights of all layers but the first in the L2."""
    layers = models.random_model(replace(TINY, layers=3)).layers
    buffers = [[layer.down.buffers["strips"], layer.qkv.buffers["strips"], layer.input_norm] for layer in layers]
    for first, second in combinations(buffers, 2):
        assert all(np.array_equal(a, b) and not np.shares_memory(a, b) for a, b in zip(first, second, strict=True))
    assert len(layers) == 3


class Steps:
    """A runner that notes its calls; `token` is the likeliest of each step."""

    def __init__(self, batch: int, token: int = 1) -> None:
        self.batch, self.chunk, self.token, self.made = batch, 8, token, list[str]()
        self.config, self.lengths = TINY, np.zeros(batch, int)

    def release(self, b: int) -> None:
        self.lengths[b] = 0

    def extend(self, part: dict[int, Any]) -> Any:
        self.made.append(f"extend {[*part]}")
        for b, prompt in part.items():
            self.lengths[b] += len(prompt)
        return np.eye(999)[[self.token] * len(part)]

    def decode(self, tokens: Any, at: list[int]) -> Any:
        self.made.append(f"decode {tokens.tolist()}")
        self.lengths[at] += 1
        return np.eye(999)[[self.token] * len(at)]


@pytest.mark.parametrize(("watts", "mean"), [([100.0, 200.0], 150.0), ([], 0.0)])
def test_qserves_rule_is_timed_from_the_first_prompt_to_the_last_token(
    watts: list[float], mean: float, tiny_gpu: pytest.MonkeyPatch
) -> None:
    """Make all launches once ahead, and wait for the device at each time."""
    runner, seconds = Steps(3), iter([1.0, 1.5, 4.0])
    note = runner.made.append
    clock = SimpleNamespace(start=lambda: note("start"), stop=lambda: note("stop"), mhz=lambda: 1755.0)
    tiny_gpu.setattr(models, "Clock", lambda: clock)
    tiny_gpu.setattr(models, "power", lambda: contextlib.nullcontext(watts))
    tiny_gpu.setattr(gpu, "synchronize", lambda: note("wait"))
    tiny_gpu.setattr(models.time, "perf_counter", lambda: [note("time"), next(seconds)][1])
    assert models.time_rule(runner, 3) == models.RuleTimes(0.5e6, 2.5e6, 1755.0, mean)  # type: ignore[arg-type]
    prompts = ["extend [0, 1]", "extend [2]"]
    warm_up, timed = [*prompts, "decode [0, 0, 0]"], [*prompts, "wait", "time", "decode [1, 1, 1]", "wait", "time"]
    assert runner.made == [*warm_up, "start", "wait", "time", *timed, "stop"]
    assert runner.lengths.tolist() == [5, 5, 5]


def test_power_is_what_nvidia_smi_says_while_the_block_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "card_id", lambda: "GPU-7")
    monkeypatch.setenv("PATH", str(tmp_path))
    with models.power() as watts:
        pass
    assert watts == []  # there is no such command
    script, done = tmp_path / "nvidia-smi", tmp_path / "done"
    script.write_text(f"#!/bin/sh\nprintf '100.5\\n[N/A]\\n200\\n'\necho $* > {done}\nwhile :; do :; done\n")
    script.chmod(0o755)
    with models.power() as watts:
        while not (done.exists() and done.read_text()):
            time.sleep(0.001)
        assert done.read_text().startswith("-i GPU-7 --query-gpu=power.draw ")
    assert watts == [100.5, 200.0]


@pytest.mark.parametrize(("token", "lost"), [(600, 0), (1, 1)])
def test_tokens_outside_the_vocabulary_and_lost_ones_are_no_result(
    token: int, lost: int, tiny_gpu: pytest.MonkeyPatch
) -> None:
    runner = Steps(3, token)
    decode = runner.decode

    def losing(tokens: Any, at: list[int]) -> Any:
        logits = decode(tokens, at)
        runner.lengths[2] -= lost
        return logits

    tiny_gpu.setattr(runner, "decode", losing)
    with pytest.raises(BenchmarkError, match="generate, tiny: 3 sequences did not come to 6 tokens"):
        models.time_rule(runner, 3)  # type: ignore[arg-type]


@pytest.mark.full
def test_ours_with_qserves_gemm(tiny_gpu: pytest.MonkeyPatch) -> None:
    (row,) = models.qoq_sm80_rows(TINY, (1,), {}, lambda _: None)
    assert (
        row.time_us == 11.0
        and row.measure == "beside"
        and row.key == models.row_key(TINY, models.BESIDE, 1, 4, "without")
    )


@pytest.mark.full
@pytest.mark.parametrize("system", ["w4a4", "w4ax"])
def test_steps_in_four_bits(tiny_gpu: pytest.MonkeyPatch, system: str) -> None:
    """The rows are by batch, of batches that fit the card; known ones are not measured again."""
    config = replace(TINY, hidden=256, ffn=384, heads=2)
    tiny_gpu.setattr(models, "largest_batch", lambda *_, weights, inputs, **__: 2)
    recorded = models.plain_row(
        system, models.FOUR_BITS, models.sizes_of(config, 1, 4), 5.0, 1.0, sm_mhz=0.0, checked=""
    )
    rows = [*models.system_rows(config, system, (1, 2, 4), {recorded.key: recorded}, CEILINGS, lambda _: None)]
    assert rows[0] is recorded and [row.sizes["B"] for row in rows] == [1, 2]
    row = rows[1]
    assert (row.kernel, row.time_us, row.fastest_us, row.slowest_us) == (system, 11.0, 10.0, 12.0)
    assert row.rate == pytest.approx(2 / 11e-6) and row.rate_unit == "tokens/s"
    assert row.checked.endswith("bit for bit, and finite") and row.sm_mhz == 1900.0
    assert 0 < row.floor_us == pytest.approx(row.fraction * 11.0) and row.bytes > config.layers * 256 * 256 // 2
    assert row.key == models.row_key(config, models.FOUR_BITS, 2, 4, system)


@pytest.mark.full
def test_steps_and_prompts_with_weights_per_channel(tiny_gpu: pytest.MonkeyPatch) -> None:
    """Measure QServe's A100 setting: with our GEMM steps and the rule at each budget, with qoq_channel_sm80 steps."""
    tiny_gpu.setattr(models, "largest_batch", lambda config, gigabytes, tokens, **_: 1 if gigabytes < 100 else 2)
    progress: list[str] = []
    rows = [*models.system_rows(TINY, "channel", (1, 2, 4), {}, CEILINGS, progress.append)]
    assert progress == [f"tiny{text}: channel" for text in (", batch 1", ", batch 2")] + [
        f"tiny: {B} prompts, channel" for B in (1, 2)
    ]
    places = [(row.measure, row.sizes["B"], row.sizes["L"]) for row in rows]
    rule = [("generate per channel", 1, 80), ("generate per channel", 2, 141)]
    assert places == [("per channel", 1, 4), ("per channel", 2, 4), *rule]
    assert {row.kernel for row in rows} == {"channel"} and not any(row.face or row.peers for row in rows)
    assert rows[3].key == models.row_key(TINY, models.CHANNEL_RULE, 2, 141, "channel")
    assert rows[0].checked.endswith("bit for bit, and finite") and rows[3].rate_unit == "tokens/s"
    recorded = {row.key: row for row in rows}
    again = [*models.system_rows(TINY, "channel", (1, 2), recorded, CEILINGS, lambda _: None)]
    assert all(row is old for row, old in zip(again, rows, strict=True))


@pytest.mark.full
def test_steps_with_the_rewrite_of_qserves_channel_gemm(tiny_gpu: pytest.MonkeyPatch) -> None:
    launched_names: list[str] = []
    tiny_gpu.setattr(
        models, "random_model", lambda *of, model=models.random_model: launched_names.extend(of[1:]) or model(*of)
    )
    (row,) = models.system_rows(TINY, "channel_sm80", (1,), {}, CEILINGS, lambda _: None)
    assert launched_names[:2] == ["qoq_channel", "qserve"]
    assert (row.kernel, row.measure) == ("channel_sm80", "per channel")


@pytest.mark.full
def test_steps_with_liquidserves_groups_and_static_cache(tiny_gpu: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    launch = KernelRunner.decode

    def decode(runner: KernelRunner, tokens: Any, at: Any = None) -> Any:
        seen.append((runner.model.layers[0].qkv.group, runner.caches[0].scheme))
        return launch(runner, tokens, at)

    tiny_gpu.setattr(KernelRunner, "decode", decode)
    (row,) = models.system_rows(TINY, "liquid", (2,), {}, CEILINGS, lambda _: None)
    assert {*seen} == {(64, "kv8_channel")} and (row.kernel, row.measure) == ("liquid", "static cache")
    plain = models.model_work(TINY, models.random_model(TINY).layers[0], 2, 10)
    static = models.model_work(TINY, models.random_model(TINY, cache="kv8_channel").layers[0], 2, 10)
    by_name = [{work.name: work.nbytes for work in of} for of in (plain, static)]
    assert by_name[1]["attention"] == pytest.approx(by_name[0]["attention"] * 128 / 68, rel=0.02)


def test_experts_run_per_channel_alone(tiny_gpu: pytest.MonkeyPatch) -> None:
    """Atom's, COMET's and QServe's packing have no kernel for experts."""
    pairs: list[tuple[str, str]] = []
    tiny_gpu.setattr(models, "system_rows", lambda config, system, *_: pairs.append((config.name, system)) or [])
    list(models.rows([], CEILINGS, lambda _: None, ["Mixtral-8x7B", "LLaMA-2-7B", "w4a4", "channel", "channel_sm80"]))
    dense = [("LLaMA-2-7B", system) for system in ("w4a4", "channel", "channel_sm80")]
    assert pairs == [("Mixtral-8x7B", "channel"), *dense]


def test_what_is_compiled_side_by_side_is_what_runs(tiny_gpu: pytest.MonkeyPatch) -> None:
    """The compile step runs ahead of the measuring, and reports no failure."""
    launched_sizes: list[tuple[int, ...]] = []
    operations = KernelRunner.operations
    tiny_gpu.setattr(
        KernelRunner, "operations", lambda runner, rows: launched_sizes.append((rows,)) or operations(runner, rows)
    )
    tiny_gpu.setattr(KernelRunner, "extend", lambda runner, new: launched_sizes.append((len(new[0]), runner.chunk)))
    tiny_gpu.setattr(models, "time_other_heads", lambda runner, B: launched_sizes.append((runner.batch, B)))
    models._warm(TINY, "lqq", "strips", (1, 3))
    models._warm(TINY, "qoq", "qserve", (1, 3))
    assert launched_sizes == [(1,), (3,), (5, 8), (3, 1), (3, 3), (1,), (3,)]


@pytest.mark.full
def test_experts_run_as_a_whole_model_too(tiny_gpu: pytest.MonkeyPatch) -> None:
    config = replace(TINY, experts=2, chosen_experts=1)
    runner = models.KernelRunner(models.random_model(config), 1, 6, chunk=1)
    assert models.SteadyBatch(runner, 1).check().endswith("finite")
    work = {operation.name: operation for operation in models.model_work(config, LayerWeights.random(config), 1, 5)}
    assert work["gemm down"].nbytes == pytest.approx(runner.model.layers[0].down.nbytes / 2, abs=1)


@pytest.mark.parametrize("config", models.MODELS, ids=lambda config: config.name)
def test_what_is_measured_of_a_model(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(memory_bytes=141 * 10**9))
    plan = models.ModelPlan.of(config, models.ModelSelection())
    assert set(plan.budgets) == {80, 141} and plan.budgets[80] <= plan.budgets[141] <= 256
    assert {1, 4, 16} < set(plan.batches) and max(plan.batches) == plan.budgets[141]
    assert models.config_of(models.sizes_of(config, 4)) is config
    fp16, fp8 = (models.mix_batches(config, ("fp16", "fp8_row"), 80)[f"{n}/sdpa"] for n in ("fp16", "fp8_row"))
    assert 0 <= fp16 <= fp8 <= 256 and (fp16 > 0) == (config.name not in ("LLaMA-2-70B", "Mixtral-8x7B"))


@pytest.mark.parametrize(("memory", "budgets"), [(48, [80]), (79, [80]), (80, [80]), (140, [80]), (141, [80, 141])])
def test_budgets_larger_than_the_card_are_not_measured(
    memory: int, budgets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest one is, of what the card has."""
    monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(memory_bytes=memory * 10**9))
    config = Config.named("LLaMA-2-7B")
    plan = models.ModelPlan.of(config, models.ModelSelection(batches=(1, 16, 10**6)))
    assert [*plan.budgets] == budgets and {1, 16} < {*plan.batches} == {1, 16, *plan.budgets.values()}
    room = models.largest_batch(config, min(80, memory), models.PROMPT + models.NEW_TOKENS, chunk=models.CHUNK)
    assert plan.budgets[80] == room


def test_nothing_is_measured_where_the_card_has_no_room_for_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(memory_bytes=6.1 * 10**9))
    assert models.ModelPlan.of(Config.named("LLaMA-2-7B"), models.ModelSelection()) == models.ModelPlan((), {})


def test_a_pool_has_pages_for_four_prompts_whose_first_token_is_timed(tiny_gpu: pytest.MonkeyPatch) -> None:
    runners: list[tuple[int, ...]] = []

    def first_token_times(runner: KernelRunner, *prompt: int) -> tuple[list[float], list[float]]:
        runners.append((runner.batch, runner.context, runner.chunk, runner.pages, *prompt))
        return [1.0], [2.0]

    tiny_gpu.setattr(models, "first_token_times", first_token_times)
    list(models.first_token_rows(TINY, {}, lambda _: None))
    assert runners == [(1, 2064, 8, 4 * 32, 2000, 29)]


@pytest.mark.parametrize("config", models.MODELS, ids=lambda config: config.name)
def test_ours_takes_its_share_of_eight_minutes(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and QServe's rule take at most 200 s on an H200.

    Our model is assumed to reach 0.6 of the floor, with gemm_w4a8_qoq_sm80 0.3.
    """
    monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(memory_bytes=150 * 10**9))
    plan = models.ModelPlan.of(config, models.ModelSelection())
    chosen = config.chosen_experts / max(1, config.experts) or 1
    products = config.layers * sum(N * K for N, K in config.matrices.values())  # of a token
    page = config.layers * 2 * config.kv_heads * page_bytes("kv4", 64, 128)

    def floor(B: int) -> float:
        weights = config.layers * layer_bytes(config) * min(1, B * chosen)
        read = weights + B * models.MEAN / 64 * page + 2 * config.vocabulary * config.hidden
        return max(read / 4.5e12, 2 * B * products * max(1, config.chosen_experts) / 1920e12)

    extra_steps = 9 + 16  # warm-up, the check, operations alone
    steps = sum((models.STEPS + extra_steps) * floor(B) for B in plan.batches)
    prompts = {B: 2 * B * 1024 * products * max(1, config.chosen_experts) / 1500e12 for B in plan.budgets.values()}
    rule = sum(511 * floor(B) + prompts[B] for B in prompts)
    assert (steps + rule) / 0.6 + 73 * sum(map(floor, plan.batches)) / 0.3 < 200


def test_mixes_are_composed_at_their_best_batch() -> None:
    config = Config.named("LLaMA-2-7B")
    mixes_us = {
        B: dict.fromkeys(("fp16/sdpa", "fp8_row/sdpa"), us) for B, us in ((16, 100.0), (64, 150.0), (256, 160.0))
    }
    rates = models.composed_rates(config, ("fp16", "fp8_row"), 80, mixes_us, {"fp16": 3.0}, {16: 70.0, 60: 50.0})
    assert models.mix_batches(config, ("fp16",), 80)["fp16/sdpa"] == 80  # 256 do not fit
    assert rates == {
        "fp16/sdpa": (64 * 3.0 + 512 * (150.0 + 50.0), 64)
    }  # prompts of the other were not measured; 60 is near


def test_each_model_gets_what_was_asked_for_and_what_there_is(tiny_gpu: pytest.MonkeyPatch) -> None:
    calls, progress, row = list[tuple[Any, ...]](), print, a_row(4)
    tiny_gpu.setattr(models, "model_rows", lambda *arguments: calls.append(arguments) or [])
    assert [*models.rows([], CEILINGS, progress, ["LLaMA-2-7B", "Mistral-7B"], [row])] == []
    part = models.part(["LLaMA-2-7B", "Mistral-7B"])
    assert calls == [
        (config, part, models.ModelPlan.of(config, part), {row.key: row}, CEILINGS, progress)
        for config in map(Config.named, ("LLaMA-2-7B", "Mistral-7B"))
    ]


class CountedSuite:
    """A model's measuring, of stand-ins that note what they are asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.compiled: list[Any] = []
        self.progress: list[str] = []
        self.config = Config.named("LLaMA-2-7B")
        self.plan = models.ModelPlan((1, 64), {80: 64, 141: 64})
        self.selection = models.ModelSelection(models=(self.config,), mixes=("fp16", "fp8_row"))
        patch.setattr(gpu, "allocating_elsewhere", lambda nbytes: contextlib.nullcontext())
        patch.setattr(gpu, "call_times", lambda step, **_: [self.note("without"), 1.0])
        patch.setattr(models, "SteadyBatch", lambda runner, B: SimpleNamespace(step=None))
        patch.setattr(models, "random_model", lambda *_: None)
        patch.setattr(gpu, "device_info", lambda: SimpleNamespace(memory_bytes=141 * 10**9))
        patch.setattr(models, "KernelRunner", lambda *_, **__: self.note("runner"))
        patch.setattr(models, "run_in_processes", self.compile)
        patch.setattr(models.peers_layer, "compile_jobs", lambda *arguments: [arguments])
        patch.setattr(models.peers_layer, "mixes", self.mixes)
        patch.setattr(models.peers_layer, "prefills", self.prefills)
        patch.setattr(models, "decode_row", self.decode_row)
        patch.setattr(models, "first_token_times", lambda *_: ([1.0, 3.0], [10.0, 11.0]))
        patch.setattr(models, "time_rule", lambda runner, B: models.RuleTimes(self.note(("rule", B)), 2.0, 1900.0, 0.0))

    def note(self, event: Any) -> float:
        self.events.append(event)
        return 3.0

    def compile(self, jobs: list[Any]) -> None:
        self.note("compiling")
        self.compiled = jobs

    def mixes(self, config: Config, batches: Any, names: Any, progress: Any, length: int, extra_batches: Any) -> Any:
        names_by_batch = {B: [f"{name}/sdpa" for name in names] for B in batches}
        for name, extra in extra_batches.items():
            for B in extra:
                names_by_batch.setdefault(B, []).append(name)
        self.note(("mixes", (*names_by_batch,)))
        for B in sorted(names_by_batch, reverse=True):
            yield B, {name: MixTime(2.0 * B, 1.0, 1.0) for name in names_by_batch[B]}
            self.note(("after", B))

    def prefills(self, config: Config, names: Any, length: int, progress: Any) -> Any:
        self.note("prompts")
        return dict.fromkeys(names, MixTime(5.0, 4.0, 3.0))

    def decode_row(self, runner: Any, B: int, ceilings: Any, peer_rows: Any) -> Row:
        self.note(("steps", B))
        return replace(a_row(B), peers={name: row.time_us for name, row in peer_rows.items()})

    def rows(self, recorded_rows: list[Row]) -> list[Row]:
        self.events.clear()
        self.progress.clear()
        rows_by_key = {row.key: row for row in recorded_rows}
        return [*models.model_rows(self.config, self.selection, self.plan, rows_by_key, CEILINGS, self.progress.append)]


def test_a_model_goes_on_at_any_row_and_measures_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_suite = CountedSuite(monkeypatch)
    whole = counted_suite.rows([])
    steps = [f"LLaMA-2-7B, batch {B}" for B in (1, 64)]
    without = [f"{step}: ours with gemm_w4a8_qoq_sm80" for step in steps]
    preparation = ["LLaMA-2-7B: compiling", "LLaMA-2-7B: time to the first token"]
    assert counted_suite.progress == [*preparation, *without, *steps, "LLaMA-2-7B: 64 prompts"]
    assert counted_suite.compiled
    config, peers = counted_suite.config, counted_suite.compiled.pop()
    assert peers[0] == (config,) and peers[2:] == (("fp16", "fp8_row"), (4 * models.PROMPT,)), "four prompts at once"
    assert {scheme for _, (_, scheme, _, _) in counted_suite.compiled} == {"lqq", "qoq"}
    events = [event for event in counted_suite.events if event != "runner"]
    in_turn = [row.sizes["B"] for row in whole if row.kernel == "mixes" and row.measure == models.BESIDE]
    assert in_turn == sorted(in_turn, reverse=True) and len(in_turn) == 6
    assert [row.measure for row in whole[-4:]] == ["decode", "decode", "generate", "generate"]
    assert events[-3:] == [("steps", 1), ("steps", 64), ("rule", 64)], "one run for two budgets of one batch"
    peers_by_batch = {
        row.sizes["B"]: [*row.peers] for row in whole if row.kernel == "mixes" and row.measure == models.BESIDE
    }
    assert peers_by_batch.pop(1) == peers_by_batch.pop(64) == ["fp16/sdpa", "fp8_row/sdpa"]
    assert peers_by_batch == {80: ["fp16/sdpa"], 156: ["fp16/sdpa"], 88: ["fp8_row/sdpa"], 164: ["fp8_row/sdpa"]}
    (first,) = (row for row in whole if row.measure == models.FIRST_TOKEN)
    assert (first.time_us, first.fastest_us, first.slowest_us) == (2.0, 1.0, 3.0)
    assert first.rate == pytest.approx(2000 / 2e-6) and first.rate_unit == "tokens/s"
    assert first.sizes["L"] == 2000 and first.peers == {"nothing shared": 10.5}
    of_156 = 156 * 32 * 5.0 + 512 * (32 * 2.0 * 156 + 1.0)
    assert whole[-1].peers["fp16/sdpa"] == pytest.approx(of_156 * 64 / 156)
    for done in range(len(whole) + 1):
        assert counted_suite.rows(whole[:done]) == whole
        for row in whole[:done]:
            B = row.sizes["B"]
            assert ("steps", B) not in counted_suite.events or row.measure != models.MEASURE
            assert "prompts" not in counted_suite.events or row.measure != models.PROMPTS
            batches = [B for event in counted_suite.events if event[0] == "mixes" for B in event[1]]
            assert B not in batches or row.kernel != "mixes" or row.measure != models.BESIDE
        assert ("runner" in counted_suite.events) == (done < len(whole)), done
    assert counted_suite.events == []


def test_a_batch_of_mixes_is_a_row_before_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_suite = CountedSuite(monkeypatch)
    rows = models.mix_rows(counted_suite.config, counted_suite.selection, counted_suite.plan, {}, lambda _: None)
    assert next(rows).sizes["B"] == 164
    assert [event for event in counted_suite.events if event[0] == "after"] == []


def test_parts_of_the_suite_by_words() -> None:
    everything = models.part([])
    assert everything.models == models.MODELS and everything.without and len(everything.mixes) == 5
    selection = models.part(["LLaMA-2-7B", "B=16", "fp8_row"])
    assert [config.name for config in selection.models] == ["LLaMA-2-7B"] and selection.batches == (16,)
    assert selection.mixes == ("fp8_row",) and not selection.without
    four = models.part(["LLaMA-2-7B", "w4a4"])
    assert (four.systems, four.batches, four.models) == (("w4a4",), (8, 16, 32, 64, 128, 256), selection.models)
    assert models.part(["channel", "channel_sm80"]).systems == ("channel", "channel_sm80")
    assert models.part(["w4ax", "B=8"]).batches == (8,) and not everything.systems
    assert models.part(["alone"]).mixes == () and not models.part(["alone"]).without
    with pytest.raises(ArgumentError, match=r"only: one of LLaMA-30B, .* \(got GPT-2\)"):
        models.part(["GPT-2"])


def a_row(B: int) -> Row:
    alone_times = decoder.Alone({}, {})
    measured = models.Measured(10.0, 10.0, 10.0, 1900.0)
    work = [models.Work("head", 1, 1)]
    return models.row_at(models.MODELS[1], B, measured, work, alone_times, 1.0, CEILINGS, "made up", {}, {})


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a card and a commit that bench accepts for a measurement."""
    device = SimpleNamespace(name="H200", slug="h200", driver="1", sms=2, l2_bytes=1, memory_bytes=141 * 10**9)
    monkeypatch.setattr(gpu, "device_info", lambda: device)
    monkeypatch.setattr(bench, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(bench, "versions", lambda device: {})
    monkeypatch.setattr(gpu, "card_id", lambda: "GPU-1")
    monkeypatch.setenv("PTXLAB_COMMIT", "abc")


@pytest.mark.usefixtures("h200")
def test_a_run_goes_on_where_another_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[int] = []

    def rows(names: Any, ceilings: Any, progress: Any, only: Any = (), done: Any = ()) -> Any:
        for B in (1, 4):
            recorded_rows = [row for row in done if row.sizes["B"] == B]
            if not recorded_rows:
                measured.append(B)
                if len(measured) == 2:
                    raise KeyboardInterrupt
            yield recorded_rows[0] if recorded_rows else a_row(B)

    suite = replace(models.SUITE, rows=rows)
    path = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        bench.run_suite(suite, only=["LLaMA-2-7B"], resume=path)
    assert bench.load(path).invalid == "not finished" and len(bench.load(path).rows) == 1
    record = bench.run_suite(suite, only=["LLaMA-2-7B"], resume=path)
    assert measured == [1, 4, 4] and [row.sizes["B"] for row in record.rows] == [1, 4]
    assert record.suite == "decode/LLaMA-2-7B" and bench.default_path(record).name == "LLaMA-2-7B.json"
    assert record.device["name"] == "H200" and record.device["card"] == "GPU-1"
    bench.save(record, path)
    bench.run_suite(suite, only=["LLaMA-2-7B"], resume=path)
    assert measured == [1, 4, 4]
    monkeypatch.setenv("PTXLAB_COMMIT", "another")
    bench.run_suite(suite, only=["LLaMA-2-7B"], resume=path)
    assert measured == [1, 4, 4, 1, 4]
    monkeypatch.setenv("PTXLAB_COMMIT", "abc")
    bench.save(record, path)
    monkeypatch.setattr(gpu, "card_id", lambda: "GPU-2")
    bench.run_suite(suite, only=["LLaMA-2-7B"], resume=path)
    assert measured == [1, 4, 4, 1, 4, 1, 4], "another card of the same kind"


@pytest.mark.parametrize("difference", ["versions", "ceilings", "ceilings of a run that was stopped"])
@pytest.mark.usefixtures("h200")
def test_a_run_does_not_go_on_behind_another_that_does_not_count(
    difference: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other run's rows are of other versions, or of a card that was slower than it should be."""
    slow = replace(CEILINGS, read_tbps=3.0)
    ceilings, versions = [slow if "ceilings" in difference else CEILINGS, CEILINGS], [{"torch": "1"}, {"torch": "1"}]
    if difference == "versions":
        versions[1] = {"torch": "2"}
    monkeypatch.setattr(bench, "measure_ceilings", lambda: ceilings.pop(0))
    monkeypatch.setattr(bench, "versions", lambda device: versions.pop(0))
    recorded_counts: list[int] = []
    stops = [difference.endswith("stopped"), False]

    def rows(names: Any, ceilings: Any, progress: Any, only: Any = (), done: Any = ()) -> Any:
        recorded_counts.append(len(done))
        yield a_row(1)
        if stops.pop(0):
            raise KeyboardInterrupt

    suite = replace(models.SUITE, rows=rows)
    path = tmp_path / "r.json"
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            bench.save(bench.run_suite(suite, only=["LLaMA-2-7B"], resume=path), path)
    assert recorded_counts == [0, 0] and bench.load(path).invalid == ""


@pytest.mark.usefixtures("h200")
def test_a_run_that_is_stopped_again_keeps_the_rows_whose_turn_has_not_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = [[1, 4, 16], [1, 64]]  # of the run before; of the next one, which is stopped behind them

    def rows(names: Any, ceilings: Any, progress: Any, only: Any = (), done: Any = ()) -> Any:
        yield from map(a_row, batches[len(done) > 0])
        raise KeyboardInterrupt

    suite = replace(models.SUITE, rows=rows)
    path = tmp_path / "r.json"
    for kept_batches in ([1, 4, 16], [1, 64, 4, 16]):
        with pytest.raises(KeyboardInterrupt):
            bench.run_suite(suite, only=["LLaMA-2-7B"], resume=path)
        assert [row.sizes["B"] for row in bench.load(path).rows] == kept_batches


@pytest.mark.long(70)
@pytest.mark.gpu
def test_a_whole_model_is_timed_beside_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model is timed on a GPU as `bench decode` does it, and once more from its own rows.

    The test runs whoever else uses the GPU.
    """
    tiny = Config(hidden=512, ffn=768, heads=4, kv_heads=2, head_dim=128, layers=2, vocabulary=1003, name="tiny")
    monkeypatch.setattr(models, "STEPS", 16)
    selection = models.ModelSelection(models=(tiny,), mixes=("fp16",))
    plan, rows_by_key = models.ModelPlan((1, 4), {80: 4, 141: 4}), {}
    for row in models.model_rows(tiny, selection, plan, rows_by_key, CEILINGS, lambda _: None):
        rows_by_key[row.key] = row
    steps = [row for row in rows_by_key.values() if row.measure == models.MEASURE]
    assert [row.sizes["B"] for row in steps] == [1, 4] and all("bit for bit" in row.checked for row in steps)
    assert all(row.more[name] > 0 for row in steps for name in ("head_us", "head_int8_us", "head_invariant_us"))
    assert all("without" in row.peers for row in steps)
    assert sum(row.measure == models.GENERATE for row in rows_by_key.values()) == 2
    monkeypatch.setattr(models, "KernelRunner", lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.setattr(models, "run_in_processes", lambda _: None)
    again = models.model_rows(tiny, replace(selection, mixes=()), plan, rows_by_key, CEILINGS, lambda _: None)
    assert {row.key for row in again} <= {*rows_by_key}
