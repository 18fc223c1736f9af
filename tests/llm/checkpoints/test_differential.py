"""Model files drawn by seed: `open_model` computes what transformers does, or refuses in one line where it may."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.llm.checkpoints import open_model
from tests.support.drawn_files import PLANS, write
from tests.support.drawn_models import Plan, Verdict, tokens

pytestmark = pytest.mark.torch

TOLERANCE = 2e-5  # of the largest logit
REFUSALS = (FileError, ArgumentError, UnavailableError)


def by_transformers(folder: Path) -> Any:
    """Logits [T, V] of the library's own model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens())).logits[0].numpy()


def by_ptxlab(path: Path) -> Any:
    model, _ = open_model(path)
    return model.logits(model.states([tokens()])[0])[0]


def difference(logits: Any, reference: Any) -> float:
    """Largest error over the largest logit; infinite where either is no number."""
    error = np.abs(logits - reference).max() / np.abs(reference).max()
    return float(error) if np.isfinite(error) else float("inf")


@pytest.mark.default_cases("00*")
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_drawn_file_is_read_right_or_refused(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    drawn = write(plan, tmp_path)
    try:
        logits = by_ptxlab(drawn.path)
    except REFUSALS as refusal:
        assert "\n" not in str(refusal)
        assert plan.twist.verdict is not Verdict.READ, refusal
        return
    assert plan.twist.verdict is not Verdict.REFUSED, "must be refused"
    assert difference(logits, by_transformers(drawn.reference)) < TOLERANCE
