"""Programs without branches: instructions drawn from tables of forms, one behind the other."""

from collections.abc import Sequence

import numpy as np

from tests.fuzz.program import How, Program

Table = tuple[Sequence[str], How]
THREADS, BLOCKS = (32, 64, 64, 96, 37, 1), (1, 1, 1, 1, 2, 3)


def generate_straight(
    rng: np.random.Generator,
    category: str,
    tables: Sequence[Table],
    count: tuple[int, int],
    threads: Sequence[int] = THREADS,
) -> Program:
    """Make a program of so many instructions; a table is drawn as often as it has forms."""
    program = Program(rng, category, program_threads(rng, threads), blocks=int(rng.choice(BLOCKS)))
    weights = np.array([len(forms) for forms, _ in tables], float)
    for i in rng.choice(len(tables), int(rng.integers(*count)), p=weights / weights.sum()):
        program.form(*tables[int(i)])
    return program


def program_threads(rng: np.random.Generator, threads: Sequence[int]) -> int:
    """Draw the threads of a block."""
    return int(threads[int(rng.integers(len(threads)))])
