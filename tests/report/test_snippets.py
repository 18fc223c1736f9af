"""Every code block of the README and the guide runs as written, and prints what the page shows.

A page's blocks run in order, in one folder and one namespace; one that begins with a comment of a file's name is that
file. Shown output is compared word by word; `...` in it stands for anything. Of shell commands, those of ptxlab run,
and `pytest` with the page's files. A comment says why one is only parsed: `needs a GPU` (it runs under
`pytest -m gpu`), `takes minutes`, or `takes a file` that the page does not have.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import ptxlab
from ptxlab.cli.app import build_app
from ptxlab.cli.common import WIDTH, console
from tests.support import plugin
from tests.support.markdown_pages import GUIDE, PAGES, ROOT, Block, blocks, prose

pytest_plugins = "pytester"

GPU = "needs a GPU"
INSTALLS = "takes an installation"
NOT_RUN = (GPU, INSTALLS, "takes minutes", "takes a file")
SOURCES = ("cuda", "ptx")
PYTHON = ("python", "ipython")
SHELL = ("sh", "console")
LANGUAGES = {*SOURCES, *PYTHON, *SHELL, "text", ""}
OTHERS = {
    "python",
    "pytest",
    "ruff",
    "mypy",
    "bash",
    "source",
    "pre-commit",
    "jupyter",
    "vllm",
}  # CI runs them, or nothing here can


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(block: Block) -> Iterator[tuple[str, str, str]]:
    """Yield command, comment and shown output of each line of a shell block.

    Only `console` shows output.
    """
    text = re.sub(r"\\\n\s*", " ", block.text)  # lines that go on
    prompts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:] if block.language == "console" else None
    for part in prompts if prompts is not None else text.splitlines():
        line, _, shown = part.partition("\n")
        line, _, comment = line.partition(" #")
        *silent, last = line.split(" && ")
        if any(command.startswith("python -m pip") for command in silent):
            comment = INSTALLS  # into another environment than this one
        yield from ((command.strip(), comment, "") for command in silent)
        yield last.strip(), comment, shown


def assert_shown(shown: str, printed: str, place: str) -> None:
    """Assert that shown output equals the printed words, without the rules of tables, with `...` for anything."""
    shown, printed = (text.replace("─", "") for text in (shown, printed))
    shown = re.sub(r"^\.\.\. and \d+ more like it.*$", "...", shown, flags=re.MULTILINE)
    pattern = ".*?".join(re.escape(" ".join(part.split())) for part in shown.split("..."))
    pattern = re.sub(r"(\\ )*\.\*\?(\\ )*", ".*?", pattern)
    words = " ".join(printed.split())
    assert re.fullmatch(pattern, words), f"{place} shows\n{shown}\nbut printed\n{printed}"


def parse(command: str) -> None:
    """Assert that the command and its options exist."""
    name, *arguments = shlex.split(command)[1:]
    command_by_name = typer.main.get_command(build_app(None)).commands  # type: ignore[attr-defined]
    assert name in command_by_name, f"{command}: no such command"
    command_by_name[name].make_context(name, arguments)


class Page:
    """State of a page that is run: its folder, its names, the output of the last Python block."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, folder: Path, run: Any) -> None:
        self.pytester = pytester
        self.monkeypatch = monkeypatch
        self.cli = run
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""
        self.folder = folder
        monkeypatch.chdir(folder)
        monkeypatch.setattr(console, "width", WIDTH)

    def run(self, block: Block, place: str, *, gpu: bool) -> None:
        first = block.text.partition("\n")[0]
        if named := re.fullmatch(r"(?://|#) (\w+\.(?:cu|ptx|py))", first):
            Path(named[1]).write_text(block.text)
        elif block.language in PYTHON and (gpu or GPU not in first):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                (self.cell if block.language == "ipython" else self.python)(block.text, place)
            self.printed = printed.getvalue()
        elif block.language == "text":
            assert_shown(block.text, self.printed, place)
        elif block.language in SHELL:
            for command, comment, shown in commands(block):
                self.shell(command, comment, shown, place, gpu=gpu)

    def python(self, text: str, place: str) -> None:
        exec(compile(text, place, "exec"), self.names)

    def cell(self, text: str, place: str) -> None:
        """Run a notebook cell, with `%load_ext ptxlab` done."""
        ipython = pytest.importorskip("IPython.core.interactiveshell", reason=f"{place} needs IPython")
        shell = ipython.InteractiveShell.instance()
        ptxlab.load_ipython_extension(shell)
        shell.run_cell(text).raise_error()

    def shell(self, command: str, comment: str, shown: str, place: str, *, gpu: bool) -> None:
        program, *words = shlex.split(command)
        if program == "cd":
            shutil.copytree(ROOT / words[0], self.folder / words[0])
            self.monkeypatch.chdir(self.folder / words[0])
        elif program == "python" and words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        elif program == "ptxlab" and (not any(why in comment for why in NOT_RUN) or (gpu and comment.strip() == GPU)):
            status, out, err = self.cli(*words)
            assert status == (1 if "finding" in shown or "refuted" in shown else 0), f"{place}: {command}\n{out}{err}"
            if shown:
                assert_shown(shown, out + err, place)
        elif program == "ptxlab":
            parse(command)
        elif program == "pytest" and any(Path(word).is_file() for word in words):
            self.pytest(words, shown, place)
        else:
            assert program in OTHERS, f"{place}: {command}: neither run nor known"

    def pytest(self, words: list[str], shown: str, place: str) -> None:
        """Run pytest within this test run, and compare its output with the shown one."""
        options = ["-c", os.devnull, "--rootdir=.", "-p", "no:cacheprovider", "--disable-warnings"]
        with contextlib.redirect_stdout(io.StringIO()):  # which it echoes
            outcome = self.pytester.runpytest_inprocess(*options, *plugin.OPTIONS, *words)
        printed = "\n".join(outcome.outlines)
        assert outcome.ret == (1 if "failed" in shown else 0), f"{place}: {printed}"
        if shown:
            assert_shown(shown, printed, place)


@pytest.fixture
def run_page(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Any) -> Any:
    def run(page: Path, *, gpu: bool) -> None:
        running = Page(pytester, monkeypatch, tmp_path, cli)
        for block in blocks(page):
            running.run(block, f"{ids(page)}:{block.line}", gpu=gpu)

    return run


@pytest.mark.full_cases(
    "*/gpus.md",
    "*/fence_bugs.md",
    "*/checks.md",
    "*/check_triton.md",
    "*/dequantisation.md",
    "*/profiling.md",
    "*/layer.md",
    "*/api.md",
    "*/proofs.md",
    "*/pytorch.md",
    "*/w4a4.md",
    "*/kernels_gemm.md",
    "*/decode.md",
)
@pytest.mark.parametrize("page", [page for page in GUIDE if blocks(page)], ids=ids)
def test_blocks_run_as_written(page: Path, monkeypatch: pytest.MonkeyPatch, run_page: Any) -> None:
    for library, name in (("triton", "Triton"), ("torch", "PyTorch"), ("transformers", "transformers")):
        if any(re.search(rf"^(?:import|from) {library}\b", block.text, re.MULTILINE) for block in blocks(page)):
            pytest.importorskip(library, reason=f"{name} is not installed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_page(page, gpu=False)


@pytest.mark.long(50)
@pytest.mark.gpu
@pytest.mark.parametrize("page", [page for page in GUIDE if any(GPU in block.text for block in blocks(page))], ids=ids)
def test_blocks_run_on_a_gpu(page: Path, run_page: Any) -> None:
    run_page(page, gpu=True)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_fence_names_its_language(page: Path) -> None:
    """Apart from drawings: what runs is not hidden in a fence without one."""
    for block in blocks(page):
        assert block.language in LANGUAGES
        assert block.language or not re.search(
            r"^(?:\$ )?(?:ptxlab|python|pytest|import|from)\b", block.text, re.MULTILINE
        )


def test_commands_in_running_text_exist() -> None:
    """`ptxlab NAME ... --option`, in the prose of every page, by name and options."""
    command_by_name = typer.main.get_command(build_app(None)).commands  # type: ignore[attr-defined]
    for page in PAGES:
        for span in re.findall(r"`ptxlab ([a-z][^`]*)`", prose(page)):
            name, *words = span.split()
            assert name in command_by_name, f"{ids(page)}: ptxlab {span}"
            options = {option for of in command_by_name[name].params for option in (*of.opts, *of.secondary_opts)}
            assert {word for word in words if re.match("--?[a-zA-Z]", word)} <= options, f"{ids(page)}: ptxlab {span}"


def test_the_kernel_on_the_readme_is_the_file_that_it_names() -> None:
    (shown,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "cuda")
    assert shown in (ROOT / "tests" / "outside" / "scale.cu").read_text()


def test_shown_output_is_compared() -> None:
    assert_shown("a ...\n c", "a b\n  c\n", "here")
    with pytest.raises(AssertionError):
        assert_shown("a ... c", "a b d", "here")
