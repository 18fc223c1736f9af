"""What another package registers by entry points is found as what the project's own rooms bring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptxlab import registry, sources
from ptxlab.errors import ArgumentError, FileError

KERNEL = """\
.version 7.0
.target sm_80
.address_size 64
.visible .entry negate_words(.param .u64 x, .param .u64 out) {
    .reg .u64 %p<3>; .reg .u32 %v<2>;
    ld.param.u64 %p0, [x]; ld.param.u64 %p1, [out];
    mov.u32 %v0, %tid.x; mul.wide.u32 %p2, %v0, 4;
    add.u64 %p0, %p0, %p2; add.u64 %p1, %p1, %p2;
    ld.global.u32 %v0, [%p0]; not.b32 %v1, %v0; st.global.u32 [%p1], %v1; ret;
}
"""
PACKAGE = '''\
"""A package with a kernel and a command."""

from pathlib import Path

import numpy as np

from ptxlab.spec import Arg, KernelSpec, Launch

SOURCES = Path(__file__).parent / "kernels"
SPECS = (
    KernelSpec(
        name="negate_words",
        summary="Every word's complement.",
        args=(Arg("x", "uint32", ("S",)), Arg("out", "uint32", ("S",), "out")),
        rules=("S <= 1024",),
        launch=lambda sizes: Launch((1, 1, 1), (sizes["S"], 1, 1)),
        example=lambda rng, S: {"x": rng.integers(0, 1 << 32, S, dtype=np.uint32)},
        example_sizes=({"S": 64},),
        pack=lambda logical: logical,
        reference=lambda x: ~x,
    ),
)


def greet(name: str) -> None:
    """Greet somebody."""
    print(f"hello {name}")
'''
ENTRY_POINTS = """\
[ptxlab.kernels]
negation = negation

[ptxlab.commands]
greet = negation:greet
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make an environment in which the package is installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "negation" / "kernels").mkdir(parents=True)
    (folder / "negation" / "__init__.py").write_text(PACKAGE)
    (folder / "negation" / "kernels" / "negate_words.ptx").write_text(KERNEL)
    (folder / "negation-1.0.dist-info").mkdir()
    (folder / "negation-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: negation\nVersion: 1.0\n")
    (folder / "negation-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    paths = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def ptxlab(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ptxlab", *words], capture_output=True, text=True, env=environment)


def test_a_kernel_of_another_package_is_verified_by_name(environment: dict[str, str]) -> None:
    done = ptxlab(environment, "verify", "negate_words", "--backend", "emulator")
    assert done.returncode == 0 and "negate_words.ptx" in done.stdout and "equal to the reference" in done.stdout
    assert "negate_words" in ptxlab(environment, "list", "negation").stdout, "its family"


@pytest.mark.full
def test_a_command_of_another_package_is_one_of_ptxlab(environment: dict[str, str]) -> None:
    assert ptxlab(environment, "greet", "you").stdout == "hello you\n"
    listed = ptxlab(environment, "--help").stdout
    assert "Greet somebody." in listed and "Other commands" in listed


def test_two_packages_cannot_have_one_name(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text("[ptxlab.commands]\nrun = other:run\n")
    both = {**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}
    done = ptxlab(both, "--help")
    assert done.returncode == 2 and "a name that nobody else registers (got run)" in " ".join(done.stderr.split())


@pytest.mark.full
def test_an_entry_point_that_leads_nowhere_is_one_line_where_it_is_asked_for(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "stale-1.0.dist-info").mkdir()
    (tmp_path / "stale-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stale\nVersion: 1.0\n")
    entry_points = tmp_path / "stale-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[ptxlab.commands]\nwave = nothing.here:wave\n")
    stale = {**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}
    assert ptxlab(stale, "list", "dequant_lqq").returncode == 0 and " wave " in ptxlab(stale, "--help").stdout
    for words in (["wave"], ["list"]):
        done = ptxlab(stale, *words)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) <= 2 and "Traceback" not in done.stderr
        assert "stale: entry point" in done.stderr
        entry_points.write_text("[ptxlab.kernels]\nwaves = nothing.here\n")


@pytest.mark.parametrize("kind", registry._ROOMS)
def test_everything_that_the_rooms_bring_is_there(kind: str) -> None:
    assert all(loaded is not None for _, loaded in registry.load_all(kind)) and registry.entries(kind)


def test_sources_of_a_family_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="the folder of the family mine is not there"):
        sources.add_folder(tmp_path / "none", "mine")
    (tmp_path / "dequant_lqq.ptx").write_text(KERNEL)
    with pytest.raises(ArgumentError, match="a name that no kernel of dequant has"):
        sources.add_folder(tmp_path, "mine")
