"""An engine whose ranks are other processes, for a program that runs no rank itself.

The program listens on a Unix socket, as the front of a server does, and the first rank connects.
"""

from __future__ import annotations

import select
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranvier.errors import CommunicationError, OtherRankError
from ranvier.infer.request import EngineStats, Request, TokenOutput
from ranvier.infer.server.engine_worker import READ_BYTES
from ranvier.infer.server.messages import (
    MessageReader,
    encode_message,
    pack_request,
    unpack_output,
    unpack_stats,
)

POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
"""Time that the ranks have to end before they are killed."""


class RemoteEngine:
    """The engine at the other end of a connection; see `EngineInterface`.

    A request that can never run has an output with the reason error.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.max_model_len = 0
        self.vocab_size = 0
        self._connection = connection
        self._reader = MessageReader()
        self._open: set[str] = set()
        self._stats = EngineStats()
        while not self.max_model_len:
            for message in self._receive():
                if "hello" in message:
                    self.max_model_len = message["hello"]["max_model_len"]
                    self.vocab_size = message["hello"]["vocab_size"]

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._open)

    def add(self, request: Request) -> None:
        """Adds a request to the queue."""
        self._open.add(request.request_id)
        self._send({"add": pack_request(request)})

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown and finished ones are ignored. It has no further output."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._send({"abort": request_id})

    def step(self) -> list[TokenOutput]:
        """Waits for the outputs of a step. Raises a `CommunicationError` if the engine fails."""
        if not self._open:
            return []
        outputs = []
        for message in self._receive():
            if "step" in message:
                packed, stats, _, _ = message["step"]
                self._stats = unpack_stats(stats)
                outputs += [unpack_output(one) for one in packed]
            elif "refused" in message:
                request_id, _, text = message["refused"]
                outputs.append(
                    TokenOutput(request_id=request_id, finish_reason="error", error=text)
                )
        # An aborted request may have outputs of a step that had already started.
        outputs = [one for one in outputs if one.request_id in self._open]
        self._open -= {one.request_id for one in outputs if one.finish_reason is not None}
        return outputs

    def stats(self) -> EngineStats:
        """Returns the counters and gauges of the last step."""
        return self._stats

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(encode_message(message))
        except OSError as error:
            raise _failed_engine(str(error.strerror)) from None

    def _receive(self) -> list[dict[str, Any]]:
        """Waits for bytes and returns the messages that are complete."""
        try:
            data = self._connection.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise _failed_engine("its process has ended")
        messages = list(self._reader.feed(data))
        for message in messages:
            if "fault" in message:
                raise _failed_engine(message["fault"])
        return messages


def _failed_engine(cause: str) -> CommunicationError:
    return CommunicationError(
        f"The engine has failed: {cause}. Its ranks must run until the end. See the messages above."
    )


@contextmanager
def open_remote_engine(start: Callable[[str], subprocess.Popen[bytes]]) -> Iterator[RemoteEngine]:
    """Context with the engine of a process, which `start` starts with the path of a socket.

    Communicates: with the engine over a Unix socket.
    """
    with tempfile.TemporaryDirectory(prefix="ranvier-") as folder:
        path = str(Path(folder) / "engine.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1)
            process = start(path)
            try:
                with _accept(listener, process) as connection:
                    yield _connect(connection, process)
            finally:
                # The closed connection ends the engine.
                _end_process(process)


def _accept(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    """Returns the connection of the engine."""
    while not select.select([listener], [], [], POLL_SECONDS)[0]:
        code = process.poll()
        if code is not None:
            raise OtherRankError(code)
    return listener.accept()[0]


def _connect(connection: socket.socket, process: subprocess.Popen[bytes]) -> RemoteEngine:
    """Waits until the engine has loaded its model."""
    try:
        return RemoteEngine(connection)
    except CommunicationError:
        code = process.wait()
        raise OtherRankError(code) from None


def _end_process(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
