"""Model files drawn by seed: `open_model` computes what transformers does, or refuses in one line where it may."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.llm.checkpoints import open_model
from tests.support.drawn_files import PLANS, TWISTS, write
from tests.support.drawn_folders import CONFIG_TWISTS
from tests.support.drawn_models import Plan, Verdict, tokens

pytestmark = pytest.mark.torch

TOLERANCE = 2e-5  # of the largest logit
REFUSALS = (FileError, ArgumentError, UnavailableError)
BUILT = [plan for plan in PLANS if plan.name in CONFIG_TWISTS and plan.twist.verdict is Verdict.READ]


def load_with_transformers(folder: Path, dtype: str = "float32") -> Any:
    """Load the transformers library's own model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def reference_logits(model: Any) -> Any:
    """Compute logits [T, V] by PyTorch, in float32."""
    import torch

    with torch.no_grad():
        return model.float()(torch.from_numpy(tokens())).logits[0].numpy()


def logits_of(model: Any) -> Any:
    return model.logits(model.states([tokens()])[0])[0]


def difference(logits: Any, reference: Any) -> float:
    """Compute the largest error over the largest logit; infinite if it is no number."""
    error = np.abs(logits - reference).max() / np.abs(reference).max()
    return float(error) if np.isfinite(error) else float("inf")


def require_libraries() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.default_cases(
    "353-safetensors-qwen2-NaN+plain",
    "254-shards-mistral-plain",
    "255-safetensors-qwen2-old_rope_keys+rotary_emb.inv_freq",
    "289-torch-qwen2-window_from_layer_1+float64+optimizer_beside",
    "340-safetensors-qwen2-another_head_beside_tied",
    "258-torch-mistral-rope_scaling_beside_rope_parameters",
    "367-shards-qwen2-stale_shard_beside",
    "465-awq-llama-awq",
)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_drawn_file_is_read_right_or_refused(plan: Plan, tmp_path: Path) -> None:
    require_libraries()
    drawn = write(plan, tmp_path)
    try:
        logits = logits_of(open_model(drawn.path)[0])
    except REFUSALS as refusal:
        assert "\n" not in str(refusal)
        assert plan.twist.verdict is not Verdict.READ, refusal
        return
    assert plan.twist.verdict is not Verdict.REFUSED, "must be refused"
    assert difference(logits, reference_logits(load_with_transformers(drawn.reference))) < TOLERANCE


def test_every_kind_has_files_that_must_be_read_and_files_that_must_be_refused() -> None:
    """A reader that refuses all of a kind thus fails, and so does one that reads all."""
    assert {plan.name for plan in PLANS} == TWISTS.keys() and len(PLANS) >= 300
    verdicts = Counter((plan.kind, plan.twist.verdict) for plan in PLANS)
    for kind in {plan.kind for plan in PLANS}:
        drawn = sum(verdicts[kind, verdict] for verdict in Verdict)
        assert verdicts[kind, Verdict.READ] >= 0.2 * drawn, kind
        assert verdicts[kind, Verdict.REFUSED] >= 0.2 * drawn, kind


@pytest.mark.default_cases("*-plain*", "*-window_from_layer_1*", "*-old_rope_keys*")
@pytest.mark.parametrize("plan", BUILT, ids=str)
def test_a_model_of_transformers_is_taken_over_right(plan: Plan, tmp_path: Path) -> None:
    require_libraries()
    from ptxlab.llm.torch.models import float_model

    model = load_with_transformers(write(plan, tmp_path).reference, "float16")
    logits = logits_of(float_model(model))
    assert difference(logits, reference_logits(model)) < TOLERANCE
