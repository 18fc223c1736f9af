"""Files that are no kernels, or bombs: each is refused in one line, soon, and without much memory."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import PtxlabError
from ptxlab.io.files import load_arrays
from ptxlab.sources import Source
from ptxlab.toolchain.macros import MAX_TOKENS, require_finite
from tests import malformed

KERNEL = 'extern "C" __global__ void k(int* x) { x[0] = %s; }'
TWICE = "#define A0 1 +\n" + "".join(f"#define A{i} A{i - 1} A{i - 1}\n" for i in range(1, 40)) + KERNEL % "A39 0"
ARGUMENTS = "#define A(x) x + x\n" + KERNEL % ("A(" * 40 + "1" + ")" * 40)
CHAIN = "#define A0 1\n" + "".join(f"#define A{i} A{i - 1}\n" for i in range(1, 2000)) + KERNEL % "A1999"


def ptx(body: str) -> str:
    return f""".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 x) {{
.reg .pred %p; .reg .b32 %r<4>; .reg .b64 %x;\n{body}\nret; }}"""


def call(text: str, *args: object) -> None:
    ptxlab.load(text)(*(args or [np.zeros(4, np.int32)]), grid=1, block=32, backend="emulator")


BAD: dict[str, tuple[str, str]] = {
    "no ptx": (".version 8.0 .target sm_90 \0 {{{", "expected"),
    "unfinished": (ptx("mov.u32 %r1, 1;")[:-9], "expected"),
    "macros, each twice the last": (TWICE, rf"macros: a text of at most {MAX_TOKENS} tokens .* \(got more, by A\d+\)"),
    "arguments, each twice the last": (ARGUMENTS, r"macros: .* \(got more, by A\)"),
    "10 GB of shared memory": (ptx(".shared .b8 big[10737418240];"), "big"),
    "10 GB in pieces": (
        ptx("".join(f".shared .b8 big{i}[200000000]; mov.u32 %r1, big{i};" for i in range(50))),
        "shared_bytes: has to fit 227 KB",
    ),
    "a million registers": (ptx(".reg .b32 %many<1000000>;"), "at most"),
    "a million registers in pieces": (
        ptx("".join(f".reg .b64 %m{i}_<250000>;" for i in range(40))),
        "registers so far",
    ),
    "a loop that nothing ends": (ptx("L: bra L;"), "deadlock"),
    "an include of a device": ('#include "/dev/zero"\n' + KERNEL % 1, "cannot open source file|not a regular file"),
    "an include of what is no code": ('#include "/etc/hosts"\n' + KERNEL % 1, "error|hosts"),
    "an include that is not there": ('#include "../../../../nosuch.h"\n' + KERNEL % 1, "nosuch.h"),
    "an include of itself": ("#include __FILE__\n" + KERNEL % 1, "includes itself"),
}


@pytest.mark.parametrize("case", BAD)
def test_broken_files_are_refused_in_one_line(case: str) -> None:
    text, message = BAD[case]
    one_line(lambda: call(text), message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "takes 1 argument|args: "),
        ((np.zeros(4, np.int32), np.int32(1)), "args: "),
        ((np.int32(1),), "argument 0|x: "),
        ((np.zeros((4, 4), np.int32).T,), "C-contiguous"),
        ((np.array([None]),), "dtype|numbers|object"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(args: tuple[object, ...], message: str) -> None:
    one_line(lambda: ptxlab.load(ptx(""))(*args, grid=1, block=32, backend="emulator"), message)


def test_arrays_that_would_be_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", a=np.array([{}, print], object))
    one_line(lambda: load_arrays(tmp_path / "bad.npz"), "bad.npz: ")


def one_line(action: Callable[[], object], expected: str) -> None:
    """Check that an action raises a PtxlabError of one line that says so, within seconds of CPU, and 256 MB."""
    peak_before, started = malformed.peak(), time.process_time()
    with pytest.raises(PtxlabError, match=expected) as error:
        action()
    assert time.process_time() - started < 10 and malformed.peak() - peak_before < 1 << 28
    message = str(error.value)
    assert "\n" not in message or message.startswith("deadlock: ")  # which has a line for each who waits
    assert len(message) < 600


def test_macros_that_may_be() -> None:
    """Macros may nest as deep as they are used: dispatch over three lists, a list named once, a name inside itself."""
    cases = " ".join(f"case {i}: f(__VA_ARGS__)" for i in range(20))
    text = f"#define EACH(x, ...) switch (x) {{ {cases} }}\n#define LIST(f) f(1) f(2)\n#define f f + 1\n"
    require_finite(Source.from_text(text + CHAIN + "EACH(a, EACH(b, EACH(c, LIST(g))))\n", "dispatch.cu"))
