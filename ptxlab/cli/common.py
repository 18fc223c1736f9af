"""What all commands share: the console, JSON, progress bars, tables, and errors turned into exit codes."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table

from ptxlab.errors import (
    EmulationError,
    OutOfTime,
    PtxlabError,
    UnknownInstruction,
    VerificationError,
    nearest_of,
)

FAILED, BAD_INPUT, UNDECIDED, INTERRUPTED = 1, 2, 3, 130
LINE_SECONDS = 60  # between two lines of a run without a terminal

UsageError: Any = typer.BadParameter.__bases__[0]  # of click, which Typer carries within itself

PICTURES = (".png", ".svg", ".pdf")
WIDTH = 100  # of what is not printed on a terminal, in characters; every table fits it
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH)
notes = Console(stderr=True)

# One spelling per option over all commands.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Backend = Annotated[str | None, typer.Option(help="gpu or emulator. Default: the GPU if there is one.")]
Arch = Annotated[str, typer.Option(help="Architecture to compile for, such as sm_90a.")]
Shape = Annotated[
    str | None, typer.Option(help="Sizes of the problem, such as M=64,N=4096,K=4096,g=128. Default: a typical problem.")
]
AlsoShape = Annotated[
    str | None, typer.Option("--shape", help="Also verify at these sizes, such as M=136,N=1040,K=2048,g=128.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw a picture: FILE.png, .svg or .pdf.")]
Define = Annotated[
    list[str] | None, typer.Option("-D", metavar="NAME[=N]", help="Constant of a .cu: -D TILE=64; -D X is -D X=1.")
]

# How a file without a spec is launched and compiled.
_FILES = "Files without a spec"
Inputs = Annotated[
    Path | None, typer.Option("--in", rich_help_panel=_FILES, help=".npz with the kernel's arguments by name.")
]
Grid = Annotated[str | None, typer.Option(rich_help_panel=_FILES, help="Blocks, x[,y[,z]]. Default: 1.")]
Block = Annotated[str | None, typer.Option(rich_help_panel=_FILES, help="Threads per block, x[,y[,z]]. Default: 32.")]
Uninitialised = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", rich_help_panel=_FILES, help="An array of --in that counts as unwritten (check init)."
    ),
]
Shared = Annotated[int | None, typer.Option(rich_help_panel=_FILES, help="Dynamic shared memory in bytes.")]
FileArch = Annotated[
    str | None, typer.Option("--arch", rich_help_panel=_FILES, help="Architecture of a .cu; sm_90a for wgmma.")
]
FileDefine = Annotated[
    list[str] | None,
    typer.Option("-D", metavar="NAME[=N]", rich_help_panel=_FILES, help="Constant of a .cu: -D TILE=64."),
]
Include = Annotated[
    list[Path] | None,
    typer.Option("-I", metavar="FOLDER", rich_help_panel=_FILES, help="Folder for #include of a .cu. May be repeated."),
]
Std = Annotated[
    str | None, typer.Option("--std", rich_help_panel=_FILES, help="Language of a .cu, such as c++20. Default: c++17.")
]


def exit_code(error: PtxlabError) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, EmulationError | VerificationError) and not isinstance(error, UnknownInstruction):
        return FAILED  # of an unknown instruction nothing ran, so nothing failed
    return UNDECIDED if isinstance(error, OutOfTime) else BAD_INPUT


def print_json(document: Any) -> None:
    """Print JSON on standard output."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_note(line: str) -> None:
    """Print a line on standard error, where it is no part of the results."""
    notes.print(escape(line), highlight=False, soft_wrap=True)


_UNITS = ((3600, "h"), (60, "min"), (1, "s"))


class Progress:
    """Progress of a long run: a bar, or without a terminal a line a minute if it `says` so.

    Attributes:
        title: of the run.
        total: how many steps there are, or None.
        done: how many of these were done.
        label: what is being done.
    """

    def __init__(self, title: str, total: int | None, display: RichProgress | None, *, says: bool) -> None:
        self.title, self.total, self.done, self.label = title, total, 0, ""
        self._display, self._says, self._begin = display, says, monotonic()
        self._said = self._begin
        if display is not None:
            self._task = display.add_task(escape(title), total=total)

    def __call__(self, label: str, total: int | None = None) -> None:
        """Advance by one step, and name what is being done; `total` is for runs that learn their number of steps."""
        self.done += 1
        self.total = self.total if total is None else total
        self.say(label)
        if self._says and monotonic() - self._said >= LINE_SECONDS:
            self._print_line()

    def say(self, label: str) -> None:
        """Name what is being done, within a step."""
        self.label = label
        if self._display is not None:
            self._display.update(self._task, completed=self.done, total=self.total, description=escape(label))

    def report_while_running(self, ended: Event) -> None:
        """Print a line a minute during steps that take longer, until the run has ended."""
        while self._says and not ended.wait(LINE_SECONDS):
            if monotonic() - self._said >= LINE_SECONDS:
                self._print_line(f": {self.label}" if self.label else "")

    def _print_line(self, doing: str = "") -> None:
        self._said = monotonic()
        line = f"{self.title}: {self.steps()}{self._time_left()}{doing}"
        notes.print(escape(line), highlight=False, soft_wrap=True)

    def steps(self) -> str:
        """Format progress as `12 of 30`."""
        return f"{self.done} done" if self.total is None else f"{self.done} of {self.total}"

    def _time_left(self) -> str:
        if self.total is None or not self.done:
            return ""
        seconds = (monotonic() - self._begin) / self.done * (self.total - self.done)
        size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 1.5 * size), _UNITS[-1])
        return f", about {seconds / size:.0f} {unit} to go"


@contextmanager
def progress_bar(
    title: str, total: int | None, *, quiet: bool = False, keeps: str = "nothing is kept"
) -> Iterator[Progress]:
    """Show a bar with the time to go on a terminal during a long run, otherwise a line a minute.

    Calls of the `Progress` advance it. Ctrl-C ends it with exit code 130 and one line, of which `keeps` is the end:
    what is left, and how to go on.
    """
    steps = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("to go"))
    display = RichProgress(*steps, *times, console=notes, transient=True, redirect_stdout=False)
    with display if notes.is_terminal and not quiet else nullcontext() as shown:
        progress = Progress(title, total, shown, says=not quiet and not notes.is_terminal)
        end_event = Event()
        Thread(target=progress.report_while_running, args=(end_event,), daemon=True).start()
        try:
            with interruptible(lambda: f"{title}: {progress.steps()}; {keeps}"):
                yield progress
        finally:
            end_event.set()


@contextmanager
def interruptible(state: Callable[[], str]) -> Iterator[None]:
    """End the command on Ctrl-C inside, with exit code 130 and one line: where it was, and what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        begin = "\n" if notes.is_terminal else ""  # behind what the terminal shows of Ctrl-C
        notes.print(f"{begin}interrupted: {escape(state())}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def download_bar(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar that appears with the first bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, console=notes, transient=True, disable=quiet or not notes.is_terminal) as display:
        task = display.add_task(f"download {name}", visible=False)

        def progress(done: int, total: int) -> None:
            display.update(task, completed=done, total=total, visible=True)

        yield progress


_NAME_WIDTH = 33  # characters of the first column that are never broken: a kernel's name fits


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """Build a table; columns whose name ends in `>` are right-aligned.

    Names in the first column and words in the headers are not broken, however narrow the terminal is.
    """
    rich_table = Table(
        title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False
    )
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        header = column.removesuffix(">")
        widest = max((len(row[index]) for row in cells), default=0)
        min_width = max(map(len, header.split()), default=1)
        if index == 0:
            min_width = min(max(min_width, widest), _NAME_WIDTH)
        rich_table.add_column(
            header,
            justify="right" if column.endswith(">") else "left",
            overflow="fold",
            min_width=min_width,
            no_wrap=max(widest, len(header)) <= min_width,  # or Rich shrinks it first, and cuts off the last column
        )
    for row in cells:
        rich_table.add_row(*row)
    return rich_table


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """Format sizes as `M=16 N=12288 K=4096`."""
    return " ".join(
        f"{name}={size:.4g}" if isinstance(size, float) else f"{name}={size}" for name, size in sizes.items()
    )


def print_written(*paths: Path | None) -> None:
    """Print which files a command wrote."""
    for path in filter(None, paths):
        console.print(f"written: {escape(str(path))}", soft_wrap=True, highlight=False)


def parse_dimensions(name: str, text: str) -> tuple[int, ...]:
    """Parse a grid or a block: one to three integers between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise expects(f"--{name}", "one to three integers, x[,y[,z]]", text) from None


class CommandLineError(PtxlabError):
    """Options that do not fit together, or a value that an option does not take."""


def expects(option: str, expectation: str, got: object) -> CommandLineError:
    """Return the error `--from expects a .ncu-rep or .json file, got k.npz`."""
    return CommandLineError(f"{option} expects {expectation}, got {got}{nearest_of(expectation, got)}")


def refuse(options: Mapping[str, Any], reason: str) -> None:
    """Raise CommandLineError for the first of the options that was given: `--set needs a launch`."""
    for name, setting in options.items():
        if setting is not None:
            raise CommandLineError(f"{name} {reason}")


def require_counts(**options: int) -> None:
    """Raise for an option (`sample_length` is --sample-length) that is not 1 or more."""
    for name, number in options.items():
        if number < 1:
            raise expects(f"--{name.replace('_', '-')}", "an integer, 1 or more", number)


def require_file(option: str, path: Path | None, *suffixes: str) -> None:
    """Raise, before a long task, for an output file that could not be written."""
    if path is not None:
        if path.suffix not in suffixes:
            raise expects(option, f"a {' or '.join(suffixes)} file", path)
        from ptxlab.io.files import require_folder  # NumPy, which `--help` need not wait for

        require_folder(path)
