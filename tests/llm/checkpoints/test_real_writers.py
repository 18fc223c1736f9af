"""Models quantised by GPTQModel, AutoGPTQ, AutoAWQ, llm-compressor and AutoRound: read as the writers read them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.imports import import_checkpoint

FOLDER = Path(__file__).parents[2] / "golden" / "quantized_models"
MADE: dict[str, Any] = json.loads((FOLDER / "made.json").read_text(encoding="utf-8"))
VOCABULARY = 96
TOKENS = np.array([[(7 * i * i + 3 * i + 2) % VOCABULARY for i in range(24)]])  # as in record_quantized_models.py
TOLERANCE = 2e-5  # of the largest logit
# Relative errors of the weights that `import` writes, by the kind of file: none where one scale per row is exact, the
# nearest `lqq` of the same groups, and weights quantised anew where groups are not contiguous.
EXACT, NEAREST, ANEW = 0.0, 0.021, 0.08
LARGEST_ERRORS = dict.fromkeys(MADE, NEAREST) | {
    "llmcompressor_rows": EXACT, "llmcompressor_w4a8": EXACT, "autogptq_order": ANEW, "gptqmodel_v1_order": ANEW,
    "gptqmodel_v2_order": ANEW,
}  # fmt: skip


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy a model's files by name, and write a tokenizer of its vocabulary."""
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    source = FOLDER / request.param
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    return folder


def difference(folder: Path, logits: Any) -> float:
    """Compute the largest error over the largest logit."""
    model, _ = open_model(folder)
    computed = model.logits(model.states([TOKENS])[0])[0, -len(logits) :]
    return float(np.abs(computed - logits).max() / np.abs(logits).max())


@pytest.mark.parametrize("folder", MADE, indirect=True)
def test_a_file_is_read_as_its_writer_reads_it(folder: Path) -> None:
    """The logits are of a float32 model whose matrices the writer's own library has dequantised."""
    assert difference(folder, np.load(folder / "logits.npy")) < TOLERANCE


@pytest.mark.default_cases("autoround", "gptqmodel_v2_order", "llmcompressor_groups", "llmcompressor_w4a8")
@pytest.mark.parametrize("folder", MADE, indirect=True)
def test_what_requantising_adds(folder: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    name = request.node.callspec.params["folder"]
    rows = import_checkpoint(folder, tmp_path / "imported")
    error = max(row.relative_error or 0.0 for row in rows)
    assert error <= LARGEST_ERRORS[name]
    if error == 0:
        assert difference(tmp_path / "imported", np.load(folder / "logits.npy")) < TOLERANCE


def test_the_models_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 1_000_000
