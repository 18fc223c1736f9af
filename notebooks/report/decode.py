"""Whole models as recorded: a table of steady steps, and one of QServe's rule under each budget of memory."""

import math

import pandas as pd

from ptxlab import bench
from ptxlab.bench.models import GENERATE, MADE, MEASURE, MODELS, WITHOUT, config_of
from ptxlab.bench.record import Record
from report import RESULTS
from report.frames import MISSING, markdown
from report.layer import KINDS, fastest

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
_KINDS = {kind: start for kind, start in KINDS.items() if kind != "humming per channel"}


def recorded() -> list[Record]:
    """The records of the suite on the H200: of all models at once, and of some; only those that are valid."""
    folder = RESULTS / "h200"
    paths = [folder / "decode.json", *sorted((folder / "decode").glob("*.json"))]
    records = [bench.load(path) for path in paths if path.is_file()]
    return [record for record in records if not record.invalid]


def points(records: list[Record], measure: str) -> pd.DataFrame:
    """A row per model and batch, or budget, in the order of the table; of records of one point the last counts."""
    found = {}
    for record in records:
        for row in record.rows:
            config = config_of(row.sizes)
            if row.measure != measure or config is None:
                continue
            flat = {**row.more, **vars(row), **row.sizes, "model": config.name}
            flat["decode rate"] = row.sizes["B"] * MADE / row.more.get("decode_us", math.nan) * 1e6
            for kind, start in {**_KINDS, "QServe's GEMM": WITHOUT}.items():
                name = fastest(row.peers, start)
                flat[f"over {kind}"] = row.peers[name] / row.time_us if name else math.nan
                rates = [v for k, v in row.more.items() if k.startswith(start) and k.endswith("tokens_per_second")]
                flat[f"rate over {kind}"] = row.rate / max(rates) if rates else math.nan
            found[[c.name for c in MODELS].index(config.name), row.sizes["B"], row.sizes["L"]] = flat
    return pd.DataFrame([found[key] for key in sorted(found)])


def steps_table(records: list[Record]) -> str:
    """Steady steps: milliseconds, tokens/s, parts, of the floor, over mixes."""
    rows = points(records, MEASURE)
    if rows.empty:
        return MISSING
    columns = {"model": "{}", "B": "{:d}", "ms": "{:.2f}", "rate": "{:,.0f}", "fraction": "{:.2f}"}
    columns |= {f"{part}_us": "{:.0%}" for part in ("gemm", "attention", "others", "head")}
    columns |= {f"over {kind}": "{:.2f}x" for kind in (*_KINDS, "QServe's GEMM")}
    shares = {f"{part}_us": rows[f"{part}_us"] / rows.time_us for part in ("gemm", "attention", "others", "head")}
    names = {"B": "batch", "rate": "tokens/s", "fraction": "of the floor", **{name: name[:-3] for name in shares}}
    table = rows.assign(ms=rows.time_us / 1e3, **shares)[[*columns]].rename(columns=names)
    return f"{markdown(table, dict(zip(table, columns.values(), strict=True)))}\n{_origin(records)}\n"


def generate_table(records: list[Record]) -> str:
    """QServe's rule by model and budget, beside the mixes at their best batch, and what the paper has."""
    rows = points(records, GENERATE)
    if rows.empty:
        return MISSING
    paper = pd.DataFrame([LIQUIDSERVE[model] for model in rows.model], columns=["paper", "its batch"], index=rows.index)
    columns = {"model": "{}", "L": "{:d}", "B": "{:d}", "rate": "{:,.0f}", "decode rate": "{:,.0f}"}
    columns |= {f"rate over {kind}": "{:.2f}x" for kind in _KINDS} | {"paper": "{:,d}", "its batch": "{:d}"}
    table = pd.concat([rows, paper], axis=1)[[*columns]]
    names = {"L": "GB", "B": "batch", "rate": "tokens/s", "decode rate": "without prefill"}
    table = table.rename(columns={**names, "paper": "LiquidServe, H800 80 GB"})
    return f"{markdown(table, dict(zip(table, columns.values(), strict=True)))}\n{_origin(records)}\n"


def _origin(records: list[Record]) -> str:
    dates = sorted({record.date[:10] for record in records})
    said = ", ".join(dict.fromkeys(f"{record.device['name']}, commit {record.revision}" for record in records))
    return f"Measured by `ptxlab bench decode` on {', '.join(dates)}: {said}."
