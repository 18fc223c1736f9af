"""Which checkpoints are quantised already, and how their layers are loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.llm.checkpoints.open import is_quantized
from ptxlab.llm.vllm import NAME
from ptxlab.llm.vllm.compressed_tensors import IntegerCheckpoint
from ptxlab.llm.vllm.packed import PackedCheckpoint
from ptxlab.llm.vllm.qserve import QServeCheckpoint

QuantizedCheckpoint = IntegerCheckpoint | PackedCheckpoint | QServeCheckpoint


def declared_checkpoint(config: Mapping[str, Any]) -> QuantizedCheckpoint | None:
    """Return what a quantization_config says, or None for one that is not for the plugin.

    Raises ArgumentError for a packed folder that the kernels here do not take.
    """
    return PackedCheckpoint.from_config(config) or IntegerCheckpoint.from_config(config)


def find_checkpoint(model: str, config: Mapping[str, Any] | None) -> QuantizedCheckpoint | None:
    """Return how a model is quantised that is to be served by ptxlab: None for floats.

    Args:
        model: a folder, or a repository's name.
        config: its quantization_config, or None.

    Raises ArgumentError for a checkpoint that is quantised otherwise, and for a packed folder that was written before
    folders had a quantization_config. Raises FileError for tensors of QServe that do not fit together.
    """
    if config:
        checkpoint = declared_checkpoint(config)
        if checkpoint is None:
            rule = (
                "needs a checkpoint of floats, a folder of `ptxlab quantize --recipe`, QServe's, or compressed-tensors"
                " with integers of 4 bits and INT8 activations"
            )
            raise ArgumentError(f"--quantization {NAME}", rule, config.get("quant_method"))
        return checkpoint
    folder = Path(model)
    if is_quantized(folder):
        rule = f"must be rewritten, as an earlier ptxlab made it: ptxlab import {model} --out NEW"
        raise ArgumentError(f"--quantization {NAME}: {model}", rule, "no quantization_config")
    return QServeCheckpoint.from_folder(folder) if folder.is_dir() else None
