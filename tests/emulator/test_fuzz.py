"""Files with random mistakes: a result or an error in one line, soon, and without much memory."""

from tests import fuzz


def test_broken_files_are_refused_in_one_line() -> None:
    """Some of what `python -m tests.fuzz` tries, of the smaller files."""
    before = fuzz.peak()
    assert [*fuzz.failures(400, seed=7, small=True)] == []
    assert fuzz.peak() - before < 1 << 29
