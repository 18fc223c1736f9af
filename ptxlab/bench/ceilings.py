"""What this card's memory reaches right now, measured in the same run as everything that is compared with it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import BenchmarkError
from ptxlab.hardware.sheets import SHEETS, sheet
from ptxlab.runtime.timing import measure
from ptxlab.sources import Source
from ptxlab.spec import Launch

ALLOWED_SHORTFALL = 0.03
_BUFFER = 4 << 30
_RANDOM = 128 << 20  # distinct random bytes; repeated to fill the buffer
_THREADS = 512
_PER_BLOCK = _THREADS * 8 * 16  # bytes that one block of read.ptx reads
_SUMS = 1024


@dataclass(frozen=True)
class Ceilings:
    """Device memory, in TB/s (10^12 bytes): reading alone, and copying with bytes read plus bytes written."""

    read_tbps: float
    copy_tbps: float

    def to_json(self) -> dict[str, float]:
        """Return JSON-ready values."""
        return asdict(self)


def measure_ceilings() -> Ceilings:
    """Measure on the current device; takes 4 GiB of its memory for a second or two."""
    block = np.frombuffer(np.random.default_rng(0).bytes(_RANDOM), np.uint32)
    buffer = gpu.empty((_BUFFER // _RANDOM, block.size), np.uint32)
    first = gpu.to_device(block)
    for row in buffer:
        gpu.copy_bytes(row, first)
    lower_half, upper_half = buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]
    read_tbps = _read_tbps(buffer, block)
    copy_us = gpu.time_calls(lambda: gpu.copy_bytes(upper_half, lower_half))
    return Ceilings(read_tbps, 2 * lower_half.nbytes / copy_us / 1e6)


def shortfall(ceilings: Ceilings, device: str) -> str:
    """Return the reason why a record with these ceilings is not valid.

    It is empty if the record is valid, or if there is no sheet for the device.
    """
    if device not in SHEETS:
        return ""
    expected = sheet(device)
    for access, measured_tbps, sheet_tbps in (
        ("read", ceilings.read_tbps, expected.read_tbps),
        ("copy", ceilings.copy_tbps, expected.copy_tbps),
    ):
        if measured_tbps < sheet_tbps * (1 - ALLOWED_SHORTFALL):
            description = f"{1 - measured_tbps / sheet_tbps:.0%} below the {sheet_tbps:.2f} of this card"
            return f"memory {access} reaches {measured_tbps:.2f} TB/s, {description}"
    return ""


def _read_tbps(buffer: Any, block: np.ndarray) -> float:
    sums = gpu.to_device(np.zeros(_SUMS, np.uint32))
    kernel = gpu.load(Source.read(Path(__file__).with_name("read.ptx")), "stream_read")
    read = gpu.prepare(kernel, [buffer, sums], Launch((_BUFFER // _PER_BLOCK, 1, 1), (_THREADS, 1, 1)))
    read()
    expected = _BUFFER // _RANDOM * block.sum(dtype=np.uint64) % 2**32
    if gpu.to_host(sums).sum(dtype=np.uint64) % 2**32 != expected:
        raise BenchmarkError("memory read: the sums of the kernel are wrong")
    return _BUFFER / measure([read]).us / 1e6
