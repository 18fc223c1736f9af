"""Run a program that may take any time and memory in a process with limits.

A chat template or a tokenizer of a file is a stranger's code: it may loop, or multiply a text, for as long as it likes.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxlab.llm.checkpoints import run_limited

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # each reserves memory


@dataclass(frozen=True)
class Limits:
    """Bound a process.

    Attributes:
        seconds: that it may take by the clock.
        memory: bytes of its address space.
        processor_seconds: that it may compute, or None.
    """

    seconds: float
    memory: int
    processor_seconds: int | None = None

    def __str__(self) -> str:
        return f"{self.processor_seconds or self.seconds:g} s or {self.memory >> 20} MiB"


class ProgramError(Exception):
    """Say in one line why a program gave no answer."""


def run_program(program: Path, request: Any, limits: Limits) -> Any:
    """Return what the program's function `answer` makes of a request; both are JSON.

    Raises ProgramError for what that function raises, and where the process exceeds the limits.
    """
    numbers = str(limits.memory), str(limits.processor_seconds or 0)
    command = [sys.executable, "-P", run_limited.__file__, str(program), *numbers]
    environment = {**os.environ, **_ONE_THREAD, "PYTHONIOENCODING": "utf-8"}
    try:
        process = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=limits.seconds,
            env=environment,
            check=False,
        )
        reply = json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"takes more than {limits.seconds:g} s of wall-clock time") from None
    except ValueError:  # it was killed, and left nothing
        raise ProgramError(f"takes more than {limits}") from None
    if "error" in reply:
        raise ProgramError(reply["error"])
    return reply["answer"]
