"""Tables of the corpus record: kernels of other projects in the emulator (`tests/outside/corpus.py`)."""

import json
from collections import Counter
from typing import Any

import pandas as pd

from report import RESULTS
from report.frames import MISSING, markdown

RECORD = RESULTS / "corpus.json"
FAMILIES = {  # how a table calls opcodes that begin so
    "wgmma.mma": "wgmma", "mma.sync": "mma", "wmma.mma": "wmma", "cp.async.bulk.tensor": "TMA",
    "cp.async.bulk.": "bulk copy", "cp.async.c": "cp.async", "cp.reduce": "bulk reduction", "mbarrier": "mbarrier",
    "ldmatrix": "ldmatrix", "stmatrix": "stmatrix", "atom": "atomics", "red.": "atomics", "shfl": "shfl",
    "redux": "redux", "match": "match", "fence.proxy": "proxy fence", "setmaxnreg": "setmaxnreg",
    "barrier.cluster": "clusters", "griddepcontrol": "programmatic launch", "call": "printf, assert",
}  # fmt: skip
_MATRIX = {"wgmma.mma": "wgmma", "mma.sync": "mma", "wmma.mma": "wmma"}
_TYPES = ("f64", "tf32", "f16", "bf16", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "b1")


def _record() -> list[dict[str, Any]]:
    return list(json.loads(RECORD.read_text(encoding="utf-8"))["kernels"]) if RECORD.is_file() else []


def _features(forms: list[str]) -> str:
    """List the features that a kernel uses, by name; matrix instructions with their input types."""
    features: dict[str, None] = {}
    for begins, family in FAMILIES.items():
        matching_forms = [form for form in forms if form.startswith(begins)]
        kinds = (
            sorted({t for form in matching_forms for t in form.split(".")[2:] if t in _TYPES})
            if begins in _MATRIX
            else []
        )
        inputs = [t for t in kinds if t != "f16" or not {"e4m3", "e5m2"} & {*kinds}]
        if matching_forms:
            features[f"{family} {'/'.join(inputs)}".strip()] = None
    return ", ".join(features)


def summary() -> str:
    """Build the table of projects: number of kernels, outcomes of the run, findings."""
    runs = _record()
    if not runs:
        return MISSING
    lines = []
    for project in dict.fromkeys(run["project"] for run in runs):
        project_runs = [run for run in runs if run["project"] == project]
        outcomes = Counter(run["result"] for run in project_runs)
        lines.append(
            {
                "project": project,
                "version": "; ".join(dict.fromkeys(run["version"] for run in project_runs)),
                "kernels": len({run["name"] for run in project_runs}),
                "runs": len(project_runs),
                "right": outcomes["right"],
                "refused": outcomes["refused"],
                "other": len(project_runs) - outcomes["right"] - outcomes["refused"],
                "with findings": sum(bool(run["findings"]) for run in project_runs),
                "seconds, median": sorted(run["seconds"] for run in project_runs)[len(project_runs) // 2],
            }
        )
    right = sum(run["result"] == "right" for run in runs)
    forms = {form for run in runs for form in run["forms"].split()}
    note = (
        f"{len(runs)} runs of {len({(e['project'], e['name']) for e in runs})} kernels (a run is a kernel on one "
        f"architecture), {right / len(runs):.0%} right; {len(forms)} instruction forms."
    )
    return f"{markdown(pd.DataFrame(lines), {'seconds, median': '{:.1f}'}, left=2)}\n{note}\n"


def table() -> str:
    """Build the table with one line per kernel; refused kernels and findings are listed below."""
    kernels = _record()
    if not kernels:
        return MISSING
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in kernels:
        rows.setdefault((run["project"], run["name"]), []).append(run)
    lines = [
        {
            "kernel": f"`{kernel}`",
            "project": project,
            "architecture": ", ".join(run["arch"] for run in runs),
            "uses": _features(sorted({form for run in runs for form in run["forms"].split()})),
            "forms": max(len(run["forms"].split()) for run in runs),
            "result": ", ".join(dict.fromkeys(run["result"] for run in runs)),
            "findings": max(len(run["findings"]) for run in runs),
            "seconds": max(run["seconds"] for run in runs),
        }
        for (project, kernel), runs in rows.items()
    ]
    return markdown(pd.DataFrame(lines), {"seconds": "{:.1f}"}, left=4, text="result")


def list_judgements() -> str:
    """List findings, refusals and failures kernel by kernel, each with a person's judgement."""
    judgements: dict[tuple[str, str], str] = {}
    for run in _record():
        reason = run["why"]
        if run["findings"]:
            first = run["findings"][0]
            reason = f"{first['kind']} at {first['file'].rpartition('/')[2]}:{first['line']}"
        if reason or run["judged"]:
            sentence = " ".join(part.strip().rstrip(".") + "." for part in (reason, run["judged"]) if part)
            judgements[run["project"], run["name"]] = sentence.replace("|", "\\|")
    if not judgements:
        return "None.\n"
    return "".join(f"- **{project}, `{kernel}`**: {sentence}\n" for (project, kernel), sentence in judgements.items())
