"""Who holds what: the way of every element of a tile through a kernel of the family `load`, read off the kernel itself.

The kernel runs in the emulator on three tiles whose elements are the three hexadecimal digits of their own position, so
that what arrives in a register says where it came from.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ptxlab import registry
from ptxlab.emulator import SharedAccess
from ptxlab.errors import ArgumentError
from ptxlab.hardware import banks
from ptxlab.lowbit.kernels.load import TILE
from ptxlab.runtime import run_spec
from ptxlab.spec import KernelSpec
from ptxlab.spec.pictures import Pictures

MMA_ROWS, MMA_K = 16, 32  # of one warp's operand A
_DIGITS = 3  # 64 * 64 = 16 ** 3 positions
RIGHT = "load_ldmatrix_s8"  # deals what the MMA needs
_RIGHT_QSERVE = "load_qserve_reorder"  # likewise, for a pair of MMAs below each other


@dataclass(frozen=True)
class RegisterMap:
    """Places in which the elements of a tile [64, 64] end up.

    Attributes:
        name: of the kernel.
        thread: [64, 64], the thread that gets each element.
        register: [64, 64], which of its eight registers.
        byte: [64, 64], which byte of the register.
        wrong: [64, 64], true where the MMA wants another element there.
    """

    name: str
    thread: np.ndarray
    register: np.ndarray
    byte: np.ndarray
    wrong: np.ndarray


@cache
def arrivals(name: str) -> np.ndarray:
    """Find the position (64 row + column) that a load kernel puts in each [thread, byte of its registers] [128, 32]."""
    spec, sources = registry.find(name)
    if spec.family != "load" or "T" not in spec.example_sizes[0]:
        raise ArgumentError("kernel", "a load_* kernel that writes the fragments of a tile", name)
    position = np.arange(TILE * TILE).reshape(TILE, TILE)
    digits = np.stack([position >> 4 * d & 15 for d in range(_DIGITS)])
    logical_name = "q8" if spec.inputs[0].dtype == "int8" else "q4"
    is_signed = spec.outputs[0].dtype == "int8"
    tiles = digits.astype(np.uint8) if not is_signed else (digits - 8).astype(np.int8)
    registers = run_spec(spec, sources[0], spec.pack({logical_name: tiles}), backend="emulator").outputs["fragments"]
    nibbles = registers.astype(np.int64)
    if is_signed:
        nibbles = (nibbles // 16 if logical_name == "q4" else nibbles) + 8  # COMET's come times 16
    return np.asarray(sum(nibbles[d] << 4 * d for d in range(_DIGITS)))


@cache
def map_registers(name: str) -> RegisterMap:
    """Find the place in which every element ends up, and whether the MMA wants it there."""
    arriving_positions = arrivals(name)
    needed_positions = arrivals(_RIGHT_QSERVE if name == _RIGHT_QSERVE else RIGHT)
    places = np.argsort(arriving_positions, axis=None)  # every element arrives exactly once
    thread, byte_of_thread = np.divmod(places.reshape(TILE, TILE), 32)
    register, byte = np.divmod(byte_of_thread, 4)
    is_wrong = (arriving_positions != needed_positions).reshape(-1)[places].reshape(TILE, TILE)
    return RegisterMap(name, thread, register, byte, is_wrong)


@dataclass(frozen=True)
class WarpAccess:
    """Accesses of one warp to shared memory by one load.

    Attributes:
        text: the instruction.
        requests: instructions of the warp: one.
        wavefronts: passes over the banks.
        min_wavefronts: passes that would do without conflicts.
        fronts: for each pass, which lanes each bank serves; a row of ldmatrix is its lane's.
    """

    text: str
    requests: int
    wavefronts: int
    min_wavefronts: int
    fronts: tuple[dict[int, tuple[int, ...]], ...]


@cache
def shared_accesses(name: str) -> tuple[WarpAccess, ...]:
    """List the loads from shared memory of warp 0 of a `load_*` kernel, in order, as the emulator counts them."""
    spec, sources = registry.find(name)
    logical = spec.example(np.random.default_rng(0), T=1)
    outcome = run_spec(spec, sources[0], spec.pack(logical), backend="emulator", count_banks=True)
    return tuple(_first_warp_access(a) for a in outcome.shared if not a.text.startswith("st."))


def _first_warp_access(access: SharedAccess) -> WarpAccess:
    addresses = np.array(access.addresses)
    is_active = addresses >= 0
    fronts = banks.wavefronts(np.where(is_active, addresses, 0), access.width, active=is_active, store=access.store)
    min_wavefronts = (access.wavefronts - access.conflicts) // access.requests
    return WarpAccess(access.text, 1, len(fronts), min_wavefronts, tuple(fronts))


def as_text(name: str) -> str:
    """Format the first MMA of warp 0: lane and register of each run of four channels, `!` where wrong."""
    register_map = map_registers(name)
    lines = [f"{name}: lane and register whose bytes 0-3 get channels 4 i .. 4 i + 3 of the first operand A"]
    lines.append("row  " + "".join(f"{column:>7}" for column in range(0, MMA_K, 4)))
    for row in range(MMA_ROWS):
        cells = []
        for column in range(0, MMA_K, 4):
            # Four neighbours stay together in every kernel: a register's four bytes.
            columns = slice(column, column + 4)
            mark = "!" if register_map.wrong[row, columns].any() else " "
            cells.append(f"{register_map.thread[row, column]:>3}.a{register_map.register[row, column]}{mark}")
        lines.append(f"{row:>3}  " + "".join(f"{cell:>7}" for cell in cells))
    if register_map.wrong.any():
        lines.append(f"! {register_map.wrong.mean():.0%} of the tile is in another lane or register than its MMA wants")
    return "\n".join(lines)


def _figure(spec: KernelSpec) -> Any:
    from ptxlab.lowbit.kernels.plot import load_picture  # Matplotlib takes half a second

    return load_picture(spec.name)


PICTURES = Pictures(
    draws=lambda spec: "fragments" in {arg.name for arg in spec.outputs},
    kernels="load_* kernel",
    as_text=lambda spec: as_text(spec.name),
    figure=_figure,
)
