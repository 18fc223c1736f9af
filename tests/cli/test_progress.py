"""How far a long run is, without a terminal."""

import io
import time

import pytest

from ptxlab.cli import common
from ptxlab.cli.common import Progress, progress_bar


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr(common, "monotonic", ticking)
    return ticking


def test_a_line_a_minute_says_the_time_to_go(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("quantize lqq", 30) as advance:
        for layer in range(30):
            clock.now += 10
            advance(f"layer {layer}")
    assert capsys.readouterr().err.splitlines() == [
        "quantize lqq: 6 of 30, about 4 min to go",
        "quantize lqq: 12 of 30, about 3 min to go",
        "quantize lqq: 18 of 30, about 2 min to go",
        "quantize lqq: 24 of 30, about 60 s to go",
        "quantize lqq: 30 of 30, about 0 s to go",
    ]


@pytest.mark.parametrize(
    ("total", "later", "line"),
    [
        (None, None, "audit: 1 done"),
        (None, 4, "audit: 1 of 4, about 3 min to go"),
        (200, None, "audit: 1 of 200, about 3 h to go"),
    ],
)
def test_the_number_of_steps_may_come_later_or_never(
    clock: Clock, capsys: pytest.CaptureFixture[str], total: int | None, later: int | None, line: str
) -> None:
    with progress_bar("audit", total) as advance:
        clock.now += 60
        advance("a", later)
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(("seconds", "quiet"), [(59, False), (600, True)])
def test_a_short_run_and_a_quiet_one_say_nothing(
    clock: Clock, capsys: pytest.CaptureFixture[str], seconds: int, quiet: bool
) -> None:
    with progress_bar("bench", 2, quiet=quiet) as advance:
        clock.now += seconds
        advance("a")
    assert capsys.readouterr().err == ""


def test_a_step_of_minutes_is_said_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "LINE_SECONDS", 0.05)
    with progress_bar("bench attention", 3) as advance:
        advance("compiling")
        time.sleep(0.3)
        advance.say("ceilings")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("bench attention: 1 of 3, about ") for line in lines)
    assert lines[0].endswith(": compiling") and lines[-1].endswith(": ceilings")


def test_a_bar_shows_the_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show it on a terminal, where no line is said."""
    terminal = common.Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    monkeypatch.setattr(common, "notes", terminal)
    monkeypatch.setattr(common, "LINE_SECONDS", 0)
    with progress_bar("perplexity", 4) as advance:
        advance("window 1")
        assert isinstance(advance, Progress) and advance.steps() == "1 of 4"
    assert "to go" in terminal.export_text() and "about" not in terminal.export_text()
