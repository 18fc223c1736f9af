"""Write the folder of a quantised model anew: as this version does, in another packing if asked."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptxlab.errors import ArgumentError, in_file
from ptxlab.io.files import new_folder, require_new, sole_writer
from ptxlab.llm.checkpoints import folder as folders
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.model.quantized import FUSED
from ptxlab.lowbit.layout import LAYOUTS, ExpertWeights, PackedWeight, pack, stack_experts, unpack
from ptxlab.validate import is_one_of

Progress = Callable[[str, int], None]  # called with each layer that is done, and how many there are


def rewrite_folder(
    source: Path, out: Path, *, layout: str = "strips", progress: Progress = lambda name, total: None
) -> None:
    """Write the quantised model of the folder `source` into the folder `out`, which appears when it is complete.

    No weight is rounded again. Memory is bounded by a layer and the two ends.

    Args:
        source: the folder.
        out: what to make.
        layout: of the packing; weights in W4A4 keep theirs.
        progress: of layers.

    Raises FileError for a folder that is damaged, and where `out` is there or another process is writing it;
    ArgumentError for an unknown layout.
    """
    if not is_one_of(layout, LAYOUTS):
        raise ArgumentError("layout", f"must be one of {', '.join(LAYOUTS)}", layout)
    require_new(out)
    config, recipe = folders.load_config(source), folders.read_recipe(source)
    ends = folders.load_ends(source, config)
    with sole_writer(out):
        require_new(out)  # another process may have finished it meanwhile
        with new_folder(out) as partial_folder:
            for index in range(config.layers):
                layer = folders.load_layer(source, index, config)
                with in_file(folders.layer_path(source, index)):
                    repacked: dict[str, Any] = {name: _repack(layer.parts[name], layout) for name in FUSED}
                folders.save_layer(partial_folder, index, replace(layer, **repacked))
                progress(f"layer {index}", config.layers)
            keeps_layout = layer.four_bit_inputs or "layout" not in recipe
            folders.save_ends(partial_folder, config, recipe if keeps_layout else {**recipe, "layout": layout}, **ends)
            if (source / "tokenizer.json").is_file():
                Tokenizer.from_folder(source).save(partial_folder)


def _repack(part: object, layout: str) -> object:
    """Pack a W4A8 weight in the layout, its rows in their own order; whatever else a layer has stays as it is."""
    if isinstance(part, ExpertWeights) and part.layout != layout:
        return stack_experts([pack(unpack(part.expert(e)), layout) for e in range(part.E)])
    if not isinstance(part, PackedWeight) or (part.layout == layout and not part.interleaved):
        return part
    return pack(unpack(part), layout)
