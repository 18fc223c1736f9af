"""Suite `decode`: whole models of LiquidGEMM's Table 1, all layers with weights of their own, beside public mixes.

Two measures. `decode`: a step of B sequences of 1024 to 1535 tokens, evenly staggered, as continuous batching keeps
them; a sequence that reaches the end begins anew. `generate`: QServe's rule, B prompts of 1024 tokens and 512 tokens
behind each, prefill inside the time, at the largest batch of a memory budget.

Ours runs as it is; PyTorch's attention takes the prompts of `generate` where it can. A mix's step is its
layer (`peers_layer`) times the layers, and the LM head as ours takes it: what lies between its layers, and the gaps of
a whole model, are left out in its favour.

What others take are rows of their own: `beside`, a step of B sequences less the head, of all mixes or of ours with
`gemm_w4a8_qoq_sm80`, and `prompt`. So a run that was stopped goes on where it was.

Steps in W4A4 (Atom) and W4Ax (COMET) are rows of a measure of their own, `four bits`, and only where a word asks for
them. So are steps with weights per channel, QServe's setting on an A100 (QServe §6.3), `per channel`: with the GEMM
that `gemm_w4a8` chooses, and with `gemm_w4a8_qoq_channel_sm80`; of the former also QServe's rule, `generate per
channel`. `in groups` and `generate in groups` are the same of our own weights. So are steps with LiquidServe's
settings, groups of 64 and a static cache of 8 bits by channel (LiquidGEMM §6, §7.1), `static cache`.
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import peers_layer
from benchmarks.layer import decoder, run_in_processes
from benchmarks.layer.decoder import Alone
from benchmarks.layer_shapes import BATCHES, Work, rows_of
from benchmarks.peers_layer import MIXES, Job
from benchmarks.shared_prefix import SHARED_PAGES, TOKENS, first_token_times
from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Suite
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.llm.layer_chain import copy_of
from ptxlab.llm.model import Config, KernelRunner, LayerWeights, QuantizedModel, largest_batch
from ptxlab.llm.model.kernel_runner import LMHead
from ptxlab.llm.model.memory import RESERVE, weights_of
from ptxlab.llm.model.runner import HEAD_ROWS
from ptxlab.llm.model.weights import DEFAULT_CACHE
from ptxlab.lowbit.bench.attention.problem import random_pages
from ptxlab.lowbit.bench.shapes import GROUP, HEAD_DIM, PAGE
from ptxlab.lowbit.layout import page_bytes
from ptxlab.lowbit.quant import Level1Weight, calibrate_kv
from ptxlab.lowbit.quant.kv import BY_CHANNEL
from ptxlab.runtime.timing import GEMM_REPLAYS, Clock, Measured, measure
from ptxlab.spec.dtypes import convert_to_dtype

MEASURE, GENERATE, BESIDE, PROMPTS = "decode", "generate", "beside", "prompt"
FACE = "decode_step"
MODELS = tuple(
    Config.named(name)
    for name in (
        *("LLaMA-30B", "LLaMA-2-7B", "LLaMA-2-13B", "LLaMA-2-70B"),
        *("LLaMA-3-8B", "Mistral-7B", "Yi-34B", "Mixtral-8x7B"),
    )
)
PROMPT, NEW_TOKENS = (
    1024,
    512,
)  # tokens of QServe's rule; a steady sequence has PROMPT to PROMPT + NEW_TOKENS - 1 of them
MEAN = PROMPT + NEW_TOKENS // 2  # of a steady sequence; a mix's sequences all have so many
STEPS = 512
BUDGETS = (80, 141)  # GB
CHUNK = 2 * PROMPT
BY_TORCH = "prompts_by_torch"  # 1 in `Row.more` of older records, whose prompts PyTorch attended
MIX = "mixes"
FIRST_TOKEN, NEW = "first token", "nothing shared"  # the measure of `first_token_rows`, and its peer
WITHOUT = "without"  # ours with gemm_w4a8_qoq_sm80, the rewrite of QServe's GEMM, in place of ours
_STEPS_WITHOUT, _WARM = 64, 8
FOUR_BITS, STATIC_CACHE = "four bits", "static cache"  # measures of `system_rows`
CHANNEL, CHANNEL_RULE, GROUPS, GROUPS_RULE = "per channel", "generate per channel", "in groups", "generate in groups"
FOUR_BIT_BATCHES = (8, 16, 32, 64, 128, 256)  # Atom §5.3.2
_ROWS = 520  # distinct random rows of embedding and head, each then scaled by a factor of its own
_PAD = 16

Key = tuple[object, ...]


@dataclass(frozen=True)
class System:
    """Weights of whole models that are measured only where a word asks for them.

    Attributes:
        scheme: of the weights.
        measure: of the rows.
        layout: of the weights.
        rule: the measure of QServe's rule, or empty where only steps are measured.
        experts: whether models with experts run.
        programmatic: whether a launch begins before the one ahead of it has ended.
        group: channels per scale of the weights.
        cache: scheme of the KV cache; of one by channel the constants are calibrated on normal numbers.
    """

    scheme: str
    measure: str = FOUR_BITS
    layout: str = "strips"
    rule: str = ""
    experts: bool = False
    programmatic: bool = True
    group: int = GROUP
    cache: str = DEFAULT_CACHE


SYSTEMS = {
    "w4a4": System("atom"),
    "w4ax": System("fmpq"),
    "groups": System("lqq", GROUPS, rule=GROUPS_RULE, experts=True),
    "channel": System("qoq_channel", CHANNEL, rule=CHANNEL_RULE, experts=True),
    "channel_sm80": System("qoq_channel", CHANNEL, layout="qserve", programmatic=False),
    "liquid": System("lqq", STATIC_CACHE, experts=True, group=64, cache="kv8_channel"),
}


@dataclass(frozen=True)
class ModelSelection:
    """Models, batches and mixes that are measured."""

    models: tuple[Config, ...] = MODELS
    batches: tuple[int, ...] = BATCHES
    mixes: tuple[str, ...] = tuple(MIXES)
    without: bool = True
    systems: tuple[str, ...] = ()  # of `SYSTEMS`; where there are any, nothing else is measured


def part(words: Sequence[str]) -> ModelSelection:
    """Parse the words of `--only`: models, `B=16`, mixes, `without`, or `alone` (no mix).

    All of a kind is measured if no word names one of it. Words of `SYSTEMS` name rows that are measured for no other
    word, and then nothing else is.

    Raises ArgumentError for another word.
    """
    models = {config.name: config for config in MODELS}
    batches = {f"B={B}": B for B in sorted({*BATCHES, *FOUR_BIT_BATCHES})}
    choices = [*models, *batches, *MIXES, WITHOUT, "alone", *SYSTEMS]
    for word in words:
        if word not in choices:
            raise ArgumentError("only", f"one of {', '.join(choices)}", word)
    named_mixes = tuple(word for word in words if word in MIXES)
    default_batches = FOUR_BIT_BATCHES if {*words} & {*SYSTEMS} else BATCHES
    names_peers = bool({*words} & {*MIXES, WITHOUT, "alone"})
    return ModelSelection(
        models=tuple(models[word] for word in words if word in models) or MODELS,
        batches=tuple(batches[word] for word in words if word in batches) or default_batches,
        mixes=named_mixes if names_peers else tuple(MIXES),
        without=WITHOUT in words or not names_peers,
        systems=tuple(word for word in words if word in SYSTEMS),
    )


def sizes_of(config: Config, B: int, L: int = PROMPT) -> dict[str, int]:
    """Return the sizes that identify a row in a record; L is the budget in GB for rows of QServe's rule."""
    widths = {"hidden": config.hidden, "ffn": config.ffn, "Hq": config.heads, "Hkv": config.kv_heads}
    return {**widths, "E": config.experts, "layers": config.layers, "V": config.vocabulary, "B": B, "L": L}


def config_of(sizes: Mapping[str, int]) -> Config | None:
    """Find the model with these sizes (`sizes_of`), or return None."""
    return next((c for c in MODELS if sizes_of(c, sizes["B"], sizes["L"]) == dict(sizes)), None)


def rows(
    names: Sequence[str],
    ceilings: Ceilings,
    progress: Callable[[str], None],
    only: Sequence[str] = (),
    done: Sequence[Row] = (),
) -> Iterator[Row]:
    """Measure the suite, or the part that the words of `only` name; rows in `done` are taken as they are."""
    selection = part(only)
    rows_by_key = {row.key: row for row in done}
    for config in selection.models:
        for system in selection.systems:
            if SYSTEMS[system].experts or not config.experts:
                yield from system_rows(config, system, selection.batches, rows_by_key, ceilings, progress)
        if selection.systems:
            continue
        yield from model_rows(config, selection, ModelPlan.of(config, selection), rows_by_key, ceilings, progress)


@dataclass(frozen=True)
class ModelPlan:
    """Points of a model that are measured.

    Attributes:
        batches: of `decode`.
        budgets: by GB, the largest batch of `generate`; of those alone that the card has.
    """

    batches: tuple[int, ...]
    budgets: dict[int, int]

    @classmethod
    def of(cls, config: Config, selection: ModelSelection) -> "ModelPlan":
        """Plan the batches and budgets that this card has memory for."""
        card_gigabytes = gpu.device_info().memory_bytes / 1e9
        largest_batches = {
            gb: largest_batch(config, min(gb, card_gigabytes), PROMPT + NEW_TOKENS, chunk=CHUNK) for gb in BUDGETS
        }
        budgets = {gb: B for gb, B in largest_batches.items() if B and (gb <= card_gigabytes or gb == min(BUDGETS))}
        largest = max(budgets.values(), default=0)
        batches = {B for B in selection.batches if B in range(largest + 1)}
        return cls(tuple(sorted(batches | set(budgets.values()))), budgets)


def row_key(config: Config, measure: str, B: int, L: int, name: str = FACE) -> Key:
    """Return the `Row.key` of a point; `name` is that of a mix, `without`, or ours."""
    return name, "cu", measure, "", tuple(sorted(sizes_of(config, B, L).items())), ()


def model_rows(
    config: Config,
    selection: ModelSelection,
    plan: ModelPlan,
    rows_by_key: Mapping[Key, Row],
    ceilings: Ceilings,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure a model: first the mixes, then ours with `gemm_w4a8_qoq_sm80`, then ours.

    Only one of them is in memory at a time. Rows in `rows_by_key` are not measured again.
    """
    peer_rows: dict[int, dict[str, Row]] = {B: {} for B in plan.batches}
    for row in mix_rows(config, selection, plan, rows_by_key, progress):
        peer_rows.setdefault(row.sizes["B"], {})[MIX] = row
        yield row
    yield from first_token_rows(config, rows_by_key, progress)
    prompts_us: dict[str, float] = {}
    for row in prompt_rows(config, selection, plan, rows_by_key, progress):
        prompts_us = row.peers
        yield row
    if selection.without and not config.experts:  # experts of QServe's packing have no kernel
        for row in qoq_sm80_rows(config, plan.batches, rows_by_key, progress):
            peer_rows[row.sizes["B"]][WITHOUT] = row
            yield row
    step_rows = {B: rows_by_key.get(row_key(config, MEASURE, B, PROMPT)) for B in plan.batches}
    rule_rows = {gb: rows_by_key.get(row_key(config, GENERATE, B, gb)) for gb, B in plan.budgets.items()}
    yield from (recorded_row for recorded_row in (*step_rows.values(), *rule_rows.values()) if recorded_row)
    if all(step_rows.values()) and all(rule_rows.values()):
        return
    with gpu.allocating_elsewhere(_PAD):
        runner = KernelRunner(random_model(config), max(plan.batches), PROMPT + NEW_TOKENS, chunk=CHUNK)
        for B in (B for B, row in step_rows.items() if row is None):
            progress(f"{config.name}, batch {B}")
            step_rows[B] = row = decode_row(runner, B, ceilings, peer_rows[B])
            yield row
        head_us = {B: row.more["head_us"] for B, row in step_rows.items() if row}
        runs: dict[int, RuleTimes] = {}
        for gb in (gb for gb, row in rule_rows.items() if row is None):
            B = plan.budgets[gb]
            if B not in runs:  # two budgets may have room for the same batch
                progress(f"{config.name}: {B} prompts")
                runs[B] = time_rule(runner, B)
            mixes = {B: rows[MIX].peers for B, rows in peer_rows.items() if MIX in rows}
            composed = composed_rates(config, selection.mixes, gb, mixes, prompts_us, head_us)
            yield generate_row(config, B, gb, runs[B], composed)
        del runner


# --- ours ------------------------------------------------------------------------------------------------------------


def random_model(
    config: Config, scheme: str = "lqq", layout: str = "strips", group: int = GROUP, cache: str = DEFAULT_CACHE
) -> QuantizedModel:
    """Make a model of random weights on the device with our quantiser; one layer is copied for all others."""
    first = LayerWeights.random(config, scheme=scheme, group=group, layout=layout, on_device=True)
    rng = np.random.default_rng(1)
    if cache in BY_CHANNEL:
        keys, values = rng.standard_normal((2, PAGE, config.kv_heads, config.head_dim), dtype=np.float32)
        constants = {name: gpu.to_device(np.stack(calibrate_kv(x, cache)))
                     for name, x in (("k_channel", keys), ("v_channel", values))}  # fmt: skip
        first = replace(first, cache=cache, **constants)

    def random_table() -> Any:
        distinct_rows = gpu.to_device(rng.standard_normal((_ROWS, config.hidden), dtype=np.float32).astype(np.float16))
        factors = gpu.to_device(rng.uniform(0.5, 1, (config.vocabulary, 1)).astype(np.float16))
        return np.tile(distinct_rows, (ceil_div(config.vocabulary, _ROWS), 1))[: config.vocabulary] * factors

    return QuantizedModel(
        config=config,
        embedding=random_table(),
        layers=[first, *(copy_of(first) for _ in range(config.layers - 1))],
        final_norm=gpu.to_device(convert_to_dtype(np.ones(config.hidden, np.float32), "float16")),
        head=None if config.tied_head else random_table() * np.float16(config.hidden**-0.5),
    )


class SteadyBatch:
    """B sequences of a runner, of PROMPT to PROMPT + NEW_TOKENS - 1 tokens, evenly staggered, over random pages."""

    def __init__(self, runner: KernelRunner, B: int) -> None:
        self.runner, self.sequences, rng = runner, list(range(B)), np.random.default_rng(B)
        _release_all(runner)
        for page in rng.permutation(runner.pages).tolist():
            runner.page_pool.free.move_to_end(page)
        for b in self.sequences:
            if not runner.reserve(b, PROMPT + NEW_TOKENS):
                raise BenchmarkError(f"{FACE}: {runner.pages} pages do not hold {B} sequences of {PROMPT + NEW_TOKENS}")
        runner.lengths[self.sequences] = PROMPT - 1 + rng.permutation(np.arange(B) * NEW_TOKENS // B)
        block = random_pages(runner.config.kv_heads, runner.cache)
        for cache in runner.caches:
            for start in range(0, cache.pages, len(block)):
                pool = cache.pool[start : start + len(block)]
                gpu.copy_bytes(pool, block[: len(pool)])
        self.tokens = gpu.to_device(rng.integers(0, runner.config.vocabulary, B).astype(np.int32))

    @property
    def mean(self) -> float:
        """Tokens of a sequence in the next step, the new ones included."""
        lengths = self.runner.lengths[self.sequences] + 1
        return float(np.where(lengths > PROMPT + NEW_TOKENS - 1, PROMPT, lengths).mean())

    def step(self) -> Any:
        """Generate one token per sequence, chosen and fed back on the device; return the logits f16 [B, V]."""
        lengths = self.runner.lengths
        lengths[self.sequences] = np.where(
            lengths[self.sequences] >= PROMPT + NEW_TOKENS - 1, PROMPT - 1, lengths[self.sequences]
        )
        logits = self.runner.decode(self.tokens, self.sequences)
        self.tokens = logits.argmax(axis=1)
        return logits

    def check(self) -> str:
        """Compare a step's logits from the graph with those of its launches made one by one; return the claim.

        Raises BenchmarkError for a bit that differs, or a logit that is not finite.
        """
        tokens, lengths = self.tokens, self.runner.lengths.copy()
        graph_logits = gpu.to_host(self.step())
        self.tokens, self.runner.lengths[...] = tokens, lengths
        with self.runner.eagerly():
            eager_logits = gpu.to_host(self.step())
        label = f"{FACE}, {self.runner.config.name}, batch {len(self.sequences)}"
        if not (graph_logits.view(np.uint16) == eager_logits.view(np.uint16)).all():
            raise BenchmarkError(f"{label}: other bits than its launches one by one")
        if not np.isfinite(graph_logits).all():
            raise BenchmarkError(f"{label}: logits that are not finite")
        return "logits of a step from the graph equal to those of its launches made one by one, bit for bit, and finite"


def decode_row(runner: KernelRunner, B: int, ceilings: Ceilings, peer_rows: Mapping[str, Row]) -> Row:
    """Measure a steady batch over `STEPS` steps, and each of its operations alone.

    The row has the times of mixes, to which our head's time is added, and of `qoq_sm80` as peers.
    """
    config = runner.config
    steady_batch = SteadyBatch(runner, B)
    check_note = steady_batch.check()
    clock = Clock()
    with power() as watts:
        clock.start()
        times = gpu.call_times(steady_batch.step, repeats=STEPS, warm_up=_WARM)
        clock.stop()
    measured = Measured(float(np.mean(times)), min(times), max(times), clock.mhz())
    alone_times, head = time_operations(runner, B)
    other_heads_us = time_other_heads(runner, B)
    peers = {peer: us + head for peer, us in peer_rows[MIX].peers.items()} if MIX in peer_rows else {}
    figures = dict(peer_rows[MIX].more) if MIX in peer_rows else {}
    if WITHOUT in peer_rows:
        peers[WITHOUT] = peer_rows[WITHOUT].time_us
    figures |= other_heads_us | ({"power_w": float(np.mean(watts))} if watts else {})
    work = model_work(config, runner.model.layers[0], B, round(B * steady_batch.mean))
    return row_at(config, B, measured, work, alone_times, head, ceilings, check_note, peers, figures)


def row_at(
    config: Config,
    B: int,
    measured: Measured,
    work: Sequence[Work],
    alone_times: Alone,
    head: float,
    ceilings: Ceilings,
    checked: str,
    peers: Mapping[str, float],
    figures: Mapping[str, float],
) -> Row:
    """Build the row of a measured step."""
    parts = {f"{part}_us": config.layers * alone_times.of(part) for part in ("gemm", "attention", "others")}
    parts["head_us"] = head
    floors = {f"floor {operation.name}": operation.us(ceilings) for operation in work}
    floor = sum(floors.values())
    return Row(
        kernel=FACE,
        source="cu",
        measure=MEASURE,
        sizes=sizes_of(config, B, PROMPT),
        time_us=measured.us,
        fastest_us=measured.fastest,
        slowest_us=measured.slowest,
        rate=B / measured.us * 1e6,
        rate_unit="tokens/s",
        bytes=sum(operation.nbytes for operation in work),
        operations=sum(operation.operations for operation in work),
        floor_us=floor,
        fraction=floor / measured.us,
        limit="sum of its operations",
        sm_mhz=measured.sm_mhz,
        checked=checked,
        peers=dict(peers),
        more={**parts, "gaps_us": measured.us - sum(parts.values()), **floors, **alone_times.us, **figures},
        face=FACE,
    )


def time_operations(runner: KernelRunner, B: int) -> tuple[Alone, float]:
    """Time every operation of a layer alone, over all layers' weights and caches; and the head with the argmax.

    The calls overwrite the results of the last step, also the last tokens in the cache.
    """
    us: dict[str, float] = {}
    part: dict[str, str] = {}
    for layer_calls in zip(*runner.operations(B), strict=True):
        operation = decoder.label_of(layer_calls[0])
        part[operation] = decoder.part_of(layer_calls[0])
        us[operation] = measure(layer_calls, replays=GEMM_REPLAYS).us
    head = float(np.median(gpu.call_times(partial(_choose_tokens, runner, B), repeats=20, warm_up=3)))
    return Alone(us, part), head


def time_other_heads(runner: KernelRunner, B: int) -> dict[str, float]:
    """Time the head with the choice of tokens in INT8 and in batch-invariant FP16, in microseconds.

    The INT8 head has random bytes. It is in memory beside the model's own head meanwhile.
    """
    config, model = runner.config, runner.model
    rows = ceil_div(config.vocabulary, HEAD_ROWS) * HEAD_ROWS
    distinct_rows = np.random.default_rng(0).integers(-127, 128, (_ROWS, config.hidden), np.int8)
    q8 = np.tile(gpu.to_device(distinct_rows), (ceil_div(rows, _ROWS), 1))[:rows]
    scale = gpu.to_device(np.full(rows, config.hidden**-0.5 / 127, np.float32))
    int8_head = LMHead(Level1Weight(q8, scale, 127), config.vocabulary, backend=runner.backend)
    float_weight = model.embedding if model.head is None else model.head
    invariant_head = LMHead(float_weight, config.vocabulary, batch_invariant=True, backend=runner.backend)
    head_us = {}
    for figure_name, time_head in (("head_int8_us", int8_head), ("head_invariant_us", invariant_head)):
        times = gpu.call_times(partial(_choose_tokens, runner, B, time_head), repeats=20, warm_up=3)
        head_us[figure_name] = float(np.median(times))
    return head_us


def _choose_tokens(runner: KernelRunner, B: int, head: LMHead | None = None) -> Any:
    return runner.logits(B, head).argmax(axis=1)


def model_work(config: Config, weights: LayerWeights, B: int, tokens: int) -> list[Work]:
    """Compute the least work of all layers and the head: weights and cache are read once.

    Of a layer's experts, as many are read as B tokens choose on average.
    """
    work = []
    chosen_share = config.chosen_experts / max(config.experts, 1)
    for matrix, (N, K) in config.matrices.items():
        share = 1 - (1 - chosen_share) ** B if config.experts and matrix in ("gate_up", "down") else 1
        nbytes = round(config.layers * getattr(weights, matrix).nbytes * share)
        work.append(Work(f"gemm {matrix}", nbytes, 2 * config.layers * rows_of(config, matrix, B) * N * K))
    per_token = config.layers * 2 * config.kv_heads * page_bytes(weights.cache, PAGE, HEAD_DIM) // PAGE
    work.append(Work("attention", tokens * per_token, 4 * config.layers * tokens * config.heads * HEAD_DIM))
    vocabulary = config.vocabulary * config.hidden
    return [*work, Work("head", 2 * vocabulary, 2 * B * vocabulary)]


def qoq_sm80_rows(
    config: Config, batches: Sequence[int], rows_by_key: Mapping[Key, Row], progress: Callable[[str], None]
) -> Iterator[Row]:
    """Measure a steady step by batch with QoQ weights and `gemm_w4a8_qoq_sm80`; no launch overlaps another."""
    recorded_rows = {B: rows_by_key.get(row_key(config, BESIDE, B, PROMPT, WITHOUT)) for B in batches}
    yield from (row for row in recorded_rows.values() if row)
    if all(recorded_rows.values()):
        return
    with gpu.allocating_elsewhere(_PAD):
        model = random_model(config, "qoq", "qserve")
        runner = KernelRunner(model, max(batches), PROMPT + NEW_TOKENS, chunk=1, programmatic=False)
        for B in (B for B, row in recorded_rows.items() if row is None):
            progress(f"{config.name}, batch {B}: ours with gemm_w4a8_qoq_sm80")
            times = gpu.call_times(SteadyBatch(runner, B).step, repeats=_STEPS_WITHOUT, warm_up=_WARM)
            yield peer_row(config, WITHOUT, B, float(np.mean(times)))
        del model, runner


def system_rows(
    config: Config,
    system: str,
    batches: Sequence[int],
    rows_by_key: Mapping[Key, Row],
    ceilings: Ceilings,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure a steady step of a system of `SYSTEMS`, by those batches that the card has room for, and QServe's rule.

    The rule is measured at the largest batch of each budget that the card has.
    """
    settings = SYSTEMS[system]
    recorded_rows = {B: rows_by_key.get(row_key(config, settings.measure, B, PROMPT, system)) for B in batches}
    yield from (row for row in recorded_rows.values() if row)
    if all(recorded_rows.values()) and not settings.rule:
        return
    with gpu.allocating_elsewhere(_PAD):
        model = random_model(config, settings.scheme, settings.layout, settings.group, settings.cache)
        gigabytes = gpu.device_info().memory_bytes / 1e9
        chunk = CHUNK if settings.rule else 1

        def largest_batch_for(gb: float) -> int:
            return largest_batch(
                config, gb, PROMPT + NEW_TOKENS, chunk=chunk, cache=settings.cache, **weights_of(model)
            )

        budgets = {gb: largest_batch_for(gb) for gb in BUDGETS if gb <= gigabytes} if settings.rule else {}
        rule_rows = {
            gb: rows_by_key.get(row_key(config, settings.rule, B, gb, system)) for gb, B in budgets.items() if B
        }
        yield from (row for row in rule_rows.values() if row)
        largest = largest_batch_for(gigabytes)
        missing_batches = [B for B, row in recorded_rows.items() if row is None and B in range(largest + 1)]
        missing_budgets = [gb for gb, row in rule_rows.items() if row is None]
        if missing_batches or missing_budgets:
            most_sequences = max(*missing_batches, *(budgets[gb] for gb in missing_budgets), 1)
            runner = KernelRunner(
                model, most_sequences, PROMPT + NEW_TOKENS, chunk=chunk, programmatic=settings.programmatic
            )
        for B in missing_batches:
            progress(f"{config.name}, batch {B}: {system}")
            yield system_row(runner, system, B, ceilings)
        for gb in missing_budgets:
            progress(f"{config.name}: {budgets[gb]} prompts, {system}")
            yield rule_row(runner, system, budgets[gb], gb)


def rule_row(runner: KernelRunner, system: str, B: int, gigabytes: int) -> Row:
    """Measure QServe's rule at a batch: all prompts and all steps."""
    times = time_rule(runner, B)
    row = generate_row(runner.config, B, gigabytes, times, {})
    return replace(row, kernel=system, face="", measure=SYSTEMS[system].rule)


def system_row(runner: KernelRunner, system: str, B: int, ceilings: Ceilings) -> Row:
    """Measure a step of B sequences; its floor counts the bytes and the operations at INT8's rate."""
    config, clock, steady_batch = runner.config, Clock(), SteadyBatch(runner, B)
    check_note = steady_batch.check()
    clock.start()
    times = gpu.call_times(steady_batch.step, repeats=_STEPS_WITHOUT, warm_up=_WARM)
    clock.stop()
    us = float(np.mean(times))
    work = model_work(config, runner.model.layers[0], B, round(B * steady_batch.mean))
    floor = sum(operation.us(ceilings) for operation in work)
    row = plain_row(
        system,
        SYSTEMS[system].measure,
        sizes_of(config, B, PROMPT),
        us,
        rate=B / us * 1e6,
        sm_mhz=clock.mhz(),
        checked=check_note,
    )
    return replace(
        row,
        fastest_us=min(times),
        slowest_us=max(times),
        bytes=sum(operation.nbytes for operation in work),
        operations=sum(operation.operations for operation in work),
        floor_us=floor,
        fraction=floor / us,
        limit="sum of its operations",
    )


class RuleTimes(NamedTuple):
    """QServe's rule at a batch: microseconds of the prompts and of the steps behind them, clock, mean power or 0."""

    prefill_us: float
    decode_us: float
    sm_mhz: float
    power_w: float


def time_rule(runner: KernelRunner, B: int) -> RuleTimes:
    """Time prompts and steps of B sequences, from the first prompt to the last token.

    Every launch has been made once before.
    """
    rng = np.random.default_rng(B)
    prompts = rng.integers(0, runner.config.vocabulary, (B, PROMPT))
    sequences, prompts_per_chunk = list(range(B)), runner.chunk // PROMPT
    chunks = [
        {b: prompts[b] for b in sequences[first : first + prompts_per_chunk]}
        for first in range(0, B, prompts_per_chunk)
    ]
    _release_all(runner)
    for chunk in (chunks[0], chunks[-1])[: len(chunks)]:  # the last one may be smaller
        runner.extend(chunk).argmax(axis=1)
    runner.decode(np.zeros(B, np.int32), sequences).argmax(axis=1)
    _release_all(runner)
    clock = Clock()
    with power() as watts:
        clock.start()
        gpu.synchronize()
        begin = time.perf_counter()
        logits = [runner.extend(chunk) for chunk in chunks]
        tokens = np.concatenate([chunk_logits.argmax(axis=1) for chunk_logits in logits])
        gpu.synchronize()
        after_prompts = time.perf_counter()
        for _ in range(NEW_TOKENS - 1):
            tokens = runner.decode(tokens, sequences).argmax(axis=1)
        gpu.synchronize()
        end = time.perf_counter()
        clock.stop()
    last = gpu.to_host(tokens)
    are_tokens_valid = (last >= 0).all() and last.max() < runner.config.vocabulary
    if not are_tokens_valid or (runner.lengths[sequences] != PROMPT + NEW_TOKENS - 1).any():
        problem = f"{B} sequences did not come to {PROMPT + NEW_TOKENS} tokens"
        raise BenchmarkError(f"{GENERATE}, {runner.config.name}: {problem}")
    watt = float(np.mean(watts)) if watts else 0.0
    return RuleTimes(1e6 * (after_prompts - begin), 1e6 * (end - after_prompts), clock.mhz(), watt)


def _release_all(runner: KernelRunner) -> None:
    for b in range(runner.batch):
        runner.release(b)


def generate_row(
    config: Config, B: int, gigabytes: int, times: RuleTimes, composed: Mapping[str, tuple[float, int]]
) -> Row:
    """Build the row of QServe's rule under a budget, beside the mixes at their best batch, in microseconds.

    A mix's time as a peer is that in which it serves as many sequences as ours, some after others if need be.
    """
    us = times.prefill_us + times.decode_us
    figures = {"prefill_us": times.prefill_us, "decode_us": times.decode_us}
    figures |= {f"{mix} batch": float(batch) for mix, (_, batch) in composed.items()}
    figures |= {f"{mix} tokens_per_second": batch * NEW_TOKENS / us * 1e6 for mix, (us, batch) in composed.items()}
    figures |= {"power_w": times.power_w} if times.power_w else {}
    return plain_row(
        FACE,
        GENERATE,
        sizes_of(config, B, gigabytes),
        us,
        rate=B * NEW_TOKENS / us * 1e6,
        sm_mhz=times.sm_mhz,
        checked="lengths of all sequences; steps are checked where they are timed",
        peers={mix: us * B / batch for mix, (us, batch) in composed.items()},
        more=figures,
        face=FACE,
    )


def plain_row(kernel: str, measure: str, sizes: dict[str, int], us: float, rate: float, **fields: Any) -> Row:
    """Build a row without a floor of its own."""
    defaults: dict[str, Any] = {"source": "cu", "rate_unit": "tokens/s", "bytes": 0, "operations": 0, "fraction": 1.0}
    defaults |= dict.fromkeys(("time_us", "fastest_us", "slowest_us", "floor_us"), us)
    return Row(kernel=kernel, measure=measure, sizes=sizes, rate=rate, limit="itself", **defaults, **fields)


@contextmanager
def power() -> Iterator[list[float]]:
    """Sample the card's power in watts five times a second while the block runs.

    The list stays empty without nvidia-smi.
    """
    watts: list[float] = []
    query = "--query-gpu=power.draw --format=csv,noheader,nounits -lms 200"
    command = ["nvidia-smi", "-i", gpu.card_id(), *query.split()]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield watts
        return
    try:
        yield watts
    finally:
        process.terminate()
        for line in process.communicate()[0].splitlines():
            with suppress(ValueError):
                watts.append(float(line))


# --- mixes -----------------------------------------------------------------------------------------------------------


def mix_rows(
    config: Config,
    selection: ModelSelection,
    plan: ModelPlan,
    rows_by_key: Mapping[Key, Row],
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure steps of the mixes without the head: one row per batch of ours, and per largest batch of a mix.

    The largest batch comes first.
    """
    batches_by_mix: dict[str, set[int]] = {}
    for gb in plan.budgets:
        for mix, B in mix_batches(config, selection.mixes, gb).items():
            batches_by_mix.setdefault(mix, set()).update({B} - {0, *plan.batches})
    batches_to_time = sorted(
        {*plan.batches, *(B for batches in batches_by_mix.values() for B in batches)}, reverse=True
    )
    recorded_rows = {B: rows_by_key.get(row_key(config, BESIDE, B, PROMPT, MIX)) for B in batches_to_time}
    yield from (row for row in recorded_rows.values() if row)
    missing_batches = tuple(B for B, row in recorded_rows.items() if row is None)
    if not missing_batches or not selection.mixes:
        return
    progress(f"{config.name}: compiling")
    schemes = [("lqq", "strips")] + [("qoq", "qserve")] * (selection.without and not config.experts)
    our_jobs: list[Job] = [(_warm, (config, *scheme, plan.batches)) for scheme in schemes]
    prompts = (peers_layer.PROMPTS_AT_ONCE * PROMPT,)
    run_in_processes([*our_jobs, *peers_layer.compile_jobs((config,), missing_batches, selection.mixes, prompts)])
    common_batches = [B for B in plan.batches if B in missing_batches]
    extra_batches = {mix: batches & {*missing_batches} for mix, batches in batches_by_mix.items()}
    measured = peers_layer.mixes(
        config, common_batches, selection.mixes, progress, length=MEAN, extra_batches=extra_batches
    )
    for B, times in measured:
        if times:
            yield mix_row(config, B, times)


def prompt_rows(
    config: Config,
    selection: ModelSelection,
    plan: ModelPlan,
    rows_by_key: Mapping[Key, Row],
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure a prompt of `PROMPT` tokens in every mix: all layers, with causal attention."""
    row = rows_by_key.get(row_key(config, PROMPTS, 1, PROMPT, MIX))
    if row is None and selection.mixes and plan.budgets:
        times = peers_layer.prefills(config, selection.mixes, PROMPT, progress)
        row = mix_row(config, 1, times, PROMPTS) if times else None
    yield from [row] if row else []


def first_token_rows(config: Config, rows_by_key: Mapping[Key, Row], progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure the time to the first token of a prompt that shares `SHARED_PAGES` pages.

    The peer is a prompt that shares none.
    """
    row = rows_by_key.get(row_key(config, FIRST_TOKEN, 1, TOKENS))
    if row is None:
        progress(f"{config.name}: time to the first token")
        with gpu.allocating_elsewhere(_PAD):
            runner = KernelRunner(random_model(config), 1, TOKENS + PAGE, chunk=CHUNK, pages=4 * ceil_div(TOKENS, PAGE))
            shared, new_tokens = first_token_times(runner, TOKENS, SHARED_PAGES)
            del runner
        us = float(np.median(shared))
        row = plain_row(
            FACE,
            FIRST_TOKEN,
            sizes_of(config, 1, TOKENS),
            us,
            rate=TOKENS / us * 1e6,
            sm_mhz=0.0,
            checked=f"{SHARED_PAGES} pages of {PAGE} tokens are shared",
            peers={NEW: float(np.median(new_tokens))},
            face=FACE,
        )
        row = replace(row, fastest_us=min(shared), slowest_us=max(shared))
    yield row


def mix_row(config: Config, B: int, times: Mapping[str, peers_layer.MixTime], measure: str = BESIDE) -> Row:
    """Build the row of all layers of every mix from one layer's `times`, with the shares of GEMMs and attention."""
    us = {mix_name: config.layers * mix.layer for mix_name, mix in times.items()}
    figures = {f"{mix_name} gemm_us": config.layers * mix.gemms for mix_name, mix in times.items()}
    figures |= {
        f"{mix_name} attention_us": config.layers * (mix.layer - mix.without_attention)
        for mix_name, mix in times.items()
    }
    return peer_row(config, MIX, B, min(us.values()), us, figures, measure)


def peer_row(
    config: Config,
    name: str,
    B: int,
    us: float,
    peers: Mapping[str, float] | None = None,
    figures: Mapping[str, float] | None = None,
    measure: str = BESIDE,
) -> Row:
    """Build the row of another implementation's step of B sequences (`BESIDE`), or of its B prompts (`PROMPTS`)."""
    rate = B * (1 if measure == BESIDE else PROMPT) / us * 1e6
    check_note = "a layer against the FP16 mix's" if name == MIX else "not looked at"
    parts: dict[str, Any] = {"peers": dict(peers or {}), "more": dict(figures or {})}
    return plain_row(name, measure, sizes_of(config, B, PROMPT), us, rate, sm_mhz=0.0, checked=check_note, **parts)


def _warm(config: Config, scheme: str, layout: str, batches: Sequence[int]) -> None:
    """Compile all that our steps at these batches need, in a process that ends then."""
    model = random_model(replace(config, layers=1), scheme, layout)
    is_ours = scheme == "lqq"
    runner = KernelRunner(
        model,
        max(batches),
        PROMPT + NEW_TOKENS,
        chunk=CHUNK if is_ours else 1,
        pages=max(*batches, CHUNK),
        programmatic=is_ours,
    )
    for B in batches:
        runner.operations(B)
    if is_ours:
        runner.extend({0: [0] * (PROMPT + 1)})  # padded to a chunk
    for B in batches if is_ours else ():
        time_other_heads(runner, B)


def mix_bytes(config: Config, mix: str, attention: str) -> tuple[int, int]:
    """Return the bytes of a mix's weights, and of one sequence's cache at the end.

    Scales, pages and buffers are not counted.
    """
    experts = max(1, config.experts)
    sizes = {
        matrix: N * K * (experts if matrix in ("gate_up", "down") else 1) for matrix, (N, K) in config.matrices.items()
    }
    ends = 2 * (1 if config.tied_head else 2) * config.vocabulary * config.hidden
    element = 1 if attention.startswith("xqa") else 2
    cache = config.layers * 2 * config.kv_heads * HEAD_DIM * element * (PROMPT + NEW_TOKENS)
    return round(config.layers * sum(sizes.values()) * MIXES[mix].weight_bytes) + ends, cache


def mix_batches(config: Config, mixes: Sequence[str], gigabytes: float) -> dict[str, int]:
    """Return the largest batch, up to 256, that fits a budget, by `MIX/ATTENTION`.

    It is 0 if not even one sequence fits.
    """
    return {mix: largest_mix_batch(config, gigabytes, mix) for mix in peers_layer.names_of(config, mixes)}


def largest_mix_batch(config: Config, gigabytes: float, name: str) -> int:
    """Return the largest batch, up to 256, that fits a budget, of one `MIX/ATTENTION`."""
    weights, cache = mix_bytes(config, *name.split("/"))
    return int(min(max(BATCHES), max(0, (gigabytes * 10**9 - RESERVE - weights) // cache)))


def composed_rates(
    config: Config,
    mixes: Sequence[str],
    gigabytes: float,
    mixes_us: Mapping[int, Mapping[str, float]],
    prompts: Mapping[str, float],
    heads: Mapping[int, float],
) -> dict[str, tuple[float, int]]:
    """Compute QServe's rule for the mixes: microseconds and batch at the batch with the most tokens/s, by name.

    Prefill is layers alone, the steps are of MEAN tokens. A mix whose prompts were not measured is left out.
    """
    rates: dict[str, tuple[float, int]] = {}
    for mix_name, largest in mix_batches(config, mixes, gigabytes).items():
        mix = mix_name.partition("/")[0]
        batch_times = [(B, us[mix_name]) for B, us in mixes_us.items() if mix_name in us and B in range(largest + 1)]
        for B, step in batch_times if mix in prompts else ():
            head = heads[min(heads, key=lambda batch: abs(batch - B))]
            us = B * prompts[mix] + NEW_TOKENS * (step + head)
            if mix_name not in rates or B / us > rates[mix_name][1] / rates[mix_name][0]:
                rates[mix_name] = us, B
    return rates


def _record_of(only: Sequence[str]) -> str:
    """Return the name of the models' own record if all words of `only` are models; an empty string otherwise."""
    return f"decode/{'+'.join(only)}" if only and set(only) <= {config.name for config in MODELS} else ""


SUITE = Suite("decode", rows, part=part, record_of=_record_of, resumes=True)
