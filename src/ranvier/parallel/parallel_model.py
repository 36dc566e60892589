"""The parallel model: layers, weights, buckets and pipeline of a model on a grid.

It also predicts the communication of a step from the cost models of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ranvier.buckets import spec
from ranvier.buckets.bucket import ShardedParameter
from ranvier.buckets.matrix_owners import OWNER_AXES, MatrixOwners
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.buckets.spec import ElementSizes, ParamGroup
from ranvier.comm.consensus import world_axis
from ranvier.config.plan import ContextOrder, Recompute
from ranvier.cost.layers import ActivationShape, AxisGroup
from ranvier.cost.matrix_optimizers import MatrixRuleCost
from ranvier.errors import ShardingError
from ranvier.grid import Axis, Grid
from ranvier.models.recurrence import ONE_CALL, LayerCalls
from ranvier.nn.compile import CompiledBlocks
from ranvier.nn.compile_fallback import CompileFallback
from ranvier.nn.embedding import Embedding
from ranvier.nn.fused_linear import FusedLinear
from ranvier.nn.layer import ParallelLayer, StepContext
from ranvier.nn.lm_head import LMHead
from ranvier.nn.moe.layer import ROUTING_STATS
from ranvier.nn.moe.load_balancing import LoadBalancer
from ranvier.pipeline.pipeline import Pipeline
from ranvier.sharding import Dim, ShardedStateDict, ShardingTable, TokenOrder, matrix_dims
from ranvier.trace import Event


class WeightSummary(NamedTuple):
    """Properties of a weight that do not depend on the grid."""

    param_group: ParamGroup
    trainable: bool
    num_elements: int
    dims: tuple[Dim, ...] = ()

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether Muon and Jorge update it, instead of AdamW."""
        return self.param_group == "matrix" and matrix_dims(self.dims) is not None


@dataclass(eq=False)
class ParallelModel:
    """The parallel state of a model: its layers, sharded weights, buckets and pipeline.

    `parallelize` creates it and stores it as `model.parallel`. It gives access to this rank's
    shards (`sharded_state`, `load_full_state`) and predicts the communication of a step (`events`,
    `update_events`).
    """

    grid: Grid
    """The grid of ranks."""
    table: ShardingTable
    """Which axes split each named dim of weights and activations."""
    bucket_scheduler: BucketScheduler
    """The buckets of weights and gradients, and when they communicate."""
    step_context: StepContext
    """State of the current step that all layers share."""
    weights: dict[str, ShardedParameter]
    """The sharded weights of this rank's stages, by name."""
    layers: dict[str, ParallelLayer]
    """The parallel layers of this rank's stages, by name."""
    pipeline: Pipeline
    """The stages of the model on this rank, and their schedule."""
    sizes: Mapping[str, int]
    """Number of units of each named dim."""
    weight_summaries: dict[str, WeightSummary]
    """Properties of every weight of all stages."""
    compiled_blocks: CompiledBlocks | None = None
    """The compiled blocks; None without compilation."""
    compile_fallback: CompileFallback = field(default_factory=CompileFallback)
    """What happens if a block cannot be compiled, or a step cannot be captured."""
    load_balancer: LoadBalancer | None = None
    """Balances the experts of all MoE layers; None for a dense model."""
    recompute_modes: dict[str, Recompute] = field(default_factory=dict)
    """Activation checkpointing mode of each block, in order; read at each call."""
    layer_calls: Callable[[], Mapping[str, LayerCalls]] = dict
    """Returns how often a pass of the current step calls layers that it does not call once, by
    name of the layer or its block."""
    token_order: ContextOrder = "balanced"
    """Which tokens of a sample the ranks of context get, where samples are split here."""
    samples_seen: int = 0
    """Training samples in full batches so far; dropout depends on the index of a sample."""
    parts_checked: bool = False
    """Whether the inputs of the current call are already checked or need no check."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks on this stage, in order."""
        return tuple(self.recompute_modes)

    def block_of(self, name: str) -> str:
        """Returns the block of a layer or weight, or "" if it is outside of all blocks."""
        return enclosing_block(name, self.recompute_modes)

    def __post_init__(self) -> None:
        """Creates the process groups that a step uses in addition to the groups of the layers."""
        # Creating groups is collective, so it is done here on all ranks, not lazily in a step.
        for axis in (self.token_axis, world_axis(self.grid), self.grid.axis("pipe")):
            assert axis.size == 1 or not self.grid.connected or axis.group is not None, axis

    @property
    def token_axis(self) -> Axis:
        """The axis over which token losses differ; the loss of the batch is the sum over it."""
        region = self.table.activation_rule("vocab")
        return self.grid.axis(*region["batch"], *region["seq"])

    @property
    def communicating_layers(self) -> dict[str, ParallelLayer]:
        """Layers that communicate themselves; members of a `FusedLinear` communicate through it."""
        together = {name for name, leaf in self.layers.items() if isinstance(leaf, FusedLinear)}
        return {n: leaf for n, leaf in self.layers.items() if n.rpartition(".")[0] not in together}

    @property
    def data_dependent_layers(self) -> frozenset[str]:
        """Layers whose communication volume depends on the routing of tokens."""
        expert = self.grid.degrees["expert"] > 1
        return frozenset(
            self.load_balancer.layer_names if expert and self.load_balancer is not None else ()
        )

    def sharded_state(self) -> ShardedStateDict:
        """Returns this rank's shard of every parameter, as (tensor, shard) by name."""
        self.bucket_scheduler.wait_for_updates()
        state = {name: (weight.storage, weight.shard) for name, weight in self.weights.items()}
        if self.load_balancer is None:
            return state
        return {**state, **self.load_balancer.sharded_state}

    def load_full_state(self, whole: Mapping[str, Tensor]) -> None:
        """Loads this rank's shards from full tensors.

        Args:
            whole: The full tensor of every weight, by name. Other entries are ignored.

        Raises:
            ShardingError: A weight is missing.
        """
        missing = sorted(set(self.weights) - set(whole))
        if missing:
            raise ShardingError(
                f"The state has no values for {len(missing)} weights: {', '.join(missing)}. "
                "It must contain every weight. Load the state of the same model."
            )
        self.bucket_scheduler.wait_for_updates()
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.storage.copy_(weight.shard.slice_from(whole[name]))
            for name, (bias, _) in (
                self.load_balancer.sharded_state if self.load_balancer else {}
            ).items():
                # Router biases start from zero if the state has none, e.g. from a dense model.
                bias.copy_(whole.get(name, torch.zeros_like(bias)))
        # The optimizer compares this counter and refreshes its master weights at the next step.
        self.bucket_scheduler.load_count += 1
        self.bucket_scheduler.begin_step("")

    def events(
        self,
        flow: ActivationShape,
        *,
        micro_batches: int = 1,
        token_orders: Sequence[tuple[TokenOrder, ...]] = (),
    ) -> list[Event]:
        """Predicts the communication of the forward and backward passes of a step.

        Args:
            flow: The shape of the activations of one micro-batch.
            micro_batches: Number of micro-batches per step.
            token_orders: Order of the tokens over context of the samples of each micro-batch.
        """
        flows = [replace(flow, token_orders=orders) for orders in token_orders]
        passes = sum((self._pass_events(one) for one in flows), start=list[Event]())
        if not flows:
            passes = self._pass_events(flow) * micro_batches
        gathers, scatters = self._depth_events()
        if self.bucket_scheduler.keep_unsharded:
            # Unsharded weights are kept, so they are gathered once per step.
            kept = 1
        else:
            kept = micro_batches
        return passes + scatters * micro_batches + gathers * kept

    def _pass_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the communication of layers and stages for a micro-batch."""
        events: list[Event] = []
        calls = self.layer_calls()
        for name, leaf in self.communicating_layers.items():
            times = calls_of(name, calls)
            events += leaf.forward_events(flow) * int(times.without_grad)
            events += leaf.events(flow, recomputed=self._is_recomputed(name)) * int(times.with_grad)
        return events + self.pipeline.micro_batch_events(flow)

    def _is_recomputed(self, name: str) -> bool:
        """Whether activation checkpointing repeats the communication of a layer."""
        if self.step_context.save_policy.saves_layer(name):
            return False
        return self.recompute_modes.get(self.block_of(name), "none") != "none"

    def _depth_events(self) -> tuple[list[Event], list[Event]]:
        """Returns the weight gathers (forward, then backward) and gradient reductions per pass.

        Embedding and head need their weights in forward only. The gradients of a bucket are
        reduced once.
        """
        queue = self.bucket_scheduler
        line = AxisGroup(queue.gather_axis.names, queue.gather_axis.size)
        if line.size == 1:
            return [], []
        forward = self._block_use_order(lambda leaf: True)
        alone = self.pipeline.executor.stage.num_stages == 1
        # With a single stage backward starts right after the head, whose weights are still
        # gathered.
        once = Embedding if alone else (Embedding, LMHead)
        backward = self._block_use_order(lambda leaf: not isinstance(leaf, once))[::-1]
        split = [bucket.traffic for bucket in queue.buckets if bucket.is_gathered]
        gathers = [
            spec.weight_gather_event(bulk, line, self._element_sizes)
            for block in spec.blocks_to_gather(
                forward, backward, alone=alone, keep=queue.keep_unsharded
            )
            for bulk in split
            if bulk.block == block
        ]
        reduced = [bulk for bulk in split if bulk.trainable and not bulk.reduce_at_step_end]
        return gathers, [
            spec.grad_scatter_event(bulk, line, self._element_sizes) for bulk in reduced
        ]

    @property
    def _element_sizes(self) -> ElementSizes:
        wide = self.bucket_scheduler.reduce_dtype.itemsize
        return ElementSizes(
            next((b.data.element_size() for b in self.bucket_scheduler.buckets), wide), wide
        )

    def _block_use_order(self, which: Callable[[ParallelLayer], bool]) -> list[str]:
        """Returns the blocks in the order in which layers use their depth-sharded weights."""
        leaves = [leaf for leaf in self.layers.values() if which(leaf)]
        weights = [weight for leaf in leaves for weight in leaf.handles.values()]
        return [weight.bucket.name for weight in weights if weight.is_gathered]

    def update_events(
        self, *, votes: int = 0, matrix_rule: MatrixRuleCost | None = None
    ) -> list[Event]:
        """Predicts the communication of the optimizer step: gradients, norm, updated weights.

        Args:
            votes: How many more numbers are reduced together with the gradient norm.
            matrix_rule: The rule of hidden matrices, if it needs them whole.
        """
        queue = self.bucket_scheduler
        depth = AxisGroup(queue.gather_axis.names, queue.gather_axis.size)
        found = [
            event
            for bucket in queue.buckets
            for event in spec.optimizer_step_events(bucket.traffic, depth, self._element_sizes)
        ]
        if matrix_rule is not None:
            specs = [bucket.spec for bucket in queue.buckets]
            owners = MatrixOwners.assign(specs, self.grid.degrees, matrix_rule)
            found += owners.events(self.grid.axis_without_group(*OWNER_AXES).index)
        if self.load_balancer is not None and self.load_balancer.axis.size > 1:
            numbers = len(self.load_balancer.layer_names) * (
                self.load_balancer.num_experts + len(ROUTING_STATS)
            )
            # Loads and routing statistics are summed as 8-byte numbers.
            found.append(Event("all_reduce", self.load_balancer.axis.names, numbers * 8, "experts"))
        return found + spec.grad_norm_events(self.grid.degrees, self._element_sizes, votes=votes)


def find_blocks(model: nn.Module) -> list[str]:
    """Returns the names of the blocks of a model, i.e. the elements of its module lists."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return [f"{path}.{i}" for path, blocks in lists for i in range(len(blocks))]


def enclosing_block(name: str, blocks: Container[str]) -> str:
    """Returns the innermost block that contains a layer or weight, or "" if there is none."""
    while name := name.rpartition(".")[0]:
        if name in blocks:
            return name
    return ""


def calls_of(name: str, calls: Mapping[str, LayerCalls]) -> LayerCalls:
    """Returns the calls of a layer; those of a block are the calls of its layers."""
    found = calls.get(name) or calls.get(enclosing_block(name, calls))
    return found or ONE_CALL


def get_parallel_model(model: nn.Module) -> ParallelModel:
    """Returns the `ParallelModel` of a model."""
    parallel = model.parallel
    assert isinstance(parallel, ParallelModel), type(model)
    return parallel
