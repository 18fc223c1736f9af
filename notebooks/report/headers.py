"""What a kernel's header says was measured of it, from the records: never typed in by hand."""

import re
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd

from ptxlab import registry
from ptxlab.bench.record import Row
from ptxlab.lowbit import kernels
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, MIXTRAL
from ptxlab.spec import KernelSpec
from report import attention, frames, gemm, ladder, w4a4
from report.frames import fraction, mean, over

_MEASURED = re.compile(r"^// Measured   .*(?:\n//            .*)*$", re.MULTILINE)
_FIRST, _NEXT = "// Measured   ", "//            "
_WIDTH = 120
_ATTENTION = "attention_kv4_sm90"
_EXPERT_TOKENS, _MANY_EXPERT_TOKENS = (1, 8, 64), 32
_BATCHES = ((16, 1024), (64, 1024), (256, 1024), (1, 4096), (64, 4096), (1, 32768))  # sequences x tokens
_PROMPT = (32, 4096)  # heads, tokens


def corrected_sources() -> dict[Path, str]:
    """Find the sources whose `Measured` header differs from the records; return the corrected text by path."""
    changed = {}
    for spec in registry.specs().values():
        source = registry.find(spec.name)[1][0]
        if not (lines := header_lines(spec)):
            continue
        text = _MEASURED.sub(_FIRST + f"\n{_NEXT}".join(lines), source.text)
        if text != source.text:
            changed[Path(source.path)] = text
    return changed


def header_lines(spec: KernelSpec) -> list[str]:
    """Return the lines of a kernel's `Measured` header, or none if the kernel is not recorded."""
    if spec.name == _ATTENTION:
        return _attention_lines()
    lines_by_kernel = {
        "gemm_w8a8_sm90": _describe_eight_bit,
        "gemm_w4a8_grouped_sm90": _describe_grouped_gemm,
        "append_kv4": _describe_append,
    }
    lines_by_kernel |= {
        f"gemm_{scheme.lower()}_sm90": partial(_describe_four_bits, scheme) for scheme in w4a4.FOUR_BITS
    }
    if spec.name in lines_by_kernel:
        text = lines_by_kernel[spec.name]()
    elif spec in kernels.gemm.STEPS:
        text = ladder.figures(spec.name)
    else:
        text = {"gemm": _describe_launched_gemm, "attention": _describe_step}.get(spec.family, _describe_rates)(spec)
    return textwrap.wrap(text, _WIDTH - len(_FIRST))


def rows(gpu: str, suite: str) -> dict[tuple[str, str, str], Row]:
    """Return the rows of a record by kernel, source and measure; empty if nothing is recorded."""
    record = frames.load_record(suite, gpu)
    return {(row.kernel, row.source, row.measure): row for row in record.rows} if record else {}


def _describe_rates(spec: KernelSpec) -> str:
    """Describe a kernel's recorded rates: from memory and, where measured, from registers and from shared memory."""
    rows_by_kernel = rows("h200", spec.family)
    measured_rows = {
        measure: rows_by_kernel.get((spec.name, "ptx", measure)) for measure in ("streaming", "registers", "resident")
    }
    streaming, registers, resident = measured_rows.values()
    if streaming is None:
        return ""
    line = f"{streaming.rate / 1e3:.2f} TB/s on an H200, {streaming.fraction:.2f} of a {streaming.limit}"
    if registers is not None:
        line += f"; the word alone in registers: {registers.rate:.0f} weights per clock and SM"
    if resident is not None:
        line += f"; from shared memory alone: {resident.rate:.0f} weights per clock and SM"
    return f"{line}."


def _describe_launched_gemm(spec: KernelSpec) -> str:
    """Describe the recorded speed of a kernel that `gemm_w4a8` launches, at the points where it does."""
    points = gemm.points(ladder.load_record())
    points = points[points.kernel == spec.name]
    tokens = _tokens(points)
    if not tokens:
        return ""
    floor = _join_figures(fraction(gemm.at_tokens(points, M)) for M in tokens)
    faster = _join_figures(mean(over(gemm.at_tokens(points, M), "cublas_fp8")) for M in tokens)
    matrix_counts = ", ".join(f"{len(gemm.at_tokens(points, M))}" for M in tokens)
    return (
        f"{floor} of the floor on an H200 at M = {', '.join(map(str, tokens))}; {faster} times as fast as cuBLAS "
        f"FP8 (means of {matrix_counts} of LLaMA-2's matrices, on which it is launched; row-major activations)."
    )


def _describe_eight_bit() -> str:
    """Describe the recorded speed of W8A8 beside cuBLAS in FP8 and INT8."""
    points = gemm.eight_bit(ladder.load_record())
    tokens = _tokens(points)
    if not tokens:
        return ""
    fp8, int8 = (
        _join_figures(mean(over(gemm.at_tokens(points, M), peer)) for M in tokens)
        for peer in ("cublas_fp8", "cublas_int8")
    )
    return (
        f"on an H200 at M = {', '.join(map(str, tokens))}: {fp8} times as fast as cuBLAS FP8, {int8} times as its INT8 "
        "(means over LLaMA-2's matrices)."
    )


def _describe_four_bits(scheme: str) -> str:
    """Describe the recorded speed of W4A4 or W4Ax beside `gemm_w4a8` and cuBLAS INT8."""
    record = w4a4.load_record()
    points = w4a4.points(record)
    scheme_points = points[points.scheme == scheme]
    tokens = sorted({*scheme_points.M})
    if record is None or not tokens:
        return "not yet: `python -m benchmarks gemm --only w4a4`."
    shares_of_w4a8 = _join_figures(mean(gemm.at_tokens(scheme_points, M)["of W4A8"]) for M in tokens)
    int8_speedups = _join_figures(mean(over(gemm.at_tokens(scheme_points, M), "cublas_int8")) for M in tokens)
    return (
        f"on an H200 at M = {', '.join(map(str, tokens))}: {shares_of_w4a8} of gemm_w4a8's time, {int8_speedups} times"
        " as fast as"
        f" cuBLAS INT8 (means over LLaMA-2's matrices, groups of 128; commit {record.commit})."
    )


def _describe_grouped_gemm() -> str:
    """Describe the recorded speed of Mixtral's grouped GEMM: of the floor, and beside a loop of single GEMMs."""
    experts = gemm.experts(ladder.load_record()).dropna(subset="gain")
    if experts.empty:
        return ""
    fraction_by_layer = experts.set_index(["layer", "tokens"]).fraction_grouped
    fractions_by_layer = {
        layer.part: _join_figures(fraction_by_layer[str(layer), count] for count in _EXPERT_TOKENS) for layer in MIXTRAL
    }
    floor_fractions = "; ".join(f"{layer_part} {figures}" for layer_part, figures in fractions_by_layer.items())
    tokens, mean_gain = ", ".join(map(str, _EXPERT_TOKENS)), mean(experts[experts.tokens >= _MANY_EXPERT_TOKENS].gain)
    return (
        f"Mixtral, 8 experts, top 2, on an H200, of the floor at {tokens} tokens: {floor_fractions}; "
        f"{experts.gain.min():.2f}"
        f" to {experts.gain.max():.2f} times as fast as a loop of single GEMMs, {mean_gain:.2f} in the mean from "
        f"{_MANY_EXPERT_TOKENS} tokens on."
    )


def _describe_step(spec: KernelSpec) -> str:
    """Describe the recorded time of one step of attention's ladder."""
    rows = attention.steps(attention.load_record())
    for row in rows[rows.kernel == spec.name].itertuples():
        batch = f"{row.B} sequences of {row.L} tokens, {row.Hq} heads"
        return f"{batch}, on an H200: {row.time_us:.0f} us, {row.fraction:.2f} of the speed of memory."
    return ""


def _attention_lines() -> list[str]:
    """Return the header lines of `attention_kv4`: the step's line, then a table of heads by sequences x tokens."""
    points = attention.points(attention.load_record())
    if points.empty:
        return []
    table = [["heads", *(f"{B} x {L}" for B, L in _BATCHES)]]
    for (Hq, Hkv), rows in points.groupby(["Hq", "Hkv"], sort=False):
        batch_rows = rows.set_index(["B", "L"])[["time_us", "fraction"]].loc[list(_BATCHES)]
        times = (
            f"{us:.{1 if us < 100 else 0}f} us {floor_fraction:.2f}"
            for us, floor_fraction in batch_rows.itertuples(index=False)
        )
        table.append([f"{Hq} / {Hkv}", *times])
    lines = ["".join(f"{cell:<14}" for cell in line).rstrip() for line in table]
    return [
        _describe_step(registry.find(_ATTENTION)[0]),
        "What `attention_kv4` takes for a batch, plain launches:",
        *lines,
    ]


def _describe_append() -> str:
    """Describe the recorded time of appending a prompt's keys and values, by cache format."""
    heads, tokens = _PROMPT
    labels_and_rows = [
        (scheme.replace("_", " ") + (", rotated" if row.R else ""), row)
        for scheme in ("kv4", "kv8", "kv4_channel", "kv8_channel")
        for row in attention.appends(attention.load_record(), tokens, scheme).itertuples()
        if heads == row.H
    ]
    if not labels_and_rows:
        return ""
    figures = "; ".join(f"{label} {row.time_us:.1f} us, {row.fraction:.2f}" for label, row in labels_and_rows)
    return f"{tokens} tokens of {heads} heads on an H200, beside the speed of a copy: {figures}."


def _tokens(points: pd.DataFrame) -> list[int]:
    """List the numbers of tokens that were measured, in order."""
    return [M for M in ALL_TOKENS if M in set(points.M)]


def _join_figures(figures: Iterable[float]) -> str:
    return ", ".join(f"{figure:.2f}" for figure in figures)
