"""uvicorn's HTTP/1.1 protocol with limits on time and memory.

uvicorn limits neither the time in which a request must arrive nor the time in which an answer must
be read: a client that sends a byte per second would keep its connection for ever. Here headers and
body have deadlines that single bytes do not extend, and a client that does not read is dropped.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ranvier.infer.server.api_errors import ApiError, invalid_request, unavailable
from ranvier.infer.server.app import STREAM_KEY
from ranvier.infer.server.config import ConnectionLimits

BODY_CHECK_SECONDS = 0.5


class LingeringTransport:
    """A transport whose `close` lets the client read an answer to an unfinished request.

    Closing a socket with unread data resets the connection, and the client would lose the answer.
    """

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Closes the connection, after a while if the client is still sending."""
        if not self._protocol.start_lingering():
            self._transport.close()


class LimitedProtocol(H11Protocol):
    """A connection of a client, with the limits of `ConnectionLimits`."""

    limits = ConnectionLimits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._body_start = 0.0
        self._body_bytes = 0
        self._lingering_bytes = 0
        self._is_refused = False
        """Whether the protocol has answered by itself; the client may still be sending."""

    # ---- connection ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the deadline of the headers, or refuses one connection too many."""
        super().connection_made(cast(asyncio.Transport, LingeringTransport(transport, self)))
        transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # Otherwise the kernel would buffer megabytes for a client that does not read.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.write_buffer_bytes)
        if len(self.connections) > self.limits.max_connections:
            self._answer(
                unavailable(
                    f"{self.limits.max_connections} connections are open, the maximum. Send the "
                    "request again later.",
                    "too_many_connections",
                )
            )
            return
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self._end_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels all timers."""
        for timer in (self._header_timer, self._body_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        # A client that sends no request before it leaves would be an error of the state machine.
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request."""
        if self._linger_timer is not None:
            self._lingering_bytes += len(data)
            if self._lingering_bytes > self.limits.linger_bytes:
                self.transport.abort()
            return
        if self.transport.is_closing():
            return
        self._body_bytes += len(data)
        try:
            super().data_received(data)
        except h11.LocalProtocolError:
            # Garbage after a request whose answer has begun.
            self.transport.abort()
            return
        if self._header_timer is None and self._is_between_requests():
            # The first bytes of the next request on this connection.
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self._end_headers)
        if self.cycle is not None and not self.cycle.more_body:
            self._cancel_body_timer()

    def handle_events(self) -> None:
        """Handles what was read; also called for a request that came with the one before it."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._begin_body()

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _begin_body(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._cancel_body_timer()
        self._body_start = time.monotonic()
        self._body_bytes = len(self.cycle.body)
        if self.cycle.more_body:
            self._body_timer = self.loop.call_later(self.limits.body_seconds, self._check_body)

    # ---- deadlines -----------------------------------------------------------------------------

    def _end_headers(self) -> None:
        self._header_timer = None
        if not self._is_between_requests():
            return
        if self._body_bytes:
            self._answer(_slow_error("headers", self.limits.header_seconds))
        else:
            self.transport.close()

    def _check_body(self) -> None:
        """Ends a request whose body arrives too slowly."""
        self._body_timer = None
        if self.cycle is None or not self.cycle.more_body or self.cycle.response_complete:
            return
        elapsed = time.monotonic() - self._body_start
        if self._body_bytes >= elapsed * self.limits.body_bytes_per_second:
            self._body_timer = self.loop.call_later(BODY_CHECK_SECONDS, self._check_body)
            return
        if not self.cycle.response_started:
            self.cycle.response_started = True
            self._answer(_slow_error("body", self.limits.body_seconds))
        # The application sees that its client is gone.
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def _cancel_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def pause_writing(self) -> None:
        """Drops a client that does not read: of a stream at once, of an answer after a while."""
        super().pause_writing()
        if self.scope is not None and STREAM_KEY in self.scope:
            self.transport.abort()
        elif self._write_timer is None:
            self._start_write_timer()

    def _start_write_timer(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(
            self.limits.write_seconds, self._check_write, waiting
        )

    def _check_write(self, before: int) -> None:
        """Drops a client that has read nothing since the timer was started."""
        if self.transport.get_write_buffer_size() < before:
            self._start_write_timer()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """Continues after the client has read."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---- answers of the protocol ---------------------------------------------------------------

    def start_lingering(self) -> bool:
        """Keeps the connection of an unfinished request for a while; False if it can close."""
        is_unfinished = self._is_refused or self.conn.their_state is h11.SEND_BODY
        if self._linger_timer is not None:
            return True
        if not is_unfinished or self.transport.is_closing() or not self.transport.can_write_eof():
            return False
        self._linger_timer = self.loop.call_later(self.limits.linger_seconds, self.transport.abort)
        self.transport.write_eof()
        self.flow.resume_reading()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP."""
        self._answer(
            invalid_request(
                f"{msg} The server reads HTTP/1.1. Fix the request line and the headers.",
                code="invalid_http",
            )
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Other protocols are ignored, as HTTP allows."""

    def _answer(self, error: ApiError) -> None:
        """Sends an error without the application, and closes the connection."""
        body = error.to_json()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        try:
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=b"Error"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        except h11.LocalProtocolError:
            self.transport.abort()
            return
        self._is_refused = True
        self.transport.close()


def limited_protocol(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """Returns the class of connections with these limits, as uvicorn wants it."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


def _slow_error(part: str, seconds: float) -> ApiError:
    return ApiError(
        408,
        f"The {part} of the request did not arrive within {seconds:g} seconds. A request must "
        "arrive in time. Send it faster.",
        code="request_timeout",
    )
