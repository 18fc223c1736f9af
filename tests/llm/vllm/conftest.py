from importlib.util import find_spec

import pytest

if find_spec("vllm") is None or find_spec("torch") is None:
    collect_ignore_glob = []

    @pytest.fixture(autouse=True, scope="session")
    def vllm() -> None:
        pytest.skip("the sources of vLLM 0.26.0, or PyTorch, are not importable")

else:

    @pytest.fixture(autouse=True, scope="session")
    def vllm() -> None:
        """vLLM's sources with stand-ins for what is compiled, and the plugin registered."""
        import ptxlab.llm.torch  # noqa: F401  (its operators have real fakes)
        from ptxlab.llm.vllm import register
        from tests.support import fake_vllm

        fake_vllm.install()
        register()
