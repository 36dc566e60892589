"""Communication time of a collective or a message, from the placement of its ranks.

A group of g ranks has `ranks_per_node` of them in each node it covers. A ring carries

    (g-1)/g · bytes (all-gather, reduce-scatter)     2 (g-1)/g · bytes (all-reduce)

through each of its links. Inside a node this is the device's link. Between nodes it is the node's
network cards, which all groups of the node share: a group has `ranks_per_node`/devices of them. In
an all-to-all each rank sends its own bytes through its own share of the cards. Measurements for
groups of the same shape take precedence. If a cluster has timings of several algorithms, a
collective is priced with the one that a run takes; without timings, with the one that a run takes
by default, if it has a row of it.

Limitation: compiled regions use functional collectives, which are always those of the backend, but
are priced as if they took the same algorithm as eager ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ranvier.comm.algorithm_table import NATIVE, SHARED_MEMORY
from ranvier.planner.algorithm_choice import predict_speedup
from ranvier.planner.cluster import Cluster, MeasuredCollective

NETWORK_EFFICIENCY = 0.95
"""Share of the rate of network cards that large messages reach (NCCL tests on InfiniBand)."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate with each other, and their placement on a cluster."""

    size: int
    ranks_per_node: int
    """Number of its ranks in one node."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes that it covers."""
        return -(-self.size // self.ranks_per_node)


SINGLE_RANK = RankGroup(1, 1)


def locate_group(
    axes: Sequence[str], degrees: Mapping[str, int], order: Sequence[str], per_node: int
) -> RankGroup:
    """Returns the group of ranks along some axes. order: all axes, outermost first."""
    size = math.prod(degrees[axis] for axis in axes)
    # Ranks are numbered with the innermost axis fastest, and each node has per_node consecutive
    # ranks. An axis of stride s has per_node / s ranks in a node.
    stride = 1
    inside = 1
    for axis in reversed(order):
        if axis in axes:
            inside *= min(degrees[axis], max(per_node // stride, 1))
        stride *= degrees[axis]
    return RankGroup(size, min(inside, size))


@lru_cache(maxsize=100_000)
def collective_seconds(cluster: Cluster, op: str, size: float, ranks: RankGroup) -> float:
    """Returns the seconds of one collective whose full tensor has `size` bytes.

    It uses the algorithm that a run takes by the timings of the cluster, or by default.
    """
    if ranks.size <= 1 or size <= 0:
        return 0.0
    native = _seconds_of_backend(cluster, op, size, ranks)
    if cluster.timings:
        name, speedup = predict_speedup(
            cluster, op, size=ranks.size, nodes=ranks.num_nodes, num_bytes=size
        )
    else:
        name, speedup = _default_algorithm(cluster, ranks), 1.0
    if name == NATIVE:
        return native
    row = find_measured_collective(cluster, op, ranks, name)
    if row is not None:
        return row.latency + _wire_bytes(op, size, ranks) / row.bandwidth
    # Timings are only compared with each other: those of `native` may differ from its row, which
    # runs have calibrated.
    return native / speedup


def _default_algorithm(cluster: Cluster, ranks: RankGroup) -> str:
    """Returns the algorithm without timings, as `default_thresholds` has it for one node."""
    # Between nodes there are no rows of others than native without timings.
    if cluster.cores and ranks.num_nodes == 1:
        return SHARED_MEMORY
    return NATIVE


def algorithm_time_ratio(cluster: Cluster, op: str, size: float, ranks: RankGroup) -> float:
    """Returns the time with the algorithm that a run takes over that of the backend's own."""
    if ranks.size <= 1 or size <= 0:
        return 1.0
    return collective_seconds(cluster, op, size, ranks) / _seconds_of_backend(
        cluster, op, size, ranks
    )


def _seconds_of_backend(cluster: Cluster, op: str, size: float, ranks: RankGroup) -> float:
    """Returns the seconds of one collective with the algorithm of the backend."""
    wire = _wire_bytes(op, size, ranks)
    row = find_measured_collective(cluster, op, ranks)
    if row is not None:
        return row.latency + wire / row.bandwidth
    rounds = 2 if op == "all_reduce" else 1
    return wire / _ring_bandwidth(cluster, op, ranks) + rounds * _total_latency(
        cluster, *_count_hops(op, ranks), ranks
    )


def _wire_bytes(op: str, size: float, ranks: RankGroup) -> float:
    """Returns the bytes that a ring carries through each of its links."""
    ring = (ranks.size - 1) / ranks.size
    shares = {"all_reduce": 2 * ring, "send": 1.0, "broadcast": 1.0}
    # An all-to-all between nodes is limited by the bytes that leave the node.
    if ranks.num_nodes > 1:
        shares["all_to_all"] = (ranks.num_nodes - 1) / ranks.num_nodes
    return size * shares.get(op, ring)


def _count_hops(op: str, ranks: RankGroup) -> tuple[int, int]:
    """Returns the number of consecutive hops of a piece of data inside nodes and between them."""
    match op:
        case "send":
            return 1, 1
        # A chain in each node and a tree of nodes.
        case "all_reduce":
            return ranks.ranks_per_node - 1, math.ceil(math.log2(ranks.num_nodes))
        case "all_to_all":
            return ranks.ranks_per_node - 1, ranks.num_nodes - 1
    # A ring goes through every rank of every node.
    return ranks.size - ranks.num_nodes, ranks.num_nodes - 1


def _total_latency(cluster: Cluster, near: int, far: int, ranks: RankGroup) -> float:
    if ranks.num_nodes == 1:
        return near * cluster.link.latency
    return near * cluster.link.latency + far * cluster.network.latency


def _ring_bandwidth(cluster: Cluster, op: str, ranks: RankGroup) -> float:
    """Returns the bytes per second of the slowest link of a ring, with the share of these ranks."""
    link = cluster.link
    network = cluster.network
    reach = cluster.device.reach
    inside = link.bandwidth
    # Without a switch, a ring of g ranks has only the links between its own devices.
    if link.wide:
        inside = min(inside, link.wide * max(ranks.ranks_per_node - 1, 1))
    inside *= reach.link
    if ranks.num_nodes == 1:
        return inside
    # A ring between nodes uses the cards of all its ranks in a node; in an all-to-all or a message
    # each rank sends through its own share.
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
    cluster: Cluster, op: str, ranks: RankGroup, algorithm: str = NATIVE
) -> MeasuredCollective | None:
    """Returns the measurement of the most similar groups; None if there is none."""
    # An all-gather moves as many bytes as a reduce-scatter and can replace it.
    alike = {"reduce_scatter": ("reduce_scatter", "all_gather"), "all_gather": ("all_gather",)}
    for name in alike.get(op, (op,)):
        rows = [row for row in cluster.collectives if (row.op, row.algorithm) == (name, algorithm)]
        # Rates inside a node and between nodes are not related.
        rows = [row for row in rows if (row.nodes > 1) == (ranks.num_nodes > 1)]
        if rows:
            # All groups of a node communicate at the same time and share its links.
            groups = max(cluster.per_node // ranks.ranks_per_node, 1)
            return min(rows, key=lambda row: _group_distance(row, ranks, groups))
    return None


def _group_distance(row: MeasuredCollective, ranks: RankGroup, groups: int) -> float:
    return abs(math.log2(row.size / ranks.size)) * 2 + abs(math.log2(row.groups / groups))
