"""The debugger's commands: a line of text in, lines of text out. The terminal and the widget both use them."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.debugger import matrices, pending, values
from ptxlab.debugger.conditions import condition_of
from ptxlab.debugger.session import DebuggerError, Session, Stop
from ptxlab.debugger.state import Held, State, could_hold, place_of
from ptxlab.emulator.core.lanes import indices_of
from ptxlab.errors import nearest_of

MOST_WRITTEN = 4  # registers of a line that are shown for a local
AROUND = 4  # lines that `list` shows before and behind a line
_AS = re.compile(r"(?P<what>.*?)(?:\s+as\s+(?P<type>\w+))?(?:\s+(?P<form>lanes|words|\d+x\d+))?"
                 r"(?:\s+swizzle\s+(?P<span>\d+))?\s*")  # fmt: skip
_HOLDS = re.compile(r"holds\s+(?:row\s+(?P<row>\d+))?(?:\s*(?:,|\s)\s*)?(?:col(?:umn)?\s+(?P<column>\d+))?"
                    r"(?:\s+of\s+(?P<letter>\w))?\s*")  # fmt: skip

Do = Callable[["Commands", str], list[str]]
COMMANDS: dict[str, tuple[Do, str, str]] = {}  # name -> what it does, what it takes, what it is for
ALIASES: dict[str, str] = {}
REPEATED = frozenset({"step", "stepi", "next", "continue", "back", "backi"})  # by an empty line


def command(names: str, takes: str = "") -> Callable[[Do], Do]:
    """Enter a command with its aliases; its docstring is its help."""
    name, *aliases = names.split()

    def enter(function: Do) -> Do:
        COMMANDS[name] = function, takes, " ".join((function.__doc__ or "").split())
        ALIASES.update(dict.fromkeys((name, *aliases), name))
        return function

    return enter


class Commands:
    """Carries out commands on a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last = ""  # what an empty line repeats

    def run(self, line: str) -> str:
        """Run a command and return its output. Raises PtxlabError for one that cannot be carried out."""
        line = line.strip() or self.last
        if not line:
            return ""
        name, arguments = (*line.split(maxsplit=1), "")[:2]
        name_in_full = ALIASES.get(name)
        if name_in_full is None:
            raise DebuggerError(f"unknown command {name!r}{_nearest(name)}; `help` lists them")
        self.last = line if name_in_full in REPEATED else ""
        if arguments and not COMMANDS[name_in_full][1]:
            raise DebuggerError(f"{name_in_full}: takes nothing (got {arguments!r})")
        return "\n".join(COMMANDS[name_in_full][0](self, arguments))

    # Moving

    @command("break b", "LINE | FILE:LINE | #INSTRUCTION | OPCODE | finding | nan | race ... [if CONDITION]")
    def _break(self, arguments: str) -> list[str]:
        """Stop at a line or an instruction, or after a finding of a check; without an argument list breakpoints.

        With `if %r5 == 3` it stops for lanes that hold that, and looks at the first of them; `and` joins comparisons.
        """
        session = self.session
        if not arguments:
            return [f"{n}  {breakpoint_.text}" for n, breakpoint_ in session.breakpoints.items()] or ["no breakpoints"]
        place, _, text = arguments.partition(" if ")
        number = session.stop_at(place, condition_of(session, text) if text else None)
        if text:
            breakpoint_text = session.breakpoints[number].text
            breakpoint_ = replace(session.breakpoints[number], text=f"{breakpoint_text} if {text.strip()}")
            session.breakpoints[number] = breakpoint_
        breakpoint_ = session.breakpoints[number]
        places = f" ({len(breakpoint_.code)} places)" if len(breakpoint_.code) > 1 else ""
        return [f"breakpoint {number}, {breakpoint_.text}{places}"]

    @command("delete d", "NUMBER")
    def _delete(self, arguments: str) -> list[str]:
        """Remove a breakpoint."""
        self.session.forget(_number("delete", arguments))
        return []

    @command("continue c")
    def _continue(self, arguments: str) -> list[str]:
        """Run to the next breakpoint, error or end."""
        return self.describe_stop(self.session.go_on())

    @command("step s", "[COUNT] [all]")
    def _step(self, arguments: str) -> list[str]:
        """Run until the warp, or with `all` any warp, comes to another source line."""
        return self._steps("step", self.session.step, "line", arguments)

    @command("next n", "[COUNT] [all]")
    def _next(self, arguments: str) -> list[str]:
        """Run as `step` does, but over functions that this line calls."""
        return self._steps("next", self.session.step, "call", arguments)

    @command("stepi si", "[COUNT] [all]")
    def _stepi(self, arguments: str) -> list[str]:
        """Run one instruction of the warp, or with `all` of any warp."""
        return self._steps("stepi", self.session.step, "instruction", arguments)

    @command("back", "[COUNT] [all]")
    def _back(self, arguments: str) -> list[str]:
        """Go back to the source line before, by running again from the beginning."""
        return self._steps("back", self.session.back, "line", arguments)

    @command("backi bi", "[COUNT] [all]")
    def _backi(self, arguments: str) -> list[str]:
        """Go back by one instruction."""
        return self._steps("backi", self.session.back, "instruction", arguments)

    @command("rewind rc")
    def _rewind(self, arguments: str) -> list[str]:
        """Go back to the last breakpoint before here, or to the beginning."""
        return self.describe_stop(self.session.rewind())

    @command("restart")
    def _restart(self, arguments: str) -> list[str]:
        """Go back to the beginning; breakpoints stay."""
        return self.describe_stop(self.session.restart())

    def _steps(self, name: str, move: Callable[..., Stop], unit: str, arguments: str) -> list[str]:
        words = arguments.split()
        with_all_lanes = "all" in words
        counts = [word for word in words if word != "all"]
        if len(counts) > 1 or not all(word.isdigit() and int(word) for word in counts):
            raise DebuggerError(f"{name}: [COUNT] [all] (got {arguments!r})")
        last_stop = self.session.now
        for _ in range(int(counts[0]) if counts else 1):
            last_stop = move(unit, everyone=with_all_lanes)
            if last_stop.reason != "step":
                break
        return self.describe_stop(last_stop)

    # Where

    def describe_stop(self, stop: Stop) -> list[str]:
        """Describe why and where the launch has stopped, with the source line."""
        moment, session = stop.moment, self.session
        lines = [str(finding) for finding in moment.findings]
        if moment.error is not None:
            lines.append(f"error: {moment.error}")
        if stop.ended:
            count = len(moment.machine.launch.findings.by_key)
            state = f"{count} finding{'s' * (count != 1)}" if count else "no findings"
            return [*lines, f"the launch has ended after {moment.position} dispatches, {state}"]
        instruction, machine = moment.instruction, moment.machine
        other_warps = len(moment.warps) - 1
        lane = session.lane
        running_lanes, threads = indices_of(moment.lanes), "another wave"
        if lane is not None:
            warp_lanes = running_lanes[running_lanes // 32 == lane // 32] % 32
            threads = f"{place_of(machine, lane)}, warp {lane % machine.stride // 32}"
            threads += f" lanes {pending.ranges(warp_lanes.tolist())}" if len(warp_lanes) else ", which is not here"
            other_warps += not len(warp_lanes)
        threads += f", and {other_warps} warp{'s' * (other_warps > 1)} more" if other_warps else ""
        reason_text = "" if stop.reason == "step" else f"{stop.reason}: "
        timing = "after " if moment.is_after else ""
        text = self._source_line(instruction.path, instruction.line)
        callers_text = "".join(f", called from line {line}" for _, line in instruction.callers)
        lines.append(
            f"{reason_text}{timing}{pending.line_of(instruction)}{callers_text}, dispatch {moment.position}: {threads}"
        )
        if text and Path(instruction.path).suffix != ".ptx":
            lines.append(f"  {instruction.line:>5}  {text}")
        return [*lines, f"  {f'#{moment.pc}':>5}  {pending.text_of(instruction)}"]

    def _source_line(self, path: str, line: int) -> str:
        text = self.session.text(path)
        return text[line - 1].strip() if 0 < line <= len(text) else ""

    @command("where w")
    def _where(self, arguments: str) -> list[str]:
        """Describe why, where and for which threads the launch has stopped."""
        return self.describe_stop(self.session.now)

    @command("list l", "[LINE]")
    def _list(self, arguments: str) -> list[str]:
        """List the source around the present line, or around a given line; a line with code has a mark."""
        code, current_stop = self.session.code, self.session.now
        current_instruction = code[min(current_stop.moment.pc, len(code) - 1)]
        path = self.session.kernel.source.path if arguments else current_instruction.path
        middle = _number("list", arguments) if arguments else current_instruction.line
        text = self.session.text(path)
        if not text:
            raise DebuggerError(f"list: {path} cannot be read; `code` shows the instructions")
        if not 0 < middle <= len(text):
            raise DebuggerError(f"list: {Path(path).name} has {len(text)} lines (got {middle})")
        has_code = {instruction.line for instruction in code if instruction.path == path}
        lines = []
        for n in range(max(1, middle - AROUND), min(len(text), middle + AROUND) + 1):
            is_present = not current_stop.ended and (path, n) == (current_instruction.path, current_instruction.line)
            lines.append(f"{'=>' if is_present else '  '} {n:>5}{'+' if n in has_code else ' '} {text[n - 1]}")
        return lines

    @command("code", "[#INSTRUCTION]")
    def _code(self, arguments: str) -> list[str]:
        """List the PTX around the present instruction, or around a given one, with the source line of each."""
        code, pc = self.session.code, self.session.now.moment.pc
        middle = min(pc, len(code) - 1) if not arguments else _number("code", arguments.lstrip("#"))
        if not 0 <= middle < len(code):
            raise DebuggerError(f"code: #0 to #{len(code) - 1} (got {arguments})")
        part = range(max(0, middle - AROUND), min(len(code), middle + AROUND + 1))
        lines = [f"{f'#{i}':>5}  {pending.line_of(code[i]):<16} {pending.text_of(code[i])}" for i in part]
        return [f"{'=>' if i == pc else '  '} {line}" for i, line in zip(part, lines, strict=True)]

    @command("line", "[LINE]")
    def _line(self, arguments: str) -> list[str]:
        """List the instructions of a source line, with the present values of the registers that they write."""
        session, code = self.session, self.session.code
        current_instruction = code[min(session.now.moment.pc, len(code) - 1)]
        path, line = current_instruction.path, current_instruction.line
        if arguments:
            path, line = session.kernel.source.path, _number("line", arguments)
        matching_code = [(pc, i) for pc, i in enumerate(code) if (i.path, i.line) == (path, line)]
        if not matching_code:
            raise DebuggerError(f"line: line {line} of {Path(path).name} has no instruction")
        state, lines = State(session), [self._source_line(path, line)]
        for pc, instruction in matching_code:
            registers = ", ".join(_format_register(state.of_register(r)) for r in instruction.destinations)
            lines.append(f"  {f'#{pc}':>5}  {pending.text_of(instruction)}" + (f"    {registers}" if registers else ""))
        return lines

    @command("warps")
    def _warps(self, arguments: str) -> list[str]:
        """List the places of the block's warps, and the events that they wait for."""
        moment = self.session.now.moment
        block = State(self.session).lane // moment.machine.stride
        return pending.whereabouts(moment.machine, moment.pc, moment.lanes, block)

    @command("thread t", "NUMBER | X,Y,Z")
    def _thread(self, arguments: str) -> list[str]:
        """Look at another thread of the block."""
        return self._look("thread", arguments)

    @command("lane", "NUMBER")
    def _lane(self, arguments: str) -> list[str]:
        """Look at another lane of the warp."""
        return self._look("lane", arguments)

    @command("warp", "NUMBER")
    def _warp(self, arguments: str) -> list[str]:
        """Look at another warp of the block."""
        return self._look("warp", arguments)

    @command("block", "NUMBER | X,Y,Z")
    def _block(self, arguments: str) -> list[str]:
        """Look at another block."""
        return self._look("block", arguments)

    def _look(self, level: str, number: str) -> list[str]:
        session, launch = self.session, self.session.now.moment.machine.launch
        block, thread = session.focus
        shape = launch.grid if level == "block" else launch.block
        if re.fullmatch(r"\d+,\d+,\d+", number) and level in ("thread", "block"):
            index = tuple(map(int, number.split(",")))
            if any(i >= n for i, n in zip(index, shape, strict=True)):
                raise DebuggerError(f"{level}: there are {shape} (got {number})")
            chosen = int(np.ravel_multi_index(index, shape, order="F"))
        else:
            chosen = _number(level, number)
        limits = {"lane": 32, "warp": ceil_div(launch.threads, 32)}
        if chosen >= limits.get(level, chosen + 1):
            raise DebuggerError(f"{level}: 0 to {limits[level] - 1} (got {chosen})")
        numbers = {"thread": (block, chosen), "lane": (block, thread // 32 * 32 + chosen),
                   "warp": (block, 32 * chosen), "block": (chosen, thread)}  # fmt: skip
        session.look_at(*numbers[level])
        if session.lane is None:
            return [f"block {session.focus[0]} is in another wave: not there now"]
        return [place_of(session.now.moment.machine, session.lane)]

    @command("findings")
    def _findings(self, arguments: str) -> list[str]:
        """List the findings that the checks have reported so far."""
        findings = self.session.now.moment.machine.launch.findings.by_key
        return [str(finding) for finding in findings.values()] or ["no findings"]

    # What is there

    @command("print p", "NAME[FROM:TO] [as TYPE] [lanes | words | ROWSxCOLUMNS [swizzle BYTES]]")
    def _print(self, arguments: str) -> list[str]:
        """Print a register, special register, variable or argument; `[%rd4+8]` is memory, `shared` the whole window.

        Of a C++ local it shows what the lines that assign it have written.
        """
        match = _AS.fullmatch(arguments)
        if not arguments or match is None:
            raise DebuggerError(f"print: {COMMANDS['print'][1]}")
        state, form = State(self.session), match["form"]
        if lines := self._list_assignments(state, arguments):
            return lines
        named_value = state.find(match["what"])
        named_value = named_value.as_type(match["type"]) if match["type"] else named_value
        if form == "words":
            named_value = named_value.as_type(
                "b16" if named_value.values.itemsize == 2 and named_value.lane is not None else "b32"
            )
        if named_value.lane is not None and form is None and np.shape(named_value.values) == (32,):
            return [f"{_format_register(named_value)}   {named_value.type}, {named_value.origin}"]
        shape = "" if np.ndim(named_value.values) == 0 else f"[{' x '.join(map(str, named_value.values.shape))}]"
        if np.ndim(named_value.values) == 0 or named_value.values.size == 1:
            text = values.scalar(named_value.values.reshape(1), named_value.type)
            return [f"{named_value.name} = {text}   {named_value.type}, {named_value.origin}"]
        owner = f"lanes of warp {self.session.focus[1] // 32}" if named_value.lane is not None else named_value.origin
        title = f"{named_value.name}   {named_value.type}{shape}, {owner}"
        if form and "x" in form:
            rows, columns = map(int, form.split("x"))
            named_value, title = named_value.tile(rows, columns, int(match["span"] or 16)), f"{title}, as {form}"
        elif match["span"]:
            raise DebuggerError(f"print: swizzle goes with ROWSxCOLUMNS (got {arguments!r})")
        return [title, *values.array(named_value.values, named_value.type, named_value.first)]

    def _list_assignments(self, state: State, name: str) -> list[str]:
        """List the lines that assign a C++ local, and the last registers of its type there.

        PTX has no name for such a local.
        """
        source, code = self.session.kernel.source, state.machine.code
        if source.language != "cu" or not re.fullmatch(r"[A-Za-z_]\w*", name) or state.knows(name):
            return []
        can_hold = could_hold(self.session.kernel, name)
        pattern, lines = re.compile(rf"\b{name}(?:\[[^\]]*\])*\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)"), []
        for number, text in enumerate(self.session.text(source.path), 1):
            instructions = [i for i in code if (i.path, i.line) == (source.path, number)]
            assigned_registers = list({r.name: r for i in instructions for r in i.destinations if can_hold(r)}.values())
            if assigned_registers and pattern.search(text):
                registers = ", ".join(
                    _format_register(state.of_register(r)) for r in assigned_registers[-MOST_WRITTEN:]
                )
                left_out = ".., " * (len(assigned_registers) > MOST_WRITTEN)
                lines += [f"  {number:>5}  {text.strip()}", f"         {left_out}{registers}"]
        title = (
            f"{name} is a C++ local, which PTX has no name for; the lines that assign it, and the last that they write:"
        )
        return [title, *lines] if lines else []

    @command("registers r", "[all]")
    def _registers(self, arguments: str) -> list[str]:
        """List the registers of the instruction, or all of the kernel."""
        state, moment = State(self.session), self.session.now.moment
        if arguments not in ("", "all"):
            raise DebuggerError(f"registers: nothing or all (got {arguments!r}); print shows one")
        if arguments == "all" or moment.ended:
            chosen = list(state.registers().values())
        else:
            instruction = moment.instruction
            guard = [instruction.guard] if instruction.guard else []
            operands = (*guard, *instruction.destinations, *instruction.sources)
            chosen = list({register.name: register for register in operands}.values())
        lines = [f"{_format_register(state.of_register(r))}   {r.type}" for r in sorted(chosen, key=_by_number)]
        return lines or ["the instruction has no registers"]

    @command("who", "holds row N [column M] [of a|b|c|d]")
    def _who(self, arguments: str) -> list[str]:
        """List the lanes that hold a row, a column or an element of a matrix operand, and their registers."""
        match = _HOLDS.fullmatch(arguments)
        if match is None or (match["row"] is None and match["column"] is None):
            raise DebuggerError("who: holds row N [column M] [of a|b|c|d]")
        row, column = (None if match[name] is None else int(match[name]) for name in ("row", "column"))
        return matrices.holders(State(self.session), match["letter"] or "d", row, column)

    @command("fragment f", "[a|b|c|d] [FROM:TO, FROM:TO]")
    def _fragment(self, arguments: str) -> list[str]:
        """Print the matrix that an operand of the nearest matrix instruction holds.

        It lies over the lanes or in shared memory.
        """
        letter, _, index = (arguments or "d").partition(" ")
        title, matrix, type_name = matrices.operand_matrix(State(self.session), letter)
        whole_matrix = Held(letter, "", type_name, matrix)
        part = whole_matrix.part(index.strip("[] ")) if index else whole_matrix
        return [title, *values.array(np.atleast_1d(part.values), type_name, part.first)]

    @command("pending")
    def _pending(self, arguments: str) -> list[str]:
        """List the block's copies, products and barriers, with groups, phases and counts.

        Waiting lanes are listed with what they wait for.
        """
        machine = self.session.now.moment.machine
        return pending.lines(machine, State(self.session).lane // machine.stride)

    @command("help h ?", "[COMMAND]")
    def _help(self, arguments: str) -> list[str]:
        """Describe the commands, or one of them."""
        if arguments and arguments not in ALIASES:
            raise DebuggerError(f"help: no command {arguments!r}{_nearest(arguments)}")
        chosen = [ALIASES[arguments]] if arguments else list(COMMANDS)
        lines = []
        for name in chosen:
            aliases = [alias for alias, command in ALIASES.items() if command == name != alias]
            _, operand_text, purpose = COMMANDS[name]
            lines.append(f"{name}{''.join(f', {alias}' for alias in aliases)} {operand_text}".rstrip())
            lines.append(f"      {purpose}")
        return lines


def _nearest(name: str) -> str:
    return nearest_of(f"one of {', '.join(COMMANDS)}", name)


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise DebuggerError(f"{name}: a number (got {text!r})")
    return int(text)


def _format_register(register: Held) -> str:
    """Format a register in its lane as `%f3 = 1.5`."""
    assert register.lane is not None
    return f"{register.name} = {values.scalar(register.values[register.lane : register.lane + 1], register.type)}"


def _by_number(register: object) -> tuple[str, int]:
    name = str(getattr(register, "name", ""))
    digits = re.search(r"\d+$", name)
    return name[: digits.start()] if digits else name, int(digits[0]) if digits else 0
