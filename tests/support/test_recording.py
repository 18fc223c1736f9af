"""`--record-tests`: what is written of a run, and of which. A run on several workers is in `test_device.py`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ptxlab.testing import gpu_tests
from tests.support import recording

SOURCE = pytest.Config.ArgsSource


def config(*words: str, args: tuple[str, ...] = (), root: Path = Path(), **options: Any) -> Any:
    """Make the config of a run of `pytest -m gpu`, but for `options` and the paths in `args`."""
    usual = {"keyword": "", "markexpr": "gpu", "maxfail": 0, "lf": False, "deselect": None, "ignore": None}
    return SimpleNamespace(
        option=SimpleNamespace(**{**usual, "ignore_glob": None, **options}),
        args=list(args) or ["tests"],
        args_source=SOURCE.ARGS if args else SOURCE.TESTPATHS,
        getini=lambda name: ["tests"],
        getoption=lambda name: root / "tests.json",
        invocation_params=SimpleNamespace(args=words),
        rootpath=root,
        pluginmanager=SimpleNamespace(register=lambda plugin: None),
    )


@pytest.mark.default_cases("options3--k 'merge or append'", "options2-tests/gpu tests/bench")
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, ""),
        ({"args": ("tests",)}, ""),
        ({"args": ("tests/gpu", "tests/bench")}, "tests/gpu tests/bench"),
        ({"keyword": "merge or append"}, "-k 'merge or append'"),
        ({"markexpr": "gpu and not timing"}, "-m 'gpu and not timing'"),
        ({"markexpr": ""}, "-m 'not gpu and not full'"),
        ({"draw": "4d1718cd/8"}, "--draw 4d1718cd/8"),
        ({"resume": True}, "--resume True"),
        ({"maxfail": 1}, "--maxfail 1"),
        ({"lf": True}, "--last-failed True"),
        ({"args": ("tests/gpu",), "deselect": ["a::b"]}, "tests/gpu --deselect a::b"),
        ({"ignore": ["tests/bench"], "ignore_glob": ["*soak*"]}, "--deselect tests/bench --deselect '*soak*'"),
    ],
)
def test_what_narrows_a_run_down_is_said(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    recorder = recording.Recorder(config(root=tmp_path, **options), tmp_path / "tests.json")
    assert recorder.record().part == part


def test_a_run_without_pytests_cache_is_recorded(tmp_path: Path) -> None:
    of = config("-p", "no:cacheprovider", root=tmp_path)
    del of.option.lf  # an option of that plugin
    assert recording.Recorder(of, tmp_path / "tests.json").record().part == ""


@pytest.mark.parametrize("option", [("--record-tests", "some/where.json"), ("--record-tests=some/where.json",)])
def test_the_command_is_without_the_path_of_the_record(tmp_path: Path, option: tuple[str, ...]) -> None:
    recorder = recording.Recorder(config("-m", "gpu", *option, "-n", "8", root=tmp_path), tmp_path / "tests.json")
    assert recorder.record().command == "pytest -m gpu -n 8"


def report(outcome: Any, when: Any = "call", longrepr: Any = None, test: str = "tests/test_a.py::test_b") -> Any:
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, longrepr, when)


def test_a_test_has_one_outcome_the_worst(tmp_path: Path) -> None:
    recorder = recording.Recorder(config(root=tmp_path), tmp_path / "tests.json")
    for outcome in (
        report("passed", "setup"),
        report("passed"),
        report("failed", "teardown", f"Traceback\n{tmp_path}/tests/x.py: gone"),
        report("passed", "setup", test="tests/test_a.py::test_c"),
        report("passed", test="tests/test_a.py::test_c"),
        report("passed", "teardown", test="tests/test_a.py::test_c"),
        report("skipped", "setup", ["x.py", 3, "Skipped: no torch"], test="tests/test_a.py::test_d"),
    ):
        recorder.pytest_runtest_logreport(outcome)
    record = recorder.record()
    assert record.passed == {"tests/test_a.py": 1}
    assert record.failed == {"tests/test_a.py::test_b": "teardown: tests/x.py: gone"}
    assert record.skipped == {"no torch": ["tests/test_a.py::test_d"]}


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("status", list(pytest.ExitCode))
def test_only_a_run_that_came_to_its_end_is_written(tmp_path: Path, status: pytest.ExitCode) -> None:
    path = tmp_path / "tests.json"
    recorder = recording.Recorder(config(root=tmp_path), path)
    recorder.pytest_sessionfinish(status)
    assert path.exists() == (status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))
    assert recorder.written == (f"recorded in {path}" if path.exists() else NOTHING)
    assert not path.exists() or gpu_tests.load(path).date == recorder.date


NOTHING = "--record-tests: nothing written, the run did not come to its end"


def test_where_nothing_can_be_written_nothing_is_run(tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match=r"--record-tests: .*tests\.json: cannot be written: .* is no folder"):
        recording.pytest_configure(config(root=tmp_path / "nowhere"))


def test_a_worker_writes_nothing(tmp_path: Path) -> None:
    worker = config(root=tmp_path / "nowhere")
    worker.workerinput = {}
    recording.pytest_configure(worker)
