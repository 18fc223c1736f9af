"""Instruction counts of all kernels: measured where the assembler is installed, else as shipped with the package."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from ptxlab import registry, sass, sources, toolchain
from ptxlab.errors import FileError
from ptxlab.io.files import write_text
from ptxlab.lowbit import kernels
from ptxlab.lowbit.bench.gemm.problem import sizes_at, variant
from ptxlab.lowbit.bench.shapes import DISSECTED, DISSECTED_TOKENS
from ptxlab.lowbit.cost import LoopCounts, Scheme
from ptxlab.sass import mainloop
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec

ARCH = "sm_90a"
# Main loops on mma.sync that the cost model compares, compiled for GPUs that this project has not measured. A warp
# multiplies 32 rows of W with 64 tokens, 128 channels per iteration: so many weights of a thread.
MMA_ARCHS = ("sm_80", "sm_86", "sm_89")
MMA_LOOPS = ("gemm_w4a8_qoq_sm80", "gemm_w4a8_lqq_sm80", "gemm_w4a4_s4_sm80")
LOOPED = (*(spec.name for spec in kernels.gemm.STEPS), "gemm_w4a8_sm90")  # whose main loops are counted
_SCALING = "gemm_w4a4_atom_sm80"  # scales its sums in the loop
_MMA_WEIGHTS, _MMA_TOKENS = 128, 64


def record_path(name: str = ARCH) -> Path:
    """Return the path of shipped counts: of all kernels, or of main loops on other GPUs (`mma_sync`)."""
    return sources.results_dir() / "sass" / f"{name}.json"


def measure() -> dict[str, Any]:
    """Count every source of every kernel; JSON-ready, by label (`dequant_lqq.ptx`)."""
    all_sources = [(spec, source) for name, spec in registry.specs().items() for source in registry.find(name)[1]]
    counts = {source.label: counts_of(spec, source) for spec, source in all_sources}
    loops = {source.label: main_loops(spec, source) for spec, source in all_sources if spec.name in LOOPED}
    return {"schema": 1, "arch": ARCH, "tools": toolchain.versions(), "counts": counts, "main_loops": loops}


def counts_of(spec: KernelSpec, source: Source) -> dict[str, Any]:
    """Count instructions per 8 weights, registers and spills, JSON-ready."""
    recorded_figures = ("alu_per_8", "opcodes_per_8", "pipes_per_8", "registers", "spill_stores", "spill_loads")
    figures = sass.report(source, ARCH, entry=spec.name).to_json()
    return {name: figure for name, figure in figures.items() if name in recorded_figures}


def main_loops(spec: KernelSpec, source: Source) -> dict[str, Any]:
    """Find a GEMM's main loop at each number of tokens of the dissected matrix, JSON-ready.

    The loop is that of the variant that runs there.
    """
    loops = {}
    for M in DISSECTED_TOKENS:
        defines = variant(spec, sizes_at(spec, DISSECTED, M))
        code = sass.parse(toolchain.disassemble(toolchain.build(source, ARCH, defines=defines)))[spec.name]
        loop = mainloop.main_loop(code)
        loops[str(M)] = loop and loop.to_json()
    return loops


def save() -> list[Path]:
    """Measure and write both records; returns their paths."""
    loops = {arch: mma_loops(arch) for arch in MMA_ARCHS}
    loops_record = {"schema": 1, "tools": toolchain.versions(), "tile": _MMA_TOKENS, "archs": loops}
    records = {record_path(): measure(), record_path("mma_sync"): loops_record}
    for path, record in records.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(record, indent=1) + "\n")
    return [*records]


def mma_loops(arch: str) -> dict[str, dict[str, float]]:
    """Count the instructions per weight, by pipe, of the main loops of `MMA_LOOPS`, without the MMAs.

    `per_sum` has the instructions per scaled sum.
    """
    per_weight: dict[str, dict[str, float]] = {}
    for name in MMA_LOOPS:
        pipes = mainloop.pipes_beside_mma(_large(name, arch))
        per_weight[name] = {pipe: count / _MMA_WEIGHTS for pipe, count in pipes.items()}
    return per_weight | {"per_sum": mainloop.pipes_per_sum(_large(_SCALING, arch))}


def _large(name: str, arch: str) -> list[sass.SassInstruction]:
    """Return the machine code of a GEMM as it is launched at 256 tokens."""
    spec, (source, *_) = registry.find(name)
    return sass.instructions(source, arch, entry=name, defines=variant(spec, sizes_at(spec, DISSECTED, 256)))


@cache
def load() -> dict[str, Any]:
    """Return the shipped record."""
    return _load_record(record_path())


def _load_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: not a record of counts: {error}") from None
    return record


@cache
def load_mma_loops() -> dict[str, Any]:
    """Return the shipped record of `mma_loops`, by architecture."""
    return _load_record(record_path("mma_sync"))


def loop_counts(scheme: Scheme, arch: str) -> LoopCounts | None:
    """Return the cost model's instruction counts of a scheme on an architecture.

    They cover a whole main loop on mma.sync, or a dequantiser alone. None means that the scheme names a main loop that
    is not counted on the architecture.
    """
    alpha = alpha_of(scheme.dequantiser)
    if not scheme.loop:
        return LoopCounts({"issue": alpha})
    record = load_mma_loops()
    if arch not in record["archs"]:
        return None
    counts_by_source = record["archs"][arch]
    converted_weights = alpha * scheme.int8_share
    loop = {**counts_by_source[scheme.loop], "alu": counts_by_source[scheme.loop]["alu"] + converted_weights}
    return LoopCounts(loop, counts_by_source["per_sum"], record["tile"])


def alpha_of(dequantiser: str) -> float:
    """Return α of a kernel of the family `dequant`: instructions per weight in machine code; 0 for no kernel."""
    return float(load()["counts"][f"{dequantiser}.ptx"]["alu_per_8"]) / 8 if dequantiser else 0.0


def alu_per_8(source: Source) -> tuple[float | None, str]:
    """Count ALU instructions per 8 weights of one of the project's sources; also return the origin of the count."""
    if not toolchain.missing():
        alu = sass.report(source, ARCH, entry=source.name).alu_per_8
        return alu, f"measured with ptxas {toolchain.version('ptxas')}"
    record = load()
    alu = record["counts"].get(source.label, {}).get("alu_per_8")
    return alu, f"from the shipped record (ptxas {record['tools']['ptxas']})"
