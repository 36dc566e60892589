"""Goal: "70B, 2T tokens, 30 days" in numbers, and the fewest nodes that reach it.

    days = tokens / rate(nodes) / 86400

The rate of a number of nodes is that of the best layout there; between two searches the best of the
one before is carried over (`search.alike`). Sizes are tried from a guess by the
peak of a device up or down, each twice or half the last, and then between the last that was too
slow and the first that is not, to 1/16. More nodes are not always faster: a batch is shared by so
many ranks only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from ranvier.errors import PlanError
from ranvier.models.config import SIZES, DecoderConfig
from ranvier.planner.search import Result

DAY = 86400.0
UNITS = {"hour": 3600.0, "day": DAY, "week": 7 * DAY, "month": 30 * DAY, "year": 365 * DAY}
SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MOST = 4096
"""Nodes of the largest cluster that is tried."""
SHAPE = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")
"""Fields of a model that a number of parameters decides."""
WIDTHS = (256, 512, 768, 1024, 1536, *range(2048, 65536, 1024))
RATIO, VOCAB = 110.0, 128256
"""Width / layers of Llama 3 (102 to 130), and its vocabulary."""
LIKE = 0.15
"""How far a number of parameters may be from that of a named size and still mean it."""
FORM = "Write for example '70B, 2T tokens, 30 days' or 'llama3-8b, 15T tokens, 2 weeks'."


@dataclass(frozen=True)
class Goal:
    """What is to be reached."""

    tokens: float
    seconds: float
    size: str = ""
    """A named size; empty: as many parameters."""
    parameters: float = 0.0


@dataclass(frozen=True)
class Reached:
    """The fewest nodes that reach a goal, or the fastest there are."""

    nodes: int
    result: Result
    seconds: float
    """Of all tokens."""
    enough: bool

    @property
    def device_hours(self) -> float:
        """What it costs."""
        return self.seconds * self.result.wish.world / 3600.0


def parse(text: str) -> Goal:
    """A goal from words with commas between them."""
    tokens, seconds, size, parameters = 0.0, 0.0, "", 0.0
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        if word in SIZES:
            size = word
        elif match := re.fullmatch(r"([\d.]+)\s*([kmbt]?)\s*tokens?", word):
            tokens = _number(match[1], match[2], word)
        elif match := re.fullmatch(r"([\d.]+)\s*(hour|day|week|month|year)s?", word):
            seconds = _number(match[1], "", word) * UNITS[match[2]]
        elif match := re.fullmatch(r"([\d.]+)\s*([kmbt])(\s*(parameters|params|model))?", word):
            parameters = _number(match[1], match[2], word)
        else:
            raise PlanError(
                f"goal: {word!r} is no size, no number of tokens and no time. A size is a number "
                f"of parameters or one of {', '.join(SIZES)}. {FORM}"
            )
    missing = [name for name, value in (("tokens", tokens), ("a time", seconds)) if not value]
    if missing:
        raise PlanError(
            f"goal={text!r} has no {' and no '.join(missing)}. A goal is a number of tokens within "
            f"a time. {FORM}"
        )
    return Goal(tokens, seconds, size or named(parameters), parameters)


def _number(digits: str, scale: str, word: str) -> float:
    try:
        value = float(digits) * SCALE[scale]
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e20:
        raise PlanError(f"goal: {word!r} is no number above 0. {FORM}")
    return value


def named(parameters: float) -> str:
    """The named size with about so many parameters; empty if there is none."""
    from ranvier.settings import ModelConfig

    counts = {name: ModelConfig.of(name).parameters for name in SIZES}
    near = min(counts, key=lambda name: abs(counts[name] - parameters))
    return near if abs(counts[near] - parameters) <= LIKE * parameters else ""


def shape(parameters: float) -> DecoderConfig:
    """A decoder like Llama 3 with about so many parameters.

    Large ones have a width of a multiple of 1024; the MLP 3.5 times as wide, and width
    / layers as near to that of Llama 3 as it gets.
    """
    made = [_like_llama(embed, parameters) for embed in WIDTHS]
    return min(made, key=lambda config: abs(math.log(config.embed / config.layers / RATIO)))


def _like_llama(embed: int, parameters: float) -> DecoderConfig:
    """As many layers of this width as make so many parameters, an even number."""
    heads, mlp = embed // 128, embed * 7 // 2
    kv_heads = heads if heads % 8 else 8
    block = 2 * embed * (heads + kv_heads) * 128 + 3 * embed * mlp
    layers = max(round((parameters - 2 * VOCAB * embed) / block / 2) * 2, 2)
    return DecoderConfig(
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        mlp=mlp,
        vocab=VOCAB,
        max_seq=8192,
    )


def guess(goal: Goal, parameters: float, peak: float) -> int:
    """Nodes of this peak (FLOPs a second of a node) that would do at 40 % of it."""
    return max(round(6.0 * parameters * goal.tokens / goal.seconds / (0.4 * peak)), 1)


def fewest(
    goal: Goal,
    searched: Callable[[int], Result | None],
    *,
    first: int = 1,
    most: int = MOST,
    told: Callable[[Reached], None] = lambda _: None,
) -> Reached | None:
    """The fewest nodes that reach a goal; else the fastest up to `most`; None if nothing fits.

    searched: the layouts on so many nodes, None where no layout fits. first: a guess. told: is told
    of each number of nodes that was tried.
    """
    seen: dict[int, Reached] = {}

    def tried(nodes: int) -> bool:
        result = searched(nodes)
        if result is None or not result.found:
            return False
        seconds = goal.tokens / result.best.prediction.rate
        seen[nodes] = Reached(nodes, result, seconds, seconds <= goal.seconds)
        told(seen[nodes])
        return seen[nodes].enough

    low, high = 0, min(first, most)
    while not tried(high):
        if high == most:
            return min(seen.values(), key=lambda one: (one.seconds, one.nodes), default=None)
        low, high = high, min(2 * high, most)
    while low == 0 and high > 1:
        half = high // 2
        low, high = (0, half) if tried(half) else (half, high)
    while high - low > max(1, high // 16):  # batches share among few numbers of ranks evenly
        middle = (low + high) // 2
        low, high = (low, middle) if tried(middle) else (middle, high)
    return seen[high]


def surer(reached: Reached, goal: Goal, result: Result | None) -> Reached:
    """What was reached, after all layouts on as many nodes were searched."""
    if result is None or not result.found:
        return reached
    seconds = goal.tokens / result.best.prediction.rate
    if seconds > reached.seconds:
        return reached
    return Reached(reached.nodes, result, seconds, seconds <= goal.seconds)
