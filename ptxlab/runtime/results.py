"""Results of a launch: a summary of each output, and its comparison with the expected output."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.spec.dtypes import floats

_SHOWN_VALUES = 4  # values of an array that a summary shows
_SHOWN_PLACES = 3  # places that a comparison shows
RTOL = {2: 1e-3, 4: 1e-5, 8: 1e-12}  # of floats by their bytes: some units in the last place
_BFLOAT16_RTOL = 8e-3  # one unit in the last place
EXPECTED = "expected."  # before the name of an output in a file of arguments


@dataclass(frozen=True)
class Summary:
    """Summary of an output: first values, minimum and maximum without NaN, and the number of NaN."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: tuple[float | int, ...]
    minimum: float | int | None
    maximum: float | int | None
    nan: int

    @classmethod
    def of(cls, name: str, array: Any, *, is_bfloat16: bool = False) -> "Summary":
        """Summarise an array of numbers, or of bits of bfloat16; of other bytes dtype and shape alone."""
        array = np.asarray(array)
        dtype = "bfloat16" if is_bfloat16 else str(array.dtype)
        if is_bfloat16:
            array = floats(array)
        flat_array = array.reshape(-1)
        if array.dtype.kind not in "biuf" or not flat_array.size:
            return cls(name, dtype, array.shape, (), None, None, 0)
        nan = int(np.isnan(flat_array).sum()) if array.dtype.kind == "f" else 0
        numbers = flat_array[~np.isnan(flat_array)] if nan else flat_array
        low, high = (numbers.min().item(), numbers.max().item()) if numbers.size else (None, None)
        return cls(name, dtype, array.shape, tuple(v.item() for v in flat_array[:_SHOWN_VALUES]), low, high, nan)

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON-ready values: NaN and infinity as text."""
        values = asdict(self) | {"shape": list(self.shape), "first": [_json(v) for v in self.first]}
        return values | {"minimum": _json(self.minimum), "maximum": _json(self.maximum)}

    def cells(self) -> tuple[str, ...]:
        """Name, type, first values, minimum, maximum and NaN in words."""
        ellipsis = " ..." if int(np.prod(self.shape)) > len(self.first) else ""
        shown_numbers = " ".join(map(format_number, self.first)) + ellipsis
        return (
            self.name,
            f"{self.dtype}{list(self.shape)}",
            shown_numbers,
            format_number(self.minimum),
            format_number(self.maximum),
            str(self.nan),
        )


def format_number(x: float | int | None) -> str:
    """Format a number with up to six digits."""
    return "-" if x is None else f"{x:.6g}" if isinstance(x, float) else str(x)


def _json(x: Any) -> Any:
    return str(x) if isinstance(x, float) and not np.isfinite(x) else x


@dataclass(frozen=True)
class Comparison:
    """Comparison of an output with the expected values.

    Attributes:
        name: of the output.
        wrong: how many elements are further off than they may be, of `total`.
        rtol, atol: an element may be off by `atol + rtol * |expected|`; both 0: equal. NaN equals NaN.
        worst: the elements that are furthest off: (index, got, expected).
    """

    name: str
    wrong: int
    total: int
    rtol: float
    atol: float
    worst: tuple[tuple[tuple[int, ...], Any, Any], ...]

    def __str__(self) -> str:
        tolerance_text = (
            "equal" if not self.rtol and not self.atol else f"within {self.atol:g} + {self.rtol:g} x |expected|"
        )
        if not self.wrong:
            return f"{self.name}: as expected, {self.total:,} elements {tolerance_text}"
        places = "; ".join(f"{self.name}{list(index)} is {got}, not {want}" for index, got, want in self.worst)
        return f"{self.name}: {self.wrong:,} of {self.total:,} elements are not {tolerance_text}; worst: {places}"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready values."""
        worst = [{"index": list(index), "got": _json(got), "expected": _json(want)} for index, got, want in self.worst]
        return asdict(self) | {"worst": worst}


def compare(
    name: str,
    got: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    is_bfloat16: bool = False,
) -> Comparison:
    """Compare an output with the expected one: integers for equality, floats within a tolerance.

    Args:
        rtol, atol: by default 8e-3 for bfloat16, 1e-3 for float16, 1e-5 for float32, 1e-12 for float64, and the same
            times the largest magnitude that is expected for `atol`.
        is_bfloat16: whether elements of uint16, in either array, are bits of bfloat16.

    Raises:
        ArgumentError: another shape, or numbers of another kind.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise ArgumentError(f"expected {name}", f"shape {list(got.shape)}", list(expected.shape))
    if is_bfloat16:
        got, expected = floats(got), floats(expected)
    is_float = "f" in (got.dtype.kind, expected.dtype.kind)
    if not is_float and "V" in (got.dtype.kind, expected.dtype.kind):
        raise ArgumentError(f"expected {name}", f"numbers such as {got.dtype}", expected.dtype)
    a, b = (array.astype(np.float64) for array in (got, expected)) if is_float else (got, expected)
    if is_bfloat16:
        default_rtol = _BFLOAT16_RTOL
    else:
        default_rtol = RTOL.get(min(got.dtype.itemsize, expected.dtype.itemsize), 1e-12) if is_float else 0.0
    finite_magnitudes = np.abs(b[np.isfinite(b)]) if is_float else np.zeros(0)
    rtol = default_rtol if rtol is None else rtol
    atol = (default_rtol * float(finite_magnitudes.max(initial=0.0))) if atol is None else atol
    if is_float or rtol or atol:
        x, y = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
            error = np.where(np.isnan(error), np.inf, error)
            is_wrong = ~(error <= atol + rtol * np.where(np.isfinite(y), np.abs(y), 0.0))
    else:
        is_wrong = a != b
        error = np.abs(a.astype(np.float64) - b.astype(np.float64))
    order = np.argsort(np.where(is_wrong, error, -1.0).reshape(-1), kind="stable")[::-1][
        : min(_SHOWN_PLACES, int(is_wrong.sum()))
    ]
    places = [tuple(int(i) for i in np.unravel_index(index, got.shape)) for index in order]
    worst_elements = tuple((index, got[index].item(), expected[index].item()) for index in places)
    return Comparison(name, int(is_wrong.sum()), is_wrong.size, rtol, atol, worst_elements)


def split_expected(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a file's arrays into arguments and expected outputs, which are called `expected.NAME`."""
    expected = {name.removeprefix(EXPECTED): a for name, a in arrays.items() if name.startswith(EXPECTED)}
    return {name: a for name, a in arrays.items() if not name.startswith(EXPECTED)}, expected


def compare_all(
    outputs: Mapping[str, Any],
    expected: Mapping[str, Any],
    rtol: float | None = None,
    atol: float | None = None,
    *,
    bfloat16_names: Collection[str] = (),
) -> list[Comparison]:
    """Compare outputs by name, those of `bfloat16_names` as numbers.

    Raises:
        ArgumentError: an expected array that is no output.
    """
    for name in expected:
        if name not in outputs:
            raise ArgumentError("expected", f"outputs of the kernel: {', '.join(outputs) or 'none'}", name)
    return [
        compare(name, outputs[name], expected[name], rtol, atol, is_bfloat16=name in bfloat16_names)
        for name in expected
    ]
