"""Policy search: returns a policy by name; for `message_driven`, the fastest one in simulation.

No heuristic is always best: first come, first served can be slower than 1F1B, and 1F1B is slow if
links have latency. So `message_driven` simulates the step with several priorities and credits and
with the 1F1B schedule, and chooses the fastest. With jitter, a fixed schedule is replaced only by a
policy that is significantly faster with seeds other than those used for the choice. Nothing here
depends on rank or clock: equal inputs give equal choices on all ranks.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean, stdev

from ranvier.errors import PlanError
from ranvier.pipeline import schedules
from ranvier.pipeline.policy import (
    FixedSchedule,
    MessageDrivenPolicy,
    PipelineShape,
    Priority,
    SchedulingPolicy,
)
from ranvier.pipeline.simulator import (
    JobSeconds,
    JobTimes,
    Simulation,
    draw_job_seconds,
    link_seconds,
    simulate_step,
)

FIXED_SCHEDULES: dict[str, Callable[[PipelineShape], FixedSchedule]] = {
    "gpipe": schedules.gpipe_schedule,
    "1f1b": schedules.one_f_one_b_schedule,
    "interleaved": schedules.interleaved_schedule,
    "zero-bubble": schedules.zero_bubble_schedule,
}
POLICY_NAMES = ("message_driven", *FIXED_SCHEDULES)
JOB_BUDGET = 150_000
"""Approximate number of jobs simulated per choice, which takes a second or two."""
SPLIT_GAIN = 0.98
"""Maximum step time of a split backward relative to an unsplit one for it to be chosen: it holds
activations longer."""
FIRST_SEED = 1 << 20
"""First seed of the search, so that evaluations with small seeds are independent of it."""


def expected_times(costs: Sequence[float], jitter: float) -> JobTimes:
    """Returns job times for virtual stages with these forward costs.

    Backward takes twice as long as forward, half of it for weight gradients.
    """
    unit = sum(costs) / len(costs)
    forward = tuple(cost / unit for cost in costs)
    return JobTimes(forward, forward, forward, jitter=jitter)


def choose_policy(
    name: str,
    shape: PipelineShape,
    times: JobTimes,
    *,
    limit: int = 0,
    seeds: int = 64,
    splits: bool = False,
) -> SchedulingPolicy:
    """Returns the policy with this name.

    limit: maximum number of activations per stage, counted per chunk; 0 means no limit.
    seeds: number of steps simulated with different seeds, if times have jitter.
    splits: whether `message_driven` may split backward if that is clearly faster.
    """
    if name == "message_driven" and splits and not shape.split_backward:
        found = [
            choose_policy(
                name, replace(shape, split_backward=split), times, limit=limit, seeds=seeds
            )
            for split in (False, True)
        ]
        # Compared without jitter, so one run each is enough.
        even = replace(times, jitter=0.0)
        whole, apart = (simulate_step(shape, policy, even).seconds for policy in found)
        if apart < SPLIT_GAIN * whole:
            return found[1]
        return found[0]
    if name not in POLICY_NAMES:
        near = difflib.get_close_matches(name, POLICY_NAMES, 1)
        if near:
            hint = f"Did you mean {near[0]}?"
        else:
            hint = f"Use one of {', '.join(POLICY_NAMES)}."
        raise PlanError(f"schedule={name!r} is not a known schedule. {hint}")
    if problems := times.problems(shape):
        raise PlanError(problems)
    most = shape.micro_batches * shape.chunks
    room = min(limit or most, most)
    if name == "message_driven":
        return _fastest_policy(shape, times, room, seeds)
    order = FIXED_SCHEDULES[name](shape)
    held = schedules.peak_activations(order)
    if max(held) > room:
        raise PlanError(
            f"{name} keeps {max(held)} activations on stage {held.index(max(held))}, but "
            f"max_in_flight={limit}. A stage cannot keep more than that. Use message_driven, a "
            f"larger max_in_flight, or fewer {'micro-batches' if name == 'gpipe' else 'stages'}."
        )
    return order


def policy_to_text(policy: SchedulingPolicy | None) -> str:
    """Serializes a policy, for ranks and processes that did not choose it."""
    if isinstance(policy, MessageDrivenPolicy):
        return json.dumps([policy.priority, policy.credits, policy.split_backward])
    return json.dumps(policy.name if isinstance(policy, FixedSchedule) else "")


def policy_from_text(text: str, shape: PipelineShape) -> SchedulingPolicy:
    """Deserializes a policy; the inverse of `policy_to_text`."""
    facts = json.loads(text)
    if isinstance(facts, str):
        return FIXED_SCHEDULES[facts](shape)
    priority, credits, split = facts
    return MessageDrivenPolicy(priority, tuple(credits), split)


def credits_for(shape: PipelineShape, times: JobTimes) -> int:
    """Returns the micro-batches in flight that hide links: `S + ceil(2(S - 1)c / (f + b))`.

    With chunks, S is the number of activations that the interleaved schedule holds, and times are
    per chunk.
    """
    S = shape.stages
    V = shape.chunks
    period = (sum(times.forward) + sum(times.backward) + sum(times.weight)) / (S * V)
    # Round trip of a micro-batch over all links; there is none after the last virtual stage.
    delay = 2 * sum(link_seconds(shape, times)[:-1])
    if period:
        extra = math.ceil(delay / period - 1e-9)
    else:
        extra = 0
    return (S if V == 1 else 2 * (S - 1) + (V - 1) * S + 1) + extra


def list_candidates(shape: PipelineShape, times: JobTimes, room: int) -> list[SchedulingPolicy]:
    """Returns the policies that `message_driven` chooses from, with at most `room` activations.

    Fixed schedules come first.
    """
    S = shape.stages
    M = shape.micro_batches
    V = shape.chunks
    if room < V:
        raise PlanError(
            f"max_in_flight={room} is less than virtual_stages={V}. A micro-batch keeps one "
            f"activation in each chunk of a stage. Use a max_in_flight of {V} or more, or fewer "
            "virtual_stages."
        )
    fixed = [
        schedules.one_f_one_b_schedule(shape) if V == 1 else schedules.interleaved_schedule(shape)
    ]
    if shape.split_backward:
        fixed.append(schedules.zero_bubble_schedule(shape))
    found: list[SchedulingPolicy] = [
        order for order in fixed if max(schedules.peak_activations(order)) <= room
    ]
    enough = credits_for(shape, times)
    levels = [enough + S // 2, enough, S * V, 2 * enough, M * V]
    # A large step leaves time for only few simulations.
    large = S * V * M > JOB_BUDGET // 16
    rows = [(min(room, n),) * S for n in levels[: 1 if large else None]]
    if not large:
        # Gradients reach later stages sooner, so holding fewer activations there costs nothing.
        taper = (enough - 1) / S
        rows.append(tuple(min(room, max(V, enough - int(taper * s))) for s in range(S)))
    priorities: tuple[Priority, ...] = ("backward", "first")
    unique = dict.fromkeys(rows)
    found += [
        MessageDrivenPolicy(p, row, shape.split_backward) for row in unique for p in priorities
    ]
    return found


def _fastest_policy(
    shape: PipelineShape, times: JobTimes, room: int, seeds: int
) -> SchedulingPolicy:
    """Returns the fastest candidate; of equally fast ones, the one with the fewest activations."""
    options = [PolicyCandidate(policy) for policy in list_candidates(shape, times, room)]
    trials = PolicyTrials(shape, times)
    if not times.jitter:
        return trials.best_candidate(options, [0], margin=1e-12).policy
    # Half of the budget is for the choice, half for its test.
    affordable = JOB_BUDGET // (2 * shape.stages * shape.num_jobs)
    numbers = count(FIRST_SEED)
    look = [next(numbers) for _ in range(max(1, min(seeds // 8, affordable // len(options))))]
    pick = trials.best_candidate(options, look, margin=2e-3)
    usual = options[0]
    if pick is usual or not isinstance(usual.policy, FixedSchedule):
        return pick.policy
    # Test the choice with other seeds than it was made with (selection bias).
    proof = [next(numbers) for _ in range(max(4, min(seeds, affordable // 2)))]
    gains = [(trials.step_seconds(usual, seed) - trials.step_seconds(pick, seed)) for seed in proof]
    # Two standard errors, and more for few steps, whose spread is also uncertain.
    doubt = (2 + 5 / len(gains)) * stdev(gains) / math.sqrt(len(gains))
    if fmean(gains) > doubt:
        return pick.policy
    return usual.policy


@dataclass(eq=False)
class PolicyCandidate:
    """A policy and its peak activations so far: on one stage, and summed over stages."""

    policy: SchedulingPolicy
    peak_activations: tuple[int, int] = (0, 0)


class PolicyTrials:
    """Simulates candidates with the same random times."""

    def __init__(self, shape: PipelineShape, times: JobTimes) -> None:
        self.shape = shape
        self.times = times
        self.job_seconds: dict[tuple[bool, int], JobSeconds] = {}

    def step_seconds(self, option: PolicyCandidate, seed: int) -> float:
        """Returns the seconds of a step with this seed."""
        policy = option.policy
        shape = replace(self.shape, split_backward=policy.split_backward)
        key = policy.split_backward, seed
        if key not in self.job_seconds:
            self.job_seconds[key] = draw_job_seconds(shape, self.times, seed)
        play = Simulation(shape, policy, self.job_seconds[key], link_seconds(shape, self.times))
        play.run()
        option.peak_activations = max(
            option.peak_activations, (max(play.peak_activations), sum(play.peak_activations))
        )
        return play.seconds

    def best_candidate(
        self, options: Sequence[PolicyCandidate], seeds: Sequence[int], *, margin: float
    ) -> PolicyCandidate:
        """Returns the one with fewest activations among those within `margin` of the fastest
        mean.
        """
        means = [fmean(self.step_seconds(option, seed) for seed in seeds) for option in options]
        enough = min(means) * (1 + margin)
        good = [o for o, mean in zip(options, means, strict=True) if mean <= enough]
        return min(good, key=lambda option: option.peak_activations)
