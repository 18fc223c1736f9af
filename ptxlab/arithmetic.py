"""Integer arithmetic that Python lacks."""

from typing import Any, overload


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Any, b: Any) -> Any: ...
def ceil_div(a: Any, b: Any) -> Any:
    """Divide integers, or arrays of them, and round up."""
    return -(-a // b)
