"""The command `audit`: what quantising would do to a checkpoint's weights, or to a model's activations."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ptxlab.cli.common import (
    AsJson,
    console,
    download_bar,
    print_json,
    progress_bar,
    refuse,
    require_counts,
    table,
)
from ptxlab.io import downloads as shipped
from ptxlab.io.files import require_folder, write_text
from ptxlab.llm.accuracy import audit_inputs as inputs
from ptxlab.llm.accuracy.text import tokens_of
from ptxlab.llm.checkpoints.open import missing
from ptxlab.llm.cli.models import open_model_with_bar, open_text_with_bar
from ptxlab.llm.model.quantized import FUSED
from ptxlab.llm.recipe.calibrate import draw_samples
from ptxlab.lowbit import audit as audits
from ptxlab.lowbit import demo as demos
from ptxlab.lowbit.quant.fmpq import MOST_INT8

PANEL = "Weights"

_INPUTS = "With atom or fmpq"
SHOWN = 10  # tensors that `audit` lists without --all


def audit(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A .safetensors checkpoint; by default the demo's. With atom or fmpq a Hugging Face folder, a .gguf "
            "file, or smollm2."
        ),
    ] = None,
    tensor: Annotated[str, typer.Option(help="Glob over tensor names.")] = "*",
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help="qoq, lqq, lqq_ceiling or lqq_search; of 4-bit activations, on a model: atom, fmpq. May be repeated. "
            "Default: qoq and lqq."
        ),
    ] = None,
    protective_range: Annotated[
        list[int] | None,
        typer.Option("--range", help="Protective range of level 1, 1 to 127; may be repeated. Default: 119, 120, 127."),
    ] = None,
    group: Annotated[int, typer.Option(help="Weights per level-2 scale: 32, 64 or 128.")] = 128,
    int8: Annotated[
        float | None, typer.Option(rich_help_panel=_INPUTS, help="fmpq: share of INT8 blocks at most. Default: 0.2.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(rich_help_panel=_INPUTS, help="wikipedia, lee or a UTF-8 file. Default: wikipedia.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(rich_help_panel=_INPUTS, help="Number of samples of the text. Default: 4.")
    ] = None,
    length: Annotated[int | None, typer.Option(rich_help_panel=_INPUTS, help="Tokens of each. Default: 512.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a picture (.png, .svg, .pdf).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List every tensor, not only the ten of largest error.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the weights that overflow in each scheme at each protective range, and measure the error, by tensor too.

    With atom or fmpq, a model runs over a text: what share of the channels is INT8, and the error of each product.
    """
    if out is not None:
        require_folder(out)
    if scheme and set(scheme) & set(inputs.INPUT_SCHEMES):
        refuse({"--range": protective_range, "--plot": picture}, "is not for atom and fmpq")
        options: dict[str, Any] = {
            "schemes": tuple(dict.fromkeys(scheme)),
            "group": group,
            "most": MOST_INT8 if int8 is None else int8,
        }
        inputs.check_options(**options)
        sizes = 4 if samples is None else samples, 512 if length is None else length
        input_rows = _audit_inputs(str(file or "smollm2"), tensor, text or "wikipedia", *sizes, options, quiet=as_json)
        return _show_inputs(input_rows, out, every=every, as_json=as_json)
    refuse({"--int8": int8, "--text": text, "--samples": samples, "--length": length}, "is for atom and fmpq")
    if picture is not None:
        from ptxlab import plot
        from ptxlab.lowbit.audit.plot import audit_figure

        plot.require_writable(picture)
    if file is None:
        with download_bar(demos.TRAINED, quiet=as_json) as downloaded:
            file = shipped.fetch(demos.TRAINED, downloaded) / "model.safetensors"
    elif not file.exists():
        raise missing(file, "no such file")
    schemes = tuple(scheme or ("qoq", "lqq"))
    ranges = tuple(protective_range or demos.RANGES)
    rows: list[audits.AuditRow] = []
    skipped_tensors: list[audits.SkippedTensor] = []
    with progress_bar("audit", None, quiet=as_json) as advance:
        outcomes = audits.audit_file(
            file,
            pattern=tensor,
            schemes=schemes,
            ranges=ranges,
            group=group,
            progress=lambda done, tensors, name: advance(name, tensors) if done < tensors else None,
        )
        for outcome in outcomes:
            if isinstance(outcome, audits.AuditRow):
                rows.append(outcome)
            else:
                skipped_tensors.append(outcome)
    if picture is not None:
        plot.save(audit_figure(rows, file.name), picture)
    rows_as_dicts = [asdict(row) for row in rows] + [asdict(outcome) for outcome in skipped_tensors]
    if out is not None:
        write_text(out, json.dumps(rows_as_dicts, indent=1) + "\n")
    if as_json:
        return print_json(rows_as_dicts)
    if rows:
        console.print(_totals_table(rows, f"{file.name}, group {group}"))
        console.print(_tensors_table(rows, every))
    _print_skipped(skipped_tensors, every)
    _print_safety(audits.totals(rows))


def _audit_inputs(
    model: str, tensor: str, text: str, samples: int, length: int, options: dict[str, Any], *, quiet: bool
) -> list[inputs.InputRow | audits.SkippedTensor]:
    """Audit a model's matrices and inputs on samples of a text; `options` are those of `audit_model`."""
    require_counts(samples=samples, length=length)
    float_model, tokenizer = open_model_with_bar(model, length=length, quiet=quiet)
    corpus = open_text_with_bar(text, quiet=quiet)
    tokens = draw_samples(tokens_of(corpus.calibration or corpus.evaluation, tokenizer), samples, length)
    with progress_bar("audit", len(FUSED) * float_model.config.layers, quiet=quiet) as advance:
        return list(inputs.audit_model(float_model, tokens, pattern=tensor, progress=advance, **options))


def _show_inputs(
    outcomes: list[inputs.InputRow | audits.SkippedTensor], out: Path | None, *, every: bool, as_json: bool
) -> None:
    as_dicts = [asdict(outcome) for outcome in outcomes]
    if out is not None:
        write_text(out, json.dumps(as_dicts, indent=1) + "\n")
    if as_json:
        return print_json(as_dicts)
    rows = [outcome for outcome in outcomes if isinstance(outcome, inputs.InputRow)]
    if rows:
        console.print(_inputs_table(rows))
        console.print(_matrices_table(rows, every))
    _print_skipped([outcome for outcome in outcomes if isinstance(outcome, audits.SkippedTensor)], every)


def _inputs_table(rows: list[inputs.InputRow]) -> Table:
    table_rows = [
        (t.scheme, t.group, t.tensors, f"{t.share8:.1%}", f"{t.mean_error:.4f}", f"{t.worst_error:.4f}", t.worst)
        for t in inputs.input_totals(rows)
    ]
    columns = ("scheme", "group>", "matrices>", "INT8 channels>", "mean error>", "worst>", "of")
    return table("4-bit weights and activations, rounded to nearest: error of the products", columns, table_rows)


def _matrices_table(rows: list[inputs.InputRow], every: bool) -> Table:
    """Build the table of every row, or of the `SHOWN` rows with the largest errors."""
    shown_rows = rows if every else sorted(rows, key=lambda row: row.output_error, reverse=True)[:SHOWN]
    table_rows: list[tuple[Any, ...]] = []
    for row in shown_rows:
        errors = (f"{error:.4f}" for error in (row.weight_error, row.input_error, row.output_error))
        table_rows.append(
            (row.tensor, row.scheme, row.channels, row.outliers, f"{row.channels8} ({row.share8:.0%})", *errors)
        )
    title = (
        "" if every else f"{len(shown_rows)} of {len(rows)} rows, by the error of the product; --all lists every row"
    )
    columns = ("matrix", "scheme", "channels>", "outliers>", "INT8>", "weight>", "input>", "product>")
    return table(title, columns, table_rows)


def _print_safety(totals: list[audits.AuditTotal]) -> None:
    """Print which schemes are safe and which are not.

    Each group of a safe scheme meets the precondition under which the kernels are proved right.
    """
    labels = {t: f"{t.scheme} ±{t.protective_range}" if t.protective_range else t.scheme for t in totals}
    if safe_labels := [name for t, name in labels.items() if not t.unsafe_groups]:
        console.print(f"safe by proof: {', '.join(safe_labels)}", highlight=False, soft_wrap=True)
    if unsafe_labels := [
        f"{t.unsafe_groups:,} of {t.groups:,} groups of {name}" for t, name in labels.items() if t.unsafe_groups
    ]:
        console.print(f"not safe: {', '.join(unsafe_labels)}", highlight=False, soft_wrap=True)


def _totals_table(rows: list[audits.AuditRow], title: str) -> Table:
    columns = ("scheme", "range>", "tensors>", "groups>", "overflows>", "share>", "mean error>", "worst>")
    table_rows = [
        (
            t.scheme,
            f"±{t.protective_range}",
            t.tensors,
            f"{t.groups:,}",
            f"{t.overflows:,}",
            f"{t.overflow_share:.4%}",
            _or_dash(t.mean_error, ".4f"),
            _or_dash(t.worst_error, ".4f"),
        )
        for t in audits.totals(rows)
    ]
    return table(title, columns, table_rows)


def _tensors_table(rows: list[audits.AuditRow], every: bool) -> Table:
    """Build the table of every row, or of the worst row of each of the tensors with the largest errors."""
    worst_by_tensor = {row.tensor: row for row in sorted(rows, key=_error)}  # the last one of a tensor stays
    shown_rows = rows if every else sorted(worst_by_tensor.values(), key=_error, reverse=True)[:SHOWN]
    title = (
        ""
        if every
        else f"{len(shown_rows)} of {len(worst_by_tensor)} tensors, by their largest error; --all lists every row"
    )
    columns = ("tensor", "scheme", "range>", "weights>", "overflows>", "clipped>", "error>")
    table_rows = [
        (
            row.tensor,
            row.scheme,
            f"±{row.protective_range}",
            f"{row.weights:,}",
            f"{row.overflows:,}",
            _or_dash(row.clipped, ","),
            _or_dash(row.relative_error, ".4f"),
        )
        for row in shown_rows
    ]
    return table(title, columns, table_rows)


def _error(row: audits.AuditRow) -> float:
    return row.relative_error or 0.0


def _or_dash(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def _print_skipped(skipped: list[audits.SkippedTensor], every: bool) -> None:
    """Print each skipped tensor and why; if they exceed a screen, print only counts by reason."""
    if every or len(skipped) <= SHOWN:
        lines = [f"skipped {outcome.tensor}: {outcome.reason}" for outcome in skipped]
    else:
        kinds = Counter(outcome.reason.partition(" (")[0] for outcome in skipped)
        lines = [f"skipped {count}: {kind}" for kind, count in kinds.items()]
    for line in lines:
        console.print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)
