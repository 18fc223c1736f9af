"""The drawn model files: a plan for each seed, and how it is written."""

from pathlib import Path

from tests.support.drawn_folders import CONFIG_TWISTS, FILE_TWISTS, TENSOR_TWISTS, write_folder
from tests.support.drawn_gguf import GGUF_TWISTS, GgufTwist, write_gguf
from tests.support.drawn_models import DrawnModel, Plan, Twist, plan
from tests.support.drawn_quantized import QUANTIZED_TWISTS, QuantizedTwist, write_quantized

_OF_FOLDERS = (CONFIG_TWISTS, TENSOR_TWISTS, FILE_TWISTS)
TWISTS: dict[str, Twist] = {**CONFIG_TWISTS, **TENSOR_TWISTS, **FILE_TWISTS, **GGUF_TWISTS, **QUANTIZED_TWISTS}
SEEDS = 2 * len(TWISTS)
PLANS = [plan(seed, TWISTS, _OF_FOLDERS) for seed in range(SEEDS)]


def write(plan: Plan, folder: Path) -> DrawnModel:
    """Write the files of a plan into an empty folder."""
    match plan.twist:
        case GgufTwist():
            return write_gguf(plan, folder)
        case QuantizedTwist():
            return write_quantized(plan, folder)
    return write_folder(plan, folder / "model")
