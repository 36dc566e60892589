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
from ranvier.models.decoder import CrossEntropy, LMHead
from ranvier.pipeline.balance import part_ranges, partition_by_cost


class OtherStageLayer(nn.Module):
    """Stands where layers of another stage would be."""

    def forward(self, *_: Any) -> Any:
        """Refuse."""
        raise AssertionError("a layer of another stage was called")


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is to be cut."""

    chunks: int = 1
    """Ranges of parts on each stage."""
    stage_starts: tuple[int, ...] = ()
    """First part of each virtual stage but the first; empty: by cost."""
    part_costs: tuple[float, ...] = ()
    """Cost of each part, as measured; empty: the work of their layers."""
    seq: int = 1024
    """Tokens of a sample, for the work of attention."""
    policy: str = "message"
    """Name of what decides about the order of jobs."""
    max_in_flight: int = 0
    """Activations of micro-batches that a stage may hold; 0: as many as are of use."""
    jitter: float = 0.0
    """How much times vary: the deviation of their logarithm."""
    vocab_over_pipe: bool = False
    """Whether all stages share the vocabulary."""
    can_split_backward: bool = True
    """Whether layers can put their weight gradients off; those of a compiled block cannot."""


@dataclass(frozen=True)
class ModelStage:
    """The parts of one rank."""

    index: int = 0
    """My place on the pipe axis."""
    num_stages: int = 1
    """Stages."""
    chunks: tuple[slice, ...] = (slice(0, 1),)
    """My ranges of parts."""
    run_parts: Callable[..., Tensor] = field(repr=False, default=torch.zeros)
    """`run(x, parts, **inputs)`: what these parts make of x."""
    vocab_layers: tuple[nn.Module, ...] = ()
    """Embedding and head, if all stages share them."""
    stage_costs: tuple[float, ...] = ()
    """Cost of each virtual stage, forward."""
    part_names: tuple[str, ...] = ()
    """Names of all parts of the model."""
    part_costs: tuple[float, ...] = ()
    """Cost of each part."""
    stage_starts: tuple[int, ...] = (0,)
    """First part of each virtual stage."""

    def virtual_stage(self, chunk: int) -> int:
        """Number of a virtual stage of mine."""
        return chunk * self.num_stages + self.index

    def is_first_chunk(self, chunk: int) -> bool:
        """Whether a chunk is the first of the model."""
        return self.virtual_stage(chunk) == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Whether a chunk is the last of the model."""
        return self.virtual_stage(chunk) == self.num_stages * len(self.chunks) - 1

    def describe_stages(self) -> list[str]:
        """One line for each virtual stage: its parts and its share of the work."""
        total = sum(self.stage_costs) or 1.0
        bounds = [*self.stage_starts, len(self.part_names)]
        return [
            f"stage {v % self.num_stages}: {self.part_names[a]}"
            f"{f' to {self.part_names[b - 1]}' if b - a > 1 else ''}, {cost / total:.1%} of "
            "the work"
            for v, ((a, b), cost) in enumerate(zip(pairwise(bounds), self.stage_costs, strict=True))
        ]


def part_layer_names(model: nn.Module) -> list[tuple[str, ...]]:
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


def segment_runner(model: nn.Module) -> Callable[..., Tensor]:
    """What runs some of the parts."""
    own: Any = getattr(model, "segment", None)
    if own is not None:
        _refuse_other_forward(type(model))
        run: Callable[..., Tensor] = own
        return run

    def through(
        x: Tensor | None, parts: slice, tokens: Tensor, targets: Tensor | None = None, **_: Any
    ) -> Tensor:
        if x is None:
            y: Any = tokens
        else:
            y = x
        for layer in list(model.children())[parts]:
            scored = isinstance(layer, LMHead | CrossEntropy) or getattr(layer, "vocab_shard", None)
            if scored:
                y = layer(y, targets)
            else:
                y = layer(y)
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


def partition_model(
    model: nn.Module, costs: Sequence[float], how: PipelineConfig, index: int, count: int
) -> ModelStage:
    """The stage at `index` of `count`; costs: of each part."""
    parts = part_layer_names(model)
    costs = how.part_costs or tuple(costs)
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
    if how.stage_starts:
        firsts = (0, *how.stage_starts)
    else:
        firsts = partition_by_cost(tuple(costs), virtual)
    bounds = [*firsts, len(parts)]
    if len(firsts) != virtual or any(a >= b for a, b in pairwise(bounds)):
        raise PlanError(
            f"The stages are to begin at the parts {list(firsts)}. {virtual} virtual stages begin "
            f"at {virtual} rising numbers below {len(parts)}, the first at 0. Leave them out to "
            "have the work balanced."
        )
    every = part_ranges(firsts, len(parts))
    return ModelStage(
        index=index,
        num_stages=count,
        chunks=tuple(every[index::count]),
        run_parts=segment_runner(model),
        stage_costs=tuple(sum(costs[one]) for one in every),
        part_names=tuple(names[0] for names in parts),
        part_costs=tuple(costs),
        stage_starts=tuple(firsts),
    )
