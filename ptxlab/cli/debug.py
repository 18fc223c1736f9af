"""The command `debug`: the debugger in a terminal."""

import cmd
import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ptxlab import debugger, registry
from ptxlab.cli.common import (
    BAD_INPUT,
    FAILED,
    AsJson,
    Block,
    CommandLineError,
    FileArch,
    FileDefine,
    Grid,
    Shared,
    print_json,
)
from ptxlab.cli.run import launching
from ptxlab.debugger.commands import ALIASES, COMMANDS
from ptxlab.errors import PtxlabError
from ptxlab.io.files import load_arrays
from ptxlab.runtime.arguments import checks_of

PANEL = "Run and check"

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
    as_json: AsJson = False,
) -> None:
    """Debug a kernel in the emulator: breakpoints, steps of a warp, registers and fragments by name, backwards too.

    It takes what `run` takes, and commands from the terminal, from standard input or from -x. With -x the exit code
    is 1 if there was a finding, 2 if a command was refused.
    """
    if as_json and execute is None:
        raise CommandLineError("--json prints what -x says: give commands with -x")
    arrays = load_arrays(inputs)
    checks, mode = checks_of("--check", check), "late" if late else "early"
    found = registry.resolve(target)
    kernel, launch = launching(*found, arrays, unchecked, grid, block, shared, arch, define)

    def call() -> Any:
        given = {name: array.copy() for name, array in arrays.items()}
        return launch(given, mode=mode, checks=checks, backend="emulator", max_steps=max_steps)

    session = debugger.Session(call, kernel(), checks)
    try:
        terminal = Terminal(session)
        if as_json:
            print_json([_row(terminal, line) for line in execute or ()])
        else:
            terminal.show("where")
            terminal.loop() if execute is None else terminal.carry_out(execute)
    finally:
        session.close()
    if execute is not None and (terminal.refused or session.found):
        raise typer.Exit(BAD_INPUT if terminal.refused else FAILED)


def _row(terminal: "Terminal", line: str) -> dict[str, Any]:
    """A command, what it says, whether it was refused, and where the session is behind it: no line at the end."""
    said, refused = terminal.answer(line)
    moment = terminal.commands.session.now.moment
    at = None if moment.ended else {"path": moment.instruction.path, "line": moment.instruction.line, "pc": moment.pc}
    return {"command": line, "says": said.splitlines(), "refused": refused, "dispatch": moment.position, "at": at}


class Terminal(cmd.Cmd):
    """Lines from a terminal to `Commands`; an empty line repeats a step. At the end of the input it quits."""

    prompt = PROMPT

    def __init__(self, session: debugger.Session) -> None:
        super().__init__()
        self.commands = debugger.Commands(session)
        self.refused = False
        self.use_rawinput = sys.stdin.isatty()

    def answer(self, line: str) -> tuple[str, bool]:
        """What a command says, and whether it was refused, which is one line."""
        try:
            return self.commands.run(line), False
        except PtxlabError as error:
            self.refused = True
            return f"error: {error}", True

    def show(self, line: str) -> None:
        """Carry out a command and print what it says."""
        text, _ = self.answer(line)
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

    def carry_out(self, lines: Iterable[str]) -> None:
        """The same with lines that are given, each shown behind a prompt."""
        for line in lines:
            self.stdout.write(f"{PROMPT}{line}\n")
            if self.onecmd(line):
                return

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
