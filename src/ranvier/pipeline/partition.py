"""Cut: the parts of a model shared out to the stages of a pipeline.

A model that can be cut names its `parts` (layers that run together, in order) and runs some of them
with `segment`; of an `nn.Sequential` each element is a part. Parts stay in order: virtual stage v
gets a contiguous range of them and lies on stage v mod stages, so with several chunks a stage has
several ranges. Ranges are as equal in cost as can be: the largest is as small as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.errors import PlanError
from ranvier.models.decoder import CrossEntropy, Head
from ranvier.pipeline.balance import balanced, ranges


class Absent(nn.Module):
    """Stands where layers of another stage would be."""

    def forward(self, *_: Any) -> Any:
        """Refuse."""
        raise AssertionError("a layer of another stage was called")


@dataclass(frozen=True)
class Cut:
    """How a model is to be cut."""

    chunks: int = 1
    """Ranges of parts on each stage."""
    first: tuple[int, ...] = ()
    """First part of each virtual stage but the first; empty: by cost."""
    costs: tuple[float, ...] = ()
    """Cost of each part, as measured; empty: the work of their layers."""
    seq: int = 1024
    """Tokens of a sample, for the work of attention."""
    policy: str = "message"
    """Name of what decides about the order of jobs."""
    limit: int = 0
    """Activations of micro-batches that a stage may hold; 0: as many as are of use."""
    jitter: float = 0.0
    """How much times vary: the deviation of their logarithm."""
    spread: bool = False
    """Whether all stages share the vocabulary."""
    splits: bool = True
    """Whether layers can put their weight gradients off; those of a compiled block cannot."""


@dataclass(frozen=True)
class Stage:
    """The parts of one rank."""

    index: int = 0
    """My place on the pipe axis."""
    count: int = 1
    """Stages."""
    chunks: tuple[slice, ...] = (slice(0, 1),)
    """My ranges of parts."""
    run: Callable[..., Tensor] = field(repr=False, default=torch.zeros)
    """`run(x, parts, **inputs)`: what these parts make of x."""
    vocabulary: tuple[nn.Module, ...] = ()
    """Embedding and head, if all stages share them."""
    costs: tuple[float, ...] = ()
    """Cost of each virtual stage, forward."""
    parts: tuple[str, ...] = ()
    """Names of all parts of the model."""
    work: tuple[float, ...] = ()
    """Cost of each part."""
    firsts: tuple[int, ...] = (0,)
    """First part of each virtual stage."""

    def virtual(self, chunk: int) -> int:
        """Number of a virtual stage of mine."""
        return chunk * self.count + self.index

    def enters(self, chunk: int) -> bool:
        """Whether a chunk is the first of the model."""
        return self.virtual(chunk) == 0

    def leaves(self, chunk: int) -> bool:
        """Whether a chunk is the last of the model."""
        return self.virtual(chunk) == self.count * len(self.chunks) - 1

    def words(self) -> list[str]:
        """One line for each virtual stage: its parts and its share of the work."""
        total, bounds = sum(self.costs) or 1.0, [*self.firsts, len(self.parts)]
        return [
            f"stage {v % self.count}: {self.parts[a]}"
            f"{f' to {self.parts[b - 1]}' if b - a > 1 else ''}, {cost / total:.1%} of the work"
            for v, ((a, b), cost) in enumerate(zip(pairwise(bounds), self.costs, strict=True))
        ]


def parts_of(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the layers of each part."""
    parts = getattr(model, "parts", None)
    if parts is not None:
        return list(parts)
    if isinstance(model, nn.Sequential):
        return [(name,) for name, _ in model.named_children()]
    raise PlanError(
        f"{type(model).__name__} cannot be cut into stages. A model that can has `parts` and "
        "`segment`, as Decoder, or is an nn.Sequential. Use pipe=1 or give it both."
    )


def segment_of(model: nn.Module) -> Callable[..., Tensor]:
    """What runs some of the parts."""
    own: Any = getattr(model, "segment", None)
    if own is not None:
        _refuse_other_forward(type(model))
        run: Callable[..., Tensor] = own
        return run

    def through(
        x: Tensor | None, parts: slice, tokens: Tensor, targets: Tensor | None = None, **_: Any
    ) -> Tensor:
        y: Any = tokens if x is None else x
        for layer in list(model.children())[parts]:
            scored = isinstance(layer, Head | CrossEntropy) or getattr(layer, "columns", None)
            y = layer(y, targets) if scored else layer(y)
        result: Tensor = y
        return result

    return through


def _refuse_other_forward(kind: type) -> None:
    """Stages run `segment`: a `forward` that was written over it would be left out in silence."""
    for one in kind.__mro__:
        if "segment" in vars(one):
            return
        if "forward" in vars(one):
            raise PlanError(
                f"{one.__name__} has a forward of its own but the segment of another class. Stages "
                "run segment, so what forward adds would be lost. Write segment too, or use pipe=1."
            )


def cut(model: nn.Module, costs: Sequence[float], how: Cut, index: int, count: int) -> Stage:
    """The stage at `index` of `count`; costs: of each part."""
    parts = parts_of(model)
    costs = how.costs or tuple(costs)
    virtual = count * how.chunks
    if len(costs) != len(parts):
        raise PlanError(
            f"There are {len(costs)} costs for {len(parts)} parts. Each part has one. The parts "
            f"are {', '.join(names[0] for names in parts)}."
        )
    if virtual > len(parts):
        raise PlanError(
            f"pipe={count} with chunks={how.chunks} makes {virtual} virtual stages of "
            f"{len(parts)} parts. Each needs one at least. Use pipe·chunks of at most {len(parts)}."
        )
    firsts = (0, *how.first) if how.first else balanced(tuple(costs), virtual)
    bounds = [*firsts, len(parts)]
    if len(firsts) != virtual or any(a >= b for a, b in pairwise(bounds)):
        raise PlanError(
            f"The stages are to begin at the parts {list(firsts)}. {virtual} virtual stages begin "
            f"at {virtual} rising numbers below {len(parts)}, the first at 0. Leave them out to "
            "have the work balanced."
        )
    every = ranges(firsts, len(parts))
    return Stage(
        index=index,
        count=count,
        chunks=tuple(every[index::count]),
        run=segment_of(model),
        costs=tuple(sum(costs[one]) for one in every),
        parts=tuple(names[0] for names in parts),
        work=tuple(costs),
        firsts=tuple(firsts),
    )
