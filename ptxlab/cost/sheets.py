"""Device sheets: what one card reached when it was measured, and what data sheets promise of others."""

from collections.abc import Mapping
from dataclasses import dataclass

from ptxlab.errors import ArgumentError

_ISSUED_PER_CLOCK = 128  # by an SM: four schedulers, each an instruction of a warp of 32 threads


@dataclass(frozen=True)
class Device:
    """What the cost model has to know of a GPU; rates in 10^12 per second.

    Attributes:
        name: by which `device` finds it.
        source: where the figures come from.
        measured: whether they were measured; else they are promised.
        sms: streaming multiprocessors.
        clock_ghz: of an SM.
        memory_tbps: bytes out of device memory.
        tops: dense operations on tensor cores by operand, `fp16`, `fp8`, `int8`, `int4`, without what the card lacks;
            `int8_sync` is `mma.sync` where that is slower than the warp group's.
        start_us: what a launch takes beside its work.
    """

    name: str
    source: str
    measured: bool
    sms: int
    clock_ghz: float
    memory_tbps: float
    tops: Mapping[str, float]
    start_us: float = 0.0

    @property
    def issue_tips(self) -> float:
        """Instructions of single threads that the schedulers issue: the C of LiquidGEMM §3.2.

        On the ALU pipe, where shifts and logic run, go half as many.
        """
        return self.sms * _ISSUED_PER_CLOCK * self.clock_ghz / 1e3


@dataclass(frozen=True)
class DeviceSheet:
    """Measured ceilings of one GPU; bandwidths in TB/s (10^12), rates in 10^12 operations per second.

    Attributes:
        name: as `DeviceInfo.slug` has it.
        sms: streaming multiprocessors.
        l2_bytes: size of the L2 cache.
        shared_bytes: most shared memory per block.
        clock_ghz: of an SM in GEMMs of up to 256 tokens: the median of the suite `gemm`.
        read_tbps: streaming reads of device memory.
        copy_tbps: device-to-device copy, bytes read plus bytes written.
        int8_tops: integer `wgmma`, operands resident.
        int8_sync_tops: integer `mma.sync`.
        int4_tops: 4-bit `mma.sync`.
        fp8_tflops: the best that cuBLAS reached, M >= 2048; no ceiling of the tensor cores.
        fp16_tflops: likewise.
        stream_tbps: weights into shared memory by bulk copies, beyond `stream_start_us`.
        stream_start_us: what such a launch takes in a graph before and after its bytes.
        mma_start_us: what a launch takes that has to load, multiply and store.
    """

    name: str
    sms: int
    l2_bytes: int
    shared_bytes: int
    clock_ghz: float
    read_tbps: float
    copy_tbps: float
    int8_tops: float
    int8_sync_tops: float
    int4_tops: float
    fp8_tflops: float
    fp16_tflops: float
    stream_tbps: float
    stream_start_us: float
    mma_start_us: float

    def stream_us(self, nbytes: float) -> float:
        """Microseconds that weights take into shared memory, replayed in a CUDA graph, never from the L2."""
        return self.stream_start_us + nbytes / self.stream_tbps / 1e6

    def int8_us(self, operations: float) -> float:
        """Microseconds that a GEMM takes if only its INT8 multiplications count."""
        return self.mma_start_us + operations / self.int8_tops / 1e6

    @property
    def device(self) -> Device:
        """What the cost model takes of it."""
        tops = {
            "fp16": self.fp16_tflops,
            "fp8": self.fp8_tflops,
            "int8": self.int8_tops,
            "int8_sync": self.int8_sync_tops,
            "int4": self.int4_tops,
        }
        rates = self.sms, self.clock_ghz, self.stream_tbps, tops, self.stream_start_us
        return Device(f"{self.name}-measured", "measured", True, *rates)


SHEETS = {
    "h200": DeviceSheet(
        name="h200",
        sms=132,
        l2_bytes=60 << 20,
        shared_bytes=227 << 10,
        clock_ghz=1.81,
        read_tbps=4.65,
        copy_tbps=4.26,
        int8_tops=1920.0,
        int8_sync_tops=1268.0,
        int4_tops=50.0,  # emulated: Hopper multiplies no 4-bit integers
        fp8_tflops=1490.0,
        fp16_tflops=800.0,
        stream_tbps=4.5,
        stream_start_us=1.95,
        mma_start_us=2.0,
    ),
}

# NVIDIA's data sheets, without sparsity: A100 SXM with 80 GB, H100 and H200 SXM, L40S (which promises no more for INT4
# than for INT8). H800 is an H100 with less NVLink and FP64. Clocks are those that the FP32 rates are made of: A100
# 19.5 TFLOP/s, H100 and H200 67, L40S 91.6.
_HOPPER = {"fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_ADA = {"fp16": 362.05, "fp8": 733.0, "int8": 733.0, "int4": 733.0}
_PROMISED = (
    Device("a100", "data sheet", False, 108, 1.41, 2.039, {"fp16": 312.0, "int8": 624.0, "int4": 1248.0}),
    Device("h100", "data sheet", False, 132, 1.98, 3.35, _HOPPER),
    Device("h800", "as H100", False, 132, 1.98, 3.35, _HOPPER),
    Device("h200", "data sheet", False, 132, 1.98, 4.8, _HOPPER),
    Device("l40s", "data sheet", False, 142, 2.52, 0.864, _ADA),
)
DEVICES = {d.name: d for d in (*_PROMISED, *(sheet.device for sheet in SHEETS.values()))}


def sheet(name: str) -> DeviceSheet:
    """The measured sheet of a GPU by its slug; `ArgumentError` names those that exist."""
    if name not in SHEETS:
        raise ArgumentError("device", f"a GPU with a sheet: {', '.join(SHEETS)}", name)
    return SHEETS[name]


def device(name: str) -> Device:
    """A GPU of the cost model by its name, in capitals or not; `ArgumentError` names those that exist."""
    if name.lower() not in DEVICES:
        raise ArgumentError("device", f"one of {', '.join(DEVICES)}", name)
    return DEVICES[name.lower()]
