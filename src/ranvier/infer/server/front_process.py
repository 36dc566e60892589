"""The event loop of the front: HTTP server, engine client, signals, and what the terminal shows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn

from ranvier.errors import PlanError
from ranvier.infer.server.api_errors import unavailable
from ranvier.infer.server.app import Front, build_app
from ranvier.infer.server.authentication import ApiKeys
from ranvier.infer.server.engine_client import EngineClient, Replica
from ranvier.infer.server.http_protocol import limited_protocol
from ranvier.infer.server.metrics import ServerMetrics
from ranvier.infer.server.request_log import RequestLog
from ranvier.infer.server.serve import EngineProcesses, ServerOptions
from ranvier.infer.server.served_model import ServedModel
from ranvier.infer.server.text_formats import load_served_model
from ranvier.system.terminal import print

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_SECONDS = 0.1
ECHO_SECONDS = 0.1
"""A signal repeated within this time counts as one."""
CLOSE_SECONDS = 2
"""Time that connections have to close at the end."""
BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """uvicorn's server; signals are handled by `FrontProcess`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


class FrontProcess:
    """A front from start to end."""

    def __init__(
        self, options: ServerOptions, keys: ApiKeys, engines: EngineProcesses, socket_path: str
    ) -> None:
        self.options = options
        self.keys = keys
        self.engines = engines
        self.socket_path = socket_path
        self.was_killed = False
        """Whether a second signal has ended the server at once."""
        self._signals: list[int] = []
        self._signal_time = 0.0
        self._signalled = asyncio.Event()
        self._shown: dict[int, str] = {}
        self._has_shown_ready = False

    def run(self) -> int:
        """Serves until a signal. Returns the exit code."""
        config = self.options.config
        model = load_served_model(self.options)
        listener = bind_socket(config.host, config.port)
        with contextlib.closing(listener):
            return asyncio.run(self._serve(model, listener))

    async def _serve(self, model: ServedModel, listener: socket.socket) -> int:
        config = self.options.config
        metrics = ServerMetrics(model.name)
        client = EngineClient(
            metrics,
            num_replicas=self.options.num_replicas,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            queue_timeout_seconds=config.queue_timeout_seconds,
        )
        metrics.replicas = client.replicas
        client.on_failure = self.engines.note_failure
        log = RequestLog(config.usage_log, quiet=self.options.quiet)
        front = Front(
            config, model, client, metrics, keys=self.keys, log=log, seed=self.options.seed
        )
        self._handle_signals()
        await client.start(self.socket_path)
        server = HttpServer(
            uvicorn.Config(
                build_app(front),
                http=limited_protocol(
                    dataclasses.replace(self.options.limits, linger_bytes=config.max_body_bytes)
                ),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(self.options.limits.keep_alive_seconds),
                timeout_graceful_shutdown=CLOSE_SECONDS,
                h11_max_incomplete_event_size=self.options.limits.max_header_bytes,
                backlog=BACKLOG,
            )
        )
        serving = asyncio.create_task(server.serve([listener]))
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"Loading {model.name}. The server listens at {address}.", flush=True)
        try:
            while not self._signals and not serving.done():
                self.engines.start_missing()
                if self.engines.refusal_code:
                    break
                self._show_states(client, model, address)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._signalled.wait(), POLL_SECONDS)
            await self._drain(front)
        finally:
            server.should_exit = True
            server.force_exit = self.was_killed
            await client.close()
            if not self.was_killed:
                await serving
            front.close()
        if self.was_killed:
            return 128 + self._signals[-1]
        print("The server has stopped.", flush=True)
        return self.engines.refusal_code

    # ---- signals -------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._note_signal, number)

    def _note_signal(self, number: int) -> None:
        now = time.monotonic()
        # The same signal may arrive twice: from the launcher, and sent to all processes of a job.
        if self._signals and now - self._signal_time < ECHO_SECONDS:
            return
        self._signal_time = now
        self._signals.append(number)
        self._signalled.set()
        if len(self._signals) > 1:
            self.was_killed = True

    async def _drain(self, front: Front) -> None:
        """Lets running requests finish, for a limited time."""
        front.is_draining = True
        limit = time.monotonic() + self.options.config.drain_seconds
        if front.num_open:
            print(
                f"Stopping after {front.num_open} open requests, at most "
                f"{self.options.config.drain_seconds:g} s. A second signal stops at once.",
                flush=True,
            )
        while front.num_open and time.monotonic() < limit and not self.was_killed:
            await asyncio.sleep(POLL_SECONDS / 2)
        front.client.fail_all(
            unavailable(
                "The server was stopped before the answer was complete. Send the request to "
                "another server.",
                "draining",
            )
        )
        if front.num_open and not self.was_killed:
            # The errors are sent before connections close.
            await asyncio.sleep(POLL_SECONDS)

    # ---- terminal ------------------------------------------------------------------------------

    def _show_states(self, client: EngineClient, model: ServedModel, address: str) -> None:
        """Prints what has changed at the engines, and once that the server is ready."""
        for replica in client.replicas:
            text = _describe(replica)
            if text != self._shown.get(replica.index, ""):
                self._shown[replica.index] = text
                if self.options.num_replicas > 1:
                    text = f"Replica {replica.index}: {text}"
                print(text, flush=True)
        if not self._has_shown_ready and client.ready_replicas:
            self._has_shown_ready = True
            self.engines.has_been_ready = True
            info = client.ready_replicas[0].info
            # The last token is sampled and not stored.
            longest = max(1, -(-(info.max_model_len - 1) // info.block_size))
            fitting = info.num_blocks // longest
            print(
                f"Ready: {model.name} at {address}, {info.num_blocks:,} blocks of "
                f"{info.block_size} tokens, longest request {info.max_model_len:,} tokens, "
                f"{fitting:,} such requests fit.",
                flush=True,
            )


def _describe(replica: Replica) -> str:
    if replica.state == "down":
        return f"The engine is down: {replica.cause}."
    if replica.state == "ready":
        return "The engine is ready."
    return replica.progress


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises an error that says what to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Otherwise the second token of a stream waits until the client has
        # acknowledged the first, which may take 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PlanError(
            f"serve.host={host!r} and serve.port={port} cannot be used: {error.strerror or error}. "
            "The address must be free and belong to this machine. Use another port, or 0 for any."
        ) from None
    listener.setblocking(False)
    return listener
