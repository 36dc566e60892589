"""The loop of an engine process: receives requests from the front, steps, and sends outputs.

The socket is polled between steps; without requests the process sleeps on it. What one request
raises ends only that request. An exception of a step ends the process, which reports its cause
first, so that the front can answer all open requests; the launcher starts it again.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ranvier.errors import CommunicationError, RanvierError
from ranvier.infer.request import EngineInterface, Request
from ranvier.infer.server.messages import (
    EngineInfo,
    MessageReader,
    encode_message,
    pack_output,
    pack_stats,
    unpack_requests,
)

READ_BYTES = 1 << 20
MAX_READS = 256
"""Number of reads before a step, so that a front that sends without end does not stop it."""
MAX_CAUSE_CHARACTERS = 500
SignalHandler = Callable[[int, FrameType | None], None] | signal.Handlers


class FrontConnection:
    """The socket of an engine process to the front."""

    def __init__(self, path: str, replica: int = 0) -> None:
        self.replica = replica
        self.is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise CommunicationError(
                f"The front cannot be reached at {path}: {error.strerror}. It must run before its "
                "engines. Start the server again."
            ) from None
        self._reader = MessageReader()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; if the front has ended, the connection is closed."""
        try:
            self._socket.sendall(encode_message(message))
        except OSError:
            self.is_closed = True

    def report_progress(self, text: str) -> None:
        """Shows what the engine does before it accepts requests."""
        self.send({"progress": text, "replica": self.replica})

    def receive(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Yields the messages that have arrived; wait: for at least some bytes."""
        # A read returns at most what the buffer of the socket holds, a few long prompts. Aborts
        # behind them must not wait for further steps.
        for _ in range(MAX_READS):
            ready, _, _ = select.select([self._socket], [], [], None if wait else 0)
            if not ready:
                return
            wait = False
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:
                data = b""
            yield from self._reader.feed(data)
            if not data:
                self.is_closed = True
                return

    def close(self) -> None:
        """Closes the socket, which the front takes as the end of this engine."""
        self.is_closed = True
        self._socket.close()


class EngineWorker:
    """An engine and its connection to the front."""

    def __init__(self, engine: EngineInterface, connection: FrontConnection) -> None:
        self.engine = engine
        self.connection = connection
        self.num_received = 0
        """Requests received so far; tells the front which ones the statistics include."""
        self._is_stopped = False

    def run(self, info: EngineInfo) -> int:
        """Serves requests until the front stops it or ends. Returns the exit code."""
        self.connection.send({"hello": _info_values(info)})
        self._send_step([], 0.0)
        while True:
            has_changed = self._receive()
            if self._is_over():
                break
            if self.engine.has_unfinished:
                self._step()
            elif has_changed:
                # Aborts of the last requests change the statistics without a step.
                self._send_step([], 0.0)
        self.connection.close()
        return 0

    def _is_over(self) -> bool:
        return self._is_stopped or self.connection.is_closed

    def _receive(self) -> bool:
        """Handles the messages that have arrived; without requests it waits for some."""
        messages = list(self.connection.receive(wait=not self.engine.has_unfinished))
        for message in messages:
            self._handle(message)
        return bool(messages)

    def _handle(self, message: dict[str, Any]) -> None:
        if "add" in message:
            for request in unpack_requests(message):
                self._add(request)
        elif "abort" in message:
            self.engine.abort(message["abort"])
        elif "stop" in message:
            self._is_stopped = True

    def _add(self, request: Request) -> None:
        self.num_received += 1
        try:
            self.engine.add(request)
        except RanvierError as error:
            self.connection.send({"refused": [request.request_id, "invalid", str(error)]})
        except Exception as error:  # one request must not end the others
            self.connection.send({"refused": [request.request_id, "error", _cause_of(error)]})

    def _step(self) -> None:
        """Runs a step; what it raises is reported to the front and ends the process."""
        start = time.monotonic()
        try:
            outputs = self.engine.step()
        except Exception as error:
            self.connection.send({"fault": _cause_of(error)})
            self.connection.close()
            raise
        self._send_step([pack_output(one) for one in outputs], time.monotonic() - start)

    def _send_step(self, outputs: list[list[Any]], seconds: float) -> None:
        stats = pack_stats(self.engine.stats())
        self.connection.send({"step": [outputs, stats, self.num_received, seconds]})


def report_fault(path: str, replica: int, error: Exception) -> None:
    """Tells the front why a rank that is not the leader ends; ignored if it cannot be reached."""
    with contextlib.suppress(CommunicationError):
        connection = FrontConnection(path, replica)
        connection.send({"fault": _cause_of(error), "replica": replica})
        connection.close()


def handle_stop_signals(handler: SignalHandler = signal.SIG_IGN) -> None:
    """Ignores signals that stop the server, or calls `handler`.

    Ctrl-C and systemd signal all processes; the front decides when its engines end, by closing the
    connection.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def run_engine_worker(
    engine: EngineInterface, connection: FrontConnection, info: EngineInfo | None = None
) -> int:
    """Serves the requests of a front with an engine. Returns the exit code of the process.

    Communicates: with the front over its Unix socket.
    """
    if info is None:
        info = EngineInfo(
            replica=connection.replica,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            num_blocks=engine.stats().num_blocks,
        )
    return EngineWorker(engine, connection).run(info)


def _info_values(info: EngineInfo) -> dict[str, Any]:
    return {**vars(info), "details": dict(info.details)}


def _cause_of(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if len(text) > MAX_CAUSE_CHARACTERS:
        return f"{text[:MAX_CAUSE_CHARACTERS]} ..."
    return text.rstrip(".")
