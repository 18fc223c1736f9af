"""Suite `vllm`: whole models in vLLM, with the plugin and with vLLM's own FP8, each in a process of its own.

Weights and prompts are random. Throughput: so many prompts of 1,024 tokens at once, 512 new ones each, prefill inside.
The word `arrivals` asks instead for the requests a second that an engine serves at 50 ms a token (`serving_arrivals`),
and `profile` for where the time of a step goes (`serving_profile`).
FP8 with an FP8 cache is measured in every call. If it differs by more than 3% from what earlier calls have in the
record, the card is not what it was, and the reading is void.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks import serving_arrivals, serving_profile
from benchmarks.serving_arrivals import FIRST_RATE, LIMIT_MS, REQUESTS, ArrivalReading, draw_lengths
from benchmarks.serving_engine import BASELINE, MODELS, OURS, RULES, VARIANTS, Reading, Rule, measure
from benchmarks.serving_profile import StepProfile
from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Suite
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.llm.model import Config

TOLERANCE = 0.03  # between FP8's calls
LAUNCHES = "launches"  # of a step, in `more` of a profile
SERVING, ARRIVALS, PROFILE = "serving", "arrivals", "profile"  # measures of rows; the latter two words, too


def part(only: Sequence[str]) -> list[tuple[str, str]]:
    """Return (model, variant) for the words of `--only`: models 7B, 8B, 70B, and variants; by default ours on 7B.

    The words `arrivals` and `profile` choose what is measured of them. Raises ArgumentError for both of these, for
    another word, and for FP8, which is measured beside each.
    """
    variants = [variant for variant in VARIANTS if variant != BASELINE]
    if ARRIVALS in only and PROFILE in only:
        raise ArgumentError("only", f"{ARRIVALS} or {PROFILE}", "both")
    for word in only:
        if word not in (words := (*MODELS, *variants, ARRIVALS, PROFILE)):
            raise ArgumentError("only", f"must be of {', '.join(words)}", word)
    models = [model for model in MODELS if model in only] or ["7B"]
    return [*product(models, [variant for variant in variants if variant in only] or [OURS])]


def rows(
    names: Sequence[str],
    ceilings: Ceilings,
    progress: Callable[[str], None],
    only: Sequence[str] = (),
    done: Sequence[Row] = (),
) -> Iterator[Row]:
    """Measure throughput and steps beside FP8, which each call measures anew; rows in `done` are kept.

    Raises BenchmarkError for a process that fails, and where FP8 differs from that of `done` by more than 3%.
    """
    yield from done
    chosen = part(only)
    functions_by_measure: dict[str, tuple[Callable[[str, str], Any], Callable[..., Iterator[Row]]]] = {
        SERVING: (measure, rows_of),
        ARRIVALS: (serving_arrivals.measure, arrival_rows),
        PROFILE: (serving_profile.measure, profile_rows),
    }
    measured = next((word for word in functions_by_measure if word in only), SERVING)
    measure_variant, make_rows = functions_by_measure[measured]
    recorded_kernels = {row.kernel for row in done if row.measure == measured}
    for model in dict.fromkeys(model for model, _ in chosen):
        variants = [
            variant
            for chosen_model, variant in chosen
            if chosen_model == model and _kernel(model, variant) not in recorded_kernels
        ]
        if not variants:
            continue
        gpu.free_pool()
        progress(f"{MODELS[model]}, {BASELINE}")
        base = measure_variant(model, BASELINE)
        if measured == SERVING:
            require_steady(model, base, done)
        if _kernel(model, BASELINE) not in recorded_kernels:
            yield from make_rows(model, BASELINE, base, base, ceilings)
        for variant in variants:
            progress(f"{MODELS[model]}, {variant}")
            yield from make_rows(model, variant, measure_variant(model, variant), base, ceilings)


def arrival_rows(
    model: str, name: str, reading: ArrivalReading, base: ArrivalReading, ceilings: Ceilings
) -> Iterator[Row]:
    """Make the row of a reading, beside FP8's: the time is that between requests. BenchmarkError for no rate at all."""
    if not reading.requests_per_s or not base.requests_per_s:
        rule = f"no rate from {FIRST_RATE:g} requests/s on holds {LIMIT_MS:g} ms a token"
        raise BenchmarkError(f"vllm, {MODELS[model]}, {name if base.requests_per_s else BASELINE}: {rule}")
    config = Config.named(MODELS[model])
    prompts, new_tokens = draw_lengths(REQUESTS).T
    tokens_read = (new_tokens * (prompts + new_tokens / 2)).mean()  # of the cache, by the steps of a request
    numbers = 2 * config.layers * config.kv_heads * config.head_dim * tokens_read
    us = (1e6 / reading.requests_per_s,)
    sizes = {"requests": REQUESTS, "limit_ms": int(LIMIT_MS)}
    peers, figures = {"fp8": 1e6 / base.requests_per_s}, {"p99_ms": reading.p99_ms}
    figures["over_fp8"] = reading.requests_per_s / base.requests_per_s
    rate, nbytes = (reading.requests_per_s, "requests/s"), int(numbers * VARIANTS[name].cache_bits / 8)
    yield _row(model, name, ARRIVALS, sizes, us, rate, nbytes, ceilings, peers, figures)


def profile_rows(
    model: str,
    name: str,
    profiles: Mapping[int, StepProfile],
    base: Mapping[int, StepProfile],
    ceilings: Ceilings,
) -> Iterator[Row]:
    """Make a row of each batch: a step under the profiler, beside FP8's, and its parts in microseconds."""
    for batch, profile in profiles.items():
        sizes, us = {"B": batch, "tokens": serving_profile.RULE.tokens}, (profile.step_us,)
        nbytes = _bytes_of_step(model, name, batch, sizes["tokens"] + serving_profile.LONG // 2)
        rate, figures = (batch / profile.step_us * 1e6, "tokens/s"), {**profile.part_us, LAUNCHES: profile.launches}
        row = _row(model, name, PROFILE, sizes, us, rate, nbytes, ceilings, {"fp8": base[batch].step_us}, figures)
        yield replace(row, checked=f"{row.checked}; other kernels: {', '.join(profile.unknown) or 'none'}")


def require_steady(model: str, reading: Reading, done: Sequence[Row]) -> None:
    """Raise BenchmarkError where FP8's throughput is not within 3% of that of an earlier call."""
    earlier_seconds = [
        row.time_us / 1e6 for row in done if row.kernel == _kernel(model, BASELINE) and row.measure == SERVING
    ]
    seconds_by_run = [*earlier_seconds, min(reading.seconds)]
    deviation = max(seconds_by_run) / min(seconds_by_run) - 1
    if deviation > TOLERANCE:
        rule = f"void: FP8 differs by {deviation:.1%} between its calls, more than {TOLERANCE:.0%}"
        raise BenchmarkError(
            f"vllm, {MODELS[model]}: {rule} ({', '.join(f'{seconds:.2f} s' for seconds in seconds_by_run)})"
        )


def rows_of(model: str, name: str, reading: Reading, base: Reading, ceilings: Ceilings) -> Iterator[Row]:
    """Make the rows of a reading, beside those of FP8 in the same call."""
    rule = RULES.get(model, Rule())
    figures = {"cache_tokens": float(reading.cache_tokens), "load_seconds": reading.load_seconds}
    if base.cache_tokens:
        figures["cache_over_fp8"] = reading.cache_tokens / base.cache_tokens
    step = _bytes_of_step(model, name, rule.prompts, rule.tokens + rule.new // 2)
    sizes = {"prompts": rule.prompts, "tokens": rule.tokens, "new": rule.new}
    best_seconds, base_seconds = min(reading.seconds), min(base.seconds)
    rate = rule.prompts * rule.new / best_seconds, "tokens/s"
    us = tuple(1e6 * seconds for seconds in reading.seconds)
    figures["over_fp8"] = base_seconds / best_seconds
    yield _row(model, name, SERVING, sizes, us, rate, rule.new * step, ceilings, {"fp8": 1e6 * base_seconds}, figures)
    for batch, steps in reading.step_ms.items():
        us, nbytes = tuple(1e3 * ms for ms in steps), _bytes_of_step(model, name, batch, _mean_context(rule))
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
    extra: dict[str, float],
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
        more=extra,
    )


def _kernel(model: str, name: str) -> str:
    return f"{MODELS[model]} in vLLM, {name}"


def _mean_context(rule: Rule) -> int:
    return rule.tokens + (rule.short + rule.long) // 2


def _bytes_of_step(model: str, name: str, batch: int, context: int) -> int:
    """Count the bytes that a step must read: matrices of the layers, a 16-bit head, the cache of all sequences."""
    config, variant = Config.named(MODELS[model]), VARIANTS[name]
    weights = config.layers * sum(N * K for N, K in config.matrices.values()) * variant.weight_bits / 8
    numbers = 2 * config.layers * config.kv_heads * config.head_dim * context * batch
    return int(weights + 2 * config.vocabulary * config.hidden + numbers * variant.cache_bits / 8)


SUITE = Suite("vllm", rows, part=part, record_of=lambda only: "vllm" if only else "", resumes=True)
