"""Tokenizers of folders and of GGUF files, read back as they were saved; broken ones are refused in one line."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.llm.checkpoints import guard
from ptxlab.llm.checkpoints.gguf import GgufFile
from ptxlab.llm.checkpoints.tokenizer import _FAST_PATTERNS, Tokenizer
from tests.support.small_models import tokenizer, write_folder, write_gguf

TEXT = "the <turn> Zwölf 3141 the\n\n  'tis<end>"


@pytest.fixture
def small_tokenizer(tmp_path: Path) -> Tokenizer:
    """Load the tokenizer of a small model's folder."""
    return Tokenizer.from_folder(write_folder(tmp_path, "smollm"))


@pytest.fixture
def gguf_metadata(tmp_path: Path) -> dict[str, Any]:
    """Return the metadata of a small model's GGUF file, its tokenizer included."""
    return GgufFile(write_gguf(tmp_path / "model.gguf", "smollm")).metadata


def test_text_there_and_back(small_tokenizer: Tokenizer) -> None:
    tokens = small_tokenizer.encode(TEXT)
    assert tokens.dtype == np.int64 and tokens.tolist() == tokenizer().encode(TEXT).ids
    assert small_tokenizer.decode(tokens) == TEXT.replace("<turn>", "").replace("<end>", "")
    assert (
        small_tokenizer.decode(small_tokenizer.encode("the")) == "the" and len(small_tokenizer.encode("the the")) == 2
    )
    assert (small_tokenizer.vocabulary, small_tokenizer.starts, small_tokenizer.ends) == (261, (), (1,))


def test_a_lone_surrogate_is_refused(small_tokenizer: Tokenizer) -> None:
    with pytest.raises(ArgumentError, match=r"^text: must be a str without lone surrogates \(got 'a\\ud800'\)$"):
        small_tokenizer.encode("a\ud800")


def test_gguf_has_the_same(small_tokenizer: Tokenizer, gguf_metadata: dict[str, Any]) -> None:
    from_gguf = Tokenizer.from_gguf(Path("a.gguf"), gguf_metadata)
    assert from_gguf.encode(TEXT).tolist() == small_tokenizer.encode(TEXT).tolist()
    assert (from_gguf.starts, from_gguf.ends, from_gguf.vocabulary) == ((), (1,), 300)


def test_digits_are_words_with_smollm(gguf_metadata: dict[str, Any]) -> None:
    """The pre-tokenizer of SmolLM's tokenizer.json splits digits one by one, also behind a blank."""
    tokens = [*gguf_metadata["tokenizer.ggml.tokens"][:261], "12", "Ġ1"]
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(len(tokens), np.int32),
        "tokenizer.ggml.merges": [*gguf_metadata["tokenizer.ggml.merges"], "1 2", "Ġ 1"],
    }
    plain = Tokenizer.from_gguf(Path("a.gguf"), gguf_metadata | changed)
    split_digits = Tokenizer.from_gguf(Path("a.gguf"), gguf_metadata | changed | {"tokenizer.ggml.pre": "smollm"})
    assert (len(plain.encode("12 12")), len(split_digits.encode("12 12"))) == (3, 5)


def test_a_word_that_is_a_token_needs_no_merges_with_llama3(gguf_metadata: dict[str, Any]) -> None:
    changed = {"tokenizer.ggml.merges": [], "tokenizer.ggml.add_bos_token": False}
    lengths = {
        split: len(
            Tokenizer.from_gguf(Path("a"), gguf_metadata | changed | {"tokenizer.ggml.pre": split}).encode("the the")
        )
        for split in ("gpt-2", "qwen2", "llama-bpe")
    }
    assert lengths == {"gpt-2": 7, "qwen2": 7, "llama-bpe": 2}


def sentence_pieces(seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Make the metadata of a tokenizer whose pieces have random scores, and these scores."""
    rng = np.random.default_rng(seed)
    letters = ["▁", "a", "b", "c"]
    pieces = ["▁a", "ab", "bc", "▁ab", "abc", "ca", "▁b", "aa", "cab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *pieces]
    scores = np.concatenate([np.zeros(259), np.full(4, -1e6), -rng.permutation(9)])
    values = {
        "model": "llama", "tokens": tokens, "scores": scores, "unknown_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "token_type": np.array([2, 3, 3, *[6] * 256, *[1] * 13]),
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": entry for key, entry in values.items()}
    return metadata, dict(zip(tokens[259:], scores[259:], strict=True))


def merge_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """Tokenise as SentencePiece does: the best of all neighbours that make a piece merge.

    Of equally good neighbours the first merge.
    """
    pieces = list("▁" + text.replace(" ", "▁"))
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


@pytest.mark.parametrize("seed", range(8))
def test_sentence_pieces_merge_by_score(seed: int) -> None:
    metadata, scores = sentence_pieces(seed)
    loaded, tokens = Tokenizer.from_gguf(Path("a"), metadata), metadata["tokenizer.ggml.tokens"]
    rng = np.random.default_rng(seed)
    for _ in range(20):
        text = "".join(rng.choice(list("aabbc "), 12))
        ids = loaded.encode(text)
        assert [tokens[i] for i in ids] == merge_pieces(text, scores)
        assert loaded.decode(ids) == text
    assert loaded.decode(loaded.encode("aüb</s>")) == "aüb" and len(loaded.encode("ü")) == 3
    assert (loaded.starts, loaded.ends) == ((1,), (2,))


def test_the_start_of_a_text(gguf_metadata: dict[str, Any], tmp_path: Path) -> None:
    start_settings = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    from_gguf = Tokenizer.from_gguf(Path("a.gguf"), gguf_metadata | start_settings)
    from_gguf.save(tmp_path)
    reread = Tokenizer.from_folder(tmp_path)
    assert (from_gguf.starts, reread.starts, reread.ends) == ((0,), (0,), (1,))
    assert reread.encode(TEXT).tolist() == from_gguf.encode(TEXT).tolist() == tokenizer().encode(TEXT).ids


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


def test_broken_folders_are_refused(
    small_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_refused(message: str) -> None:
        with pytest.raises(FileError, match=message) as error:
            Tokenizer.from_folder(tmp_path)
        assert "\n" not in str(error.value)

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert_refused(r"generation_config\.json: eos_token_id: must be an integer or a list of them \(got '</s>'\)$")
    (tmp_path / "generation_config.json").write_text("[1]")
    assert_refused(r"generation_config\.json: not a JSON object$")
    for content in ("[]", "{}", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        assert_refused(r"tokenizer\.json: not a readable tokenizer \(.+\)$")
    (tmp_path / "tokenizer.json").write_text("{")
    assert_refused(r"tokenizer\.json: not JSON: .+")
    (tmp_path / "tokenizer.json").unlink()
    assert_refused(r": no tokenizer\.json$")
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
def test_broken_metadata_are_refused(change: dict[str, Any], message: str, gguf_metadata: dict[str, Any]) -> None:
    changed = {f"tokenizer.ggml.{key}": entry for key, entry in change.items()}
    with pytest.raises(FileError, match=rf"^a\.gguf: tokenizer\.ggml\.{message}$"):
        Tokenizer.from_gguf(Path("a.gguf"), gguf_metadata | changed)


@pytest.mark.parametrize("merges", [["t h", "q"], ["t nosuch"], ["a b c"]])
def test_merges_of_what_is_no_token_are_refused(merges: list[str], gguf_metadata: dict[str, Any]) -> None:
    with pytest.raises(FileError, match=r"^a\.gguf: not a readable tokenizer \(.+\)$"):
        Tokenizer.from_gguf(Path("a.gguf"), gguf_metadata | {"tokenizer.ggml.merges": merges})


def special(*tokens: int) -> list[dict[str, Any]]:
    """Return pieces of a template."""
    return [{"SpecialToken": {"id": f"token {token}", "type_id": 0}} for token in tokens]


def template(starts: tuple[int, ...], ends: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return a template with tokens on both sides of the text."""
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    specials = {
        f"token {token}": {"id": f"token {token}", "ids": [token], "tokens": ["?"]} for token in (*starts, *ends)
    }
    single = [*special(*starts), texts[0], *special(*ends)]
    return {"type": "TemplateProcessing", "single": single, "pair": texts, "special_tokens": specials}


def write(folder: Path, changes: dict[str, Any], **files: Any) -> Path:
    """Write a tokenizer.json with other sections, and other JSON files by their stem."""
    definition = {**json.loads(tokenizer().to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
TEMPLATES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "none": (None, ()),
    "bytes": (BYTES, ()),
    "an end": (template((), (0,)), ()),
    "a start": (template((1,)), (1,)),
    "both": (template((1,), (0,)), (1,)),
    "several": (template((1, 0, 1), (0, 0)), (1, 0, 1)),
    "after bytes": ({"type": "Sequence", "processors": [BYTES, template((0,))]}, (0,)),
    "bert": ({"type": "BertProcessing", "sep": ["<end>", 0], "cls": ["<turn>", 1]}, (1,)),
    "roberta": (
        {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 0], "trim_offsets": True, "add_prefix_space": True},
        (0,),
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_starts_are_what_the_template_puts_ahead(name: str, tmp_path: Path) -> None:
    """Compare with where the library places them, and save them."""
    processor, starts = TEMPLATES[name]
    ours = Tokenizer.from_folder(write(tmp_path, {"post_processor": processor}))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("the the")
    num_starts = next(i for i, sequence in enumerate(library.sequence_ids) if sequence is not None)
    assert ours.starts == tuple(library.ids[:num_starts]) == starts
    ours.save(tmp_path)
    reread = Tokenizer.from_folder(tmp_path)
    assert reread.starts == starts and reread.encode(TEXT).tolist() == ours.encode(TEXT).tolist()


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("add", [None, False, True])
@pytest.mark.parametrize("name", ["none", "a start", "an end", "several", "after bytes"])
def test_starts_are_those_of_transformers(name: str, add: bool | None, tmp_path: Path) -> None:
    """Ignore `add_bos_token` of tokenizer_config.json, as there is a tokenizer.json."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<end>", "eos_token": "<turn>"}
    config |= {} if add is None else {"add_bos_token": add, "add_eos_token": not add}
    sections = {"post_processor": TEMPLATES[name][0]}
    folder = write(tmp_path, sections, tokenizer_config=config, config={"model_type": "llama"})
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs("the").input_ids
    assert [*ours.starts, *ours.encode("the")] == expected[: expected.index(259) + 1]


@pytest.mark.parametrize("side", ["Left", "Right"])
def test_nothing_is_cut_off_or_filled_up(side: str, tmp_path: Path) -> None:
    """Ignore what training has left in the file, and save without it; merges are not dropped at random either."""
    changes = {
        "truncation": {"direction": side, "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 99}, "direction": side, "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<end>",
        },
        "model": {**json.loads(tokenizer().to_str())["model"], "dropout": 0.9},
    }  # fmt: skip
    for _ in range(2):
        ours = Tokenizer.from_folder(write(tmp_path, changes))
        assert ours.encode(TEXT).tolist() == tokenizer().encode(TEXT).ids
        ours.save(tmp_path)
        saved_json = json.loads((tmp_path / "tokenizer.json").read_text())
        assert (saved_json["truncation"], saved_json["padding"], saved_json["model"]["dropout"]) == (None, None, None)
        changes = {}


def control(metadata: dict[str, Any], *texts: str, kind: int = 3) -> dict[str, Any]:
    """Put these tokens in the place of unused ones from 261 on."""
    tokens, kinds = [*metadata["tokenizer.ggml.tokens"]], np.array(metadata["tokenizer.ggml.token_type"])
    tokens[261 : 261 + len(texts)], kinds[261 : 261 + len(texts)] = texts, kind
    return {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


@pytest.mark.parametrize(
    ("keys", "texts", "ends"),
    [
        ({"eot_token_id": 5}, (), (1, 5)),
        ({"eom_token_id": 6, "eot_token_id": 5}, (), (1, 5, 6)),
        ({"eos_token_ids": [1, 7, 8]}, (), (1, 7, 8)),
        ({"eos_token_ids": np.array([9], np.int32)}, (), (1, 9)),
        ({"fim_pad_token_id": 4, "fim_pre_token_id": 3}, (), (1, 4)),
        ({}, ("<|im_start|>", "<|im_end|>"), (1, 262)),
        ({"eot_token_id": 262}, ("<|eom_id|>", "<|eot_id|>", "<|endoftext|>"), (1, 262, 261, 263)),
    ],
)
def test_every_end_of_a_gguf(
    keys: dict[str, Any], texts: tuple[str, ...], ends: tuple[int, ...], gguf_metadata: dict[str, Any]
) -> None:
    """Find those that metadata name and those that llama.cpp knows by their text."""
    stated_config = {f"tokenizer.ggml.{key}": token for key, token in keys.items()}
    assert Tokenizer.from_gguf(Path("a.gguf"), control(gguf_metadata, *texts) | stated_config).ends == ends


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_a_known_end_is_special_whatever_its_type(kind: int, gguf_metadata: dict[str, Any]) -> None:
    ours = Tokenizer.from_gguf(Path("a.gguf"), control(gguf_metadata, "<|im_end|>", "[other]", kind=kind))
    assert ours.ends == (1, 261) and ours.encode("the<|im_end|>")[-1] == 261
    assert ours.decode([259, 261]) == "the"


# Sections of a tokenizer.json, texts, and what becomes of them: the same tokens as without the section, or an error.
LONG = "a" * 5000 + "b"
HARMLESS = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    """Return a normaliser."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(expression: str) -> dict[str, Any]:
    """Return a pre-tokeniser."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


DOUBLED = {"type": "Sequence", "normalizers": [replace({"String": "a"}, "aa")] * 60}
BEYOND_LIMITS = r"failed on \d+ characters \((takes|needs) more than "
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "regex of exponential time": ({"pre_tokenizer": split("(a+)+$")}, r"failed on 5001 characters \(.*retry-limit"),
    "regex of a normaliser": ({"normalizer": replace({"Regex": "(a|aa)+$"}, "")}, r"failed on 5001 characters \("),
    "regex that is none": ({"pre_tokenizer": split("(")}, r"failed on 5001 characters \(Exception: Onig"),
    "growth by steps": ({"normalizer": DOUBLED}, BEYOND_LIMITS),
    "growth by a regex": ({"normalizer": replace({"Regex": "."}, "x" * 10**6)}, BEYOND_LIMITS),
    "growth to tokens": ({"normalizer": replace({"Regex": "a"}, "x" * 40)}, r"failed on 5001 .*it gives \d+ tokens"),
    "a regex in disguise": (
        {"normalizer": {**replace({"Regex": "(a+)+$"}, ""), "normalizers": [{"type": "NFC"}]}},
        r"failed on 5001 characters \(.*retry-limit",
    ),
    "a long prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}}, BEYOND_LIMITS),
}  # fmt: skip


@pytest.mark.default_cases("regex of exponential time")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizers_are_stopped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse in one line, within the time and the memory."""
    monkeypatch.setattr(guard, "SECONDS", 2.0)
    monkeypatch.setattr(guard, "MEMORY", 1 << 30)
    sections, message = HOSTILE[name]
    ours = Tokenizer.from_folder(write(tmp_path, sections))
    assert ours.decode(tokenizer().encode("the").ids) == "the"
    with pytest.raises(FileError, match=rf"^{tmp_path}/tokenizer\.json: .*{message}") as error:
        ours.encode(LONG)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_token_for_each_byte_of_the_longest_form_is_encoded(tmp_path: Path) -> None:
    """NFKC makes 33 bytes of U+FDFA, of which no two are merged here."""
    text, steps = "\ufdfa" * 40, [split(r"[\s]+|\S+"), {**BYTES, "add_prefix_space": False}]
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, replace({"Regex": "(?=q)"}, "")]}
    sections = {"normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    ours = Tokenizer.from_folder(write(tmp_path, sections))
    assert ours._guarded is not None
    right = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert ours.encode(text).tolist() == right and len(right) > 32 * (len(text) + 1)


def test_a_guarded_tokenizer_encodes_and_is_saved_whole(tmp_path: Path) -> None:
    """Take an unknown but harmless pattern."""
    steps = [split(r"[\s]+|\S+"), {**BYTES, "add_prefix_space": False}]
    sections = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    ours = Tokenizer.from_folder(write(tmp_path, sections))
    assert ours._guarded is not None
    right = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids
    assert ours.encode(TEXT).tolist() == right
    ours.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).encode(TEXT).tolist() == right
    with pytest.raises(ArgumentError, match="text: must be a str without lone surrogates"):
        ours.encode("a\ud800")


def test_a_section_that_occurs_twice_counts_as_python_reads_it(tmp_path: Path) -> None:
    """Look at what the library is given, not at what it might find in the file."""
    definition = (
        tokenizer().to_str().replace('"normalizer":null', f'"normalizer":{json.dumps(DOUBLED)},"normalizer":null')
    )
    assert definition.count('"normalizer"') > 1
    (tmp_path / "tokenizer.json").write_text(definition)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours._guarded is None and ours.encode(LONG).tolist() == tokenizer().encode(LONG).ids


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"normalizer": HARMLESS},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                                            replace({"String": " "}, "▁")]}},
        *({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(text), BYTES]}} for text in _FAST_PATTERNS),
    ],
)  # fmt: skip
def test_published_tokenizers_encode_without_a_process(sections: dict[str, Any], tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write(tmp_path, sections))
    right = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids
    assert ours._guarded is None and ours.encode(TEXT).tolist() == right


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"decoder": replace({"Regex": "(a+)+$"}, "")},
            "decoder: must be of known steps that do not multiply the text",
        ),
        ({"decoder": replace({"String": "a"}, "a" * 99)}, "decoder: must be of known steps"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99}}, "decoder: must be of known steps"),
        ({"post_processor": template((0,) * 65)}, "post_processor: at most 64 tokens ahead of a text"),
        (
            {"post_processor": {"type": "Sequence", "processors": [template((0,)), BYTES, template((1,))]}},
            r"post_processor: at most one part may add tokens \(got 2\)",
        ),
        ({"added_tokens": [{"id": 3}]}, r"not a readable tokenizer \(.+\)"),
        ({"model": [1]}, r"not a readable tokenizer \(.+\)"),
    ],
)
def test_hostile_files_are_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=rf"tokenizer\.json: {message}") as error:
        Tokenizer.from_folder(write(tmp_path, sections))
    assert "\n" not in str(error.value)


def test_tokens_that_take_forever_to_cut_are_refused() -> None:
    metadata, _ = sentence_pieces(0)
    metadata["tokenizer.ggml.tokens"][-1] = "x" * (1 << 15)
    with pytest.raises(FileError, match=r"tokens: lengths squared must sum to 268435456 at most"):
        Tokenizer.from_gguf(Path("a"), metadata)


JUNK: list[Any] = [None, True, 0, -1, 1.5, "", "x", [], [1], {}, {"type": "ByteLevel"}, {"type": ["NFC"]}, {"type": ""}]
SECTIONS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "version", "padding")


@pytest.mark.parametrize("section", SECTIONS)
def test_whatever_a_section_holds(section: str, tmp_path: Path) -> None:
    """Read it, or refuse it in one line; and so the keys of the model."""
    model = json.loads(tokenizer().to_str())["model"]
    changes = [{section: junk} for junk in JUNK]
    if section == "model":
        changes += [{"model": {**model, key: junk}} for key in model for junk in JUNK]
    for change in changes:
        try:
            ours = Tokenizer.from_folder(write(tmp_path, change))
        except FileError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
        else:
            assert ours._guarded or isinstance(ours.decode(ours.encode("the")), str)


def test_junk_in_metadata_is_read_or_refused(gguf_metadata: dict[str, Any]) -> None:
    keys = ("model", "pre", "tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id", "add_bos_token",
            "eot_token_id", "eos_token_ids", "unknown_token_id", "add_space_prefix")  # fmt: skip
    pieces, _ = sentence_pieces(0)
    for whole in (gguf_metadata, pieces):
        for key in keys:
            for junk in [*JUNK, np.zeros(3), np.zeros((2, 2)), ["a"] * 300, ["a b"], 2**70]:
                try:
                    ours = Tokenizer.from_gguf(Path("a.gguf"), {**whole, f"tokenizer.ggml.{key}": junk})
                except FileError as error:
                    assert "\n" not in str(error) and len(str(error)) < 1000
                else:
                    assert len(ours.encode("the")) and ours.ends
