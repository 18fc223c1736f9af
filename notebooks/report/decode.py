"""Whole models as recorded: steady steps, QServe's rule and peaks under each budget of memory, a picture a model."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.decode import (
    BESIDE,
    BUDGETS,
    BY_TORCH,
    CHANNEL,
    CHANNEL_RULE,
    FIRST_TOKEN,
    FOUR_BIT_BATCHES,
    FOUR_BITS,
    GENERATE,
    GROUPS,
    GROUPS_RULE,
    MEASURE,
    MIX,
    MODELS,
    NEW,
    NEW_TOKENS,
    PROMPT,
    STATIC_CACHE,
    WITHOUT,
    config_of,
    largest_mix_batch,
)
from benchmarks.layer_shapes import TOPS, rows_of
from benchmarks.shared_prefix import SHARED_PAGES, TOKENS
from ptxlab import bench
from ptxlab.bench.record import Record
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.plot import BLUE, GREY, ORANGE, PURPLE, RED
from report import RESULTS, frames
from report.frames import MISSING, markdown
from report.layer import KINDS, fastest
from report.style import bare, title

# LiquidGEMM, Table 1: LiquidServe's peak in tokens/s and its batch, on an H800 of 80 GB.
LIQUIDSERVE = {
    "LLaMA-30B": (1607, 53),
    "LLaMA-2-7B": (6721, 194),
    "LLaMA-2-13B": (4105, 119),
    "LLaMA-2-70B": (3695, 184),
    "LLaMA-3-8B": (16694, 256),
    "Mistral-7B": (17011, 256),
    "Yi-34B": (6999, 256),
    "Mixtral-8x7B": (10745, 256),
}
FRONT = ("LLaMA-2-7B", "LLaMA-2-70B", "LLaMA-3-8B", "Mixtral-8x7B")  # models of the README
TOPS_MHZ = TOPS * 1e6 / (132 * 8192)  # the clock at which 132 SMs of 8,192 INT8 operations a cycle make TOPS
OURS = "ptxlab"
_SYSTEMS = {
    "groups": "W4A8 in groups of 128",
    "channel": "W4A8 per channel (QServe)",
    "liquid": "W4A8 in groups of 64, static KV8 (LiquidServe)",
    "w4a4": "W4A4 (Atom)",
    "w4ax": "W4Ax (COMET)",
}
_RULES, _RULE = (GROUPS_RULE, CHANNEL_RULE), f"QServe's rule within {BUDGETS[0]} GB, tokens/s"
_PARTS = {"gemm": BLUE, "attention": ORANGE, "others": RED, "head": GREY}
_LINES = {OURS: BLUE, "FP8": ORANGE, "humming per channel": PURPLE, "humming g128": RED, "FP16": GREY}


def load_records() -> list[Record]:
    """Load the valid records of the suite on the H200: the one of all models, and those of single models."""
    folder = RESULTS / "h200"
    paths = [folder / "decode.json", *sorted((folder / "decode").glob("*.json"))]
    records = [bench.load(path) for path in paths if path.is_file()]
    return [record for record in records if not record.invalid]


def points(records: list[Record], measure: str) -> pd.DataFrame:
    """Return one row per model and batch, or per model and budget, in the order of the table.

    Where several records have the same point, the last one counts.
    """
    rows_by_point = {}
    for record in records:
        for row in record.rows:
            config = config_of(row.sizes)
            if row.measure != measure or config is None:
                continue
            fields = {**row.more, **vars(row), **row.sizes, "model": config.name}
            fields["decode rate"] = row.sizes["B"] * (NEW_TOKENS - 1) / row.more.get("decode_us", math.nan) * 1e6
            for kind, prefix in {**KINDS, "qoq_sm80": WITHOUT}.items():
                peer = fastest(row.peers, prefix)
                fields[f"over {kind}"] = row.peers[peer] / row.time_us if peer else math.nan
                rates = [
                    v for key, v in row.more.items() if key.startswith(prefix) and key.endswith("tokens_per_second")
                ]
                fields[f"rate over {kind}"] = row.rate / max(rates) if rates else math.nan
            rows_by_point[[c.name for c in MODELS].index(config.name), row.sizes["B"], row.sizes["L"]] = fields
    return pd.DataFrame([rows_by_point[key] for key in sorted(rows_by_point)])


def rates(records: list[Record], model: str, gb: int) -> dict[str, dict[int, float]]:
    """Return tokens/s of steady steps by batch, for our model and for the best mix of each kind.

    The best mix of a kind is the one with the highest peak in the budget. Batches are ours; a mix also has its own
    largest batch. A mix's head is that of our nearest batch.
    """
    rows = [row for record in records for row in record.rows if (c := config_of(row.sizes)) and c.name == model]
    budget_batches = [row.sizes["B"] for row in rows if row.measure == GENERATE and row.sizes["L"] == gb]
    steps = {row.sizes["B"]: row for row in rows if row.measure == MEASURE}
    rates_by_kind = {OURS: {B: row.rate for B, row in sorted(steps.items()) if max(budget_batches, default=0) >= B}}
    if not rates_by_kind[OURS]:
        return {}
    (config,) = (config for config in MODELS if config.name == model)
    mix_rows = {row.sizes["B"]: row for row in rows if row.measure == BESIDE and row.kernel == MIX}
    for kind, prefix in KINDS.items():
        rates_by_mix: dict[str, dict[int, float]] = {}
        for B, row in sorted(mix_rows.items()):
            head = steps[min(steps, key=lambda batch: abs(batch - B))].more["head_us"]
            for peer, us in row.peers.items():
                if peer.startswith(prefix) and largest_mix_batch(config, gb, peer) >= B:
                    rates_by_mix.setdefault(peer, {})[B] = 1e6 * B / (us + head)
        if rates_by_mix:
            rates_by_kind[kind] = max(rates_by_mix.values(), key=lambda by_batch: max(by_batch.values()))
    return rates_by_kind


def peaks(records: list[Record]) -> pd.DataFrame:
    """Return one row per model and budget: the highest tokens/s of steady steps, ours and of each kind of mix."""
    lines = []
    for config in MODELS:
        for gb in BUDGETS:
            if rates_by_kind := rates(records, config.name, gb):
                best_rates = {kind: max(rate_by_batch.values()) for kind, rate_by_batch in rates_by_kind.items()}
                ratio_to_kind = {f"over {kind}": best_rates[OURS] / best_rates.get(kind, math.nan) for kind in KINDS}
                lines.append({"model": config.name, "GB": gb, **best_rates, **ratio_to_kind})
    return pd.DataFrame(lines, columns=["model", "GB", OURS, *KINDS, *(f"over {kind}" for kind in KINDS)])


def peaks_table(records: list[Record]) -> str:
    """Build the table of peak tokens/s of steady steps under each budget."""
    rows = peaks(records)
    if rows.empty:
        return MISSING
    columns = {"model": ("model", "{}"), "GB": ("GB", "{:d}")}
    columns |= {kind: (kind, "{:,.0f}") for kind in (OURS, *KINDS)}
    columns |= {f"over {kind}": (f"over {kind}", "{:.2f}x") for kind in KINDS}
    return _format_table(rows, columns, records)


def steps_table(records: list[Record]) -> str:
    """Build the table of steady steps: milliseconds, tokens/s, parts, fraction of the floor, speed-up over mixes."""
    rows = points(records, MEASURE)
    if rows.empty:
        return MISSING
    columns = {
        "model": ("model", "{}"),
        "B": ("batch", "{:d}"),
        "ms": ("ms", "{:.2f}"),
        "rate": ("tokens/s", "{:,.0f}"),
        "fraction": ("of the floor", "{:.2f}"),
    }
    columns |= {part: (part, "{:.0%}") for part in _PARTS}
    columns |= {f"over {kind}": (f"over {kind}", "{:.2f}x") for kind in (*KINDS, "qoq_sm80")}
    shares = {part: rows[f"{part}_us"] / rows.time_us for part in _PARTS}
    return _format_table(rows.assign(ms=rows.time_us / 1e3, **shares), columns, records)


def generate_table(records: list[Record]) -> str:
    """Build the table of QServe's rule by model and budget: tokens/s, speed-up over mixes, LiquidServe's figure."""
    rows = points(records, GENERATE)
    if rows.empty:
        return MISSING
    paper = pd.DataFrame([LIQUIDSERVE[model] for model in rows.model], columns=["paper", "its batch"], index=rows.index)
    columns = {
        "model": ("model", "{}"),
        "L": ("GB", "{:d}"),
        "B": ("batch", "{:d}"),
        "rate": ("tokens/s", "{:,.0f}"),
        "decode rate": ("without prefill", "{:,.0f}"),
    }
    columns |= {f"rate over {kind}": (f"over {kind}", "{:.2f}x") for kind in KINDS}
    columns |= {"paper": ("LiquidServe, H800 80 GB", "{:,d}"), "its batch": ("its batch", "{:d}")}
    return _format_table(pd.concat([rows, paper], axis=1), columns, records, _describe_prompt_attention(rows))


def _describe_prompt_attention(rows: pd.DataFrame) -> str:
    """Say what attended our prompts: `attention_kv4_prefill_sm90`, unless a row says that it was PyTorch."""
    is_by_torch = rows.reindex(columns=[BY_TORCH])[BY_TORCH] == 1
    other_models = ", ".join(rows.model[~is_by_torch].unique())
    if not is_by_torch.any():
        return f"Our prompts are attended by {PREFILL.name}."
    return (
        f"Our prompts are attended by PyTorch{f', those of {other_models} by {PREFILL.name}' if other_models else ''}."
    )


def front_table(records: list[Record]) -> str:
    """Build the README's table of steady steps, peaks and QServe's rule for the `FRONT` models.

    Steps are at the smallest and the largest batch, the others under the smallest budget. A model without them is left
    out.
    """
    steps, rule_rows, peak_rows = points(records, MEASURE), points(records, GENERATE), peaks(records)
    if steps.empty or rule_rows.empty:
        return MISSING
    budget, lines = min(BUDGETS), []
    first, last = int(steps.B.min()), int(steps.B.max())
    for model in FRONT:
        model_steps = steps[steps.model == model].set_index("B")
        rule = rule_rows[(rule_rows.model == model) & (budget == rule_rows.L)]
        if {first, last} <= set(model_steps.index) and len(rule):
            peak = peak_rows[(peak_rows.model == model) & (budget == peak_rows.GB)][
                ["over FP8", "over humming per channel"]
            ].iloc[0]
            ends = (model_steps.loc[B, column] for B in (first, last) for column in ("rate", "fraction"))
            lines.append((model, *ends, *peak, *rule[["rate", "rate over FP8"]].iloc[0]))
    if not lines:
        return MISSING
    columns = {"model": "{}"}
    for B in (first, last):
        columns |= {f"batch {B}: tokens/s": "{:,.0f}", f"batch {B}: of the floor": "{:.2f}"}
    columns |= {f"peak in {budget} GB over FP8's": "{:.2f}x", "over humming per channel's": "{:.2f}x"}
    columns |= {f"QServe's rule, {budget} GB: tokens/s": "{:,.0f}", "over FP8's": "{:.2f}x"}
    return f"{markdown(pd.DataFrame(lines, columns=[*columns]), columns)}\n{_origin(records)}\n"


def heads_table(records: list[Record]) -> str:
    """Build the table of the LM head in FP16 and in INT8, at each model's smallest and largest batch."""
    rows = points(records, MEASURE)
    if rows.empty:
        return MISSING
    batches_by_model = rows.groupby("model").B
    rows = rows[(batches_by_model.transform("min") == rows.B) | (batches_by_model.transform("max") == rows.B)]
    columns = {
        "model": ("model", "{}"),
        "V": ("vocabulary", "{:,d}"),
        "B": ("batch", "{:d}"),
        "head_us": ("FP16, µs", "{:.0f}"),
        "head_int8_us": ("INT8, µs", "{:.0f}"),
        "over": ("INT8 over FP16", "{:.2f}x"),
    }
    return _format_table(rows.assign(over=rows.head_us / rows.head_int8_us), columns, records)


def limits_table(records: list[Record]) -> str:
    """Build the table of what limits steady steps: power (and with it the clock), small kernels and gaps.

    Batches are the smallest, a middle one and the largest.
    """
    rows = points(records, MEASURE)
    if rows.empty:
        return MISSING
    largest = rows.groupby("model").B.transform("max")
    rows = rows[rows.B.isin({rows.B.min(), 64}) | (largest == rows.B)]
    parts = {part: rows[f"{part}_us"] / 1e3 for part in ("others", "gaps")}
    share = (rows.others_us + rows.gaps_us) / rows.time_us
    fraction_at_clock = rows.apply(_floor_at_clock, axis=1) / rows.time_us
    rows = rows.assign(**parts, share=share, fraction_at_clock=fraction_at_clock)
    columns = {
        "model": ("model", "{}"),
        "B": ("batch", "{:d}"),
        "power_w": ("power, W", "{:.0f}"),
        "sm_mhz": ("clock, MHz", "{:,.0f}"),
        "fraction": ("of the floor", "{:.2f}"),
        "fraction_at_clock": ("of the floor at that clock", "{:.2f}"),
        "others": ("small kernels, ms", "{:.2f}"),
        "gaps": ("gaps, ms", "{:.2f}"),
        "share": ("both, of the step", "{:.0%}"),
    }
    return _format_table(rows, columns, records)


def systems_table(systems: Record | None) -> str:
    """Build the table of steady steps of one model with other systems' weights, by batch, in ms and tokens/s.

    The last column is QServe's rule, where it is measured.
    """
    if systems is None:
        return MISSING
    lines = []
    for kernel, system_name in _SYSTEMS.items():
        system_record = replace(systems, rows=tuple(row for row in systems.rows if row.kernel == kernel))
        steps = pd.concat([points([system_record], m) for m in (GROUPS, CHANNEL, STATIC_CACHE, FOUR_BITS)])
        rates = [
            f"{row.rate:,.0f}" for row in system_record.rows if row.measure in _RULES and row.sizes["L"] == BUDGETS[0]
        ]
        lines.append({"weights": system_name, **_by_batch(steps), _RULE: "".join(rates)})
    model = points([systems], CHANNEL).model.iloc[0]
    note = (
        f"{model}; milliseconds and tokens/s of steps alone; QServe's rule has prompts of {PROMPT:,} tokens in its"
        f" time. Measured on one {systems.device['name']} in one run by `python -m benchmarks decode` with `--only` of"
        f" {model} and each system, {systems.date[:10]}, commit {systems.revision}."
    )
    return f"{markdown(pd.DataFrame(lines))}\n{note}\n"


def load_systems_record() -> Record | None:
    """Load the record of steps in W4A4, in W4Ax and with weights per channel, or return None if there is none."""
    return frames.load_record("decode_systems")


def load_alone_record() -> Record | None:
    """Load the record of models without mixes, whose prompts our own kernel attends; return None without it."""
    return frames.load_record("decode_alone")


def prompts_table(record: Record | None) -> str:
    """Build the table of times to the first token with and without shared pages, and QServe's rule, by model."""
    first = points([record], FIRST_TOKEN) if record else pd.DataFrame()
    if record is None or first.empty:
        return MISSING
    rule = points([record], GENERATE).query("L == @BUDGETS[0]").set_index("model")
    prompts = rule.B * PROMPT / rule.prefill_us * 1e6
    table = pd.DataFrame(
        {
            "model": first.model,
            "first token, ms": [row.peers[NEW] / 1e3 for row in first.itertuples()],
            f"{SHARED_PAGES} pages shared, ms": first.time_us / 1e3,
            "batch": first.model.map(rule.B),
            "prompts, tokens/s": first.model.map(prompts),
            "QServe's rule, tokens/s": first.model.map(rule.rate),
        }
    )
    formats = {column: "{:.1f}" if column.endswith("ms") else "{:,.0f}" for column in table.columns[1:]}
    note = (
        f"Prompts of {TOKENS:,} tokens; the rule within {BUDGETS[0]} GB. Measured on one {record.device['name']} by"
        f" `python -m benchmarks decode --only alone`, {record.date[:10]}, commit {record.revision}."
    )
    return f"{markdown(table, formats)}\n{note}\n"


def _by_batch(rows: pd.DataFrame) -> dict[str, str]:
    """Format one cell per batch of the four-bit systems: ms and tokens/s, empty where not measured."""
    cell_by_batch = {row.B: f"{row.time_us / 1e3:.2f} ms, {row.rate:,.0f}" for row in rows.itertuples()}
    return {f"batch {B}": cell_by_batch.get(B, "") for B in FOUR_BIT_BATCHES}


def _format_table(rows: pd.DataFrame, columns: dict[str, tuple[str, str]], records: list[Record], *notes: str) -> str:
    """Format columns of `rows` as a table, `columns` giving heading and format; the origin and `notes` follow below."""
    table = rows.reindex(columns=[*columns]).rename(
        columns={column: heading for column, (heading, _) in columns.items()}
    )
    return f"{markdown(table, dict(columns.values()))}\n{' '.join((_origin(records), *notes))}\n"


def _floor_at_clock(row: pd.Series) -> float:
    """Compute the floor of a step in microseconds with the tensor cores at the step's measured clock."""
    config = next(config for config in MODELS if config.name == row.model)
    tops_at_clock, floor = TOPS * min(1, row.sm_mhz / TOPS_MHZ), float(row.floor_us)
    for matrix, (N, K) in config.matrices.items():
        products = config.layers * 2 * rows_of(config, matrix, row.B) * N * K
        floor += max(0, products / tops_at_clock / 1e6 - row[f"floor gemm {matrix}"])
    return floor


def _origin(records: list[Record]) -> str:
    """Return the dates, the GPUs and the commit of the records; with several commits, the models of each."""
    dates = ", ".join(sorted({record.date[:10] for record in records}))
    names = ", ".join(sorted({record.device["name"] for record in records}))
    cards = len({record.device["card"] for record in records})
    gpu = "the same GPU" if cards == 1 else f"one of {cards} GPUs"
    names_by_commit: dict[str, list[str]] = {}
    for record in records:
        names_by_commit.setdefault(record.revision, []).append(record.suite.rpartition("/")[2])
    commit_models = "; ".join(f"{', '.join(models)} at commit {commit}" for commit, models in names_by_commit.items())
    commits = f": {commit_models}" if len(names_by_commit) > 1 else f", at commit {records[0].revision}"
    return f"Measured by `python -m benchmarks decode` on {dates}, each model alone on {gpu} ({names}){commits}."


def picture_name(model: str) -> str:
    """Return the name of a model's picture, which `model_figure` draws."""
    return f"decode_{model.lower().replace('-', '_')}"


def model_figure(records: list[Record], model: str) -> Figure:
    """Plot one model: the parts of a steady step by batch, and tokens/s by batch up to the end of both budgets."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = points(records, MEASURE)
    _steps(left, rows[rows.model == model], model)
    _lines(right, records, model)
    return figure


def _steps(axes: Axes, rows: pd.DataFrame, model: str) -> None:
    """Draw stacked bars of every operation's own time in a step; beside each bar the whole step and its floor."""
    places, bottoms = np.arange(len(rows)), np.zeros(len(rows))
    for part, colour in _PARTS.items():
        ms = rows[f"{part}_us"].to_numpy(dtype=float) / 1e3
        axes.bar(places, ms, 0.6, bottoms, color=colour, edgecolor="white", label=f"{part}, alone")
        bottoms = bottoms + ms
    axes.plot(places, rows.time_us / 1e3, "D", color="black", markersize=5, label="the step")
    axes.plot(places, rows.floor_us / 1e3, "_", color="black", markersize=18, label="its floor")
    axes.set_xticks(places, [str(B) for B in rows.B])
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("ms per step")
    title(axes, f"{model}: {rows.fraction.min():.2f} to {rows.fraction.max():.2f} of the floor", size=10)
    axes.legend(frameon=False, fontsize=8)
    bare(axes)


def _lines(axes: Axes, records: list[Record], model: str) -> None:
    """Draw tokens/s by batch: solid lines up to the smaller budget, dashed lines up to the larger one."""
    small_budget, large_budget = BUDGETS
    small_rates, large_rates = rates(records, model, small_budget), rates(records, model, large_budget)
    peak = {kind: max(rate_by_batch.values()) for kind, rate_by_batch in small_rates.items()}
    for kind, colour in _LINES.items():
        fitting_rates, all_rates = small_rates.get(kind, {}), large_rates.get(kind, {})
        if not all_rates:
            continue
        rates_beyond = {B: rate for B, rate in all_rates.items() if max(fitting_rates, default=0) <= B}
        label = f"{kind}: {peak[kind]:,.0f}" if fitting_rates else f"{kind}: does not fit"
        axes.plot(
            [*fitting_rates],
            [*fitting_rates.values()],
            "o-",
            color=colour,
            markersize=4,
            label=label,
            zorder=3,
        )
        axes.plot([*rates_beyond], [*rates_beyond.values()], "o--", color=colour, markersize=4, markerfacecolor="white")
    axes.plot([], [], "-", color="black", label=f"fits {small_budget} GB")
    axes.plot([], [], "--", color="black", label=f"fits {large_budget} GB")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 16, 64, 128, 256], ["1", "4", "16", "64", "128", "256"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("tokens/s of steady steps")
    speedups = [f"{peak[OURS] / peak[kind]:.2f}x {kind}'s" for kind in ("FP8", "humming per channel") if kind in peak]
    title(axes, f"Peak within {small_budget} GB: {', '.join(speedups)}" if speedups else "tokens/s", size=10)
    head = f"peak within {small_budget} GB, tokens/s"
    axes.legend(frameon=False, fontsize=8, loc="upper left", title=head, title_fontsize=8, alignment="left")
    bare(axes)
