"""`python -m report`: renew what is made from the specs and the records, or say what is out of date."""

from typing import Annotated

import typer

from ptxlab.testing import gpu_tests
from report import sections

main = typer.Typer(add_completion=False)


@main.command()
def report(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a text is out of date.")] = False,
    figures: Annotated[bool, typer.Option("--figures", help="Also redraw notebooks/figures.")] = False,
    notebooks: Annotated[bool, typer.Option("--notebooks", help="Also run the notebooks and write .ipynb.")] = False,
) -> None:
    """Renew the tables of README and guide and the kernels' headers from the specs and the records.

    With --check, also name the kernels whose sources changed since the recorded GPU tests; that is no failure.
    """
    changed = sections.update(write=not check)
    if figures:
        from report.figures import draw_all

        drawn, left_out = draw_all()
        changed += drawn
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
        for line in gpu_tests.warnings():
            print(line)
        raise typer.Exit(bool(changed))


if __name__ == "__main__":
    main()
