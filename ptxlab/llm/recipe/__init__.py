"""The steps of the papers' recipes, each usable alone on a layer's matrices.

Rotation, smoothing and reordering do not change a layer's function. A `Grid` has the levels of a scheme; GPTQ or
rounding to nearest chooses among them. `Recipe` names the steps and settings; `ptxlab.weights` runs one over a model.
"""

from ptxlab.llm.recipe.gptq import Rounded, gptq, inverse_factor, objective, round_to_nearest
from ptxlab.llm.recipe.grids import ChannelGrid, Grid, Levels, LQQGrid, QoQGrid, SymmetricGrid
from ptxlab.llm.recipe.reorder import reorder_down, reorder_heads
from ptxlab.llm.recipe.rotation import fold_norms, hadamard, random_orthogonal, rotate_ends, rotate_heads, rotate_stream
from ptxlab.llm.recipe.settings import RECIPES, Recipe, find_recipe
from ptxlab.llm.recipe.smoothing import search_factor, smooth_down, smooth_heads, smooth_input, smooth_keys

rounded = round_to_nearest  # its name until 0.2

__all__ = [
    "RECIPES",
    "ChannelGrid",
    "Grid",
    "LQQGrid",
    "Levels",
    "QoQGrid",
    "Recipe",
    "Rounded",
    "SymmetricGrid",
    "find_recipe",
    "fold_norms",
    "gptq",
    "hadamard",
    "inverse_factor",
    "objective",
    "random_orthogonal",
    "reorder_down",
    "reorder_heads",
    "rotate_ends",
    "rotate_heads",
    "rotate_stream",
    "round_to_nearest",
    "search_factor",
    "smooth_down",
    "smooth_heads",
    "smooth_input",
    "smooth_keys",
]
