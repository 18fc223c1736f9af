"""A name of a repository, where a model or a checkpoint is expected, is answered with the command that fetches it."""

from pathlib import Path
from typing import Any

import pytest

COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "a", "--backend", "numpy", "--model", "{}"),
    "perplexity": ("perplexity", "{}"),
    "accuracy": ("accuracy", "{}"),
    "quantize": ("quantize", "{}", "--out", "out.safetensors"),
    "quantize --recipe": ("quantize", "{}", "--recipe", "lqq", "--out", "out"),
    "import": ("import", "{}", "--out", "out"),
    "audit": ("audit", "{}"),
    "audit of inputs": ("audit", "{}", "--scheme", "fmpq"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "HuggingFaceTB/SmolLM2-135M",
            "no folder here; fetch it by `hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M`, "
            "then pass SmolLM2-135M",
        ),
        (
            "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
            "no file here; fetch one by `hf download Qwen/Qwen2.5-0.5B-Instruct-GGUF --include '*[qQ]8_0*.gguf' "
            "--local-dir Qwen2.5-0.5B-Instruct-GGUF`, then pass Qwen2.5-0.5B-Instruct-GGUF/FILE.gguf",
        ),
    ],
    ids=["folder", "gguf"],
)
def test_a_repositorys_name(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(*(word.format(name) for word in COMMANDS[command])) == (2, "", f"error: {name}: {message}\n")


@pytest.mark.parametrize("name", ["here/nosuch", "./nosuch", "/nosuch/model", "a/b/c", "org/model.gguf", "nosuch"])
def test_a_path_that_is_not_there_is_no_model(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = f"error: {name}: no model: a folder, a .gguf file, or one of smollm2\n"
    assert cli("perplexity", name) == (2, "", message)
