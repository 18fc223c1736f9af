"""`ptxlab --help` waits for no library, and an interrupt ends any command quietly."""

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

# They take tenths of a second each to import, or seconds.
HEAVY = (
    "numpy",
    "matplotlib",
    "PIL",
    "cupy",
    "cuda",
    "torch",
    "transformers",
    "z3",
    "scipy",
    "pandas",
    "IPython",
    "hypothesis",
)
OWN = ("ptxlab.emulator", "ptxlab.gpu", "ptxlab.spec", "ptxlab.runtime", "ptxlab.toolchain", "ptxlab.public")
LOADED = """
import sys
from ptxlab.cli import main
sys.argv = ["ptxlab", *sys.argv[1:]]
try:
    main()
finally:
    print("LOADED", *sorted(sys.modules))
"""


@pytest.mark.parametrize("command", ["prove", "run", "import", "cost"])
def test_help_is_shown_as_it_is_written(cli: Any, command: str) -> None:
    shown = cli(command, "--help")[1]
    assert "<bool>" not in shown and "\\[" not in shown
    assert command != "prove" or "out.u8[i]" in shown


@pytest.mark.parametrize("words", [["--help"], [], ["--version"], ["nosuch"]], ids=" ".join)
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True)
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert "ptxlab.registry" in loaded
    assert [name for name in loaded if name.split(".")[0] in HEAVY or name in OWN] == []


@pytest.mark.full
def test_help_lists_every_command_with_its_first_line() -> None:
    done = subprocess.run([sys.executable, "-m", "ptxlab", "--help"], capture_output=True, text=True)
    output = " ".join(done.stdout.replace("│", " ").split())
    for panel in ("Run and check", "Measure", "Weights", "Project"):
        assert f"{panel} " in output
    for command, line in (
        ("run", "Run a kernel, the project's or your own file, on given arrays"),
        ("cost", "Predict a GEMM's time in each scheme (LiquidGEMM's model)"),
        ("generate", "Continue a text with W4A8 weights and a 4-bit or 8-bit KV cache"),
    ):
        assert f" {command} {line}" in output


def test_a_group_has_its_subcommand() -> None:
    done = subprocess.run([sys.executable, "-m", "ptxlab", "cost", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "schedule" in done.stdout and "--shape" in done.stdout


TELLS_ITS_FIRST_IMPORT = """
import sys
from ptxlab.cli import main

class FirstImport:
    def find_spec(self, *_):
        sys.meta_path.remove(self)
        print("begun", flush=True)

sys.argv = ["ptxlab", "list"]
sys.meta_path.insert(0, FirstImport())
main()
"""


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_an_interrupt_while_modules_are_imported_prints_nothing(seconds: float) -> None:
    """The interrupt may come at any time once the command has begun to import."""
    with subprocess.Popen(
        [sys.executable, "-c", TELLS_ITS_FIRST_IMPORT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert err == "" and process.returncode in (0, 130)
