"""The serving systems of the documents, each as a recipe and a KV cache of this project."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ptxlab.llm.recipe.settings import RECIPES, Recipe


@dataclass(frozen=True)
class ServingSystem:
    """What a system stores and computes.

    Attributes:
        name: of the system, and of its row in `ptxlab accuracy`.
        document: the section that describes its formats.
        recipe: one of `RECIPES`.
        options: of `ptxlab quantize` beside --recipe.
        changes: what the options change in the recipe.
    """

    name: str
    document: str
    recipe: str
    options: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Recipe:
        """The recipe with the system's changes."""
        return RECIPES[self.recipe].but(**self.changes)


SYSTEMS = (
    ServingSystem("QServe in groups", "QServe §4.1", "qoq"),
    ServingSystem("QServe per channel", "QServe §5.2.2", "qoq_channel"),
    ServingSystem("LQQ with KV4", "LiquidGEMM §4", "lqq"),
    ServingSystem("LiquidServe", "LiquidGEMM §6", "liquid"),
    ServingSystem("Atom", "Atom §4", "atom"),
    # COMET says which share of the blocks is INT8, less than a fifth, and gives no rule (COMET §3.2).
    ServingSystem(
        "COMET",
        "COMET §3.2",
        "fmpq",
        "--int8 0.2 --kv kv4_channel",
        {"int8": 0.2, "outlier": 0.0, "kv": "kv4_channel"},
    ),
)
