"""Memory: one arena of bytes for global buffers, variables, parameters, and every block's shared and local window.

Device addresses are arena offsets plus `BASE`, so null and small integers point nowhere. Regions lie `GAP` bytes
apart: an access that runs out of its buffer falls into a gap and is reported with the buffer that it missed. Wide gaps
catch far misses; they cost the time to clear them, as memory that is used again comes uncleared.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.emulator.front.ir import Variable
from ptxlab.emulator.front.types import Array
from ptxlab.errors import ArgumentError

LOCAL_NAME = re.compile(r"^_ZZ.*E\d+(?=[A-Za-z_]\w*$)")  # how C++ decorates the name of a function's own variable
BASE = 0x7F00_0000_0000
SHARED_START = 1024  # address of the first byte of a shared window, as on sm_90: null is out of bounds
GAP = 1 << 16
ALIGN = 1024  # shared windows need it for swizzled tiles; cudaMalloc gives 256


@dataclass(slots=True)
class Region:
    """Bytes [start, end) of the arena, called `name` in messages."""

    name: str
    start: int
    end: int
    writable: bool = True
    written: bool = False
    variables: Sequence[Variable] = ()  # those that lie in it, in order

    def place(self, offset: int) -> str:
        """Name the byte at an offset of the region: `byte 12 of s (tile + 4)`."""
        for variable in reversed(self.variables):
            if variable.offset <= offset and (offset < variable.offset + variable.size or not variable.size):
                return (
                    f"byte {offset} of {self.name} ({LOCAL_NAME.sub('', variable.name)} + {offset - variable.offset})"
                )
        return f"byte {offset} of {self.name}"


class Memory:
    """The arena. Reserve every region first, then `allocate`, then read and write `view[n]`, items of n bytes."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.size = GAP
        self.arena: Array = np.zeros(0, np.uint8)
        self.view: dict[int, Array] = {}

    def reserve(
        self, name: str, size: int, writable: bool = True, gap: int = GAP, variables: Sequence[Variable] = ()
    ) -> Region:
        """Reserve a region of `size` bytes behind all others, with `gap` free bytes behind it."""
        region = Region(name, self.size, self.size + size, writable, variables=variables)
        self.regions.append(region)
        self.size = ceil_div(region.end, ALIGN) * ALIGN + gap
        return region

    def allocate(self) -> None:
        """Make the arena, zeroed."""
        try:
            self.arena = np.zeros(self.size, np.uint8)
        except (MemoryError, ValueError):
            raise ArgumentError("memory", "has to fit this machine", f"{self.size} bytes in all") from None
        self.view = {n: self.arena.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.starts = [region.start for region in self.regions]
        self.starts_array = np.array(self.starts, np.int64)
        self.ends_array = np.array([region.end for region in self.regions], np.int64)

    def region_of(self, offset: int) -> Region | None:
        """Return the region that begins last at or before `offset`; None before the first."""
        index = bisect_right(self.starts, offset) - 1
        return self.regions[index] if index >= 0 else None

    def touched_region(self, offsets: Array, end: int) -> Region | None:
        """Return the region that holds all bytes from the least of `offsets` to `end`; None if no region does."""
        region = self.region_of(int(np.minimum.reduce(offsets)))
        return region if region and end <= region.end else None

    def touch_each(self, offsets: Array, size: int | Array) -> tuple[Array, list[Region]]:
        """Return which accesses do not lie wholly in one region (bool each), and the regions of the others."""
        index = np.searchsorted(self.starts_array, offsets, "right") - 1
        is_outside = (index < 0) | (offsets + size > self.ends_array[index])
        return is_outside, [self.regions[i] for i in np.unique(index[~is_outside])]

    def name_byte(self, offset: int) -> str:
        """Name the byte at a valid arena offset in words."""
        region = self.region_of(offset)
        return region.place(offset - region.start) if region else f"offset {offset}"

    def describe(self, offset: int, size: int) -> str:
        """Describe in words where an access of `size` bytes at a bad arena offset points."""
        region = self.region_of(offset)
        following_region = next((r for r in self.regions if r.start > offset), None)
        if following_region and offset >= following_region.start - GAP // 2:
            return f"{following_region.start - offset} bytes before {following_region.name}"
        if region is None or offset >= region.end + GAP:
            address = (offset + BASE) % (1 << 64)
            return f"address {address:#x}, {'no buffer' if address else 'a null pointer'}"
        bytes_past_end, length = offset + size - region.end, region.end - region.start
        return f"byte {offset - region.start} of {region.name}, {bytes_past_end} bytes past its end ({length} bytes)"
