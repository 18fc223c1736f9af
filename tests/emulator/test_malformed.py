"""Files with random mistakes: a result or an error in one line, soon, and without much memory."""

from tests import malformed


def test_broken_files_are_refused_in_one_line() -> None:
    """A few hundred of the smaller files of `python -m tests.malformed` are tried."""
    peak_before = malformed.peak()
    assert [*malformed.failures(400, seed=7, small=True)] == []
    assert malformed.peak() - peak_before < 1 << 29
