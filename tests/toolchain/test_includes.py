"""What is compiled once, and compiled again as soon as the compiler would read something else."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import toolchain
from ptxlab.errors import CompileError
from ptxlab.sources import Source
from ptxlab.toolchain import cache, includes, nvrtc

BODY = """
#ifndef VALUE
#define VALUE -1
#endif
extern "C" __global__ void k(int* out) { out[0] = VALUE; }
"""
FORMS = {
    "quoted": '#include "h.h"',
    "angle": "#include <h.h>",
    "macro": '#define H "h.h"\n#include H',
    "macro angle": "#define H <h.h>\n#include H",
    "stringified": "#define S(x) #x\n#define T(x) S(x)\n#include T(h.h)",
    "after a comment": '/* here */ # /**/ include /* and */ "h.h"',
    "spliced": '#inc\\\nlude "h.h"',
    "digraph": '%:include "h.h"',
    "has_include": '#if __has_include("h.h")\n#include "h.h"\n#endif',
    "has_include of a macro": "#define H <h.h>\n#if __has_include(H)\n#include H\n#endif",
    "conditional": '#if 1\n#include "h.h"\n#else\n#include "nowhere.h"\n#endif',
    "parent": '#include "sub/../h.h"',
}


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log the output kind that each compilation is asked for."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(includes, "_digests", {})
    (tmp_path / "sub").mkdir()
    outputs: list[str] = []
    run = nvrtc.run

    def record_output(source: Source, output: str, options: list[str]) -> object:
        outputs.append(output)
        return run(source, output, options)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc, "run", record_output)
    return outputs


def value(path: Path) -> int:
    """Load the kernel of a file anew, and return what it writes in the emulator."""
    out = np.zeros(1, np.int32)
    ptxlab.load(path)(out, grid=1, block=1, backend="emulator")
    return int(out[0])


def write_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.default_cases("macro angle")
@pytest.mark.parametrize("form", FORMS)
def test_a_changed_header_is_noticed(form: str, tmp_path: Path, compiles: list[str]) -> None:
    source = write_text(tmp_path / "k.cu", FORMS[form] + BODY)
    header = write_text(tmp_path / "h.h", "#define VALUE 1\n")
    assert [value(source), value(source)] == [1, 1] and len(compiles) == 1
    stamp = header.stat()
    header.write_text("#define VALUE 2\n")
    os.utime(header, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as an archive's date would be
    assert [value(source), value(source)] == [2, 2] and len(compiles) == 2
    header.write_text("#define VALUE 1\n")
    includes._digests.clear()  # as in another process
    assert value(source) == 1 and len(compiles) == 2


@pytest.mark.default_cases("has_include")
@pytest.mark.parametrize("form", ["has_include", "has_include of a macro"])
def test_a_header_that_was_looked_for_appears_and_goes(form: str, tmp_path: Path, compiles: list[str]) -> None:
    source = write_text(tmp_path / "k.cu", FORMS[form] + BODY)
    assert [value(source), value(source)] == [-1, -1] and len(compiles) == 1
    header = write_text(tmp_path / "h.h", "#define VALUE 3\n")
    assert value(source) == 3
    header.unlink()
    assert value(source) == -1 and len(compiles) == 2


@pytest.mark.full
def test_a_header_in_front_of_the_one_before(tmp_path: Path, compiles: list[str]) -> None:
    """Beside its includer, in the folder of the source, then among the project's own headers."""
    (tmp_path / "h.h").write_text("#define VALUE 4\n")
    (tmp_path / "sub" / "outer.h").write_text('#include "h.h"\n')
    source = write_text(tmp_path / "k.cu", '#include "sub/outer.h"' + BODY)
    assert [value(source), value(source)] == [4, 4]
    (tmp_path / "sub" / "h.h").write_text("#define VALUE 5\n")
    assert [value(source), value(source)] == [5, 5] and len(compiles) == 2

    name = next(path.name for path in sorted((Path(ptxlab.__file__).parents[1] / "cuda_src" / "include").iterdir()))
    source.write_text(f"#include <{name}>\n{BODY}")
    assert value(source) == -1
    (tmp_path / name).write_text("#define VALUE 6\n")
    assert value(source) == 6


def test_what_no_compiler_sees_compiles_nothing_anew(tmp_path: Path, compiles: list[str]) -> None:
    source = write_text(tmp_path / "k.cu", '#include "h.h"\n#if 0\n#include "other.h"\n#endif' + BODY)
    header = write_text(tmp_path / "h.h", "#define VALUE 1 // one\n")
    assert value(source) == 1
    (tmp_path / "other.h").write_text("#define VALUE 7\n")
    header.write_text("#define VALUE 1 // the first\n")
    assert value(source) == 1 and len(compiles) == 1


def test_options_from_the_environment(tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC reads them when it is loaded: what another process compiled by others is not taken."""
    source = write_text(tmp_path / "k.cu", BODY)
    value(source)
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "-DVALUE=8")
    value(source)
    assert len(compiles) == 2


def test_headers_in_any_encoding(tmp_path: Path, compiles: list[str]) -> None:
    (tmp_path / "h.h").write_bytes("#define VALUE 9 // größer\n".encode("latin-1"))
    assert value(write_text(tmp_path / "k.cu", '#include "h.h"' + BODY)) == 9


def test_a_header_that_changes_while_it_is_compiled(
    tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_text(tmp_path / "k.cu", '#include "h.h"' + BODY)
    header = write_text(tmp_path / "h.h", "#define VALUE 1\n")
    run = nvrtc.run

    def slow(*args: object) -> object:
        compiled = run(*args)  # type: ignore[arg-type]
        header.write_text("#define VALUE 2\n")
        return compiled

    with monkeypatch.context() as patched, pytest.raises(CompileError, match=r"k\.cu: a header changed while it was"):
        patched.setattr(nvrtc, "run", slow)
        value(source)
    assert value(source) == 2


def test_without_a_front_end_nothing_is_taken_from_the_cache(
    tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options that ask it are not documented; an NVRTC without them compiles every time, and is right."""
    monkeypatch.setattr(nvrtc, "run_front_end", lambda *_: b"")
    source = write_text(tmp_path / "k.cu", '#include "h.h"' + BODY)
    for number in (1, 2):
        (tmp_path / "h.h").write_text(f"#define VALUE {number}\n")
        assert value(source) == number
    assert len(compiles) == 2


def test_looking_up_is_quick(tmp_path: Path, compiles: list[str]) -> None:
    source = Source.read(write_text(tmp_path / "k.cu", '#include <cuda_fp16.h>\n#include "h.h"' + BODY))
    (tmp_path / "h.h").write_text("#define VALUE 1\n")
    toolchain.compile_cuda(source, "sm_80", output="ptx")
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        toolchain.compile_cuda(source, "sm_80", output="ptx")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.005
