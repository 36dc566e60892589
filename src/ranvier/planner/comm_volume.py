"""Moves: everything that a rank communicates in a step, in closed form, without torch.

The same formulas as those of a parallel model (`layers`, `products`, `lots`, `pipeline.messages`),
asked once for each kind of block and counted for all. What depends on a few numbers only is kept,
so that layouts which share them share the work. `Parallel.events` and a dry run say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ranvier.buckets import spec
from ranvier.buckets.spec import VECTORS, BucketSpec, ElementSizes, ParamSpec
from ranvier.config.plan import AXES, Dispatch, InnerSplit, Plan
from ranvier.cost.layers import ActivationShape, LayerCost, LayoutContext
from ranvier.pipeline import traffic
from ranvier.pipeline.balance import part_ranges, partition_by_cost
from ranvier.pipeline.policy import PipelineShape, SchedulingPolicy
from ranvier.pipeline.traffic import StageSpec
from ranvier.planner.model_spec import EXIT, BlockSpec, LayerSpec, ModelSpec
from ranvier.sharding import ShardingTable
from ranvier.trace import Event

CommPhase = Literal["forward", "again", "backward", "gather", "scatter", "update", "pipe", "step"]
"""Activations forward, in a second forward pass, and backward; weights gathered over depth, and
their gradients reduced over it; gradients, norm and weights of the update; messages between stages;
numbers of the step."""
STEP_VOTES = 3
"""Numbers that a training step has voted on, besides the norm."""
TOKEN_COUNT_BYTES = 8
"""Bytes of the number of tokens of a step."""
ROUTER_COUNTERS = 4
ROUTER_COUNTER_BYTES = 8
"""Numbers of each mixture in a step besides the load of each expert, and bytes of one."""
CACHE_SIZE = 1 << 16
"""Results that are kept of each kind."""


class CommVolume(NamedTuple):
    """Equal communications of a rank in a step."""

    part: str
    """Name of the part of the model; empty: of no part."""
    phase: CommPhase
    op: str
    axis: tuple[str, ...]
    bytes: int
    """Of the whole (gathered or reduced) tensor, of each of them."""
    count: int  # type: ignore[assignment]
    where: str = ""


@dataclass(frozen=True)
class StepCommVolume:
    """All communication of a rank in a step."""

    rows: tuple[CommVolume, ...]

    def bytes_by_axis(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes by operation and axis."""
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for row in self.rows:
            total[row.op, row.axis] += row.bytes * row.count
        return dict(total)

    def volumes_of_phases(self, *phases: CommPhase) -> list[CommVolume]:
        """Those of some phases."""
        return [row for row in self.rows if row.phase in phases]


class ShardingKey(NamedTuple):
    """What the shards of a rank depend on: hashable, to keep results by."""

    degrees: tuple[int, ...]
    """Of all axes, outermost first."""
    col_splits: InnerSplit
    vocab_over_pipe: bool
    dispatch: Dispatch = "same"

    @classmethod
    def from_plan(cls, plan: Plan) -> ShardingKey:
        """That of a plan."""
        degrees = tuple(getattr(plan, axis) for axis in AXES)
        return cls(degrees, plan.inner, plan.spread, plan.dispatch)

    def with_degrees(self, **degrees: int) -> ShardingKey:
        """With other degrees, where these do not matter."""
        return self._replace(
            degrees=tuple(degrees.get(axis, n) for axis, n in zip(AXES, self.degrees, strict=True))
        )

    def layout_context(self, model: ModelSpec) -> LayoutContext:
        """What layers ask."""
        degrees = dict(zip(AXES, self.degrees, strict=True))
        return LayoutContext(
            degrees,
            ShardingTable(self.col_splits, self.vocab_over_pipe),
            model.units,
            self.dispatch,
        )

    @property
    def weight_key(self) -> ShardingKey:
        """What the shards of weights depend on."""
        return _collapse_axes(self, "data")

    @property
    def activation_key(self) -> ShardingKey:
        """What activations depend on: no replicas, and stages only where they split words."""
        return _collapse_axes(self, "data", "depth")


@lru_cache(CACHE_SIZE)
def _collapse_axes(spot: ShardingKey, *axes: str) -> ShardingKey:
    """A spot with one rank on these axes, and on pipe unless stages split words."""
    other = () if spot.vocab_over_pipe else ("pipe",)
    return spot.with_degrees(**dict.fromkeys((*axes, *other), 1))


# ---- parts on a rank --------------------------------------------------------------------


@lru_cache(CACHE_SIZE)
def build_layers(model: ModelSpec, part: BlockSpec, spot: ShardingKey) -> tuple[LayerCost, ...]:
    """The layers of a part; spot: its `inside` is enough."""
    ground = spot.layout_context(model)
    return tuple(leaf.build_layer("", ground) for leaf in part.layers)


@lru_cache(CACHE_SIZE)
def _pass_events(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape
) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """What a part communicates forward and backward in a micro-batch."""
    layers = build_layers(model, part, spot)
    forward = tuple(event for layer in layers for event in layer.forward_events(flow))
    return forward, tuple(event for layer in layers for event in layer.backward_events(flow))


@lru_cache(CACHE_SIZE)
def forward_flops(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape
) -> int:
    """Multiplications and additions of the forward pass of one such part."""
    return sum(layer.flops(flow) for layer in build_layers(model, part, spot))


@lru_cache(CACHE_SIZE)
def block_param_specs(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey
) -> tuple[ParamSpec, ...]:
    """The weights of one such part; those of blocks are of the block `part.name`."""
    ground = spot.layout_context(model)
    block = part.name if part.is_block else ""
    return tuple(piece for leaf in part.layers for piece in leaf.param_specs("", block, ground))


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The parts of a rank: of each kind how many, and in which order."""

    stage_spec: StageSpec
    blocks: tuple[BlockSpec, ...]
    """Its parts, one after the other; equal blocks are there several times."""
    block_counts: tuple[tuple[BlockSpec, int], ...]
    """Each kind of part and how many of it."""


@lru_cache(CACHE_SIZE)
def build_stage_blocks(
    model: ModelSpec, stage: int, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> StageBlocks:
    """The parts of a stage. firsts: first part of each virtual stage."""
    every = model.parts_in_order
    seat = StageSpec(stage, count, chunks, spread)
    order = [part for one in part_ranges(firsts, len(every))[stage::count] for part in every[one]]
    if spread and count > 1:  # embedding and head are everywhere
        if every[0] not in order:
            order.insert(0, _vocab_part(every[0]))
        if every[-1] not in order:
            order.append(_vocab_part(every[-1]))
    return StageBlocks(seat, tuple(order), tuple(Counter(order).items()))


def build_all_stages(model: ModelSpec, plan: Plan, seq: int) -> list[StageBlocks]:
    """All stages of a plan."""
    firsts = find_stage_starts(model, plan, seq)
    shape = plan.pipe, plan.chunks, firsts, plan.spread
    return [build_stage_blocks(model, i, *shape) for i in range(plan.pipe)]


def distinct_stages(model: ModelSpec, plan: Plan, seq: int) -> tuple[StageBlocks, ...]:
    """Of the stages of a plan one of each kind, the first with its parts."""
    firsts = find_stage_starts(model, plan, seq)
    return _distinct_stages(model, plan.pipe, plan.chunks, firsts, plan.spread)


@lru_cache(CACHE_SIZE)
def _distinct_stages(
    model: ModelSpec, count: int, chunks: int, firsts: tuple[int, ...], spread: bool
) -> tuple[StageBlocks, ...]:
    found = dict[frozenset[tuple[BlockSpec, int]], StageBlocks]()
    for i in range(count):
        stage = build_stage_blocks(model, i, count, chunks, firsts, spread)
        found.setdefault(frozenset(stage.block_counts), stage)
    return tuple(found.values())


@lru_cache(CACHE_SIZE)
def _vocab_part(part: BlockSpec) -> BlockSpec:
    """What of an entry or exit a stage has that shares the vocabulary only."""
    leaves = [leaf for leaf in part.layers if leaf.dims[:1] == ("vocab",)]
    return replace(part, layers=tuple(leaves))


def find_stage_starts(model: ModelSpec, plan: Plan, seq: int) -> tuple[int, ...]:
    """First part of each virtual stage: as the plan says, or balanced by the work of the parts."""
    if plan.pipe == 1:
        return (0,)
    if plan.stages:
        return (0, *plan.stages)
    inside = ShardingKey.from_plan(plan).activation_key
    return _balance_stages(model, inside, plan.pipe * plan.chunks, seq)


@lru_cache(CACHE_SIZE)
def _balance_stages(
    model: ModelSpec, inside: ShardingKey, virtual: int, seq: int
) -> tuple[int, ...]:
    return partition_by_cost(_part_costs(model, inside, seq), virtual)


@lru_cache(CACHE_SIZE)
def _part_costs(model: ModelSpec, inside: ShardingKey, seq: int) -> tuple[float, ...]:
    """Work of each part on a few samples, as `pipeline.stage` has it."""
    degrees = dict(zip(AXES, inside.degrees, strict=True))
    flow = ActivationShape(degrees["row"] * degrees["col"], seq, itemsize=2, statistics_itemsize=4)
    costs = [1.0 + forward_flops(model, part, inside, flow) for part in model.parts_in_order]
    if inside.vocab_over_pipe:  # the head is no matter of the last stage alone
        costs[-1] = 1.0
    return tuple(costs)


# ---- weights ----------------------------------------------------------------------------


@lru_cache(CACHE_SIZE)
def stage_bucket_specs(
    model: ModelSpec, stage: StageBlocks, spot: ShardingKey
) -> tuple[tuple[str, BucketSpec, int], ...]:
    """Name of the part, lot, and how many equal ones there are, of all weights of a stage."""
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    found = []
    vectors = list[ParamSpec]()
    for part, count in stage.block_counts:
        pieces = block_param_specs(model, part, spot.weight_key)
        if not part.is_block:
            pieces = tuple(_mark_tied_params(pieces, model, stage, part.name == EXIT))
        vectors += [replace(one, repeats=count) for one in pieces if one.block == VECTORS]
        matrices = [one for one in pieces if one.block != VECTORS]
        found += [(part.name, lot, count) for lot in spec.build_bucket_specs(matrices, degrees)]
    return *found, *((VECTORS, lot, 1) for lot in spec.build_bucket_specs(vectors, degrees))


def _mark_tied_params(
    pieces: Iterable[ParamSpec], model: ModelSpec, stage: StageBlocks, leaving: bool
) -> Iterable[ParamSpec]:
    """The weights of an entry or exit: a tied one is there once, or on two stages."""
    owner = next((leaf.tied for leaf in model.parts[-1].layers if leaf.tied), "")
    both = stage.stage_spec.num_stages == 1 or stage.stage_spec.vocab_over_pipe
    for piece in pieces:
        if piece.name != f"{owner}.weight" or not owner:
            yield piece
        elif not both:
            yield replace(piece, other_stages=(0, stage.stage_spec.num_stages - 1))
        elif not leaving:
            yield replace(piece, is_tied=True)


@lru_cache(CACHE_SIZE)
def count_gathers(model: ModelSpec, stage: StageBlocks, keep: bool) -> dict[tuple[str, str], int]:
    """How often the weights of a part (and of a layer outside of blocks) are gathered."""
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
                names.setdefault(block, (part.name, own))  # a tied weight is the first one's
                forward.append(block)
                backward += [block] if leaf.kind not in once else []
    found: Counter[tuple[str, str]] = Counter()
    for block in spec.blocks_to_gather(forward, backward[::-1], alone=alone, keep=keep):
        found[names[block]] += 1
    return dict(found)


def _has_matrix(leaf: LayerSpec) -> bool:
    """Whether a layer has a weight that depth splits."""
    return leaf.kind in ("linear", "siblings", "apart", "head", "embedding", "mixture")


# ---- all of a step ----------------------------------------------------------------------


def step_comm_volume(
    model: ModelSpec,
    plan: Plan,
    flow: ActivationShape,
    *,
    stage: int = 0,
    kept: bool = False,
    orders: int | None = None,
) -> StepCommVolume:
    """All communication of a step on a rank of a stage, of a settled plan.

    flow: of a micro-batch. kept: blocks that compute again keep what they communicated. orders: how
    often a stage's leader says what is next; None: as the policy of the plan does, which may have
    to be simulated first.
    """
    spot = ShardingKey.from_plan(plan)
    micros = plan.num_micro_batches
    here = build_stage_blocks(
        model, stage, plan.pipe, plan.chunks, find_stage_starts(model, plan, flow.seq), plan.spread
    )
    rows = _activation_volumes(
        model, here, spot, flow, micros, plan.recompute != "none" and not kept
    )
    rows += _weight_volumes(model, here, spot, flow, micros, plan.gathered == "keep")
    ground = spot.layout_context(model)
    types = element_sizes(flow)
    size = traffic.message_bytes(ground, flow)
    rows += _count_events("", "pipe", traffic.micro_batch_events(here.stage_spec, size), micros)
    region = ground.table.activation_rule("vocab")
    tokens = ground.axis_group(*region["batch"], *region["seq"])
    numbers = [
        Event("all_reduce", tokens.names, n, "step") for n in (TOKEN_COUNT_BYTES, types.grad_bytes)
    ]
    rows += _count_events("", "step", numbers if tokens.size > 1 else [], 1)
    rows += _count_events("", "update", _router_load_events(model, ground), 1)
    inside = ground.axis_group(*traffic.STAGE_AXES).names
    if orders is None:
        if plan.pipe > 1 and inside:
            orders = _count_orders(model, plan, flow.seq, here.stage_spec)
        else:
            orders = 0
    last = traffic.step_events(here.stage_spec, inside, types.grad_bytes, orders=orders)
    return StepCommVolume((*rows, *_count_events("", "step", last, 1)))


def _router_load_events(model: ModelSpec, ground: LayoutContext) -> list[Event]:
    """What all routers did in a step, summed over all ranks with other tokens or layers."""
    found = [(part.count, leaf) for part in model.parts for leaf in part.layers_of_kind("mixture")]
    axes = ground.axis_group(*(axis for axis in AXES if axis != "col"))
    if not found or axes.size == 1:
        return []
    numbers = sum(count * (leaf.shape[0] + ROUTER_COUNTERS) for count, leaf in found)
    return [Event("all_reduce", axes.names, numbers * ROUTER_COUNTER_BYTES, "experts")]


def element_sizes(flow: ActivationShape) -> ElementSizes:
    """Bytes of weights, and of gradients being reduced."""
    return ElementSizes(flow.itemsize, max(flow.itemsize, 4))


def _count_events(
    part: str, phase: CommPhase, events: Sequence[Event], times: int
) -> list[CommVolume]:
    """Events that come `times` times, equal ones together."""
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
    """What passes communicate."""
    rows = list[CommVolume]()
    inside = spot.activation_key
    for part, count in stage.block_counts:
        for row in pass_volumes(model, part, inside, flow):
            if again or row.phase != "again":
                rows.append(row._replace(count=row.count * count * micros))
    return rows


@lru_cache(CACHE_SIZE)
def pass_volumes(
    model: ModelSpec, part: BlockSpec, spot: ShardingKey, flow: ActivationShape
) -> tuple[CommVolume, ...]:
    forward, backward = _pass_events(model, part, spot, flow)
    again = forward if part.is_block else ()
    return (
        *_count_events(part.name, "forward", forward, 1),
        *_count_events(part.name, "again", again, 1),
        *_count_events(part.name, "backward", backward, 1),
    )


def _weight_volumes(
    model: ModelSpec,
    stage: StageBlocks,
    spot: ShardingKey,
    flow: ActivationShape,
    micros: int,
    keep: bool,
) -> list[CommVolume]:
    """What weights and gradients communicate."""
    rows = list[CommVolume]()
    types = element_sizes(flow)
    degrees = dict(zip(AXES, spot.degrees, strict=True))
    times_of = count_gathers(model, stage, keep)
    for part, phase, event, count in bucket_events(model, stage, spot, types):
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
    """Part, phase, event and number of lots of what each lot communicates once."""
    ground = spot.layout_context(model)
    found = list[tuple[str, CommPhase, Event, int]]()
    depth = ground.axis_group("depth")
    data = ground.axis_group("data")
    for part, lot, count in stage_bucket_specs(model, stage, spot):
        bulk = lot.traffic
        if bulk.is_depth_sharded:
            found.append((part, "gather", spec.weight_gather_event(bulk, depth, types), count))
            if bulk.trainable and not bulk.reduce_at_step_end:
                found.append((part, "scatter", spec.grad_scatter_event(bulk, depth, types), count))
        for event in spec.optimizer_step_events(bulk, depth, data, types):
            found.append((part, "update", event, count))
    return tuple(found)


def _count_orders(model: ModelSpec, plan: Plan, seq: int, seat: StageSpec) -> int:
    """How often a stage's leader says what is next under the policy of a plan."""
    policy = pipeline_policy(model, plan, seq)
    return traffic.count_orders(
        seat,
        plan.num_micro_batches,
        dynamic=policy.is_dynamic,
        split=policy.split_backward,
        rendezvous=False,  # as a dry run has it; over NCCL there are more, on the host
    )


def pipeline_policy(model: ModelSpec, plan: Plan, seq: int) -> SchedulingPolicy:
    """The policy with which the stages of a plan take turns; simulated once."""
    splits = plan.compile != "on" and not plan.spread
    shape = PipelineShape(plan.pipe, plan.num_micro_batches, plan.chunks)
    firsts = find_stage_starts(model, plan, seq)
    inside = ShardingKey.from_plan(plan).activation_key
    costs = _part_costs(model, inside, seq)
    sums = tuple(sum(costs[one]) for one in part_ranges(firsts, len(costs)))
    return _build_policy(plan.policy, shape, sums, plan.jitter, plan.credits, splits)


@lru_cache(CACHE_SIZE)
def _build_policy(
    name: str,
    shape: PipelineShape,
    costs: tuple[float, ...],
    jitter: float,
    limit: int,
    splits: bool,
) -> SchedulingPolicy:
    from ranvier.pipeline.policy_search import (  # the simulator: only for pipelines
        choose_policy,
        expected_times,
    )

    return choose_policy(name, shape, expected_times(costs, jitter), limit=limit, splits=splits)
