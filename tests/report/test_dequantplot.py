"""What the pictures of dequantisation claim; that they can be drawn, notebook 01 shows."""

import pytest

from report import dequantplot


@pytest.mark.parametrize(("scheme", "at_119", "at_120"), [("qoq", 121, 128), ("lqq", 126, 127)])
def test_largest_byte_of_all_groups(scheme: str, at_119: int, at_120: int) -> None:
    """The quantisers' modules state it: at 119 everything fits, QoQ first overflows at 120, LQQ at 121."""
    assert [dequantplot.largest_byte(scheme, limit) for limit in (119, 120)] == [at_119, at_120]
    assert dequantplot.largest_byte(scheme, 121) > 127
