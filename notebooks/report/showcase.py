"""Plain kernels with one mistake each (`tests/outside/`), and what `ptxlab run` says of them.

Each file is right with -D FIXED. The guide shows the lines that are found, the command, its output and the remedy; all
but the remedy's wording comes from running it.
"""

import contextlib
import io
import re
import runpy
import shutil
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from ptxlab.cli.app import run_command_line
from ptxlab.cli.common import WIDTH, console
from report import ROOT

_WIDTH = 116  # of a line in the README
_LINE = re.compile(r"\bline (\d+)\b|\.cu:(\d+)\b")
_FINDING = re.compile(r"[\w-]+: ")
_GAP = 2  # lines between two that are shown are shown too if they are no more than this


@dataclass(frozen=True)
class Mistake:
    """A kernel, how it is launched, and in one line each: what is wrong, and what to do about it."""

    name: str
    threads: int
    wrong: str
    remedy: str
    checks: str = "all"
    place: str = ""  # folder below `tests/outside`

    def command(self, *extra: str) -> str:
        """Return the command line, to be run in the folder of the kernel and its inputs."""
        options = " ".join((f"--block {self.threads} --check {self.checks}", *extra))
        return f"ptxlab run {self.name}.cu {options} --in {self.name}.npz"


MISTAKES = (
    Mistake(
        "missing_proxy_fence",
        128,
        "A missing proxy fence: weights are unpacked into shared memory, and wgmma may not see them yet",
        "`fence.proxy.async` between the stores and the barrier",
    ),
    Mistake(
        "reused_fragment",
        128,
        "A missing wait: wgmma still reads its A fragment when the next step's weights go into the same registers",
        "`wgmma.wait_group 0` before the registers are written again, or two sets of them and `wait_group 1`",
    ),
    Mistake(
        "carrying_multiply",
        64,
        "An overflowing lane: four products at once, and a negative one borrows from its neighbour",
        "multiply while the bytes are unsigned, subtract `zero * scale` afterwards",
    ),
)


_fence = partial(Mistake, place="fences")
FENCES = (
    _fence(
        "flashkda_24",
        128,
        "FlashKDA #24: found by an audit. A copy stores a state that threads have widened in shared memory",
        "`fence.proxy.async` after the stores",
    ),
    _fence(
        "tileops_1574",
        256,
        "TileOPs #1574: about 3% of FusedMoe calls were wrong. A warp group stages its tile, and one thread starts the "
        "copy, with neither fence nor barrier between",
        "`fence.proxy.async` by all writers, then a barrier of the warp group",
    ),
    _fence(
        "humming_45",
        128,
        "humming #45: wrong results on an H20. An epilogue stages tiles in one buffer, without a fence, and writes the "
        "next tile before the copy has read the previous one",
        "`fence.proxy.async` after the stores, `cp.async.bulk.wait_group.read 0` before the buffer is used again",
    ),
    _fence(
        "tilelang_2634",
        128,
        "tilelang #2634: `gemm_sp` left the fence out, and 29,000 runs were right by luck. Threads write the operands "
        "of wgmma to shared memory",
        "`fence.proxy.async` between the stores and the barrier",
    ),
    _fence(
        "sglang_39124",
        128,
        "sglang #39124: 86 of 100 runs differed on a B300. Threads write a product to shared memory, as an operand of "
        "the next one",
        "`fence.proxy.async` between the stores and the barrier",
    ),
    _fence(
        "deepep_642",
        32,
        "DeepEP #642: wrong sums at large batches. A warp loads a row from shared memory, and the next copy overwrites "
        "it",
        "`fence.proxy.async` between the loads and the copy",
        "all,proxy",
    ),
    _fence(
        "transformer_engine_2695",
        128,
        "TransformerEngine #2695: a race in the amax kernels. All threads load a stage, and a copy refills it",
        "`fence.proxy.async` by the readers, before the barrier that releases the stage",
        "all,proxy",
    ),
)


def folder(place: str = "") -> Path:
    """Return the folder of the kernels, in a checkout."""
    return ROOT / "tests" / "outside" / place


@cache
def output_of(mistake: Mistake) -> str:
    """Run the mistake's command beside a copy of the kernel, and return what is printed.

    The command runs in this process, which has already imported all modules it needs.
    """
    printed, console.width = io.StringIO(), WIDTH  # whatever terminal this runs in
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.chdir(scratch),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),  # 1 where something is found
    ):
        shutil.copytree(folder(mistake.place), scratch, dirs_exist_ok=True)
        runpy.run_path("inputs.py")
        run_command_line(mistake.command().split()[1:])
    return printed.getvalue()


def excerpt(text: str, printed: str) -> Iterator[str]:
    """Yield the numbered source lines that the findings name, and those under `FIXED`."""
    lines = text.splitlines()
    printed_numbers = {int(number) for match in _LINE.findall(printed) for number in match if number}
    for number in sorted(printed_numbers):  # NVRTC counts the last line of an asm statement as its place
        while lines[number - 1].lstrip().startswith((":", '"')):
            number -= 1
            printed_numbers.add(number)
    inside = False
    for number, line in enumerate(lines, 1):
        inside = inside or "FIXED" in line
        printed_numbers |= {number} if inside else set()
        inside = inside and not line.startswith("#endif")
    last_shown = 0
    for number in sorted(printed_numbers):
        skipped_lines = range(last_shown + 1, number) if last_shown and number - last_shown <= _GAP + 1 else ()
        if last_shown and number - last_shown > 1 and not skipped_lines:
            yield "    ..."
        for shown_line in (*skipped_lines, number):
            yield f"{shown_line:>3} {lines[shown_line - 1]}".rstrip()
        last_shown = number


def page(mistakes: Iterable[Mistake]) -> str:
    """Format mistakes as Markdown: `MISTAKES` are on the page on checks, `FENCES` on the page on fences."""
    return "\n".join(part for mistake in mistakes for part in format_mistake(mistake))


def format_mistake(mistake: Mistake) -> list[str]:
    """Format one mistake as lines of Markdown."""
    printed = output_of(mistake)
    lines = printed.splitlines()
    findings = [line for line in lines if _FINDING.match(line)]
    source = folder(mistake.place) / f"{mistake.name}.cu"
    report: list[str] = []
    for kind in dict.fromkeys(line.partition(":")[0] for line in findings):
        first, *repeats = [line for line in findings if line.startswith(f"{kind}:")]
        report += textwrap.wrap(first, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        other_lines = sorted({int(line) for repeat in repeats for line in re.findall(r"^[\w-]+: [^:]*:(\d+)", repeat)})
        if repeats:
            places = f"line {other_lines[0]}" if len(other_lines) == 1 else f"lines {', '.join(map(str, other_lines))}"
            report.append(f"... and {len(repeats)} more like it, {places}")
    return [
        f"**{mistake.wrong}.**\n",
        "```cuda",
        *excerpt(source.read_text(encoding="utf-8"), printed),
        "```",
        "```console",
        f"$ {mistake.command()}",
        *report,
        *(line.rstrip() for line in lines[len(findings) :]),  # the outputs, and the summary
        "```",
        f"Remedy: {mistake.remedy}.\n",
    ]
