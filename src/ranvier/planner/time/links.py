"""Links: seconds of a collective or a message, from where its ranks lie.

A group of g ranks lies in nodes with `inside` of them in each. A ring carries

    (g-1)/g · bytes (all-gather, reduce-scatter)     2 (g-1)/g · bytes (all-reduce)

through each of its links. Inside a node that is the device's link. Between nodes it is the node's
network cards, which all groups of the node share: a group has `inside`/devices of them. In an
all-to-all each rank sends its own bytes through its own share of them. What was measured for groups
of the same shape is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ranvier.planner.cluster import Cluster, MeasuredCollective

NETWORK_EFFICIENCY = 0.95
"""Share of the rate of network cards that large messages reach (NCCL tests on InfiniBand)."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate, as they lie on a cluster."""

    size: int
    ranks_per_node: int
    """Of them, in one node."""

    @property
    def num_nodes(self) -> int:
        """Nodes that it covers."""
        return -(-self.size // self.ranks_per_node)


SINGLE_RANK = RankGroup(1, 1)


def locate_group(
    axes: Sequence[str], degrees: Mapping[str, int], order: Sequence[str], per_node: int
) -> RankGroup:
    """The ranks along some axes. order: all axes, outermost first."""
    size = math.prod(degrees[axis] for axis in axes)
    stride = 1
    inside = 1
    for axis in reversed(order):
        if axis in axes:
            inside *= min(degrees[axis], max(per_node // stride, 1))
        stride *= degrees[axis]
    return RankGroup(size, min(inside, size))


@lru_cache(maxsize=100_000)
def collective_seconds(cluster: Cluster, op: str, size: float, ranks: RankGroup) -> float:
    """Seconds of one collective whose whole tensor has `size` bytes."""
    if ranks.size <= 1 or size <= 0:
        return 0.0
    ring = (ranks.size - 1) / ranks.size
    shares = {"all_reduce": 2 * ring, "send": 1.0, "broadcast": 1.0}
    if (
        ranks.num_nodes > 1
    ):  # of what a rank sends to each of the others the part that leaves its node
        shares["all_to_all"] = (ranks.num_nodes - 1) / ranks.num_nodes
    wire = size * shares.get(op, ring)
    row = find_measured_collective(cluster, op, ranks)
    if row is not None:
        return row.latency + wire / row.bandwidth
    rounds = 2 if op == "all_reduce" else 1
    return wire / _ring_bandwidth(cluster, op, ranks) + rounds * _total_latency(
        cluster, *_count_hops(op, ranks), ranks
    )


def _count_hops(op: str, ranks: RankGroup) -> tuple[int, int]:
    """Links inside nodes and between them that a part passes one after the other."""
    match op:
        case "send":
            return 1, 1
        case "all_reduce":  # a chain in each node, a tree of nodes
            return ranks.ranks_per_node - 1, math.ceil(math.log2(ranks.num_nodes))
        case "all_to_all":
            return ranks.ranks_per_node - 1, ranks.num_nodes - 1
    return (
        ranks.size - ranks.num_nodes,
        ranks.num_nodes - 1,
    )  # a ring goes through every rank of every node


def _total_latency(cluster: Cluster, near: int, far: int, ranks: RankGroup) -> float:
    if ranks.num_nodes == 1:
        return near * cluster.link.latency
    return near * cluster.link.latency + far * cluster.network.latency


def _ring_bandwidth(cluster: Cluster, op: str, ranks: RankGroup) -> float:
    """Bytes a second of the slowest link of a ring, as these ranks share it."""
    link = cluster.link
    network = cluster.network
    reach = cluster.device.reach
    inside = link.bandwidth
    if link.wide:  # no switch: a ring of g has the wires between its own devices only
        inside = min(inside, link.wide * max(ranks.ranks_per_node - 1, 1))
    inside *= reach.link
    if ranks.num_nodes == 1:
        return inside
    if op in ("send", "all_to_all"):
        cards = 1
    else:
        cards = ranks.ranks_per_node
    share = network.bandwidth * cards / cluster.per_node * NETWORK_EFFICIENCY
    if op != "send":
        share *= network.collective
    if ranks.ranks_per_node > 1:
        return min(share, inside)
    return share


@lru_cache(maxsize=10_000)
def find_measured_collective(
    cluster: Cluster, op: str, ranks: RankGroup
) -> MeasuredCollective | None:
    """The row that was measured for groups like this one; None: nobody has."""
    alike = {"reduce_scatter": ("reduce_scatter", "all_gather"), "all_gather": ("all_gather",)}
    for name in alike.get(op, (op,)):
        rows = [row for row in cluster.collectives if row.op == name]
        rows = [row for row in rows if (row.nodes > 1) == (ranks.num_nodes > 1)]
        if rows:
            groups = max(cluster.per_node // ranks.ranks_per_node, 1)
            return min(rows, key=lambda row: _group_distance(row, ranks, groups))
    return None


def _group_distance(row: MeasuredCollective, ranks: RankGroup, groups: int) -> float:
    return abs(math.log2(row.size / ranks.size)) * 2 + abs(math.log2(row.groups / groups))
