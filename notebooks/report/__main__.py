"""`python -m report`: renew what is made from the specs and the records, or say what is out of date."""

import json
from typing import Annotated

import typer

from ptxlab import registry
from ptxlab.profile.nsight.sanitizer import TOOLS
from ptxlab.testing import gpu_tests
from report import RESULTS, sections

main = typer.Typer(add_completion=False)


@main.command()
def report(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a text is out of date.")] = False,
    figures: Annotated[bool, typer.Option("--figures", help="Also redraw notebooks/figures.")] = False,
    notebooks: Annotated[bool, typer.Option("--notebooks", help="Also run the notebooks and write .ipynb.")] = False,
) -> None:
    """Renew the tables of README and guide and the kernels' headers from the specs and the records.

    With --check, also name the kernels whose sources changed since the recorded GPU tests, and those that no record of
    the sanitizers has; that is no failure.
    """
    changed = sections.update(write=not check)
    if figures:
        from report.figures import draw_all

        picture_count, left_out = draw_all()
        changed += picture_count
        for line in left_out:
            print(line)
    if notebooks:
        from report.notebooks import build, scripts

        changed += map(build, scripts())
    for path in changed:
        print(f"{'out of date' if check else 'updated'}: {path}")
    if not changed:
        print("all up to date")
    if check:
        for line in (*gpu_tests.warnings(), *not_sanitized()):
            print(line)
        raise typer.Exit(bool(changed))


def not_sanitized() -> list[str]:
    """Return one line that lists the kernels missing from the records of some compute-sanitizer tool, if any."""
    paths = sorted(RESULTS.glob("*/sanitizers*.json"))
    verdicts = [verdict for path in paths for verdict in json.loads(path.read_text(encoding="utf-8"))]
    kernels_by_tool = [
        {kernel for verdict in verdicts if verdict["tool"] == tool for kernel in verdict["kernels"]} for tool in TOOLS
    ]
    missing = [kernel for kernel in registry.specs() if not all(kernel in names for names in kernels_by_tool)]
    return [f"in no record of the sanitizers: {', '.join(missing)}"] if missing else []


if __name__ == "__main__":
    main()
