"""The command `accuracy`: what each step of the recipes does to a model's perplexity."""

import re
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from ptxlab import __version__, gpu
from ptxlab.cli.common import AsJson, console, expects, print_json, print_written, progress_bar, require_counts, table
from ptxlab.errors import FileError
from ptxlab.io.files import read_record, require_folder, sole_writer, write_record
from ptxlab.llm.accuracy import steps as table_of
from ptxlab.llm.accuracy.text import tokens_of, windows
from ptxlab.llm.cli.models import ModelBackend, model_on_gpu, open_model_with_bar, open_text_with_bar
from ptxlab.llm.recipe import Recipe
from ptxlab.llm.recipe.calibrate import draw_samples
from ptxlab.sources import commit

PANEL = "Weights"


def accuracy(
    model: Annotated[str, typer.Argument(help="Hugging Face folder, .gguf file, or smollm2.")] = "smollm2",
    only: Annotated[
        list[str] | None, typer.Option(help="Rows to measure: a glob such as 'g64/*' or '*/GPTQ'; may be repeated.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="wikipedia, lee or a UTF-8 file; may be repeated. Default: wikipedia.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--windows", help="Windows of each text, evenly spread. Default: all.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    samples: Annotated[int, typer.Option(help="Number of calibration samples.")] = 128,
    sample_length: Annotated[int, typer.Option(help="Tokens per calibration sample.")] = 1024,
    seeds: Annotated[int, typer.Option(help="Calibration seeds for the last row of each ladder.")] = 3,
    start: Annotated[str, typer.Option(help="Rotation applied first: mixed, uniform, or file (none).")] = "mixed",
    out: Annotated[Path | None, typer.Option(help="Write the record to this JSON file.")] = None,
    backend: ModelBackend = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's perplexity after each step of the recipes, and with each kind of quantisation alone.

    Weights, activations and KV cache are quantised and dequantised; products are in float32. If --out names a record
    of the same settings, only its missing rows are measured. A full run needs a GPU; for a small machine: --windows 8
    --length 512 --samples 16 --sample-length 512.
    """
    require_counts(samples=samples, sample_length=sample_length, seeds=seeds)
    on_gpu = model_on_gpu(backend)
    patterns = only or ["*"]
    all_rows = table_of.rows()
    selected_rows = [row for row in all_rows if any(fnmatchcase(row.name, pattern) for pattern in patterns)]
    if not selected_rows:
        groups = dict.fromkeys(f"{re.split('[,/]', row.name)[0]}*" for row in all_rows)
        raise expects("--only", f"one of {', '.join(groups)} or another pattern of rows", ", ".join(patterns))
    if all_rows[0] not in selected_rows:
        selected_rows = [all_rows[0], *selected_rows]
    if out is not None:
        require_folder(out)
    float_model, tokenizer = open_model_with_bar(model, length=length, quiet=as_json)
    calibration = tokens_of(open_text_with_bar("wikipedia", quiet=as_json).calibration, tokenizer)
    texts = {
        name: windows(tokens_of(open_text_with_bar(name, quiet=as_json).evaluation, tokenizer), length, count)
        for name in text or ["wikipedia"]
    }
    rotated_model = table_of.off_grid(float_model.to_device() if on_gpu else float_model, start)
    steps = sum(seeds if row.repeats else 1 for row in selected_rows)
    settings = {
        "schema": table_of.SCHEMA,
        "model": float_model.config.name or model,
        "start": start,
        "windows": {name: list(tokens.shape) for name, tokens in texts.items()},
        "calibration": [samples, sample_length],
        "device": gpu.device_info().name if on_gpu else "CPU",
    }
    interruption_note = (
        f"rows measured are in {out}: the same command goes on behind them" if out else "nothing is kept without --out"
    )
    with sole_writer(out) if out is not None else nullcontext():
        earlier_rows = _read_earlier_rows(out, settings) if out is not None and out.exists() else []
        record: dict[str, Any] = {
            **settings,
            "versions": {"ptxlab": __version__, "numpy": np.__version__},
            "commit": commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "rows": earlier_rows,
        }
        with progress_bar("accuracy", steps, quiet=as_json, keeps=interruption_note) as advance:
            for measurement in table_of.measure(
                rotated_model,
                lambda seed: draw_samples(calibration, samples, sample_length, seed),
                texts,
                selected_rows,
                seeds,
                advance,
                earlier_rows,
            ):
                record["rows"] = table_of.sort_rows([*record["rows"], measurement])
                if out is not None:  # after every row: a full run takes its time
                    write_record(out, record, "rows")
    if as_json:
        return print_json(record)
    title = f"perplexity of {escape(str(record['model']))}, a window of {length} tokens at a time"
    console.print(_table(title, record["rows"], selected_rows, list(texts)))
    print_written(out)


def _table(
    title: str, measurements: list[dict[str, Any]], chosen: list[table_of.AccuracyRow], names: list[str]
) -> Table:
    """Build the table of means over the calibration seeds; the ratio and the seeds' spread are of the first text."""
    first_text, float_perplexity = names[0], measurements[0]["perplexity"]
    table_rows: list[tuple[Any, ...]] = []
    for row in chosen:
        perplexities = [
            measurement["perplexity"]
            for measurement in measurements
            if (measurement["ladder"], measurement["step"]) == (row.ladder, row.step)
        ]
        means = {name: float(np.mean([perplexity[name] for perplexity in perplexities])) for name in names}
        spread = max(perplexity[first_text] for perplexity in perplexities) - min(
            perplexity[first_text] for perplexity in perplexities
        )
        seeds_spread = f"{spread:.2g}" if len(perplexities) > 1 else ""
        mean_cells = (f"{mean:.5g}" for mean in means.values())
        table_rows.append(
            (row.ladder, row.step, *mean_cells, f"{means[first_text] / float_perplexity[first_text]:.4f}", seeds_spread)
        )
    return table(title, ("ladder", "step", *(f"{name}>" for name in names), "of float>", "seeds' spread>"), table_rows)


def _read_earlier_rows(out: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the rows of an existing record, in the order of this version's table.

    Raises FileError for a record of other settings, and for rows of other recipes than the table's.
    """
    record = read_record(out, "a record of ptxlab accuracy", settings["schema"])
    for name, setting in settings.items():
        if record.get(name) != setting:
            raise FileError(f"{out}: is there already, of another {name}: {record.get(name)}, not {setting}")
    recipes = {(row.ladder, row.step): row.recipe.to_json() for row in table_of.rows()}
    with suppress(KeyError, TypeError):
        if all(Recipe.settings_of(row["recipe"]) == recipes[row["ladder"], row["step"]] for row in record["rows"]):
            return table_of.sort_rows(record["rows"])
    raise FileError(f"{out}: rows must be those of this version's table; write a new record")
