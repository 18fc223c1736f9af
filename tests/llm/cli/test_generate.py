"""`ptxlab generate` as a person or a script meets it, on a small model that the tests write."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ptxlab import gpu
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.folder import load
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.cli.prompts import Prompt, read_prompts
from ptxlab.llm.model import FloatRunner, Footprint, NumpyRunner, QuantizedModel, generate
from tests.support.markdown_pages import ROOT
from tests.support.small_models import write_folder

SIZES = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}  # one head of 64 dimensions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "small", "smollm", **SIZES, eos_token_id=299)


def test_the_text_is_what_the_runner_generates(cli: Any, folder: Path) -> None:
    code, out, err = cli("generate", "the cat", "--model", folder, "--backend", "numpy", "--tokens", 8)
    model, tokenizer = open_model(folder)
    prompt = tokenizer.encode("the cat").tolist()
    runner = NumpyRunner(QuantizedModel.rounded(model), 1, 100)
    expected = [int(step[0]) for step in generate(runner, [prompt], 8)]
    assert code == 0 and out == f"the cat{tokenizer.decode(expected)}\n"
    assert "small: weights rounded to nearest, LQQ in groups of 32, uncalibrated" in err
    assert f"tokens/s; prompt of {len(prompt)} tokens in " in err and "W4A8, KV4 with rotated keys, on NumPy" in err
    code, out, err = cli("generate", "the cat", "--model", folder, "--backend", "numpy", "--tokens", 8, "--json")
    report = json.loads(out)
    assert (
        code == 0 and err == "" and report["tokens"] == [expected] and report["texts"] == [tokenizer.decode(expected)]
    )
    assert (report["backend"], report["prompt_tokens"]) == ("numpy", len(prompt)) and report["tokens_per_second"] > 0
    assert report["recipe"]["group"] == 32


def test_two_layers_through_the_whole_recipe_and_eight_tokens(cli: Any, folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "quantised"
    text.write_text("the cat sat on the mat, and the dog on the cat. " * 8, encoding="utf-8")
    options = ("--recipe", "lqq", "--text", text, "--samples", 4, "--length", 32, "--backend", "numpy")
    assert cli("quantize", folder, "--out", out, *options)[0] == 0
    code, output, err = cli("generate", "the cat", "--model", out, "--backend", "numpy", "--tokens", 8, "--json")
    report = json.loads(output)
    model, runner = load(out), NumpyRunner(load(out), 1, 100)
    expected = [int(step[0]) for step in generate(runner, [Tokenizer.from_folder(out).encode("the cat").tolist()], 8)]
    assert code == 0 and err == "" and report["tokens"] == [expected] and report["recipe"]["gptq"]
    assert model.config.context == 128 and len(model.layers) == 2 and model.head is not None  # rotated: no longer tied


def test_a_cache_is_calibrated_and_used(cli: Any, folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "quantised"
    text.write_text("the cat sat on the mat, and the dog on the cat. " * 8, encoding="utf-8")
    options = ("--recipe", "rtn", "--kv", "kv8_channel", "--text", text, "--samples", 4, "--length", 32)
    assert cli("quantize", folder, "--out", out, *options, "--backend", "numpy")[0] == 0
    generating = ("generate", "the cat", "--backend", "numpy", "--tokens", 4, "--model")
    assert ", KV8 by channel, on NumPy" in cli(*generating, out)[2]
    assert ", KV8 with rotated keys, on NumPy" in cli(*generating, out, "--cache", "kv8")[2]
    assert ", KV8, on NumPy" in cli(*generating, folder, "--cache", "kv8", "--plain")[2]
    code, _, err = cli(*generating, out, "--cache", "kv4_channel")
    assert code == 2 and "--cache kv4_channel needs a model that is calibrated for it" in err
    code, _, err = cli(*generating, out, "--rotated")
    assert code == 2 and err.startswith("error: --rotated goes with --cache kv4 or kv8")
    measured = ("perplexity", out, "--text", text, "--length", 16, "--windows", 3, "--backend", "numpy", "--json")
    by_channel, by_token = (json.loads(cli(*measured, *kv_options)[1]) for kv_options in ((), ("--kv", 8)))
    assert by_channel["kv"] == by_token["kv"] == 8 and by_channel["perplexity"] != by_token["perplexity"]


def test_a_batch_draws_apart_and_a_seed_draws_again(cli: Any, folder: Path) -> None:
    options = ("--model", folder, "--backend", "numpy", "--tokens", 6, "--batch", 3, "--temperature", 5)
    first, again, other_seed = (
        json.loads(cli("generate", "the", *options, "--seed", seed, "--json")[1])["tokens"] for seed in (3, 3, 2)
    )
    assert first == again != other_seed and len({tuple(tokens) for tokens in first}) == 3
    code, out, _ = cli("generate", "the", *options)
    assert code == 0 and "\n[2] the" in out and "\n[3] the" in out


@pytest.mark.smoke
def test_many_prompts_are_served_at_once(cli: Any, folder: Path, tmp_path: Path) -> None:
    """Texts are printed in the prompts' order, with the tokens that each gets alone.

    A .jsonl sets tokens and draws by request.
    """
    path = tmp_path / "prompts.txt"
    path.write_text("the cat\n\nthe dog sat\na mat\n", encoding="utf-8")
    options = ("--model", folder, "--backend", "numpy", "--tokens", 5)
    code, out, err = cli("generate", "--prompts", path, *options, "--batch", 2)
    assert code == 0 and [line[:4] for line in out.splitlines()] == ["[1] ", "[2] ", "[3] "]
    assert (
        "tokens/s: 15 in " in err
        and "3 prompts of 19 tokens, 2 at a time; W4A8, KV4 with rotated keys, on NumPy" in err
    )
    report = json.loads(cli("generate", "--prompts", path, *options, "--json")[1])
    single_runs = [
        json.loads(cli("generate", text, *options, "--json")[1]) for text in ("the cat", "the dog sat", "a mat")
    ]
    assert [request["tokens"] for request in report["requests"]] == [one["tokens"][0] for one in single_runs]
    assert [request["prompt_tokens"] for request in report["requests"]] == [one["prompt_tokens"] for one in single_runs]
    assert report["tokens_per_second"] == pytest.approx(15 / report["seconds"]) and report["backend"] == "numpy"
    lines = tmp_path / "prompts.jsonl"
    drawn = '{"prompt": "the", "temperature": 50}'
    lines.write_text(f'{{"prompt": "the cat", "tokens": 2}}\n{drawn}\n{drawn}', encoding="utf-8")
    first, second, third = json.loads(cli("generate", "--prompts", lines, *options, "--json")[1])["requests"]
    assert first["tokens"] == single_runs[0]["tokens"][0][:2] and second["tokens"] != third["tokens"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "{path}: no prompt in it"),
        ("the cat", "{path}, line 1: expects an object with a prompt, and perhaps tokens, stop .*, got 'the cat'"),
        ("[" * 100_000, r"{path}, line 1: expects an object .*, got '\[{{60}}'"),
        ('{"prompt": ""}', "{path}, line 1: expects an object .*"),
        ('{"prompt": "a"}\n{"prompt": "a", "tokens": true}', "{path}, line 2: expects an object .*"),
        ('{"prompt": "a", "tokens": 0}', "{path}, line 1: --tokens expects an integer, 1 or more, got 0"),
        ('{"prompt": "a", "seed": -1}', r"{path}, line 1: --seed expects an integer in 0..2\^32-1, got -1"),
        (
            '{"prompt": "a", "temperature": 1%s}' % ("0" * 400),
            "{path}, line 1: --temperature expects .*, got 10{{400}}",
        ),
        (
            '{"prompt": "a", "temprature": 1}',
            "{path}, line 1: expects the keys prompt, tokens, stop, temperature, seed, .*_penalty, got 'temprature'",
        ),
        (
            '\n{"prompt": "\\ud800"}',
            r"{path}, line 2: text: must be a str without lone surrogates \(got '\\ud800'\)",
        ),
        (
            '\n{"prompt": "a"}\n{"prompt": "aa", "tokens": 127}',
            r"{path}, line 3: must fit the model's context of 128 tokens with its --tokens \(got 2 \+ 127\)",
        ),
    ],
)
def test_bad_prompts_are_one_line(cli: Any, folder: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    code, out, err = cli("generate", "--prompts", path, "--model", folder, "--backend", "numpy")
    assert (code, out) == (2, "") and re.fullmatch(f"error: {message.format(path=re.escape(str(path)))}", err.strip())


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "\ufeffa\x0cb\x85c\u2028d\re\r\n\r\nthe \n", ["a\x0cb\x85c\u2028d\re", "the "]),
        ("a.jsonl", '\ufeff{"prompt": "a\u2028b"}\r\n\n{"prompt":\r"c"}', ["a\u2028b", "c"]),
    ],
)
def test_lines_end_at_newlines_alone(tmp_path: Path, name: str, text: str, prompts: list[str]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    usual = Prompt("", 5, {"temperature": 0.5, "seed": 7}, ("x",))
    loaded_prompts = read_prompts(tmp_path / name, usual)
    assert [prompt.text for prompt in loaded_prompts] == prompts
    seeds = [{"temperature": 0.5, "seed": 7}, {"temperature": 0.5, "seed": 8}]
    assert [prompt[1:4] for prompt in loaded_prompts] == [(5, sampling, ("x",)) for sampling in seeds]
    assert [prompt.place for prompt in loaded_prompts] == [f"{tmp_path / name}, line {number}" for number in (1, 3)]


def test_a_memory_that_is_too_small_is_refused_with_the_figures(cli: Any, folder: Path, tmp_path: Path) -> None:
    """The refusal comes before weights are rounded.

    The figure is rounded up, so that this much suffices.
    """
    (tmp_path / "prompts").write_text(f"the cat\n\n{'a' * 66}\nthe dog", encoding="utf-8")
    options = ("--model", folder, "--backend", "numpy", "--tokens", 4)
    figures = r"0\.00 GB of weights \+ .* \+ 1\.50 GB of reserve \+ 0\.00 GB of"
    for arguments, purpose in (
        (("--prompts", tmp_path / "prompts"), rf"2 pages for the 70 tokens of {tmp_path}/prompts, line 3"),
        (("the cat", "--batch", 3), r"1 pages for the 9 tokens of the prompt"),
    ):
        code, out, err = cli("generate", *arguments, *options, "--memory", 1.5)
        expected = rf"error: --memory expects at least 1\.51 GB: {figures} {purpose}, got 1\.5\n"
        assert (code, out) == (2, "") and re.fullmatch(expected, err)
        assert cli("generate", *arguments, *options, "--memory", 1.51, "--head", "int8")[0] == 0


@pytest.mark.full
def test_a_batch_that_does_not_fit_becomes_smaller_or_is_refused_where_it_was_asked_for(
    cli: Any, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("the cat\n" * 15, encoding="utf-8")
    config = open_model(folder)[0].config
    context = len(open_model(folder)[1].encode("the cat")) + 4
    memory = Footprint.of(config, 6, context, group=32).total(1) / 1e9
    options = ("--model", folder, "--backend", "numpy", "--tokens", 4, "--memory", memory)
    code, _, err = cli("generate", "--prompts", tmp_path / "prompts", *options)
    assert code == 0 and "15 prompts of 75 tokens, 6 at a time" in err
    figures = r"0\.00 GB of weights \+ .* \+ 1\.50 GB of reserve \+ 0\.00 GB of"
    for arguments, max_batch, batch, pages in (
        (("--prompts", tmp_path / "prompts"), 6, 15, 1),
        (("the cat",), 4, 16, 16),
    ):
        code, out, err = cli("generate", *arguments, *options, "--batch", 16)
        rule = rf"at most {max_batch} for sequences of {context} tokens of this model in 1\.\d+ GB"
        expected = rf"error: --batch expects {rule}, got {batch}, which needs 1\.51 GB: {figures} {pages} pages\n"
        assert (code, out) == (2, "") and re.fullmatch(expected, err), err
        assert [cli("generate", *arguments, *options, "--batch", max_batch + excess)[0] for excess in (0, 1)] == [0, 2]


def test_it_ends_where_the_model_ends(cli: Any, folder: Path, tmp_path: Path) -> None:
    options = ("--backend", "numpy", "--tokens", 8, "--temperature", 50, "--json")
    tokens = json.loads(cli("generate", "the cat", "--model", folder, *options)[1])["tokens"][0]
    ending = write_folder(tmp_path / "ending", "smollm", **SIZES, eos_token_id=tokens[3])
    generated = json.loads(cli("generate", "the cat", "--model", ending, *options)[1])["tokens"][0]
    assert generated == tokens[: tokens.index(tokens[3])] and generated


def test_a_chat_is_asked_in_the_models_template(cli: Any, folder: Path, tmp_path: Path) -> None:
    options = ("--model", folder, "--backend", "numpy", "--tokens", 2)
    code, _, err = cli("generate", "Who?", *options, "--chat")
    assert code == 2 and "--chat needs a model with a chat template, or with <|im_start|> in its vocabulary" in err
    chatty = write_folder(tmp_path / "chatty", "smollm", **SIZES)
    with_chat_tokens = tokenizers.Tokenizer.from_file(str(chatty / "tokenizer.json"))
    with_chat_tokens.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    with_chat_tokens.save(str(chatty / "tokenizer.json"))
    code, out, _ = cli("generate", "Who?", "--model", chatty, "--backend", "numpy", "--tokens", 2, "--chat", "--json")
    assert code == 0 and json.loads(out)["prompt_tokens"] == len("#user\nWho?#\n#assistant\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "the prompt must not be empty"),
        (("a", "--tokens", "0"), "--tokens expects an integer, 1 or more, got 0"),
        (("a", "--batch", "0"), "--batch expects an integer, 1 or more, got 0"),
        (("a", "--head", "int4"), "--head expects float16 or int8, got int4"),
        (("a", "--temperature", "-0.5"), "--temperature expects 0, or a number in 1e-06..1e+06, got -0.5"),
        (("a", "--temperature", "nan"), "--temperature expects 0, or a number in 1e-06..1e+06, got nan"),
        (("a", "--top-p", "2"), "--top-p expects a number in 0..1, got 2.0"),
        (("a", "--top-k", "3"), "--top-k needs --temperature above 0"),
        (("a", "--repetition-penalty", "0"), "--repetition-penalty expects a number in 1e-06..1e+06, got 0.0"),
        (("a", "--stop", ""), "--stop expects texts, none of them empty, got ('',)"),
        (("a", "--system", "b"), "--system needs --chat"),
        (("a", "--context", "9"), "--context needs --chat"),
        (("", "--chat", "--json"), "the prompt must not be empty"),
        (
            ("a", "--chat", "--json", "--context", "9"),
            "--context is of a conversation: --chat without --json, --batch and --prompts",
        ),
        (("a", "--scheme", "float", "--group", "64"), "--group is not for --scheme float"),
        (("a", "--scheme", "qoq_channel", "--group", "64"), "--group is not for --scheme qoq_channel"),
        (("a", "--scheme", "int4"), "--scheme expects lqq, qoq, qoq_channel or float, got int4"),
        (("a", "--cache", "kv5"), "--cache expects kv4 or kv8, or what the model is calibrated for, got kv5"),
        (
            ("a", "--cache", "kv8_channel"),
            "--cache kv8_channel needs a model that is calibrated for it: ptxlab quantize MODEL --recipe lqq --kv "
            "kv8_channel --out FOLDER",
        ),
        (("a", "--scheme", "float", "--cache", "kv8"), "--cache is not for --scheme float"),
        (("a", "--scheme", "float", "--memory", "9"), "--memory is not for --scheme float"),
        (("a", "--scheme", "float", "--head", "int8"), "--head int8 is not for --scheme float"),
        (("a", "--seed", "-1"), "--seed expects an integer in 0..2^32-1, got -1"),
        (("a", "--backend", "emulator"), "--backend expects gpu or numpy, got emulator"),
        (("a", "--memory", "0"), "--memory expects a number of gigabytes above 0, at most 10^9, got 0.0"),
        (("a\udcff",), "the prompt: text: must be a str without lone surrogates (got 'a\\udcff')"),
        (("a", "--prompts", "nosuch"), "PROMPT goes without --prompts"),
        (("a", "--group", "48"), "--group expects 32, 64 or 128, got 48"),
        (("a", "--model", "nosuch"), "nosuch: no model: a folder, a .gguf file, or one of smollm2"),
        (
            ("a" * 100, "--tokens", "29"),
            "the prompt: must fit the model's context of 128 tokens with its --tokens (got 100 + 29)",
        ),
    ],
)
def test_bad_input_is_one_line(cli: Any, folder: Path, options: tuple[str, ...], message: str) -> None:
    arguments = options if options else ("",)
    code, out, err = cli("generate", arguments[0], "--model", folder, "--backend", "numpy", *arguments[1:])
    assert (code, out, err.strip()) == (2, "", f"error: {message}")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("prompts.txt", "the cat", "--top-k needs --temperature above 0"),
        ("prompts.jsonl", '{"prompt": "a", "min_p": 0.5}', "{}, line 1: min_p needs a temperature above 0"),
    ],
)
def test_a_share_without_a_temperature_is_refused(
    cli: Any, folder: Path, tmp_path: Path, name: str, line: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(line + "\n")
    options = ("--top-k", 5) if name.endswith("txt") else ()
    code, out, err = cli("generate", "--prompts", path, "--model", folder, "--backend", "numpy", *options)
    assert (code, out, err.strip()) == (2, "", f"error: {message.format(path)}")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template of its own, in which a turn ends with `#`."""
    folder = write_folder(tmp_path_factory.mktemp("model") / "chatty", "smollm", **SIZES, max_position_embeddings=512)
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content + '#' }}{% endfor %}a:"
    config = {"chat_template": template, "bos_token": "<turn>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def converse(cli: Any, monkeypatch: pytest.MonkeyPatch, lines: str, *options: object) -> tuple[list[str], list[int]]:
    """Hold a conversation; return what it prints, and how many tokens of each prompt were computed."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, out, err = cli("generate", "--chat", "--backend", "numpy", "--tokens", 6, *options)
    assert code == 0
    return out.split("\n")[:-1], [int(n) for n in re.findall(r"prompt of (\d+) tokens", err)]


@pytest.mark.full
def test_a_conversation_goes_on_from_its_cache(cli: Any, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are those to the whole history, and a message costs only its own tokens."""
    options = ("--model", chatty, "--scheme", "float", "--system", "No.")
    answers, computed = converse(cli, monkeypatch, "Who?\n\nWhy?\n", *options)
    model, tokenizer = open_model(chatty)
    history = "<turn>s:No.#u:Who?#a:"
    for answer, message in zip(answers, ("Why?", ""), strict=True):
        tokens = tokenizer.encode(history).tolist()
        right = [int(step[0]) for step in generate(FloatRunner(model, 1, 512), [tokens], 6)]
        assert answer == tokenizer.decode(right)
        history += f"{answer}#u:{message}#a:"
    first = len(tokenizer.encode("<turn>s:No.#u:Who?#a:"))
    assert computed == [first, len(tokenizer.encode(history.removesuffix("#u:#a:"))) - 6 - first - 5]
    assert converse(cli, monkeypatch, "Why?\n", "Who?", *options) == (answers, computed)


@pytest.mark.full
def test_a_conversation_is_computed_anew_where_the_template_changes_an_answer(
    cli: Any, chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(chatty, tmp_path / "changing")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("m.content +", "m.content[:2] +")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _, computed = converse(cli, monkeypatch, "Who?\nWhy?\n", "--model", folder)
    assert computed == [len("#u:Wh#a:"), len("#u:Wh#a:xx#u:Wh#a:")]


@pytest.mark.full
def test_a_conversation_ends(cli: Any, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(cli, monkeypatch, "", "--model", chatty) == ([], [])
    typed = io.StringIO("Who?\n \nWhy?\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    code, out, _ = cli("generate", "--chat", "--backend", "numpy", "--tokens", 2, "--model", chatty)
    assert code == 0 and out.count("> ") == 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    not_utf8 = (2, "", "error: standard input: a message must be UTF-8\n")
    assert cli("generate", "--chat", "--backend", "numpy", "--model", chatty, "--scheme", "float") == not_utf8
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * 30 + "\n" + "b" * 30 + "\n"))
    code, out, err = cli("generate", "--chat", "--context", 64, "--backend", "numpy", "--tokens", 8, "--model", chatty)
    assert (
        code == 2
        and out.count("\n") == 1
        and re.search(
            r"error: the message: must fit the conversation's 64 tokens \(--context\) .* \(got \d\d \+ 8\)$",
            err.strip(),
        )
    )


@pytest.mark.full
def test_a_stop_string_ends_the_text_before_it(cli: Any, folder: Path, tmp_path: Path) -> None:
    options = ("--model", folder, "--backend", "numpy", "--tokens", 24, "--temperature", 50)
    whole = json.loads(cli("generate", "the cat", *options, "--json")[1])["texts"][0]
    stop_start = next(
        i for i in range(3, len(whole) - 2) if whole.find(whole[i : i + 2]) == i and whole[i : i + 2].isascii()
    )
    stop = whole[stop_start : stop_start + 2]
    report = json.loads(cli("generate", "the cat", *options, "--stop", "nosuch", "--stop", stop, "--json")[1])
    assert report["texts"] == [whole[:stop_start]] and len(report["tokens"][0]) < 24
    assert cli("generate", "the cat", *options, "--stop", stop)[1] == f"the cat{whole[:stop_start]}\n"
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "the cat", "seed": 0}, {"prompt": "the cat", "seed": 0, "stop": []}]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = json.loads(cli("generate", "--prompts", path, *options, "--json")[1])["requests"]
    assert first == second
    stop = second["text"][4]
    stopped, again = json.loads(cli("generate", "--prompts", path, *options, "--stop", stop, "--json")[1])["requests"]
    assert stopped["text"] == second["text"][: second["text"].index(stop)] and again == second
    assert stopped["error"] is None and len(stopped["tokens"]) < 24


@pytest.mark.full
def test_sampling_options_reach_the_draws(cli: Any, folder: Path, tmp_path: Path) -> None:
    """Set them on the command line and in a .jsonl: each changes what is drawn; a top-k of 1 is the likeliest."""
    options = ("--model", folder, "--backend", "numpy", "--tokens", 12)
    likeliest = json.loads(cli("generate", "the cat", *options, "--json")[1])["tokens"][0]
    path = tmp_path / "prompts.jsonl"
    seen = {tuple(likeliest)}
    for settings in (
        {"temperature": 30.0},
        {"temperature": 30.0, "top_k": 3},
        {"temperature": 30.0, "top_p": 0.05},
        {"temperature": 3.0, "min_p": 0.5},
        {"repetition_penalty": 5.0},
    ):
        words = [word for name, number in settings.items() for word in (f"--{name.replace('_', '-')}", number)]
        seen.add(tuple(json.loads(cli("generate", "the cat", *options, *words, "--json")[1])["tokens"][0]))
        path.write_text(json.dumps({"prompt": "the cat", **settings}))
        (request,) = json.loads(cli("generate", "--prompts", path, *options, "--json")[1])["requests"]
        (same,) = json.loads(cli("generate", "--prompts", path, *options, *words, "--json")[1])["requests"]
        seen.add(tuple(request["tokens"]))
        assert request == same
    assert len(seen) > 6
    for words in (("--temperature", 30, "--top-k", 1), ("--temperature", 30, "--top-p", 0)):
        assert json.loads(cli("generate", "the cat", *options, *words, "--json")[1])["tokens"][0] == likeliest


@pytest.mark.parametrize("scheme", ["float", "qoq", "qoq_channel"])
def test_a_scheme_of_ones_own(cli: Any, folder: Path, scheme: str) -> None:
    code, out, err = cli(
        "generate", "the cat", "--model", folder, "--backend", "numpy", "--tokens", 8, "--scheme", scheme
    )
    model, tokenizer = open_model(folder)
    rounded = None if scheme == "float" else QuantizedModel.rounded(model, scheme)
    runner = FloatRunner(model, 1, 100) if rounded is None else NumpyRunner(rounded, 1, 100)
    prompt = tokenizer.encode("the cat").tolist()
    assert code == 0 and out == f"the cat{tokenizer.decode([int(s[0]) for s in generate(runner, [prompt], 8)])}\n"
    descriptions = {
        "float": "weights and KV cache in float32, on NumPy",
        "qoq": "QoQ in groups of",
        "qoq_channel": "QoQ per channel",
    }
    assert descriptions[scheme] in err


def test_an_unavailable_gpu_names_numpy(cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda *_, **__: "no CUDA device")
    code, _, err = cli("generate", "a", "--model", folder, "--backend", "gpu")
    assert code == 2 and err.strip() == "error: --backend gpu: no CUDA device; pass --backend numpy"


@pytest.mark.full
@pytest.mark.usefixtures("smollm2")
def test_the_trained_model_says_what_the_guide_shows(cli: Any, tmp_path: Path) -> None:
    """The test runs two of the guide's ten prompts, with the options of README's first text."""
    page = (ROOT / "notebooks" / "guide" / "generate.md").read_text(encoding="utf-8")
    prompts = ("The capital of France is", "The largest planet in the solar system is")
    shown = [re.search(rf"^\| {re.escape(prompt)} \| (.*?) \|", page, re.MULTILINE) for prompt in prompts]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(prompts), encoding="utf-8")
    report = json.loads(cli("generate", "--prompts", path, "--backend", "numpy", "--tokens", 32, "--json")[1])
    texts = [" ".join(request["text"].split()) for request in report["requests"]]
    assert texts == [match and match[1] for match in shown]
