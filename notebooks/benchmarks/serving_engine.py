"""One engine of vLLM in a process of its own: how it serves a model, and what it is measured at.

A step: a batch makes `short` and then `long` tokens; the difference of both, in which prefill cancels, by the
difference in tokens.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import Config

MODELS = {"7B": "LLaMA-2-7B", "8B": "LLaMA-3-8B", "70B": "LLaMA-2-70B"}
OURS, BASELINE = "ptxlab", "fp8"
SECONDS = 285  # of a variant: two of them fit a call of ten minutes
_LAST_RUN = 70  # of these, kept for the run that has begun


@dataclass(frozen=True)
class Variant:
    """A way of serving a model: arguments of its engine, and the bits of weights and of a number in the cache."""

    engine: Mapping[str, Any]
    weight_bits: float
    cache_bits: float


VARIANTS = {
    BASELINE: Variant({"quantization": "fp8", "kv_cache_dtype": "fp8"}, 8, 8),
    OURS: Variant({"quantization": "ptxlab"}, 4.125, 4.25),
    "kv8": Variant({"quantization": "ptxlab", "kv_cache_dtype": "int8_per_token_head"}, 4.125, 8.25),
    "head8": Variant({"quantization": "ptxlab", "additional_config": {"ptxlab": {"head": "int8"}}}, 4.125, 4.25),
    "int4": Variant({"quantization": "fp8", "kv_cache_dtype": "int4_per_token_head"}, 8, 4.25),
}


@dataclass(frozen=True)
class Rule:
    """The work of an engine: prompts of `tokens` each and `new` ones; steps of each batch between two lengths."""

    prompts: int = 256
    tokens: int = 1024
    new: int = 512
    batches: tuple[int, ...] = (1, 64, 256)
    short: int = 128
    long: int = 384

    @property
    def context(self) -> int:
        """Tokens of a sequence at most."""
        return self.tokens + max(self.new, self.long) + 64


RULES = {"70B": Rule(prompts=64, new=128, batches=(1, 64))}  # others take the default


@dataclass(frozen=True)
class Reading:
    """Times of an engine.

    Attributes:
        seconds: of each run of all prompts.
        step_ms: by batch, of each pair of runs; a batch that the cache does not hold is left out.
        cache_tokens: that the cache holds.
        load_seconds: until the engine was ready.
    """

    seconds: tuple[float, ...]
    step_ms: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    cache_tokens: int = 0
    load_seconds: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> "Reading":
        """Read the file that a process has written."""
        fields = json.loads(text)
        steps = {int(batch): tuple(ms) for batch, ms in fields["step_ms"].items()}
        return cls(tuple(fields["seconds"]), steps, fields["cache_tokens"], fields["load_seconds"])


def measure(model: str, name: str) -> Reading:
    """Measure a variant in a new process. Raises BenchmarkError with the line that says why if it fails."""
    return Reading.from_json(run_process("benchmarks.serving_engine", model, name))


def run_process(module: str, model: str, name: str) -> str:
    """Run a module on a model, a variant and a folder, and return what it wrote there as `reading.json`.

    Raises BenchmarkError with the line that says why if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, model, name, folder]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 60, check=False)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"vllm, {MODELS[model]}, {name}: took more than {SECONDS + 60} s") from None
        path = Path(folder) / "reading.json"
        if process.returncode or not path.is_file():
            reason = failure_of(process.stdout.splitlines() + process.stderr.splitlines())
            raise BenchmarkError(f"vllm, {MODELS[model]}, {name}: {reason[:300]}")
        return path.read_text()


def failure_of(lines: Sequence[str]) -> str:
    """Return the line that says why vLLM failed.

    An engine runs in a process of its own, whose log has the cause; the process that asked says only that it failed.
    Warnings at its exit may follow the last line of a traceback.
    """
    nonblank = [line for line in lines if line.strip()]
    engine_errors = [line for line in nonblank if "ERROR" in line and "Error: " in line]
    raised = [line for line in nonblank if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return [*engine_errors[:1], *raised[::-1], *nonblank[::-1], "no word"][0]


def read_engine(
    time_run: Callable[[int, int], float],
    rule: Rule,
    *,
    cache_tokens: int,
    is_late: Callable[[], bool] = lambda: False,
    load_seconds: float = 0.0,
) -> Reading:
    """Measure an engine.

    Args:
        time_run: runs so many prompts with so many new tokens each, and returns the seconds.
        rule: what is asked.
        cache_tokens: that the cache holds; a batch that needs more is left out.
        is_late: whether too little time is left to begin another run.
        load_seconds: until the engine was ready.
    """
    time_run(8, 16)  # the first calls of a shape
    time_run(min(64, rule.prompts), 16)
    seconds, steps = [time_run(rule.prompts, rule.new)], dict[int, tuple[float, ...]]()
    for batch in rule.batches:
        if batch * (rule.tokens + rule.long) > cache_tokens:
            continue
        pairs: list[float] = []
        while len(pairs) < 2 and not is_late():
            short_seconds, long_seconds = time_run(batch, rule.short), time_run(batch, rule.long)
            pairs.append(1e3 * (long_seconds - short_seconds) / (rule.long - rule.short))
        if pairs:
            steps[batch] = tuple(pairs)
    if not is_late():
        seconds.append(time_run(rule.prompts, rule.new))
    return Reading(tuple(seconds), steps, cache_tokens, load_seconds)


def write_model(folder: Path, model: str, rule: Rule) -> None:
    """Write the config of a model for vLLM's `load_format=dummy`."""
    config = {
        **Config.named(MODELS[model]).to_json(),
        "max_position_embeddings": max(4096, rule.context),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def engine_arguments(folder: Path, name: str, rule: Rule) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for a variant."""
    return {
        "model": str(folder), "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16",
        "max_model_len": rule.context, "gpu_memory_utilization": 0.92, "max_num_seqs": max(256, rule.prompts),
        "enable_prefix_caching": False, "seed": 0, "disable_log_stats": True, **VARIANTS[name].engine,
    }  # fmt: skip


def prepare(folder: Path, model: str, rule: Rule) -> None:
    """Write a model; keep vLLM from the network, and from FlashInfer's sampler where that is not installed."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if find_spec("flashinfer") is None:
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    write_model(folder, model, rule)


def time_run(llm: Any, model: str, draw: random.Random, prompts: int, tokens: int, new: int) -> float:
    """Have an engine make `new` tokens for each of so many random prompts of `tokens`; return the seconds."""
    from vllm import SamplingParams

    vocabulary = range(3, Config.named(MODELS[model]).vocabulary)
    requests = [{"prompt_token_ids": draw.choices(vocabulary, k=tokens)} for _ in range(prompts)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    token_count = sum(len(output.outputs[0].token_ids) for output in outputs)
    if token_count != prompts * new:
        raise BenchmarkError(f"made {token_count} tokens instead of {prompts * new}")
    return seconds


def serve(model: str, name: str, folder: Path) -> None:
    """Measure a variant in this process, and write its reading into the folder."""
    begin, rule = time.time(), RULES.get(model, Rule())
    prepare(folder, model, rule)
    from vllm import LLM

    llm = LLM(**engine_arguments(folder, name, rule))
    cache = llm.llm_engine.vllm_config.cache_config
    draw = random.Random(0)

    reading = read_engine(
        lambda prompts, new: time_run(llm, model, draw, prompts, rule.tokens, new),
        rule,
        cache_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
        is_late=lambda: time.time() - begin > SECONDS - _LAST_RUN,
        load_seconds=time.time() - begin,
    )
    (folder / "reading.json").write_text(json.dumps(asdict(reading)))


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
