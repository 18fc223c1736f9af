"""The 300 drawn model files: their plans, and how each is written."""

from pathlib import Path

from tests.support.drawn_folders import FOLDER_TWISTS, write_folder
from tests.support.drawn_models import DrawnModel, Plan, plan

SEEDS = 300
PLANS = [plan(seed, FOLDER_TWISTS) for seed in range(SEEDS)]


def write(plan: Plan, folder: Path) -> DrawnModel:
    """Write the files of a plan into an empty folder."""
    return write_folder(plan, folder / "model")
