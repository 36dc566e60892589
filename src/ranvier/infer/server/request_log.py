"""Logs of requests: one line per answer, and the usage as JSON lines on request."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from ranvier.errors import WriteError
from ranvier.system.terminal import print

SCOPE_KEY = "ranvier.record"
"""Key of the record in the scope of a request."""


@dataclass
class HttpRecord:
    """What is logged about an HTTP request; prompts only if the settings ask for them."""

    request_id: str
    method: str
    path: str
    client: str
    owner: str = ""
    """Name of the API key, which is not the key."""
    status: int = 0
    model: str = ""
    stream: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    prompt: Any = None
    texts: list[str] | None = None
    error: str = ""
    start_time: float = field(default_factory=time.monotonic)
    first_token_time: float = 0.0


class RequestLog:
    """Writes records to the terminal and to the usage log."""

    def __init__(self, usage_path: str = "", *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._file: TextIO | None = None
        if usage_path:
            try:
                self._file = open(usage_path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise WriteError(
                    f"serve.usage_log={usage_path!r} cannot be written: {error.strerror}. It must "
                    "be a file in an existing directory. Check the path."
                ) from None

    def write(self, record: HttpRecord) -> None:
        """Logs an answer."""
        seconds = time.monotonic() - record.start_time
        if self._file is not None and record.usage:
            try:
                self._write_usage(self._file, record, seconds)
            except OSError as error:
                # A full disk must not end answers.
                print(
                    f"The usage of {record.request_id} cannot be written: {error.strerror}.",
                    file=sys.stderr,
                )
        if not self.quiet:
            usage = ""
            if record.usage:
                tokens = record.usage
                usage = f" {tokens['prompt_tokens']}+{tokens['completion_tokens']} tokens"
            why = f" {record.error:.200}" if record.error else ""
            print(
                f"{time.strftime('%H:%M:%S')} {record.client} {record.request_id} {record.method} "
                f"{record.path:.100} {record.status} {seconds:.3f} s{usage}{why}",
                file=sys.stderr,
            )

    def _write_usage(self, file: TextIO, record: HttpRecord, seconds: float) -> None:
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "request_id": record.request_id,
            "api_key": record.owner or None,
            "endpoint": record.path,
            "model": record.model,
            "status": record.status,
            "stream": record.stream,
            **record.usage,
            "finish_reasons": record.finish_reasons,
            "time_to_first_token_seconds": None,
            "seconds": round(seconds, 6),
        }
        if record.first_token_time:
            waited = record.first_token_time - record.start_time
            line["time_to_first_token_seconds"] = round(waited, 6)
        if record.prompt is not None:
            line |= {"prompt": record.prompt, "texts": record.texts}
        file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Closes the usage log."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
