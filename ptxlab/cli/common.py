"""What all commands share: the console, JSON, progress bars, tables, and errors turned into exit codes."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ptxlab.errors import PtxlabError

FAILED, BAD_INPUT = 1, 2

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
Shared = Annotated[int | None, typer.Option(rich_help_panel=_FILES, help="Dynamic shared memory in bytes.")]
FileArch = Annotated[
    str | None, typer.Option("--arch", rich_help_panel=_FILES, help="Architecture of a .cu; sm_90a for wgmma.")
]
FileDefine = Annotated[
    list[str] | None,
    typer.Option("-D", metavar="NAME[=N]", rich_help_panel=_FILES, help="Constant of a .cu: -D TILE=64."),
]


def print_json(value: Any) -> None:
    """Print JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def progress_bar(title: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A progress bar on the terminal; the callable advances it by one and names what is being done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=quiet or not notes.is_terminal) as progress:
        task = progress.add_task(title, total=total)

        def advance(label: str) -> None:
            progress.update(task, advance=1, description=escape(label))

        yield advance


@contextmanager
def download_bar(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that appears with the first bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=notes, transient=True, disable=quiet or not notes.is_terminal) as bar:
        task = bar.add_task(f"download {name}", visible=False)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield progress


_NAME_WIDTH = 32  # characters of the first column that are never broken: a kernel's name fits


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table; columns whose name ends in `>` are right-aligned.

    Names in the first column and words in the headers are not broken, however narrow the terminal is.
    """
    made = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        header = column.rstrip(">")
        widest = max((len(row[index]) for row in cells), default=0)
        least = max(map(len, header.split()), default=1)
        if index == 0:
            least = min(max(least, widest), _NAME_WIDTH)
        made.add_column(
            header,
            justify="right" if column.endswith(">") else "left",
            overflow="fold",
            min_width=least,
            no_wrap=max(widest, len(header)) <= least,  # or Rich shrinks it first, and cuts off the last column
        )
    for row in cells:
        made.add_row(*row)
    return made


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """`M=16 N=12288 K=4096`."""
    return " ".join(
        f"{name}={size:.4g}" if isinstance(size, float) else f"{name}={size}" for name, size in sizes.items()
    )


def written(*paths: Path | None) -> None:
    """Say which files a command wrote."""
    for path in filter(None, paths):
        console.print(f"written: {escape(str(path))}", soft_wrap=True, highlight=False)


def dims(name: str, text: str) -> tuple[int, ...]:
    """A grid or a block: one to three integers between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise expects(f"--{name}", "one to three integers, x[,y[,z]]", text) from None


class CommandLineError(PtxlabError):
    """Options that do not fit together, or a value that an option does not take."""


def expects(option: str, what: str, got: object) -> CommandLineError:
    """The error `--from expects a .ncu-rep or .json file, got k.npz`."""
    return CommandLineError(f"{option} expects {what}, got {got}")


def refuse(options: Mapping[str, Any], reason: str) -> None:
    """CommandLineError for the first of the options that was given: `--set needs a launch`."""
    for name, value in options.items():
        if value is not None:
            raise CommandLineError(f"{name} {reason}")


def require_counts(**options: int) -> None:
    """Raise for an option (`sample_length` is --sample-length) that is not 1 or more."""
    for name, number in options.items():
        if number < 1:
            raise expects(f"--{name.replace('_', '-')}", "an integer, 1 or more", number)


def require_file(option: str, path: Path | None, *suffixes: str) -> None:
    """Raise at once for a file that could not be written in the end."""
    if path is not None:
        if path.suffix not in suffixes:
            raise expects(option, f"a {' or '.join(suffixes)} file", path)
        from ptxlab.io.files import require_folder  # NumPy, which `--help` need not wait for

        require_folder(path)
