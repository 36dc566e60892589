"""Base class of parallel layers and the context that they share.

A parallel layer replaces a serial layer of the same name (`nn.Linear` here, `torch.nn.Linear`
there) and has the same parameter names and results. It derives its shard of the weights and its
communication from its named dims; its `cost_model` predicts communication and FLOPs in closed form.
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
from ranvier.config.plan import ContextAttentionChoice, Dispatch, RowSplit
from ranvier.cost.layers import ActivationShape, LayerCost, LayoutContext
from ranvier.errors import DataError, ShardingError
from ranvier.grid import Axis, Grid
from ranvier.memory.saved_results import SavePolicy
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.example import LayerExample
from ranvier.sharding import AxisRule, Dim, Sharding, ShardingTable
from ranvier.trace import Event


@dataclass
class StepContext:
    """State of the current pass that all layers share: samples, loss factors, policies."""

    seed: int = 0
    samples: Tensor | None = None
    """Index of each sample of this micro-batch in the run, `[b]`. It determines the step; random
    masks depend on it."""
    context_documents: ContextDocuments | None = None
    """Which tokens of this micro-batch each rank of context has; None if context is 1."""
    defer_residual_add: bool = False
    """Whether a compiled block may leave its last residual add to the next block. Only safe if the
    caller is a model that chains the blocks."""
    num_targets: Tensor | None = None
    """Number of targets of the step on all ranks, of which the loss is the mean."""
    loss_scale: Tensor | None = None
    """Factor by which the loss of this pass will be multiplied, if known in advance. A head that
    computes gradients in forward scales them by it."""
    loss_grad_scale: Tensor | None = None
    """Factor of the loss in the current backward pass; auxiliary losses of other layers use the
    same factor."""
    per_token_loss: bool = False
    """Whether a head with targets returns one log-probability per token instead of the sum."""
    overlapped_autograd: bool = True
    """Whether to use the autograd functions with overlap, or the reference implementation with
    differentiable collectives."""
    deferred_weight_grads: list[Callable[[], None]] | None = None
    """Queue of deferred weight-gradient computations; if None, they run in the backward pass."""
    save_policy: SavePolicy = field(default_factory=SavePolicy)
    """What blocks save for backward, and where it is stored."""
    row_splits: RowSplit = "tokens"
    """What row splits in the outer region. An inference step of few tokens splits nothing."""
    context_splits: RowSplit = "tokens"
    """What context splits in an inference step: its tokens, or, if they are few, nothing."""
    is_recompute: bool = False
    """Whether a block is being recomputed for its backward pass, which does not need its output."""
    compiles_inference: bool = False
    """Whether blocks are also compiled for passes without gradients, as for decode steps."""

    def run_or_defer(self, work: Callable[[], None]) -> None:
        """Runs a weight-gradient computation now, or queues it for later."""
        # Weight-gradient jobs of the pipeline (zero bubble) run what is in the queue.
        if self.deferred_weight_grads is None:
            work()
        else:
            self.deferred_weight_grads.append(work)


@dataclass(frozen=True)
class LayerContext:
    """Context of a parallel layer: its name and the objects that all layers of a model share."""

    name: str
    grid: Grid
    table: ShardingTable
    units: Mapping[str, int]
    """Number of units of each named dim of the model (for heads: their number, not elements)."""
    bucket_scheduler: BucketScheduler
    step_context: StepContext
    block_name: str = ""
    """Name of the layer's block; "" if the layer is outside of all blocks."""
    has_compiled_blocks: bool = False
    """Whether blocks are compiled. Identical blocks share one graph, so nothing in it may depend
    on the block index."""
    dispatch: Dispatch = "model"
    """Data type in which tokens are dispatched to experts."""
    context_attention: ContextAttentionChoice = "auto"
    """How attention gets keys of other ranks of context."""
    streams: int = 1
    """Samples of the layer for each sample of a micro-batch (ParScale); they are consecutive."""
    whole_sequence: bool = False
    """Whether the sequence is already gathered over row at the start of the enclosing module, as
    in Hugging Face models."""
    init: Mapping[str, float | tuple[float, float]] = field(default_factory=dict)
    """Standard deviation (or mean and standard deviation) of initial values.

    Keyed by the suffix of a layer's name; the first match wins.
    """
    weights: dict[str, ShardedParameter] = field(default_factory=dict)
    """All parameters sharded so far, by name."""
    tied_weights: dict[int, ShardedParameter] = field(default_factory=dict)
    """The same parameters by `id` of the serial parameter, so that tied ones are sharded once."""

    @property
    def layout_context(self) -> LayoutContext:
        """The part of the context that cost models need."""
        table = replace(self.table, row_splits=self.step_context.row_splits)
        return LayoutContext(
            self.grid.degrees,
            table,
            self.units,
            self.dispatch,
            self.context_attention,
            streams=self.streams,
        )

    @property
    def sample_numbers(self) -> Tensor | None:
        """Number of each sample of the layer in the run; streams of a sample have different ones.

        None if the samples are not known.
        """
        samples = self.step_context.samples
        if samples is None or self.streams == 1:
            return samples
        stream = torch.arange(self.streams, device=samples.device)
        return (samples.unsqueeze(1) * self.streams + stream).flatten()

    @property
    def context_documents(self) -> ContextDocuments | None:
        """Which tokens of the layer's samples each rank of context has; None if context is 1."""
        documents = self.step_context.context_documents
        if documents is None or self.streams == 1:
            return documents
        return documents.repeat_samples(self.streams)

    def for_layer(self, name: str, **changes: object) -> LayerContext:
        """Returns the context of another layer of the same model."""
        return replace(self, name=name, **changes)  # type: ignore[arg-type]

    def axis(self, *names: str) -> Axis:
        """Returns the axis of the grid with these names."""
        return self.grid.axis(*names)

    def initial_mean_std(self, name: str, mean: float, std: float) -> tuple[float, float]:
        """Returns the initial mean and std of a parameter: the model's, or else the layer's."""
        layer = name.rpartition(".")[0]
        for end, word in self.init.items():
            # A tuple has a suffix of the parameter name as its key and is used unchanged. A float
            # has a suffix of the layer name and replaces only the std of random parameters.
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
    is_transposed: bool = False,
    embedding: bool = False,
    std: float = 0.0,
    mean: float = 0.0,
) -> ShardedParameter:
    """Replaces a serial parameter by this rank's shard, which has no values yet.

    Without `rule` the parameter is the matrix of a layer, `(out, in)` or transposed: it is split
    by the weight rule and over depth, and the layer gathers it before use. With a rule, e.g. for a
    vector that is split like the activations of its dim, it is used as stored.
    """
    # A tied parameter (embedding and head) is sharded once and gets several owners.
    weight = site.tied_weights.get(id(serial))
    if weight is None:
        name = f"{site.name}.{attribute}".lstrip(".")
        _refuse_other_vocabulary(name, serial.shape, dims, site.units)
        if rule is None:
            sharding = site.layout_context.weight_sharding(
                serial.shape, dims, is_transposed=is_transposed
            )
        else:
            # Only weights that a layer gathers before use may be split further.
            sharding = Sharding.from_dims(
                serial.shape, dims, rule, site.grid.degrees, units=site.units
            )
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
            # A meta model has no values: they are generated per shard instead (`counter_rng`).
            original_values=None if serial.is_meta else serial.detach(),
        )
        site.tied_weights[id(serial)] = site.weights[name] = weight
    weight.owners.append((module, attribute))
    # A placeholder: `materialize_parameters` later replaces it by a view of its bucket.
    empty = torch.empty(weight.sharding.local_shape, device="meta")
    setattr(module, attribute, torch.nn.Parameter(empty, requires_grad=weight.trainable))
    return weight


def _refuse_other_vocabulary(
    name: str, shape: Sequence[int], dims: Sequence[Dim], units: Mapping[str, int]
) -> None:
    """Raises if a weight has another vocabulary than the model, whose padding would be wrong."""
    for size, dim in zip(shape, dims, strict=False):
        if dim == "vocab" and units.get("vocab", size) != size:
            raise ShardingError(
                f"{name} has {size} elements in the dim 'vocab', but sizes has "
                f"vocab={units['vocab']}. All layers with this dim must have the same size. Rename "
                "the dim of the embedding, e.g. to 'words', or correct sizes."
            )


def apply_autograd(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Calls `function.apply`, which has no type annotations in torch."""
    return function.apply(*arguments)


class ParallelLayer(torch.nn.Module):
    """Base class of all layers on the grid.

    A subclass shards its weights in `__init__` with `shard_parameter`, computes and communicates in
    `forward`, and predicts its communication, FLOPs and saved bytes with `cost_model`.

    Args:
        site: The name of the layer and the context that it shares with the other layers.
    """

    def __init__(self, site: LayerContext) -> None:
        super().__init__()
        self.site = site
        self.local_name = site.name.removeprefix(f"{site.block_name}.")
        """Name inside the block; the same in all blocks that share a compiled graph."""
        self.handles: dict[str, ShardedParameter] = {}

    def shard_parameter(
        self, attribute: str, serial: torch.nn.Parameter | None, dims: Sequence[Dim], **options: Any
    ) -> ShardedParameter | None:
        """Registers this rank's shard of a parameter; `options` as in `layer.shard_parameter`."""
        if serial is None:
            self.register_parameter(attribute, None)
            return None
        self.handles[attribute] = shard_parameter(
            self, attribute, serial, dims, self.site, **options
        )
        return self.handles[attribute]

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Returns serial layers with which the generic tests run this layer on all grids."""
        return []

    def trace_scope(self) -> AbstractContextManager[None]:
        """Returns a context in which communication is recorded under this layer's name.

        In a compiled block the name is relative to the block; the caller of the block adds the
        prefix.
        """
        if torch.compiler.is_compiling():
            return self.site.grid.trace.graph_named_scope(
                # Only compiled blocks share their graphs; other graphs use the full name.
                self.local_name if self.site.has_compiled_blocks else self.site.name
            )
        return self.site.grid.trace.named_scope(self.site.name)

    @property
    def cost_model(self) -> LayerCost:
        """The cost model that predicts communication, FLOPs and saved bytes of the layer."""
        return LayerCost(self.site.name, self.site.layout_context)

    def forward_events(self, flow: ActivationShape) -> list[Event]:
        """Predicts the communication of the forward pass, without weight gathers."""
        return self.cost_model.forward_events(flow)

    def events(self, flow: ActivationShape, *, recomputed: bool = False) -> list[Event]:
        """Predicts the communication of a micro-batch; a recomputed layer runs forward twice."""
        return self.cost_model.events(flow, recomputed=recomputed)

    def saved_bytes(self, flow: ActivationShape, *, selective: bool = False) -> int:
        """Predicts the bytes needed to save the results of this layer's forward collectives."""
        return self.cost_model.saved_bytes(flow, selective=selective)

    def flops(self, flow: ActivationShape) -> int:
        """Predicts the FLOPs of the forward pass of a micro-batch on this rank."""
        return self.cost_model.flops(flow)


def check_range(
    ids: Tensor, size: int, name: str, *, ignore: int | None = None, dim: Dim = "vocab"
) -> None:
    """Raises unless all ids are in [0, size); on a GPU the check runs asynchronously.

    dim: what the ids are: tokens ("vocab") or positions in the sequence ("position").
    """
    # In a graph the check would be a data-dependent branch; meta tensors have no values.
    if torch.compiler.is_compiling() or ids.is_meta:
        return
    # A captured graph is replayed with ids that its caller has checked.
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    good = (ids >= 0) & (ids < size)
    good = (good if ignore is None else good | (ids == ignore)).all()
    # Reading the result would synchronize with the device, so the device runs the assertion.
    if ids.device.type != "cpu":
        torch._assert_async(good)
    elif not bool(good):
        span = f"from {int(ids.min())} to {int(ids.max())}"
        if dim == "position":
            raise DataError(
                f"{name} received positions {span}, but the model has {size} learned positions, 0 "
                f"to {size - 1}. A sequence can have at most {size} tokens. Use shorter sequences; "
                "when generating, prompt and new tokens count together."
            )
        raise DataError(
            f"{name} received token ids {span}. Ids must be in [0, "
            f"{size}){'' if ignore is None else f' or equal to {ignore}'}. Use a larger "
            "vocabulary, or fix the data."
        )
