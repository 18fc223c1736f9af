"""The plugin in vLLM's engine on a GPU: texts, perplexity, settings of the engine, and a server with clients."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import UnavailableError
from ptxlab.llm.accuracy.parting import parting
from ptxlab.llm.accuracy.text import open_text, tokens_of, windows
from ptxlab.llm.checkpoints import folder as folders
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.model import KernelRunner, QuantizedModel, generate, perplexity
from ptxlab.llm.model.cache_formats import CACHE_FORMATS, CacheFormat, StoredTensor
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.server import Request
from tests.support.vllm_engine import COMMON, ENVIRONMENT, SETTINGS, run_engine, what_failed


def what_is_missing() -> str:
    """Name what the tests need and this machine has not; empty if there is nothing."""
    if reason := gpu.why_not("sm_90a", exact=True):
        return f"the plugin's kernels: {reason}"
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return "vLLM 0.26.0 is not importable"
    if (version := metadata.version("vllm")).partition("+")[0] != "0.26.0":
        return f"vLLM 0.26.0: this is {version}"
    if not any(Path(package.origin).parent.glob("*.so")):
        return "vLLM's compiled operators: these are its sources alone"
    return ""


MISSING = what_is_missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing")]
# As of runs of one model that round otherwise (tests/llm/test_server_on_gpu.py): in deviations of the logits.
MOST_APART = 1.5
OTHER_NUMBERS = ("8-bit cache", "head in INT8")  # settings that are no ties, but other roundings
CLIENTS = 64


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write SmolLM2 as a folder of packed weights in groups of 64, with its tokenizer."""
    try:
        model, tokenizer = open_model("smollm2")
    except UnavailableError as error:
        pytest.skip(f"SmolLM2: {error}")
    folder = tmp_path_factory.mktemp("smollm2")
    folders.save(QuantizedModel.rounded(model, group=64), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """Cut the beginnings of two hundred texts, 8 to 300 tokens each."""
    tokens, rng = corpus(smollm2, 8), np.random.default_rng(0)
    starts, lengths = rng.integers(0, len(tokens) - 300, 200), rng.integers(8, 301, 200)
    return [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


def corpus(folder: Path, articles: int | None = None) -> Any:
    """Return the tokens of the text, or of its first articles."""
    from ptxlab.llm.checkpoints.tokenizer import Tokenizer

    try:
        return tokens_of(open_text("wikipedia").evaluation[:articles], Tokenizer.from_folder(folder))
    except UnavailableError as error:
        pytest.skip(f"texts of Wikipedia: {error}")


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of an engine; without FlashInfer vLLM cannot start unless its sampler is off."""
    sampler = {} if find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {
        **os.environ,
        **sampler,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **variables,
    }


def require_equal_but_for_ties(folder: Path, prompts: list[list[int]], texts: list[list[int]], head: str) -> None:
    """Compare texts with what `KernelRunner` makes of their prompts."""
    runner = KernelRunner(folders.load(folder), 1, 512, chunk=512, head=head)
    partings = [parting(runner, Request(prompt, 64, tokens=text)) for prompt, text in zip(prompts, texts, strict=True)]
    parted = [tie for tie in partings if tie is not None]
    farthest = max(zip(partings, prompts, strict=True), key=lambda of: of[0].margin / of[0].spread if of[0] else 0.0)
    print(f"{len(parted)} of {len(texts)} texts part; the farthest: {farthest[0]} behind {len(farthest[1])} tokens")
    assert all(len(text) == 64 for text in texts)
    assert not [tie for tie in parted if tie.margin > MOST_APART * tie.spread]


def test_texts_of_the_kernels_part_by_no_more_in_other_batches(smollm2: Path, prompts: list[list[int]]) -> None:
    """This runs without vLLM: it shows the effect of one rounding on texts of this model."""
    packed, texts = folders.load(smollm2), list[list[int]]()
    for start in range(0, len(prompts), 50):
        steps = list(generate(KernelRunner(packed, 50, 512), prompts[start : start + 50], 64))
        texts += np.array(steps).T.tolist()
    require_equal_but_for_ties(smollm2, prompts, texts, "float16")


@pytest.mark.long(120)
def test_texts_are_those_of_the_kernels_alone(smollm2: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    texts = run_engine(smollm2, tmp_path, prompts, environment())["tokens"]
    require_equal_but_for_ties(smollm2, prompts, texts, "float16")


@pytest.mark.long(120)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_engine(smollm2: Path, prompts: list[list[int]], tmp_path: Path, name: str) -> None:
    """The texts are those of the kernels alone under each setting.

    Prompts come twice, the second time behind a prefix.
    """
    twice = [*prompts[:40], *prompts[:40]]
    texts = run_engine(smollm2, tmp_path, twice, environment(**ENVIRONMENT.get(name, {})), **SETTINGS[name])["tokens"]
    if name == "batch invariance":
        assert texts[:40] == texts[40:]
    if name in OTHER_NUMBERS:
        single_runs = run_engine(smollm2, tmp_path, twice[:1], environment(), **SETTINGS[name])["tokens"]
        assert len(texts) == 80 and all(len(text) == 64 for text in texts) and single_runs[0][:1] == texts[0][:1]
        return
    require_equal_but_for_ties(smollm2, twice, texts, "float16")


@pytest.mark.long(120)
@pytest.mark.parametrize(("scheme", "dtype"), [("kv4", None), ("kv8", "int8_per_token_head")])
def test_perplexity_is_that_of_the_formulas(
    smollm2: Path, tmp_path: Path, scheme: str, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two agree within 0.5% of `ptxlab perplexity`.

    On both sides own keys come from the cache, rotated, and values are plain.
    """
    rotated = CacheFormat(StoredTensor(scheme, rotated=True), StoredTensor(scheme))
    monkeypatch.setitem(CACHE_FORMATS, "rotated keys", rotated)  # type: ignore[arg-type]
    of_text = windows(corpus(smollm2), 512)
    arguments: dict[str, Any] = {"of_prompts": True, "new": 1, **({"kv_cache_dtype": dtype} if dtype else {})}
    prompts = [window.tolist() for window in of_text]
    logprobs = run_engine(smollm2, tmp_path, prompts, environment(), **arguments)["logprobs"]
    ours = float(np.exp(-np.mean([np.mean(of_prompt) for of_prompt in logprobs])))
    model, _ = open_model(smollm2)
    right = perplexity(model.to_device(), of_text, FakeQuantized(kv="rotated keys"))
    print(f"perplexity {ours:.4f} in vLLM, {right:.4f} by the formulas")
    assert ours == pytest.approx(right, rel=5e-3)


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start `vllm serve`, and yield its address."""
    if find_spec("openai") is None or find_spec("uvicorn") is None:
        pytest.skip("openai and uvicorn, of the server and its client, are not importable")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(smollm2), "--port", str(port)]
    options = ["--served-model-name=smollm2"]
    options += [
        f"--{name.replace('_', '-')}={setting}" for name, setting in COMMON.items() if not isinstance(setting, bool)
    ]
    with (
        open(log, "w") as out,
        subprocess.Popen([*command, *options], env=environment(), stdout=out, stderr=out) as run,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(600):
                if run.poll() is not None or answers(f"{address}/health"):
                    break
                time.sleep(1)
            assert answers(f"{address}/health"), what_failed(log.read_text())
            yield address
        finally:
            run.terminate()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def share_of_the_cache(address: str) -> float:
    """Return the share of the cache's blocks that requests hold."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:kv_cache_usage_perc")]
    return float(line.split()[-1])


def stream(address: str, prompt: str, texts: list[str], limit: int | None = None) -> None:
    """Complete a prompt in pieces; after `limit` of them the connection is closed."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    pieces = client.completions.create(model="smollm2", prompt=prompt, max_tokens=64, temperature=0.0, stream=True)
    text = ""
    for number, piece in enumerate(pieces):
        text += piece.choices[0].text if piece.choices else ""
        if number == limit:
            pieces.close()
            break
    texts.append(text)


@pytest.mark.long(120)
def test_clients_stream_at_once_and_may_leave(server: str) -> None:
    """Sixty-four clients stream at once; a client that leaves in the midst leaves no page behind."""
    whole: list[str] = []
    cut: list[str] = []
    staying = [threading.Thread(target=stream, args=(server, f"Chapter {i}. The", whole)) for i in range(CLIENTS)]
    leaving = [threading.Thread(target=stream, args=(server, f"Part {i}. A", cut, 3)) for i in range(CLIENTS)]
    for thread in [*staying, *leaving]:
        thread.start()
    for thread in [*staying, *leaving]:
        thread.join(300)
    assert len(whole) == len(cut) == CLIENTS and all(whole)
    for _ in range(30):
        if share_of_the_cache(server) == 0:
            break
        time.sleep(1)
    assert share_of_the_cache(server) == 0


def test_the_server_chats(server: str) -> None:
    """SmolLM2 has a template, which its folder keeps."""
    import openai

    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    message = {"role": "user", "content": "Name a colour."}
    answer = client.chat.completions.create(model="smollm2", messages=[message], max_tokens=16, temperature=0.0)  # type: ignore[list-item]
    assert answer.choices[0].message.content and json.loads(answer.to_json())["model"] == "smollm2"
