"""Arrays that are not NumPy's: what CuPy would refuse fails with them, without a GPU."""

from typing import Any

import numpy as np


class DispatchingArray:
    """A stand-in for a CuPy array: NumPy's functions dispatch on it, but it never becomes or meets a NumPy array.

    Its arithmetic takes float32 results that are subnormal for zero, as CuPy's does.
    """

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array")

    def get(self) -> Any:
        """Copy the array to the host, as CuPy's `get` does."""
        return self.array.copy()

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        if function is np.asarray:  # with `like`: a copy to the device
            return DispatchingArray(*args)
        if "device" in kwargs:  # NumPy's eye, ones and full pass it on with `like`
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument 'device'")
        return to_device(function(*to_host(args), **to_host(kwargs)))

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return to_device(flush_subnormals(getattr(ufunc, method)(*to_host(args), **to_host(kwargs))))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.array, name)
        if not callable(attribute):
            return to_device(attribute) if isinstance(attribute, np.ndarray) else attribute
        finish = flush_subnormals if name in ("astype", "sum") else lambda array: array
        return lambda *args, **kwargs: to_device(finish(attribute(*to_host(args), **to_host(kwargs))))

    def __getitem__(self, index: Any) -> Any:
        return to_device(self.array[to_host(index)])

    def __setitem__(self, index: Any, elements: Any) -> None:
        self.array[to_host(index)] = to_host(elements)

    def __len__(self) -> int:
        return len(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __int__(self) -> int:
        return int(self.array)

    def __float__(self) -> float:
        return float(self.array)


def flush_subnormals(array: Any) -> Any:
    """Replace subnormal float32 numbers by zeros."""
    if getattr(array, "dtype", None) != np.float32:
        return array
    return np.where(np.abs(array) < np.finfo(np.float32).tiny, np.float32(0), array)


def _operator(name: str) -> Any:
    return lambda self, *operands: to_device(flush_subnormals(getattr(self.array, name)(*to_host(operands))))


_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift lt le gt ge eq ne neg invert"
_OPERATORS += " radd rsub rmul rtruediv"
for _name in _OPERATORS.split(" "):
    setattr(DispatchingArray, f"__{_name}__", _operator(f"__{_name}__"))


def to_host(argument: Any) -> Any:
    if isinstance(argument, DispatchingArray):
        return argument.array
    if isinstance(argument, np.ndarray) and argument.ndim:
        raise TypeError("a NumPy array among device arrays")
    if isinstance(argument, tuple | list):
        return type(argument)(to_host(element) for element in argument)
    return {key: to_host(element) for key, element in argument.items()} if isinstance(argument, dict) else argument


def to_device(returned: Any) -> Any:
    if isinstance(returned, np.ndarray | np.generic):
        return DispatchingArray(returned)
    return (
        type(returned)(to_device(element) for element in returned) if isinstance(returned, tuple | list) else returned
    )
