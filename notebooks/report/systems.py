"""The guide's first table: how to run each document's system, and what was measured of it."""

import pandas as pd

from ptxlab.llm.recipe.systems import SYSTEMS
from report import accuracy
from report.frames import MISSING, markdown

_GEMM, _FOUR_BITS = "[GEMM](notebooks/guide/gemm.md)", "[GEMM](notebooks/guide/w4a4.md)"
_ATTENTION = "[attention](notebooks/guide/attention.md)"
_MODELS, _VLLM = "[whole models](notebooks/guide/decode.md)", "[vLLM](notebooks/guide/vllm.md)"
_TIMES = {  # pages with recorded times of a system's kernels
    "QServe in groups": (_GEMM, _ATTENTION, _MODELS),
    "QServe per channel": (_GEMM, _ATTENTION, _MODELS),
    "LQQ with KV4": (_GEMM, _ATTENTION, _MODELS, _VLLM),
    "LiquidServe": (_GEMM, _MODELS),
    "Atom": (_FOUR_BITS, _ATTENTION, _MODELS),
    "COMET": (_FOUR_BITS, _MODELS),
}


def load_record() -> accuracy.Accuracy | None:
    """Read the record of the systems' perplexities, if there is one."""
    return accuracy.load_record("accuracy_systems.json")


def section() -> str:
    """Return the table: a system, its document, its command, perplexity, and where times are."""
    accuracy_record = load_record()
    ratios = {row.step: row.ratio for row in accuracy.points(accuracy_record).itertuples() if row.ladder == "systems"}
    table = pd.DataFrame(
        {
            "system": system.name,
            "document": system.document,
            "command": f"`ptxlab quantize MODEL {system.options} --out DIR`",
            "perplexity, of float32": ratios.get(system.name),
            "times measured": ", ".join(_TIMES[system.name]),
        }
        for system in SYSTEMS
    )
    formats = {"perplexity, of float32": "{:.3f}x"}
    return markdown(table, formats, left=3, text="times measured")


def accuracy_table() -> str:
    """Return the rows of perplexity, QServe's two settings with and without two of their steps."""
    accuracy_record = load_record()
    rows = accuracy.points(accuracy_record)
    if accuracy_record is None or rows.empty:
        return MISSING
    return f"{accuracy.table(rows)}\n{accuracy.origin(accuracy_record)}\n"
