"""Metrics in the text format of Prometheus, with the names of vLLM and the prefix `ranvier:`.

Latencies are measured where outputs of the engines arrive, with a monotonic clock. Gauges and
counters of the engines are read when a client asks for the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ranvier.infer.request import EngineStats, TokenOutput

if TYPE_CHECKING:
    from ranvier.infer.server.engine_client import Replica, RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "ranvier:"
LATENCIES = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""Upper bounds of the buckets of latencies, in seconds."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
"""Upper bounds of the buckets of numbers of tokens."""
SHARES = (0.01, 0.02, 0.05, *(i / 10 for i in range(1, 11)))
"""Upper bounds of the buckets of shares."""
ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests that are running.", lambda one: one.num_running),
    ("num_requests_waiting", "Requests that are waiting.", lambda one: one.num_waiting),
    (
        "kv_cache_usage_perc",
        "Fraction of the blocks of the KV cache that requests use; 1 is all of them.",
        lambda one: 1 - one.num_free_blocks / one.num_blocks if one.num_blocks else 0.0,
    ),
)
ENGINE_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the cache.", "prefix_cache_hits"),
    ("num_preemptions", "Preemptions of running requests.", "num_preemptions"),
    ("num_steps", "Steps of the engine.", "num_steps"),
    ("num_iterations", "Iterations of tokens that may exit early.", "num_iterations"),
    ("num_iterated_tokens", "Tokens that may exit early.", "num_iterated_tokens"),
)


class ServerMetrics:
    """All metrics of a server."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.replicas: list[Replica] = []
        """Replicas whose gauges and counters are shown."""
        self._model = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            f"{PREFIX}request_success",
            "Finished requests.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._http = Counter(
            f"{PREFIX}http_requests",
            "HTTP answers by status.",
            ("model_name", "status"),
            registry=self.registry,
        )
        self._first_token = self._latency("time_to_first_token", "Time to the first token.")
        self._inter_token = self._latency("inter_token_latency", "Time between two tokens.")
        self._end_to_end = self._latency("e2e_request_latency", "Time of a request.")
        self._queue = self._latency("request_queue_time", "Time in the queue.")
        self._prefill = self._latency("request_prefill_time", "Time in prefill.")
        self._decode = self._latency("request_decode_time", "Time in decode.")
        self._request_prompt = self._tokens("request_prompt_tokens", "Prompt tokens per request.")
        self._request_generated = self._tokens(
            "request_generation_tokens", "Generated tokens per request."
        )
        self._iteration = self._tokens("iteration_tokens_total", "Tokens per step.")
        self._steps = Histogram(
            f"{PREFIX}step_seconds",
            "Time of a step of the engine.",
            ("model_name", "kind"),
            buckets=LATENCIES,
            registry=self.registry,
        )
        self._host = self._latency("host", "Time of a step on the host.")
        self._bandwidth = Histogram(
            f"{PREFIX}bandwidth_share",
            "Bytes that a step reads, over its time and the bandwidth of a copy.",
            ("model_name", "kind"),
            buckets=SHARES,
            registry=self.registry,
        )
        self.registry.register(EngineCollector(self))

    def _counter(self, name: str, text: str) -> Counter:
        made = Counter(f"{PREFIX}{name}", text, ("model_name",), registry=self.registry)
        return made.labels(self._model)

    def _latency(self, name: str, text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", text, LATENCIES)

    def _tokens(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            f"{PREFIX}{name}", text, ("model_name",), buckets=buckets, registry=self.registry
        )
        return made.labels(self._model)

    def observe_output(self, record: RequestRecord, output: TokenOutput, now: float) -> None:
        """Counts the tokens of an output and their latencies, and updates the record."""
        count = len(output.token_ids)
        if not count:
            return
        self._generation_tokens.inc(count)
        if record.num_tokens == 0:
            record.first_time = record.last_time = now
            self._first_token.observe(now - record.sent_time)
            self._prompt_tokens.inc(len(record.request.prompt_token_ids))
            if output.queue_seconds is not None:
                self._queue.observe(output.queue_seconds)
                self._prefill.observe(max(0.0, now - record.sent_time - output.queue_seconds))
            gaps = count - 1
        else:
            gaps = count
        # Several tokens of one step share the time since the last step.
        for _ in range(gaps):
            self._inter_token.observe((now - record.last_time) / gaps)
        record.last_time = now
        record.num_tokens += count

    def observe_end(self, record: RequestRecord, reason: str, now: float) -> None:
        """Counts a request that has ended."""
        self._success.labels(self._model, reason).inc()
        if reason in ("stop", "length"):
            self._end_to_end.observe(now - record.sent_time)
            self._decode.observe(now - record.first_time)
            self._request_prompt.observe(len(record.request.prompt_token_ids))
            self._request_generated.observe(record.num_tokens)

    def observe_step(
        self, bandwidth: float, before: EngineStats, after: EngineStats, seconds: float
    ) -> None:
        """Counts a step of a replica; bandwidth: of a copy on its device, 0 if not known."""
        computed = after.num_computed_tokens - before.num_computed_tokens
        generated = after.num_generated_tokens - before.num_generated_tokens
        self._iteration.observe(computed)
        # A step that computes more tokens than it generates contains prompts.
        kind = "mixed" if computed > generated else "decode"
        self._steps.labels(self._model, kind).observe(seconds)
        self._host.observe(after.host_seconds - before.host_seconds)
        if bandwidth and seconds:
            share = (after.bytes_read - before.bytes_read) / (seconds * bandwidth)
            self._bandwidth.labels(self._model, kind).observe(share)

    def observe_answer(self, status: int) -> None:
        """Counts an HTTP answer."""
        self._http.labels(self._model, str(status)).inc()

    def render(self) -> bytes:
        """Returns all metrics as text."""
        return generate_latest(self.registry)


class EngineCollector:
    """Gauges and counters of the engines, read when they are asked for."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields a metric for each value of the statistics, with a sample per replica."""
        labels = ("model_name", "engine")
        stats: Mapping[str, EngineStats] = {
            str(one.index): one.stats for one in self._metrics.replicas
        }
        model = self._metrics._model
        for name, text, read in ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=labels)
            for index, one in stats.items():
                gauge.add_metric((model, index), read(one))
            yield gauge
        for name, text, field in ENGINE_COUNTERS:
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=labels)
            for index, one in stats.items():
                counter.add_metric((model, index), getattr(one, field))
            yield counter
        counter = CounterMetricFamily(
            f"{PREFIX}collective_bytes", "Bytes moved by collectives.", labels=(*labels, "axis")
        )
        for index, one in stats.items():
            for axis, moved in one.collective_bytes.items():
                counter.add_metric((model, index, axis), moved)
        yield counter
