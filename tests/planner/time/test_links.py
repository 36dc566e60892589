"""Links: golden times of collectives, and who shares the network."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ranvier.config.plan import AXES
from ranvier.planner.cluster import (
    Cluster,
    CollectiveTiming,
    Efficiency,
    Link,
    MeasuredCollective,
    load_cluster,
)
from ranvier.planner.time import links
from ranvier.planner.time.links import (
    RankGroup,
    algorithm_time_ratio,
    collective_seconds,
    locate_group,
)

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


def timings(factor: float, algorithm: str, **more: int) -> list[CollectiveTiming]:
    """Timings of 1 ms plus 1 ns per byte, times a factor."""
    return [
        CollectiveTiming("all_gather", algorithm, 8, more.get("nodes", 1), n, seconds * factor)
        for n in (4**i for i in range(5, 15))
        for seconds in [1e-3 + 1e-9 * n]
    ]


EIGHT = RankGroup(8, 8)


def test_a_collective_is_priced_with_the_algorithm_that_a_run_takes() -> None:
    before = plain(collectives=(MeasuredCollective("all_gather", 8, 1e-3, 1e9),))
    rows = (*timings(1.0, "native"), *timings(0.5, "bruck"), *timings(0.8, "ring"))
    after = replace(before, timings=rows)
    for size in (1, 5000, 2**20 + 1, 2**31):
        slow, fast = (collective_seconds(one, "all_gather", size, EIGHT) for one in (before, after))
        assert slow / fast == pytest.approx(2.0, rel=0.02)
        assert algorithm_time_ratio(after, "all_gather", size, EIGHT) == fast / slow
        assert algorithm_time_ratio(before, "all_gather", size, EIGHT) == 1.0
    # Nothing else was measured.
    for op, ranks in (("reduce_scatter", EIGHT), ("all_gather", RankGroup(8, 4))):
        assert collective_seconds(after, op, 2**20, ranks) == collective_seconds(
            before, op, 2**20, ranks
        )


def test_a_row_of_the_algorithm_takes_precedence_over_its_timings() -> None:
    rows = (
        MeasuredCollective("all_gather", 8, 1e-3, 1e9),
        MeasuredCollective("all_gather", 8, 1e-5, 4e9, algorithm="bruck"),
    )
    without = plain(collectives=rows)
    assert collective_seconds(without, "all_gather", 10**9, EIGHT) == pytest.approx(1e-3 + 7 / 8)
    found = replace(without, timings=(*timings(1.0, "native"), *timings(0.5, "bruck")))
    assert collective_seconds(found, "all_gather", 10**9, EIGHT) == pytest.approx(1e-5 + 7 / 32)


@pytest.mark.parametrize(
    "rows",
    [
        timings(1.0, "native"),
        timings(1.0, "native") + timings(0.97, "bruck"),
        timings(1.0, "native") + timings(0.3, "shared_memory"),  # not between GPUs
        timings(1.0, "native") + timings(0.3, "butterfly"),
        timings(0.3, "bruck"),
    ],
)
def test_timings_that_a_run_does_not_use_change_nothing(rows: list[CollectiveTiming]) -> None:
    before = plain()
    after = replace(before, timings=tuple(rows))
    for size in (1, 2**20, 2**30):
        assert collective_seconds(after, "all_gather", size, EIGHT) == collective_seconds(
            before, "all_gather", size, EIGHT
        )


def test_speedups_are_continuous_where_the_algorithm_stays() -> None:
    rows = [
        replace(row, seconds=row.seconds * 0.3 * (row.bytes / 1024) ** 0.04)
        for row in timings(1.0, "bruck")
    ]
    found = plain(timings=(*timings(1.0, "native"), *rows))
    sizes = [2.0 ** (10 + i / 8) for i in range(160)]
    times = [algorithm_time_ratio(found, "all_gather", size, EIGHT) for size in sizes]
    steps = [b / a for a, b in itertools.pairwise(times)]
    assert min(steps) > 0.999 and 1.001 < max(steps) < 1.01


def test_placement_decides_who_is_in_a_node() -> None:
    degrees = dict.fromkeys(AXES, 1) | {"data": 4, "depth": 8, "row": 4}
    assert locate_group(("row",), degrees, AXES, 8) == RankGroup(4, 4)
    assert locate_group(("depth",), degrees, AXES, 8) == RankGroup(8, 2)
    assert locate_group(("data",), degrees, AXES, 8) == RankGroup(4, 1)
    outside = tuple(axis for axis in AXES if axis != "row")
    assert locate_group(("row",), degrees, ("row", *outside), 8) == RankGroup(4, 1)
    assert locate_group(("data", "depth"), degrees, AXES, 8) == RankGroup(32, 2)
