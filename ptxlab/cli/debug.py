"""The command `debug`: the debugger in a terminal."""

import cmd
import contextlib
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from ptxlab import debugger, registry, runtime
from ptxlab.cli.common import (
    BAD_INPUT,
    FAILED,
    AsJson,
    Block,
    CommandLineError,
    FileArch,
    FileDefine,
    Grid,
    Include,
    Shared,
    Std,
    Uninitialised,
    print_json,
)
from ptxlab.cli.launching import (
    Arguments,
    ArgumentsFile,
    ArgumentTexts,
    FileOptions,
    KernelTarget,
    Late,
    MaxSteps,
    Unchecked,
    emulator_options,
    solve,
)
from ptxlab.debugger.commands import ALIASES, COMMANDS
from ptxlab.errors import PtxlabError

PANEL = "Run and check"

PROMPT = "(ptxlab) "


def debug(
    target: KernelTarget,
    inputs: ArgumentsFile = None,
    values: ArgumentTexts = None,
    uninitialised: Uninitialised = None,
    execute: Annotated[
        list[str] | None, typer.Option("-x", metavar="COMMAND", help="Carry out this command; then the next -x; stop.")
    ] = None,
    check: Annotated[
        str, typer.Option(help="Checks to stop at with `break finding`, comma-separated. Default: all.")
    ] = "all",
    late: Late = False,
    max_steps: MaxSteps = None,
    unchecked: Unchecked = False,
    grid: Grid = None,
    block: Block = None,
    shared: Shared = None,
    arch: FileArch = None,
    define: FileDefine = None,
    include: Include = None,
    std: Std = None,
    as_json: AsJson = False,
) -> None:
    """Debug a kernel in the emulator: breakpoints, steps of a warp, registers and fragments by name, backwards too.

    It takes what `run` takes, and commands from the terminal, from standard input or from -x. With -x the exit code
    is 1 if there was a finding, 2 if a command was refused.
    """
    if as_json and execute is None:
        raise CommandLineError("--json prints what -x says: give commands with -x")
    arguments = Arguments.read(inputs, values, uninitialised)
    options = emulator_options(check, late, max_steps)
    spec, source, entry = registry.resolve(target)
    files = FileOptions(grid, block, shared, arch, define, include, std)
    launch = solve(spec, source, entry, arguments, unchecked, files)

    def call() -> runtime.Outcome:
        return launch.copy_arrays().run(backend="emulator", options=options)

    session = debugger.Session(call, launch.kernel, options.checks)
    try:
        terminal = Terminal(session)
        if as_json:
            print_json([_answer_row(terminal, line) for line in execute or ()])
        else:
            terminal.show("where")
            terminal.loop() if execute is None else terminal.carry_out(execute)
    finally:
        session.close()
    if execute is not None and (terminal.refused or session.found):
        raise typer.Exit(BAD_INPUT if terminal.refused else FAILED)


def _answer_row(terminal: "Terminal", line: str) -> dict[str, Any]:
    """Run a command in the debugger; return it with its output, whether it was refused, and the line reached.

    There is no line at the end of the launch.
    """
    output, is_refused = terminal.answer(line)
    moment = terminal.commands.session.now.moment
    place = (
        None if moment.ended else {"path": moment.instruction.path, "line": moment.instruction.line, "pc": moment.pc}
    )
    return {
        "command": line,
        "says": output.splitlines(),
        "refused": is_refused,
        "dispatch": moment.position,
        "at": place,
    }


class Terminal(cmd.Cmd):
    """Lines from a terminal to `Commands`; an empty line repeats a step. At the end of the input it quits."""

    prompt = PROMPT

    def __init__(self, session: debugger.Session) -> None:
        super().__init__()
        self.commands = debugger.Commands(session)
        self.refused = False
        self.use_rawinput = sys.stdin.isatty()

    def answer(self, line: str) -> tuple[str, bool]:
        """Run a command; return what it prints, and whether it was refused.

        The message of a refused command is one line.
        """
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
        """Carry out lines that are given, each shown after a prompt."""
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
        """Return False; it is never called, because `onecmd` takes empty lines too."""
        return False

    def completenames(self, text: str, *ignored: Any) -> list[str]:
        """List the commands that begin with a text."""
        return [name for name in (*COMMANDS, "quit") if name.startswith(text)]

    def completedefault(self, text: str, *ignored: Any) -> list[str]:
        """List names of registers, variables and arguments."""
        try:
            state = debugger.State(self.commands.session)
        except PtxlabError:
            return []
        names = [*state.registers(), *state.memory_names(), *state.parameters, *ALIASES]
        return sorted(name for name in names if name.startswith(text))
