"""Instruction counts of all kernels: measured where the assembler is installed, else as shipped with the package."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from ptxlab import kernels, sass, sources, toolchain
from ptxlab.bench.gemm.problem import sizes_at, variant
from ptxlab.bench.shapes import DISSECTED, DISSECTED_TOKENS
from ptxlab.errors import FileError
from ptxlab.io.files import write_text
from ptxlab.sass import mainloop
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec

ARCH = "sm_90a"


def record_path() -> Path:
    """Where the shipped counts lie."""
    return sources.results_dir() / "sass" / f"{ARCH}.json"


def measure() -> dict[str, Any]:
    """Count every source of every kernel; JSON-ready, by label (`dequant_lqq.ptx`)."""
    reports = [sass.report(s, ARCH, entry=name) for name in kernels.specs() for s in kernels.find(name)[1]]
    kept = ("alu_per_8", "opcodes_per_8", "pipes_per_8", "registers", "spill_stores", "spill_loads")
    counts = {r.name: {k: v for k, v in r.to_json().items() if k in kept} for r in reports}
    looped = (*kernels.gemm.STEPS, kernels.specs()["gemm_w4a8_sm90"])
    loops = {s.label: main_loops(spec, s) for spec in looped for s in kernels.find(spec.name)[1]}
    return {"schema": 1, "arch": ARCH, "tools": toolchain.versions(), "counts": counts, "main_loops": loops}


def main_loops(spec: KernelSpec, source: Source) -> dict[str, Any]:
    """The main loop of a GEMM, JSON-ready by tokens, of the variants that run on the matrix that is taken apart."""
    loops = {}
    for M in DISSECTED_TOKENS:
        defines = variant(spec, sizes_at(spec, DISSECTED, M))
        code = sass.parse(toolchain.disassemble(toolchain.build(source, ARCH, defines=defines)))[spec.name]
        found = mainloop.main_loop(code)
        loops[str(M)] = found and found.to_json()
    return loops


def save() -> Path:
    """Measure and write the record; returns its path."""
    path = record_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(measure(), indent=1) + "\n")
    return path


@cache
def load() -> dict[str, Any]:
    """The shipped record."""
    try:
        record: dict[str, Any] = json.loads(record_path().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{record_path()}: not a record of counts: {error}") from None
    return record


def alpha_of(dequantiser: str) -> float:
    """α of a kernel of the family `dequant`: instructions per weight in machine code; 0 of none."""
    return float(load()["counts"][f"{dequantiser}.ptx"]["alu_per_8"]) / 8 if dequantiser else 0.0


def alu_per_8(source: Source) -> tuple[float | None, str]:
    """ALU instructions per 8 weights of one of the project's sources, and where the figure comes from."""
    if not toolchain.missing():
        alu = sass.report(source, ARCH, entry=source.name).alu_per_8
        return alu, f"measured with ptxas {toolchain.version('ptxas')}"
    record = load()
    alu = record["counts"].get(source.label, {}).get("alu_per_8")
    return alu, f"from the shipped record (ptxas {record['tools']['ptxas']})"
