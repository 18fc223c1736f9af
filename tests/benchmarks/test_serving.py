"""The suite `vllm`, as far as it needs neither a GPU nor vLLM: its rule, its rows, when a reading is void."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import serving, serving_engine
from benchmarks.serving import part, require_steady, rows, rows_of
from benchmarks.serving_engine import BASELINE, VARIANTS, Reading, Rule, read_engine
from ptxlab import gpu
from ptxlab.bench.record import Row
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.llm.model import Config

RUN = subprocess.run
CEILINGS: Any = SimpleNamespace(read_tbps=4.0)
FP8 = Reading((24.0, 23.0), {1: (3.5, 3.4), 64: (12.0, 11.8)}, 500_000, 80.0)
FASTER = Reading((11.5, 12.0), {1: (1.9,), 64: (5.8, 5.7)}, 950_000, 90.0)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Make engines up, and return which of them were measured."""
    measured: list[tuple[str, str]] = []

    def measure(model: str, name: str) -> Reading:
        measured.append((model, name))
        return FP8 if name == BASELINE else FASTER

    monkeypatch.setattr(serving, "measure", measure)
    monkeypatch.setattr(gpu, "free_pool", lambda: None)
    return measured


def all_rows(only: list[str], done: list[Row]) -> list[Row]:
    return [*rows((), CEILINGS, lambda label: None, only, done)]


def test_a_step_is_the_difference_of_two_runs() -> None:
    """The engine takes 2 s of prefill per prompt and 10 ms a step, 20 for more than 64."""
    calls: list[tuple[int, int]] = []

    def took(prompts: int, new: int) -> float:
        calls.append((prompts, new))
        return 2.0 * prompts + new * (0.02 if prompts > 64 else 0.01)

    reading = read_engine(took, Rule(), cache_tokens=64 * (1024 + 384), load_seconds=5.0)
    assert reading.step_ms == {1: pytest.approx((10.0, 10.0)), 64: pytest.approx((10.0, 10.0))}  # 256 do not fit
    assert reading.seconds == pytest.approx((512 + 10.24,) * 2) and reading.load_seconds == 5.0
    step_calls = [(B, n) for B in (1, 64) for n in (128, 384) * 2]
    assert calls == [(8, 16), (64, 16), (256, 512), *step_calls, (256, 512)]


def test_what_would_end_late_is_not_begun() -> None:
    spent = iter([False, True, True, True])
    reading = read_engine(
        lambda prompts, new: 1.0 * new, Rule(), cache_tokens=1 << 20, is_late=lambda: next(spent, True)
    )
    assert len(reading.seconds) == 1 and {batch: len(ms) for batch, ms in reading.step_ms.items()} == {1: 1}


def test_rows_stand_beside_fp8_of_the_same_call(engines: list[tuple[str, str]]) -> None:
    measured = all_rows([], [])
    assert engines == [("7B", "fp8"), ("7B", "ptxlab")]
    assert [(row.kernel, row.measure) for row in measured if row.measure == "serving"] == [
        ("LLaMA-2-7B in vLLM, fp8", "serving"), ("LLaMA-2-7B in vLLM, ptxlab", "serving")
    ]  # fmt: skip
    ours = measured[3]
    assert ours.sizes == {"prompts": 256, "tokens": 1024, "new": 512}
    assert (ours.time_us, ours.slowest_us, ours.peers) == (11.5e6, 12e6, {"fp8": 23e6})
    assert ours.rate == pytest.approx(256 * 512 / 11.5) and ours.rate_unit == "tokens/s"
    assert ours.more["over_fp8"] == pytest.approx(2.0) and ours.more["cache_over_fp8"] == pytest.approx(1.9)
    step = measured[5]
    assert (step.sizes["B"], step.time_us, step.peers) == (64, 5.7e3, {"fp8": 11.8e3})
    assert step.rate == pytest.approx(64 / 5.7e-3) and 0 < step.fraction < 1


def test_bytes_of_a_step_are_weights_head_and_cache() -> None:
    config = Config.named("LLaMA-2-7B")
    fp8 = next(rows_of("7B", "fp8", Reading((1.0,), {1: (1.0,)}), FP8, CEILINGS)), 0
    weights = config.layers * sum(N * K for N, K in config.matrices.values())
    head, cache = 2 * config.vocabulary * config.hidden, 2 * config.layers * 4096 * (1024 + 256) * 256
    assert fp8[0].bytes == 512 * (weights + head + cache) and fp8[0].floor_us == fp8[0].bytes / 4e6


def test_another_call_goes_on_and_keeps_what_is_there(engines: list[tuple[str, str]]) -> None:
    first = all_rows([], [])
    resumed_rows = all_rows(["int4", "head8"], first)
    assert engines == [("7B", "fp8"), ("7B", "ptxlab"), ("7B", "fp8"), ("7B", "head8"), ("7B", "int4")]
    assert (
        resumed_rows[: len(first)] == first
        and len(resumed_rows) == 4 * 3
        and len({row.key for row in resumed_rows}) == len(resumed_rows)
    )
    assert all_rows(["int4"], resumed_rows) == resumed_rows and len(engines) == 5  # nothing is left to measure


def test_a_reading_is_void_where_fp8_has_changed(engines: list[tuple[str, str]]) -> None:
    done = all_rows([], [])
    require_steady("7B", Reading((23.6, 24.0)), done)
    require_steady("8B", Reading((40.0,)), done)  # another model
    for seconds in (23.8, 22.2):
        with pytest.raises(
            BenchmarkError, match=r"LLaMA-2-7B: void: FP8 differs by 3.[56]% between its calls, more than 3%"
        ):
            require_steady("7B", Reading((seconds,)), done)


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        ([], [("7B", "ptxlab")]),
        (["8B"], [("8B", "ptxlab")]),
        (["kv8", "70B", "ptxlab"], [("70B", "ptxlab"), ("70B", "kv8")]),
    ],
)
def test_words_name_models_and_variants(words: list[str], pairs: list[tuple[str, str]]) -> None:
    assert part(words) == pairs
    assert serving.SUITE.record_name(words) == "vllm"


@pytest.mark.parametrize("installed", [False, True])
def test_an_engine_takes_flashinfers_sampler_only_where_it_is(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_engine, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(serving_engine.os, "environ", {})
    serving_engine.prepare(tmp_path, "7B", Rule())
    variables = serving_engine.os.environ
    assert variables.get("VLLM_USE_FLASHINFER_SAMPLER") == (None if installed else "0")
    assert variables["HF_HUB_OFFLINE"] == "1" and (tmp_path / "config.json").exists()


def test_what_failed_is_the_raised_error_though_warnings_follow() -> None:
    raised = "ptxlab.errors.BenchmarkError: made 3 tokens instead of 4"
    of_engine = "(EngineCore) ERROR 11-30 core.py: ValueError: no room"
    later = ["[rank0]:[W1130] Warning: destroy_process_group() was not called before program exit", ""]
    assert serving_engine.failure_of(["INFO: ready", "Traceback:", raised, *later]) == raised
    assert serving_engine.failure_of([of_engine, "RuntimeError: the engine failed", *later]) == of_engine
    assert serving_engine.failure_of(["Killed", ""]) == "Killed"


@pytest.mark.parametrize("word", ["fp8", "13B"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"only: must be of 7B, 8B, 70B, ptxlab, kv8, head8, int4, arrivals, profile \(got"
    ):
        part([word])


def test_70b_has_a_rule_of_its_own(engines: list[tuple[str, str]]) -> None:
    serving_rows = [row for row in all_rows(["70B"], []) if row.measure == "serving"]
    assert [row.sizes for row in serving_rows] == 2 * [{"prompts": 64, "tokens": 1024, "new": 128}]


@pytest.mark.parametrize("name", VARIANTS)
def test_an_engine_is_asked_by_arguments_that_vllm_has(tmp_path: Path, name: str) -> None:
    serving_engine.write_model(tmp_path, "8B", Rule())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["eos_token_id"] == 2
    assert Config.from_json(tmp_path / "config.json").layers == 32
    arguments = serving_engine.engine_arguments(tmp_path, name, Rule())
    assert arguments["max_model_len"] == 1024 + 512 + 64 and arguments["quantization"] in ("fp8", "ptxlab")


def child(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run another program in place of a variant; its last argument is the folder."""
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: RUN([sys.executable, "-c", program, command[-1]], **how)
    )


def test_a_process_hands_over_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(asdict(FP8))
    child(monkeypatch, f"import sys, pathlib; pathlib.Path(sys.argv[1], 'reading.json').write_text({text!r})")
    assert serving_engine.measure("7B", "fp8") == FP8


def test_a_process_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "raise RuntimeError('no kernel image')")
    with pytest.raises(BenchmarkError, match=r"^vllm, LLaMA-2-7B, ptxlab: RuntimeError: no kernel image$"):
        serving_engine.measure("7B", "ptxlab")
    of_engine = "(EngineCore pid=9) ERROR [core.py:1330] ModuleNotFoundError: No module named 'flashinfer'"
    child(monkeypatch, f"print({of_engine!r}); raise RuntimeError('Engine core initialization failed.')")
    with pytest.raises(BenchmarkError, match=r"\[core.py:1330\] ModuleNotFoundError: No module named 'flashinfer'$"):
        serving_engine.measure("7B", "ptxlab")
    child(monkeypatch, "pass")
    with pytest.raises(BenchmarkError, match="no word"):
        serving_engine.measure("7B", "ptxlab")
