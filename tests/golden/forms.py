"""Forms whose results are whole matrices: wgmma of floats, wmma, mma of f64 and bits, tensor copies, bulk reductions.

The kernels and operands are those of the emulator's own tests, which hold their results against NumPy. A form is a
function of the backend that returns what its kernel makes, exact in any order of additions.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tests.support import mma_words, tensor_copies, wgmma, wmma

RECORDED = Path(__file__).parent / "forms.npz"

Form = Callable[[str], np.ndarray]


def _wgmma(case: str, type_name: str, d: str, b_type: str, backend: str) -> np.ndarray:
    """Compute D of a wgmma; `d` is the accumulator's type, `type_name` and `b_type` those of A and B."""
    return wgmma.run_narrow(case, type_name, d, b_type, backend=backend)[0]


def _wmma(form: tuple[str, str, str], layouts: tuple[str, str, str], backend: str) -> np.ndarray:
    """Compute D of a wmma of a form (shape, type, accumulator) and layouts of A, B and D."""
    return wmma.run_wmma(*form, layouts, backend)[0]


def _words(function: Callable[..., tuple[np.ndarray, np.ndarray]], *form: str) -> Form:
    """Return a form that runs a function of support on a backend."""
    return lambda backend: function(*form, backend)[0]


def _move_box(axes: int, back: str, backend: str) -> np.ndarray:
    """Move a box that ends behind the array on its first axes."""
    place = (*(size - 1 for size in tensor_copies.SHAPES[axes][:-1]), tensor_copies.SHAPES[axes][-1] - 4)
    return tensor_copies.move_box(axes, place, back, backend)[1]


def _reduce_words(reduction: tuple, backend: str) -> np.ndarray:
    """Combine words in memory by a bulk reduction."""
    return tensor_copies.reduce(*reduction, backend)[0].view(np.uint8)


def _load_boxes(swizzle: int, backend: str) -> np.ndarray:
    """Bring two boxes of bytes, the second partly in front of the matrix."""
    width = swizzle or 48
    return tensor_copies.load_boxes(tensor_copies.ARRAY, (16, width), swizzle, 55, 0, 1024, 1, backend)[0]


def forms() -> dict[str, Form]:
    """List all forms by name."""
    by_name: dict[str, Form] = {}
    for t, d in [("f16", "f32"), ("f16", "f16"), ("bf16", "f32")]:
        for case in wgmma.CASES:
            by_name[f"wgmma {t} {d} {case}"] = partial(_wgmma, case, t, d, t)
    for t, d in wgmma.NARROW:
        for case in wgmma.CASES[:2]:
            by_name[f"wgmma {t} {d} {case}"] = partial(_wgmma, case, t, d, t)
    for t, b, d in (("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16")):
        by_name[f"wgmma {t} {b} {d}"] = partial(_wgmma, "shared", t, d, b)
    for form in wmma.FORMS:
        for layouts in wmma.LAYOUTS:
            by_name[f"wmma {' '.join(form)} {layouts[0]}"] = partial(_wmma, form, layouts)
    for shape in mma_words.F64:
        by_name[f"mma f64 {shape}"] = _words(mma_words.run_f64, shape)
    for shape, op in mma_words.BITS:
        by_name[f"mma b1 {shape} {op}"] = _words(mma_words.run_bits, shape, op)
    for axes in tensor_copies.SHAPES:
        by_name[f"tensor store {axes}d"] = partial(_move_box, axes, tensor_copies.STORE)
        by_name[f"tensor reduction {axes}d"] = partial(_move_box, axes, tensor_copies.REDUCE)
    for swizzle in (0, 32, 64, 128):
        by_name[f"tensor load swizzle {swizzle}"] = partial(_load_boxes, swizzle)
    for reduction in tensor_copies.REDUCTIONS:
        by_name[f"bulk reduction {reduction[0]}"] = partial(_reduce_words, reduction)
    return by_name
