"""Suite `vllm`: whole models in vLLM, with the plugin and with vLLM's own FP8, each in a process of its own.

Weights and prompts are random. Throughput: so many prompts of 1,024 tokens at once, 512 new ones each, prefill inside.
A step: a batch makes `short` and then `long` tokens; the difference of both, in which prefill cancels, by the
difference in tokens. FP8 with an FP8 cache is measured in every call. If it differs by more than 3% from what earlier
calls have in the record, the card is not what it was, and the reading is void.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Suite
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.llm.model import Config

MODELS = {"7B": "LLaMA-2-7B", "8B": "LLaMA-3-8B", "70B": "LLaMA-2-70B"}
OURS, BASELINE = "ptxlab", "fp8"
TOLERANCE = 0.03  # between FP8's calls
SECONDS = 285  # of a variant: two of them fit a call of ten minutes
_PREPARING = 70  # of these, that starting may take


@dataclass(frozen=True)
class Variant:
    """How vLLM serves a model: arguments of its engine, and the bits of weights and of a number in the cache."""

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
    """What is asked of an engine: prompts of `tokens` each and `new` ones; steps of each batch between two lengths."""

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
    """What an engine was measured at.

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
        """Read what a process has printed."""
        found = json.loads(text)
        steps = {int(batch): tuple(each) for batch, each in found["step_ms"].items()}
        return cls(tuple(found["seconds"]), steps, found["cache_tokens"], found["load_seconds"])


def part(only: Sequence[str]) -> list[tuple[str, str]]:
    """Return (model, variant) for the words of `--only`: models 7B, 8B, 70B, and variants; by default ours on 7B.

    Raises ArgumentError for another word, and for FP8, which is measured beside each.
    """
    others = [name for name in VARIANTS if name != BASELINE]
    for word in only:
        if word not in (*MODELS, *others):
            raise ArgumentError("only", f"must be of {', '.join((*MODELS, *others))}", word)
    models = [name for name in MODELS if name in only] or ["7B"]
    return [*product(models, [name for name in others if name in only] or [OURS])]


def rows(
    names: Sequence[str],
    ceilings: Ceilings,
    progress: Callable[[str], None],
    only: Sequence[str] = (),
    done: Sequence[Row] = (),
) -> Iterator[Row]:
    """Throughput and steps of what is wanted beside FP8, which each call measures anew; rows in `done` are kept.

    Raises BenchmarkError for a process that fails, and where FP8 differs from that of `done` by more than 3%.
    """
    yield from done
    wanted = part(only)
    known = {row.kernel for row in done}
    for model in dict.fromkeys(model for model, _ in wanted):
        variants = [name for of, name in wanted if of == model and _kernel(model, name) not in known]
        if not variants:
            continue
        gpu.free_pool()
        progress(f"{MODELS[model]}, {BASELINE}")
        base = measure(model, BASELINE)
        require_steady(model, base, done)
        if _kernel(model, BASELINE) not in known:
            yield from rows_of(model, BASELINE, base, base, ceilings)
        for name in variants:
            progress(f"{MODELS[model]}, {name}")
            yield from rows_of(model, name, measure(model, name), base, ceilings)


def require_steady(model: str, reading: Reading, done: Sequence[Row]) -> None:
    """Raise BenchmarkError where FP8's throughput is not within 3% of that of an earlier call."""
    earlier = [row.time_us / 1e6 for row in done if row.kernel == _kernel(model, BASELINE) and row.measure == "serving"]
    readings = [*earlier, min(reading.seconds)]
    apart = max(readings) / min(readings) - 1
    if apart > TOLERANCE:
        rule = f"void: FP8 differs by {apart:.1%} between its calls, more than {TOLERANCE:.0%}"
        raise BenchmarkError(f"vllm, {MODELS[model]}: {rule} ({', '.join(f'{each:.2f} s' for each in readings)})")


def rows_of(model: str, name: str, reading: Reading, base: Reading, ceilings: Ceilings) -> Iterator[Row]:
    """Make the rows of a reading, beside those of FP8 in the same call."""
    rule = RULES.get(model, Rule())
    about = {"cache_tokens": float(reading.cache_tokens), "load_seconds": reading.load_seconds}
    if base.cache_tokens:
        about["cache_over_fp8"] = reading.cache_tokens / base.cache_tokens
    step = _bytes_of_step(model, name, rule.prompts, rule.tokens + rule.new // 2)
    sizes = {"prompts": rule.prompts, "tokens": rule.tokens, "new": rule.new}
    best, of_base = min(reading.seconds), min(base.seconds)
    rate = rule.prompts * rule.new / best, "tokens/s"
    us = tuple(1e6 * each for each in reading.seconds)
    about["over_fp8"] = of_base / best
    yield _row(model, name, "serving", sizes, us, rate, rule.new * step, ceilings, {"fp8": 1e6 * of_base}, about)
    for batch, steps in reading.step_ms.items():
        us, nbytes = tuple(1e3 * each for each in steps), _bytes_of_step(model, name, batch, _mean_context(rule))
        peers = {"fp8": 1e3 * min(base.step_ms[batch])} if batch in base.step_ms else {}
        rate = batch / min(us) * 1e6, "tokens/s"
        yield _row(model, name, "step", {"B": batch, "tokens": rule.tokens}, us, rate, nbytes, ceilings, peers, {})


def _row(
    model: str,
    name: str,
    measure: str,
    sizes: dict[str, int],
    us: tuple[float, ...],
    rate: tuple[float, str],
    nbytes: int,
    ceilings: Ceilings,
    peers: dict[str, float],
    more: dict[str, float],
) -> Row:
    floor = nbytes / ceilings.read_tbps / 1e6
    return Row(
        kernel=_kernel(model, name),
        source="vllm",
        measure=measure,
        sizes=sizes,
        time_us=min(us),
        fastest_us=min(us),
        slowest_us=max(us),
        rate=rate[0],
        rate_unit=rate[1],
        bytes=nbytes,
        operations=0,
        floor_us=floor,
        fraction=floor / min(us),
        limit="weights and cache",
        sm_mhz=0.0,
        checked="every request made its tokens",
        peers=peers if name != BASELINE else {},
        more=more,
    )


def _kernel(model: str, name: str) -> str:
    return f"{MODELS[model]} in vLLM, {name}"


def _mean_context(rule: Rule) -> int:
    return rule.tokens + (rule.short + rule.long) // 2


def _bytes_of_step(model: str, name: str, batch: int, context: int) -> int:
    """Bytes that a step must read: matrices of the layers, a 16-bit head, the cache of all sequences."""
    config, variant = Config.named(MODELS[model]), VARIANTS[name]
    weights = config.layers * sum(N * K for N, K in config.matrices.values()) * variant.weight_bits / 8
    numbers = 2 * config.layers * config.kv_heads * config.head_dim * context * batch
    return int(weights + 2 * config.vocabulary * config.hidden + numbers * variant.cache_bits / 8)


# One engine, in a process of its own


def measure(model: str, name: str) -> Reading:
    """Measure a variant in a new process. Raises BenchmarkError with the last line of what it said if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.serving", model, name, folder]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 60, check=False)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"vllm, {MODELS[model]}, {name}: took more than {SECONDS + 60} s") from None
        result = Path(folder) / "reading.json"
        if ended.returncode or not result.is_file():
            last = (ended.stderr.strip() or ended.stdout.strip() or "no word").splitlines()[-1]
            raise BenchmarkError(f"vllm, {MODELS[model]}, {name}: {last[:300]}")
        return Reading.from_json(result.read_text())


def read_engine(
    took: Callable[[int, int], float],
    rule: Rule,
    *,
    cache_tokens: int,
    is_late: Callable[[], bool] = lambda: False,
    load_seconds: float = 0.0,
) -> Reading:
    """Measure an engine.

    Args:
        took: seconds that so many prompts with so many new tokens each took.
        rule: what is asked.
        cache_tokens: that the cache holds; a batch that needs more is left out.
        is_late: whether nothing new is to begin.
        load_seconds: of the engine.
    """
    took(8, 16)  # the first calls of a shape
    took(min(64, rule.prompts), 16)
    seconds, steps = [took(rule.prompts, rule.new)], dict[int, tuple[float, ...]]()
    for batch in rule.batches:
        if batch * (rule.tokens + rule.long) > cache_tokens:
            continue
        pairs: list[float] = []
        while len(pairs) < 2 and not is_late():
            short, long = took(batch, rule.short), took(batch, rule.long)
            pairs.append(1e3 * (long - short) / (rule.long - rule.short))
        if pairs:
            steps[batch] = tuple(pairs)
    if not is_late():
        seconds.append(took(rule.prompts, rule.new))
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


def serve(model: str, name: str, folder: Path) -> None:
    """Measure a variant in this process, and write its reading into the folder."""
    begin, rule = time.time(), RULES.get(model, Rule())
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    write_model(folder, model, rule)
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(folder, name, rule))
    cache = llm.llm_engine.vllm_config.cache_config
    draw = random.Random(0)

    def took(prompts: int, new: int) -> float:
        vocabulary = Config.named(MODELS[model]).vocabulary
        many = [{"prompt_token_ids": draw.choices(range(3, vocabulary), k=rule.tokens)} for _ in range(prompts)]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate(many, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(len(each.outputs[0].token_ids) for each in outputs)
        if made != prompts * new:
            raise BenchmarkError(f"made {made} tokens instead of {prompts * new}")
        return seconds

    reading = read_engine(
        took,
        rule,
        cache_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
        is_late=lambda: time.time() - begin > SECONDS - _PREPARING,
        load_seconds=time.time() - begin,
    )
    (folder / "reading.json").write_text(json.dumps(asdict(reading)))


SUITE = Suite("vllm", rows, part=part, record_of=lambda only: "vllm" if only else "", resumes=True)

if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
