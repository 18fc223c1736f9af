"""A program: run another one's function `answer` within limits. `limited_process` starts it, and stops it.

It reads a request from standard input, and writes {"answer": ...} or {"error": ...}; all is JSON. It imports nothing of
ptxlab, so that it starts in a moment.
"""

import json
import runpy
import sys
from typing import Any

_LONGEST_REASON = 400  # characters


def limit_process(memory: int, processor_seconds: int) -> None:
    """Bound this process; 0 seconds are no bound."""
    try:
        import resource
    except ImportError:  # Windows has no such limits; the caller's clock remains
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    if processor_seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (processor_seconds, processor_seconds))


def main(program: str, memory: int, processor_seconds: int) -> None:
    """Answer one request."""
    limit_process(memory, processor_seconds)
    reply: dict[str, Any]
    try:
        reply = {"answer": runpy.run_path(program)["answer"](json.load(sys.stdin))}
    except MemoryError:
        reply = {"error": f"needs more than {memory >> 20} MiB"}
    except BaseException as error:  # whatever a stranger's code raises; a panic of a library is no Exception
        reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
