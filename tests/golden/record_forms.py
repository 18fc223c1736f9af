"""Record the forms on an H100 or H200: `python -m tests.golden.record_forms [--out DIR]`.

Writes `forms.npz`, one array per form of `tests/golden/forms.py`, and `forms.json` (device, driver, failures).
"""

import sys
from pathlib import Path

import numpy as np

from tests.golden.forms import RECORDED, Form, forms
from tests.golden.record import record_all


class _Named:
    """A form as `record_all` wants it."""

    def __init__(self, name: str, form: Form) -> None:
        self.name, self.form = name, form


def record(case: _Named, folder: Path) -> dict[str, np.ndarray]:
    """Run a form on the GPU and return its result."""
    return {case.name: case.form("gpu")}


if __name__ == "__main__":
    every = [_Named(name, form) for name, form in forms().items()]
    sys.exit(record_all(__doc__, every, record, RECORDED.name, "forms.json"))
