"""The command `init`: write a small project with a kernel, its spec, test, notebook and GitHub workflow."""

import json
import keyword
import os
import tempfile
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import typer

from ptxlab import runtime
from ptxlab.cli.common import AsJson, CommandLineError, console, expects, print_json, print_note
from ptxlab.errors import CompileError, FileError, UnavailableError

PANEL = "Project"

KERNEL = """\
// out[row] = sum of x[row, 0..n): one block of 128 threads per row. Integers, so the order of the sum does not matter.
extern "C" __global__ void __launch_bounds__(128) my_kernel(const int* x, int* out, int n) {
    __shared__ int part[128];
    const int t = threadIdx.x, row = blockIdx.x;

    int sum = 0;
    for (int i = t; i < n; i += 128) sum += x[row * n + i];
    part[t] = sum;
    for (int half = 64; half > 0; half /= 2) {
        __syncthreads();  // without it: a race, which `pytest` reports with this file and line
        if (t < half) part[t] += part[t + half];
    }
    if (t == 0) out[row] = part[0];
}
"""
SPEC = '''\
"""The contract of my_kernel: arguments, launch and reference. `ptxlab verify my_kernel.py` checks it."""

import numpy as np
from ptxlab import Arg, KernelSpec, Launch

SPEC = KernelSpec(
    name="my_kernel",
    summary="sum of each row",
    args=(
        Arg("x", "int32", ("rows", "n")),
        Arg("out", "int32", ("rows",), "out"),
        Arg("n", "int32", role="scalar"),
    ),
    launch=lambda sizes: Launch(grid=(sizes["rows"], 1, 1), block=(128, 1, 1)),
    example=lambda rng, rows, n: {"x": rng.integers(-1000, 1000, (rows, n), dtype=np.int32)},
    pack=lambda logical: logical,
    reference=lambda x: x.sum(axis=1, dtype=np.int32),
    rules=("n >= 1",),
    operations="rows * n",
    example_sizes=({"rows": 1, "n": 1}, {"rows": 3, "n": 130}, {"rows": 4, "n": 4096}),
)
'''
TEST = '''\
"""`pytest` runs the kernel in ptxlab's emulator, without a GPU; `pytest --ptxlab-backend gpu` on one."""

import numpy as np
import pytest


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 130), (5, 1000)])
def test_sums(emulate, rows, n):
    x = np.random.default_rng(n).integers(-1000, 1000, (rows, n), dtype=np.int32)
    out = emulate("my_kernel.cu", grid=rows, block=128, x=x, out=np.zeros(rows, np.int32), n=n)
    np.testing.assert_array_equal(out.out, x.sum(axis=1))
'''
WORKFLOW = """\
name: kernels
on: [push, pull_request]
jobs:
  emulator: # no GPU needed; findings become annotations of the pull request
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: python -m pip install -r requirements.txt
      - run: ptxlab verify my_kernel.py
      - run: python -m pytest
"""
CELLS = (
    "# my_kernel\n\nRun the kernel in the emulator with all checks, first as it is, then with a mistake.",
    """\
import numpy as np
import ptxlab

source = open("my_kernel.cu").read()
x = np.arange(6 * 100, dtype=np.int32).reshape(6, 100)
outcome = ptxlab.load(source)(x, np.zeros(6, np.int32), 100, grid=6, block=128, checks="all", backend="emulator")
print(outcome.outputs["out"], outcome.findings)""",
    "Without the barrier, threads read sums that other threads have not written yet. The check names the line:",
    """\
broken = ptxlab.load(source.replace("__syncthreads();", ""))
outcome = broken(x, np.zeros(6, np.int32), 100, grid=6, block=128, checks="all", backend="emulator")
print(*outcome.findings, sep="\\n")""",
)
NO_REQUIREMENT = (
    "--requirement is needed, because ptxlab is on no package index: "
    "--requirement 'ptxlab[asm] @ git+https://HOST/OWNER/ptxlab', or a wheel's path"
)


def init(
    name: Annotated[str, typer.Argument(help="Name of the kernel, its files and the new folder.")],
    requirement: Annotated[
        str | None,
        typer.Option(help="Line for requirements.txt, or a wheel or checkout. Default: where ptxlab came from."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a project: kernel, spec, test, notebook and a GitHub workflow that passes unchanged."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise expects("init", "a valid C and Python identifier", name)
    folder = Path(name)
    if os.path.exists(folder):  # Path.exists raises OSError for a name that is too long
        raise FileError(f"{folder}: already exists")
    _check_free(name)
    line = requirement or installed_from() or installed_folder()
    if line is None:
        raise CommandLineError(NO_REQUIREMENT)
    if "\n" in line or not line.strip():
        raise expects("--requirement", "one line", repr(line))
    if os.path.isfile(line) or os.path.isfile(os.path.join(line, "pyproject.toml")):
        line = f"ptxlab[asm] @ {Path(line).resolve().as_uri()}"
    elif "@" not in line and "://" not in line and (os.sep in line or line.endswith(".whl")):
        raise expects("--requirement", "a requirement, or a wheel or checkout that is there", line)
    texts = project_files(name, line)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as scratch:
            unfinished_path = Path(scratch) / name
            for path, text in texts.items():
                (unfinished_path / path).parent.mkdir(parents=True, exist_ok=True)
                (unfinished_path / path).write_text(text, encoding="utf-8")
            unfinished_path.rename(folder)
    except OSError as error:
        raise FileError(f"{folder}: cannot be written: {error.strerror or error}") from None
    if as_json:
        return print_json({"folder": str(folder), "files": [*texts], "requirement": line})
    console.print(f"wrote {folder}/: {', '.join(texts)}", soft_wrap=True, highlight=False)
    if "@ file://" in line:
        print_note("requirements.txt names a file or folder of this machine: for CI, put a git URL or a wheel's there")
    console.print(f"Next: cd {name} && python -m pip install -r requirements.txt && python -m pytest", soft_wrap=True)


def _check_free(name: str) -> None:
    """Raise for a name that a Python module has, or CUDA C++: the project's NAME.py or NAME.cu would not work."""
    if find_spec(name) is not None:  # `import copy` would find the project's copy.py
        raise expects("init", "a name that no Python module has", name)
    with suppress(UnavailableError):  # without NVRTC the names of CUDA C++ are not known
        try:
            _ = runtime.load(KERNEL.replace("my_kernel", name)).module
        except CompileError:
            raise expects("init", "a name that CUDA C++ does not use", name) from None


def installed_from() -> str | None:
    """Return the requirement that this ptxlab was installed from, if that was a repository; otherwise None."""
    try:
        record = metadata.distribution("ptxlab").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(record) if record else {}
    if "vcs_info" not in origin:
        return None
    vcs = origin["vcs_info"]
    revision = f"@{vcs['requested_revision']}" if "requested_revision" in vcs else ""
    return f"ptxlab[asm] @ {vcs['vcs']}+{origin['url']}{revision}"


def installed_folder() -> str | None:
    """Return the folder on this machine that ptxlab was installed from, or None; a CI does not have it."""
    try:
        record = metadata.distribution("ptxlab").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = str(json.loads(record).get("url", "")) if record else ""
    folder = Path(url2pathname(urlparse(url).path)) if url.startswith("file://") else None
    return str(folder) if folder and (folder / "pyproject.toml").is_file() else None


def project_files(name: str, requirement: str) -> dict[str, str]:
    """Return the project's files: path -> text."""
    templates = {
        f"{name}.cu": KERNEL,
        f"{name}.py": SPEC,
        f"test_{name}.py": TEST,
        f"{name}.ipynb": _notebook(),
        ".github/workflows/kernels.yml": WORKFLOW,
    }
    return {path: text.replace("my_kernel", name) for path, text in templates.items()} | {
        "requirements.txt": f"{requirement}\npytest>=8\n"
    }


def _notebook() -> str:
    """Build the notebook: text and code cells in turn."""
    cells: list[dict[str, Any]] = []
    for i, text in enumerate(CELLS):
        kind: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []} if i % 2 else {}
        cells.append({"cell_type": "markdown", "id": f"cell{i}", "metadata": {}, "source": text, **kind})
    facts = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": facts, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
