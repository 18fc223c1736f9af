"""Public calls inside `torch.compile`: Dynamo ends its graph before one and begins the next behind it."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

REASON = "calls of ptxlab run outside of graphs; within one, call the operators torch.ops.ptxlab of ptxlab.llm.torch"
_DYNAMO = "torch._dynamo"  # imported by the first use of torch.compile


def break_graph(function: Function) -> Function:
    """Decorate a function that Dynamo shall call and not trace, as `torch.compiler.disable` does, without PyTorch.

    A call looks at arrays by DLPack and launches kernels of its own, neither of which a graph can hold.
    """
    untraced_function: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal untraced_function
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if untraced_function is None:
            untraced_function = _disable(function, call)
        return untraced_function(*args, **kwargs)

    _mark(call)
    return cast(Function, call)


def _mark(function: Any) -> None:
    """Say to Dynamo that a function is not to be traced, and to its user why."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = REASON


def _disable(function: Callable[..., Any], call: Any) -> Callable[..., Any]:
    """Return the function with Dynamo off within; from now on Dynamo passes over the frames of all decorated calls."""
    skip_code = getattr(sys.modules[_DYNAMO].eval_frame, "skip_code", None)  # without it each shape is traced anew
    if skip_code is not None:
        skip_code(call.__code__)
    untraced_function: Callable[..., Any] = sys.modules["torch"].compiler.disable(function, reason=REASON)
    return untraced_function


_mark(_disable)
