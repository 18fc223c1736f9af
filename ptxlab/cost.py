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
    """

    name: str
    sms: int
    l2_bytes: int
    shared_bytes: int
    read_tbps: float
    copy_tbps: float
    int8_tops: float


SHEETS = {
    "h200": DeviceSheet(
        name="h200",
        sms=132,
        l2_bytes=60 << 20,
        shared_bytes=227 << 10,
        read_tbps=4.65,
        copy_tbps=4.26,
        int8_tops=1920.0,
    ),
}


def sheet(name: str) -> DeviceSheet:
    """The sheet of a GPU by its slug; `ArgumentError` names those that exist."""
    if name not in SHEETS:
        raise ArgumentError("device", f"a GPU with a sheet: {', '.join(SHEETS)}", name)
    return SHEETS[name]
