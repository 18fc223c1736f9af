"""The record of the GPU tests: digests of what reaches the compiler, and what is said to have changed since."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxlab import sources
from ptxlab.errors import FileError
from ptxlab.testing import gpu_tests

KERNEL = """// Measured: 12 us
#include "outer.cuh"
extern "C" __global__ void add(int* x) {
    x[0] = outer(x[0]);  /* in
    place */

}
"""
FILES = {
    "ptx/copy/copy.ptx": ".version 8.0 // lowest\n.target sm_75\n",
    "cuda_src/add/add.cu": KERNEL,
    "cuda_src/add/alone.cu": '// #include "outer.cuh"\nextern "C" __global__ void alone() {}\n',
    "cuda_src/include/outer.cuh": '#include "inner.cuh"\n__device__ int outer(int x) { return inner(x); }\n',
    "cuda_src/include/inner.cuh": "__device__ int inner(int x) { return x + 1; }\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a checkout of five sources."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "notebooks" / "results" / "h200").mkdir(parents=True)
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "ptxlab")
    return tmp_path


def record(**changes: Any) -> gpu_tests.GpuTests:
    nothing: dict[str, Any] = {"passed": {"tests/test_a.py": 3}, "failed": {}, "skipped": {}, "versions": {}}
    return gpu_tests.GpuTests(
        **{
            "command": "pytest -m gpu",
            "part": "",
            "device": {"name": "NVIDIA H200", "slug": "h200", "driver": "580"},
            "commit": "0123456789abcdef",
            "date": "2026-11-22T16:00:00+00:00",
            "seconds": 321.0,
            "sources": gpu_tests.digests(),
            **nothing,
            **changes,
        }
    )


def write(tree: Path, of: gpu_tests.GpuTests) -> Path:
    path = tree / "notebooks" / "results" / "h200" / gpu_tests.FILE
    path.write_text(json.dumps(of.to_json()))
    return path


def edit(tree: Path, name: str, old: str, new: str) -> None:
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a // b\n\n\nc", "a\nc"),
        ("a /* b\nc */ d", "a d"),
        ("// only\n/* this */", ""),
        ("\ta   b\n", "a b"),
        ('asm("ld; // @lanes d:u8x4"); // x', 'asm("ld; // @lanes d:u8x4");'),
        (r'"\"/*" a // "b"', r'"\"/*" a'),
        ("x = '\"'; // y", "x = '\"';"),
        ("a / b // c'd\ne'f", "a / b\ne'f"),
    ],
)
def test_code_is_what_reaches_the_compiler(text: str, code: str) -> None:
    assert gpu_tests.code_of(text) == code


def test_every_source_of_the_project_has_a_digest() -> None:
    digests = gpu_tests.digests()
    files = [source.path for name in sources.names() for source in sources.sources_of_kernel(name)]
    headers = [str(path) for path in sources.include_dir().glob("*.cuh")]
    root = sources.ptx_dir().parent
    assert set(digests) == {Path(path).relative_to(root).as_posix() for path in files + headers}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("name", FILES)
def test_comments_and_blank_lines_change_no_digest(tree: Path, name: str) -> None:
    digests = gpu_tests.digests()
    edit(tree, name, "\n", "  // other words\n\n")
    assert gpu_tests.digests() == digests


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("ptx/copy/copy.ptx", "sm_75", "sm_80", ["ptx/copy/copy.ptx"]),
        ("cuda_src/add/add.cu", "x[0] = outer", "x[1] = outer", ["cuda_src/add/add.cu"]),
        ("cuda_src/include/outer.cuh", "inner(x);", "inner(2);", ["cuda_src/add/add.cu", "cuda_src/include/outer.cuh"]),
        (
            "cuda_src/include/inner.cuh",
            "x + 1",
            "x + 2",
            ["cuda_src/add/add.cu", "cuda_src/include/inner.cuh", "cuda_src/include/outer.cuh"],
        ),
    ],
)
def test_code_changes_the_digest_of_all_that_includes_it(
    tree: Path, name: str, old: str, new: str, changed: list[str]
) -> None:
    old_digests = gpu_tests.digests()
    edit(tree, name, old, new)
    new_digests = gpu_tests.digests()
    assert sorted(path for path in new_digests if new_digests[path] != old_digests[path]) == changed


def test_kernels_that_changed_since_are_named_in_a_line(tree: Path) -> None:
    assert gpu_tests.warnings() == [], "without a record"
    write(tree, record())
    assert gpu_tests.warnings() == [], "nothing changed"
    edit(tree, "cuda_src/include/inner.cuh", "x + 1", "x + 2")
    (tree / "ptx" / "copy" / "other.ptx").write_text(".version 8.0\n.target sm_75\n")
    since = "changed since the GPU tests of 0123456789 (2026-11-22): "
    assert gpu_tests.warnings() == [f"{since}other.ptx, add.cu"]
    write(tree, replace(record(), commit="0123456789abcdef+", part="tests/gpu", sources={}))
    since = "changed since the GPU tests of 0123456789+ (2026-11-22, tests/gpu alone): "
    assert gpu_tests.warnings() == [f"{since}copy.ptx, other.ptx, add.cu, alone.cu"]


def test_failures_of_the_recorded_run_are_counted(tree: Path) -> None:
    write(tree, record(failed={"tests/test_a.py::test_one": "AssertionError", "tests/test_b.py::test_two": "no"}))
    assert gpu_tests.warnings() == ["2 failed in the GPU tests of 0123456789 (2026-11-22)"]


def test_a_line_names_eight_kernels_at_most(tree: Path) -> None:
    write(tree, record())
    for i in range(10):
        (tree / "ptx" / "copy" / f"k{i}.ptx").write_text(f".version {i}\n")
    (line,) = gpu_tests.warnings()
    assert line.endswith(": k0.ptx, k1.ptx, k2.ptx, k3.ptx, k4.ptx, k5.ptx, k6.ptx, k7.ptx, and 2 more")


def test_a_record_is_read_as_it_was_written(tree: Path) -> None:
    assert gpu_tests.load(write(tree, record())) == record()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"schema": 0}', "not a record of GPU tests of schema 1"),
        ('{"schema": 1}', "not a record of GPU tests: "),
    ],
)
def test_a_file_that_is_no_record_is_named(tree: Path, text: str, message: str) -> None:
    path = write(tree, record())
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        gpu_tests.load(path)
    (line,) = gpu_tests.warnings()
    assert line.startswith(str(path)) and message in line


@pytest.mark.parametrize(("field", "content"), [("sources", None), ("commit", 7), ("date", ["2026"])])
def test_a_record_with_a_field_of_another_kind_is_named(tree: Path, field: str, content: object) -> None:
    path = write(tree, record())
    path.write_text(json.dumps({**json.loads(path.read_text()), field: content}))
    (line,) = gpu_tests.warnings()
    assert line.startswith(f"{path}: not a record of GPU tests: {field} has to be a ")


def test_in_a_wheel_nothing_is_said(tree: Path) -> None:
    edit(tree, "ptx/copy/copy.ptx", "sm_75", "sm_80")
    write(tree, replace(record(), sources={}))
    assert len(gpu_tests.warnings()) == 1
    (tree / "ptxlab").mkdir()
    (tree / "ptxlab" / "_sources").mkdir()
    (tree / "notebooks").rename(tree / "ptxlab" / "_sources" / "notebooks")
    assert not sources.in_checkout() and gpu_tests.warnings() == []


LINE = "changed since the GPU tests of 0123456789 (2026-11-22): add.cu"


def test_the_report_says_so_and_fails_no_more_than_before(
    report: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = report("__main__").main
    monkeypatch.setattr("report.sections.update", lambda write: [])
    monkeypatch.setattr(gpu_tests, "warnings", lambda: [LINE])
    monkeypatch.setattr("report.__main__.not_sanitized", list)
    for options, printed in ((["--check"], f"all up to date\n{LINE}\n"), ([], "all up to date\n")):
        main(options, standalone_mode=False)
        assert capsys.readouterr().out == printed, "what renews is no check"


def test_the_check_fails_where_a_page_is_out_of_date(
    report: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = report("__main__").main
    monkeypatch.setattr("report.sections.update", lambda write: [Path("README.md")])
    monkeypatch.setattr(gpu_tests, "warnings", list)
    monkeypatch.setattr("report.__main__.not_sanitized", list)
    for options, code, printed in ((["--check"], 1, "out of date"), ([], 0, "updated")):
        assert (main(options, standalone_mode=False) or 0) == code
        assert capsys.readouterr().out == f"{printed}: README.md\n"


def test_the_doctor_says_so(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "warnings", lambda: [LINE])
    code, out, _ = cli("doctor", "--json")
    assert code == 0
    (part,) = (part for part in json.loads(out) if part["name"] == "GPU tests")
    assert part == {"name": "GPU tests", "works": False, "detail": LINE, "remedy": "pytest -m gpu --record-tests FILE"}
