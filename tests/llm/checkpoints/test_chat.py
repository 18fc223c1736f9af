"""Chat templates of folders and GGUF files: rendered as transformers does, and bounded as strangers' code."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ptxlab.errors import FileError, UnavailableError
from ptxlab.llm.checkpoints import chat, render_chat, run_limited
from ptxlab.llm.checkpoints.chat import ChatTemplate, Message
from ptxlab.llm.checkpoints.gguf import GgufFile
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from tests.support.small_models import tokenizer as small_tokenizer
from tests.support.small_models import write_folder, write_gguf

CHAT: list[Message] = [
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": " <b>é😀</b> "},
    {"role": "assistant", "content": "Yes.\n\n"},
    {"role": "user", "content": "Why?"},
]
# What templates of published models make use of: blocks on lines of their own, loops that break, namespaces, macros.
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "lines": """{{- bos_token }}
    {%- set ns = namespace(system='') %}
    {%- for message in messages %}
      {%- if message.role == 'system' %}{%- set ns.system = message.content | trim %}{% continue %}{%- endif %}
      {{- '[INST] ' + (ns.system + '\n' if loop.index0 == 1 else '') + message['content'] | tojson + ' [/INST]' }}
      {%- if tools is not none %}tools{% endif %}
    {%- endfor %}
    {{ eos_token }}
    """,
    "generation": "{% for m in messages %}\n{% if m.role == 'assistant' %}\n  {% generation %}\n  {% set x = 1 %}\n"
    "{{ m.content }}!\n  {% endgeneration %}\n{{ x }}{% endif %}\n{% endfor %}\n",
    "macro": "{% macro turn(m) %}({{ m.role }}: {{ m.content.strip() }}){% endmacro %}\n"
    "{% for m in messages[1:] %}\n  {{ turn(m) }}\n{% endfor %}{{ messages | length }}",
}
TOKENS = {"bos_token": "<end>", "eos_token": "<turn>"}


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, TOKENS, Path("model"))


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("name", TEMPLATES)
def test_it_is_rendered_as_transformers_does(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=small_tokenizer(), **TOKENS)
    right = theirs.apply_chat_template(CHAT, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True)
    assert template(TEMPLATES[name]).render([CHAT, CHAT[1:2]])[0] == right


@pytest.mark.full_cases("loops", "size", "length", "changes", "syntax", "undefined")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "takes more than 3 s or 1024 MiB", id="loops"
        ),
        pytest.param("{{ 'a' * 10**10 }}", "needs more than 1024 MiB", id="size"),
        pytest.param("{{ '%5000000s' % 'a' }}", "makes 5000000 characters of a conversation", id="length"),
        pytest.param("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'", id="internals"),
        pytest.param("{{ messages.append(1) }}", "SecurityError: ", id="changes"),
        pytest.param("{{ raise_exception('no system message') }}", "ValueError: no system message", id="raises"),
        pytest.param("{% if %}", "TemplateSyntaxError: Expected an expression", id="syntax"),
        pytest.param("{{ missing.name }}", "UndefinedError: 'missing' is undefined", id="undefined"),
    ],
)
def test_a_template_that_fails_is_one_line(text: str, message: str) -> None:
    with pytest.raises(FileError, match=r"^model: the chat template fails: ") as error:
        template(text).render([CHAT])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "file", "text"),
    [
        ({"chat_template": "a"}, None, "a"),
        ({"chat_template": "a"}, "b", "b"),
        ({"chat_template": [{"name": "rag", "template": "c"}, {"name": "default", "template": "d"}]}, None, "d"),
        ({"chat_template": [{"name": "rag", "template": "c"}]}, None, None),
        (None, "b", "b"),
        ({}, None, None),
    ],
)
def test_where_a_folder_keeps_it(
    tmp_path: Path, config: dict[str, Any] | None, file: str | None, text: str | None
) -> None:
    if config is not None:
        config |= {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    read_template = ChatTemplate.from_folder(tmp_path)
    assert (None if read_template is None else read_template.text) == text
    if read_template is not None and config is not None:
        assert read_template.tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_quantised_models_folder_keeps_it(tmp_path: Path) -> None:
    for name, tokens in (("with", TOKENS), ("without", None)):
        (tmp_path / name).mkdir()
        saved = None if tokens is None else ChatTemplate("{{ bos_token }}", tokens, tmp_path)
        (tmp_path / "config.json").write_text("{}")
        Tokenizer((1,), small_tokenizer(), template=saved).save(tmp_path / name)
        read_template = Tokenizer.from_folder(tmp_path / name).template
        assert (None if read_template is None else (read_template.text, read_template.tokens)) == (
            saved and (saved.text, saved.tokens)
        )


def test_a_gguf_file_keeps_it_in_its_metadata() -> None:
    metadata = {
        "tokenizer.chat_template": "t", "tokenizer.ggml.tokens": ["<s>", "a", "</s>"],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    read_template = ChatTemplate.from_gguf(Path("x"), metadata)
    assert read_template is not None and (read_template.text, read_template.tokens) == (
        "t",
        {"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert ChatTemplate.from_gguf(Path("x"), {}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a JSON object"),
        ('{"chat_template": 3}', r"chat_template: must be a template, or a list of them by name \(got 3\)"),
    ],
)
def test_a_broken_tokenizer_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = write_folder(tmp_path / "model", "smollm")
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(FileError, match=rf"tokenizer_config\.json: {message}$"):
        Tokenizer.from_folder(folder)


def test_without_a_template_the_vocabulary_decides() -> None:
    assert not Tokenizer((), small_tokenizer()).chats
    library = small_tokenizer()
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer((), library)
    (tokens,) = tokenizer.encode_chats([CHAT[2:]])
    text = "<|im_start|>assistant\nYes.\n\n<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chats and tokens == library.encode(text).ids


def test_without_jinja_a_template_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"^jinja2: needed for chat templates; python -m pip install "):
        template("a").render([CHAT])


@pytest.mark.default_cases("None-extra5-config_tokens5-<c><i>")
@pytest.mark.parametrize(
    ("special", "extra", "config_tokens", "text"),
    [
        ({"bos_token": {"content": "<m>"}}, None, {}, "<m>"),
        ({"bos_token": "<m>"}, {"bos_token": "<x>"}, {}, "<x>"),
        ({"bos_token": "<m>"}, {"bos_token": "<x>"}, {"bos_token": "<c>"}, "<x>"),
        ({"bos_token": "<m>"}, None, {"bos_token": "<c>"}, "<m>"),
        ({"bos_token": "<m>"}, None, {"bos_token": "<c>", "added_tokens_decoder": {}}, "<c>"),
        (None, {"boi_token": "<i>"}, {"boi_token": "<o>", "bos_token": "<c>"}, "<c><i>"),
        ({"bos_token": "<m>"}, ["<x>"], {"bos_token": None}, "<m>"),
        (None, {"bos_token": {"content": "<x>"}, "boi_token": "<i>"}, {}, "<x><i>"),
        (None, None, {"bos_token": None}, ""),
    ],
)
def test_where_a_folder_keeps_special_tokens(
    tmp_path: Path, special: dict[str, Any] | None, extra: Any, config_tokens: dict[str, Any], text: str
) -> None:
    config = config_tokens | {"chat_template": "{{ bos_token }}{{ boi_token | default('') }}"}
    config |= {} if extra is None else {"extra_special_tokens": extra}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if special is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    read_template = ChatTemplate.from_folder(tmp_path)
    assert read_template is not None and read_template.render([CHAT]) == [text]
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(read_template.settings))
    reread = ChatTemplate.from_folder(tmp_path / "saved")
    assert reread is not None and (reread.tokens, reread.unset) == (read_template.tokens, read_template.unset)


@pytest.mark.parametrize("text", ["{{ pad_token }}", "{{ 'a' ~ pad_token }}", "{% set a = pad_token %}{{ a | trim }}"])
def test_a_token_that_no_file_defines_is_refused(text: str) -> None:
    message = r"^model: the chat template fails: UndefinedError: pad_token: must be defined in the model's files"
    with pytest.raises(FileError, match=message) as error:
        template(text).render([CHAT])
    assert "\n" not in str(error.value)


def test_a_template_may_ask_for_a_token_that_no_file_defines() -> None:
    text = "{% if pad_token %}a{% endif %}{{ pad_token if pad_token is defined else 'b' }}{{ messages[0].pad_token }}"
    assert template(text).render([CHAT]) == ["b"]


@pytest.mark.default_cases("False-False-0")
@pytest.mark.parametrize(("add", "start"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("prints", [False, True])
def test_a_gguf_files_conversation_has_its_start_token_once(
    tmp_path: Path, add: bool, start: int, prints: bool
) -> None:
    metadata = GgufFile(write_gguf(tmp_path / "model.gguf", "smollm")).metadata
    text = "\n{{ messages[0].content }}\n{% set whole = 'x' %}  \n  \r\n"
    metadata = metadata | {
        "tokenizer.chat_template": "{{ bos_token }}" * prints + text,
        "tokenizer.ggml.add_bos_token": add, "tokenizer.ggml.bos_token_id": 0,
    }  # fmt: skip
    first_tokenizer = Tokenizer.from_gguf(Path("a.gguf"), metadata)
    (tmp_path / "saved").mkdir()
    first_tokenizer.save(tmp_path / "saved")
    expected = [0] * (prints or start) + first_tokenizer.encode("\nBe  brief.\n\n  \n  ").tolist()
    for tokenizer in (first_tokenizer, Tokenizer.from_folder(tmp_path / "saved")):
        assert tokenizer.encode_chats([CHAT, CHAT]) == [expected, expected]


def test_a_folders_template_alone_decides_on_the_start(tmp_path: Path) -> None:
    for text, start in (("a", [0] * 0), ("{{ bos_token }}a", [0])):
        chat_tokenizer = Tokenizer((1,), small_tokenizer(), starts=(0,), template=template(text))
        assert chat_tokenizer.encode_chats([CHAT]) == [start + chat_tokenizer.encode("a").tolist()]


def test_an_answer_that_is_marked_for_training_is_rendered() -> None:
    text = "a{% generation %}{{ messages[2].content | trim }}{% endgeneration %}b"
    assert template(text).render([CHAT]) == ["aYes.b"]


def test_a_system_without_resource_limits_renders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"template": "{{ messages[3].content }}", "variables": {}, "chats": [CHAT], "unset": []}
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    run_limited.main(render_chat.__file__, render_chat.BYTES, render_chat.SECONDS)
    assert json.loads(capsys.readouterr().out) == {"answer": ["Why?"]}


def test_the_clock_bounds_a_template_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_WALL", 0.0001)
    with pytest.raises(
        FileError, match=r"^model: the chat template fails: takes more than 0\.0003 s of wall-clock time$"
    ):
        template("a").render([CHAT])
