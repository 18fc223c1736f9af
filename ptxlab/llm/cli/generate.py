"""The command `generate`: text from a model, as it is made; of one prompt, of many at once, or in a conversation."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.cli.common import (
    AsJson,
    CommandLineError,
    expects,
    progress_bar,
    refuse,
    require_counts,
)
from ptxlab.errors import UnavailableError
from ptxlab.llm.checkpoints.chat import Message
from ptxlab.llm.checkpoints.folder import load
from ptxlab.llm.checkpoints.open import is_quantized, open_tokenizer
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.cli.answers import Computing, continue_text, converse, note, serve_prompts
from ptxlab.llm.cli.models import model_on_gpu, open_model_with_bar
from ptxlab.llm.cli.prompts import (
    Prompt,
    changed_shares,
    check_prompt,
    encode_prompts,
    naming_options,
    option_name,
    read_prompts,
    require_fit,
)
from ptxlab.llm.model import (
    Config,
    FloatModel,
    FloatRunner,
    Footprint,
    KernelRunner,
    NumpyRunner,
    QuantizedModel,
    Runner,
)
from ptxlab.llm.model.memory import budget, largest_batch, require_batch, weights_of
from ptxlab.llm.model.pages import PAGE
from ptxlab.llm.model.runner import HEADS
from ptxlab.llm.model.weights import DEFAULT_CACHE
from ptxlab.lowbit.quant import GROUPS, KV_SCHEMES
from ptxlab.lowbit.quant.kv import BY_CHANNEL, BY_TOKEN

PANEL = "Weights"

RUNNERS: dict[str, type[Runner]] = {"gpu": KernelRunner, "numpy": NumpyRunner}
SCHEMES = ("lqq", "qoq", "qoq_channel", "float")
_AT_ONCE = 16  # sequences of --prompts
_CONVERSATION = 4096  # tokens
_LOWEST = "sm_80"  # architecture that a whole model runs on
_GROUP = 32  # weights that share a scale by default
_SAMPLING, _CHAT, _COMPUTING = "Sampling", "Chat", "Computing"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from; with --chat, the first message.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Many prompts, served together: one a line, or .jsonl with prompt, tokens, ...")
    ] = None,
    model: Annotated[
        str, typer.Option(help="smollm2, a Hugging Face folder, a .gguf file, or what `quantize --recipe` made.")
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(help="How many to generate at most; with --chat, of each answer.")] = 64,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="How many continuations, the first streamed (1); of --prompts, at a time (up to 16)."),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(rich_help_panel=_SAMPLING, help="0: the likeliest token. Above: draw from softmax(logits / T)."),
    ] = 0,
    top_k: Annotated[
        int, typer.Option(rich_help_panel=_SAMPLING, help="Draw from so many of the likeliest tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            rich_help_panel=_SAMPLING, help="Draw from the fewest likeliest tokens whose probabilities add up to this."
        ),
    ] = 1,
    min_p: Annotated[
        float,
        typer.Option(
            rich_help_panel=_SAMPLING, help="Draw from tokens at least this share as likely as the likeliest."
        ),
    ] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(rich_help_panel=_SAMPLING, help="Above 1: make tokens that came before less likely.")
    ] = 1,
    seed: Annotated[int, typer.Option(rich_help_panel=_SAMPLING, help="Seed of the random draws.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            rich_help_panel=_CHAT,
            help="Hold a conversation in the model's chat template: read a message per line, until an empty one.",
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(rich_help_panel=_CHAT, metavar="TEXT", help="The system message of --chat.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_CHAT,
            help=f"Tokens of the whole conversation. Default: {_CONVERSATION}, or the model's context if that is less.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(rich_help_panel=_COMPUTING, help="gpu or numpy. Default: the GPU if there is one."),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_COMPUTING,
            help="How weights are rounded here: lqq, qoq or qoq_channel; float: compute with the weights as they are, "
            "in float32. Default: lqq.",
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_COMPUTING,
            help=f"Weights per level-2 scale where they are rounded here: 32, 64 or 128. Default: {_GROUP}.",
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            rich_help_panel=_COMPUTING,
            help="What the LM head multiplies in: float16, or int8: half its bytes, exact sums.",
        ),
    ] = "float16",
    cache: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_COMPUTING,
            help="Scheme of the KV cache: kv4, kv8, or what the model is calibrated for (quantize --kv). "
            "Default: the model's calibrated cache, else kv4.",
        ),
    ] = None,
    rotated: Annotated[
        bool | None,
        typer.Option(
            "--rotated/--plain",
            rich_help_panel=_COMPUTING,
            help="Rotate keys ahead of a KV cache with scales by token, which then loses less, or store them plain.",
            show_default="rotated",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(rich_help_panel=_COMPUTING, help="GB (10^9 bytes) of a GPU that may be taken at most."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with W4A8 weights and a 4-bit or 8-bit KV cache, in the integers that the kernels compute.

    Folders of W4A4 and W4Ax run too. Without a GPU the same integers are computed in NumPy. Weights that are not
    quantised yet are rounded to nearest; --scheme float computes with them as they are. --chat holds a conversation.
    """
    computing = Computing(model, _backend(backend, scheme), scheme, group, head, cache, rotated, memory, quiet=as_json)
    is_conversation = chat and prompts is None and batch in (None, 1) and not as_json
    if prompts is not None:
        refuse({"PROMPT": prompt}, "goes without --prompts")
    elif not prompt and not is_conversation:
        raise CommandLineError("the prompt must not be empty")
    if not chat:
        refuse({"--system": system, "--context": context}, "needs --chat")
    elif not is_conversation:
        refuse({"--context": context}, "is of a conversation: --chat without --json, --batch and --prompts")
    _check(computing, batch)
    share_options = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    single_prompt = Prompt(
        prompt or "",
        tokens,
        {"temperature": temperature, "seed": seed, **share_options, "repetition_penalty": repetition_penalty},
        tuple(stop or ()),
    )
    check_prompt(single_prompt)
    requests = [single_prompt] if prompts is None else read_prompts(prompts, single_prompt)
    if not any(request.sampling["temperature"] for request in requests):
        changed_options = {f"--{option_name(name)}": share_options[name] for name in changed_shares(share_options)}
        refuse(changed_options, "needs --temperature above 0")
    opened_model, tokenizer = _open(computing)
    if chat and not tokenizer.chats:
        raise CommandLineError("--chat needs a model with a chat template, or with <|im_start|> in its vocabulary")
    from threadpoolctl import threadpool_limits  # of the extra `model`, which `_open` has asked for

    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    encoded_prompts: list[list[int]] = []
    if is_conversation:
        longest_prompt, place = _conversation(context, opened_model.config), "the conversation"
    else:
        encoded_prompts = encode_prompts(tokenizer, requests, opening if chat else None)
        require_fit(requests, encoded_prompts, opened_model.config.context)
        lengths = [len(ids) + request.tokens for ids, request in zip(encoded_prompts, requests, strict=True)]
        longest_prompt, place = max(lengths), requests[lengths.index(max(lengths))].place
    size = (batch or 1) if prompts is None else min(batch or _AT_ONCE, len(requests))
    runner = _runner(
        computing, opened_model, size, longest_prompt, place, fixed=batch is not None, at_once=prompts is None
    )
    # A step of one sequence is memory-bound; on a busy machine two threads wait for each other longer than they compute
    with threadpool_limits(1 if runner.batch == 1 else None, "blas"):
        if is_conversation:
            converse(runner, tokenizer, single_prompt, opening, computing)
        elif prompts is None:
            continue_text(
                runner, tokenizer, single_prompt, encoded_prompts[0], computing, echo="" if chat else single_prompt.text
            )
        else:
            serve_prompts(runner, tokenizer, requests, encoded_prompts, computing)


def _fit_memory(
    memory: float,
    config: Config,
    batch: int,
    context: int,
    place: str,
    *,
    fixed: bool,
    at_once: bool,
    **options: Any,
) -> tuple[int, int]:
    """Return the batch and the number of cache pages that fit --memory.

    Unless it is `fixed`, the batch shrinks where it must. The pages hold all sequences `at_once`, or no fewer than the
    longest one, of the prompt that was read at `place`.
    """
    minimum_pages, footprint = ceil_div(context, PAGE), Footprint.of(config, 1, context, **options)
    if footprint.total(minimum_pages) > budget(memory):
        requirement = f"at least {footprint.describe(minimum_pages)} for the {context} tokens of {place}"
        raise expects("--memory", requirement, memory)
    pages = None if at_once else minimum_pages
    if fixed:
        with naming_options():
            require_batch(config, batch, memory, context, pages=pages, **options)
    else:
        batch = largest_batch(config, memory, context, most=batch, pages=pages, **options)
    return batch, min(batch * minimum_pages, Footprint.of(config, batch, context, **options).most_pages(memory))


def _backend(backend: str | None, scheme: str | None) -> str:
    if scheme == "float":
        return "gpu" if model_on_gpu(backend) else "numpy"
    if backend is None:
        return "gpu" if gpu.why_not(_LOWEST) is None else "numpy"
    if backend not in RUNNERS:
        raise expects("--backend", " or ".join(RUNNERS), backend)
    if backend == "gpu" and (reason := gpu.why_not(_LOWEST)):
        raise UnavailableError(f"--backend gpu: {reason}; pass --backend numpy")
    return backend


def _check(computing: Computing, batch: int | None) -> None:
    """Raise CommandLineError for a bad option, before anything is fetched."""
    if computing.scheme not in (None, *SCHEMES):
        raise expects("--scheme", f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}", computing.scheme)
    if computing.group not in (None, *GROUPS):
        raise expects("--group", f"{', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}", computing.group)
    if computing.scheme in ("float", "qoq_channel"):
        refuse({"--group": computing.group}, f"is not for --scheme {computing.scheme}")
    if computing.cache not in (None, *KV_SCHEMES):
        raise expects("--cache", f"{' or '.join(BY_TOKEN)}, or what the model is calibrated for", computing.cache)
    if computing.head not in HEADS:
        raise expects("--head", " or ".join(HEADS), computing.head)
    if computing.scheme == "float":
        options = {
            "--head int8": computing.head != "float16" or None,
            "--cache": computing.cache,
            "--rotated": computing.rotated or None,
            "--plain": True if computing.rotated is False else None,
            "--memory": computing.memory,
        }
        refuse(options, "is not for --scheme float")
    if computing.memory is not None:
        with naming_options():
            budget(computing.memory)
    require_counts(batch=1 if batch is None else batch)


def _conversation(context: int | None, config: Config) -> int:
    """Return how many tokens a conversation may have."""
    model_context = config.context
    if context is None:
        return _CONVERSATION if model_context is None else min(_CONVERSATION, model_context)
    require_counts(context=context)
    if model_context is not None and context > model_context:
        raise expects("--context", f"at most {model_context}, the model's context", context)
    return context


def _open(computing: Computing) -> tuple[FloatModel | QuantizedModel, Tokenizer]:
    """Open a model, quantised already or not; one that is given by name is downloaded."""
    path = Path(computing.model)
    if not is_quantized(path) or computing.scheme == "float":
        return open_model_with_bar(computing.model, quiet=computing.quiet)
    if computing.scheme is not None:
        raise CommandLineError(f"--scheme {computing.scheme} goes with weights that are not quantised yet")
    if computing.group is not None:
        raise CommandLineError(f"--group {computing.group} goes with weights that are not quantised yet")
    quantized_model = load(path)
    return quantized_model, open_tokenizer(path, quantized_model.config)


def _runner(
    computing: Computing,
    opened_model: FloatModel | QuantizedModel,
    size: int,
    context: int,
    place: str,
    *,
    fixed: bool,
    at_once: bool,
) -> Runner:
    """Build a runner of `size` sequences, or fewer if --memory holds no more and the size is not `fixed`."""
    if computing.scheme == "float" and isinstance(opened_model, FloatModel):
        return FloatRunner(opened_model.to_device() if computing.backend == "gpu" else opened_model, size, context)
    model_cache = opened_model.cache if isinstance(opened_model, QuantizedModel) else DEFAULT_CACHE
    if computing.cache in BY_CHANNEL and computing.cache != model_cache:
        command = f"ptxlab quantize MODEL --recipe lqq --kv {computing.cache} --out FOLDER"
        raise CommandLineError(f"--cache {computing.cache} needs a model that is calibrated for it: {command}")
    options: dict[str, Any] = {"head": computing.head, "cache": computing.cache or model_cache}
    if computing.rotated and options["cache"] in BY_CHANNEL:
        raise CommandLineError(f"--rotated goes with --cache {' or '.join(BY_TOKEN)}: others keep keys plain")
    pages, scheme, group = None, computing.scheme or "lqq", computing.group or _GROUP
    if computing.memory is not None:
        rounding = {"group": group, "scheme": scheme}
        footprint_options = weights_of(opened_model) if isinstance(opened_model, QuantizedModel) else rounding
        size, pages = _fit_memory(
            computing.memory,
            opened_model.config,
            size,
            context,
            place,
            fixed=fixed,
            at_once=at_once,
            **options,
            **footprint_options,
        )
    if isinstance(opened_model, FloatModel):
        opened_model = _round_weights(opened_model, computing.model, scheme, group, quiet=computing.quiet)
    return RUNNERS[computing.backend](opened_model, size, context, pages=pages, rotated=computing.rotated, **options)


def _round_weights(model: FloatModel, source: str, scheme: str, group: int, *, quiet: bool) -> QuantizedModel:
    """Round the weights to nearest, and say so."""
    with progress_bar("round", model.config.layers, quiet=quiet) as advance:
        rounded_model = QuantizedModel.rounded(model, scheme, group, progress=advance)
    if not quiet:
        grouping_text = "per channel" if scheme == "qoq_channel" else f"in groups of {group}"
        name = {"lqq": "LQQ"}.get(scheme, "QoQ")
        note(f"{Path(source).name}: weights rounded to nearest, {name} {grouping_text}, uncalibrated")
    return rounded_model
