"""`python -m benchmarks SUITE`, run in notebooks/: time kernels and other projects in the same run, and record it."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from benchmarks import peers
from ptxlab.bench import Suite
from ptxlab.cli.app import report_errors
from ptxlab.cli.bench import Against, Only, Out, Picture, measure_suite
from ptxlab.cli.common import AsJson
from ptxlab.errors import ArgumentError, UnavailableError

SUITES = {
    "decode": "benchmarks.decode",
    "layer": "benchmarks.layer",
    "prefill": "benchmarks.prefill",
    "torch": "benchmarks.pytorch",
    "vllm": "benchmarks.serving",
}
WITH_PEERS = ("gemm", "attention")  # suites of `ptxlab bench` that take peers


def benchmark(
    suite: Annotated[str, typer.Argument(help="decode, layer, prefill, torch, vllm, gemm, attention.")],
    against: Against = None,
    out: Out = None,
    picture: Picture = None,
    only: Only = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels beside other projects on this machine's GPU, and record it.

    --only names a part: of gemm w4a4, g64, compute_80, 7B, 70B; of attention table1, rotation;
    of layer and decode a model, B=16, a mix
    (fp8_row ...), alone (no mix);
    of decode also w4a4, w4ax, groups, channel, channel_sm80, liquid, whose steps are measured for no other word;
    of layer also fused, timeline, d64, epilogues; of prefill heads (32/8), D=64, T=512, C=8192, short, alone, bytes;
    of vllm models (7B, 8B, 70B), variants (ptxlab, kv8, head8, int4), of which two a call end within ten minutes,
    and arrivals, the requests a second at 50 ms a token in place of all else.
    """
    suite_module = find_suite(suite)
    options: dict[str, Any] = {"peers": peers.PUBLIC} if suite in WITH_PEERS else {}
    files = {"against": against, "out": out, "picture": picture}
    measure_suite(suite_module, **files, only=only or (), as_json=as_json, libraries=peers.versions(), **options)


def find_suite(name: str) -> str | Suite:
    """Find a suite by name: one of this folder, or the name of one of `ptxlab bench` that takes peers."""
    if name not in (*SUITES, *WITH_PEERS):
        raise ArgumentError("suite", f"one of {', '.join((*SUITES, *WITH_PEERS))}", name)
    if name not in SUITES:
        return name
    try:
        suite: Suite = import_module(SUITES[name]).SUITE
    except ImportError as error:
        raise UnavailableError(f"{name}: {error}; python -m pip install 'ptxlab[torch]'") from None
    return suite


def main() -> None:
    """Run the command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(benchmark)
    report_errors(lambda: app(sys.argv[1:], prog_name="python -m benchmarks", standalone_mode=False))


if __name__ == "__main__":
    main()
