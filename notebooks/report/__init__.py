"""What the project reports on itself: README tables, guide pages, kernel headers, figures and notebooks, from records.

Run as `python -m report` from `notebooks/`. Nothing in `ptxlab` imports it, and the wheel does not carry it.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
FIGURES = ROOT / "notebooks" / "figures"
