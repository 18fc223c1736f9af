"""What runs of the fuzzer came to: a row per seed, of one commit on one GPU, in `notebooks/results/<gpu>/fuzz.json`."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptxlab.errors import FileError
from ptxlab.io.files import read_record, write_record
from ptxlab.sources import commit
from tests.fuzz.examine import Outcome

SCHEMA = 1
MOST_TEXTS = 20  # of failures that are written out


@dataclass
class Run:
    """Programs of one seed.

    Attributes:
        programs: how many, by category.
        values: results compared.
        nans: of these, NaNs whose bits differ.
        avoided: how often the generator kept away from an entry's form, or followed an entry's rule.
        mismatches: results that differ without an entry: form, threads, example, what level 0 makes of it, program.
        failures: by kind, how many, and some texts with the program's number.
    """

    seed: int
    seconds: float = 0.0
    values: int = 0
    nans: int = 0
    programs: Counter[str] = field(default_factory=Counter)
    avoided: Counter[str] = field(default_factory=Counter)
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Add what came of a program."""
        self.programs[outcome.category] += 1
        self.values += outcome.values
        self.nans += outcome.nans
        self.avoided.update(outcome.avoided)
        self.mismatches += [{"number": outcome.number, **asdict(mismatch)} for mismatch in outcome.mismatches]
        for kind, text in outcome.failures:
            self.failures[kind] += 1
            if self.failures[kind] <= MOST_TEXTS:
                self.texts.append(f"{kind}, {outcome.category} {outcome.number}: {text[:400]}")

    def fail(self, kind: str, text: str) -> None:
        """Add what no program's outcome says: a worker that died or hung."""
        self.failures[kind] += 1
        self.texts.append(f"{kind}: {text}")

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @property
    def is_clean(self) -> bool:
        """Tell whether nothing differs and nothing failed."""
        return not self.mismatches and not self.failures


def merge(run: Run, device: dict[str, str], path: Path) -> dict[str, Any]:
    """Return the record of the file with this run in it: the one of its seed is replaced if it is shorter.

    Runs of another commit or device are left out.
    """
    head = {"schema": SCHEMA, "commit": commit(), "device": device}
    rows = {run.seed: run.to_json()}
    try:
        recorded = read_record(path, "a record of the fuzzer", SCHEMA)
    except FileError:
        recorded = {}
    if all(recorded.get(key) == value for key, value in head.items()):
        for row in recorded["runs"]:
            if row["seed"] not in rows or sum(row["programs"].values()) > sum(run.programs.values()):
                rows[row["seed"]] = row
    runs = [rows[seed] for seed in sorted(rows)]
    return {
        **head,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "programs": sum(sum(row["programs"].values()) for row in runs),
        "values": sum(row["values"] for row in runs),
        "mismatches": sum(len(row["mismatches"]) for row in runs),
        "failures": sum(sum(row["failures"].values()) for row in runs),
        "runs": runs,
    }


def save(record: dict[str, Any], path: Path) -> None:
    """Write a record, a line per run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record, "runs")
