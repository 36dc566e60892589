"""Communication volume: everything that a rank communicates in a step, in closed form.

These are the formulas of a parallel model (`cost.layers`, `cost.linear`, `buckets.spec`,
`pipeline.traffic`), evaluated once for each kind of block and multiplied. Results that depend on
few numbers only are cached, so that layouts share them. A `ParallelModel` and a dry run have the
same events. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ranvier.buckets import spec
from ranvier.buckets.matrix_owners import OWNER_AXES, MatrixOwners, exchange_events
from ranvier.buckets.spec import VECTORS, BucketSpec, ElementSizes, ParamSpec
from ranvier.config.plan import (
    AXES,
    ContextAttentionChoice,
    ContextOrder,
    Dispatch,
    InnerSplit,
    Plan,
    WeightSplit,
)
from ranvier.cost.layers import ActivationShape, LayerCost, LayoutContext
from ranvier.cost.linear import LinearCost
from ranvier.cost.matrix_optimizers import MatrixRuleCost
from ranvier.cost.optimizer import ADAMW, OptimizerSpec
from ranvier.pipeline import traffic
from ranvier.pipeline.balance import part_ranges, partition_by_cost
from ranvier.pipeline.policy import PipelineShape, SchedulingPolicy
from ranvier.pipeline.traffic import StageSpec
from ranvier.planner.model_spec import EXIT, BlockSpec, LayerSpec, ModelSpec
from ranvier.sharding import ShardingTable, count_parts
from ranvier.trace import Event

CommPhase = Literal[
    "forward", "recompute", "backward", "gather", "scatter", "update", "pipe", "step"
]
"""Activations in forward, in recomputation (`again`) and in backward; weights gathered over depth,
and their gradients reduced over it; gradients, norm and weights of the optimizer step; messages
between stages; scalars of the step."""
STEP_VOTES = 3
"""Number of flags that a training step reduces together with the gradient norm."""
TOKEN_COUNT_BYTES = 8
"""Bytes of the token count of a step."""
ROUTER_COUNTERS = 4
ROUTER_COUNTER_BYTES = 8
"""Counters of each MoE layer per step in addition to the load of each expert, and bytes of one."""
CACHED_OWNERS = 8
"""Maximum number of layouts whose owners of matrices are cached, as each may be large."""
CACHE_SIZE = 1 << 16
"""Maximum number of cached results of each function."""


class CommVolume(NamedTuple):
    """A number of equal communications of a rank in a step."""

    part: str
    """Name of the part of the model; empty if it does not belong to one."""
    phase: CommPhase
    op: str
    axis: tuple[str, ...]
    bytes: int
    """Bytes of the whole (gathered or reduced) tensor of each communication."""
    count: float  # type: ignore[assignment]
    """A mean over steps if a part runs a random number of times."""
    where: str = ""


@dataclass(frozen=True)
class StepCommVolume:
    """All communication of a rank in a step."""

    rows: tuple[CommVolume, ...]

    def bytes_by_axis(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Returns the bytes by operation and axis."""
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for row in self.rows:
            total[row.op, row.axis] += round(row.bytes * row.count)
        return dict(total)

    def volumes_of_phases(self, *phases: CommPhase) -> list[CommVolume]:
        """Returns the volumes of some phases."""
        return [row for row in self.rows if row.phase in phases]


class ShardingKey(NamedTuple):
    """A hashable cache key of everything that the shards of a rank depend on."""

    degrees: tuple[int, ...]
    """Degrees of all axes, outermost first."""
    col_splits: InnerSplit
    vocab_over_pipe: bool
    dispatch: Dispatch = "model"
    shard_weights_over: WeightSplit = "depth"
    context_attention: ContextAttentionChoice = "auto"
    context_order: ContextOrder = "balanced"
    context_index: int = 0
    """Index of the rank on context; the bytes that it sends depend on its tokens."""

    @classmethod
    def from_plan(cls, plan: Plan) -> ShardingKey:
        """Returns the key of a plan."""
        degrees = tuple(getattr(plan, axis) for axis in AXES)
        options = (plan.vocab_over_pipe, plan.moe_dispatch_dtype, plan.shard_weights_over)
        found = cls(degrees, plan.col_splits, *options)
        # Without context these settings change nothing, so that plans share cached results.
        if plan.context == 1:
            return found._replace(shard_weights_over="depth")
        return found._replace(
            context_attention=plan.context_attention, context_order=plan.token_order
        )

    def with_degrees(self, **degrees: int) -> ShardingKey:
        """Returns a copy with other degrees, to merge keys whose differences do not matter."""
        return self._replace(
            degrees=tuple(degrees.get(axis, n) for axis, n in zip(AXES, self.degrees, strict=True))
        )

    def layout_context(self, model: ModelSpec) -> LayoutContext:
        """Returns the context that layers are built with."""
        degrees = dict(zip(AXES, self.degrees, strict=True))
        return LayoutContext(
            degrees,
            self.table,
            model.units,
            self.dispatch,
            self.context_attention,
            self.context_order,
            self.context_index,
        )

    @property
    def table(self) -> ShardingTable:
        """The sharding rules."""
        return ShardingTable(
            self.col_splits, self.vocab_over_pipe, shard_weights_over=self.shard_weights_over
        )

    @property
    def gather_ranks(self) -> int:
        """Number of ranks over which matrices are gathered before use."""
        return count_parts(self.table.gather_axes, dict(zip(AXES, self.degrees, strict=True)))

    @property
    def weight_key(self) -> ShardingKey:
        """The part of the key that shards of weights depend on."""
        return _collapse_axes(self, "data")

    @property
    def activation_key(self) -> ShardingKey:
        """The part of the key that activations depend on: no replicas, and pipe only if it splits
        the vocabulary."""
        return _collapse_axes(self, "data", "depth")


@lru_cache(CACHE_SIZE)
def _collapse_axes(spot: ShardingKey, *axes: str) -> ShardingKey:
    """Returns a key with one rank on these axes, and on pipe unless it splits the vocabulary."""
    other = () if spot.vocab_over_pipe else ("pipe",)
    return spot.with_degrees(**dict.fromkeys((*axes, *other), 1))


# ---- parts on a rank --------------------------------------------------------------------


@lru_cache(CACHE_SIZE)
def build_layers(model: ModelSpec, part: BlockSpec, spot: ShardingKey) -> tuple[LayerCost, ...]:
    """Returns the layers of a part. The `activation_key` is sufficient as `spot`."""
    ground = spot.layout_context(model)
    return tuple(leaf.build_layer("", ground) for leaf in part.layers)


@lru_cache(CACHE_SIZE)
def _pass_events(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape
) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Returns the communication of a part in forward and backward per micro-batch."""
    both = zip(part.layers, build_layers(model, part, spot), strict=True)
    layers = [layer for leaf, layer in both for _ in range(leaf.calls)]
    forward = tuple(event for layer in layers for event in layer.forward_events(flow))
    return forward, tuple(event for layer in layers for event in layer.backward_events(flow))


@lru_cache(CACHE_SIZE)
def forward_flops(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape
) -> int:
    """Returns the FLOPs of all forward passes of one such part."""
    once = sum(layer.flops(flow) for layer in build_layers(model, part, spot))
    return round(once * part.calls.total)


@lru_cache(CACHE_SIZE)
def block_param_specs(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey
) -> tuple[ParamSpec, ...]:
    """Returns the parameters of one such part. Parameters of blocks belong to block `part.name`."""
    ground = spot.layout_context(model)
    block = part.name if part.is_block else ""
    return tuple(piece for leaf in part.layers for piece in leaf.param_specs("", block, ground))


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The parts of a stage: the number of each kind, and their order."""

    stage_spec: StageSpec
    blocks: tuple[BlockSpec, ...]
    """Its parts in order; equal blocks are repeated."""
    block_counts: tuple[tuple[BlockSpec, int], ...]
    """Each kind of part and its number."""


@lru_cache(CACHE_SIZE)
def build_stage_blocks(
    model: ModelSpec, stage: int, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> StageBlocks:
    """Returns the parts of a stage. firsts: first part of each virtual stage."""
    every = model.parts_in_order
    # Virtual stages are assigned round-robin: stage, stage + count, stage + 2 count, ...
    own = part_ranges(firsts, len(every))[stage::count]
    inputs = [part.num_inputs for part in every]
    seat = StageSpec.from_parts(stage, count, own, inputs, vocab_over_pipe=spread)
    order = [part for one in own for part in every[one]]
    # If the vocabulary is split over pipe, every stage has a shard of embedding and head.
    if spread and count > 1:
        if every[0] not in order:
            order.insert(0, _vocab_part(every[0]))
        if every[-1] not in order:
            order.append(_vocab_part(every[-1]))
    return StageBlocks(seat, tuple(order), tuple(Counter(order).items()))


def build_all_stages(model: ModelSpec, plan: Plan, seq: int) -> list[StageBlocks]:
    """Returns all stages of a plan."""
    firsts = find_stage_starts(model, plan, seq)
    shape = plan.pipe, plan.virtual_stages, firsts, plan.vocab_over_pipe
    return [build_stage_blocks(model, i, *shape) for i in range(plan.pipe)]


def distinct_stages(model: ModelSpec, plan: Plan, seq: int) -> tuple[StageBlocks, ...]:
    """Returns the first stage of each kind."""
    firsts = find_stage_starts(model, plan, seq)
    return _distinct_stages(model, plan.pipe, plan.virtual_stages, firsts, plan.vocab_over_pipe)


@lru_cache(CACHE_SIZE)
def _distinct_stages(
    model: ModelSpec, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> tuple[StageBlocks, ...]:
    found = dict[frozenset[tuple[BlockSpec, int]], StageBlocks]()
    for i in range(count):
        stage = build_stage_blocks(model, i, count, chunks, firsts, spread)
        # The order of parts does not matter for what a stage communicates for its weights.
        found.setdefault(frozenset(stage.block_counts), stage)
    return tuple(found.values())


@lru_cache(CACHE_SIZE)
def _vocab_part(part: BlockSpec) -> BlockSpec:
    """Returns only the vocabulary layers of the embedding or head, which all stages share."""
    leaves = [leaf for leaf in part.layers if leaf.dims[:1] == ("vocab",)]
    return replace(part, layers=tuple(leaves))


def find_stage_starts(model: ModelSpec, plan: Plan, seq: int) -> tuple[int, ...]:
    """Returns the first part of each virtual stage: as given by the plan, or balanced by cost."""
    if plan.pipe == 1:
        return (0,)
    if plan.stage_starts:
        return (0, *plan.stage_starts)
    inside = ShardingKey.from_plan(plan).activation_key
    return _balance_stages(model, inside, plan.pipe * plan.virtual_stages, seq)


@lru_cache(CACHE_SIZE)
def _balance_stages(
    model: ModelSpec, inside: ShardingKey, virtual: int, seq: int
) -> tuple[int, ...]:
    return partition_by_cost(_part_costs(model, inside, seq), virtual)


@lru_cache(CACHE_SIZE)
def _part_costs(model: ModelSpec, inside: ShardingKey, seq: int) -> tuple[float, ...]:
    """Returns the cost of each part on a few samples, as computed by `pipeline.stage`."""
    degrees = dict(zip(AXES, inside.degrees, strict=True))
    # The smallest micro-batch that every split divides; costs matter only relative to each other.
    flow = ActivationShape(degrees["row"] * degrees["col"], seq, itemsize=2, statistics_itemsize=4)
    costs = [1.0 + forward_flops(model, part, inside, flow) for part in model.parts_in_order]
    # Every stage computes a share of the head, so it is not part of the last stage.
    if inside.vocab_over_pipe:
        costs[-1] = 1.0
    return tuple(costs)


# ---- weights ----------------------------------------------------------------------------


@lru_cache(CACHE_SIZE)
def stage_bucket_specs(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey
) -> tuple[tuple[str, BucketSpec, int], ...]:
    """Returns the part's name, bucket, and number of equal buckets, for all parameters of a
    stage.
    """
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    found = []
    vectors = list[ParamSpec]()
    for part, count in stage.block_counts:
        pieces = block_param_specs(model, part, spot.weight_key)
        if not part.is_block:
            pieces = tuple(_mark_tied_params(pieces, model, stage, part.name == EXIT))
        # Vectors of all parts share buckets, so they are collected and bucketed at the end.
        vectors += [replace(one, repeats=count) for one in pieces if one.block == VECTORS]
        matrices = [one for one in pieces if one.block != VECTORS]
        found += [(part.name, lot, count) for lot in spec.build_bucket_specs(matrices, degrees)]
    return *found, *((VECTORS, lot, 1) for lot in spec.build_bucket_specs(vectors, degrees))


@lru_cache(CACHE_SIZE)
def stage_matrix_buckets(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey
) -> tuple[BucketSpec, ...]:
    """Returns the buckets of hidden matrices of a stage in the order of its parts, as on a rank."""
    found: dict[str, list[BucketSpec]] = {}
    for part, lot, _ in stage_bucket_specs(model, stage, spot):
        if lot.has_matrices:
            found.setdefault(part, []).append(lot)
    return tuple(lot for part in stage.blocks for lot in found.get(part.name, ()))


@lru_cache(CACHED_OWNERS)
def stage_matrix_owners(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey, rule: MatrixRuleCost
) -> MatrixOwners:
    """Returns the owners of the hidden matrices of a stage."""
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    return MatrixOwners.assign(stage_matrix_buckets(model, stage, spot), degrees, rule)


@lru_cache(CACHE_SIZE)
def matrix_shapes(model: ModelSpec, part: BlockSpec) -> tuple[tuple[int, int, int], ...]:
    """Returns rows, columns and number of the trainable hidden matrices of each weight of a
    part.
    """
    found = list[tuple[int, int, int]]()
    alone = ShardingKey((1,) * len(AXES), "samples", False)
    for param in block_param_specs(model, part, alone):
        if param.trainable and param.matrix_dims is not None:
            shape = param.sharding.shape
            rows, cols = (shape[dim] for dim in param.matrix_dims)
            found.append((rows, cols, math.prod(shape) // (rows * cols)))
    return tuple(found)


def count_matrix_elements(model: ModelSpec, stage: StageBlocks) -> int:
    """Returns the elements of all trainable hidden matrices of a stage."""
    return sum(
        number * rows * cols * count
        for part, number in stage.block_counts
        for rows, cols, count in matrix_shapes(model, part)
    )


def matrix_events(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    rule: MatrixRuleCost,
    stage_rank: int | None = None,
) -> list[Event]:
    """Returns the exchange of hidden matrices with their owners on a rank of a stage.

    stage_rank: index of the rank among those of the stage. None means the mean of all ranks, which
    needs no assignment of owners: e · elements / ranks without the part that stays on a rank.
    """
    if stage_rank is not None:
        return stage_matrix_owners(model, stage, spot, rule).events(stage_rank)
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    num_ranks = math.prod(degrees[axis] for axis in OWNER_AXES)
    shapes = [(n, one) for part, n in stage.block_counts for one in matrix_shapes(model, part)]
    elements = count_matrix_elements(model, stage)
    return exchange_events(
        degrees,
        rule,
        (elements * (num_ranks - 1) // num_ranks**2,) * 2,
        sum(n * count for n, (_, _, count) in shapes),
    )


def _mark_tied_params(
    pieces: Iterable[ParamSpec], model: ModelSpec, stage: StageBlocks, leaving: bool
) -> Iterable[ParamSpec]:
    """Yields the parameters of embedding or head. A tied one is counted once, or is on two
    stages.
    """
    owner = next((leaf.tied for leaf in model.parts[-1].layers if leaf.tied), "")
    both = stage.stage_spec.num_stages == 1 or stage.stage_spec.vocab_over_pipe
    for piece in pieces:
        # On one stage, or with the vocabulary split over pipe, the entry owns the tied weight and
        # the exit yields none. Otherwise first and last stage hold a copy each.
        if piece.name != f"{owner}.weight" or not owner:
            yield piece
        elif not both:
            yield replace(piece, other_stages=(0, stage.stage_spec.num_stages - 1))
        elif not leaving:
            yield replace(piece, is_tied=True)


@lru_cache(CACHE_SIZE)
def count_gathers(model: ModelSpec, stage: StageBlocks, keep: bool) -> dict[tuple[str, str], int]:
    """Returns how often the weights of each part (and layer outside of blocks) are gathered."""
    # Layers whose backward gathers no weight: the head computes its gradients in forward. Without a
    # pipeline its backward follows directly and shares the gather anyway.
    alone = stage.stage_spec.num_stages == 1
    once = ("embedding",) if alone else ("embedding", "head")
    forward = list[str]()
    backward = list[str]()
    names: dict[str, tuple[str, str]] = {}
    for number, part in enumerate(stage.blocks):
        for leaf in part.layers:
            if part.is_block:
                block = str(number)
            else:
                block = leaf.tied or leaf.name
            if _has_matrix(leaf):
                own = part.name if part.is_block else block
                # A tied weight is counted for the layer that owns it.
                names.setdefault(block, (part.name, own))
                forward.append(block)
                backward += [block] if leaf.kind not in once else []
    found: Counter[tuple[str, str]] = Counter()
    for block in spec.blocks_to_gather(forward, backward[::-1], alone=alone, keep=keep):
        found[names[block]] += 1
    return dict(found)


def _has_matrix(leaf: LayerSpec) -> bool:
    """Returns whether a layer has a weight that is sharded over depth."""
    return leaf.kind in ("linear", "siblings", "apart", "head", "embedding", "mixture")


# ---- all of a step ----------------------------------------------------------------------


def step_comm_volume(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    *,
    stage: int = 0,
    context_index: int = 0,
    kept: bool = False,
    orders: int | None = None,
    optimizer: OptimizerSpec = ADAMW,
    stage_rank: int | None = None,
) -> StepCommVolume:
    """Returns all communication of a step on a rank of a stage, for a resolved plan.

    context_index: index of the rank on context; the bytes that it sends depend on its tokens.
    flow: shape of a micro-batch. kept: recomputed blocks reuse saved results of collectives.
    orders: how often a stage's leader broadcasts the next job; if None, as the plan's policy does,
    which may have to be simulated first. optimizer, stage_rank: as in `matrix_events`.
    """
    spot = ShardingKey.from_plan(plan)._replace(context_index=context_index)
    micros = plan.num_micro_batches
    here = build_stage_blocks(
        model,
        stage,
        plan.pipe,
        plan.virtual_stages,
        find_stage_starts(model, plan, flow.seq),
        plan.vocab_over_pipe,
    )
    # Activations, then weights and gradients, then messages between stages.
    rows = _activation_volumes(
        model, here, spot, flow, micros, plan.recompute != "none" and not kept
    )
    rows += _weight_volumes(model, here, spot, flow, micros, plan.reshard_after == "step")
    ground = spot.layout_context(model)
    types = element_sizes(flow)
    size = traffic.message_bytes(ground, flow)
    messages = traffic.micro_batch_events(here.stage_spec, size, model.streams)
    rows += _count_events("", "pipe", messages, micros)
    # The token count and the loss are summed over all ranks that hold different tokens. Losses have
    # the layout of the logits.
    region = ground.table.activation_rule("vocab")
    tokens = ground.axis_group(*region["batch"], *region["seq"])
    numbers = [
        Event("all_reduce", tokens.names, n, "step") for n in (TOKEN_COUNT_BYTES, types.grad_bytes)
    ]
    rows += _count_events("", "step", numbers if tokens.size > 1 else [], 1)
    rows += _count_events("", "update", _router_load_events(model, ground), 1)
    if optimizer.matrix_rule is not None:
        found = matrix_events(model, here, spot, optimizer.matrix_rule, stage_rank)
        rows += _count_events("", "update", found, 1)
    # Under a dynamic schedule the leader broadcasts its choice to the ranks of its stage.
    inside = ground.axis_group(*traffic.STAGE_AXES).names
    if orders is None:
        if plan.pipe > 1 and inside:
            orders = _count_orders(model, plan, flow.seq, here.stage_spec)
        else:
            orders = 0
    last = traffic.step_events(here.stage_spec, inside, types.grad_bytes, orders=orders)
    return StepCommVolume((*rows, *_count_events("", "step", last, 1)))


def _router_load_events(model: ModelSpec, ground: LayoutContext) -> list[Event]:
    """Returns the router statistics of a step, reduced over all ranks with different tokens or
    layers.
    """
    found = [(part.count, leaf) for part in model.parts for leaf in part.layers_of_kind("mixture")]
    axes = ground.axis_group(*(axis for axis in AXES if axis != "col"))
    if not found or axes.size == 1:
        return []
    # The load of each expert and a few counters, of all MoE layers in one message.
    numbers = sum(count * (leaf.shape[0] + ROUTER_COUNTERS) for count, leaf in found)
    return [Event("all_reduce", axes.names, numbers * ROUTER_COUNTER_BYTES, "experts")]


def element_sizes(flow: ActivationShape) -> ElementSizes:
    """Returns the bytes per element of weights, and of gradients being reduced (at least fp32)."""
    return ElementSizes(flow.itemsize, max(flow.itemsize, 4))


def _count_events(
    part: str, phase: CommPhase, events: Sequence[Event], times: float
) -> list[CommVolume]:
    """Returns events that occur `times` times, with equal ones merged."""
    counts = Counter((event.op, event.axis, event.bytes, event.where) for event in events)
    return [
        CommVolume(part, phase, op, axis, size, count * times, where)
        for (op, axis, size, where), count in counts.items()
    ]


def _activation_volumes(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    flow: ActivationShape,
    micros: int,
    again: bool,
) -> list[CommVolume]:
    """Returns the communication of activations in all passes."""
    rows = list[CommVolume]()
    inside = spot.activation_key
    for part, count in stage.block_counts:
        for row in pass_volumes(model, part, inside, flow):
            if again or row.phase != "recompute":
                rows.append(row._replace(count=row.count * count * micros))
    return rows


@lru_cache(CACHE_SIZE)
def pass_volumes(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape
) -> tuple[CommVolume, ...]:
    """Returns the communication of a part per micro-batch, by phase."""
    forward, backward = _pass_events(model, part, spot, flow)
    # Only blocks are recomputed, without attention over context, whose result is saved, and without
    # pending outputs, which are not needed; embedding and head never are.
    pending = pending_layers(model, part, spot)
    again = tuple(
        event for event in forward if event.axis != ("context",) and event.where not in pending
    )
    if not part.is_block:
        again = ()
    calls = part.calls
    return (
        *_count_events(part.name, "forward", forward, calls.total),
        *_count_events(part.name, "recompute", again, calls.with_grad),
        *_count_events(part.name, "backward", backward, calls.with_grad),
    )


@lru_cache(CACHE_SIZE)
def pending_layers(model: ModelSpec, part: BlockSpec, spot: ShardingKey) -> frozenset[str]:
    """Returns the layers of a part whose reduction runs behind the next module."""
    return frozenset(
        layer.name
        for layer in build_layers(model, part, spot)
        if isinstance(layer, LinearCost) and layer.is_pending
    )


def _weight_volumes(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    flow: ActivationShape,
    micros: int,
    keep: bool,
) -> list[CommVolume]:
    """Returns the communication of weights and gradients."""
    rows = list[CommVolume]()
    types = element_sizes(flow)
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    times_of = count_gathers(model, stage, keep)
    for part, phase, event, count in bucket_events(model, stage, spot, types):
        # Weights are gathered per micro-batch unless they stay gathered; gradients are
        # reduce-scattered per micro-batch; the optimizer step is once per step.
        if phase == "gather":
            times = times_of.get((part, event.where), 0) * (1 if keep else micros)
        else:
            times = count * (micros if phase == "scatter" else 1)
        if times:
            rows.append(
                CommVolume(part, phase, event.op, event.axis, event.bytes, times, event.where)
            )
    return rows + _count_events(
        "", "update", spec.grad_norm_events(degrees, types, votes=STEP_VOTES), 1
    )


@lru_cache(CACHE_SIZE)
def bucket_events(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey, types: ElementSizes
) -> tuple[tuple[str, CommPhase, Event, int], ...]:
    """Returns part, phase, event and number of buckets, for the communication of each bucket."""
    ground = spot.layout_context(model)
    found = list[tuple[str, CommPhase, Event, int]]()
    depth = ground.axis_group(*ground.table.gather_axes)
    for part, lot, count in stage_bucket_specs(model, stage, spot):
        bulk = lot.traffic
        if bulk.is_gathered:
            found.append((part, "gather", spec.weight_gather_event(bulk, depth, types), count))
            # Tied weights are reduced at the end of the step, when both gradients are complete.
            if bulk.trainable and not bulk.reduce_at_step_end:
                found.append((part, "scatter", spec.grad_scatter_event(bulk, depth, types), count))
        for event in spec.optimizer_step_events(bulk, depth, types):
            found.append((part, "update", event, count))
    return tuple(found)


def _count_orders(model: ModelSpec, plan: Plan, seq: int, seat: StageSpec) -> int:
    """Returns how often a stage's leader broadcasts the next job under the policy of a plan."""
    policy = pipeline_policy(model, plan, seq)
    return traffic.count_orders(
        seat,
        plan.num_micro_batches,
        dynamic=policy.is_dynamic,
        split=policy.split_backward,
        # As in a dry run. Over NCCL there are more, on the host.
        rendezvous=False,
    )


def pipeline_policy(model: ModelSpec, plan: Plan, seq: int) -> SchedulingPolicy:
    """Returns the scheduling policy of the stages of a plan. It is simulated once."""
    # Compiled blocks and a vocabulary split over pipe cannot defer weight gradients.
    splits = plan.compile != "on" and not plan.vocab_over_pipe
    shape = PipelineShape(plan.pipe, plan.num_micro_batches, plan.virtual_stages)
    firsts = find_stage_starts(model, plan, seq)
    inside = ShardingKey.from_plan(plan).activation_key
    costs = _part_costs(model, inside, seq)
    # The policy is chosen by a simulation with the cost of each virtual stage.
    sums = tuple(sum(costs[one]) for one in part_ranges(firsts, len(costs)))
    return _build_policy(
        plan.schedule, shape, sums, plan.stage_time_jitter, plan.max_in_flight, splits
    )


@lru_cache(CACHE_SIZE)
def _build_policy(
    name: str,
    shape: PipelineShape,
    costs: tuple[float, ...],
    jitter: float,
    limit: int,
    splits: bool,
) -> SchedulingPolicy:
    # The simulator is only imported for pipelines.
    from ranvier.pipeline.policy_search import (
        choose_policy,
        expected_times,
    )

    return choose_policy(name, shape, expected_times(costs, jitter), limit=limit, splits=splits)
