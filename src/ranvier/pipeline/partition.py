"""Partitioning: distributes the parts of a model over the stages of a pipeline.

A model that can be partitioned lists its `parts` (layers that run together, in order) and runs some
of them with `segment`. Each element of an `nn.Sequential` is a part. Parts stay in order: virtual
stage v gets a contiguous range of them and is placed on stage v mod stages, so with several chunks
a stage has several ranges. The cost of the most expensive range is minimized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.models.decoder import CrossEntropy, LMHead
from ranvier.pipeline.balance import part_ranges, partition_by_cost
from ranvier.pipeline.stage_profile import load_stage_times

TYPICAL_SEQ_LEN = 1024
"""Tokens per sample for which stages are balanced if the length is not known."""


class OtherStageLayer(nn.Module):
    """Placeholder for a layer of another stage."""

    def forward(self, *_: Any) -> Any:
        """Raises: the layer is not on this stage."""
        raise AssertionError("a layer of another stage was called")


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is partitioned and scheduled."""

    chunks: int = 1
    """Virtual stages (ranges of parts) per stage."""
    stage_starts: tuple[int, ...] = ()
    """First part of each virtual stage except the first; empty means balanced by cost."""
    part_costs: tuple[float, ...] = ()
    """Measured cost of each part; empty means the FLOPs of its layers."""
    seq: int = TYPICAL_SEQ_LEN
    """Tokens per sample, for the FLOPs of attention."""
    policy: str = "message_driven"
    """Name of the scheduling policy."""
    max_in_flight: int = 0
    """Maximum number of micro-batch activations on a stage; 0 means no limit."""
    jitter: float = 0.0
    """Variation of job times: standard deviation of their logarithm."""
    vocab_over_pipe: bool = False
    """Whether all stages share the vocabulary."""

    @classmethod
    def from_plan(cls, plan: Plan, *, seq_len: int = TYPICAL_SEQ_LEN) -> PipelineConfig:
        """Returns the configuration of a plan. Reads its stage profile, if it has one."""
        return cls(
            chunks=plan.virtual_stages,
            stage_starts=plan.stage_starts,
            part_costs=load_stage_times(Path(plan.stage_profile)) if plan.stage_profile else (),
            seq=seq_len,
            policy=plan.schedule,
            max_in_flight=plan.max_in_flight,
            jitter=plan.stage_time_jitter,
            vocab_over_pipe=plan.vocab_over_pipe,
        )


@dataclass(frozen=True)
class ModelStage:
    """The parts of a model on one pipeline stage."""

    index: int = 0
    """Index on the pipe axis."""
    num_stages: int = 1
    """Number of stages."""
    chunks: tuple[slice, ...] = (slice(0, 1),)
    """Ranges of parts on this stage."""
    run_parts: Callable[..., Tensor] = field(repr=False, default=torch.zeros)
    """`run_parts(x, parts, **inputs)`: the output of these parts for input x."""
    vocab_layers: tuple[nn.Module, ...] = ()
    """Embedding and head, if they are sharded over all stages."""
    stage_costs: tuple[float, ...] = ()
    """Forward cost of each virtual stage."""
    part_names: tuple[str, ...] = ()
    """Names of all parts of the model."""
    part_costs: tuple[float, ...] = ()
    """Cost of each part."""
    stage_starts: tuple[int, ...] = (0,)
    """First part of each virtual stage."""
    input_tensors: tuple[int, ...] = (1,)
    """Number of tensors that each part reads: 2 for a ladder layer, otherwise 1."""

    def virtual_stage(self, chunk: int) -> int:
        """Returns the number of the virtual stage of a chunk."""
        return chunk * self.num_stages + self.index

    def is_first_chunk(self, chunk: int) -> bool:
        """Returns whether a chunk is the first of the model."""
        return self.virtual_stage(chunk) == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Returns whether a chunk is the last of the model."""
        return self.virtual_stage(chunk) == self.num_stages * len(self.chunks) - 1

    def describe_stages(self) -> list[str]:
        """Returns one line per virtual stage: its parts and its fraction of the work."""
        total = sum(self.stage_costs) or 1.0
        bounds = [*self.stage_starts, len(self.part_names)]
        return [
            f"stage {v % self.num_stages}: {self.part_names[a]}"
            f"{f' to {self.part_names[b - 1]}' if b - a > 1 else ''}, {cost / total:.1%} of "
            "the work"
            for v, ((a, b), cost) in enumerate(zip(pairwise(bounds), self.stage_costs, strict=True))
        ]


def part_layer_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Returns the names of the layers of each part."""
    parts = getattr(model, "parts", None)
    # A model without parts, such as one with a recurrent core, cannot be split.
    if parts:
        return list(parts)
    if isinstance(model, nn.Sequential):
        return [(name,) for name, _ in model.named_children()]
    raise PlanError(
        f"{type(model).__name__} cannot be split into stages. A pipeline needs a model with "
        "`parts` and `segment`, like Decoder, or an nn.Sequential. Add both to the model, or use "
        "pipe=1."
    )


def segment_runner(model: nn.Module) -> Callable[..., Tensor]:
    """Returns the function that runs a range of parts."""
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
            # Layers that compute the loss also get the targets; `vocab_shard` marks their parallel
            # forms.
            scored = isinstance(layer, LMHead | CrossEntropy) or getattr(layer, "vocab_shard", None)
            if scored:
                y = layer(y, targets)
            else:
                y = layer(y)
        result: Tensor = y
        return result

    return through


def _refuse_other_forward(kind: type) -> None:
    """Raises if `forward` is overridden without `segment`, because stages run only `segment`."""
    # The one found first in the MRO is more derived.
    for one in kind.__mro__:
        if "segment" in vars(one):
            return
        if "forward" in vars(one):
            raise PlanError(
                f"{one.__name__} overrides forward but inherits segment from another class. Stages "
                "run segment, so the changes in forward would be lost. Override segment too, or "
                "use pipe=1."
            )


def partition_model(
    model: nn.Module, costs: Sequence[float], how: PipelineConfig, index: int, count: int
) -> ModelStage:
    """Returns stage `index` of `count`. costs: cost of each part."""
    parts = part_layer_names(model)
    costs = how.part_costs or tuple(costs)
    virtual = count * how.chunks
    if len(costs) != len(parts):
        raise PlanError(
            f"There are {len(costs)} costs for {len(parts)} parts. Each part needs one cost. The "
            f"parts are {', '.join(names[0] for names in parts)}."
        )
    if virtual > len(parts):
        raise PlanError(
            f"pipe={count} with virtual_stages={how.chunks} makes {virtual} virtual stages, but "
            f"the model has {len(parts)} parts. Each virtual stage needs at least one part. Use "
            "pipe·virtual_stages of at most "
            f"{len(parts)}."
        )
    if how.stage_starts:
        firsts = (0, *how.stage_starts)
    else:
        firsts = partition_by_cost(tuple(costs), virtual)
    bounds = [*firsts, len(parts)]
    if len(firsts) != virtual or any(a >= b for a, b in pairwise(bounds)):
        raise PlanError(
            f"The stages are set to start at the parts {list(firsts)}. {virtual} virtual stages "
            f"need {virtual} increasing numbers below {len(parts)}, the first of them 0. Omit "
            "plan.stage_starts to balance the work automatically."
        )
    # Virtual stages are distributed round-robin.
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
