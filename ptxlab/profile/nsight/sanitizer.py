"""compute-sanitizer over `ptxlab verify`, or registered chains of launches, on a GPU: what NVIDIA's own tools say.

Every array is allocated for itself there, as an access beyond its end would stay inside CuPy's memory pool.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptxlab import registry
from ptxlab.errors import ArgumentError, UnavailableError, VerificationError

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")

_CHILD = "from ptxlab import gpu; gpu.without_pool(); from ptxlab.cli import main; main()"
_CHAIN = (
    "import sys; from ptxlab import gpu, registry; gpu.without_pool(); registry.entries('chains')[sys.argv[1]].load()()"
)
_SUMMARY = re.compile(r"^=+ (?:\w+ )?SUMMARY: ((\d+) .*)$", re.MULTILINE)
_HEADER = "COMPUTE-SANITIZER"


@dataclass(frozen=True)
class SanitizerResult:
    """A tool's verdict on some kernels.

    Attributes:
        tool: one of `TOOLS`.
        kernels: as `ptxlab verify` was given them.
        problems: how many it counted.
        summary: its last line.
        first: the first problem, as it was printed; empty if there is none.
        seconds: wall time.
    """

    tool: str
    kernels: tuple[str, ...]
    problems: int
    summary: str
    first: str
    seconds: float


def sanitize(tool: str, kernels: Sequence[str], sizes: str | None = None) -> Iterator[SanitizerResult]:
    """Yield one verdict on all the kernels if they are clean, otherwise one on each.

    A report does not always name its kernel.

    Args:
        tool: one of `TOOLS`.
        kernels: names of kernels, and of registered chains, whose launches overlap: each is run by itself.
        sizes: sizes beside those of the examples, as `ptxlab verify --shape` takes them.

    Raises:
        ArgumentError: no such tool.
        UnavailableError: compute-sanitizer is not here, or cannot use this device.
        VerificationError: the tool found nothing, but the results were wrong.
    """
    if tool not in TOOLS:
        raise ArgumentError("tool", f"one of {', '.join(TOOLS)}", tool)
    chains = registry.entries("chains")
    verified = [name for name in kernels if name not in chains]
    if verified:
        verdict = _run(tool, verified, sizes)
        if verdict.problems and len(verified) > 1:
            yield from (_run(tool, [name], sizes) for name in verified)
        else:
            yield verdict
    yield from (_run(tool, [name], None) for name in kernels if name in chains)


def _run(tool: str, kernels: Sequence[str], sizes: str | None) -> SanitizerResult:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise UnavailableError("compute-sanitizer: not on the PATH; it comes with the CUDA toolkit")
    # The driver is asked for the parameters of a kernel until it says that there are no more: no error of the kernel's.
    options = ["--tool", tool, "--report-api-errors", "no", "--print-limit", "20"]
    verify = [_CHILD, "verify", *kernels, "--backend", "gpu", *(["--shape", sizes] if sizes else [])]
    child = [_CHAIN, *kernels] if kernels[0] in registry.entries("chains") else verify
    start_seconds = time.monotonic()
    process = subprocess.run([sanitizer, *options, sys.executable, "-c", *child], capture_output=True, text=True)
    output_text = process.stdout + process.stderr
    summary = _SUMMARY.search(output_text)
    if summary is None:
        last_lines = [line for line in output_text.splitlines() if line.strip()][-1:]
        raise UnavailableError(f"compute-sanitizer --tool {tool}: {' '.join(last_lines) or 'printed nothing'}")
    problems = int(summary[2])
    if process.returncode and not problems:
        raise VerificationError(
            f"{', '.join(kernels)} under {tool}: {' '.join(process.stdout.strip().splitlines()[-1:])}"
        )
    first = first_report(output_text) if problems else ""
    return SanitizerResult(tool, tuple(kernels), problems, summary[1], first, time.monotonic() - start_seconds)


def first_report(printed: str) -> str:
    """Return the first block of the tool's own lines, without its header and its margin."""
    block: list[str] = []
    for line in printed.splitlines():
        margin, _, text = line.partition(" ")
        if set(margin) != {"="} or _HEADER in text:
            continue
        if not text.strip() and block:
            break
        block += [text.rstrip()] if text.strip() else []
    return "\n".join(block)
