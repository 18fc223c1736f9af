"""Quirks of ptxas and GPUs (`ptxlab.hardware.quirks`): a table of all, and a section for each."""

from ptxlab.hardware.quirks import PTXAS, Quirk, load

WHO = {
    "optimiser": "ptxas's optimiser: right at `-O0`",
    "ptxas": "ptxas, at `-O0` too",
    "hardware": "the hardware",
}


def table() -> str:
    """Make a table with a line for each quirk."""
    lines = [f"| quirk | who | {' | '.join(f'ptxas {version}' for version in PTXAS)} |", "| --- |" + " --- |" * 4]
    for quirk in load().values():
        version_cells = ["yes" if version in quirk.ptxas else "no" for version in PTXAS]
        lines.append(f"| [{quirk.name}](#{quirk.name}) | {WHO[quirk.who]} | {' | '.join(version_cells)} |")
    return "\n".join(lines) + "\n"


def sections() -> str:
    """Make a section for each quirk: what happens, a program, its results."""
    return "\n".join(map(_section, load().values()))


def _section(quirk: Quirk) -> str:
    words = "as the manual says (emulator)", "H200", "H200 at `-O0`"
    lines = [
        f"### {quirk.name}",
        "",
        quirk.effect,
        "",
        f"Manual: {quirk.manual}{'' if quirk.manual[-1] == '.' else '.'}",
    ]
    lines += [f"By {WHO[quirk.who]}. {quirk.remark}".rstrip(), "", "```ptx", quirk.program.strip(), "```", ""]
    lines += [f"| thread | reads | {' | '.join(words)} |", "| --- |" + " --- |" * 4]
    rows = zip(quirk.inputs, quirk.emulator, quirk.gpu, quirk.level0, strict=True)
    for thread, row in enumerate(rows):
        lines.append(f"| {thread} | {' | '.join(', '.join(cells) for cells in row)} |")
    return "\n".join(lines) + "\n"
