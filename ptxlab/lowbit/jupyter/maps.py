"""Which lane holds which element: fragments, packings and what a `load_*` kernel brings, as one kind of map.

A fragment's map is `hardware.fragments`, which recorded vectors pin to the hardware. A packing's map is read off packed
tiles, and a kernel's off what the kernel brings (`holders`). The elements of such a tile are one hexadecimal digit of
their own positions, so that a few tiles tell where each element went.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from ptxlab import registry
from ptxlab.errors import ArgumentError
from ptxlab.hardware import fragments
from ptxlab.hardware.fragments import WARP, Fragment
from ptxlab.lowbit.kernels import holders
from ptxlab.lowbit.layout import LAYOUTS, pack
from ptxlab.lowbit.quant import QoQChannelWeight

_DIGITS = 3  # of a position, hexadecimal: a tile has at most 16 ** 3 elements


@dataclass(frozen=True, eq=False)
class HolderMap:
    """Lane, register and bit of each element of a matrix; all arrays are [rows, columns].

    Attributes:
        name: of the fragment, packing or kernel.
        description: what is held, in a line.
        axes: names of rows and columns.
        lane: the lane of each element (of a warp group: 0..127).
        register: which of its 32-bit registers.
        bit: the lowest bit of the element in that register.
        bits: of an element.
        wrong: true where the MMA wants another element in that place.
    """

    name: str
    description: str
    axes: tuple[str, str]
    lane: np.ndarray
    register: np.ndarray
    bit: np.ndarray
    bits: int
    wrong: np.ndarray

    @property
    def lanes(self) -> int:
        """Number of lanes that hold anything."""
        return int(self.lane.max()) + 1

    def held_by(self, lane: int) -> list[list[tuple[int, int]]]:
        """List (row, column) of the elements of each register of a lane, from its least significant bits."""
        if not 0 <= lane < self.lanes:
            raise ArgumentError("lane", f"0..{self.lanes - 1} for {self.name}", lane)
        elements = np.argwhere(self.lane == lane)
        places = sorted((int(self.register[r, c]), int(self.bit[r, c]), int(r), int(c)) for r, c in elements)
        registers = range(places[-1][0] + 1)
        return [[(r, c) for register, _, r, c in places if register == number] for number in registers]


def of_fragment(fragment: Fragment) -> HolderMap:
    """Build the map of an operand or an accumulator of a matrix instruction."""
    axes = {"a": ("row", "k"), "b": ("k", "column")}.get(fragment.name.rsplit(".", 1)[-1], ("row", "column"))
    lanes, registers, elements = np.indices(fragment.rows.shape)
    lane, register, bit = np.empty((3, *fragment.shape), int)
    for target, source in ((lane, lanes), (register, registers), (bit, elements * fragment.bits)):
        target[fragment.rows, fragment.cols] = source
    rows, columns = fragment.shape
    size = f"{rows} x {columns} elements of {fragment.bits} bits"
    description = f"{size} in {fragment.registers} registers of {fragment.lanes} lanes"
    return HolderMap(
        fragment.name, description, axes, lane, register, bit, fragment.bits, np.zeros(fragment.shape, bool)
    )


_TILES = {"row_major": (8, 128), "qserve": (32, 32), "dual_mma": (64, 64), "comet": (16, 64), "strips": (16, 128)}


def of_packing(layout: str) -> HolderMap:
    """Build the map of a tile of a packing, as loads of 128 bits bring it to the lanes; `comet` by ldmatrix.x4."""
    shape = _TILES[layout]
    address = _nibbles(layout, shape)
    lanes = 4 * WARP if layout == "dual_mma" else WARP
    byte = address // 2
    load, byte_in_load = np.divmod(byte, 16 * lanes)
    lane, word = np.divmod(byte_in_load // 4, 4)
    if layout == "comet":  # row 8 i + j is that of lane 8 i + j, and its word t goes to register i of lane 4 j + t
        matrix, row = np.divmod(lane, 8)
        lane, word = 4 * row + word, matrix
    instruction = "ldmatrix.x4 brings" if layout == "comet" else "loads of 128 bits bring"
    description = f"a tile of {shape[0]} x {shape[1]} 4-bit weights as {instruction} it to {lanes} lanes"
    return HolderMap(
        layout, description, ("row", "k"), lane, 4 * load + word, 4 * (address % 8), 4, np.zeros(shape, bool)
    )


def _nibbles(layout: str, shape: tuple[int, int]) -> np.ndarray:
    """Find the position of each weight of a tile in the packed buffer, in nibbles from its beginning."""
    N, K = shape
    position = np.arange(N * K).reshape(shape)
    weight_at = np.zeros(N * K, int)
    for digit in range(_DIGITS):
        q4 = (position >> 4 * digit & 15).astype(np.uint8)
        packed_weight = pack(QoQChannelWeight(q4, np.ones(N, np.float32), np.zeros(N, np.uint8)), layout)
        stored_bytes = next(iter(packed_weight.buffers.values())).reshape(-1).view(np.uint8).astype(int)
        weight_at += np.stack([stored_bytes & 15, stored_bytes >> 4], axis=-1).reshape(-1) << 4 * digit
    return np.argsort(weight_at).reshape(shape)


def of_load(name: str) -> HolderMap:
    """Build the map of the tile that a `load_*` kernel brings to the lanes of a warp group, as 8-bit operand A."""
    register_map = holders.map_registers(name)
    share = register_map.wrong.mean()
    description = "a tile of 64 x 64 weights as the kernel brings it to 128 lanes" + (
        f"; {share:.0%} of it is not where the MMA wants it" if share else ""
    )
    return HolderMap(
        name,
        description,
        ("row", "k"),
        register_map.thread,
        register_map.register,
        8 * register_map.byte,
        8,
        register_map.wrong,
    )


def _fragments() -> dict[str, Callable[[], HolderMap]]:
    shown_fragments = [
        *(fragments.mma_a(k) for k in (16, 32, 64)),
        *(fragments.mma_b(k) for k in (16, 32, 64)),
        fragments.mma_c(32),
        fragments.mma_c(16),
        *(fragments.ldmatrix(count, trans) for trans in (False, True) for count in (1, 2, 4)),
        fragments.wgmma_a(),
        *(fragments.wgmma_d(n) for n in (8, 16, 64)),
    ]
    return {fragment.name: partial(of_fragment, fragment) for fragment in shown_fragments}


@cache
def maps_by_name() -> dict[str, Callable[[], HolderMap]]:
    """List the maps by name: fragments, packings, kernels of the family `load` that bring fragments."""
    loads = [
        spec.name
        for spec in registry.specs().values()
        if spec.family == "load" and "fragments" in {a.name for a in spec.args}
    ]
    return {
        **_fragments(),
        **{layout: partial(of_packing, layout) for layout in LAYOUTS},
        **{name: partial(of_load, name) for name in loads},
    }


@cache
def find(name: str) -> HolderMap:
    """Return the map of that name; raise ArgumentError with the nearest names for an unknown one."""
    if name not in maps_by_name():
        near_names = difflib.get_close_matches(name, maps_by_name(), n=3, cutoff=0.3) or list(maps_by_name())
        raise ArgumentError("name", f"one of {', '.join(near_names)}", name)
    return maps_by_name()[name]()
