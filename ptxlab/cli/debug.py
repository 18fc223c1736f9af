"""The command `debug`: the debugger in a terminal."""

import cmd
import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ptxlab import debugger, kernels
from ptxlab.cli.common import BAD_INPUT, FAILED, Block, FileArch, FileDefine, Grid, Shared
from ptxlab.cli.run import launching
from ptxlab.debugger.commands import ALIASES, COMMANDS
from ptxlab.errors import PtxlabError
from ptxlab.io.files import load_arrays
from ptxlab.runtime.arguments import checks_of

PROMPT = "(ptxlab) "


def debug(
    target: Annotated[str, typer.Argument(help="NAME, NAME.cu, NAME:FORM, or FILE[:entry].")],
    inputs: Annotated[
        Path, typer.Option("--in", help=".npz with the kernel's arguments by name; scalars are 0-d arrays.")
    ],
    execute: Annotated[
        list[str] | None, typer.Option("-x", metavar="COMMAND", help="Carry out this command; then the next -x; stop.")
    ] = None,
    check: Annotated[
        str, typer.Option(help="Checks to stop at with `break finding`, comma-separated. Default: all.")
    ] = "all",
    late: Annotated[
        bool, typer.Option("--late", help="Complete asynchronous copies as late as allowed, not at once.")
    ] = False,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after this many instructions per wave. Default: 10 million.")
    ] = None,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Skip input validation.")] = False,
    grid: Grid = None,
    block: Block = None,
    shared: Shared = None,
    arch: FileArch = None,
    define: FileDefine = None,
) -> None:
    """Debug a kernel in the emulator: breakpoints, steps of a warp, registers and fragments by name, backwards too.

    It takes what `run` takes, and commands from the terminal, from standard input or from -x. With -x the exit code
    is 1 if there was a finding, 2 if a command was refused.
    """
    arrays = load_arrays(inputs)
    checks, mode = checks_of("--check", check), "late" if late else "early"
    found = kernels.resolve(target)
    kernel, launch = launching(*found, arrays, unchecked, grid, block, shared, arch, define)

    def call() -> Any:
        given = {name: array.copy() for name, array in arrays.items()}
        return launch(given, mode=mode, checks=checks, backend="emulator", max_steps=max_steps)

    session = debugger.Session(call, kernel(), checks)
    try:
        terminal = Terminal(session)
        terminal.show("where")
        if execute is None:
            terminal.loop()
        for line in execute or ():
            print(f"{PROMPT}{line}")
            if terminal.onecmd(line):
                break
    finally:
        session.close()
    if execute is not None and (terminal.refused or session.found):
        raise typer.Exit(BAD_INPUT if terminal.refused else FAILED)


class Terminal(cmd.Cmd):
    """Lines from a terminal to `Commands`; an empty line repeats a step. At the end of the input it quits."""

    prompt = PROMPT

    def __init__(self, session: debugger.Session) -> None:
        super().__init__()
        self.commands = debugger.Commands(session)
        self.refused = False
        self.use_rawinput = sys.stdin.isatty()

    def show(self, line: str) -> None:
        """Carry out a command and print what it says; an error is one line."""
        try:
            text = self.commands.run(line)
        except PtxlabError as error:
            self.refused, text = True, f"error: {error}"
        if text:
            self.stdout.write(f"{text}\n")
            self.stdout.flush()

    def loop(self) -> None:
        """Read commands to the end; Ctrl-C at the prompt leaves the line, in a run it stops the run."""
        with contextlib.suppress(ImportError):  # there is no readline on Windows
            import readline

            readline.set_completer_delims(" \t\n[],:")  # which leaves the % of a register in its name
        while True:
            try:
                return self.cmdloop()
            except KeyboardInterrupt:
                self.stdout.write("\n")

    def onecmd(self, line: str) -> bool:
        """Carry out a line; True at the last one."""
        if line.strip() in ("quit", "q", "exit", "EOF"):
            if line == "EOF":
                self.stdout.write("\n")
            return True
        self.show(line)
        return False

    def emptyline(self) -> bool:
        """Never asked: `onecmd` takes empty lines too."""
        return False

    def completenames(self, text: str, *ignored: Any) -> list[str]:
        """Commands that begin so."""
        return [name for name in (*COMMANDS, "quit") if name.startswith(text)]

    def completedefault(self, text: str, *ignored: Any) -> list[str]:
        """Names of registers, variables and arguments."""
        try:
            state = debugger.State(self.commands.session)
        except PtxlabError:
            return []
        names = [*state.registers(), *state.memory_names(), *state.parameters, *ALIASES]
        return sorted(name for name in names if name.startswith(text))
