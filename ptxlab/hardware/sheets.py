"""Device sheets: what one card reached when it was measured, and what data sheets promise of others."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ptxlab.errors import ArgumentError

# Instructions of single threads per clock and SM, by pipe. `fma` is FP32: 64 lanes in the A100's SMs, which multiply
# integers there too (`fmaheavy`), else 128 of which half multiply integers. Conversions run on `xu` on sm_80, on `alu`
# above it (there the machine code has I2FP). `issue`: four schedulers, each an instruction of a warp of 32 threads.
_ISSUED_PER_CLOCK = 128
_AMPERE = {"alu": 64, "fmaheavy": 64, "fma": 64, "xu": 16, "issue": _ISSUED_PER_CLOCK}
_LATER = {**_AMPERE, "fma": 128}
LANES_PER_CLOCK = {"sm_80": _AMPERE, "sm_86": _LATER, "sm_89": _LATER, "sm_90": _LATER}


def slowest_pipe(per_pipe: Mapping[str, float], arch: str) -> tuple[float, str]:
    """Compute the clocks that one SM needs per lane for these instructions, at best, and the pipe that decides."""
    load = {pipe: per_pipe.get(pipe, 0.0) for pipe in ("alu", "fmaheavy", "xu")}
    load["fma"] = per_pipe.get("fma", 0.0) + load["fmaheavy"]
    load["issue"] = sum(per_pipe.values())
    clocks = {pipe: count / LANES_PER_CLOCK[arch][pipe] for pipe, count in load.items()}
    slowest_name = max(clocks, key=clocks.__getitem__)
    return clocks[slowest_name], slowest_name


@dataclass(frozen=True)
class Device:
    """Data of a GPU for the cost model; rates in 10^12 per second.

    Attributes:
        name: by which `device` finds it.
        source: where the figures come from.
        measured: whether they were measured; else they are promised.
        sms: streaming multiprocessors.
        clock_ghz: of an SM.
        memory_tbps: bytes out of device memory.
        tops: dense operations on tensor cores by operand, `fp16`, `fp8`, `int8`, `int4`, without what the card lacks;
            `int8_sync` is `mma.sync` where that is slower than the warp group's. FP16 adds in FP32.
        start_us: what a launch takes beside its work.
        arch: key of `LANES_PER_CLOCK`.
    """

    name: str
    source: str
    measured: bool
    sms: int
    clock_ghz: float
    memory_tbps: float
    tops: Mapping[str, float]
    start_us: float = 0.0
    arch: str = "sm_90"

    @property
    def issue_tips(self) -> float:
        """Instructions of single threads that the schedulers issue: the C of LiquidGEMM §3.2.

        On the ALU pipe, where shifts and logic run, go half as many.
        """
        return self.sms * _ISSUED_PER_CLOCK * self.clock_ghz / 1e3


@dataclass(frozen=True, kw_only=True)
class DeviceSheet(Device):
    """A GPU as it was measured: the rates that kernels reach, and its ceilings.

    Clock: the median of the suite `gemm` up to 256 tokens. Memory: weights into shared memory by bulk copies, beyond
    `start_us`, which such a launch takes in a graph before and after its bytes. FP16 and FP8: the best that cuBLAS
    reached, M >= 2048, which is no ceiling of the tensor cores.

    Attributes:
        read_tbps: streaming reads of device memory, 10^12 bytes per second.
        copy_tbps: device-to-device copy, bytes read plus bytes written.
        mma_start_us: what a launch takes that has to load, multiply and store.
    """

    read_tbps: float
    copy_tbps: float
    mma_start_us: float

    def stream_us(self, nbytes: float) -> float:
        """Return the microseconds that weights take into shared memory, replayed in a CUDA graph, never from the L2."""
        return self.start_us + nbytes / self.memory_tbps / 1e6

    def int8_us(self, operations: float) -> float:
        """Compute the microseconds of a GEMM if only its INT8 multiplications count."""
        return self.mma_start_us + operations / self.tops["int8"] / 1e6


SHEETS = {  # by `DeviceInfo.slug`
    "h200": DeviceSheet(
        name="h200-measured",
        source="measured",
        measured=True,
        sms=132,
        clock_ghz=1.81,
        memory_tbps=4.5,
        # INT4 is emulated: Hopper multiplies no 4-bit integers.
        tops={"fp16": 800.0, "fp8": 1490.0, "int8": 1920.0, "int8_sync": 1268.0, "int4": 50.0},
        start_us=1.95,
        read_tbps=4.65,
        copy_tbps=4.26,
        mma_start_us=2.0,
    ),
}

# NVIDIA's data sheets and white papers (GA102, Ada), without sparsity: A100 SXM with 80 GB, H100 and H200 SXM, L40S
# (which promises no more for INT4 than for INT8; the RTX 4090, of the same chip, twice as much). H800 is an H100 with
# less NVLink and FP64. Clocks are those that the FP32 rates are made of: A100 19.5 TFLOP/s, H100 and H200 67, L40S
# 91.6, RTX 3090 35.6, RTX 4090 82.6. GeForce cards multiply FP16 twice as fast where sums are FP16 too.
_HOPPER = {"fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_AMPERE_TOPS = {"fp16": 312.0, "int8": 624.0, "int4": 1248.0}
_RTX_3090 = {"fp16": 71.2, "int8": 284.7, "int4": 569.4}
_RTX_4090 = {"fp16": 165.2, "fp8": 330.3, "int8": 660.6, "int4": 1321.2}
_L40S = {"fp16": 362.05, "fp8": 733.0, "int8": 733.0, "int4": 733.0}
_PROMISED = (
    Device("a100", "data sheet", False, 108, 1.41, 2.039, _AMPERE_TOPS, arch="sm_80"),
    Device("h100", "data sheet", False, 132, 1.98, 3.35, _HOPPER),
    Device("h800", "as H100", False, 132, 1.98, 3.35, _HOPPER),
    Device("h200", "data sheet", False, 132, 1.98, 4.8, _HOPPER),
    Device("l40s", "data sheet", False, 142, 2.52, 0.864, _L40S, arch="sm_89"),
    Device("rtx3090", "white paper", False, 82, 1.695, 0.936, _RTX_3090, arch="sm_86"),
    Device("rtx4090", "white paper", False, 128, 2.52, 1.008, _RTX_4090, arch="sm_89"),
)
DEVICES = {d.name: d for d in (*_PROMISED, *SHEETS.values())}


def sheet(name: str) -> DeviceSheet:
    """Return the measured sheet of a GPU by its slug; `ArgumentError` names those that exist."""
    if name not in SHEETS:
        raise ArgumentError("device", f"a GPU with a sheet: {', '.join(SHEETS)}", name)
    return SHEETS[name]


def device(name: str) -> Device:
    """Return a GPU of the cost model by its name, in capitals or not.

    `ArgumentError` names those that exist.
    """
    if name.lower() not in DEVICES:
        suggestions = difflib.get_close_matches(name.lower(), DEVICES, n=3, cutoff=0.5)
        rule = f"one of {', '.join(DEVICES)}" + (f"; nearest: {', '.join(suggestions)}" if suggestions else "")
        raise ArgumentError("device", rule, name)
    return DEVICES[name.lower()]
