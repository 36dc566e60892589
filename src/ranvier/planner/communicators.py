"""Communicators: which of them a rank makes in a run, and what they take of its device; no torch.

A rank makes one communicator for each line of ranks and channel that its steps communicate over, at
the start of a run (`grid`). All stages of a pipeline build the whole model before they keep their
parts, so each makes those of all layers. Lines with the same ranks share one: data·depth is data
where depth is 1. Over NCCL a communicator takes device memory that no allocator sees; messages
between the hosts of stages go over Gloo and take none.

Not handled: pruned runs, which make one more over all axes but pipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ranvier.buckets import spec
from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import Flow
from ranvier.pipeline.traffic import INSIDE, links
from ranvier.planner.comm_volume import KEPT, Spot, pass_rows, pieces_of
from ranvier.planner.model_spec import Model

MIB = 2**20
FIRST_BYTES = 190 * MIB
FURTHER_BYTES = 20 * MIB
KERNEL_BYTES = 160 * MIB
PEER_BYTES = 10 * MIB
"""Device memory of a process's first communicator, of each further one, of NCCL's kernels, which
the first collective loads, and of the connection to a rank that is sent to point to point. Measured
with torch 2.11 and NCCL 2.28.9 on an H200: 8 ranks on one GPU, sockets between them,
NCCL_RUNTIME_CONNECT=0. `ranvier doctor` measures all but the last on other machines."""
HOST, CONTROL = "host", "control"
"""Channels of `grid`, which imports numpy: orders inside a stage, and what the hosts of stages tell
each other."""
ON_HOST = (HOST, CONTROL)
"""Channels over Gloo."""
DEPTH = ("gather", "scatter")
"""Channels over depth: of weights and of their gradients."""
BALANCE = tuple(axis for axis in AXES if axis != "col")
"""Axes whose ranks route different tokens, or have other layers."""

Backend = Literal["nccl", "gloo"]
Use = tuple[Mapping[str, int], str, int]
"""Ranks of each axis of a line, the channel, and ranks that are sent to point to point."""


@dataclass(frozen=True)
class CommunicatorSpec:
    """A communicator of a plan."""

    degrees: tuple[tuple[str, int], ...]
    """Its axes, and how many ranks of each."""
    channel: str
    """Empty: that of collectives."""
    peers: int = 0
    """Ranks that are sent to point to point."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its axes, outermost first."""
        return tuple(axis for axis, _ in self.degrees)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(ranks for _, ranks in self.degrees)

    @property
    def backend(self) -> Backend:
        """What carries its messages on GPUs."""
        return "gloo" if self.channel in ON_HOST else "nccl"


def communicators(model: Model, plan: Plan, *, stage: int = 0) -> tuple[CommunicatorSpec, ...]:
    """The communicators of a rank of a stage in a run on GPUs, of a resolved plan."""
    return _communicators(model, Spot.of(plan), plan.chunks, stage)


def communicator_bytes(count: int, peers: int = 0) -> int:
    """Device memory of a rank with so many communicators over NCCL; peers: sum of theirs."""
    if count == 0:
        return 0
    return FIRST_BYTES + KERNEL_BYTES + (count - 1) * FURTHER_BYTES + peers * PEER_BYTES


def worst_stage(model: Model, plan: Plan) -> int:
    """The stage whose ranks have most of their device taken by communicators."""
    return _worst_stage(model, Spot.of(plan), plan.chunks)


def worst_stage_bytes(model: Model, plan: Plan) -> int:
    """Device memory of the communicators of a rank, of the stage that has most."""
    return total_bytes(communicators(model, plan, stage=worst_stage(model, plan)))


@lru_cache(KEPT)
def _worst_stage(model: Model, spot: Spot, chunks: int) -> int:
    count = spot.degrees[AXES.index("pipe")]
    stages = dict.fromkeys((0, count // 2, count - 1))  # those between the ends are alike
    return max(stages, key=lambda stage: total_bytes(_communicators(model, spot, chunks, stage)))


def total_bytes(made: Iterable[CommunicatorSpec]) -> int:
    """Device memory of all communicators of a rank."""
    nccl = [one for one in made if one.backend == "nccl"]
    return communicator_bytes(len(nccl), sum(one.peers for one in nccl))


def pipe_peers(stage: int, count: int, *, chunks: int, spread: bool) -> dict[str, int]:
    """Other stages that one sends to or receives from, by channel."""
    return {
        channel: len({sender + to - stage for sender, to in pairs if stage in (sender, to)})
        for channel, pairs in links(count, chunks, spread=spread).items()
    }


@lru_cache(KEPT)
def _communicators(
    model: Model, spot: Spot, chunks: int, stage: int
) -> tuple[CommunicatorSpec, ...]:
    found: dict[tuple[tuple[tuple[str, int], ...], str], CommunicatorSpec] = {}
    for counts, channel, peers in _uses(model, spot, chunks, stage):
        degrees = tuple((axis, counts[axis]) for axis in AXES if counts.get(axis, 1) > 1)
        if degrees:
            before = found.get((degrees, channel), CommunicatorSpec(degrees, channel))
            found[degrees, channel] = replace(before, peers=max(before.peers, peers))
    return tuple(found.values())


def _uses(model: Model, spot: Spot, chunks: int, stage: int) -> Iterator[Use]:
    """What steps communicate over; the same line may come several times."""
    ground = spot.ground(model)
    degrees, region = ground.degrees, ground.table.region("vocab")

    def along(*axes: str) -> dict[str, int]:
        return {axis: degrees[axis] for axis in axes}

    yield along(*AXES), "", 0
    if degrees["pipe"] > 1:
        yield along("pipe"), "", 0
        near = pipe_peers(stage, degrees["pipe"], chunks=chunks, spread=spot.spread)
        for channel in (*near, CONTROL):
            yield along("pipe"), channel, near.get(channel, 0)
        yield along(*INSIDE), HOST, 0
        if model.tied and not spot.spread and stage in (0, degrees["pipe"] - 1):
            yield {"pipe": 2}, "", 0
    yield along("data"), "", 0
    for channel in DEPTH:
        yield along("depth"), channel, 0
    yield along(*region["batch"], *region["seq"]), "", 0
    if any(part.find("mixture") for part in model.parts):
        yield along(*BALANCE), "", 0
    for axes, peers in _activations(model, spot.inside):
        yield along(*axes), "", peers
    for counts in _copies(model, spot.shards):
        yield dict(counts), "", 0


@lru_cache(KEPT)
def _activations(model: Model, inside: Spot) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Axes over which layers communicate activations, and ranks that an all-to-all sends to."""
    degrees = dict(zip(AXES, inside.degrees, strict=True))
    tokens = degrees["row"] * degrees["col"]  # enough for each rank to have some
    flow = Flow(tokens, tokens, itemsize=2, statistics=4)
    found = dict[tuple[str, ...], int]()
    for part in model.parts:
        for row in pass_rows(model, part, inside, flow):
            peers = degrees["expert"] - 1 if row.op == "all_to_all" else 0
            found[row.axis] = max(found.get(row.axis, 0), peers)
    return tuple(found.items())


@lru_cache(KEPT)
def _copies(model: Model, shards: Spot) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Ranks of each axis that hold the same part of a weight, for all kinds of weights."""
    degrees = dict(zip(AXES, shards.degrees, strict=True))
    pieces = (piece for part in model.parts for piece in pieces_of(model, part, shards))
    same = (tuple(spec.copies(piece.sharding, degrees).items()) for piece in pieces)
    return tuple(dict.fromkeys(same))
