"""What `ptxlab run` and `ptxlab debug` share: options of the emulator, and a launch that is solved once."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import emulator, runtime
from ptxlab.cli import launching
from ptxlab.emulator import EmulatorOptions
from ptxlab.spec import KernelSpec
from tests.support.small_kernels import kernel_text, record_options

LATE = EmulatorOptions(mode="late")
# Options of the command line, and what they are for the emulator.
FLAGS: dict[str, tuple[tuple[str, ...], EmulatorOptions]] = {
    "none": ((), EmulatorOptions()),
    "check": (("--check", "race,float"), EmulatorOptions(checks=frozenset({"race", "float"}))),
    "late": (("--late",), LATE),
    "max steps": (("--max-steps", "1000"), EmulatorOptions(max_steps=1000)),
    "memory": (("--memory",), EmulatorOptions(count_banks=True)),
}


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[EmulatorOptions]:
    """Record the options of every emulator that is made."""
    return record_options(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a folder with a kernel that has a barrier, k.ptx, and its arguments, in.npz."""
    monkeypatch.chdir(tmp_path)
    Path("k.ptx").write_text(kernel_text("bar.sync 0; ret;", ".param .u64 x"))
    np.savez("in.npz", x=np.zeros(32, np.uint32))
    yield tmp_path


@pytest.mark.parametrize("name", FLAGS)
def test_options_of_run_reach_the_machine(name: str, cli: Any, folder: Path, machines: list[EmulatorOptions]) -> None:
    flags, expected = FLAGS[name]
    code, _, err = cli("run", "k.ptx", "--in", "in.npz", "--backend", "emulator", *flags)
    assert (code, machines) == (0, [expected]), err


@pytest.mark.parametrize("name", [name for name in FLAGS if name != "memory"])
def test_options_of_debug_reach_the_machine(name: str, cli: Any, folder: Path, machines: list[EmulatorOptions]) -> None:
    flags, expected = FLAGS[name]
    flags = flags if name == "check" else (*flags, "--check", "")
    code, _, err = cli("debug", "k.ptx", "--in", "in.npz", *flags, "-x", "continue")
    assert (code, machines) == (0, [expected]), err


def test_runs_without_a_statement_have_modes_and_seeds(cli: Any, folder: Path, machines: list[EmulatorOptions]) -> None:
    code, out, err = cli("run", "k.ptx", "--in", "in.npz", "--unneeded", "--max-steps", "1000")
    assert code == 0 and "no run needed it" in out, err
    usual = {options for options in machines if not options.without}
    assert {(options.mode, options.seed) for options in usual} == {
        ("early", 0),
        *(("late", seed) for seed in range(21)),
    }
    assert {(options.checks, options.max_steps) for options in machines} == {(emulator.CHECKS, 1000)}
    assert {len(options.without) for options in machines} == {0, 1}


@pytest.mark.parametrize("command", [("run", "--backend", "emulator"), ("debug", "-x", "continue")], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--check", "speed"),
            "--check: some of all, async, divergence, float, init, lanes, narrow, overrun, proxy, quirks, race",
        ),
        (("--max-steps", "0"), "max_steps: has to be a positive integer (got 0)"),
    ],
    ids=["check", "max steps"],
)
def test_a_bad_value_is_one_line(
    command: tuple[str, ...], flags: tuple[str, ...], message: str, cli: Any, folder: Path
) -> None:
    code, out, err = cli(command[0], "k.ptx", "--in", "in.npz", *command[1:], *flags)
    assert (code, out) == (2, "") and message in " ".join(err.split())


def test_help_names_every_check_and_the_default(cli: Any) -> None:
    text = " ".join(cli("run", "--help")[1].split())
    assert {*re.findall(r"\w+", text)} >= emulator.CHECKS | emulator.ON_REQUEST
    words = " ".join(re.findall(r"[\w:,-]+", text))
    assert "lanes: carry, range" in words and "float: nan, infinity, overflow, subnormal" in words
    for command in ("run", "debug"):
        assert f"{emulator.MAX_STEPS // 10**6} million" in " ".join(cli(command, "--help")[1].split())


@pytest.mark.parametrize("command", [("run", "--backend", "emulator"), ("debug", "-x", "continue")], ids=lambda c: c[0])
def test_a_spec_is_solved_once(
    command: tuple[str, ...], cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays are checked, and its sizes, constants and geometry are found, once for the kernel and its launch."""
    q4 = {
        "qweight": np.zeros((1, 8), np.uint32),
        "scale": np.ones((1, 1), np.uint8),
        "offset": np.ones((1, 1), np.uint8),
    }
    np.savez(tmp_path / "in.npz", **q4)
    calls: list[str] = []

    def count(of: Any, name: str) -> None:
        function = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args, **keywords: calls.append(name) or function(*args, **keywords))

    for of, name in ((KernelSpec, "sizes_of"), (KernelSpec, "check_values"), (runtime, "variant_constants")):
        count(of, name)
    code, _, err = cli(command[0], "dequant_lqq", "--in", tmp_path / "in.npz", *command[1:])
    assert code == 0, err
    assert sorted(calls) == ["check_values", "sizes_of", "variant_constants"]


def test_a_kernel_that_no_schedule_changes_has_no_copies_of_its_arrays(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays may be large."""
    monkeypatch.setattr(launching.FileLaunch, "copy_arrays", lambda self: pytest.fail("copied"))
    (folder / "plain.cu").write_text('extern "C" __global__ void plain(int* x) { x[threadIdx.x] = 1; }')
    code, text = cli("run", "plain.cu", "--block", "32", "--arg", "x=i32[32]", "--check", "all")[:2]
    assert code == 0 and "checks clean" in text
