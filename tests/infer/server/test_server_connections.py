"""Connections: slow and large requests, clients that do not read, and bytes that are not HTTP."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infer.fake_server import FakeServer, write_model
from ranvier.infer.server.front_process import bind_socket

LIMIT_MIB = 0.25
LIMITS = {
    "header_seconds": 0.6,
    "body_seconds": 0.8,
    "body_bytes_per_second": 1e5,
    "keep_alive_seconds": 1,
    "write_buffer_bytes": 16 * 1024,
    "write_seconds": 0.5,
    "linger_seconds": 0.5,
    "max_connections": 40,
}
JSON_HEADERS = b"host: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = write_model(tmp_path_factory.mktemp("served"))
    engine = {"max_model_len": 65536, "step_seconds": 0.0002}
    with FakeServer(folder, limits=LIMITS, max_body_mib=LIMIT_MIB, engine=engine) as server:
        yield server


def connect(server: FakeServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    while True:
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            return found
        if not data:
            return found
        found += data


def read_answer(sock: socket.socket) -> bytes:
    """One answer, whose head and body may arrive apart."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += sock.recv(4096)
    head, _, body = found.partition(b"\r\n\r\n")
    (size,) = re.findall(rb"content-length: (\d+)", head.lower())
    while len(body) < int(size):
        body += sock.recv(4096)
    return head


def read_error(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    head, _, body = read_all(sock).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def check_alive(server: FakeServer) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "SAY:ok|"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "ok"


def trickle(sock: socket.socket, data: bytes) -> None:
    """Sends a byte at a time until the server answers."""
    sock.setblocking(True)
    for byte in data:
        sock.settimeout(0.02)
        try:
            if sock.recv(1, socket.MSG_PEEK):
                break
        except TimeoutError:
            pass
        except ConnectionError:
            break
        try:
            sock.send(bytes([byte]))
        except ConnectionError:
            break
    sock.settimeout(20)


def test_slow_headers_are_ended(server: FakeServer) -> None:
    with connect(server) as sock:
        trickle(sock, b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 100)
        status, error = read_error(sock)
        assert status == 408 and error["code"] == "request_timeout"


def test_an_idle_connection_is_closed(server: FakeServer) -> None:
    with connect(server) as sock:
        assert read_all(sock) == b""


def test_slow_headers_of_a_second_request_are_ended(server: FakeServer) -> None:
    with connect(server) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in read_answer(sock)
        trickle(sock, b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 100)
        assert read_error(sock)[0] == 408


def test_slow_bodies_are_ended(server: FakeServer) -> None:
    with connect(server) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS + b"content-length: 9999\r\n\r\n"
        )
        trickle(sock, b'{"prompt": "' + b"x" * 900)
        status, error = read_error(sock)
        assert status == 408 and "body" in error["message"]
    check_alive(server)


def test_the_second_of_two_requests_at_once_has_a_deadline(server: FakeServer) -> None:
    with connect(server) as sock:
        sock.sendall(
            b"GET /version HTTP/1.1\r\nhost: x\r\n\r\nPOST /v1/completions HTTP/1.1\r\n"
            + JSON_HEADERS
            + b"content-length: 100\r\n\r\n{"
        )
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer


def test_many_slow_clients_do_not_delay_others(server: FakeServer) -> None:
    slow = [connect(server) for _ in range(30)]
    for sock in slow:
        sock.sendall(b"POST /v1/comp")
    check_alive(server)
    for sock in slow:
        assert read_error(sock)[0] == 408
        sock.close()


def test_too_many_connections_are_refused(server: FakeServer) -> None:
    many = [connect(server) for _ in range(45)]
    found = []
    for sock in many:
        # Nothing was sent: a refused connection has an answer, the others are just closed.
        if data := read_all(sock):
            found.append(json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"])
        sock.close()
    assert found and set(found) == {"too_many_connections"}
    check_alive(server)


def test_a_large_body_is_refused_before_it_is_read(server: FakeServer) -> None:
    size = 2**30
    with connect(server) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\n"
            + JSON_HEADERS
            + f"content-length: {size}\r\n\r\n".encode()
        )
        sent = send_until_answered(sock, b"x" * 65536, size)
        status, error = read_error(sock)
        assert status == 413 and str(size) in error["message"]
        assert sent < 32 * 2**20
    check_alive(server)


def test_a_chunked_body_is_refused_at_the_limit(server: FakeServer) -> None:
    with connect(server) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\n"
            + JSON_HEADERS
            + b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        sent = send_until_answered(sock, chunk, 2**30)
        assert read_error(sock)[0] == 413 and sent < 32 * 2**20
    check_alive(server)


def send_until_answered(sock: socket.socket, data: bytes, size: int) -> int:
    """Sends data again and again until there is an answer. Returns the number of bytes."""
    sent = 0
    while sent < size:
        sock.settimeout(0.0)
        try:
            if sock.recv(1, socket.MSG_PEEK):
                break
        except (BlockingIOError, TimeoutError):
            pass
        except ConnectionError:
            break
        sock.settimeout(5)
        try:
            sock.sendall(data)
        except (ConnectionError, TimeoutError):
            break
        sent += len(data)
    sock.settimeout(20)
    return sent


def test_a_body_at_the_limit_is_read(server: FakeServer) -> None:
    size = int(LIMIT_MIB * 2**20)
    body = b'{"prompt": "SAY:ok|", "user": "' + b"x" * (size - 33) + b'"}'
    assert len(body) == size
    for data, status in ((body, 200), (b" " + body, 413)):
        answer = server.http.post(
            "/v1/completions",
            content=data,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == status


NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    b"GET  /\r\n\r\n",
    b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 2_000_000,
    b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\r\n\r\n\x00",
]


@pytest.mark.parametrize("data", NOT_HTTP, ids=lambda data: repr(data[:24]))
def test_what_is_not_http_is_a_bad_request(server: FakeServer, data: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(data)
        status, error = read_error(sock)
        assert status == 400 and error["code"] == "invalid_http"


def test_garbage_during_an_answer_ends_the_connection_only(server: FakeServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 500, "stream": true}'
    with connect(server) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\n"
            + JSON_HEADERS
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        sock.recv(100)
        sock.sendall(b"\x00\x01garbage\r\n\r\n")
        read_all(sock)
    check_alive(server)


METHODS: list[tuple[str, str, dict[str, str], int, str]] = [
    ("GET", "/v1/completions", {}, 405, "method_not_allowed"),
    ("DELETE", "/health", {}, 405, "method_not_allowed"),
    ("POST", "/v1/completions", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    ("POST", "/v1/completions", {}, 415, "unsupported_media_type"),
    ("GET", "/nothing", {}, 404, "not_found"),
    ("POST", "/v1/audio/speech", {}, 404, "not_found"),
    ("GET", "/health/", {}, 404, "not_found"),
]


@pytest.mark.parametrize(("method", "path", "headers", "status", "code"), METHODS)
def test_errors_of_http_have_the_error_object(
    server: FakeServer, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    answer = server.http.request(method, path, headers=headers, content=b"{}")
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code and set(error) == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"]


def test_a_client_that_does_not_read_a_stream_is_dropped(server: FakeServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 60000, "stream": true}'
    with connect(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\n"
            + JSON_HEADERS
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_for_running(server, 1)
        # The request is aborted although the connection stays open on this side.
        wait_for_running(server, 0)
        assert b"[DONE]" not in read_all(sock)
    check_alive(server)


def wait_for_running(server: FakeServer, count: int) -> None:
    """Waits until the engine runs that many requests."""
    for _ in range(400):
        text = server.http.get("/metrics").text
        line = next(x for x in text.splitlines() if x.startswith("ranvier:num_requests_running{"))
        if float(line.split()[-1]) == count:
            return
        time.sleep(0.02)
    raise AssertionError(line)


def test_tokens_do_not_wait_for_acknowledgments() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
