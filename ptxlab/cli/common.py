"""What all commands share: the console, JSON, progress bars, tables, and errors turned into exit codes."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ptxlab.errors import ArgumentError

FAILED, BAD_INPUT = 1, 2

console = Console()
notes = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Backend = Annotated[str | None, typer.Option(help="gpu or emulator; by default the GPU where there is one.")]
Arch = Annotated[str, typer.Option(help="Architecture to compile for, such as sm_90a.")]

# Of a file without a spec: how it is launched and compiled.
Grid = Annotated[str | None, typer.Option(help="Blocks, x[,y[,z]]; for files only. Default 1.")]
Block = Annotated[str | None, typer.Option(help="Threads, x[,y[,z]]; for files only. Default 32.")]
Shared = Annotated[int | None, typer.Option(help="Dynamic shared memory in bytes; for files only.")]
FileArch = Annotated[str | None, typer.Option(help="What to compile a .cu for: sm_90a for wgmma; files only.")]
Define = Annotated[
    list[str] | None, typer.Option("-D", metavar="NAME[=N]", help="A constant of a .cu, -D TILE=64; -D X is 1.")
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


_NAME_WIDTH = 20  # of the first column: as much of a name as is never broken


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table; columns whose name ends in `>` are right-aligned. Short names in the first column and words in the
    headers are not broken, however narrow the terminal is."""
    made = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        header = column.rstrip(">")
        longest = max([len(row[0]) for row in cells] if index == 0 else map(len, header.split()), default=1)
        justify: Literal["left", "right"] = "right" if column.endswith(">") else "left"
        made.add_column(header, justify=justify, overflow="fold", min_width=min(longest, _NAME_WIDTH))
    for row in cells:
        made.add_row(*row)
    return made


def dims(name: str, text: str) -> tuple[int, ...]:
    """A grid or a block: one to three integers between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(f"--{name}", "one to three integers, x[,y[,z]]", text) from None
