"""Device sheets: what a card reaches when measured, and the figures that a record has to come near."""

from dataclasses import dataclass

from ptxlab.errors import ArgumentError


@dataclass(frozen=True)
class DeviceSheet:
    """Measured ceilings of one GPU; bandwidths in TB/s (10^12), rates in 10^12 operations per second.

    Attributes:
        name: as `DeviceInfo.slug` has it.
        sms: streaming multiprocessors.
        l2_bytes: size of the L2 cache.
        shared_bytes: most shared memory per block.
        read_tbps: streaming reads of device memory.
        copy_tbps: device-to-device copy, bytes read plus bytes written.
        int8_tops: integer `wgmma`, operands resident.
        stream_tbps: weights into shared memory by bulk copies, beyond `stream_start_us`.
        stream_start_us: what such a launch takes in a graph before and after its bytes.
        mma_start_us: what a launch takes that has to load, multiply and store.
    """

    name: str
    sms: int
    l2_bytes: int
    shared_bytes: int
    read_tbps: float
    copy_tbps: float
    int8_tops: float
    stream_tbps: float
    stream_start_us: float
    mma_start_us: float

    def stream_us(self, nbytes: float) -> float:
        """Microseconds that weights take into shared memory, replayed in a CUDA graph, never from the L2."""
        return self.stream_start_us + nbytes / self.stream_tbps / 1e6

    def int8_us(self, operations: float) -> float:
        """Microseconds that a GEMM takes if only its INT8 multiplications count."""
        return self.mma_start_us + operations / self.int8_tops / 1e6


SHEETS = {
    "h200": DeviceSheet(
        name="h200",
        sms=132,
        l2_bytes=60 << 20,
        shared_bytes=227 << 10,
        read_tbps=4.65,
        copy_tbps=4.26,
        int8_tops=1920.0,
        stream_tbps=4.5,
        stream_start_us=1.95,
        mma_start_us=2.0,
    ),
}


def sheet(name: str) -> DeviceSheet:
    """The sheet of a GPU by its slug; `ArgumentError` names those that exist."""
    if name not in SHEETS:
        raise ArgumentError("device", f"a GPU with a sheet: {', '.join(SHEETS)}", name)
    return SHEETS[name]


def gemm_floor(stream_us: float, operations: float, device: str) -> tuple[float, str]:
    """The least microseconds of a W4A8 GEMM and what sets them, from its stream floor and the device's sheet."""
    floors = [(stream_us, "stream")]
    if device in SHEETS:
        floors.append((SHEETS[device].int8_us(operations), "int8"))
    return max(floors)
