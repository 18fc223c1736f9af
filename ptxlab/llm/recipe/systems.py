"""The serving systems of the documents, each as a recipe with its settings."""

from dataclasses import dataclass

from ptxlab.llm.recipe.settings import RECIPES, Recipe


@dataclass(frozen=True)
class ServingSystem:
    """Formats of a serving system: its recipe and the settings that differ.

    Attributes:
        name: of the system, and of its row in `ptxlab accuracy`.
        document: the section that describes its formats.
        recipe: one of `RECIPES`.
        group: weights per scale in the document; None: one scale per channel.
        int8: share of the activations' blocks in INT8.
        kv: the KV cache, if not the recipe's.
    """

    name: str
    document: str
    recipe: str
    group: int | None
    int8: float | None = None
    kv: str | None = None

    @property
    def settings(self) -> Recipe:
        """The recipe in the groups of `RECIPES`: a small model's width may be no multiple of the document's."""
        steps = RECIPES[self.recipe]
        steps = steps if self.int8 is None else steps.but(int8=self.int8, outlier=0.0)
        return steps if self.kv is None else steps.but(kv=self.kv)

    @property
    def options(self) -> str:
        """The options of `ptxlab quantize` that name it."""
        settings = {"recipe": self.recipe, "group": self.group, "int8": self.int8, "kv": self.kv}
        return " ".join(f"--{name} {setting}" for name, setting in settings.items() if setting is not None)


SYSTEMS = (
    ServingSystem("QServe in groups", "QServe §4.1", "qoq", 128),
    ServingSystem("QServe per channel", "QServe §5.2.2", "qoq_channel", None),
    ServingSystem("LQQ with KV4", "LiquidGEMM §4", "lqq", 64),
    ServingSystem("LiquidServe", "LiquidGEMM §6", "liquid", 64),
    ServingSystem("Atom", "Atom §4", "atom", 128),
    # COMET says which share of the blocks is INT8, less than a fifth, and gives no rule (COMET §3.2).
    ServingSystem("COMET", "COMET §3.2", "fmpq", 128, int8=0.2, kv="kv4_channel"),
)
