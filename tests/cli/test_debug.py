"""`ptxlab debug`: driven in a pseudo terminal, by -x, and by what it refuses."""

import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.debug_sessions import COUNT, SCALE
from tests.support.small_kernels import line_of

PROMPT = "(ptxlab) "


class Terminal:
    """A process whose terminal is ours."""

    def __init__(self, *arguments: object) -> None:
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.environ.update(TERM="dumb", COLUMNS="200")
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored below what a shell runs in the background
            os.execv(sys.executable, [sys.executable, "-m", "ptxlab", *map(str, arguments)])

    def until(self, end: str, seconds: float = 60) -> str:
        """Read the terminal's output until it contains `end`."""
        output, deadline = "", time.monotonic() + seconds
        while end not in output:
            if not select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {end!r} in {output!r}")
            try:
                output += os.read(self.terminal, 1 << 16).decode().replace("\r\n", "\n")
            except OSError as error:  # it has ended
                raise AssertionError(f"no {end!r} in {output!r}") from error
        return output

    def send(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def run(self, line: str) -> str:
        """Enter a command, and return its output up to the next prompt."""
        self.send(f"{line}\n")
        return self.until(PROMPT).partition("\n")[2].removesuffix(PROMPT).strip()

    def end(self) -> int:
        """Wait for the process to end, and return its exit code."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.terminal)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("it does not end")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    Path("scale.ptx").write_text(SCALE)
    Path("count.ptx").write_text(COUNT)
    x = np.arange(128, dtype=np.float32)
    np.savez("scale.npz", x=x, y=np.zeros_like(x), by=np.float32(0.5))
    np.savez("count.npz", out=np.zeros(1, np.uint32), n=np.uint32(1 << 31))
    return tmp_path


SCALED = ("debug", "scale.ptx", "--in", "scale.npz", "--block", 128)


def test_a_session_in_a_terminal(files: Path) -> None:
    """The session breaks, continues, prints, steps, repeats by an empty line, reports a mistake, and goes back.

    It completes names, runs to the end of the launch, and quits.
    """
    terminal = Terminal(*SCALED)
    assert terminal.until(PROMPT).startswith("begin: scale.ptx:")
    line = line_of(SCALE, "bar.sync")
    assert terminal.run(f"break {line}") == f"breakpoint 1, scale.ptx:{line}"
    assert terminal.run("c").startswith(f"breakpoint 1, scale.ptx:{line}: scale.ptx:{line}, dispatch 11")
    assert terminal.run("print %v[5]").startswith("%v[5] = 5   f32")
    assert "xor.b32" in terminal.run("step")
    assert "ld.shared" in terminal.run("")
    assert terminal.run("print %nosuch") == "error: print: no register %nosuch in this kernel"
    assert "xor.b32" in terminal.run("back")
    assert terminal.run("pri %turn\t").startswith("error: unknown command 'pri'")
    assert terminal.run("pri\t %turn\t").startswith("%turned = 0")
    terminal.send("disas\x15")  # taken back, as a line editor has it
    assert terminal.run("d 1") == ""
    assert terminal.run("c").startswith("the launch has ended after 22 dispatches, no findings")
    assert terminal.run("c").startswith("error: continue: the launch has ended")
    terminal.send("quit\n")
    assert terminal.end() == 0


@pytest.mark.full
def test_ctrl_c_stops_a_run_and_the_end_of_the_input_quits(files: Path) -> None:
    terminal = Terminal("debug", "count.ptx", "--in", "count.npz", "--check", "")
    terminal.until(PROMPT)
    terminal.send("continue\n")
    terminal.until("continue")
    time.sleep(0.3)
    terminal.send("\x03")
    assert "interrupted: count.ptx:" in terminal.until(PROMPT)
    assert terminal.run("print %i[0]").startswith("%i[0] = ")
    time.sleep(0.3)  # a line editor that is just beginning loses the key
    terminal.send("\x03")
    terminal.until(PROMPT)
    assert terminal.run("where").startswith("interrupted")
    terminal.send("\x04")
    assert terminal.end() == 0


def test_commands_from_the_command_line(files: Path, cli: Any) -> None:
    status, out, _ = cli(*SCALED, "-x", "break bar.sync", "-x", "c", "-x", "p %v[3]", "-x", "quit", "-x", "nonsense")
    assert status == 0 and out.splitlines()[-2:] == [
        "%v[3] = 3   f32, block (0,0,0) thread (0,0,0)",
        "(ptxlab) quit",
    ]
    Path("scale.ptx").write_text(SCALE.replace("bar.sync 0;", "").replace("%at, 124", "%at, 252"))
    status, out, _ = cli(*SCALED, "-x", "break race", "-x", "c", "-x", "restart")
    assert status == 1 and "race: scale.ptx:" in out and "breakpoint 1, race: after scale.ptx:" in out
    status, out, _ = cli(*SCALED, "-x", "p %nosuch", "-x", "break 1000")
    assert status == 2 and out.count("\nerror: ") == 2


def test_json(files: Path, cli: Any) -> None:
    status, out, _ = cli(
        *SCALED, "-x", "break bar.sync", "-x", "c", "-x", "p %nosuch", "-x", "delete 1", "-x", "c", "--json"
    )
    rows, line = json.loads(out), line_of(SCALE, "bar.sync")
    assert status == 2 and [row["refused"] for row in rows] == [False, False, True, False, False]
    assert rows[1]["at"] == {"path": "scale.ptx", "line": line, "pc": 11} and rows[1]["dispatch"] == 11
    assert rows[2]["says"] == ["error: print: no register %nosuch in this kernel"] and rows[4]["at"] is None
    status, _, err = cli(*SCALED, "--json")
    assert status == 2 and "--json prints what -x says: give commands with -x" in err


def test_it_takes_what_run_takes(files: Path, cli: Any) -> None:
    """It takes a kernel of the project by name, sizes from the file; and reports the same mistakes in one line."""
    from ptxlab import registry

    spec, _ = registry.find("dequant_lqq")
    sizes = spec.example_sizes[0]
    arrays = spec.pack(spec.example(np.random.default_rng(0), **sizes))
    np.savez("lqq.npz", **arrays, **{name: sizes[name] for name in spec.symbols if name in sizes})
    status, out, err = cli("debug", "dequant_lqq", "--in", "lqq.npz", "-x", "c")
    assert status == 0 and "the launch has ended after" in out, err
    np.savez("wide.npz", **{**arrays, "scale": arrays["scale"].astype(np.float64)})
    status, out, err = cli("run", "dequant_lqq", "--in", "wide.npz", "--unneeded")
    assert status == 2 and "dequant_lqq: scale: dtype" in err
    for arguments, problem in (
        (("dequant_lqq", "--in", "lqq.npz", "--grid", "2"), "--grid is for files only"),
        (("dequant_lqq", "--in", "wide.npz"), "dequant_lqq: scale: dtype"),
        (("dequant_lqq", "--in", "scale.npz"), "dequant_lqq: "),
        (("scale.ptx", "--in", "lqq.npz"), "scale: x: must be given"),
        (("scale.ptx", "--in", "nosuch.npz"), "nosuch.npz"),
        (("nosuch.ptx", "--in", "scale.npz"), "nosuch.ptx"),
        (("scale.ptx", "--in", "scale.npz", "--check", "everything"), "--check: some of"),
        (("scale.ptx", "--in", "scale.npz", "--block", "2000"), "block: has at most 1024 threads"),
        (("scale.ptx",), "scale: x: must be given (got no arguments)"),
    ):
        status, out, err = cli("debug", *arguments, "-x", "c")
        assert status == 2 and problem in err and err.count("\n") == 1 and not out
