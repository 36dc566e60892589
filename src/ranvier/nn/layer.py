"""Leaf: a layer that knows its part of the work on the grid.

A leaf replaces its serial twin (`nn.Linear` here, `torch.nn.Linear` there): same names of
parameters, same result. It derives from the names of its dims which part of the weights it holds
and what it communicates; its `layer` predicts that communication and its work in closed form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ranvier.buckets.bucket import ShardedParameter
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.config.plan import Dispatch
from ranvier.cost.layers import ActivationShape, LayerCost, LayoutContext
from ranvier.errors import DataError
from ranvier.grid import Axis, Grid
from ranvier.memory.saved_results import SavePolicy
from ranvier.nn.example import LayerExample
from ranvier.sharding import AxisRule, Dim, Sharding, ShardingTable
from ranvier.trace import Event


@dataclass
class StepContext:
    """What the forward pass now running works on: needed by layers that draw random numbers."""

    seed: int = 0
    samples: Tensor | None = None
    """Number in the run of each sample of this micro-batch `[b]`; it implies the step."""
    defer_residual_add: bool = False
    """Compiled blocks may leave their last addition to the next: whoever calls them is a model."""
    loss_scale: Tensor | None = None
    """What the loss of this pass will be multiplied by, where the step knows it: a head that makes
    gradients in forward scales them at once and trusts it."""
    loss_grad_scale: Tensor | None = None
    """What the loss of the pass that runs backward is multiplied by; losses of other layers share
    it."""
    per_token_loss: bool = False
    """A head with targets tells of each token what its target is worth, not the sum of all."""
    deferred_weight_grads: list[Callable[[], None]] | None = None
    """Where the work on gradients of weights waits, if it is not done in the backward pass."""
    save_policy: SavePolicy = field(default_factory=SavePolicy)
    """What blocks keep for backward, and where."""

    def run_or_defer(self, work: Callable[[], None]) -> None:
        """Do work on gradients of weights, now or later."""
        if self.deferred_weight_grads is None:
            work()
        else:
            self.deferred_weight_grads.append(work)


@dataclass(frozen=True)
class LayerContext:
    """Where a leaf stands: its name, and what all leaves of a model share."""

    name: str
    grid: Grid
    table: ShardingTable
    units: Mapping[str, int]
    """Number of units of each named dim of the model (heads, not their elements)."""
    bucket_scheduler: BucketScheduler
    step_context: StepContext
    compile_backend: str = ""
    """The compiler of the blocks, all equal ones as one graph: nothing in it may depend on which
    block it is. Empty: none."""
    overlapped_autograd: bool = True
    """Overlapped autograd functions; False: the reference in differentiable pairs."""
    dispatch: Dispatch = "same"
    """In which type tokens travel to experts."""
    whole_sequence: bool = False
    """The sequence was gathered over row where the enclosing module begins (Hugging Face)."""
    init: Mapping[str, float | tuple[float, float]] = field(default_factory=dict)
    """Deviation (or mean and deviation) of initial values.

    By the end of a layer's name, first match.
    """
    weights: dict[str, ShardedParameter] = field(default_factory=dict)
    """All weights placed so far, by name."""
    tied_weights: dict[int, ShardedParameter] = field(default_factory=dict)
    """The same by identity of the serial parameter."""

    @property
    def block_name(self) -> str:
        """Name of the block around the leaf (an element of a list); empty outside of any."""
        inside = re.match(r"(.*\.\d+)\.", self.name)
        if inside:
            return inside.group(1)
        return ""

    @property
    def layout_context(self) -> LayoutContext:
        """What predictions need of it."""
        return LayoutContext(self.grid.degrees, self.table, self.units, self.dispatch)

    def for_layer(self, name: str, **changes: object) -> LayerContext:
        """The site of another leaf of the same model."""
        return replace(self, name=name, **changes)  # type: ignore[arg-type]

    def axis(self, *names: str) -> Axis:
        """An axis of the grid."""
        return self.grid.axis(*names)

    def initial_mean_std(self, name: str, mean: float, std: float) -> tuple[float, float]:
        """Mean and deviation of a parameter: the model's word, else the leaf's."""
        layer = name.rpartition(".")[0]
        for end, word in self.init.items():
            if isinstance(word, tuple) and name.endswith(end):
                return word
            if isinstance(word, float) and std > 0.0 and layer.endswith(end):
                return mean, word
        return mean, std


def shard_parameter(
    module: torch.nn.Module,
    attribute: str,
    serial: torch.nn.Parameter,
    dims: Sequence[Dim],
    site: LayerContext,
    *,
    rule: AxisRule | None = None,
    embedding: bool = False,
    std: float = 0.0,
    mean: float = 0.0,
) -> ShardedParameter:
    """Put my part of a parameter where the whole was, still without values.

    Without `rule` it is a matrix of a layer: cut by the weights' rule and over depth, and the layer
    gathers it. With a rule (a vector, in the region of its dim) it is used as it lies.
    """
    weight = site.tied_weights.get(id(serial))
    if weight is None:
        sharding = Sharding.from_dims(
            serial.shape,
            dims,
            site.table.weight_rule if rule is None else rule,
            site.grid.degrees,
            units=site.units,
            depth=rule is None,
        )
        name = f"{site.name}.{attribute}".lstrip(".")
        mean, std = site.initial_mean_std(name, mean, std)
        weight = ShardedParameter(
            name=name,
            dims=tuple(dims),
            sharding=sharding,
            shard=sharding.shard_at(site.grid.index),
            param_group="vector" if len(dims) < 2 else "embedding" if embedding else "matrix",
            std=std,
            mean=mean,
            owners=[],
            trainable=serial.requires_grad,
            original_values=None if serial.is_meta else serial.detach(),
        )
        site.tied_weights[id(serial)] = site.weights[name] = weight
    weight.owners.append((module, attribute))
    empty = torch.empty(weight.sharding.local_shape, device="meta")
    setattr(module, attribute, torch.nn.Parameter(empty, requires_grad=weight.trainable))
    return weight


def apply_autograd(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """The result of an autograd function, whose `apply` torch leaves untyped."""
    return function.apply(*arguments)


class ParallelLayer(torch.nn.Module):
    """A layer on the grid; subclasses place their weights in `__init__` and predict by `layer`."""

    def __init__(self, site: LayerContext) -> None:
        super().__init__()
        self.site = site
        self.local_name = site.name.removeprefix(f"{site.block_name}.")
        """Name inside the block: the same in all equal blocks, which share a compiled graph."""
        self.handles: dict[str, ShardedParameter] = {}

    def shard_parameter(
        self, attribute: str, serial: torch.nn.Parameter | None, dims: Sequence[Dim], **options: Any
    ) -> ShardedParameter | None:
        """Hold my part of a parameter (see `place`)."""
        if serial is None:
            self.register_parameter(attribute, None)
            return None
        self.handles[attribute] = shard_parameter(
            self, attribute, serial, dims, self.site, **options
        )
        return self.handles[attribute]

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Serial layers with which the generic tests try this leaf on all grids."""
        return []

    def trace_scope(self) -> AbstractContextManager[None]:
        """Communication inside is recorded as this leaf's.

        In a compiled block its name counts from there; whoever calls the block adds the rest.
        """
        if torch.compiler.is_compiling():
            return self.site.grid.trace.graph_named_scope(
                self.local_name if self.site.compile_backend else self.site.name
            )
        return self.site.grid.trace.named_scope(self.site.name)

    @property
    def cost_model(self) -> LayerCost:
        """What predicts its communication, its work and what it keeps."""
        return LayerCost(self.site.name, self.site.layout_context)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Communication of the forward pass of a micro-batch, gathered weights apart."""
        return self.cost_model.forward_events(flow)

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Communication of a micro-batch; a recomputed leaf runs forward twice."""
        return self.cost_model.events(flow, recomputed=recomputed)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Bytes that a block keeps more if it keeps what this leaf communicates in forward."""
        return self.cost_model.saved_bytes(flow, selective=selective)

    def flops(self, flow: ActivationShape) -> int:
        """Multiplications and additions of one forward pass of a micro-batch on this rank."""
        return self.cost_model.flops(flow)


def check_range(
    ids: Tensor, size: int, name: str, *, ignore: int | None = None, dim: Dim = "vocab"
) -> None:
    """Refuse numbers outside of [0, size); on a device the check runs there.

    dim: what they are numbers of: tokens, or places in a text.
    """
    if torch.compiler.is_compiling() or ids.is_meta:
        return
    good = (ids >= 0) & (ids < size)
    good = (good if ignore is None else good | (ids == ignore)).all()
    if ids.device.type != "cpu":
        torch._assert_async(good)
    elif not bool(good):
        span = f"from {int(ids.min())} to {int(ids.max())}"
        if dim == "position":
            raise DataError(
                f"{name} gets positions {span}, but the model has learned {size} positions, 0 to "
                f"{size - 1}. A text has as many tokens at most. Use texts of {size} tokens or "
                "less, prompt and what follows it together."
            )
        raise DataError(
            f"{name} gets numbers {span}. They must lie in [0, "
            f"{size}){'' if ignore is None else f' or be {ignore}'}. Use a larger vocabulary or "
            "mend the data."
        )
