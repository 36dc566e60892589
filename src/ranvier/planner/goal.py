"""Goals such as "70B, 2T tokens, 30 days", and the fewest nodes that reach them.

    days = tokens / rate(nodes) / 86400

The rate of a number of nodes is the rate of its best layout. The search starts from a guess based
on the peak of a device, doubles the number until it is fast enough, and then bisects. It uses quick
searches, which try only the best layouts found for another number of nodes. The result n is then
confirmed:

    n      reaches the goal in a full search or with a layout from another number of nodes
    below  the next lower number that can share the work does not reach it in a full search
    fewer  in quick searches, none of the MAX_QUICK_SEARCHES smaller numbers with most divisors
           reaches it (only numbers whose nodes would have to be at most 5% faster than the best)

More nodes are not always faster: a batch can only be shared by so many ranks, and a number with few
divisors has few layouts. So this is not a proof that no lower number is enough.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from ranvier.config.plan import divisors
from ranvier.errors import PlanError
from ranvier.models.config import GEMSTONE_PREFIX, MODEL_SIZES, DecoderConfig
from ranvier.planner.search import SearchResult

SECONDS_PER_DAY = 86400.0
TIME_UNITS = {
    "hour": 3600.0,
    "day": SECONDS_PER_DAY,
    "week": 7 * SECONDS_PER_DAY,
    "month": 30 * SECONDS_PER_DAY,
    "year": 365 * SECONDS_PER_DAY,
}
COUNT_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MAX_NODES = 4096
"""Number of nodes of the largest cluster that is tried."""
MAX_NODE_SPEEDUP = 1.05
"""Maximum speed of a node of a smaller cluster, relative to the fastest node found so far."""
MAX_QUICK_SEARCHES = 16
"""Maximum number of smaller clusters that are tried."""
SHAPE_FIELDS = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")
"""Fields of a model that are derived from a number of parameters."""
MODEL_WIDTHS = (256, 512, 768, 1024, 1536, *range(2048, 65536, 1024))
WIDTH_PER_LAYER = 110.0
LLAMA3_VOCAB = 128256
"""Width / layers of Llama 3 (102 to 130), and its vocabulary."""
SIZE_TOLERANCE = 0.15
"""Maximum relative difference of a number of parameters to a named size that it stands for."""
GOAL_EXAMPLES = "Write for example '70B, 2T tokens, 30 days' or 'llama3-8b, 15T tokens, 2 weeks'."


@dataclass(frozen=True)
class Goal:
    """A training goal: a model, a number of tokens, and a time limit."""

    tokens: float
    seconds: float
    size: str = ""
    """A named size, or empty for a model with `parameters` parameters."""
    parameters: float = 0.0


@dataclass(frozen=True)
class GoalResult:
    """The fewest nodes that reach a goal, or the fastest number of nodes if none does."""

    nodes: int
    result: SearchResult
    seconds: float
    """Time to train on all tokens."""
    meets_goal: bool
    next_fewer: tuple[int, float] | None = None
    """The next lower number of nodes that can share the work, and its seconds, if a layout fits."""

    @property
    def device_hours(self) -> float:
        """Cost in device hours."""
        return self.seconds * self.result.request.world_size / 3600.0


def parse_goal(text: str) -> Goal:
    """Parses a goal from a comma-separated text."""
    tokens = 0.0
    seconds = 0.0
    size = ""
    parameters = 0.0
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        if word in MODEL_SIZES or word.startswith(GEMSTONE_PREFIX):
            size = word
        elif match := re.fullmatch(r"([\d.]+)\s*([kmbt]?)\s*tokens?", word):
            tokens = _parse_number(match[1], match[2], word)
        elif match := re.fullmatch(r"([\d.]+)\s*(hour|day|week|month|year)s?", word):
            seconds = _parse_number(match[1], "", word) * TIME_UNITS[match[2]]
        elif match := re.fullmatch(r"([\d.]+)\s*([kmbt])(\s*(parameters|params|model))?", word):
            parameters = _parse_number(match[1], match[2], word)
        else:
            raise PlanError(
                f"goal: {word!r} is not a size, a number of tokens or a time. A size is a number "
                f"of parameters or one of {', '.join(MODEL_SIZES)}, gemstone-WxD. {GOAL_EXAMPLES}"
            )
    missing = [name for name, value in (("tokens", tokens), ("time", seconds)) if not value]
    if missing:
        raise PlanError(
            f"goal={text!r} has no {' and no '.join(missing)}. A goal needs a number of tokens and "
            f"a time. {GOAL_EXAMPLES}"
        )
    # A number of parameters close to a published model selects that model.
    return Goal(tokens, seconds, size or nearest_named_size(parameters), parameters)


def _parse_number(digits: str, scale: str, word: str) -> float:
    try:
        value = float(digits) * COUNT_SUFFIXES[scale]
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e20:
        raise PlanError(f"goal: {word!r} is not a number above 0. {GOAL_EXAMPLES}")
    return value


def nearest_named_size(parameters: float) -> str:
    """Returns the named size with about this many parameters; empty if there is none."""
    from ranvier.config.kinds import named_model

    counts = {name: named_model(name).num_parameters for name in MODEL_SIZES}
    near = min(counts, key=lambda name: abs(counts[name] - parameters))
    if abs(counts[near] - parameters) <= SIZE_TOLERANCE * parameters:
        return near
    return ""


def llama_like_config(parameters: float) -> DecoderConfig:
    """Returns a Llama-3-like decoder with about this many parameters.

    The width of large models is a multiple of 1024, the MLP is 3.5 times as wide, and the ratio of
    width to layers is as close to Llama 3 as possible.
    """
    made = [_llama_config_of_width(embed, parameters) for embed in MODEL_WIDTHS]
    return min(
        made, key=lambda config: abs(math.log(config.embed / config.layers / WIDTH_PER_LAYER))
    )


def _llama_config_of_width(embed: int, parameters: float) -> DecoderConfig:
    """Returns a decoder of this width whose number of layers, even, fits `parameters` best."""
    heads = embed // 128
    mlp = embed * 7 // 2
    # Llama 3 has 8 key-value heads. Narrow models whose heads are not a multiple of 8 have no GQA.
    kv_heads = heads if heads % 8 else 8
    # q, k, v and o with heads of 128 elements, and the three matrices of a gated MLP.
    block = 2 * embed * (heads + kv_heads) * 128 + 3 * embed * mlp
    layers = max(round((parameters - 2 * LLAMA3_VOCAB * embed) / block / 2) * 2, 2)
    return DecoderConfig(
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        mlp=mlp,
        vocab=LLAMA3_VOCAB,
        max_seq=8192,
    )


def guess_nodes(goal: Goal, parameters: float, peak: float) -> int:
    """Returns the number of nodes that reach the goal at 40% MFU. peak: FLOP/s of a node."""
    # 6 FLOPs per parameter and token.
    return max(round(6.0 * parameters * goal.tokens / goal.seconds / (0.4 * peak)), 1)


class NodeSearch(Protocol):
    """The searches that `find_fewest_nodes` needs."""

    def can_share_evenly(self, nodes: int) -> bool:
        """Returns whether this many nodes can share the work evenly, regardless of memory."""

    def quick_search(self, nodes: int) -> SearchResult | None:
        """Returns the best of some layouts; None if none of them fits."""

    def full_search(self, nodes: int) -> SearchResult | None:
        """Returns the best of all layouts; None if none fits."""


class NodeTrials:
    """The numbers of nodes tried, each with its best result so far."""

    def __init__(
        self, goal: Goal, searches: NodeSearch, told: Callable[[GoalResult], None]
    ) -> None:
        self.goal, self.can_share_evenly, self.on_progress = (
            goal,
            cache(searches.can_share_evenly),
            told,
        )
        self.quick_search, self.full_search = searches.quick_search, cache(searches.full_search)
        self.best_by_nodes: dict[int, GoalResult] = {}

    def reaches_goal(self, nodes: int, *, whole: bool = False) -> bool:
        """Returns whether this many nodes are known to reach the goal."""
        if whole:
            result = self.full_search(nodes)
        else:
            result = self.quick_search(nodes)
        before = self.best_by_nodes.get(nodes)
        if result is not None and result.feasible_candidates:
            seconds = self.goal.tokens / result.best.prediction.tokens_per_second
            if before is None or seconds <= before.seconds:
                self.best_by_nodes[nodes] = GoalResult(
                    nodes, result, seconds, seconds <= self.goal.seconds
                )
                self.on_progress(self.best_by_nodes[nodes])
        return nodes in self.best_by_nodes and self.best_by_nodes[nodes].meets_goal

    def first_shareable(self, numbers: Iterable[int]) -> int:
        """Returns the first number that can share the work; 0 if none can."""
        return next((n for n in numbers if self.can_share_evenly(n)), 0)

    def fastest_result(self) -> GoalResult | None:
        """Returns the fastest result."""
        return min(
            self.best_by_nodes.values(), key=lambda one: (one.seconds, one.nodes), default=None
        )

    def fewer_nodes_to_try(self, nodes: int) -> list[int]:
        """Returns the smaller clusters to try, those with most divisors.

        Only clusters whose nodes must be at most MAX_NODE_SPEEDUP times as fast as the fastest node
        found so far.
        """
        # Progress towards the goal per node and second, which bounds how few nodes can be enough.
        pace = max(1.0 / (one.seconds * one.nodes) for one in self.best_by_nodes.values())
        least = math.ceil(1.0 / (self.goal.seconds * pace * MAX_NODE_SPEEDUP))
        able = filter(
            self.can_share_evenly, sorted(range(least, nodes), key=lambda n: (-len(divisors(n)), n))
        )
        return list(itertools.islice(able, MAX_QUICK_SEARCHES))


def find_fewest_nodes(
    goal: Goal,
    searches: NodeSearch,
    *,
    first: int = 1,
    most: int = MAX_NODES,
    told: Callable[[GoalResult], None] = lambda _: None,
) -> GoalResult | None:
    """Returns the fewest nodes that reach a goal.

    If no number up to `most` reaches it, returns the fastest; None if nothing fits. `first` is a
    guess; the callback receives the result of each number of nodes tried.
    """
    tries = NodeTrials(goal, searches, told)
    # Start near the guess, preferably with a number whose search is short.
    low = 0
    high = tries.first_shareable(_few_divisors(min(first, most)))
    high = (
        high
        or tries.first_shareable(range(min(first, most), 0, -1))
        or tries.first_shareable(range(1, most + 1))
    )
    # Double until a number reaches the goal. A full search follows only if the quick one finds
    # nothing, as for the first number, which has no layouts to start from.
    while (
        high
        and not tries.reaches_goal(high)
        and not (high not in tries.best_by_nodes and tries.reaches_goal(high, whole=True))
    ):
        low = high
        high = tries.first_shareable(range(min(2 * low, most), low, -1))
    if not high:
        # No number up to `most` is fast enough: search the fastest one fully and report it.
        best = tries.fastest_result()
        if best is not None:
            tries.reaches_goal(best.nodes, whole=True)
        return tries.fastest_result()
    # Bisect with quick searches.
    while middle := tries.first_shareable(_from_middle(low, high)):
        low, high = (low, middle) if tries.reaches_goal(middle) else (middle, high)
    found = tries.best_by_nodes[_confirm_fewest(tries, high)]
    less = tries.best_by_nodes.get(tries.first_shareable(range(found.nodes - 1, 0, -1)))
    return replace(found, next_fewer=None if less is None else (less.nodes, less.seconds))


def _confirm_fewest(tries: NodeTrials, high: int) -> int:
    """Returns the number of nodes after full searches have rejected the next lower number."""
    while True:
        # A full search of this number finds more layouts for quick searches, so look twice.
        for whole in (False, True):
            tries.reaches_goal(high, whole=whole)
            fewer = min(filter(tries.reaches_goal, tries.fewer_nodes_to_try(high)), default=0)
            if fewer:
                break
        below = tries.first_shareable(range(high - 1, 0, -1))
        if not fewer and below and tries.reaches_goal(below, whole=True):
            fewer = below
        if not fewer:
            return high
        high = fewer


def _few_divisors(near: int) -> list[int]:
    """Returns the numbers within an eighth of `near`, fewest divisors first (short searches)."""
    some = range(near - near // 8, near + near // 8 + 1)
    return sorted(some, key=lambda n: (len(divisors(n)), abs(n - near)))


def _from_middle(low: int, high: int) -> list[int]:
    """Returns the numbers between two bounds, from the middle outwards."""
    return sorted(range(low + 1, high), key=lambda n: abs(2 * n - low - high))
