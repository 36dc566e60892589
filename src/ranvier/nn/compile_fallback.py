"""What happens when a block cannot be compiled, or a step cannot be captured as a CUDA graph.

Both only make steps faster, so a run or a server continues without them: `CompileFallback` says
once which part runs eagerly, and why. In checks, tests and benchmarks the failure is an error.

Eager blocks give the same numbers. Ranks that share a graph with communication run the same code on
inputs of the same shapes, so that all of them fail alike and then issue the eager collectives
together. A rank that fails alone, as with a broken C++ compiler, waits for others in another
collective, and the time limit of collectives ends the run as without a fallback.
"""

from __future__ import annotations

import re
import sys
from typing import Literal

from ranvier.system.terminal import print

CompileErrorPolicy = Literal["fallback", "raise"]
"""Continue eagerly, or raise."""
COMPILER_MODULES = (
    *("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx"),
    "triton",
)
"""Modules whose exceptions are failures of the compiler, not of the model."""
MAX_REASON_CHARACTERS = 200
PRIVATE_WORDS = re.compile(
    r"(?:~|\.{1,2})?(?:/[\w.+@-]+)+/?"  # paths
    r"|\b0x[0-9a-fA-F]+\b"
    r"|\b(?:pid|PID|process|Process)[ =:]*\d+\b"
)


def is_compile_error(error: BaseException) -> bool:
    """Whether a compiler has raised an error.

    An error of the model itself has another type, or is raised again when the block runs eagerly.
    """
    modules = (kind.__module__ for kind in type(error).__mro__)
    return any(f"{name}.".startswith(f"{known}.") for name in modules for known in COMPILER_MODULES)


def is_launch_error(error: BaseException) -> bool:
    """Whether a kernel of a graph could not be built or started when it first ran."""
    return any(f"{kind.__module__}.".startswith("triton.") for kind in type(error).__mro__)


def describe_error(error: BaseException) -> str:
    """Returns type and first line of an error, without paths, addresses and process ids."""
    cause = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = PRIVATE_WORDS.sub("...", lines[0]) if lines else ""
    reason = f"{type(cause).__name__}: {text}".rstrip(": ")
    if len(reason) > MAX_REASON_CHARACTERS:
        return f"{reason[:MAX_REASON_CHARACTERS]} ..."
    return reason


class CompileFallback:
    """Raises errors of compilers and captures, or reports the first one of a model.

    Args:
        policy: What to do.
        is_reporter: Whether this rank prints the warning.
    """

    def __init__(self, policy: CompileErrorPolicy = "raise", *, is_reporter: bool = True) -> None:
        self.policy = policy
        self.is_reporter = is_reporter
        self.reason = ""
        """What runs without a graph and why, in one line; empty as long as nothing has failed."""

    def handle(self, part: str, error: Exception) -> None:
        """Raises the error, or reports that a part of a step runs eagerly."""
        if self.policy == "raise":
            raise error
        if self.reason:
            return
        self.reason = f"{part} run without a graph and are slower: {describe_error(error)}"
        if self.is_reporter:
            print(f"warning: {self.reason}", file=sys.stderr, flush=True)
