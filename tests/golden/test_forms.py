"""The emulator against what a GPU made of the forms of `forms.py`; tests beside the emulator say what is right."""

import numpy as np
import pytest

from tests.golden.forms import RECORDED, forms

FORMS = forms()


@pytest.fixture(scope="session")
def vectors() -> dict[str, np.ndarray]:
    with np.load(RECORDED) as archive:
        return dict(archive)


def test_all_are_recorded(vectors: dict[str, np.ndarray]) -> None:
    assert {*vectors} == {*FORMS}


@pytest.mark.parametrize("name", FORMS)
def test_recorded(name: str, vectors: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(FORMS[name]("emulator"), vectors[name], strict=True)
