"""A small HTTP/1.1 client that streams answers of an OpenAI-like server and notes their times.

It speaks only what the benchmark needs: POST and GET with JSON, chunked or plain answers,
server-sent events, connections that are kept open. Times are those of a monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ranvier.errors import PlanError

MAX_HEADERS = 200
MAX_ERROR_BYTES = 65_536
LINE_LIMIT = 16 * 2**20
"""Maximum number of bytes of a line."""


@dataclass
class RequestRecord:
    """What was measured of a request. Times are seconds after the start of the benchmark."""

    index: int
    start: float
    token_times: list[float] = field(default_factory=list)
    """When text arrived: the first token, then each further piece."""
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    """Kind of failure; empty for a complete answer."""
    message: str = ""
    """What the server or the system says about the failure."""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.start

    @property
    def latency(self) -> float:
        """End-to-end time."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (end - first) / (n - 1)."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between pieces of text."""
        times = self.token_times
        return [after - before for before, after in itertools.pairwise(times)]


class RequestFailedError(Exception):
    """A request without a complete answer."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Connection:
    """An open connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_used: bool = False
    """Whether it has carried a request before; the server may have closed it since."""


class BenchClient:
    """Sends requests to one server; connections are used again."""

    def __init__(self, url: str, api_key: str = "") -> None:
        place = urlsplit(url)
        try:
            port = place.port
        except ValueError:
            port = -1
        if place.scheme not in ("http", "https") or not place.hostname or port == -1:
            raise PlanError(
                f"{url!r} is not the URL of a server. It must be http or https with a host. Use "
                "http://127.0.0.1:8000."
            )
        self._host = place.hostname
        self._port = port or (443 if place.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if place.scheme == "https" else None
        # Users also pass the base URL of the official client, which ends in /v1.
        self._prefix = place.path.rstrip("/").removesuffix("/v1")
        self._headers = {"host": place.netloc.rpartition("@")[2], "accept": "*/*"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._idle: list[Connection] = []

    async def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            await _close(self._idle.pop())

    async def get_json(self, path: str) -> Any:
        """Returns the JSON of a GET request."""
        data = b"".join([part async for part in self._request("GET", path, None)])
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise RequestFailedError("protocol", f"{path} is not JSON") from None

    async def stream(
        self, path: str, body: Mapping[str, Any], record: RequestRecord, origin: float
    ) -> None:
        """Sends a request and notes when pieces of its answer arrive.

        origin: time of the clock at which the benchmark started.
        """
        # Closing the generators also closes the connection if this raises.
        async with (
            contextlib.aclosing(self._request("POST", path, body)) as parts,
            contextlib.aclosing(_read_events(parts)) as events,
        ):
            is_complete = await _note_events(events, record, origin)
        if not is_complete:
            raise RequestFailedError("disconnected", "the answer ended before it was complete")
        if not record.token_times:
            raise RequestFailedError("empty", "the answer has no text")
        record.output_tokens = record.output_tokens or len(record.token_times)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncGenerator[bytes, None]:
        """Yields the parts of the body of an answer."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        while True:
            connection = await self._connect()
            is_reusable = False
            first = b""
            try:
                connection.writer.write(self._head(method, path, len(content)) + content)
                await connection.writer.drain()
                first = await connection.reader.readline()
                if not first and connection.is_used:
                    # The server has closed an idle connection: try another one.
                    continue
                status, headers = await _read_head(first, connection.reader)
                parts = _read_body(connection.reader, headers)
                if status != 200:
                    raise await _status_error(status, parts)
                async for part in parts:
                    yield part
                is_reusable = headers.get("connection", "").lower() != "close" and (
                    "content-length" in headers or "transfer-encoding" in headers
                )
                return
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if connection.is_used and not first:
                    continue
                raise RequestFailedError("disconnected", str(error)) from None
            finally:
                if is_reusable:
                    connection.is_used = True
                    self._idle.append(connection)
                else:
                    connection.writer.close()

    def _head(self, method: str, path: str, size: int) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        lines += ["content-type: application/json", f"content-length: {size}", "", ""]
        return "\r\n".join(lines).encode()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            await _close(connection)
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._ssl, limit=LINE_LIMIT
            )
        except OSError as error:
            raise RequestFailedError("connect", error.strerror or str(error)) from None
        return Connection(reader, writer)


async def _close(connection: Connection) -> None:
    connection.writer.close()
    try:
        await connection.writer.wait_closed()
    except OSError:
        # The other side was faster.
        return


async def _read_head(first: bytes, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Returns the status and the headers of an answer."""
    words = first.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        kind = "protocol" if first else "disconnected"
        raise RequestFailedError(kind, f"the answer begins with {first[:40]!r}")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = await reader.readline()
        if not line.strip():
            return int(words[1]), headers
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise RequestFailedError("protocol", f"the answer has more than {MAX_HEADERS} headers")


async def _read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    """Yields the parts of a body: chunked, of a given length, or up to the end."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            line = await reader.readline()
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                kind = "protocol" if line else "disconnected"
                raise RequestFailedError(kind, "a chunk has no length") from None
            part = await reader.readexactly(size + 2)
            if size == 0:
                return
            yield part[:-2]
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left > 0:
            part = await reader.read(min(left, 65_536))
            if not part:
                raise RequestFailedError("disconnected", "the answer is too short")
            left -= len(part)
            yield part
    else:
        while part := await reader.read(65_536):
            yield part


async def _note_events(events: AsyncIterator[bytes], record: RequestRecord, origin: float) -> bool:
    """Notes the times of the tokens of a stream. Returns whether it came to its end."""
    is_complete = False
    async for data in events:
        now = time.perf_counter() - origin
        if data == b"[DONE]":
            is_complete = True
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise RequestFailedError("protocol", "an event is not JSON") from None
        if not isinstance(event, dict):
            raise RequestFailedError("protocol", "an event is not an object")
        if event.get("error"):
            raise RequestFailedError("stream error", _error_message(event))
        if _has_text(event):
            record.token_times.append(now)
        _read_usage(event.get("usage"), record)
    return is_complete


async def _read_events(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the data of server-sent events."""
    buffer = b""
    async for part in parts:
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _status_error(status: int, parts: AsyncIterator[bytes]) -> RequestFailedError:
    data = b""
    async for part in parts:
        data += part
        if len(data) > MAX_ERROR_BYTES:
            break
    try:
        message = _error_message(json.loads(data))
    except (ValueError, RecursionError):
        message = data[:200].decode(errors="replace")
    return RequestFailedError(f"HTTP {status}", message)


def _error_message(event: Any) -> str:
    error = event.get("error") if isinstance(event, dict) else event
    found = error.get("message") if isinstance(error, dict) else error
    return str(found)[:500]


def _has_text(event: Mapping[str, Any]) -> bool:
    """Whether an event of either endpoint carries tokens."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    choice = choices[0]
    delta = choice.get("delta")
    texts = [choice.get("text"), choice.get("token_ids")]
    if isinstance(delta, dict):
        texts += [delta.get(key) for key in ("content", "reasoning_content", "tool_calls")]
    return any(texts)


def _read_usage(usage: Any, record: RequestRecord) -> None:
    if not isinstance(usage, dict):
        return
    record.prompt_tokens = _count(usage.get("prompt_tokens"))
    record.output_tokens = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        record.cached_tokens = _count(details.get("cached_tokens"))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
