"""Figures of the README and of the kernels' headers, from the specs, the records and runs: never typed in by hand."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks.decode import MEASURE as MODEL_STEPS
from benchmarks.stored import stored_attention, stored_times
from ptxlab import bench, registry
from ptxlab.errors import FileError
from ptxlab.io.files import write_text
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.attention import MEASURE
from ptxlab.lowbit.bench.gemm import headline
from ptxlab.lowbit.kernels import holders
from ptxlab.spec import KernelSpec
from report import (
    RESULTS,
    ROOT,
    accuracy,
    attention,
    caches,
    corpus,
    decode,
    emulation,
    gemm,
    headers,
    ladder,
    layer,
    pipelines,
    predictions,
    prefill,
    profiletables,
    pytorch,
    quirks,
    serving,
    showcase,
    systems,
    targets,
    w4a4,
)
from report.frames import MISSING, markdown, means, origin_of_peers

_LINK = re.compile(r"\]\(([\w./-]+)\)")  # from the root; in a page from its folder
_SECTION = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """List the pages whose marked sections are generated: the README and the guide."""
    return [ROOT / "README.md", *sorted((ROOT / "notebooks" / "guide").rglob("*.md"))]


def update(*, write: bool = True) -> list[Path]:
    """Renew the pages' marked sections and the headers' `Measured`; returns the files that changed (or would)."""
    changed = headers.corrected_sources()
    for page in pages():
        old_text = page.read_text(encoding="utf-8")
        new_text = renew_sections(old_text, page.parent)
        if new_text != old_text:
            changed[page] = new_text
    if write:
        for path, text in changed.items():
            write_text(path, text)
    return list(changed)


def renew_sections(text: str, folder: Path) -> str:
    """Return a page's text with its marked sections regenerated, links relative to the page's folder."""

    def relative_link(link: re.Match[str]) -> str:
        return f"]({os.path.relpath(ROOT / link[1], folder)})"

    def section(match: re.Match[str]) -> str:
        if match[2] not in SECTIONS:
            raise FileError(f"{folder}: a section named one of {', '.join(SECTIONS)} (got {match[2]})")
        return match[1] + _LINK.sub(relative_link, SECTIONS[match[2]]()) + match[3]

    return _SECTION.sub(section, text)


def kernel_table() -> str:
    """Build the table of dequantisers: what they show, instructions per weight, measured rates on the recorded GPU."""
    loop_counts = counts.load()
    measured = headers.rows("h200", "dequant")
    lines = []
    for spec in (s for s in registry.specs().values() if s.family == "dequant"):
        source, *twin_sources = registry.find(spec.name)[1]
        streaming_row = measured.get((spec.name, source.language, "streaming"))
        registers = measured.get((spec.name, source.language, "registers"))
        lines.append(
            {
                "kernel": f"`{spec.name}`{' (and `.cu`)' if twin_sources else ''}",
                "shows": _shows(spec),
                "ALU per 8 weights": loop_counts["counts"].get(source.label, {}).get("alu_per_8"),
                "streaming": streaming_row and streaming_row.rate,
                "of the copy ceiling": streaming_row and streaming_row.fraction,
                "weights per clock and SM": registers and registers.rate,
                "limit": registers and f"{registers.limit}: {registers.fraction:.2f} of it",
            }
        )
    table = pd.DataFrame(lines)
    formats = dict(zip(table, ("{}", "{}", "{:g}", "{:,.0f} GB/s", "{:.2f}", "{:.0f}", "{}"), strict=True))
    tools = ", ".join(f"{tool} {version}" for tool, version in loop_counts["tools"].items())
    notes = [f"Instructions: steady state in {loop_counts['arch']} machine code, {tools}."]
    if measured:
        notes.append(_origin("h200", "dequant"))
    return f"{markdown(table, formats, left=2, text='limit')}\n{' '.join(notes)}\n"


def _shows(spec: KernelSpec) -> str:
    return ("**wrong by design**: " if spec.wrong else "") + spec.summary


def _origin(gpu: str, suite: str) -> str:
    """Describe in a sentence how a record was measured, with its ceilings."""
    record = bench.load(RESULTS / gpu / f"{suite}.json")
    ceilings = ", ".join(
        f"{ceiling.removesuffix('_tbps')} {tbps:.2f} TB/s" for ceiling, tbps in record.ceilings.items()
    )
    origin = f"`ptxlab bench {suite}`, {record.date[:10]}, commit {record.revision}"
    return f"Measured on one {record.device['name']}: {origin}; ceilings of the same run: {ceilings}."


def audit_table() -> str:
    """Build the table of overflow and error of every scheme on the demo's trained weights, from the recorded audit."""
    rows = pd.read_json(RESULTS / "audit" / "all-MiniLM-L6-v2.json").dropna(subset="scheme")
    weights = rows.drop_duplicates("tensor").weights
    rows_by_scheme = rows.groupby(["scheme", "protective_range"], sort=False)
    table = rows_by_scheme.agg({"overflows": "sum", "relative_error": "median"}).reset_index()
    columns = ["scheme", "protective range", "overflowing weights", "relative error, median"]
    formats = dict(zip(columns, ("{}", "±{:.0f}", "{:,.0f}", "{:.4f}"), strict=True))
    note = f"{weights.sum():,.0f} weights in {len(weights)} matrices, groups of {rows.group.iloc[0]:.0f}."
    return f"{markdown(table.set_axis(columns, axis=1), formats)}\n{note}\n"


def proofs_table() -> str:
    """Build the table of verdicts of `ptxlab prove --all` by launch target, from its record."""
    path = RESULTS / "proofs.json"
    if not path.exists():
        return MISSING
    claims = pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
    table = pd.DataFrame(
        {
            "subject": f"`{claim_subject}`",
            "proved": _join_names([*subject_claims.name[subject_claims.verdict == "proved"]]),
            "refuted, as expected": _join_names([*subject_claims.name[subject_claims.verdict == "refuted"]]),
            "seconds": subject_claims.seconds.sum(),
        }
        for claim_subject, subject_claims in claims.groupby("subject", sort=False)
    )
    wrong_count = (claims.verdict != claims.expect).sum()
    solvers = ", ".join(sorted({*claims.solver} - {"enumeration"}))
    note = f"{len(claims)} claims, {wrong_count} not as expected; {solvers}, {sum(table.seconds):.0f} s of CPU time."
    return f"{markdown(table, {'seconds': '{:.1f}'}, left=3)}\n{note}\n"


def proof_summary() -> str:
    """Summarise the proofs of the same record, one line by kind."""
    kinds = {
        "dequantisers, `.ptx` and `.cu`": r"dequant_",
        "main loops, one step": r".*its loop$",
        "packings, fragment maps, swizzles, KV4": r"packing|fragment|nibbles|orders|pages|swizzles|kv4",
        "quantisers (`reorder_quantize` from its PTX), sums, the overflow predicate": "",
    }
    rows = defaultdict[str, list[float]](lambda: [0, 0, 0.0])
    for claim in json.loads((RESULTS / "proofs.json").read_text(encoding="utf-8")):
        row = rows[next(kind for kind, pattern in kinds.items() if re.match(pattern, claim["subject"]))]
        row[claim["verdict"] == "refuted"] += 1
        row[2] += claim["seconds"]
    columns = ["what", "proved", "refuted beyond the range", "seconds"]
    table = pd.DataFrame([(kind, *row) for kind, row in rows.items()], columns=columns)
    return markdown(table, dict.fromkeys(columns[1:], "{:.0f}"), left=1)


def mutants_table() -> str:
    """Build the table of mutated dequantisers: verdicts of the prover and the tests, from `tests.support.proofs`."""
    rows, reasons = [], dict[str, int]()
    for kernel in json.loads((RESULTS / "proof_mutants.json").read_text(encoding="utf-8")):
        passed = [m for m in kernel["not_by_both"] if m["verdict"] != "refuted"]
        killed = sum(m["killed_by_tests"] for m in passed)
        rows.append((f"`{kernel['kernel']}`", kernel["mutants"], kernel["mutants"] - len(passed), len(passed), killed))
        for mutant in passed:
            reason = f"{mutant['verdict']}: {mutant['why']}"
            reasons[reason] = reasons.get(reason, 0) + 1
    table = pd.DataFrame(rows, columns=["kernel", "mutants", "refuted", "not refuted", "of these killed by tests"])
    reason_list = "".join(f"- {count} {reason}.\n" for reason, count in reasons.items())
    return f"{markdown(table, {}, left=1)}\nWhy mutants are not refuted:\n\n{reason_list}"


def _join_names(claims: list[str]) -> str:
    """List claims by name; of more than eight, give the number, the first and the last."""
    return "; ".join(claims) if len(claims) <= 8 else f"all {len(claims)}, from {claims[0]} to {claims[-1]}"


def attention_table() -> str:
    """Build the table of the error that a quantised KV cache adds to attention on real text (notebook 04)."""
    record = json.loads((RESULTS / "audit" / "kv_cache.json").read_text(encoding="utf-8"))
    table = pd.DataFrame(record["rows"])[["cache", "bits", "error", "worst"]]
    columns = ["KV cache", "bits per element, constants included", "relative error of attention", "worst layer"]
    formats = dict(zip(columns, ("{}", "{:g}", "{:.4f}", "{:.4f}"), strict=True))
    outlier = f"No channel of the keys exceeds {record['outlier']:.1f} times the median of its head."
    note = f"{record['inputs']}. {outlier}"
    return f"{markdown(table.set_axis(columns, axis=1), formats)}\n{note}\n"


def load_table() -> str:
    """Build the table of the family `load`.

    A row has the instructions per 32 weights, the wavefronts by the bank model, and the rates on the recorded GPU.
    """
    measured = headers.rows("h200", "load")
    per_32 = "loads / address / unpack per 32 weights | wavefronts of a warp's loads (conflicts)"
    columns = ["kernel", "shows", *per_32.split(" | "), "resident, weights per clock and SM", "streaming"]
    lines = []
    for spec in (s for s in registry.specs().values() if s.family == "load"):
        accesses = holders.shared_accesses(spec.name) if "T" in spec.example_sizes[0] else ()
        wavefronts, min_wavefronts = (
            sum(getattr(a, field) for a in accesses) for field in ("wavefronts", "min_wavefronts")
        )
        resident = measured.get((spec.name, "ptx", "resident"))
        streaming_row = measured.get((spec.name, "ptx", "streaming"))
        split = [f"{resident.more[f'{part}_per_32']:g}" for part in ("loads", "address", "unpack")] if resident else []
        lines.append(
            [
                f"`{spec.name}`",
                _shows(spec),
                " / ".join(split),
                f"{wavefronts} ({wavefronts - min_wavefronts})" if accesses else "",
                resident and f"{resident.rate:.0f} ({resident.fraction:.2f} of 128 B per clock)",
                streaming_row
                and f"{streaming_row.rate:,.0f} GB/s ({streaming_row.fraction:.2f} of a {streaming_row.limit})",
            ]
        )
    note = _origin("h200", "load") if measured else "Not recorded yet."
    note += " Wavefronts are those of the bank model."
    return f"{markdown(pd.DataFrame(lines, columns=columns), left=2)}\n{note}\n"


def _picture(shows: str, name: str, drawn: bool) -> str:
    return f"\n![{shows}](notebooks/figures/{name}.png)\n" if drawn else ""


def headline_section() -> str:
    """Build the table of `gemm_w4a8` against all peers, with the picture over all tokens if it is recorded."""
    record = ladder.load_record()
    picture = "How near to the floor, and how far ahead of the fastest peer", "gemm_headline"
    return gemm.matrices_table(record) + _picture(*picture, drawn=not gemm.points(record).empty)


def means_table(rows: pd.DataFrame, size: str, shown: dict[str, str]) -> str:
    """Build the table of geometric means by one size: speed-up over each kind of peer, fraction of the floor.

    `shown`: columns of `rows` and how the table calls them, the size first. A mean is empty where the peers of its
    kind were not all measured.
    """
    if rows.empty:
        return MISSING
    table = means(rows, size, list(shown)[1:]).sort_index().reset_index()
    formats = {column: "{:.2f}" if column == "fraction" else "{:.2f}x" for column in shown}
    formats = {heading: "{:,}" if column == size else formats[column] for column, heading in shown.items()}
    return markdown(table.set_axis(list(shown.values()), axis=1), formats, left=0)


def gemm_means_section() -> str:
    """Build the table of GEMM means, one row per number of tokens at which all peers were measured.

    A row has the speed-up over the fastest peer of each kind and the fraction of the floor.
    """
    record = ladder.load_record()
    rows = gemm.points(record)
    rows = rows[rows.M.isin(rows.M[rows["over all"].notna()])]
    heading_by_kind = {kind: heading for kind, (heading, _) in gemm.KINDS.items()}
    heading_by_kind |= {"over cublas_fp8": "cuBLAS FP8", "fraction": "fraction of the floor"}
    origin = origin_of_peers(record, headline.MEASURE, stored_times()) if record else ""
    return means_table(rows, "M", {"M": "tokens M", **heading_by_kind}) + (origin and f"\n{origin}\n")


def attention_means_section() -> str:
    """Build the table of attention means, one row per batch.

    A row has the speed-up over the fastest peer with a cache of each number of bits, and the fraction of the floor.
    """
    record = attention.load_record()
    rows = attention.main_batches(attention.points(record))
    heading_by_column = {f"over {bits}": f"caches of {bits} bits" for bits in attention.BITS}
    heading_by_column |= {"over all": "all eleven", "fraction": "fraction of the floor"}
    origin = origin_of_peers(record, MEASURE, stored_attention()) if record else ""
    missing_note = "Empty where not all peers of a column were measured."
    return means_table(rows, "B", {"B": "batch", **heading_by_column}) + (origin and f"\n{missing_note} {origin}\n")


def kv4_section() -> str:
    """Build the table of `attention_kv4` against all peers, with the picture if it is recorded."""
    record = attention.load_record()
    picture = "Speed-up over the best peer with 16, 8 and 4 bits", "attention_speedup"
    return attention.batches_table(record) + _picture(*picture, drawn=not attention.points(record).empty)


def layer_section() -> str:
    """Build the table of decoder layers beside floor and mixes, with the picture if it is recorded."""
    record = layer.load_record()
    picture = "GEMM, attention and others of a layer by batch, beside the FP8 mix", "layer_breakdown"
    return layer.layers_table(record) + _picture(*picture, drawn=not layer.points(record).empty)


def layer_fused_section() -> str:
    """Build the table of the kernels between GEMMs and attention, beside copies."""
    return layer.fused_table(layer.load_record())


def layer_epilogues_section() -> str:
    """Build the table of layers with and without the epilogues of their GEMMs."""
    return layer.epilogues_table(layer.load_record("layer_epilogues"))


def layer_d64_section() -> str:
    """Build the table of a layer with heads of 64 dimensions."""
    return layer.d64_table(layer.load_record())


def layer_timeline_section() -> str:
    """Build the tables of the launches of one layer, with the picture if it is recorded."""
    record = layer.load_record()
    picture = "The launches of one layer", "layer_timeline"
    return layer.timeline_table(record) + _picture(*picture, drawn=bool(layer.timelines(record)))


def decode_section() -> str:
    """Build the table of whole models' steady steps, with a picture of each model that is recorded."""
    records = decode.load_records()
    models_drawn = dict.fromkeys(decode.points(records, MODEL_STEPS).get("model", ()))
    return decode.steps_table(records) + "".join(
        _picture(f"{model}: a step by batch, and tokens/s under both budgets", decode.picture_name(model), drawn=True)
        for model in models_drawn
    )


def ladder_section() -> str:
    """Build the table of the GEMM ladder, with the picture of its ablation if it is recorded."""
    picture = "What each step gained, by tokens", "ladder_ablation"
    return ladder.ladder_table() + _picture(*picture, drawn=ladder.load_record() is not None)


def cost_section() -> str:
    """Build the section on costs: rooflines, predicted beside measured times, and where W4A8 stops paying."""
    record = ladder.load_record()
    if gemm.eight_bit(record).empty:
        return MISSING
    picture = "![What each scheme can reach, and what was reached](notebooks/figures/cost_roofline.png)"
    return f"{picture}\n\n{predictions.kernels_table(record)}\n{predictions.crossover_table(record)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "headline": headline_section,
    "kernels": kernel_table,
    "loads": load_table,
    "ladder": ladder_section,
    "ladder_documents": ladder.documents_table,
    "ladder_g64": lambda: ladder.groups_table(ladder.load_groups_record()),
    "compute_80": lambda: ladder.compute_80_table(ladder.load_compute_80_record()),
    "cost": cost_section,
    "w4a4_choice": w4a4.choice_table,
    "w4a4_measured": lambda: w4a4.measured_table(w4a4.load_record()),
    "w4a4_targets": lambda: targets.table(targets.four_bits(w4a4.load_record())),
    "w4a4_figures": w4a4.figures_table,
    "w4ax_schedules": w4a4.schedule_table,
    "accuracy": accuracy.section,
    "accuracy_cache": caches.section,
    "accuracy_systems": systems.accuracy_table,
    "systems": systems.section,
    "w4a4_accuracy": w4a4.accuracy_table,
    "audit": audit_table,
    "attention": attention_table,
    "kv4": kv4_section,
    "attention_table1": lambda: attention.table1(attention.load_table1_record()),
    "attention_rotation": lambda: attention.rotation_table(attention.load_rotation_record()),
    "prefill": prefill.section,
    "served": serving.headline,
    "serving": serving.section,
    "layer": layer_section,
    "pytorch": pytorch.table,
    "decode": decode_section,
    "decode_front": lambda: decode.front_table(decode.load_records()),
    "decode_heads": lambda: decode.heads_table(decode.load_records()),
    "decode_limits": lambda: decode.limits_table(decode.load_records()),
    "decode_peaks": lambda: decode.peaks_table(decode.load_records()),
    "decode_prompts": lambda: decode.prompts_table(decode.load_alone_record()),
    "decode_systems": lambda: decode.systems_table(decode.load_systems_record()),
    "decode_targets": lambda: targets.table(targets.whole_models(decode.load_records())),
    "decode_generate": lambda: decode.generate_table(decode.load_records()),
    "layer_fused": layer_fused_section,
    "layer_epilogues": layer_epilogues_section,
    "layer_d64": layer_d64_section,
    "layer_timeline": layer_timeline_section,
    "gemm_means": gemm_means_section,
    "per_channel": lambda: gemm.per_channel_table(ladder.load_record()),
    "attention_means": attention_means_section,
    "profile": profiletables.profile_section,
    "stalls": profiletables.stalls_section,
    "mistakes": partial(showcase.page, showcase.MISTAKES),
    "fence_bugs": partial(showcase.page, showcase.FENCES),
    "proofs": proofs_table,
    "proof_summary": proof_summary,
    "proof_mutants": mutants_table,
    "corpus_summary": corpus.summary,
    "corpus_kernels": corpus.table,
    "corpus_judged": corpus.list_judgements,
    "emulator_speed": emulation.table,
    "pipelines": pipelines.section,
    "quirk_table": quirks.table,
    "quirks": quirks.sections,
}
