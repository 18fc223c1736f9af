import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm() -> None:
    """vLLM's sources with stand-ins for what is compiled, and the plugin registered."""
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
    """Groups of one process, in which layers find their rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel()


@pytest.fixture
def configured(vllm: None, tmp_path: Path) -> Callable[..., Any]:
    """The configuration that vLLM makes of a small model's folder and of arguments; `changes` of its config.json."""
    from vllm.engine.arg_utils import EngineArgs

    from tests.support.small_models import write_folder

    def make(family: str = "smollm", changes: dict[str, Any] | None = None, **arguments: Any) -> Any:
        sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
        folder = write_folder(tmp_path / family, family, **{**sizes, "head_dim": 64, **(changes or {})})
        defaults = {"quantization": "ptxlab", "dtype": "float16", "enforce_eager": True, "skip_tokenizer_init": True}
        native = {"compilation_config": {"custom_ops": ["none"]}}  # operators that vLLM compiles are stand-ins
        return EngineArgs(model=str(folder), **{**defaults, **native, **arguments}).create_engine_config()

    return make
