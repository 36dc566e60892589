"""Communicators that a rank creates in a run, and the device memory they take; imports no torch.

A rank creates one communicator for each line of ranks and channel that its steps communicate over,
at the start of a run (`grid`). All stages of a pipeline build the whole model before they keep
their parts, so each rank creates the communicators of all layers. Lines with the same ranks share
one: data·depth is data if depth is 1. An NCCL communicator takes device memory outside of the
caching allocator; messages between the hosts of stages use Gloo and take none.

Not handled: pruned runs, which create one more over all axes but pipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ranvier.buckets import spec
from ranvier.buckets.matrix_owners import OWNER_AXES
from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import ActivationShape
from ranvier.cost.optimizer import ADAMW, OptimizerSpec
from ranvier.pipeline.traffic import STAGE_AXES, channel_links
from ranvier.planner.comm_volume import CACHE_SIZE, ShardingKey, block_param_specs, pass_volumes
from ranvier.planner.model_spec import ModelSpec
from ranvier.sharding import Sharding

MIB = 2**20
FIRST_BYTES = 190 * MIB
FURTHER_BYTES = 20 * MIB
KERNEL_BYTES = 160 * MIB
PEER_BYTES = 10 * MIB
"""Device memory of a process's first communicator, of each further one, of NCCL's kernels, which
the first collective loads, and of the connection to each point-to-point peer. Measured with torch
2.11 and NCCL 2.28.9 on an H200: 8 ranks on one GPU, sockets between them, NCCL_RUNTIME_CONNECT=0.
`ranvier doctor` measures all but the last on other machines."""
HOST_CHANNEL = "host"
CONTROL_CHANNEL = "control"
"""Channels of `grid`, repeated here because it imports numpy: the next job inside a stage, and
control messages between the hosts of stages."""
GLOO_CHANNELS = (HOST_CHANNEL, CONTROL_CHANNEL)
"""Channels that use Gloo."""
DEPTH_CHANNELS = ("gather", "scatter")
"""Channels over depth: for weights and for their gradients."""
ROUTING_AXES = tuple(axis for axis in AXES if axis != "col")
"""Axes whose ranks route different tokens or have different layers."""

Backend = Literal["nccl", "gloo"]
ChannelUse = tuple[Mapping[str, int], str, int]
"""Ranks of each axis of a line, the channel, and the number of point-to-point peers."""


@dataclass(frozen=True)
class CommunicatorSpec:
    """A communicator of a plan."""

    degrees: tuple[tuple[str, int], ...]
    """Its axes, and the number of ranks of each."""
    channel: str
    """Name of the channel; empty for collectives."""
    peers: int = 0
    """Number of point-to-point peers."""

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Its axes, outermost first."""
        return tuple(axis for axis, _ in self.degrees)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(ranks for _, ranks in self.degrees)

    @property
    def backend(self) -> Backend:
        """The backend on GPUs."""
        if self.channel in GLOO_CHANNELS:
            return "gloo"
        return "nccl"


def list_communicators(
    model: ModelSpec, plan: Plan, *, stage: int = 0, optimizer: OptimizerSpec = ADAMW
) -> tuple[CommunicatorSpec, ...]:
    """Returns the communicators of a rank of a stage in a run on GPUs, for a resolved plan."""
    return _list_communicators(
        model,
        ShardingKey.from_plan(plan),
        plan.virtual_stages,
        stage,
        optimizer.matrix_rule is not None,
    )


def communicator_bytes(count: int, peers: int = 0) -> int:
    """Returns the device memory of a rank with `count` NCCL communicators.

    peers: number of point-to-point peers, summed over all communicators.
    """
    if count == 0:
        return 0
    return FIRST_BYTES + KERNEL_BYTES + (count - 1) * FURTHER_BYTES + peers * PEER_BYTES


def worst_stage(model: ModelSpec, plan: Plan) -> int:
    """Returns the stage whose communicators take most device memory."""
    return _worst_stage(model, ShardingKey.from_plan(plan), plan.virtual_stages)


def worst_stage_bytes(model: ModelSpec, plan: Plan, optimizer: OptimizerSpec = ADAMW) -> int:
    """Returns the device memory of the communicators of a rank on the worst stage."""
    stage = worst_stage(model, plan)
    return total_bytes(list_communicators(model, plan, stage=stage, optimizer=optimizer))


@lru_cache(CACHE_SIZE)
def _worst_stage(model: ModelSpec, spot: ShardingKey, chunks: int) -> int:
    count = spot.degrees[AXES.index("pipe")]
    # The stages between the ends are alike, so one of them is enough.
    stages = dict.fromkeys((0, count // 2, count - 1))
    return max(
        stages, key=lambda stage: total_bytes(_list_communicators(model, spot, chunks, stage))
    )


def total_bytes(made: Iterable[CommunicatorSpec]) -> int:
    """Returns the device memory of all communicators of a rank."""
    nccl = [one for one in made if one.backend == "nccl"]
    return communicator_bytes(len(nccl), sum(one.peers for one in nccl))


def pipe_peers(stage: int, count: int, *, chunks: int, spread: bool) -> dict[str, int]:
    """Returns the number of other stages that a stage sends to or receives from, by channel."""
    return {
        # sender + to - stage is the other end of a link of this stage.
        channel: len({sender + to - stage for sender, to in pairs if stage in (sender, to)})
        for channel, pairs in channel_links(count, chunks, spread=spread).items()
    }


@lru_cache(CACHE_SIZE)
def _list_communicators(
    model: ModelSpec, spot: ShardingKey, chunks: int, stage: int, exchanges_matrices: bool = False
) -> tuple[CommunicatorSpec, ...]:
    found: dict[tuple[tuple[tuple[str, int], ...], str], CommunicatorSpec] = {}
    for counts, channel, peers in _channel_uses(model, spot, chunks, stage, exchanges_matrices):
        degrees = tuple((axis, counts[axis]) for axis in AXES if counts.get(axis, 1) > 1)
        # A line of one rank needs no communicator.
        if degrees:
            before = found.get((degrees, channel), CommunicatorSpec(degrees, channel))
            found[degrees, channel] = replace(before, peers=max(before.peers, peers))
    return tuple(found.values())


def _channel_uses(
    model: ModelSpec, spot: ShardingKey, chunks: int, stage: int, exchanges_matrices: bool
) -> Iterator[ChannelUse]:
    """Yields all lines that steps communicate over; a line may occur several times."""
    ground = spot.layout_context(model)
    degrees = ground.degrees
    region = ground.table.activation_rule("vocab")

    def along(*axes: str) -> dict[str, int]:
        return {axis: degrees[axis] for axis in axes}

    # All ranks: gradient norm and flags.
    yield along(*AXES), "", 0
    if degrees["pipe"] > 1:
        yield along("pipe"), "", 0
        near = pipe_peers(stage, degrees["pipe"], chunks=chunks, spread=spot.vocab_over_pipe)
        for channel in (*near, CONTROL_CHANNEL):
            yield along("pipe"), channel, near.get(channel, 0)
        yield along(*STAGE_AXES), HOST_CHANNEL, 0
        # First and last stage reduce the gradient of tied embeddings with each other.
        if (
            model.has_tied_embeddings
            and not spot.vocab_over_pipe
            and stage in (0, degrees["pipe"] - 1)
        ):
            yield {"pipe": 2}, "", 0
    if exchanges_matrices:
        ranks = along(*OWNER_AXES)
        yield ranks, "", math.prod(ranks.values()) - 1
    # Weights and gradients, token counts, router statistics, activations, replicated weights.
    for channel in DEPTH_CHANNELS:
        yield along(*ground.table.gather_axes), channel, 0
    yield along(*region["batch"], *region["seq"]), "", 0
    if any(part.layers_of_kind("mixture") for part in model.parts):
        yield along(*ROUTING_AXES), "", 0
    for axes, peers in _activation_axes(model, spot.activation_key):
        yield along(*axes), "", peers
    for sharding in _distinct_shardings(model, spot.weight_key):
        yield along(*spec.replica_axis(sharding, degrees).names), "", 0
        yield spec.shared_ranks(sharding, degrees), "", 0


@lru_cache(CACHE_SIZE)
def _activation_axes(
    model: ModelSpec, inside: ShardingKey
) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Returns the axes over which layers communicate activations, and the peers in all-to-alls."""
    degrees = dict(zip(AXES, inside.degrees, strict=True))
    # The sizes do not matter, but each rank must have some tokens.
    tokens = degrees["context"] * degrees["row"] * degrees["col"]
    flow = ActivationShape(tokens, tokens, itemsize=2, statistics_itemsize=4)
    found = dict[tuple[str, ...], int]()
    for part in model.parts:
        for row in pass_volumes(model, part, inside, flow):
            if row.op == "all_to_all":
                peers = math.prod(degrees[axis] for axis in row.axis) - 1
            else:
                peers = 0
            found[row.axis] = max(found.get(row.axis, 0), peers)
    return tuple(found.items())


@lru_cache(CACHE_SIZE)
def _distinct_shardings(model: ModelSpec, shards: ShardingKey) -> tuple[Sharding, ...]:
    """Returns one weight's sharding for each set of ranks that hold the same shard."""
    degrees = dict(zip(AXES, shards.degrees, strict=True))
    pieces = (piece for part in model.parts for piece in block_param_specs(model, part, shards))
    found = {
        (x.split_axes, tuple(spec.shared_ranks(x, degrees).items())): x
        for x in (piece.sharding for piece in pieces)
    }
    return tuple(found.values())
