import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm() -> None:
    """Install vLLM's sources with stand-ins for their compiled parts, and register the plugin."""
    for name in ("torch", "vllm"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not importable: `.ci/run` has a step with the sources of vLLM 0.26.0")
    import ptxlab.llm.torch  # noqa: F401  (its operators keep their fakes)
    from ptxlab.llm.vllm import register
    from tests.support import fake_vllm

    fake_vllm.install()
    register()


@pytest.fixture(scope="session")
def one_process(vllm: None) -> None:
    """Initialise groups of one process, in which layers find their rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel()


SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip


@pytest.fixture
def packed_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the folder of a small quantised model, as `ptxlab quantize` does.

    Its options are the recipe's settings.
    """
    from ptxlab.llm.checkpoints import folder, open_model
    from ptxlab.llm.model.quantized import QuantizedModel
    from tests.support.small_models import write_folder

    def make(family: str = "qwen2", scheme: str = "lqq", **options: Any) -> Path:
        model, tokenizer = open_model(write_folder(tmp_path / "floats", family, **SIZES))
        out = tmp_path / "packed"
        out.mkdir()
        folder.save(QuantizedModel.rounded(model, scheme, 64, rounding="nearest", **options), out)
        tokenizer.save(out)
        return out

    return make


@pytest.fixture
def configured(vllm: None, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes vLLM's configuration of a small model's folder and of arguments.

    `changes` are those of its config.json; `model` is another folder.
    """
    from vllm.engine.arg_utils import EngineArgs

    from tests.support.small_models import write_folder

    def make(
        family: str = "smollm", changes: dict[str, Any] | None = None, model: Path | None = None, **arguments: Any
    ) -> Any:
        folder = model or write_folder(tmp_path / family, family, **{**SIZES, **(changes or {})})
        defaults = {"quantization": "ptxlab", "dtype": "float16", "enforce_eager": True, "skip_tokenizer_init": True}
        native = {"compilation_config": {"custom_ops": ["none"]}}  # operators that vLLM compiles are stand-ins
        return EngineArgs(model=str(folder), **{**defaults, **native, **arguments}).create_engine_config()

    return make
