"""The list of mutants: `*.toml` beside this module, one file per part of the project."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """A mistake that tests should find.

    Attributes:
        what: the mistake in a few words, which name it.
        file: where, from the root of the checkout.
        old: text that is there exactly once.
        new: what stands there instead.
        killed_by: ids of tests that notice: as few, and as fast ones, as can be.
        equivalent: why nothing can notice, for a mutant that survives; else empty.
        ci: whether CI tries it.
    """

    what: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...]
    equivalent: str = ""
    ci: bool = False

    def __str__(self) -> str:
        return self.what

    def changed(self, text: str) -> str:
        """Return the file's text with the mistake. Raise ValueError unless `old` stands there exactly once."""
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            raise ValueError(f"{self.what}: {self.file} must have `old` once, and `new` differ (found {found} times)")
        return text.replace(self.old, self.new)


def load(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """Load all mutants, in the order of the files.

    Raises TypeError or KeyError for an entry with other fields, ValueError for a name that two share.
    """
    entries = [entry for path in sorted(folder.glob("*.toml")) for entry in tomllib.loads(path.read_text())["mutant"]]
    mutants = [Mutant(**{**entry, "killed_by": tuple(entry["killed_by"])}) for entry in entries]
    names = [mutant.what for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several mutants are called: {', '.join(twice)}")
    return mutants
