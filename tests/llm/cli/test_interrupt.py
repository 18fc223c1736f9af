"""Ctrl-C in a long run: one line that says what is kept, exit code 130, and nothing half-done."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_files import write_model
from tests.support.small_models import write_folder

SIZES = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
# The command line, which says each step at once and waits behind one of them.
SLOWED = """
import sys, time
from ptxlab.cli import common, main
common.LINE_SECONDS, step, title, number = 0, common.Progress.__call__, sys.argv.pop(1), int(sys.argv.pop(1))
def slowed(progress, *how):
    step(progress, *how)
    if (progress.title, progress.done) == (title, number):
        print("waits", file=sys.stderr, flush=True)
        time.sleep(60)
common.Progress.__call__ = slowed
common.Progress.report_while_running = lambda progress, ended: None  # steps alone are said
main()
"""


@pytest.fixture(autouse=True)
def default_interrupts() -> Iterator[None]:
    """Have commands take Ctrl-C also where a shell started the tests behind `&`, so that all ignore it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupt(title: str, step: int, *arguments: object) -> str:
    """Interrupt a command behind a step of a run; return what it says."""
    command = [sys.executable, "-c", SLOWED, title, str(step), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = list(iter(process.stderr.readline, "waits\n"))
        assert lines[-1].startswith(f"{title}: {step} ")
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
    assert process.returncode == 130 and message.count("\n") == 1
    return message.removesuffix("\n")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("the cat sat on the mat, and the dog on the cat. " * 20)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.full
def test_quantize_keeps_its_layers_and_goes_on(cli: Any, tmp_path: Path, text: Path) -> None:
    model, out, whole = write_folder(tmp_path / "model", "smollm", **SIZES), tmp_path / "out", tmp_path / "whole"
    options = ["--recipe", "lqq", "--text", text, "--samples", 4, "--length", 32, "--backend", "numpy"]
    message = interrupt("quantize lqq", 1, "quantize", model, "--out", out, *options)
    remark = "finished layers are kept: the same command goes on behind them"
    assert message == f"interrupted: quantize lqq: 1 of 2; {remark}" and not out.exists()
    for folder in (out, whole):
        assert cli("quantize", model, "--out", folder, *options)[0] == 0
    assert contents(out) == contents(whole)


@pytest.mark.full
def test_perplexity_keeps_nothing(tmp_path: Path, text: Path) -> None:
    model = write_folder(tmp_path / "model", "smollm")
    options = ["--text", text, "--length", 16, "--windows", 2, "--backend", "numpy"]
    message = interrupt("perplexity", 8, "perplexity", model, model, *options)
    assert message == "interrupted: perplexity: 8 of 12; nothing is kept"


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "source"), [("import", "."), ("import", "model.safetensors"), ("quantize", "model.safetensors")]
)
def test_what_writes_a_file_or_folder_leaves_nothing(tmp_path: Path, command: str, source: str) -> None:
    folder, place = tmp_path / "model", tmp_path / "here"
    write_model(folder, "gptq") if command == "import" else write_folder(folder, "smollm", **SIZES)
    place.mkdir()
    message = interrupt(command, 1, command, folder / source, "--out", place / "out")
    assert re.fullmatch(rf"interrupted: {command}: 1 of \d+; nothing is kept", message) and [*place.iterdir()] == []


@pytest.mark.full
def test_a_long_prompt_is_a_run_of_its_own(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "smollm", **SIZES, max_position_embeddings=2048)
    message = interrupt("prompt", 2, "generate", "a" * 600, "--model", model, "--backend", "numpy", "--tokens", 4)
    assert message == "interrupted: prompt: 2 of 3; nothing is kept"


@pytest.mark.full
def test_a_text_that_is_interrupted_says_how_far_it_came(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "smollm", **SIZES, max_position_embeddings=8192, eos_token_id=None)
    command = [sys.executable, "-m", "ptxlab", "generate", "aaa", "--model", model, "--backend", "numpy"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, command), "--tokens", "8000"], **pipes) as process:
        assert process.stdout is not None and process.stderr is not None and process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        message = process.stderr.read().splitlines()[-1]
    assert process.returncode == 130
    assert re.fullmatch(r"interrupted: generate: \d+ of 8000 tokens; what is printed is kept", message)


@pytest.mark.full
def test_a_conversation_ends_at_ctrl_c_while_it_waits_for_a_message(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "smollm", **SIZES, max_position_embeddings=512)
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    command = [sys.executable, "-m", "ptxlab", "generate", "Who?", "--chat", "--model", model, "--backend", "numpy"]
    read, write = os.pipe()  # nobody writes: it waits
    with os.fdopen(read) as waiting, os.fdopen(write, "w"), subprocess.Popen(
        [*map(str, command), "--tokens", "2"],
        stdin=waiting, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while "tokens/s" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err.strip() == ""
