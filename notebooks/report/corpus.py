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
    found: dict[str, None] = {}
    for begins, name in FAMILIES.items():
        alike = [form for form in forms if form.startswith(begins)]
        kinds = sorted({t for form in alike for t in form.split(".")[2:] if t in _TYPES}) if begins in _MATRIX else []
        inputs = [t for t in kinds if t != "f16" or not {"e4m3", "e5m2"} & {*kinds}]
        if alike:
            found[f"{name} {'/'.join(inputs)}".strip()] = None
    return ", ".join(found)


def summary() -> str:
    """Build the table of projects: number of kernels, outcomes of the run, findings."""
    kernels = _record()
    if not kernels:
        return MISSING
    lines = []
    for project in dict.fromkeys(each["project"] for each in kernels):
        own = [each for each in kernels if each["project"] == project]
        results = Counter(each["result"] for each in own)
        lines.append(
            {
                "project": project,
                "version": "; ".join(dict.fromkeys(each["version"] for each in own)),
                "kernels": len({each["name"] for each in own}),
                "runs": len(own),
                "right": results["right"],
                "refused": results["refused"],
                "other": len(own) - results["right"] - results["refused"],
                "with findings": sum(bool(each["findings"]) for each in own),
                "seconds, median": sorted(each["seconds"] for each in own)[len(own) // 2],
            }
        )
    right = sum(each["result"] == "right" for each in kernels)
    forms = {form for each in kernels for form in each["forms"].split()}
    note = (
        f"{len(kernels)} runs of {len({(e['project'], e['name']) for e in kernels})} kernels (a run is a kernel on one "
        f"architecture), {right / len(kernels):.0%} right; {len(forms)} instruction forms."
    )
    return f"{markdown(pd.DataFrame(lines), {'seconds, median': '{:.1f}'}, left=2)}\n{note}\n"


def table() -> str:
    """Build the table with one line per kernel; refused kernels and findings are listed below."""
    kernels = _record()
    if not kernels:
        return MISSING
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in kernels:
        rows.setdefault((each["project"], each["name"]), []).append(each)
    lines = [
        {
            "kernel": f"`{name}`",
            "project": project,
            "architecture": ", ".join(each["arch"] for each in runs),
            "uses": _features(sorted({form for each in runs for form in each["forms"].split()})),
            "forms": max(len(each["forms"].split()) for each in runs),
            "result": ", ".join(dict.fromkeys(each["result"] for each in runs)),
            "findings": max(len(each["findings"]) for each in runs),
            "seconds": max(each["seconds"] for each in runs),
        }
        for (project, name), runs in rows.items()
    ]
    return markdown(pd.DataFrame(lines), {"seconds": "{:.1f}"}, left=4, text="result")


def judged() -> str:
    """List findings, refusals and failures kernel by kernel, each with a person's judgement."""
    told: dict[tuple[str, str], str] = {}
    for each in _record():
        reason = each["why"]
        if each["findings"]:
            first = each["findings"][0]
            reason = f"{first['kind']} at {first['file'].rpartition('/')[2]}:{first['line']}"
        if reason or each["judged"]:
            said = " ".join(part.strip().rstrip(".") + "." for part in (reason, each["judged"]) if part)
            told[each["project"], each["name"]] = said.replace("|", "\\|")
    if not told:
        return "None.\n"
    return "".join(f"- **{project}, `{name}`**: {said}\n" for (project, name), said in told.items())
