"""`ptxlab init`: the project that it writes works as it stands; `verify` and `bench` of a file with a spec."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ptxlab.cli import init
from ptxlab.io.files import CACHE_VARIABLE
from tests.support import plugin

pytest_plugins = "pytester"
REQUIREMENT = "ptxlab[asm] @ git+https://example.org/ptxlab"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of `ptxlab init sums`, and make their folder the current one."""
    for path, text in init.project_files("sums", REQUIREMENT).items():
        (tmp_path / "sums" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums" / path).write_text(text)
    monkeypatch.chdir(tmp_path / "sums")
    return tmp_path / "sums"


@pytest.mark.full
def test_what_its_workflow_runs_passes(cli: Any, pytester: pytest.Pytester, monkeypatch: Any) -> None:
    code, out, _ = cli("init", "sums", "--requirement", REQUIREMENT)
    assert code == 0 and "Next: cd sums && " in out
    monkeypatch.chdir(project := pytester.path / "sums")
    assert {str(path.relative_to(project)) for path in project.rglob("*.*")} >= {*init.project_files("sums", "")}
    assert (project / "requirements.txt").read_text() == f"{REQUIREMENT}\npytest>=8\n"
    commands = re.findall(r"- run: (.*)", (project / ".github/workflows/kernels.yml").read_text())
    assert commands == ["python -m pip install -r requirements.txt", "ptxlab verify sums.py", "python -m pytest"]
    code, out, err = cli(*commands[1].split()[1:])
    assert code == 0 and "3 passed, 0 failed" in out, out + err
    monkeypatch.chdir(pytester.path)
    pytester.runpytest_inprocess(project, *plugin.OPTIONS).assert_outcomes(passed=3)


def test_its_notebook_runs_and_shows_the_mistake(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((project / "sums.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(cell["source"], names)
    out = capsys.readouterr().out
    assert "[ 4950 14950 24950 34950 44950 54950] ()" in out and "race: <text>:" in out


@pytest.mark.full
def test_one_kernel_of_a_file_at_other_sizes(project: Path, cli: Any) -> None:
    code, out, _ = cli("verify", "sums.py:sums", "--shape", "rows=2,n=77", "--json")
    assert code == 0 and [verdict["kernel"] for verdict in json.loads(out)] == ["sums.cu"] * 4
    (project / "sums.py").write_text(
        (project / "sums.py").read_text().replace("sum(axis=1, dtype=np.int32)", "max(axis=1)")
    )
    code, out, _ = cli("verify", "sums.py", "--json")
    (_, wrong, _) = json.loads(out)
    assert code == 1 and wrong["detail"].startswith("3 of 3 elements differ from the reference")


@pytest.mark.full_cases("bench sums.py-no GPU backend here")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("init sums", "sums: already exists"),
        ("init 3x", "init expects a valid C and Python identifier, got 3x"),
        (f"init {'x' * 300}", ": cannot be written: File name too long"),
        ("init class", "init expects a valid C and Python identifier, got class"),
        ("init copy", "init expects a name that no Python module has, got copy"),
        ("init numpy", "init expects a name that no Python module has, got numpy"),
        ("init float", "init expects a name that CUDA C++ does not use, got float"),
        ("init exp", "init expects a name that CUDA C++ does not use, got exp"),
        ("verify nosuch.py", "nosuch.py: cannot be read: No such file"),
        ("verify sums.py:other", "kernel: one of sums, which sums.py has a spec for (got sums.py:other)"),
        ("verify empty.py", "empty.py: a KernelSpec at its top level (got none)"),
        ("verify broken.py", "broken.py: cannot be imported: ZeroDivisionError: division by zero"),
        ("verify alone.py", "alone.py: has a spec of sums, and beside it there is no sums.ptx or .cu"),
        ("bench nosuch.py", "nosuch.py: cannot be read: No such file"),
        ("bench sums.py", "no GPU backend here"),
    ],
)
def test_bad_input(command: str, message: str, project: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(init, "installed_from", lambda: REQUIREMENT)
    (project / "empty.py").write_text("")
    (project / "broken.py").write_text("1 / 0\n")
    (project / "apart").mkdir()
    (project / "apart" / "alone.py").write_text((project / "sums.py").read_text())
    if command == "init sums":
        monkeypatch.chdir(project.parent)
    if "alone" in command:
        monkeypatch.chdir("apart")
    code, _, err = cli(*command.split())
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_wheel_is_named_by_its_whole_path(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ptxlab-1.whl").touch()
    code, out, _ = cli("init", "sums", "--requirement", "ptxlab-1.whl", "--json")
    line = f"ptxlab[asm] @ {tmp_path.as_uri()}/ptxlab-1.whl"
    assert code == 0 and json.loads(out) == {
        "folder": "sums",
        "files": [*init.project_files("sums", "")],
        "requirement": line,
    }
    assert Path("sums/requirements.txt").read_text().startswith(f"{line}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ptxlab-1.whl", "sums"]


def test_a_path_that_is_not_there_is_no_requirement(cli: Any, pytester: Any) -> None:
    code, _, err = cli("init", "sums", "--requirement", "no/such/place")
    assert code == 2 and not Path("sums").exists()
    assert err == (
        "error: --requirement expects a requirement, or a wheel or checkout that is there, got no/such/place\n"
    )


def test_without_a_repository_the_requirement_has_to_be_given(
    cli: Any, pytester: Any, monkeypatch: Any, tmp_path_factory: Any
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))  # of compilers; else here at home
    monkeypatch.setattr(init, "installed_from", lambda: None)
    monkeypatch.setattr(init, "installed_folder", lambda: None)
    code, _, err = cli("init", "sums")
    assert code == 2 and err.startswith("error: --requirement is needed, because ptxlab is on no package index")
    assert not [*pytester.path.iterdir()]


def test_a_folder_is_named_with_a_warning_that_ci_lacks_it(
    cli: Any, pytester: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The warning comes after `pip install -e .` of a clone, README's own install."""
    (tmp_path / "pyproject.toml").touch()
    record = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(init.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda name: record))
    code, _, err = cli("init", "sums")
    line = Path("sums/requirements.txt").read_text().splitlines()[0]
    assert code == 0 and line == f"ptxlab[asm] @ {tmp_path.resolve().as_uri()}"
    assert "for CI, put a git URL" in " ".join(err.split())
    (tmp_path / "pyproject.toml").unlink()
    assert init.installed_folder() is None


def test_a_git_url_is_found_where_pip_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        record: str | None = json.dumps({"url": "https://example.org/p.git", "vcs_info": {"vcs": "git"}})

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self.record

    monkeypatch.setattr(init.metadata, "distribution", lambda name: Installed())
    assert init.installed_from() == "ptxlab[asm] @ git+https://example.org/p.git"
    vcs = {"vcs": "git", "requested_revision": "v2", "commit_id": "1f" * 20}
    monkeypatch.setattr(Installed, "record", json.dumps({"url": "https://example.org/p.git", "vcs_info": vcs}))
    assert init.installed_from() == "ptxlab[asm] @ git+https://example.org/p.git@v2"
    for record in (None, json.dumps({"url": "file:///somewhere", "dir_info": {}})):
        monkeypatch.setattr(Installed, "record", record)
        assert init.installed_from() is None


@pytest.mark.gpu
def test_bench_of_a_file(project: Path, cli: Any) -> None:
    code, out, err = cli("bench", "sums.py", "--out", "record.json", "--json")
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["kernel"] == "sums" and row["sizes"] == {"rows": 4, "n": 4096} and "equal" in row["checked"]
