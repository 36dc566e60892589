"""Choice: the policy for a name; for `message` the one that the simulator finds fastest.

No rule of thumb is best everywhere: first come first served can lose to 1F1B, and 1F1B loses once
links have latency. So `message` plays the step with some priorities and credits and with 1F1B's
order, and takes the fastest. Under jitter an order is given up only for one that is faster beyond
doubt on luck that it was not picked by. Nothing here depends on rank or clock: equal inputs give
equal choices everywhere.
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
from ranvier.pipeline.policy import Message, Order, Policy, Priority, Shape
from ranvier.pipeline.simulator import Lengths, Play, Times, lengths, links, simulate

ORDERS: dict[str, Callable[[Shape], Order]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zero-bubble": schedules.zero_bubble,
}
NAMES = ("message", *ORDERS)
BUDGET = 150_000
"""Jobs that a choice plays, about, which takes a second or two; one large step tells much."""
GAIN = 0.98
"""Of the time of a step that a split backward must save: it keeps activations longer."""
FIRST_SEED = 1 << 20
"""Seeds of the choice begin here, so that no one judges it by the luck it was made with."""


def expected(costs: Sequence[float], jitter: float) -> Times:
    """Times of the jobs of virtual stages of these costs, forward.

    Backward takes twice as long as forward, half of it for weights.
    """
    unit = sum(costs) / len(costs)
    forward = tuple(cost / unit for cost in costs)
    return Times(forward, forward, forward, jitter=jitter)


def policy_for(
    name: str,
    shape: Shape,
    times: Times,
    *,
    limit: int = 0,
    seeds: int = 64,
    splits: bool = False,
) -> Policy:
    """The policy of a name.

    limit: most activations that a stage may keep, a chunk's counts as one; 0: no limit.
    seeds: steps played with different luck, if times have jitter.
    splits: `message` may split backward, where that clearly gains.
    """
    if name == "message" and splits and not shape.split:
        found = [
            policy_for(name, replace(shape, split=split), times, limit=limit, seeds=seeds)
            for split in (False, True)
        ]
        even = replace(times, jitter=0.0)
        whole, apart = (simulate(shape, policy, even).seconds for policy in found)
        return found[1] if apart < GAIN * whole else found[0]
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(NAMES)}."
        raise PlanError(f"policy={name!r} is unknown. Policies have names. {hint}")
    if problems := times.problems(shape):
        raise PlanError(problems)
    most = shape.micro_batches * shape.chunks
    room = min(limit or most, most)
    if name == "message":
        return _fastest(shape, times, room, seeds)
    order = ORDERS[name](shape)
    held = schedules.peaks(order)
    if max(held) > room:
        raise PlanError(
            f"{name} keeps {max(held)} activations on stage {held.index(max(held))}, but "
            f"limit={limit}. A stage may not keep more than the limit. Use message, a higher "
            f"limit, or fewer {'micro-batches' if name == 'gpipe' else 'stages'}."
        )
    return order


def written(policy: Policy | None) -> str:
    """A policy as text, for those who did not choose it."""
    if isinstance(policy, Message):
        return json.dumps([policy.priority, policy.credits, policy.split])
    return json.dumps(policy.name if isinstance(policy, Order) else "")


def read(text: str, shape: Shape) -> Policy:
    """The policy of a text."""
    facts = json.loads(text)
    if isinstance(facts, str):
        return ORDERS[facts](shape)
    priority, credits, split = facts
    return Message(priority, tuple(credits), split)


def credits_for(shape: Shape, times: Times) -> int:
    """Micro-batches that must be in flight to hide the links: `S + ceil(2(S - 1)c / (f + b))`.

    With chunks: what the interleaved order keeps in place of S, and chunks' own times.
    """
    S, V = shape.stages, shape.chunks
    period = (sum(times.forward) + sum(times.backward) + sum(times.weight)) / (S * V)
    delay = 2 * sum(links(shape, times)[:-1])
    extra = math.ceil(delay / period - 1e-9) if period else 0
    return (S if V == 1 else 2 * (S - 1) + (V - 1) * S + 1) + extra


def candidates(shape: Shape, times: Times, room: int) -> list[Policy]:
    """What `message` chooses from within room for so many activations; fixed orders first."""
    S, M, V = shape.stages, shape.micro_batches, shape.chunks
    if room < V:
        raise PlanError(
            f"limit={room} is less than chunks={V}. A micro-batch leaves an activation in each "
            f"chunk of a stage. Use a limit of {V} or more, or fewer chunks."
        )
    fixed = [schedules.one_f_one_b(shape) if V == 1 else schedules.interleaved(shape)]
    if shape.split:
        fixed.append(schedules.zero_bubble(shape))
    found: list[Policy] = [order for order in fixed if max(schedules.peaks(order)) <= room]
    enough = credits_for(shape, times)
    levels = [enough + S // 2, enough, S * V, 2 * enough, M * V]
    large = S * V * M > BUDGET // 16
    rows = [(min(room, n),) * S for n in levels[: 1 if large else None]]
    if not large:
        # A later stage is the sooner reached by gradients; keeping less there costs nothing.
        taper = (enough - 1) / S
        rows.append(tuple(min(room, max(V, enough - int(taper * s))) for s in range(S)))
    priorities: tuple[Priority, ...] = ("backward", "first")
    unique = dict.fromkeys(rows)
    found += [Message(p, row, shape.split) for row in unique for p in priorities]
    return found


def _fastest(shape: Shape, times: Times, room: int, seeds: int) -> Policy:
    """The fastest candidate; of equally fast ones that which keeps the fewest activations."""
    options = [Option(policy) for policy in candidates(shape, times, room)]
    trials = Trials(shape, times)
    if not times.jitter:
        return trials.best(options, [0], margin=1e-12).policy
    affordable = BUDGET // (2 * shape.stages * shape.jobs)
    numbers = count(FIRST_SEED)
    look = [next(numbers) for _ in range(max(1, min(seeds // 8, affordable // len(options))))]
    pick = trials.best(options, look, margin=2e-3)
    usual = options[0]
    if pick is usual or not isinstance(usual.policy, Order):
        return pick.policy
    # Luck that made the pick must not judge it.
    proof = [next(numbers) for _ in range(max(4, min(seeds, affordable // 2)))]
    gains = [(trials.seconds(usual, seed) - trials.seconds(pick, seed)) for seed in proof]
    # Two standard errors, and more for few steps, whose spread is itself uncertain.
    doubt = (2 + 5 / len(gains)) * stdev(gains) / math.sqrt(len(gains))
    return pick.policy if fmean(gains) > doubt else usual.policy


@dataclass(eq=False)
class Option:
    """A candidate and the most it was seen to keep: on one stage, and on all together."""

    policy: Policy
    held: tuple[int, int] = (0, 0)


class Trials:
    """Plays candidates with the same luck."""

    def __init__(self, shape: Shape, times: Times) -> None:
        self.shape, self.times = shape, times
        self.tables: dict[tuple[bool, int], Lengths] = {}

    def seconds(self, option: Option, seed: int) -> float:
        """Of a step with this luck."""
        policy = option.policy
        shape = replace(self.shape, split=policy.split)
        key = policy.split, seed
        if key not in self.tables:
            self.tables[key] = lengths(shape, self.times, seed)
        play = Play(shape, policy, self.tables[key], links(shape, self.times))
        play.run()
        option.held = max(option.held, (max(play.peak), sum(play.peak)))
        return play.seconds

    def best(self, options: Sequence[Option], seeds: Sequence[int], *, margin: float) -> Option:
        """The one that keeps least of those whose mean is within the margin of the fastest."""
        means = [fmean(self.seconds(option, seed) for seed in seeds) for option in options]
        enough = min(means) * (1 + margin)
        good = [o for o, mean in zip(options, means, strict=True) if mean <= enough]
        return min(good, key=lambda option: option.held)
