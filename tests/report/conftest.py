"""Tests of the project's own report, which works with pandas."""

import pytest

pytest.importorskip("pandas", reason="pandas is not installed: it comes with the extra `dev`")
