"""What the commands on whole models share: opening a model and a text, with a bar where they are downloaded."""

from typing import Annotated

import typer

from ptxlab import gpu
from ptxlab.cli.common import download_bar, expects
from ptxlab.llm.accuracy.text import Corpus, open_text
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.model import FloatModel

ModelBackend = Annotated[str | None, typer.Option("--backend", help="gpu or numpy. Default: the GPU if there is one.")]


def model_on_gpu(backend: str | None) -> bool:
    """Decide whether a model runs on the GPU: where there is one, unless --backend says otherwise.

    Raises UnavailableError if --backend gpu finds none.
    """
    if backend not in (None, "gpu", "numpy"):
        raise expects("--backend", "gpu or numpy", backend)
    on_gpu = gpu.available() if backend is None else backend == "gpu"
    if on_gpu:
        gpu.device_info()  # says why there is none
    return on_gpu


def open_model_with_bar(source: str, *, length: int = 0, quiet: bool) -> tuple[FloatModel, Tokenizer]:
    """Open a model and its tokenizer, with a progress bar for the download.

    Raises CommandLineError for a `length` beyond the model's context.
    """
    with download_bar(source, quiet=quiet) as progress:
        model, tokenizer = open_model(source, progress)
    if (context := model.config.context) is not None and length > context:
        raise expects("--length", f"at most {context}, the model's context", length)
    return model, tokenizer


def open_text_with_bar(source: str, *, quiet: bool) -> Corpus:
    """Open a text by name or from a file, with a progress bar for the download."""
    with download_bar("text", quiet=quiet) as progress:
        return open_text(source, progress)
