"""Serving against a clock: the scheduler of the engine, with steps that only take time.

The scheduler, its policies and block pools are those of the engine. A step takes the seconds that a
`StepCost` predicts. Replicas have their own scheduler and clock; a request goes to the one with the
longest cached prefix, then the fewest tokens. With lookahead, a step is scheduled when the one
before it starts. On a pipeline, the next step starts when the first stage is free.

Not handled: the time of the server itself, except as a constant per request, and speculation.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ranvier.errors import PlanError
from ranvier.infer.arrivals import SimulatedRequest
from ranvier.infer.block_pool import BlockPool
from ranvier.infer.policy import ScheduledStep
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.scheduler import Scheduler
from ranvier.infer.sequence import Sequence as EngineSequence
from ranvier.planner.time.serving_step import StepCost, StepLoad

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("ttft", "itl", "tpot", "e2e")
"""Time to first token, inter-token latency, time per output token after the first, end to end."""
LIMIT_NAMES = tuple(f"{name}_{what}" for name in LATENCIES for what in ("mean", *PERCENTILES))
"""Names of latencies that `find_max_rate` can hold."""
MAX_DOUBLINGS = 20
"""Maximum number of times that a rate is doubled in search of one that is too high."""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The engine that is simulated."""

    policy: str = "decode_first"
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 256
    max_model_len: int
    block_size: int = 64
    num_blocks: int
    """Number of blocks of each home that requests can use."""
    num_homes: int = 1
    num_replicas: int = 1
    num_stages: int = 1
    lookahead: bool = True
    """Whether a step is scheduled while the one before it runs. Pipelines do not use it."""
    enable_prefix_caching: bool = True
    target_itl_seconds: float = 0.0
    """Time that steps with decodes should take at most; 0 means no target."""
    request_overhead_seconds: float = 0.0
    """Time of a request in the server, before the engine gets it."""


class Sample(NamedTuple):
    """The state of a replica at the end of a step."""

    seconds: float
    num_used_blocks: int
    num_running: int
    num_waiting: int


@dataclass
class RequestTimes:
    """When a request arrived and got its tokens, in seconds."""

    arrival: float
    token_times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ServingResult:
    """What happened to the requests."""

    requests: list[RequestTimes]
    """Requests that were served."""
    refused: list[str]
    """Reasons why requests were refused."""
    num_steps: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_blocks: int
    """Number of blocks of a replica."""
    samples: list[list[Sample]]
    """State of each replica over time."""

    @property
    def seconds(self) -> float:
        """Time from the first arrival to the last token."""
        if not self.requests:
            return 0.0
        return max(one.token_times[-1] for one in self.requests) - min(
            one.arrival for one in self.requests
        )

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(one.token_times) for one in self.requests)

    def latencies(self) -> dict[str, list[float]]:
        """Returns all values of each latency, in seconds."""
        times = [(one.arrival, one.token_times) for one in self.requests]
        return {
            "ttft": [tokens[0] - arrival for arrival, tokens in times],
            "itl": [b - a for _, tokens in times for a, b in itertools.pairwise(tokens)],
            "tpot": [
                (tokens[-1] - tokens[0]) / (len(tokens) - 1)
                for _, tokens in times
                if len(tokens) > 1
            ],
            "e2e": [tokens[-1] - arrival for arrival, tokens in times],
        }

    def summary(self) -> dict[str, float]:
        """Returns latencies in ms by name, such as `ttft_p99`, and rates and counts."""
        found: dict[str, float] = {}
        for name, values in self.latencies().items():
            ordered = sorted(values)
            mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
            found[f"{name}_mean"] = 1e3 * mean
            for label, share in PERCENTILES.items():
                found[f"{name}_{label}"] = 1e3 * percentile(ordered, share)
        seconds = self.seconds or math.inf
        used = [one.num_used_blocks for samples in self.samples for one in samples]
        queries = self.prefix_cache_queries
        return {
            **found,
            "requests_per_second": len(self.requests) / seconds,
            "output_tokens_per_second": self.num_output_tokens / seconds,
            "total_tokens_per_second": (self.num_output_tokens + self.num_prompt_tokens) / seconds,
            "seconds": self.seconds,
            "num_requests": len(self.requests),
            "num_refused": len(self.refused),
            "num_steps": self.num_steps,
            "num_computed_tokens": self.num_computed_tokens,
            "num_preemptions": self.num_preemptions,
            "block_use_mean": sum(used) / len(used) / self.num_blocks if used else 0.0,
            "block_use_max": max(used, default=0) / self.num_blocks,
            "prefix_hit_rate": self.prefix_cache_hits / queries if queries else 0.0,
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns a percentile of sorted values, interpolated linearly; 0 if there are none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def step_loads(step: ScheduledStep, num_homes: int) -> list[StepLoad]:
    """Returns the tokens of a step by home."""
    decodes = [0] * num_homes
    contexts = [0] * num_homes
    prompts = [0] * num_homes
    pairs = [0.0] * num_homes
    sampled = [0] * num_homes
    for item in step.items:
        home = item.home
        sampled[home] += item.samples
        if item.num_tokens == 1:
            decodes[home] += 1
            contexts[home] += item.start + 1
        else:
            prompts[home] += item.num_tokens
            pairs[home] += item.num_tokens * (item.start + item.num_tokens / 2)
    return [
        StepLoad(decodes[i], contexts[i] / max(decodes[i], 1), prompts[i], pairs[i], sampled[i])
        for i in range(num_homes)
    ]


class _RunningStep(NamedTuple):
    """A step in flight."""

    step: ScheduledStep
    start: float
    end: float


class _Replica:
    """A scheduler with its clock."""

    def __init__(self, config: ServingConfig, cost: StepCost) -> None:
        self.config = config
        self.cost = cost
        self.scheduler = Scheduler(
            [BlockPool(config.num_blocks + 1, config.block_size) for _ in range(config.num_homes)],
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            policy=config.policy,
            enable_prefix_caching=config.enable_prefix_caching,
            lookahead=config.lookahead and config.num_stages == 1,
            num_groups=config.num_stages,
            target_itl_seconds=config.target_itl_seconds,
        )
        if config.num_stages > 1:
            self.max_in_flight = config.num_stages
        else:
            self.max_in_flight = 2 if config.lookahead else 1
        self.now = 0.0
        self.next_schedule = 0.0
        """Earliest time at which the next step is scheduled."""
        self.free_at = 0.0
        """Time at which the device, or the first stage of a pipeline, is free."""
        self.is_blocked = False
        """Whether there was nothing to schedule, and nothing has changed since."""
        self.in_flight: deque[_RunningStep] = deque()
        self.times: dict[str, RequestTimes] = {}
        self.samples: list[Sample] = []
        self.num_steps = 0

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of tokens of unfinished sequences."""
        return sum(
            sequence.num_tokens
            for sequences in (self.scheduler.waiting, self.scheduler.running)
            for sequence in sequences
        )

    def add(self, sequence: EngineSequence, arrival: float) -> None:
        """Adds a request at its time of arrival."""
        self.scheduler.add(sequence)
        self.times[sequence.request_id] = RequestTimes(arrival)
        self.now = max(self.now, arrival + self.config.request_overhead_seconds)
        self.is_blocked = False

    def advance(self, until: float) -> None:
        """Runs steps until a time, at which something may arrive."""
        while True:
            end = self.in_flight[0].end if self.in_flight else math.inf
            start = math.inf
            if self._can_schedule():
                start = max(self.now, self.next_schedule)
            if min(start, end) >= until:
                return
            if end <= start:
                self._finish(self.in_flight.popleft())
            else:
                self.now = start
                self._schedule()

    def _can_schedule(self) -> bool:
        """Returns whether a step may be scheduled before one in flight has finished."""
        return (
            len(self.in_flight) < self.max_in_flight
            and not self.is_blocked
            and self.scheduler.has_unfinished
        )

    def _schedule(self) -> None:
        """Schedules a step, which starts as soon as the device is free."""
        step = self.scheduler.schedule()
        if not step.items:
            self.is_blocked = True
            return
        spent = self.cost.seconds(step_loads(step, self.config.num_homes))
        start = max(self.now, self.free_at)
        # Steps leave a pipeline in the order in which they entered it.
        end = max(start + spent, self.in_flight[-1].end if self.in_flight else 0.0)
        self.in_flight.append(_RunningStep(step, start, end))
        self.free_at = start + spent / self.config.num_stages
        self.next_schedule = self.free_at if self.config.num_stages > 1 else start
        self.num_steps += 1

    def _finish(self, running: _RunningStep) -> None:
        """Gives the sequences of a step their tokens."""
        self.now = max(self.now, running.end)
        self.is_blocked = False
        sampled = {}
        ended = []
        for item in running.step.items:
            if item.samples:
                sequence = self.scheduler.get(item.request_id)
                assert sequence is not None, item.request_id
                sampled[item.request_id] = [0]
                self.times[item.request_id].token_times.append(running.end)
                if sequence.num_generated + 1 == sequence.request.params.max_tokens:
                    ended.append(item.request_id)
        self.scheduler.finish_step(running.step, sampled, ended)
        self.scheduler.record_seconds(running.step, running.end - running.start)
        pools = self.scheduler.pools
        used = sum(pool.num_usable - pool.num_free for pool in pools)
        self.samples.append(
            Sample(running.end, used, len(self.scheduler.running), len(self.scheduler.waiting))
        )


def _prompt_tokens(
    request: SimulatedRequest, index: int, groups: dict[str, int]
) -> tuple[int, ...]:
    """Returns made-up tokens that are equal only where the prefix of a group is."""
    shared = request.prefix_tokens if request.prefix_group else 0
    # Each group and each request has a range of its own.
    group = groups.setdefault(request.prefix_group, len(groups))
    first = (2 * group) << 32
    own = (2 * index + 1) << 32
    return (*range(first, first + shared), *range(own, own + request.input_tokens - shared))


def simulate_serving(
    requests: Iterable[SimulatedRequest], config: ServingConfig, cost: StepCost
) -> ServingResult:
    """Returns the times of requests, which must be in the order of arrival."""
    replicas = [_Replica(config, cost) for _ in range(config.num_replicas)]
    refused: list[str] = []
    groups: dict[str, int] = {}
    for index, request in enumerate(requests):
        entered = request.arrival + config.request_overhead_seconds
        for replica in replicas:
            replica.advance(entered)
        sequence = EngineSequence(
            request=Request(
                request_id=str(index),
                prompt_token_ids=_prompt_tokens(request, index, groups),
                params=SamplingParams(max_tokens=request.output_tokens),
            ),
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )
        try:
            _check_length(request, config)
            _choose_replica(replicas, sequence).add(sequence, request.arrival)
        except PlanError as error:
            refused.append(str(error))
    for replica in replicas:
        replica.advance(math.inf)
    schedulers = [replica.scheduler for replica in replicas]
    return ServingResult(
        requests=[one for replica in replicas for one in replica.times.values()],
        refused=refused,
        num_steps=sum(replica.num_steps for replica in replicas),
        num_prompt_tokens=sum(one.num_prompt_tokens for one in schedulers),
        num_computed_tokens=sum(one.num_computed_tokens for one in schedulers),
        num_preemptions=sum(one.num_preemptions for one in schedulers),
        prefix_cache_queries=sum(one.prefix_cache_queries for one in schedulers),
        prefix_cache_hits=sum(one.prefix_cache_hits for one in schedulers),
        num_blocks=config.num_blocks * config.num_homes,
        samples=[replica.samples for replica in replicas],
    )


def _check_length(request: SimulatedRequest, config: ServingConfig) -> None:
    """Raises a PlanError for a request that would be cut off at the maximum length."""
    total = request.input_tokens + request.output_tokens
    if total > config.max_model_len:
        raise PlanError(
            f"A request has {total:,} tokens, but a sequence may have {config.max_model_len:,} "
            "(max_model_len). Prompt and output must fit. Use shorter requests."
        )


def _choose_replica(replicas: Sequence[_Replica], sequence: EngineSequence) -> _Replica:
    """Returns the replica with the longest cached prefix, then the fewest tokens."""
    if len(replicas) == 1:
        return replicas[0]
    return min(
        replicas,
        key=lambda one: (
            -one.scheduler.count_cached_tokens(sequence),
            one.num_outstanding_tokens,
        ),
    )


class RateTrial(NamedTuple):
    """A rate that was simulated."""

    rate: float
    """Requests per second."""
    summary: dict[str, float]
    holds: bool
    """Whether all limits hold."""


def find_max_rate(
    simulate: Callable[[float], ServingResult], limits: Mapping[str, float], *, precision: float
) -> list[RateTrial]:
    """Returns the simulated rates in ascending order; the last one that holds is the answer.

    The rate is doubled from the throughput of all requests at once until a limit is exceeded, and
    then bisected. If the limits hold with all requests at once, that is the only trial.

    limits: upper bounds in ms by name, such as `ttft_p99`.
    precision: relative precision of the rate.
    """

    def run_trial(rate: float) -> RateTrial:
        summary = simulate(rate).summary()
        holds = all(summary[name] <= limit for name, limit in limits.items())
        return RateTrial(rate, summary, holds)

    trials = [run_trial(math.inf)]
    if trials[0].holds or not trials[0].summary["num_requests"]:
        return trials
    least = 1e-3 * trials[0].summary["requests_per_second"]
    low = 0.0
    high = trials[0].summary["requests_per_second"]
    for _ in range(MAX_DOUBLINGS):
        trials.append(run_trial(high))
        if not trials[-1].holds:
            break
        low = high
        high *= 2
    # A rate of a thousandth of the throughput is as good as none.
    while high - low > precision * high and high > least:
        trials.append(run_trial((low + high) / 2))
        if trials[-1].holds:
            low = trials[-1].rate
        else:
            high = trials[-1].rate
    return sorted(trials, key=lambda one: one.rate)
