"""The identities under the sliders give what the references of the kernels give, and know where they are wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import reference
from ptxlab.lowbit.jupyter import identities

NIBBLES = st.tuples(*[st.integers(0, 15)] * 4)


@pytest.mark.full
@given(q4=NIBBLES, s1=st.integers(1, 20), minimum=st.integers(-128, 127))
def test_they_are_what_the_kernels_compute(q4: tuple[int, ...], s1: int, minimum: int) -> None:
    shown = identities(q4, s1, minimum)
    q, scale = np.array([q4], np.uint8), np.array([[s1]], np.uint8)
    low, offset = np.array([[minimum]], np.int8), np.array([[minimum + 128]], np.uint8)
    _, qoq, lqq, unsigned = shown.traces
    assert list(qoq.lanes(-1)) == reference.dequant_qoq_vadd4(q, scale, low)[0].tolist()
    assert list(lqq.lanes(-1)) == reference.dequant_lqq(q, scale, offset)[0].tolist()
    assert list(unsigned.lanes(-1)) == reference.dequant_lqq_unsigned(q, scale, offset)[0].tolist()
    assert shown.exact == tuple(q * s1 + minimum for q in q4)


@pytest.mark.full
@given(q4=NIBBLES, s1=st.integers(1, 16), minimum=st.integers(-119, 119))
def test_wherever_the_result_is_a_byte_only_the_packed_add_is_wrong(q4: tuple[int, ...], s1: int, minimum: int) -> None:
    shown = identities(q4, s1, minimum)
    if not all(-128 <= byte <= 127 for byte in shown.exact):
        return
    packed_add, *right_traces = shown.traces
    assert [shown.wrong(trace) for trace in right_traces] == [set()] * 3
    assert not any(finding for trace in right_traces for step in trace.findings for finding in step)
    assert bool(shown.wrong(packed_add)) <= bool(packed_add.findings[1])  # whatever is wrong is found


def test_the_example_of_the_paper() -> None:
    """LiquidGEMM §4: 225 + (-104) carries out of its byte, though 121 fits."""
    shown = identities((15, 3, 0, 9), 15, -104)
    packed_add, *right_traces = shown.traces
    assert shown.exact[0] == 121 and packed_add.lanes(-1)[0] == 121
    assert shown.wrong(packed_add) == {1} and {f.lane for f in packed_add.findings[1]} == {1}
    assert [shown.wrong(trace) for trace in right_traces] == [set()] * 3
    assert "wrong in lanes [1]" in repr(shown) and "1110 0001" in shown._repr_html_()


def test_beyond_the_protective_range_vadd4_overflows() -> None:
    """QServe §4.1: 120 needs 8 · 16 = 128."""
    shown = identities((15, 7, 0, 9), 16, -112)
    qoq = shown.traces[1]
    assert shown.exact[0] == 128 and qoq.lanes(-1)[0] == -128 and shown.wrong(qoq) == {0}
    assert "does not fit s8x4" in qoq.findings[1][0].message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (((16, 0, 0, 0), 1, 0), "q4: four values 0..15"),
        (((1, 2, 3), 1, 0), "q4: four values 0..15"),
        ((300, 1, 0), "q4: four values 0..15"),
        (((0,) * 4, 0, 0), "s1: 1..255 (got 0)"),
        (((0,) * 4, 1, -129), "minimum: -128..127 (got -129)"),
    ],
)
def test_bad_input(arguments: tuple, named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        identities(*arguments)
    assert named in str(raised.value)
