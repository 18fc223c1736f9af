"""Tokenizers of folders and of GGUF files, read back as they were saved; broken ones are refused in one line."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.llm.checkpoints.gguf import GgufFile
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from tests.support.small_models import tokenizer, write_folder, write_gguf

TEXT = "the <turn> Zwölf 3141 the\n\n  'tis<end>"


@pytest.fixture
def saved(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path, "smollm"))


@pytest.fixture
def metadata(tmp_path: Path) -> dict[str, Any]:
    return GgufFile(write_gguf(tmp_path / "model.gguf", "smollm")).metadata


def test_text_there_and_back(saved: Tokenizer) -> None:
    tokens = saved.encode(TEXT)
    assert tokens.dtype == np.int64 and tokens.tolist() == tokenizer().encode(TEXT).ids
    assert saved.decode(tokens) == TEXT.replace("<turn>", "").replace("<end>", "")
    assert saved.decode(saved.encode("the")) == "the" and len(saved.encode("the the")) == 2
    assert (saved.vocabulary, saved.starts, saved.ends) == (261, (), (1,))


def test_a_lone_surrogate_is_refused(saved: Tokenizer) -> None:
    with pytest.raises(ArgumentError, match=r"^text: must be a str without lone surrogates \(got 'a\\ud800'\)$"):
        saved.encode("a\ud800")


def test_gguf_has_the_same(saved: Tokenizer, metadata: dict[str, Any]) -> None:
    found = Tokenizer.from_gguf(Path("a.gguf"), metadata)
    assert found.encode(TEXT).tolist() == saved.encode(TEXT).tolist()
    assert (found.starts, found.ends, found.vocabulary) == ((), (1,), 300)


def test_digits_are_words_with_smollm(metadata: dict[str, Any]) -> None:
    """As SmolLM's tokenizer.json has it: each digit apart, also behind a blank."""
    tokens = [*metadata["tokenizer.ggml.tokens"][:261], "12", "Ġ1"]
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(len(tokens), np.int32),
        "tokenizer.ggml.merges": [*metadata["tokenizer.ggml.merges"], "1 2", "Ġ 1"],
    }
    plain = Tokenizer.from_gguf(Path("a.gguf"), metadata | changed)
    apart = Tokenizer.from_gguf(Path("a.gguf"), metadata | changed | {"tokenizer.ggml.pre": "smollm"})
    assert (len(plain.encode("12 12")), len(apart.encode("12 12"))) == (3, 5)


def test_a_word_that_is_a_token_needs_no_merges_with_llama3(metadata: dict[str, Any]) -> None:
    changed = {"tokenizer.ggml.merges": [], "tokenizer.ggml.add_bos_token": False}
    lengths = {
        split: len(Tokenizer.from_gguf(Path("a"), metadata | changed | {"tokenizer.ggml.pre": split}).encode("the the"))
        for split in ("gpt-2", "qwen2", "llama-bpe")
    }
    assert lengths == {"gpt-2": 7, "qwen2": 7, "llama-bpe": 2}


def sentence_pieces(seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Metadata of a tokenizer whose pieces have random scores, and these scores."""
    rng = np.random.default_rng(seed)
    letters = ["▁", "a", "b", "c"]
    pieces = ["▁a", "ab", "bc", "▁ab", "abc", "ca", "▁b", "aa", "cab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *pieces]
    scores = np.concatenate([np.zeros(259), np.full(4, -1e6), -rng.permutation(9)])
    values = {
        "model": "llama", "tokens": tokens, "scores": scores, "unknown_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "token_type": np.array([2, 3, 3, *[6] * 256, *[1] * 13]),
    }  # fmt: skip
    found = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return found, dict(zip(tokens[259:], scores[259:], strict=True))


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """What SentencePiece does: the best of all neighbours that make a piece merge, the first of equal ones."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


@pytest.mark.parametrize("seed", range(8))
def test_sentence_pieces_merge_by_score(seed: int) -> None:
    metadata, scores = sentence_pieces(seed)
    found, tokens = Tokenizer.from_gguf(Path("a"), metadata), metadata["tokenizer.ggml.tokens"]
    rng = np.random.default_rng(seed)
    for _ in range(20):
        text = "".join(rng.choice(list("aabbc "), 12))
        ids = found.encode(text)
        assert [tokens[i] for i in ids] == merged(text, scores)
        assert found.decode(ids) == text
    assert found.decode(found.encode("aüb</s>")) == "aüb" and len(found.encode("ü")) == 3
    assert (found.starts, found.ends) == ((1,), (2,))


def test_the_start_of_a_text(metadata: dict[str, Any], tmp_path: Path) -> None:
    begun = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    found = Tokenizer.from_gguf(Path("a.gguf"), metadata | begun)
    found.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert (found.starts, again.starts, again.ends) == ((0,), (0,), (1,))
    assert again.encode(TEXT).tolist() == found.encode(TEXT).tolist() == tokenizer().encode(TEXT).ids


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [3, 4]}, "config.json": {"eos_token_id": 5}}, (3, 4)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {}}, ()),
        ({}, ()),
    ],
)
def test_what_ends_a_text(files: dict[str, Any], ends: tuple[int, ...], tmp_path: Path) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).ends == ends


def test_broken_folders_are_refused(saved: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str) -> None:
        with pytest.raises(FileError, match=message) as error:
            Tokenizer.from_folder(tmp_path)
        assert "\n" not in str(error.value)

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    refused(r"generation_config\.json: eos_token_id: must be an integer or a list of them \(got '</s>'\)$")
    (tmp_path / "generation_config.json").write_text("[1]")
    refused(r"generation_config\.json: not a JSON object$")
    for content in ("[]", "{}", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        refused(r"tokenizer\.json: not a readable tokenizer \(.+\)$")
    (tmp_path / "tokenizer.json").write_text("{")
    refused(r"tokenizer\.json: not JSON: .+")
    (tmp_path / "tokenizer.json").unlink()
    refused(r": no tokenizer\.json$")
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnavailableError, match=r"^tokenizers: needed .*; python -m pip install 'ptxlab\[model\]'$"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, r"model: must be gpt2 or llama \(got bert\)"),
        ({"pre": "tekken"}, r"pre: must be one of default, .* \(got tekken\)"),
        ({"tokens": 3}, r"tokens: must be of type list \(got int\)"),
        ({"merges": None}, r"merges: must be of type list \(got NoneType\)"),
        ({"token_type": np.zeros(2)}, r"token_type: must be 300 \(got 2\)"),
        ({"eos_token_id": 300}, r"eos_token_id: must lie in 0\.\.299 \(got 300\)"),
        ({"add_bos_token": True}, r"bos_token_id: must be of type int \(got NoneType\)"),
        ({"model": "llama"}, r"scores: must be of type ndarray \(got NoneType\)"),
        ({"model": "llama", "scores": np.zeros(2)}, r"scores: must be 300 \(got 2\)"),
    ],
)
def test_broken_metadata_are_refused(change: dict[str, Any], message: str, metadata: dict[str, Any]) -> None:
    changed = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(FileError, match=rf"^a\.gguf: tokenizer\.ggml\.{message}$"):
        Tokenizer.from_gguf(Path("a.gguf"), metadata | changed)


@pytest.mark.parametrize("merges", [["t h", "q"], ["t nosuch"], ["a b c"]])
def test_merges_of_what_is_no_token_are_refused(merges: list[str], metadata: dict[str, Any]) -> None:
    with pytest.raises(FileError, match=r"^a\.gguf: not a readable tokenizer \(.+\)$"):
        Tokenizer.from_gguf(Path("a.gguf"), metadata | {"tokenizer.ggml.merges": merges})
