"""Links: golden times of collectives, and who shares the network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ranvier.config.plan import AXES
from ranvier.planner.cluster import Cluster, Efficiency, Link, MeasuredCollective, load_cluster
from ranvier.planner.time import links
from ranvier.planner.time.links import RankGroup, collective_seconds, locate_group

SIZE = 8 * 10**9


def plain(**more: object) -> Cluster:
    """Eight devices a node, 100 GB/s each inside, 80 GB/s a node, without losses."""
    base = load_cluster("dgx-a100")
    device = replace(base.device, reach=Efficiency(link=1.0))
    made = replace(base, device=device, link=Link(1e11, 0.0), network=Link(8e10, 0.0))
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_ring_carries_all_but_one_part() -> None:
    one = plain()
    assert collective_seconds(one, "all_gather", SIZE, RankGroup(8, 8)) == pytest.approx(
        7 / 8 * SIZE / 1e11
    )
    assert collective_seconds(one, "reduce_scatter", SIZE, RankGroup(4, 4)) == pytest.approx(
        3 / 4 * SIZE / 1e11
    )
    assert collective_seconds(one, "all_reduce", SIZE, RankGroup(8, 8)) == pytest.approx(
        14 / 8 * SIZE / 1e11
    )
    assert collective_seconds(one, "send", SIZE, RankGroup(2, 2)) == pytest.approx(SIZE / 1e11)
    assert collective_seconds(one, "all_gather", SIZE, RankGroup(1, 1)) == 0.0


def test_groups_of_a_node_share_its_network() -> None:
    rate = 8e10 * links.NETWORK_EFFICIENCY
    whole = collective_seconds(plain(), "all_gather", SIZE, RankGroup(16, 8))
    assert whole == pytest.approx(15 / 16 * SIZE / rate)
    one = collective_seconds(
        plain(), "all_gather", SIZE, RankGroup(16, 1)
    )  # eight such groups in each node
    assert one == pytest.approx(15 / 16 * SIZE / (rate / 8))


def test_latency_grows_with_the_ring_and_with_the_logarithm_of_a_tree() -> None:
    slow = plain(link=Link(1e11, 1e-6), network=Link(8e10, 1e-3))
    ring, tree = (
        collective_seconds(slow, op, 8, RankGroup(64, 8)) for op in ("all_gather", "all_reduce")
    )
    assert ring == pytest.approx(56 * 1e-6 + 7 * 1e-3, rel=1e-3)  # through all 64 ranks
    assert tree == pytest.approx(2 * (7 * 1e-6 + 3 * 1e-3), rel=1e-3)


def test_without_a_switch_a_pair_has_its_own_wires_only() -> None:
    bare = plain(link=Link(3e11, 0.0, wide=1e11))
    pair, four = (collective_seconds(bare, "all_gather", SIZE, RankGroup(n, n)) for n in (2, 4))
    assert pair == pytest.approx(SIZE / 2 / 1e11)
    assert four == pytest.approx(3 / 4 * SIZE / 3e11)


def test_measured_collectives_are_used_instead() -> None:
    rows = (
        MeasuredCollective("all_gather", 8, 1e-3, 1e9),
        MeasuredCollective("all_gather", 2, 1e-4, 2e9),
    )
    found = collective_seconds(plain(collectives=rows), "all_gather", 10**9, RankGroup(8, 8))
    assert found == pytest.approx(1e-3 + 7 / 8)
    found = collective_seconds(plain(collectives=rows), "reduce_scatter", 10**9, RankGroup(2, 2))
    assert found == pytest.approx(1e-4 + 1 / 2 / 2)


def test_placement_decides_who_is_in_a_node() -> None:
    degrees = dict.fromkeys(AXES, 1) | {"data": 4, "depth": 8, "row": 4}
    assert locate_group(("row",), degrees, AXES, 8) == RankGroup(4, 4)
    assert locate_group(("depth",), degrees, AXES, 8) == RankGroup(8, 2)
    assert locate_group(("data",), degrees, AXES, 8) == RankGroup(4, 1)
    outside = tuple(axis for axis in AXES if axis != "row")
    assert locate_group(("row",), degrees, ("row", *outside), 8) == RankGroup(4, 1)
    assert locate_group(("data", "depth"), degrees, AXES, 8) == RankGroup(32, 2)
