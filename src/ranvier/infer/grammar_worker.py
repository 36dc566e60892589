"""A process that compiles untrusted grammars first, within limits of time and memory.

A small schema or regular expression can need minutes and gigabytes. Only what this process has
compiled in time is compiled in the process that needs it. A process that exceeds its limits is
killed, and the next grammar starts another one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ranvier.infer.grammar import (
    GrammarLimits,
    StructuredOutputError,
    build_grammar_tokenizer,
    build_parser,
)
from ranvier.infer.sampling_params import StructuredOutput

STDOUT = 1
START_SECONDS = 120.0
"""Maximum time in which the process starts and reads the tokenizer."""


class GrammarWorker:
    """The parent's side of the process; its methods may be called from several threads."""

    def __init__(
        self,
        tokenizer_json: str,
        num_tokens: int,
        end_token_ids: Sequence[int],
        limits: GrammarLimits,
    ) -> None:
        self._limits = limits
        self._header = json.dumps(
            {
                "tokenizer_json": tokenizer_json,
                "num_tokens": num_tokens,
                "end_token_ids": list(end_token_ids),
                "limits": asdict(limits),
            }
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, structure: StructuredOutput) -> None:
        """Compiles a grammar in the process. Raises a `StructuredOutputError` if that fails."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            line = json.dumps({"kind": structure.kind, "value": structure.value})
            answer = self._exchange(line, self._limits.compile_seconds)
        if answer is None:
            raise StructuredOutputError(
                f"The {structure.kind} needs more than {self._limits.compile_seconds:g} s or "
                f"{self._limits.compile_mib} MiB to compile. A grammar must compile within these "
                "limits. Simplify it: fewer repetitions and alternatives."
            )
        if answer["error"]:
            raise StructuredOutputError(answer["error"])

    def close(self) -> None:
        """Ends the process, also while it compiles a grammar."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._kill()

    def _start(self) -> None:
        self._kill()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ranvier.infer.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal goes to the whole group; the parent ends this process itself.
            start_new_session=True,
        )
        answer = self._exchange(self._header, START_SECONDS)
        if answer is None:
            raise StructuredOutputError(
                "The process that compiles grammars has not started. It needs llguidance and some "
                "memory. Send the request without structured output."
            )
        if answer["error"]:
            # The process ends; without this, the next grammar would be blamed for that.
            self._kill()
            raise StructuredOutputError(answer["error"])

    def _exchange(self, line: str, seconds: float) -> Any:
        """Returns the answer to a line; None, and no process, if none comes in time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        received = b""
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + seconds
            while not received.endswith(b"\n"):
                left = max(0.0, deadline - time.monotonic())
                # Not select: a server with many connections has descriptors above its limit.
                poll = select.poll()
                poll.register(process.stdout, select.POLLIN)
                ready = poll.poll(1000 * left)
                part = process.stdout.read1(65_536) if ready else b""  # type: ignore[attr-defined]
                if not part:
                    self._kill()
                    return None
                received += part
        except OSError:
            self._kill()
            return None
        except BaseException:
            # An interrupted exchange leaves an answer behind that would be read as the next one.
            self._kill()
            raise
        return json.loads(received)

    def _kill(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                # Closing sends the rest of a line that the process no longer reads.
                with contextlib.suppress(OSError):
                    stream.close()


def _limit_memory(mib: int) -> None:
    """Limits the address space to what is mapped now and some more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answers one line for each line of the standard input."""
    header = json.loads(sys.stdin.readline())
    limits = GrammarLimits(**header["limits"])
    try:
        tokenizer = build_grammar_tokenizer(
            header["tokenizer_json"], header["num_tokens"], header["end_token_ids"]
        )
    except Exception as error:
        _answer(str(error))
        return
    _limit_memory(limits.compile_mib)
    _answer("")
    for line in sys.stdin:
        request = json.loads(line)
        # Ends this process if its parent no longer can.
        signal.alarm(math.ceil(limits.compile_seconds) + 1)
        try:
            build_parser(tokenizer, StructuredOutput(request["kind"], request["value"]), limits)
        except StructuredOutputError as error:
            _answer(str(error))
        else:
            _answer("")
        signal.alarm(0)


def _answer(error: str) -> None:
    os.write(STDOUT, json.dumps({"error": error}).encode() + b"\n")


if __name__ == "__main__":
    main()
