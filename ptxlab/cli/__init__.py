"""The `ptxlab` command. Every command takes `--json`. Exit code 1: a failed check, 2: bad input, 3: undecided."""

from collections.abc import Callable

import typer
from rich.markup import escape

from ptxlab import __version__
from ptxlab.cli import bench, debug, init, profile, prove, run, sanitize, sass, timeline, weights
from ptxlab.cli.common import BAD_INPUT, FAILED, UsageError, notes
from ptxlab.errors import EmulationError, PtxlabError, UnknownInstruction, VerificationError
from ptxlab.llm.cli import accuracy, generate, imports, perplexity, quantize
from ptxlab.lowbit.cli import cost, stalls, sweep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# The panels of `ptxlab --help`, in this order.
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Run and check": {
        "list": run.list_kernels,
        "show": run.show,
        "run": run.run,
        "debug": debug.debug,
        "verify": run.verify,
        "prove": prove.prove,
        "sanitize": sanitize.sanitize,
    },
    "Measure": {
        "sass": sass.sass,
        "bench": bench.bench,
        "sweep": sweep.sweep,
        "profile": profile.profile,
        "timeline": timeline.timeline,
        "stalls": stalls.stalls,
        "cost": cost.cost,
    },
    "Weights": {
        "weights": weights.weights,
        "audit": weights.audit,
        "quantize": quantize.quantize,
        "import": imports.import_,
        "perplexity": perplexity.perplexity,
        "accuracy": accuracy.accuracy,
        "generate": generate.generate,
    },
    "Project": {
        "init": init.init,
        "demo": weights.demo,
        "doctor": weights.doctor,
    },
}
SUBCOMMANDS: dict[str, dict[str, Callable[..., None]]] = {"cost": {"schedule": cost.schedule}}  # of one of these
for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        if _name not in SUBCOMMANDS:
            app.command(_name, rich_help_panel=_panel)(_command)
            continue
        group = typer.Typer()
        group.callback(invoke_without_command=True)(_command)
        for _below, _subcommand in SUBCOMMANDS[_name].items():
            group.command(_below)(_subcommand)
        app.add_typer(group, name=_name, rich_help_panel=_panel)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context, show: bool = typer.Option(False, "--version", help="Print the version and stop.")
) -> None:
    """A workbench for low-bit LLM kernels. Exit code 1 is a failed check, 2 is bad input."""
    if show:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help(), end="")
    if show or context.invoked_subcommand is None:
        raise typer.Exit


def main() -> None:
    """Entry point: turns errors into one line and an exit code."""
    try:
        raise SystemExit(app(prog_name="ptxlab", standalone_mode=False))
    except UsageError as error:  # Typer would print a box of five lines
        command = error.ctx.command_path if error.ctx else "ptxlab"
        message = error.format_message().rstrip(".")
        _die(f"{message[0].lower()}{message[1:]}; see `{command} --help`", BAD_INPUT)
    except UnknownInstruction as error:  # nothing ran, so nothing failed
        _die(str(error), BAD_INPUT)
    except (EmulationError, VerificationError) as error:
        _die(str(error), FAILED)
    except PtxlabError as error:
        _die(str(error).replace('backend="emulator"', "--backend emulator"), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None


def _die(message: str, code: int) -> None:
    notes.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise SystemExit(code) from None
