"""Suite `layer`: the kernels between GEMMs and attention, whole decoder layers beside public mixes, and a timeline."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from benchmarks import peers, peers_layer
from benchmarks.layer import decoder, ends, fused
from benchmarks.layer.decoder import MEASURE
from benchmarks.layer_shapes import BATCHES, CONFIGS, NARROW, config_of, sizes_of
from benchmarks.peers_layer import MIXES, Job, MixTime
from benchmarks.stored import stored_attention
from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Suite
from ptxlab.errors import ArgumentError
from ptxlab.llm import layer_chain
from ptxlab.llm.layer_chain import LENGTH, Decoder
from ptxlab.llm.model import Config

__all__ = [
    "BATCHES",
    "CONFIGS",
    "D64",
    "EPILOGUES",
    "FUSED",
    "MEASURE",
    "NARROW",
    "TIMELINE",
    "Selection",
    "config_of",
    "part",
    "rows",
]

FUSED, TIMELINE, D64, EPILOGUES = fused.MEASURE, "timeline", "d64", ends.MEASURE
TIMELINE_LAYERS = ("LLaMA-2-7B", 16), ("LLaMA-2-70B", 16), ("Mixtral-8x7B", 16)  # layers that a timeline is taken of
_STORED_FP16, _STORED_FP8 = "fi_xqa_f16", "fi_xqa_fp8"  # stored attention that stands in for a mix's own
_WORKERS = 14
_TRACED = 4  # layers at least, of which one in the middle is kept


@dataclass(frozen=True)
class Selection:
    """Parts of the suite that are measured.

    These are `fused` kernels, `timeline`s, a layer with heads of 64 (`d64`), layers of `ends.MODELS` by their
    `epilogues` (only if named), and layers by model and batch, beside mixes.
    """

    fused: bool = True
    timeline: bool = True
    d64: bool = True
    epilogues: bool = False
    configs: tuple[Config, ...] = CONFIGS
    batches: tuple[int, ...] = BATCHES
    mixes: tuple[str, ...] = tuple(MIXES)


def part(words: Sequence[str]) -> Selection:
    """Parse the words of `--only`: `fused`, `timeline`, `d64`, `epilogues`, models, `B=16`, mixes or `alone` (no mix).

    Without words everything is measured but `epilogues`, whose choice has been made. Words of one kind add up; all of a
    kind is measured if no word names one of it. With words, the first four are measured only if named, and layers only
    if models are named, or none of the four is. Raises ArgumentError for another word.
    """
    models = {config.name: config for config in CONFIGS}
    batches = {f"B={B}": B for B in BATCHES}
    separate_parts = FUSED, TIMELINE, D64, EPILOGUES
    choices = [*separate_parts, *models, *batches, *MIXES, "alone"]
    for word in words:
        if word not in choices:
            raise ArgumentError("only", f"one of {', '.join(choices)}", word)
    kinds = [word for word in words if word in separate_parts]
    named_configs = tuple(models[word] for word in words if word in models)
    is_whole = not words
    return Selection(
        fused=is_whole or FUSED in kinds,
        timeline=is_whole or TIMELINE in kinds,
        d64=is_whole or D64 in kinds,
        epilogues=EPILOGUES in kinds,
        configs=named_configs or (() if kinds else CONFIGS),
        batches=tuple(batches[word] for word in words if word in batches) or BATCHES,
        mixes=tuple(word for word in words if word in MIXES) or (() if "alone" in words else tuple(MIXES)),
    )


def rows(
    names: Sequence[str],
    ceilings: Ceilings,
    progress: Callable[[str], None],
    only: Sequence[str] = (),
    done: Sequence[Row] = (),
) -> Iterator[Row]:
    """Measure the suite, or the part that the words of `only` name (`part`), but for what `done` has of it."""
    selection, kept_rows = remaining(part(only), done)
    yield from kept_rows
    progress("compiling")
    widths = fused.WIDTHS if selection.fused else ()
    narrow_configs = (NARROW,) if selection.d64 else ()
    jobs: list[Job] = [(decoder.warm, (config, selection.batches)) for config in (*selection.configs, *narrow_configs)]
    jobs += [(fused.warm, (width,)) for width in widths]
    epilogue_configs = [Config.named(model) for model in ends.MODELS] if selection.epilogues else []
    jobs += [(ends.warm, (config, selection.batches)) for config in epilogue_configs]
    run_in_processes([*jobs, *peers_layer.compile_jobs(selection.configs, selection.batches, selection.mixes)])
    if not peers.importable():
        warnings.warn("no mixes beside the layers: PyTorch with a GPU is not installed", stacklevel=2)
    if selection.fused:
        yield from fused.rows(ceilings, progress)
    for config in selection.configs:
        yield from layer_rows(config, selection, ceilings, progress)
    for config in narrow_configs:  # alone: the mixes have heads of 128
        for row in layer_rows(config, replace(selection, mixes=()), ceilings, progress):
            yield replace(row, measure=D64, sizes={**row.sizes, "D": config.head_dim})
    for config in epilogue_configs:
        yield from ends.rows(config, selection.batches, ceilings, progress)
    if selection.timeline:
        for model, B in TIMELINE_LAYERS:
            progress(f"{model}, batch {B}: timeline")
            yield from timeline_rows(Config.named(model), B)


def remaining(selection: Selection, done: Sequence[Row]) -> tuple[Selection, list[Row]]:
    """Return the parts of a stopped run that are still to be measured, and the rows that are kept.

    Only layers measured at all batches are kept; the fused kernels are, if a layer came after them.
    """
    layers = {config: [r for r in done if r.measure == MEASURE and config_of(r.sizes) == config] for config in CONFIGS}
    narrow_rows, batch_count = [row for row in done if row.measure == D64], len(selection.batches)
    fused_rows = [row for row in done if row.measure == FUSED] if any(layers.values()) else []
    unmeasured = replace(
        selection,
        fused=selection.fused and not fused_rows,
        configs=tuple(config for config in selection.configs if len(layers[config]) < batch_count),
        d64=selection.d64 and len(narrow_rows) < batch_count,
    )
    finished_layers = [layers[config] for config in selection.configs if config not in unmeasured.configs]
    return unmeasured, [
        *fused_rows,
        *(row for rows in finished_layers for row in rows),
        *([] if unmeasured.d64 else narrow_rows),
    ]


def run_in_processes(jobs: Sequence[Job]) -> None:
    """Run each in a process of its own. Failures are ignored: the measurement fails again, and says why."""
    if not jobs:
        return
    workers = min(_WORKERS, os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_limit_compile_threads) as pool:
        for job in [pool.submit(function, *args) for function, args in jobs]:
            with suppress(Exception):
                job.result()


def _limit_compile_threads() -> None:
    """Keep PyTorch's compiler from starting processes of its own."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def layer_rows(
    config: Config, selection: Selection, ceilings: Ceilings, progress: Callable[[str], None]
) -> Iterator[Row]:
    """Measure a model at every batch, the mixes first: only one of ours and theirs is in memory at a time."""
    mix_times = dict(peers_layer.mixes(config, selection.batches, selection.mixes, progress))
    weights = layer_chain.layers_of(config)
    copy_matrix = decoder.copies_of(weights[0])
    for B in selection.batches:
        progress(f"{config.name}, batch {B}")
        us, breakdowns = summarize_mixes(config, B, mix_times[B])
        yield decoder.row(
            config, B, weights, copy_matrix, ceilings, us, breakdowns, compare_twin=min(selection.batches) == B
        )


def summarize_mixes(config: Config, B: int, times: dict[str, MixTime]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the microseconds of the mixes by `MIX/ATTENTION`, and their breakdowns.

    Attention `sdpa` and `xqa_fp8` ran in the mix's own graph. For `xqa_stored` FlashInfer's stored time
    (`notebooks/results/<gpu>/peers`) is added to the time of the same graph without its attention.
    """
    stored_times = stored_attention().get((config.heads, config.kv_heads, B, LENGTH), {})
    us: dict[str, float] = {}
    breakdowns: dict[str, float] = {}
    for name, time in times.items():
        mix, _, attention = name.partition("/")
        attention_times = {name: time.layer - time.without_attention}
        stored_name = _STORED_FP16 if mix == "fp16" else _STORED_FP8
        if attention == "sdpa" and stored_name in stored_times:
            attention_times[f"{mix}/xqa_stored"] = stored_times[stored_name]
        for label, attention_us in attention_times.items():
            us[label] = time.without_attention + attention_us
            breakdowns[f"{label} gemm_us"] = time.gemms
            breakdowns[f"{label} attention_us"] = attention_us
            breakdowns[f"{label} others_us"] = time.without_attention - time.gemms
    return us, breakdowns


def timeline_rows(config: Config, B: int) -> Iterator[Row]:
    """Measure one row per launch of one layer of the chain, in order, if PyTorch can reach CUPTI."""
    chain = Decoder(config, B, layer_chain.layers_of(config))
    operations = [decoder.label_of(call) for call in chain.operations[0] for _ in range(call.launches)]
    calls = chain.calls()
    calls *= ceil_div(_TRACED, len(calls))
    graphs: list[gpu.Graph] = []

    def run() -> None:
        graphs.append(gpu.capture(calls))
        graphs[0].replay()
        graphs[0].synchronize()

    spans, launches = peers_layer.trace_kernels(run), len(operations) * len(calls)
    if len(spans) != 2 * launches:  # a capture makes its calls once before
        reason = f"{len(spans)} kernels were seen of {2 * launches}"
        warnings.warn(f"timeline of {config.name}: left out, {reason}", stacklevel=2)
        return
    yield from spans_of(config, B, spans[launches:], operations, graphs[0].time().median)


def spans_of(
    config: Config, B: int, spans: Sequence[tuple[str, float, float]], operations: Sequence[str], us: float
) -> Iterator[Row]:
    """Yield the rows of the chain's middle layer, each with the gap to the launch before (below 0: they overlap)."""
    first = len(spans) // len(operations) // 2 * len(operations)
    origin = spans[first][1]
    for number, operation in enumerate(operations):
        kernel, begin, end = spans[first + number]
        previous_end = max(stop for _, _, stop in spans[: first + number])
        yield _span(config, B, number, operation, kernel, (begin - origin, end - origin, begin - previous_end), us)


def _span(
    config: Config, B: int, number: int, operation: str, kernel: str, interval: tuple[float, float, float], us: float
) -> Row:
    begin, end, gap_us = interval
    duration: dict[str, Any] = dict.fromkeys(("time_us", "fastest_us", "slowest_us"), end - begin)
    return Row(
        kernel=kernel,
        source="cu",
        measure=TIMELINE,
        sizes={**sizes_of(config, B), "launch": number},
        rate=1e3 / (end - begin),
        rate_unit="launches/ms",
        bytes=0,
        operations=0,
        floor_us=end - begin,
        fraction=1.0,
        limit="itself",
        sm_mhz=0.0,
        checked="not looked at: the same calls are checked where they are timed",
        more={"start_us": begin, "end_us": end, "gap_us": gap_us, "layer_us": us},
        face=operation,
        **duration,
    )


def _record_of(only: Sequence[str]) -> str:
    return f"layer_{EPILOGUES}" if [*only] == [EPILOGUES] else ""


SUITE = Suite("layer", rows, part=part, record_of=_record_of, resumes=True)
