"""Choice of algorithms of collectives: the curves, the margin, and the regret."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from ranvier.comm.algorithm_table import AlgorithmTable, MeasuredRule
from ranvier.comm.algorithms.schedule import AxisShape
from ranvier.planner import algorithm_choice
from ranvier.planner.algorithm_choice import (
    TimingCurve,
    TimingModel,
    add_measured_rules,
    choose_algorithms,
    list_groups,
)
from ranvier.planner.cluster import Cluster, CollectiveTiming, load_cluster

Floats = npt.NDArray[np.float64]
SIZES = (2, 4, 8)
BYTES = tuple(4**i for i in range(5, 14))


def timings(
    seconds: Callable[[int, int], float],
    algorithm: str = "native",
    *,
    nodes: int = 1,
    num_bytes: Sequence[int] = BYTES,
) -> list[CollectiveTiming]:
    """Rows of an all-gather for all sizes of groups and tensors."""
    return [
        CollectiveTiming("all_gather", algorithm, p, nodes, n, seconds(p, n))
        for p, n in itertools.product(SIZES, num_bytes)
    ]


def ring_seconds(p: int, n: int) -> float:
    return 1e-4 * (p - 1) + 1e-9 * n


def tree_seconds(p: int, n: int) -> float:
    return 1e-4 * math.log2(p) + 2e-9 * n


def choose(model: TimingModel, *, size: int = 8, nodes: int = 1, num_bytes: float = 4096) -> str:
    candidates = ["ring", "bruck"]
    return model.choose(
        "all_gather", size=size, nodes=nodes, num_bytes=num_bytes, candidates=candidates
    )


# ---- curves -----------------------------------------------------------------------------


def test_a_curve_is_the_gaussian_process_of_its_kernel() -> None:
    draw = np.random.default_rng(0)
    points = draw.uniform(0, 8, (12, 3))
    points[:2, 2] = 0, 8
    values = draw.normal(size=12)
    new = draw.uniform(0, 8, (5, 3))

    def kernel(a: Floats, b: Floats) -> Floats:
        distance = math.sqrt(3) * np.linalg.norm(a[:, None] - b[None], axis=-1)
        linear = 1 + (a - points.mean(0)) @ (b - points.mean(0)).T
        total: Floats = (1 + distance) * np.exp(-distance) + linear
        return total

    inverse = np.linalg.inv(kernel(points, points) + algorithm_choice.NOISE * np.eye(12))
    weights = inverse @ (values - values.mean())
    curve = TimingCurve.fit([(*map(float, p),) for p in points], values.tolist())  # type: ignore[misc]
    found = [curve.log_seconds((*map(float, p),)) for p in new]  # type: ignore[arg-type]
    assert found == pytest.approx(values.mean() + kernel(new, points) @ weights)
    errors = weights / np.diag(inverse)
    assert curve.error == pytest.approx(np.sqrt((errors**2).mean()))


def test_one_timing_is_enough() -> None:
    model = TimingModel.fit([CollectiveTiming("all_gather", "ring", 4, 1, 2**20, 0.25)])
    for num_bytes, seconds in ((1, 0.25), (2**20, 0.25), (2**22, 1.0)):
        found = model.seconds("all_gather", "ring", size=8, nodes=1, num_bytes=num_bytes)
        assert found == pytest.approx(seconds)


@pytest.mark.parametrize("law", [ring_seconds, tree_seconds])
def test_times_between_and_outside_of_measurements(law: Callable[[int, int], float]) -> None:
    model = TimingModel.fit(timings(law))
    for p, n in itertools.product(SIZES, (1, *(2 * x for x in BYTES), 64 * BYTES[-1])):
        found = model.seconds("all_gather", "native", size=p, nodes=1, num_bytes=n)
        assert found == pytest.approx(law(p, n), rel=0.12)


def test_without_timings_there_is_no_time() -> None:
    model = TimingModel.fit(timings(ring_seconds))
    assert model.seconds("all_gather", "ring", size=4, nodes=1, num_bytes=1) is None
    assert model.seconds("all_reduce", "native", size=4, nodes=1, num_bytes=1) is None
    assert model.seconds("all_gather", "native", size=4, nodes=2, num_bytes=1) is None
    assert choose(TimingModel.fit([])) == "native"


def test_timings_with_the_most_groups_count() -> None:
    alone = timings(ring_seconds)
    together = [replace(row, seconds=3 * row.seconds, groups=4) for row in alone]
    for rows in (alone + together, together + alone):
        found = TimingModel.fit(rows).seconds(
            "all_gather", "native", size=4, nodes=1, num_bytes=BYTES[4]
        )
        assert found == pytest.approx(3 * ring_seconds(4, BYTES[4]), rel=0.1)


# ---- choice -----------------------------------------------------------------------------


def test_the_faster_algorithm_is_chosen_on_both_sides_of_the_crossover() -> None:
    model = TimingModel.fit(
        timings(lambda p, n: 2 * ring_seconds(p, n))
        + timings(ring_seconds, "ring")
        + timings(tree_seconds, "bruck")
    )
    assert choose(model, num_bytes=4096) == "bruck"
    assert choose(model, num_bytes=2**26) == "ring"


@pytest.mark.parametrize(("share", "chosen"), [(0.90, "ring"), (0.94, "ring"), (0.96, "native")])
def test_an_algorithm_must_be_faster_by_the_margin(share: float, chosen: str) -> None:
    model = TimingModel.fit(
        timings(ring_seconds) + timings(lambda p, n: share * ring_seconds(p, n), "ring")
    )
    assert {choose(model, size=p, num_bytes=n) for p in SIZES for n in BYTES} == {chosen}


def test_the_nearest_measurement_must_agree() -> None:
    rows = timings(ring_seconds) + timings(lambda p, n: 0.8 * ring_seconds(p, n), "ring")
    spoilt = [
        replace(row, seconds=ring_seconds(8, 4096))
        if (row.algorithm, row.size, row.bytes) == ("ring", 8, 4096)
        else row
        for row in rows
    ]
    model = TimingModel.fit(spoilt)
    times = [
        model.seconds("all_gather", name, size=8, nodes=1, num_bytes=4096)
        for name in ("native", "ring")
    ]
    assert times[0] / times[1] > 1.05  # type: ignore[operator]
    assert choose(model, size=8, num_bytes=4096) == "native"
    # Of two equally near points, the less favourable one counts.
    assert choose(model, size=8, num_bytes=8192) == "native"
    assert choose(model, size=8, num_bytes=16384) == "ring"


def test_only_candidates_are_chosen() -> None:
    model = TimingModel.fit(
        timings(ring_seconds) + timings(lambda p, n: 0.5 * ring_seconds(p, n), "direct")
    )
    assert choose(model) == "native"


def test_native_must_have_been_measured() -> None:
    assert choose(TimingModel.fit(timings(ring_seconds, "ring"))) == "native"


def test_nodes_and_a_node_are_learned_separately() -> None:
    model = TimingModel.fit(
        timings(ring_seconds)
        + timings(lambda p, n: 0.5 * ring_seconds(p, n), "ring")
        + timings(ring_seconds, nodes=2)
        + timings(lambda p, n: 2 * ring_seconds(p, n), "ring", nodes=2)
    )
    assert choose(model, nodes=1) == "ring"
    assert choose(model, nodes=2) == "native"
    assert model.algorithms("all_gather", 2) == ["native", "ring"]
    assert model.algorithms("all_reduce", 2) == []


def test_of_two_equally_fast_algorithms_the_predictable_one_is_chosen() -> None:
    signs = itertools.cycle([1, -1, -1, 1, 1])

    def erratic(p: int, n: int) -> float:
        return 0.5 * ring_seconds(p, n) * math.exp(next(signs))

    for steady, other in (("ring", "bruck"), ("bruck", "ring")):
        model = TimingModel.fit(
            timings(ring_seconds)
            + timings(erratic, other)
            + timings(lambda p, n: 0.55 * ring_seconds(p, n), steady)
        )
        ranked = [
            next(iter(ranking))
            for n in BYTES
            for ranking in [
                model.rank_algorithms(
                    "all_gather", size=4, nodes=1, num_bytes=n, candidates=["ring", "bruck"]
                )
            ]
        ]
        assert ranked.count(steady) > ranked.count(other)


def test_the_choice_does_not_depend_on_the_order_of_rows() -> None:
    rows = (
        timings(lambda p, n: 2 * ring_seconds(p, n))
        + timings(ring_seconds, "ring")
        + timings(tree_seconds, "bruck")
    )
    mixed = random.Random(1).sample(rows, len(rows))
    models = [TimingModel.fit(rows), TimingModel.fit(mixed)]
    for p, n in itertools.product(SIZES, BYTES):
        assert choose(models[0], size=p, num_bytes=n) == choose(models[1], size=p, num_bytes=n)


# ---- clusters ---------------------------------------------------------------------------


def measured_cluster(rows: Sequence[CollectiveTiming], *, cores: int = 2) -> Cluster:
    return replace(load_cluster("dgx-a100"), name="node-1", timings=tuple(rows), cores=cores)


CROSSING = (
    *timings(lambda p, n: 2 * ring_seconds(p, n)),
    *timings(ring_seconds, "ring"),
    *timings(tree_seconds, "bruck"),
)


def test_choices_of_a_cluster_change_where_the_model_changes_its_own() -> None:
    found = choose_algorithms(measured_cluster(CROSSING), "all_gather", 8, 1)
    assert [name for _, name in found] == ["bruck", "ring"]
    model = TimingModel.fit(CROSSING)
    start = found[1][0]
    assert choose(model, num_bytes=start) == "ring"
    assert choose(model, num_bytes=start // 2) == "bruck"


def test_algorithms_that_a_group_cannot_use_are_not_chosen() -> None:
    rows = [
        *timings(ring_seconds),
        *timings(lambda p, n: 0.3 * ring_seconds(p, n), "shared_memory"),
        *timings(lambda p, n: 0.4 * ring_seconds(p, n), "doubling"),
        *timings(lambda p, n: 0.5 * ring_seconds(p, n), "bruck"),
        # From a version with other algorithms.
        *timings(lambda p, n: 0.1 * ring_seconds(p, n), "butterfly"),
    ]
    host = measured_cluster(rows)
    gpus = measured_cluster(rows, cores=0)
    assert choose_algorithms(host, "all_gather", 4, 1) == ((0, "shared_memory"),)
    assert choose_algorithms(gpus, "all_gather", 4, 1) == ((0, "doubling"),)
    assert choose_algorithms(gpus, "all_gather", 6, 1) == ((0, "bruck"),)


def test_without_a_choice_there_are_no_rules() -> None:
    alone = measured_cluster(timings(ring_seconds))
    assert choose_algorithms(alone, "all_gather", 4, 1) == ()
    unknown = measured_cluster(timings(ring_seconds) + timings(ring_seconds, "butterfly"))
    assert choose_algorithms(unknown, "all_gather", 4, 1) == ()
    no_native = measured_cluster(timings(ring_seconds, "ring"))
    assert choose_algorithms(no_native, "all_gather", 4, 1) == ()
    for op, nodes in (("all_reduce", 1), ("all_gather", 2)):
        assert choose_algorithms(measured_cluster(CROSSING), op, 4, nodes) == ()


def test_a_table_gets_the_choices_of_a_cluster() -> None:
    cluster = measured_cluster(CROSSING)
    table = add_measured_rules(AlgorithmTable(), cluster, [(1, 1), (8, 1), (4, 1), (4, 2)])
    assert table.measured == tuple(
        MeasuredRule("all_gather", size, 1, choose_algorithms(cluster, "all_gather", size, 1))
        for size in (4, 8)
    )
    assert table.source == "measured on node-1"
    rules = table.rules_for(("row",), AxisShape.of_nodes([0] * 8), backend="gloo", on_host=True)
    assert rules.algorithm("all_gather", 1024) == "bruck"
    assert rules.algorithm("all_gather", 2**26) == "ring"
    assert add_measured_rules(AlgorithmTable(), cluster, [(8, 1)], host="node-1").measured


@pytest.mark.parametrize(
    ("cluster", "host", "source"),
    [
        (None, "node-1", "default; `ranvier measure` finds the fastest"),
        (measured_cluster([]), "", "default; node-1 has no timings"),
        (measured_cluster(timings(ring_seconds)), "", "default; node-1 has no timings"),
        (measured_cluster(CROSSING), "node-2", "the timings are of node-1, not of node-2"),
    ],
)
def test_without_timings_of_this_machine_the_default_is_stated(
    cluster: Cluster | None, host: str, source: str
) -> None:
    table = add_measured_rules(AlgorithmTable(), cluster, [(4, 1)], host=host)
    assert table.measured == () and source in table.source
    shape = AxisShape.of_nodes([0] * 4)
    rules = table.rules_for(("row",), shape, backend="gloo", on_host=True)
    assert rules.algorithms == {"shared_memory"}
    assert source in table.describe({("row",): rules})


def test_groups_of_a_grid() -> None:
    assert list_groups(8, 4) == [(2, 1), (2, 2), (4, 1), (4, 2), (8, 2)]
    assert list_groups(6, 8) == [(2, 1), (3, 1), (6, 1)]
    assert list_groups(1, 8) == []


# ---- regret -----------------------------------------------------------------------------

Cell = tuple[int, int]


def erratic_cells(seed: int) -> dict[Cell, dict[str, float]]:
    """Times of a backend with slow cells, and of a ring and a tree, with 5% noise."""
    draw = random.Random(seed)
    cells: dict[Cell, dict[str, float]] = {}
    for p, n in itertools.product((8, 16, 32, 64, 128, 256, 512), (2**i for i in range(20, 31))):
        # Cells of many ranks and few bytes are often 100 times slower.
        is_slow = p >= 64 and n <= 2**22 and draw.random() < 0.5
        native = (1e-5 * p + 0.8e-10 * n) * (100.0 if is_slow else 1.0)
        ring = 0.8e-5 * p + 1e-10 * n
        tree = 5e-5 * math.log2(p) + 2e-10 * n
        cells[p, n] = {
            name: seconds * math.exp(draw.gauss(0.0, 0.05))
            for name, seconds in (("native", native), ("ring", ring), ("bruck", tree))
        }
    return cells


def regrets_of_held_out_cells(cells: dict[Cell, dict[str, float]]) -> dict[str, list[float]]:
    """Regrets of the model, of each algorithm, on every second cell in random order."""
    names = random.Random(0).sample(sorted(cells), len(cells))
    model = TimingModel.fit(
        CollectiveTiming("all_gather", name, p, 1, n, seconds)
        for p, n in names[::2]
        for name, seconds in cells[p, n].items()
    )
    found: dict[str, list[float]] = {"model": [], "native": [], "ring": [], "bruck": []}
    for p, n in names[1::2]:
        times = cells[p, n]
        ranked = model.rank_algorithms("all_gather", size=p, nodes=1, num_bytes=n, candidates=times)
        for choice in found:
            name = next(iter(ranked)) if choice == "model" else choice
            found[choice].append(times[name] / min(times.values()))
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def test_regret_on_held_out_cells_is_small() -> None:
    regrets = []
    for seed in range(6):
        found = regrets_of_held_out_cells(erratic_cells(seed))
        means = {name: geometric_mean(values) for name, values in found.items()}
        assert means["model"] < min(means["native"], means["ring"], means["bruck"])
        regrets += found["model"]
    assert geometric_mean(regrets) <= 1.04
    assert max(regrets) <= 3.0


def test_regret_notices_timings_of_other_cells() -> None:
    cells = erratic_cells(0)
    values = random.Random(5).sample([*cells.values()], len(cells))
    found = regrets_of_held_out_cells(dict(zip(cells, values, strict=True)))
    assert geometric_mean(found["model"]) > 1.1
