"""Base class of parallel layers and the context that they share.

A parallel layer replaces its serial twin (`nn.Linear` here, `torch.nn.Linear` there): same
parameter names, same result. It derives from its named dims which shard of the weights it holds
and what it communicates; its `cost_model` predicts that communication and its FLOPs in closed form.
"""

from __future__ import annotations

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
    """State of the running pass that layers read: samples, factors of the loss, policies."""

    seed: int = 0
    samples: Tensor | None = None
    """Run-wide index of each sample of this micro-batch `[b]`; it implies the step. Random masks
    are a function of it."""
    defer_residual_add: bool = False
    """Whether a compiled block may leave its last residual add to the next block. Only safe if the
    caller is a model that chains the blocks."""
    loss_scale: Tensor | None = None
    """Factor by which the loss of this pass will be multiplied, where the step knows it in advance.
    A head that computes gradients in forward scales them immediately and relies on it."""
    loss_grad_scale: Tensor | None = None
    """Factor of the loss in the running backward pass; auxiliary losses of other layers use the
    same one."""
    per_token_loss: bool = False
    """Whether a head with targets returns one score per token instead of the sum."""
    overlapped_autograd: bool = True
    """Use the autograd functions with overlap; False: the reference built from differentiable
    collectives."""
    deferred_weight_grads: list[Callable[[], None]] | None = None
    """Queue of deferred weight-gradient computations; None: they run in the backward pass."""
    save_policy: SavePolicy = field(default_factory=SavePolicy)
    """What blocks save for backward, and where."""

    def run_or_defer(self, work: Callable[[], None]) -> None:
        """Run a weight-gradient computation now, or queue it for later."""
        # The queue is drained by the pipeline's weight-gradient jobs (zero bubble).
        if self.deferred_weight_grads is None:
            work()
        else:
            self.deferred_weight_grads.append(work)


@dataclass(frozen=True)
class LayerContext:
    """Context of a parallel layer: its name, and what all layers of a model share."""

    name: str
    grid: Grid
    table: ShardingTable
    units: Mapping[str, int]
    """Number of units of each named dim of the model (heads, not their elements)."""
    bucket_scheduler: BucketScheduler
    step_context: StepContext
    block_name: str = ""
    """The block of the layer; empty: it is outside of blocks."""
    has_compiled_blocks: bool = False
    """Whether blocks are compiled. All equal blocks share one graph, so nothing in it may depend on
    the block index."""
    dispatch: Dispatch = "model"
    """Element type in which tokens are dispatched to experts."""
    whole_sequence: bool = False
    """The sequence was already gathered over row at the start of the enclosing module (Hugging
    Face)."""
    init: Mapping[str, float | tuple[float, float]] = field(default_factory=dict)
    """Standard deviation (or mean and standard deviation) of initial values.

    Keyed by the suffix of a layer's name; the first match wins.
    """
    weights: dict[str, ShardedParameter] = field(default_factory=dict)
    """All parameters sharded so far, by name."""
    tied_weights: dict[int, ShardedParameter] = field(default_factory=dict)
    """The same, keyed by `id` of the serial parameter, so that tied parameters are sharded once."""

    @property
    def layout_context(self) -> LayoutContext:
        """The part of the context that cost models need."""
        return LayoutContext(self.grid.degrees, self.table, self.units, self.dispatch)

    def for_layer(self, name: str, **changes: object) -> LayerContext:
        """The context of another layer of the same model."""
        return replace(self, name=name, **changes)  # type: ignore[arg-type]

    def axis(self, *names: str) -> Axis:
        """The axis of the grid with these names."""
        return self.grid.axis(*names)

    def initial_mean_std(self, name: str, mean: float, std: float) -> tuple[float, float]:
        """Initial mean and standard deviation of a parameter: the model's, else the layer's."""
        layer = name.rpartition(".")[0]
        for end, word in self.init.items():
            # A tuple is keyed by the parameter's full name and applies as is; a float is keyed by
            # the layer name and only replaces the std of parameters that are random anyway.
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
    """Replace a serial parameter by this rank's shard, still without values.

    Without `rule` it is the matrix of a layer: split by the weight rule and over depth, and
    gathered by the layer before use. With a rule (a vector, split like the activations of its dim)
    it is used as stored.
    """
    # A tied parameter (embedding and head) is sharded once and gets several owners.
    weight = site.tied_weights.get(id(serial))
    if weight is None:
        sharding = Sharding.from_dims(
            serial.shape,
            dims,
            # Only weights that a layer gathers before use may be split over depth, too.
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
            # The optimizer applies weight decay and learning rates per group.
            param_group="vector" if len(dims) < 2 else "embedding" if embedding else "matrix",
            std=std,
            mean=mean,
            owners=[],
            trainable=serial.requires_grad,
            # A meta model has no values: they are generated shard by shard instead (`counter_rng`).
            original_values=None if serial.is_meta else serial.detach(),
        )
        site.tied_weights[id(serial)] = site.weights[name] = weight
    weight.owners.append((module, attribute))
    # A placeholder: `materialize_parameters` later replaces it by a view of its bucket.
    empty = torch.empty(weight.sharding.local_shape, device="meta")
    setattr(module, attribute, torch.nn.Parameter(empty, requires_grad=weight.trainable))
    return weight


def apply_autograd(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function.apply`, which torch leaves untyped."""
    return function.apply(*arguments)


class ParallelLayer(torch.nn.Module):
    """A layer on the grid; subclasses shard their weights and predict with `cost_model`."""

    def __init__(self, site: LayerContext) -> None:
        super().__init__()
        self.site = site
        self.local_name = site.name.removeprefix(f"{site.block_name}.")
        """Name inside the block: the same in all equal blocks, which share a compiled graph."""
        self.handles: dict[str, ShardedParameter] = {}

    def shard_parameter(
        self, attribute: str, serial: torch.nn.Parameter | None, dims: Sequence[Dim], **options: Any
    ) -> ShardedParameter | None:
        """Register this rank's shard of a parameter (see the function `shard_parameter`)."""
        if serial is None:
            self.register_parameter(attribute, None)
            return None
        self.handles[attribute] = shard_parameter(
            self, attribute, serial, dims, self.site, **options
        )
        return self.handles[attribute]

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Serial layers with which the generic tests exercise this layer on all grids."""
        return []

    def trace_scope(self) -> AbstractContextManager[None]:
        """Context in which communication is recorded under this layer's name.

        In a compiled block the name is relative to the block; the caller of the block adds the
        prefix.
        """
        if torch.compiler.is_compiling():
            return self.site.grid.trace.graph_named_scope(
                # Only the graphs of compiled blocks are shared; elsewhere the full name is right.
                self.local_name if self.site.has_compiled_blocks else self.site.name
            )
        return self.site.grid.trace.named_scope(self.site.name)

    @property
    def cost_model(self) -> LayerCost:
        """Predicts the layer's communication, FLOPs and saved activations."""
        return LayerCost(self.site.name, self.site.layout_context)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Communication of the forward pass of a micro-batch, without gathered weights."""
        return self.cost_model.forward_events(flow)

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Communication of a micro-batch; a recomputed layer runs forward twice."""
        return self.cost_model.events(flow, recomputed=recomputed)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Additional bytes a block saves if it keeps what this layer communicates in forward."""
        return self.cost_model.saved_bytes(flow, selective=selective)

    def flops(self, flow: ActivationShape) -> int:
        """FLOPs (multiplications and additions) of a micro-batch's forward pass on this rank."""
        return self.cost_model.flops(flow)


def check_range(
    ids: Tensor, size: int, name: str, *, ignore: int | None = None, dim: Dim = "vocab"
) -> None:
    """Raise unless all ids are in [0, size); on a device the check runs asynchronously there.

    dim: what the ids index: tokens ("vocab") or positions in a text ("position").
    """
    # In a graph the check would be a data-dependent branch, and meta tensors have no values.
    if torch.compiler.is_compiling() or ids.is_meta:
        return
    good = (ids >= 0) & (ids < size)
    good = (good if ignore is None else good | (ids == ignore)).all()
    # Reading the result would synchronise with the device, so the device asserts by itself.
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
