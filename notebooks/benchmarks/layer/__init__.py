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
DRAWN = ("LLaMA-2-7B", 16), ("LLaMA-2-70B", 16), ("Mixtral-8x7B", 16)  # layers that a timeline is taken of
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
    apart = FUSED, TIMELINE, D64, EPILOGUES
    known = [*apart, *models, *batches, *MIXES, "alone"]
    for word in words:
        if word not in known:
            raise ArgumentError("only", f"one of {', '.join(known)}", word)
    kinds = [word for word in words if word in apart]
    named = tuple(models[word] for word in words if word in models)
    everything = not words
    return Selection(
        fused=everything or FUSED in kinds,
        timeline=everything or TIMELINE in kinds,
        d64=everything or D64 in kinds,
        epilogues=EPILOGUES in kinds,
        configs=named or (() if kinds else CONFIGS),
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
    wanted, kept = remaining(part(only), done)
    yield from kept
    progress("compiling")
    widths = fused.WIDTHS if wanted.fused else ()
    narrow = (NARROW,) if wanted.d64 else ()
    jobs: list[Job] = [(decoder.warm, (config, wanted.batches)) for config in (*wanted.configs, *narrow)]
    jobs += [(fused.warm, (width,)) for width in widths]
    with_ends = [Config.named(name) for name in ends.MODELS] if wanted.epilogues else []
    jobs += [(ends.warm, (config, wanted.batches)) for config in with_ends]
    side_by_side([*jobs, *peers_layer.jobs(wanted.configs, wanted.batches, wanted.mixes)])
    if not peers.importable():
        warnings.warn("no mixes beside the layers: PyTorch with a GPU is not installed", stacklevel=2)
    if wanted.fused:
        yield from fused.rows(ceilings, progress)
    for config in wanted.configs:
        yield from layer_rows(config, wanted, ceilings, progress)
    for config in narrow:  # alone: the mixes have heads of 128
        for row in layer_rows(config, replace(wanted, mixes=()), ceilings, progress):
            yield replace(row, measure=D64, sizes={**row.sizes, "D": config.head_dim})
    for config in with_ends:
        yield from ends.rows(config, wanted.batches, ceilings, progress)
    if wanted.timeline:
        for name, B in DRAWN:
            progress(f"{name}, batch {B}: timeline")
            yield from timeline_rows(Config.named(name), B)


def remaining(wanted: Selection, done: Sequence[Row]) -> tuple[Selection, list[Row]]:
    """Return the parts of a stopped run that are still to be measured, and the rows that are kept.

    Only layers measured at all batches are kept; the fused kernels are, if a layer came after them.
    """
    layers = {config: [r for r in done if r.measure == MEASURE and config_of(r.sizes) == config] for config in CONFIGS}
    narrow, whole = [row for row in done if row.measure == D64], len(wanted.batches)
    fused_rows = [row for row in done if row.measure == FUSED] if any(layers.values()) else []
    left = replace(
        wanted,
        fused=wanted.fused and not fused_rows,
        configs=tuple(config for config in wanted.configs if len(layers[config]) < whole),
        d64=wanted.d64 and len(narrow) < whole,
    )
    finished = [layers[config] for config in wanted.configs if config not in left.configs]
    return left, [*fused_rows, *(row for rows in finished for row in rows), *([] if left.d64 else narrow)]


def side_by_side(jobs: Sequence[Job]) -> None:
    """Run each in a process of its own. Failures are ignored: the measurement fails again, and says why."""
    if not jobs:
        return
    workers = min(_WORKERS, os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_alone) as pool:
        for job in [pool.submit(function, *args) for function, args in jobs]:
            with suppress(Exception):
                job.result()


def _alone() -> None:
    """Keep PyTorch's compiler from starting processes of its own."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def layer_rows(config: Config, wanted: Selection, ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure a model at every batch, the mixes first: only one of ours and theirs is in memory at a time."""
    beside = dict(peers_layer.mixes(config, wanted.batches, wanted.mixes, progress))
    weights = layer_chain.layers_of(config)
    copied = decoder.copies_of(weights[0])
    for B in wanted.batches:
        progress(f"{config.name}, batch {B}")
        us, more = mixed(config, B, beside[B])
        yield decoder.row(config, B, weights, copied, ceilings, us, more, compared=min(wanted.batches) == B)


def mixed(config: Config, B: int, times: dict[str, MixTime]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the microseconds of the mixes by `MIX/ATTENTION`, and their breakdowns.

    Attention `sdpa` and `xqa_fp8` ran in the mix's own graph. For `xqa_stored` FlashInfer's stored time
    (`notebooks/results/<gpu>/peers`) is added to the time of the same graph without its attention.
    """
    stored = stored_attention().get((config.heads, config.kv_heads, B, LENGTH), {})
    us: dict[str, float] = {}
    more: dict[str, float] = {}
    for name, time in times.items():
        mix, _, attention = name.partition("/")
        alike = {name: time.layer - time.without_attention}
        kept = _STORED_FP16 if mix == "fp16" else _STORED_FP8
        if attention == "sdpa" and kept in stored:
            alike[f"{mix}/xqa_stored"] = stored[kept]
        for called, attending in alike.items():
            us[called] = time.without_attention + attending
            more[f"{called} gemm_us"] = time.gemms
            more[f"{called} attention_us"] = attending
            more[f"{called} others_us"] = time.without_attention - time.gemms
    return us, more


def timeline_rows(config: Config, B: int) -> Iterator[Row]:
    """Measure one row per launch of one layer of the chain, in order, if PyTorch can reach CUPTI."""
    made = Decoder(config, B, layer_chain.layers_of(config))
    operations = [decoder.label_of(call) for call in made.operations[0] for _ in range(call.launches)]
    calls = made.calls()
    calls *= ceil_div(_TRACED, len(calls))
    graphs: list[gpu.Graph] = []

    def run() -> None:
        graphs.append(gpu.capture(calls))
        graphs[0].replay()
        graphs[0].synchronize()

    spans, launches = peers_layer.traced(run), len(operations) * len(calls)
    if len(spans) != 2 * launches:  # a capture makes its calls once before
        said = f"{len(spans)} kernels were seen of {2 * launches}"
        warnings.warn(f"timeline of {config.name}: left out, {said}", stacklevel=2)
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
        before = max(stop for _, _, stop in spans[: first + number])
        yield _span(config, B, number, operation, kernel, (begin - origin, end - origin, begin - before), us)


def _span(
    config: Config, B: int, number: int, operation: str, kernel: str, at: tuple[float, float, float], us: float
) -> Row:
    begin, end, gap = at
    taken: dict[str, Any] = dict.fromkeys(("time_us", "fastest_us", "slowest_us"), end - begin)
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
        more={"start_us": begin, "end_us": end, "gap_us": gap, "layer_us": us},
        face=operation,
        **taken,
    )


def _record_of(only: Sequence[str]) -> str:
    return f"layer_{EPILOGUES}" if [*only] == [EPILOGUES] else ""


SUITE = Suite("layer", rows, part=part, record_of=_record_of, resumes=True)
