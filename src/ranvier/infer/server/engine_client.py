"""The front's side of the engines: sends requests to replicas and hands out their outputs.

Engine processes connect to a Unix socket of the front; one that was restarted connects again. A
replica whose connection ends is down: its open requests fail with the cause, and the others are not
affected. All methods run in the event loop of the front.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ranvier.infer.request import EngineStats, Request, TokenOutput
from ranvier.infer.server.api_errors import ApiError, busy, invalid_request, unavailable
from ranvier.infer.server.messages import (
    EngineInfo,
    MessageReader,
    encode_message,
    pack_requests,
    unpack_output,
    unpack_stats,
)
from ranvier.infer.server.metrics import ServerMetrics
from ranvier.infer.server.routing import (
    PrefixMemory,
    ReplicaLoad,
    choose_replica,
    name_blocks,
)

ReplicaState = Literal["starting", "ready", "down"]
QUEUE_CHECK_SECONDS = 0.25


@dataclass
class RequestRecord:
    """What the front knows about one request of an engine."""

    request: Request
    generation: Generation
    replica: Replica
    sent_time: float
    first_time: float = 0.0
    """Time of the first token; 0 before it."""
    last_time: float = 0.0
    num_tokens: int = 0


class Generation:
    """The requests of one HTTP request, and their outputs in order of arrival."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._outputs: deque[TokenOutput] = deque()
        self._error: ApiError | None = None
        self._changed = asyncio.Event()
        self.records: dict[str, RequestRecord] = {}
        """Unfinished requests."""

    def push(self, output: TokenOutput) -> None:
        """Adds an output."""
        self._outputs.append(output)
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """Ends all requests with an error."""
        if self._error is None:
            self._error = error
        self.abort()
        self._changed.set()

    async def next_outputs(self) -> list[TokenOutput]:
        """Waits for outputs and returns all there are; raises the error of a failed request."""
        while not self._outputs and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def abort(self) -> None:
        """Ends all unfinished requests, queued or running."""
        for request_id in list(self.records):
            self.abort_one(request_id)

    def abort_one(self, request_id: str, reason: str = "abort") -> None:
        """Ends one request; reason: for the metrics."""
        self._client.abort(request_id, reason)


@dataclass
class Replica:
    """One engine process, or the leader of several ranks."""

    index: int
    state: ReplicaState = "starting"
    cause: str = ""
    """Why it is down."""
    progress: str = ""
    info: EngineInfo = field(default_factory=EngineInfo)
    stats: EngineStats = field(default_factory=EngineStats)
    transport: asyncio.WriteTransport | None = None
    num_received: int = 0
    """Requests that the statistics include."""
    unseen_tokens: deque[int] = field(default_factory=deque)
    """Prompt tokens of requests that the statistics do not include yet."""
    memory: PrefixMemory = field(default_factory=PrefixMemory)
    num_restarts: int = 0
    num_open: int = 0
    """Requests that were sent and have not ended."""

    @property
    def num_waiting(self) -> int:
        """Requests that were sent and have not started."""
        return self.stats.num_waiting + len(self.unseen_tokens)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those."""
        return self.stats.num_waiting_tokens + sum(self.unseen_tokens)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; a replica that is down ignores it."""
        if self.transport is not None:
            self.transport.write(encode_message(message))


class EngineClient:
    """All replicas, and the requests that are open."""

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        num_replicas: int = 1,
        max_queued_requests: int = 1024,
        max_queued_tokens: int = 2**20,
        queue_timeout_seconds: float = 60.0,
    ) -> None:
        self.metrics = metrics
        self.replicas = [Replica(index) for index in range(num_replicas)]
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.queue_timeout_seconds = queue_timeout_seconds
        self.records: dict[str, RequestRecord] = {}
        """Open requests of all replicas."""
        self.on_failure: Callable[[int], None] = lambda index: None
        """Called with the index of a replica that has failed."""
        self.changed = asyncio.Event()
        """Set when a replica changes its state or reports progress."""
        self._server: asyncio.AbstractServer | None = None
        self._queue_task: asyncio.Task[None] | None = None
        self._finished_times: deque[float] = deque(maxlen=64)
        self._is_closing = False

    # ---- connections ---------------------------------------------------------------------------

    async def start(self, path: str) -> None:
        """Listens for engines on a Unix socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: EngineProtocol(self), path)
        self._queue_task = asyncio.create_task(self._watch_queue())

    async def close(self) -> None:
        """Stops all engines and closes the socket."""
        self._is_closing = True
        if self._queue_task is not None:
            self._queue_task.cancel()
        for replica in self.replicas:
            replica.send({"stop": True})
            if replica.transport is not None:
                replica.transport.close()
        if self._server is not None:
            self._server.close()

    @property
    def ready_replicas(self) -> list[Replica]:
        """Replicas that accept requests."""
        return [one for one in self.replicas if one.state == "ready"]

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a sequence that every ready replica can hold."""
        return min((one.info.max_model_len for one in self.ready_replicas), default=0)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model."""
        return min((one.info.vocab_size for one in self.ready_replicas), default=0)

    def connect(self, index: int, transport: asyncio.WriteTransport) -> Replica | None:
        """Assigns a connection to a replica; None if there is no such replica."""
        if not 0 <= index < len(self.replicas):
            return None
        replica = self.replicas[index]
        if replica.transport is not None and replica.transport is not transport:
            self.disconnect(replica, "another process has taken its place")
        if replica.transport is None:
            replica.transport = transport
            replica.state = "starting"
            replica.num_received = 0
            replica.unseen_tokens.clear()
            replica.stats = EngineStats()
            replica.memory = PrefixMemory()
        self.changed.set()
        return replica

    def fail_replica(self, index: int, cause: str) -> None:
        """Marks a replica as down because one of its ranks has failed."""
        if 0 <= index < len(self.replicas):
            self.disconnect(self.replicas[index], cause)

    def disconnect(self, replica: Replica, cause: str) -> None:
        """Marks a replica as down, and fails its open requests."""
        if replica.transport is not None:
            replica.transport.close()
        replica.transport = None
        if replica.state == "down":
            return
        replica.state = "down"
        replica.cause = cause
        replica.num_restarts += 1
        self.on_failure(replica.index)
        replica.stats = EngineStats()
        replica.unseen_tokens.clear()
        failed = {
            id(one.generation): one.generation
            for one in self.records.values()
            if one.replica is replica
        }
        for generation in failed.values():
            generation.fail(
                ApiError(
                    500,
                    f"The engine that ran this request has failed: {cause}. It is started again "
                    "automatically. Send the request again.",
                    code="engine_failed",
                )
            )
        self.changed.set()

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> Generation:
        """Sends requests that belong together to one replica, in order.

        Raises an error with status 503 or 429 if no replica accepts requests or the queue is full.
        """
        first = requests[0]
        num_tokens = sum(len(one.prompt_token_ids) for one in requests if not one.parent_id)
        self.check_capacity(len(requests), num_tokens)
        candidates = self.ready_replicas
        names = name_blocks(
            first.prompt_token_ids, candidates[0].info.block_size, first.cache_salt + first.adapter
        )
        index = choose_replica(
            names,
            {one.index: one.memory for one in candidates},
            {one.index: ReplicaLoad(one.num_waiting_tokens, one.num_open) for one in candidates},
        )
        replica = self.replicas[index]
        replica.memory.add(names)
        generation = Generation(self)
        now = time.monotonic()
        for request in requests:
            record = RequestRecord(request, generation, replica, now)
            self.records[request.request_id] = record
            generation.records[request.request_id] = record
            replica.num_open += 1
            replica.unseen_tokens.append(0 if request.parent_id else len(request.prompt_token_ids))
        for message in pack_requests(requests):
            replica.send(message)
        return generation

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends a request at the next step of its replica; unknown ones are ignored."""
        record = self.records.get(request_id)
        if record is not None:
            record.replica.send({"abort": request_id})
            if reason == "stop":
                self._finished_times.append(time.monotonic())
            self._forget(record, reason)

    def fail_all(self, error: ApiError) -> None:
        """Ends all open requests with an error."""
        for record in list(self.records.values()):
            record.generation.fail(error)

    @property
    def num_waiting(self) -> int:
        """Requests that wait at any replica."""
        return sum(one.num_waiting for one in self.ready_replicas)

    def retry_seconds(self) -> float:
        """Returns a guess of when a place in the queue is free, from the recent rate of answers."""
        times = self._finished_times
        if len(times) < 2 or times[-1] <= times[0]:
            return 1.0
        rate = (len(times) - 1) / (times[-1] - times[0])
        return min(60.0, math.ceil(self.num_waiting / rate))

    def check_capacity(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raises an error with status 503 or 429 if requests would not be accepted."""
        if not self.ready_replicas:
            raise unavailable(*self._describe_unavailable())
        waiting = self.num_waiting
        tokens = sum(one.num_waiting_tokens for one in self.ready_replicas)
        # A request that exceeds the limit alone is accepted by an empty queue.
        is_full = waiting + num_requests > self.max_queued_requests
        is_full |= tokens + num_tokens > self.max_queued_tokens
        if waiting and is_full:
            raise busy(
                f"{waiting} requests with {tokens} prompt tokens are waiting. At most "
                f"{self.max_queued_requests} requests and {self.max_queued_tokens} tokens may "
                "wait. Send the request again later.",
                "queue_full",
                self.retry_seconds(),
            )

    def _describe_unavailable(self) -> tuple[str, str]:
        down = [one for one in self.replicas if one.state == "down"]
        if down:
            return (
                f"No engine is running: {down[0].cause}. It is started again automatically. Send "
                "the request again later.",
                "engine_down",
            )
        return "The model is being loaded. Send the request again later.", "loading"

    def _forget(self, record: RequestRecord, reason: str) -> None:
        if self.records.pop(record.request.request_id, None) is not None:
            record.replica.num_open -= 1
        record.generation.records.pop(record.request.request_id, None)
        self.metrics.observe_end(record, reason, time.monotonic())

    async def _watch_queue(self) -> None:
        """Ends requests that have waited too long without being started."""
        while True:
            await asyncio.sleep(min(QUEUE_CHECK_SECONDS, self.queue_timeout_seconds / 4))
            self.end_overdue(time.monotonic() - self.queue_timeout_seconds)

    def end_overdue(self, limit: float) -> None:
        """Ends requests that wait and were sent before a time."""
        for replica in self.replicas:
            pending = [
                one
                for one in self.records.values()
                if one.replica is replica and not one.first_time
            ]
            # The engine starts requests by priority and age, so the last ones wait.
            pending.sort(key=lambda one: one.request.priority)
            for record in pending[len(pending) - min(replica.num_waiting, len(pending)) :]:
                if record.sent_time < limit:
                    record.generation.fail(self._queue_timeout_error())

    def _queue_timeout_error(self) -> ApiError:
        return busy(
            f"The request has waited {self.queue_timeout_seconds:g} seconds in the queue, the "
            "maximum (serve.queue_timeout_seconds). Send it again later.",
            "queue_timeout",
            self.retry_seconds(),
        )

    # ---- messages of engines -------------------------------------------------------------------

    def handle_message(self, replica: Replica, message: dict[str, Any]) -> None:
        """Handles a message of a replica."""
        if "step" in message:
            self._handle_step(replica, *message["step"])
        elif "refused" in message:
            self._handle_refusal(*message["refused"])
        elif "hello" in message:
            values = message["hello"]
            replica.info = EngineInfo(**{**values, "adapters": tuple(values["adapters"])})
            replica.state = "ready"
            replica.cause = replica.progress = ""
            self.changed.set()
        elif "progress" in message:
            replica.progress = message["progress"]
            self.changed.set()
        elif "fault" in message:
            self.disconnect(replica, message["fault"])

    def _handle_step(
        self, replica: Replica, outputs: list[list[Any]], stats: list[Any], seen: int, took: float
    ) -> None:
        now = time.monotonic()
        before = replica.stats
        replica.stats = unpack_stats(stats)
        for _ in range(seen - replica.num_received):
            replica.unseen_tokens.popleft()
        replica.num_received = seen
        if outputs or took:
            self.metrics.observe_step(replica.info.bandwidth, before, replica.stats, took)
        for packed in outputs:
            record = self.records.get(packed[0])
            # An aborted request may have outputs of a step that had already started.
            if record is None:
                continue
            output = unpack_output(packed)
            self.metrics.observe_output(record, output, now)
            if output.finish_reason is not None:
                self._finished_times.append(now)
                self._forget(record, output.finish_reason)
            record.generation.push(output)

    def _handle_refusal(self, request_id: str, kind: str, text: str) -> None:
        record = self.records.get(request_id)
        if record is None:
            return
        self._forget(record, "error")
        if kind == "invalid":
            record.generation.fail(invalid_request(text))
        else:
            record.generation.fail(
                ApiError(500, f"The request has failed: {text}.", code="request_failed")
            )


class EngineProtocol(asyncio.Protocol):
    """A connection of an engine process."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._reader = MessageReader()
        self._replica: Replica | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport until the first message names the replica."""
        assert isinstance(transport, asyncio.Transport), transport
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handles the messages of the engine."""
        assert self._transport is not None
        for message in self._reader.feed(data):
            if self._replica is None and "fault" in message:
                # Of a rank that is not the leader, before its end makes the leader fail.
                self._client.fail_replica(message["replica"], message["fault"])
                self._transport.close()
                return
            if self._replica is None:
                index = message.get("hello", message).get("replica", 0)
                self._replica = self._client.connect(index, self._transport)
            if self._replica is None:
                self._transport.close()
                return
            if self._replica.transport is self._transport:
                self._client.handle_message(self._replica, message)

    def connection_lost(self, error: Exception | None) -> None:
        """Marks the replica as down."""
        if self._replica is not None and self._replica.transport is self._transport:
            self._client.disconnect(self._replica, "its process has ended")
