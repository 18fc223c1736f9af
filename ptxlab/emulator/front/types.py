"""PTX types, and NumPy's word for each."""

import numpy as np

Array = np.ndarray
# A set of lanes: a slice when they are contiguous (views, no copies), else a sorted index array.
Lanes = slice | np.ndarray

# bf16 and the packed float pairs have no NumPy type: they travel as raw bits.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        **{f"{kind}{bits}": f"{letter}{bits // 8}" for kind, letter in (("u", "u"), ("s", "i"), ("b", "u"))
           for bits in (8, 16, 32, 64)},
        "f16": "f2", "f32": "f4", "f64": "f8",
        "bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "u16x2": "u4", "s16x2": "u4",
        "pred": "?",
    }.items()
}  # fmt: skip

FILES = {1: np.dtype("?"), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}


def bits_of(type_name: str) -> int:
    """Width of a PTX type in bits; 1 for a predicate."""
    return 1 if type_name == "pred" else DTYPES[type_name].itemsize * 8


def is_signed(type_name: str) -> bool:
    """Whether the type extends by its sign when it is widened."""
    return type_name[0] == "s"


def is_float(type_name: str) -> bool:
    """Whether the type is one of PTX's floating-point types."""
    return type_name[0] == "f" or type_name.startswith("bf")


def limits(type_name: str) -> tuple[int, int]:
    """Smallest and largest value of an integer type."""
    bits = bits_of(type_name)
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed(type_name) else (0, (1 << bits) - 1)


def count_of(lanes: Lanes) -> int:
    """Number of lanes in a set."""
    return lanes.stop - lanes.start if isinstance(lanes, slice) else len(lanes)


def indices_of(lanes: Lanes) -> Array:
    """The lanes as a sorted index array."""
    return np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes


def as_lanes(indices: Array) -> Lanes:
    """The set of the given sorted, distinct indices; a slice if they are contiguous."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def merge(a: Lanes, b: Lanes) -> Lanes:
    """Union of two disjoint sets."""
    both = np.concatenate((indices_of(a), indices_of(b)))
    both.sort(kind="stable")
    return as_lanes(both)


def split(lanes: Lanes, mask: Array) -> tuple[Lanes | None, Lanes | None]:
    """The lanes where `mask` (one bool per lane of the set) holds, and the others; None stands for nobody."""
    chosen = int(np.count_nonzero(mask))
    if chosen == count_of(lanes):
        return lanes, None
    if chosen == 0:
        return None, lanes
    indices = indices_of(lanes)
    return as_lanes(indices[mask]), as_lanes(indices[~mask])
