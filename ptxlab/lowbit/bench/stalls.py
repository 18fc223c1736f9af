"""What dequantisation costs in stalls (LiquidGEMM §3.2): sampled warps by the function of `dequant.cuh` they stood in.

By the line table every machine instruction has the source line that it came from, and a line of `dequant.cuh` lies in
one function. What `__vadd4` becomes has the line of the dequantiser that calls it, so what `dequant_qoq_vadd4` does
after unpacking and multiplying, which opcode and operands tell, is the subtraction and nothing else.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptxlab import gpu, sources
from ptxlab.errors import FileError, UnavailableError
from ptxlab.io.files import read_record, write_text
from ptxlab.lowbit.bench.shapes import GROUP, LAYERS, Layer
from ptxlab.profile import profiles
from ptxlab.profile.launch_target import LaunchTarget
from ptxlab.profile.nsight import ISSUING, ProfiledLaunch

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

_FILE = "dequant.cuh"
_SUBTRACTING = ("dequant_qoq_vadd4", "dequant_lqq")  # after unpacking and multiplying
_NIBBLES = "0xf0f0f0f"
_ARITHMETIC = ("LOP3", "SHF", "IMAD", "IADD3", "VIADD", "PRMT")
_FUNCTION = re.compile(r"^__device__ __forceinline__ [\w ]*?(\w+)\(")


@dataclass(frozen=True)
class StallRow:
    """Sampled stalls of one kernel on one matrix.

    Attributes:
        kernel: its name.
        layer: `7B down`.
        sizes: M, N, K and the group.
        time_us: under ncu.
        stalls: how many stalled warps were sampled.
        parts: part of the dequantisation -> share of all stalls.
        executed: part -> instructions that a thread executed per weight.
        reasons: reason -> share of all stalls, at the subtraction's instructions.
    """

    kernel: str
    layer: str
    sizes: dict[str, int]
    time_us: float
    stalls: int
    parts: dict[str, float]
    executed: dict[str, float]
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
class StallRecord:
    """Rows measured on one GPU; `origin` has commit, date and versions."""

    device: dict[str, Any]
    origin: dict[str, str]
    rows: tuple[StallRow, ...]
    schema: int = SCHEMA

    def at(self, kernel: str, layer: str, M: int) -> StallRow | None:
        """Return the row of a kernel on a matrix, or None if it was not measured."""
        return next((row for row in self.rows if (row.kernel, row.layer, row.sizes["M"]) == (kernel, layer, M)), None)


def measure(keep: Path | None = None) -> StallRecord:
    """Launch every kernel on every matrix under ncu; raises as `profiles.launch` does."""
    planned_jobs = list(jobs())
    profiles_of_launches = profiles.launch([job for job, _ in planned_jobs], METRICS, keep=keep)
    device = gpu.device_info()
    rows = tuple(
        row_of(profile, job, layer) for profile, (job, layer) in zip(profiles_of_launches, planned_jobs, strict=True)
    )
    return StallRecord({"name": device.name, "slug": device.slug, "driver": device.driver}, profiles.origin(), rows)


def jobs() -> Iterator[tuple[LaunchTarget, Layer]]:
    """Yield the launches to profile, in the order of the report."""
    for kernel in KERNELS:
        for layer in FFN:
            for M in TOKENS:
                yield LaunchTarget(kernel, {"M": M, "N": layer.N, "K": layer.K, "g": GROUP}), layer


def row_of(launched: ProfiledLaunch, job: LaunchTarget, layer: Layer) -> StallRow:
    """Attribute the samples of one launch to the parts of the dequantisation.

    Raises UnavailableError if the report does not hold the dequantisers' source.
    """
    if not launched.sources.get(_FILE):
        raise UnavailableError(
            f"ncu: {_FILE} is not in the report of {launched.kernel}; `--import-source yes` puts it there"
        )
    functions = functions_by_line(launched.sources[_FILE])
    samples_by_part, executed_by_part, samples_by_reason = Counter[str](), Counter[str](), Counter[str]()
    for sampled_instruction in launched.instructions:
        part = part_of(
            sampled_instruction.sass,
            functions.get(sampled_instruction.line, "") if sampled_instruction.file == _FILE else "",
        )
        samples_by_part[part] += sampled_instruction.stalled
        executed_by_part[part] += 32 * sampled_instruction.executed
        if part == "subtract":
            samples_by_reason.update(
                {reason: n for reason, n in sampled_instruction.samples.items() if reason != ISSUING}
            )
    stalled_samples = samples_by_part.total()
    return StallRow(
        kernel=job.target,
        layer=str(layer),
        sizes=dict(job.sizes),
        time_us=launched.number("gpu__time_duration.sum") / 1e3,
        stalls=stalled_samples,
        parts=_shares(samples_by_part, stalled_samples),
        executed=_shares(executed_by_part, layer.N * layer.K),
        reasons=_shares(samples_by_reason, stalled_samples),
    )


def _shares(counts: Counter[str], whole: int) -> dict[str, float]:
    return {name: n / max(1, whole) for name, n in counts.most_common() if name and n}


def functions_by_line(text: str) -> dict[int, str]:
    """Map each line of a header of device functions to the function that it is in."""
    functions, name = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if function_match := _FUNCTION.match(line):
            name = function_match[1]
        functions[number] = name
    return functions


def part_of(sass: str, function: str) -> str:
    """Return the part of the dequantisation of a word that an instruction of a function in `dequant.cuh` belongs to.

    The part is empty if the instruction belongs to none.

    LQQ adds in the multiplication, so that what is left of its subtraction is the XOR; unsigned LQQ has not even that.
    """
    opcode = next(word for word in sass.split() if not word.startswith("@"))
    if opcode.partition(".")[0] not in _ARITHMETIC:  # what was moved there: a wgmma, the descriptor it takes
        return ""
    if function == "unpack_u4" or _NIBBLES in sass:
        return "unpack"
    if function and opcode == "IMAD":  # IMAD.IADD and IMAD.MOV multiply nothing
        return "multiply"
    return "subtract" if function in _SUBTRACTING else ""


def save(record: StallRecord, path: Path | None = None) -> Path:
    """Write the record, by default where `load` finds it."""
    if path is None:
        path = default_path(record.device["slug"])
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(record), indent=1) + "\n")
    return path


def load(path: Path) -> StallRecord:
    """Read a record; FileError says in one line why a file is none."""
    content = read_record(path, "a record of stalls", SCHEMA)
    try:
        return StallRecord(**{**content, "rows": tuple(StallRow(**row) for row in content["rows"])})
    except (TypeError, KeyError) as error:
        raise FileError(f"{path}: not a record of stalls: {error}") from None


def find_record(slug: str = "h200") -> StallRecord | None:
    """Return the record of a GPU, or None if there is none."""
    path = default_path(slug)
    return load(path) if path.is_file() else None


def default_path(slug: str) -> Path:
    """Return the path `notebooks/results/<gpu>/stalls.json`."""
    return sources.results_dir() / slug / "stalls.json"


def table(rows: Iterable[StallRow]) -> list[list[str]]:
    """Format rows as cells, the head first: kernel, matrix, then per number of tokens the shares of the stalls.

    The shares are that of the subtraction and that of the whole dequantisation.
    """
    rows_by_place = {(row.kernel, row.layer, row.sizes["M"]): row for row in rows}
    tokens = sorted({M for _, _, M in rows_by_place})
    table_rows = [
        [
            kernel,
            layer,
            *(
                f"{row.subtract:.0%} of {row.dequantise:.0%}"
                for M in tokens
                if (row := rows_by_place.get((kernel, layer, M)))
            ),
        ]
        for kernel, layer in dict.fromkeys(place[:2] for place in rows_by_place)
    ]
    return [["kernel", "matrix", *(f"M = {M}" for M in tokens)], *table_rows]
