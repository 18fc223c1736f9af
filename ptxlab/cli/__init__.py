"""The `ptxlab` command. Every command takes `--json`; exit code 1 is a failed check, 2 is bad input."""

import typer
from rich.markup import escape

from ptxlab import __version__
from ptxlab.cli import bench, cost, profile, quantize, run, sanitize, sass, sweep, weights
from ptxlab.cli.common import BAD_INPUT, FAILED, notes
from ptxlab.errors import EmulationError, PtxlabError, UnknownInstruction, VerificationError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(weights.demo)
app.command()(weights.doctor)
app.command("list")(run.list_kernels)
app.command()(run.show)
app.command()(run.run)
app.command()(run.verify)
app.command()(sanitize.sanitize)
app.command()(sass.sass)
app.command()(cost.cost)
app.command()(weights.audit)
app.command()(quantize.quantize)
app.command()(bench.bench)
app.command()(sweep.sweep)
app.command()(profile.profile)
app.command()(bench.report)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """A workbench for low-bit LLM kernels. Exit code 1 is a failed check, 2 is bad input."""
    if show:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: turns the package's errors into one line and an exit code."""
    try:
        app()
    except UnknownInstruction as error:  # nothing ran, so nothing failed
        _die(error, BAD_INPUT)
    except (EmulationError, VerificationError) as error:
        _die(error, FAILED)
    except PtxlabError as error:
        _die(error, BAD_INPUT)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _die(error: Exception, code: int) -> None:
    notes.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True, highlight=False)
    raise SystemExit(code) from None
