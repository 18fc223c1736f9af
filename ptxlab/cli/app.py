"""All commands as one Typer app, of which only the module of the command that is asked for is imported.

Of the others, the first line of help and the panel are read from their source: the function's docstring, and `PANEL` at
the module's top level.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from ptxlab import __version__, registry
from ptxlab.cli.common import BAD_INPUT, INTERRUPTED, UsageError, exit_code, notes
from ptxlab.errors import EmulationError, PtxlabError
from ptxlab.registry import Registration

OTHER_PANEL = "Other commands"  # of modules without `PANEL`


class _PlainHelp:
    """Help as it is written: `out[i]` is no markup, and a flag takes no value."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        for parameter in (self, *self.params):  # type: ignore[attr-defined]
            if text := getattr(parameter, "help", None):
                parameter.help = escape(text)

    def get_params(self, context: Any) -> list[Any]:
        """List all parameters, `--help` too, of which flags show no type."""
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return params


class _Command(_PlainHelp, TyperCommand):
    """A command."""


class _Group(_PlainHelp, TyperGroup):
    """The app, or a command with commands below it."""


def build_app(command: str | None) -> typer.Typer:
    """Build the app with one command loaded, by name; None: load all of them."""
    app = typer.Typer(cls=_Group, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.callback(invoke_without_command=True)(version)
    entries = registry.entries("commands")
    for name, entry in entries.items():
        if " " in name:
            continue
        run = entry.load() if command in (name, None) else _stub(entry)
        panel = _outline(entry.module).get("PANEL", OTHER_PANEL)
        subcommands = {
            full_name.removeprefix(f"{name} "): subentry
            for full_name, subentry in entries.items()
            if full_name.startswith(f"{name} ")
        }
        if not subcommands or command not in (name, None):
            app.command(name, cls=_Command, rich_help_panel=panel)(run)
            continue
        group = typer.Typer(cls=_Group, rich_markup_mode="rich")
        group.callback(invoke_without_command=True)(run)
        for subcommand, subentry in subcommands.items():
            group.command(subcommand, cls=_Command)(subentry.load())
        app.add_typer(group, name=name, rich_help_panel=panel)
    return app


def _stub(entry: Registration) -> Callable[[], None]:
    """Make a command that is only listed, with its function's docstring."""

    def unloaded_command() -> None:
        raise AssertionError(f"{entry.place} is loaded when it is asked for")

    unloaded_command.__doc__ = _outline(entry.module).get(entry.place.partition(":")[2])
    return unloaded_command


@cache
def _outline(module: str) -> dict[str, str]:
    """Read docstrings of a module's functions, by name, and `PANEL`, from its source."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # of another package, which is said when it is asked for
        return {}
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return {}
    outline = {}
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            outline[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            outline |= {
                t.id: str(node.value.value) for t in node.targets if isinstance(t, ast.Name) and t.id == "PANEL"
            }
    return outline


def version(
    context: typer.Context, show: bool = typer.Option(False, "--version", help="Print the version and stop.")
) -> None:
    """A workbench for low-bit LLM kernels. Exit code 1 is a failed check, 2 is bad input."""  # noqa: D401
    if show:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help(), end="")
    if show or context.invoked_subcommand is None:
        raise typer.Exit


def run_command_line(arguments: Sequence[str] | None = None) -> None:
    """Run one command line, by default this process's, and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in words if not word.startswith("-")), "")
    report_errors(lambda: build_app(command)(words, prog_name="ptxlab", standalone_mode=False))


def report_errors(run: Callable[[], Any]) -> NoReturn:
    """Run a Typer app and exit; an error becomes one line and an exit code."""
    try:
        raise SystemExit(run())
    except UsageError as error:  # Typer would print a box of five lines
        path = error.ctx.command_path if error.ctx else "ptxlab"
        message = error.format_message().rstrip(".")
        _die(f"{message[0].lower()}{message[1:]}; see `{path} --help`", BAD_INPUT)
    except EmulationError as error:
        from ptxlab.emulator import remedies_of  # loaded already: it raised the error

        _die("\n".join([str(error), *remedies_of([type(error).__name__])]), exit_code(error))
    except PtxlabError as error:
        _die(str(error).replace('backend="emulator"', "--backend emulator"), exit_code(error))
    except MemoryError as error:
        _die(f"out of memory: {str(error) or 'nothing more can be allocated'}", BAD_INPUT)
    except typer.Abort:
        raise SystemExit(INTERRUPTED) from None


def _die(message: str, code: int) -> NoReturn:
    notes.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise SystemExit(code) from None
