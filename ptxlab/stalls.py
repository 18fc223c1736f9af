"""What dequantisation costs in stalls (LiquidGEMM §3.2): sampled warps by the function of `dequant.cuh` they stood in.

By the line table every machine instruction has the source line that it came from; a line of `dequant.cuh` lies in one
function; and a function is one part of the treatment of a word. What `__vadd4` becomes has the line of the dequantiser
that calls it, so `dequant_qoq_vadd4` itself is the subtraction and nothing else.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptxlab import gpu, profiles, sources
from ptxlab.bench.shapes import GROUP, LAYERS, Layer
from ptxlab.errors import FileError
from ptxlab.files import read_text, write_text
from ptxlab.nsight import ISSUING, Instruction, Launched
from ptxlab.subject import Job

SCHEMA = 1
KERNELS = (
    "gemm_w4a8_qoq_sm80",  # QServe's own main loop
    "gemm_w4a8_qoq_sm90",
    "gemm_w4a8_lqq_sm90",
    "gemm_w4a8_lqq_imfp_sm90",
    "gemm_w4a8_sm90",  # unsigned
)
FFN = tuple(layer for layer in LAYERS if layer.model == "7B" and layer.part in ("gate+up", "down"))
TOKENS = (16, 64, 256)  # the paper names none
METRICS = ("gpu__time_duration.sum", "sm__cycles_elapsed.max")

# Functions of dequant.cuh -> what they are of the treatment of a word. LQQ adds in the multiplication, so that what is
# left of the subtraction is its XOR; unsigned LQQ has not even that.
PARTS = {
    "unpack_u4": "unpack",
    "mul_u8x4": "multiply",
    "mad_u8x4": "multiply",
    "dequant_qoq_vadd4": "subtract",
    "dequant_lqq": "subtract",
}
_FILE = "dequant.cuh"
_FUNCTION = re.compile(r"^__device__ __forceinline__ [\w ]*?(\w+)\(")


@dataclass(frozen=True)
class Row:
    """One kernel on one matrix.

    Attributes:
        kernel: its name.
        layer: `7B down`.
        sizes: M, N, K and the group.
        time_us: under ncu.
        stalls: how many stalled warps were sampled.
        parts: part of the dequantisation -> share of all stalls.
        reasons: reason -> share of all stalls, at the subtraction's instructions.
    """

    kernel: str
    layer: str
    sizes: dict[str, int]
    time_us: float
    stalls: int
    parts: dict[str, float]
    reasons: dict[str, float]

    @property
    def subtract(self) -> float:
        """Share of all stalls that the subtraction has."""
        return self.parts.get("subtract", 0.0)

    @property
    def dequantise(self) -> float:
        """Share of all stalls that the whole dequantisation has."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Record:
    """All of them as measured on one GPU; `origin` has commit, date and versions."""

    device: dict[str, Any]
    origin: dict[str, str]
    rows: tuple[Row, ...]
    schema: int = SCHEMA

    def at(self, kernel: str, layer: str, M: int) -> Row | None:
        """The row of a kernel on a matrix, if it was measured."""
        return next((r for r in self.rows if (r.kernel, r.layer, r.sizes["M"]) == (kernel, layer, M)), None)


def measure(keep: Path | None = None) -> Record:
    """Launch every kernel on every matrix under ncu; raises as `profiles.launch` does."""
    planned = list(jobs())
    launched = profiles.launch([job for job, _ in planned], METRICS, keep=keep)
    info = gpu.device_info()
    rows = tuple(row_of(one, job, layer) for one, (job, layer) in zip(launched, planned, strict=True))
    return Record({"name": info.name, "slug": info.slug, "driver": info.driver}, profiles.origin(), rows)


def jobs() -> Iterator[tuple[Job, Layer]]:
    """What is launched, in this order."""
    for kernel in KERNELS:
        for layer in FFN:
            for M in TOKENS:
                yield Job(kernel, {"M": M, "N": layer.N, "K": layer.K, "g": GROUP}), layer


def row_of(launched: Launched, job: Job, layer: Layer) -> Row:
    """Attribute the samples of one launch."""
    part_of = parts_by_line(launched.sources.get(_FILE, ""))
    stalls, parts, reasons = 0, Counter[str](), Counter[str]()
    for one in launched.instructions:
        stalls += one.stalled
        part = _part(one, part_of)
        parts[part] += one.stalled
        if part == "subtract":
            reasons.update({r: n for r, n in one.samples.items() if r != ISSUING})
    del parts[""]
    time = launched.number("gpu__time_duration.sum") / 1e3
    shares = [{name: n / max(1, stalls) for name, n in counts.most_common()} for counts in (parts, reasons)]
    return Row(job.target, str(layer), dict(job.sizes), time, stalls, *shares)


def parts_by_line(text: str) -> dict[int, str]:
    """Line of `dequant.cuh` -> the part of the treatment of a word that it is of."""
    found, part = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if begins := _FUNCTION.match(line):
            part = PARTS.get(begins[1], "")
        found[number] = part
    return {number: part for number, part in found.items() if part}


def _part(instruction: Instruction, part_of: Mapping[int, str]) -> str:
    return part_of.get(instruction.line, "") if instruction.file == _FILE else ""


def save(record: Record, path: Path | None = None) -> Path:
    """Write it, by default where `load` finds it."""
    path = path or default_path(record.device["slug"])
    write_text(path, json.dumps(asdict(record), indent=1) + "\n")
    return path


def load(path: Path) -> Record:
    """Read one; `FileError` says in one line why a file is none."""
    try:
        found = json.loads(read_text(path))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, not {SCHEMA}")
        return Record(**{**found, "rows": tuple(Row(**row) for row in found["rows"])})
    except (ValueError, TypeError, KeyError) as error:
        raise FileError(f"{path}: not a record of stalls: {error}") from None


def recorded(slug: str = "h200") -> Record | None:
    """What is recorded of a GPU."""
    path = default_path(slug)
    return load(path) if path.is_file() else None


def default_path(slug: str) -> Path:
    """`notebooks/results/<gpu>/stalls.json`."""
    return sources.results_dir() / slug / "stalls.json"


def table(rows: Iterable[Row]) -> list[list[str]]:
    """Cells: kernel, then per matrix and number of tokens the subtraction's share and the whole dequantisation's."""
    found = {(r.kernel, r.layer, r.sizes["M"]): r for r in rows}
    columns = list(dict.fromkeys(place[1:] for place in found))
    cells = {
        kernel: [found.get((kernel, *column)) for column in columns] for kernel in dict.fromkeys(p[0] for p in found)
    }
    head = ["kernel", *(f"{layer}, M = {M}" for layer, M in columns)]
    return [
        head,
        *(
            [k, *("" if r is None else f"{r.subtract:.0%} of {r.dequantise:.0%}" for r in row)]
            for k, row in cells.items()
        ),
    ]
