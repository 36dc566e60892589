"""Schedules of all algorithms of the table, run on all ranks of simulated axes.

Checked are messages that match, the result, equal bits on all ranks, and rounds and bytes as in the
closed form. A new algorithm is tested as soon as it is in the table.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ranvier.comm.algorithms.flat import FlatAlgorithm, Phase, send_receive
from ranvier.comm.algorithms.hierarchical import Hierarchical
from ranvier.comm.algorithms.native import Engine
from ranvier.comm.algorithms.registry import (
    ALGORITHMS,
    algorithm_names,
    find_algorithm,
    level_algorithms,
)
from ranvier.comm.algorithms.ring import RING
from ranvier.comm.algorithms.schedule import (
    OPERATIONS,
    Algorithm,
    AxisShape,
    GroupStep,
    Operation,
    Round,
    Step,
    Transfer,
)
from ranvier.errors import PlanError
from schedule_simulator import Array, Buffer, ScheduleError, Traffic, check_pair, require, simulate

TABLE = list(ALGORITHMS.values())
# Also what is only used between nodes.
TESTED = TABLE + [
    algorithm.levels["inter"]
    for algorithm in TABLE
    if isinstance(algorithm, Hierarchical) and algorithm.levels["inter"].name not in ALGORITHMS
]


def unequal_sizes(p: int) -> list[int]:
    """Elements of each block: 1, 4, 2, 0, 3, ..."""
    return [(3 * i + 1) % 5 for i in range(p)]


def find_name(algorithm: Algorithm) -> str:
    return algorithm.name


def supported(algorithm: Algorithm, shape: AxisShape) -> list[Operation]:
    return [one for one in OPERATIONS if not algorithm.limitation(one, shape)]


def even_shapes(size: int) -> Iterator[AxisShape]:
    """Axes of N × M ranks for every N: node by node, round robin, and in a random order."""
    for num_nodes in range(1, size + 1):
        if size % num_nodes == 0:
            by_node = [i // (size // num_nodes) for i in range(size)]
            shuffled = [num_nodes - node for node in by_node]
            random.Random(size).shuffle(shuffled)
            round_robin = [i % num_nodes for i in range(size)]
            for nodes in {tuple(by_node), tuple(round_robin), tuple(shuffled)}:
                yield AxisShape.of_nodes(nodes)


def uneven_shapes(size: int) -> Iterator[AxisShape]:
    if size > 2:
        yield AxisShape.of_nodes([*[0] * (size - 1), 1])
        yield AxisShape.of_nodes([i * i % size % 3 for i in range(size)])


def all_shapes(size: int) -> Iterator[AxisShape]:
    """Every way to put the ranks of an axis on nodes."""

    def extend(nodes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(nodes) == size:
            yield nodes
            return
        for node in range(max(nodes) + 2):
            yield from extend((*nodes, node))

    yield from map(AxisShape.of_nodes, extend((0,)))


def check_collective(
    algorithm: Algorithm, operation: Operation, shape: AxisShape, sizes: Sequence[int]
) -> None:
    """Runs a collective of integers and random numbers, and checks results, bits and cost."""
    p = shape.size
    rng = np.random.default_rng(p)
    values = rng.uniform(0.5, 1.5, (p, sum(sizes), 2))  # (rank, element, integer or not)
    values[..., 0] = rng.integers(-(2**40), 2**40, values.shape[:2])
    blocks = [np.split(whole, np.cumsum(sizes)[:-1]) for whole in values]
    buffers: list[Buffer] = [[*whole] for whole in blocks]
    if operation == "all_gather":
        buffers = [[None] * i + [blocks[i][i]] + [None] * (p - i - 1) for i in range(p)]

    traffic = simulate(algorithm, operation, shape, buffers)

    if operation == "reduce_scatter":
        results = [join_blocks([buffers[i][i] for i in range(p)])]
    else:
        results = [join_blocks(buffer) for buffer in buffers]
    if operation == "all_gather":
        expected = np.concatenate([blocks[i][i] for i in range(p)])
        require(all(np.array_equal(found, expected) for found in results), "wrong result")
    else:
        exact = values.astype(np.longdouble).sum(0)
        for found in results:
            require(np.array_equal(found[:, 0], exact[:, 0]), "wrong sum of integers")
            error = np.abs(found[:, 1] - exact[:, 1]) / exact[:, 1]
            require(error.max(initial=0.0) <= 1e-14, f"sum with an error of {error}")
    require(len({found.tobytes() for found in results}) == 1, "ranks have different bits")
    check_cost(algorithm, operation, shape, traffic)


def join_blocks(buffer: Buffer) -> Array:
    """The whole of a rank, which must have all blocks."""
    found = [block for block in buffer if block is not None]
    require(len(found) == len(buffer), "a rank ends without a block")
    return np.concatenate(found)


def check_cost(
    algorithm: Algorithm, operation: Operation, shape: AxisShape, traffic: Traffic
) -> None:
    """Checks the closed form against what was counted for p blocks of 1/p bytes."""
    cost = algorithm.cost(operation, shape)
    counted = (
        traffic.rounds,
        max(traffic.sent_blocks.values(), default=0) / shape.size,
        max(traffic.leaving_blocks.values(), default=0) / shape.size,
    )
    expected = (cost.rounds, cost.sent_bytes, cost.leaving_node)
    close = np.allclose(counted, expected, rtol=1e-12, atol=1e-12)
    require(close, f"rounds, sent, leaving node: counted {counted}, closed form {expected}")


# Run on simulated axes


@pytest.mark.parametrize("algorithm", TESTED, ids=find_name)
def test_algorithms_of_the_table(algorithm: Algorithm) -> None:
    count = 0
    for size in range(1, 9):
        for shape in (*even_shapes(size), *uneven_shapes(size)):
            for operation in supported(algorithm, shape):
                check_collective(algorithm, operation, shape, unequal_sizes(size))
                count += 1
    assert count > 20


@pytest.mark.parametrize("name", algorithm_names()[len(TABLE) :])
def test_combinations_of_levels(name: str) -> None:
    algorithm = find_algorithm(name)
    assert algorithm.name == name
    count = 0
    for nodes in ((0, 0, 1, 1), (3, 1, 1, 2, 2, 3), (0, 1, 1, 0, 1, 0)):
        shape = AxisShape.of_nodes(nodes)
        for operation in supported(algorithm, shape):
            check_collective(algorithm, operation, shape, unequal_sizes(shape.size))
            count += 1
    assert count >= len(algorithm.operations)


@pytest.mark.parametrize("sizes", [[2] * 6, [0] * 6, [0, 0, 0, 7, 0, 0]], ids=str)
def test_equal_and_empty_blocks(sizes: list[int]) -> None:
    shape = AxisShape.of_nodes([0, 1, 0, 1, 1, 0])
    for algorithm in TESTED:
        for operation in supported(algorithm, shape):
            check_collective(algorithm, operation, shape, sizes)


@pytest.mark.full
@pytest.mark.parametrize("name", algorithm_names())
def test_all_names_on_all_even_axes(name: str) -> None:
    algorithm = find_algorithm(name)
    shapes = [shape for size in range(1, 9) for shape in all_shapes(size) if shape.is_even]
    for shape in (*shapes, *even_shapes(9), *even_shapes(12), *even_shapes(16)):
        for operation in supported(algorithm, shape):
            check_collective(algorithm, operation, shape, unequal_sizes(shape.size))


@pytest.mark.full
@pytest.mark.parametrize("algorithm", TESTED, ids=find_name)
def test_flat_algorithms_on_all_uneven_axes(algorithm: Algorithm) -> None:
    for size in range(3, 8):
        for shape in all_shapes(size):
            if shape.is_even:
                continue
            for operation in supported(algorithm, shape):
                check_collective(algorithm, operation, shape, unequal_sizes(size))


def count_sent(steps: Sequence[Step], shape: AxisShape, index: int) -> tuple[float, float]:
    """Blocks that a rank sends, and those of them that leave its node."""
    sent = leaving = 0.0
    for step in steps:
        if isinstance(step, GroupStep):
            moved = RING.sent_bytes(step.operation, len(step.ranks)) * sum(map(len, step.blocks))
            sent += moved
            leaving += moved * (step.level == "inter")
            continue
        for each in step.sends:
            sent += len(each.blocks)
            leaving += len(each.blocks) * (shape.nodes[each.peer] != shape.nodes[index])
    return sent, leaving


def peers_of(steps: Sequence[Step]) -> set[int]:
    peers: set[int] = set()
    for step in steps:
        if isinstance(step, GroupStep):
            peers.update(step.ranks)
        else:
            peers.update(each.peer for each in step.sends)
    return peers


LARGE = [
    pytest.param([i // 2 for i in range(4096)], id="2048 nodes of 2", marks=pytest.mark.full),
    pytest.param([i // 2 for i in range(1024)], id="512 nodes of 2"),
    pytest.param([i % 375 for i in range(750)], id="375 nodes of 2, round robin"),
]


@pytest.mark.parametrize("nodes", LARGE)
@pytest.mark.parametrize("algorithm", TABLE, ids=find_name)
def test_thousands_of_ranks(algorithm: Algorithm, nodes: list[int]) -> None:
    shape = AxisShape.of_nodes(nodes)
    chosen = random.Random(0)
    last = shape.size - 1
    for operation in supported(algorithm, shape):
        ranks = [0, last, chosen.randrange(last)]
        # Folded ranks are the last ones, and their partners the first ones: one of them is busiest.
        busiest = [shape.members[shape.nodes[index]] for index in (0, last)]
        watched = {*ranks, *busiest[0], *busiest[1]}
        steps = {i: algorithm.steps(operation, shape, i) for i in watched}
        if isinstance(algorithm, Engine):
            assert not any(steps.values())
            continue
        for index in ranks:
            peer = chosen.choice(sorted(peers_of(steps[index]) - {index}))
            check_pair(index, steps[index], peer, algorithm.steps(operation, shape, peer))
        counted = {index: count_sent(steps[index], shape, index) for index in steps}
        cost = algorithm.cost(operation, shape)
        sent = max(sent for sent, _ in counted.values())
        assert sent == pytest.approx(cost.sent_bytes * shape.size)
        leaving = max(sum(counted[index][1] for index in node) for node in busiest)
        assert leaving == pytest.approx(cost.leaving_node * shape.size)


# Closed forms and properties of each algorithm


def ceil_log2(count: int) -> int:
    return math.ceil(math.log2(count))


def share(count: int) -> float:
    return (count - 1) / count


PUBLISHED: dict[tuple[str, Operation], Callable[[int, int], tuple[float, float, float]]] = {
    ("native", "all_reduce"): lambda N, M: (2 * (N * M - 1), 2 * share(N * M), 2 * share(N * M)),
    ("ring", "all_gather"): lambda N, M: (N * M - 1, share(N * M), share(N * M)),
    ("ring", "reduce_scatter"): lambda N, M: (N * M - 1, share(N * M), share(N * M)),
    ("doubling", "all_gather"): lambda N, M: (ceil_log2(N * M), share(N * M), M * share(N)),
    ("doubling", "reduce_scatter"): lambda N, M: (ceil_log2(N * M), share(N * M), M * share(N)),
    ("direct", "all_gather"): lambda N, M: (1, share(N * M), M * share(N)),
    ("direct", "reduce_scatter"): lambda N, M: (1, share(N * M), M * share(N)),
    ("one_shot", "all_reduce"): lambda N, M: (1, N * M - 1, M * M * (N - 1)),
    ("hierarchical", "all_gather"): lambda N, M: (
        ceil_log2(N) + M - 1,
        share(N) / M + share(M),
        share(N),
    ),
    ("hierarchical", "reduce_scatter"): lambda N, M: (
        ceil_log2(N) + M - 1,
        share(N) / M + share(M),
        share(N),
    ),
    ("nvrar", "all_reduce"): lambda N, M: (
        ceil_log2(N) + 2 * (M - 1),
        ceil_log2(N) / M + 2 * share(M),
        ceil_log2(N),
    ),
}
"""Rounds, bytes of a rank and bytes that leave a node, for N nodes of M, both powers of two."""


@pytest.mark.parametrize("case", PUBLISHED, ids="-".join)
def test_costs_are_the_published_ones(case: tuple[str, Operation]) -> None:
    name, operation = case
    for N in (2, 4, 16, 512):
        for M in (1, 2, 8):
            shape = AxisShape.of_nodes([i // M for i in range(N * M)])
            cost = ALGORITHMS[name].cost(operation, shape)
            found = (cost.rounds, cost.sent_bytes, cost.leaving_node)
            assert found == pytest.approx(PUBLISHED[case](N, M)), (N, M)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12, 100, 4095])
def test_logarithmic_rounds_for_any_number_of_ranks(size: int) -> None:
    shape = AxisShape.of_nodes(range(size))
    gather = ALGORITHMS["bruck"].cost("all_gather", shape)
    assert (gather.rounds, gather.sent_bytes) == (ceil_log2(size), share(size))
    scatter = ALGORITHMS["folded"].cost("reduce_scatter", shape)
    assert (scatter.rounds, scatter.sent_bytes) == (ceil_log2(size) + 1, 1)
    reduce = ALGORITHMS["folded"].cost("all_reduce", shape)
    assert (reduce.rounds, reduce.sent_bytes) == (2 * ceil_log2(size) + 1, 1 + share(size))


def test_a_ring_over_ranks_that_jump_between_nodes_leaves_a_node_with_every_message() -> None:
    N, M = 4, 8
    by_node = AxisShape.of_nodes([i // M for i in range(N * M)])
    round_robin = AxisShape.of_nodes([i % N for i in range(N * M)])
    ring = [RING.cost("all_gather", shape).leaving_node for shape in (by_node, round_robin)]
    assert ring[1] == pytest.approx(M * ring[0])
    hierarchical = ALGORITHMS["hierarchical"]
    assert hierarchical.cost("all_gather", by_node) == hierarchical.cost("all_gather", round_robin)


@pytest.mark.parametrize(
    ("name", "operation"),
    [("direct", "reduce_scatter"), ("direct", "all_reduce"), ("one_shot", "all_reduce")],
)
def test_direct_sums_are_those_of_one_process(name: str, operation: Operation) -> None:
    p = 7
    values = np.random.default_rng(0).standard_normal((p, p, 5))
    serial = values[0]
    for rank in range(1, p):
        serial = serial + values[rank]
    buffers: list[Buffer] = [[*values[rank]] for rank in range(p)]
    simulate(ALGORITHMS[name], operation, AxisShape.of_nodes([0] * p), buffers)
    for rank, buffer in enumerate(buffers):
        for block in [rank] if operation == "reduce_scatter" else range(p):
            found = buffer[block]
            assert found is not None and np.array_equal(found, serial[block])


def test_one_node_uses_only_the_inner_algorithm_and_one_rank_per_node_only_the_outer() -> None:
    for inter, intra in (("bruck", "ring"), ("ring", "one_shot"), ("doubling", "direct")):
        algorithm = find_algorithm(f"hierarchical/{inter}/{intra}")
        for level, nodes in (("intra", [5] * 4), ("inter", [3, 1, 2, 0])):
            shape = AxisShape.of_nodes(nodes)
            alone = level_algorithms("intra")[{"intra": intra, "inter": inter}[level]]
            for operation in OPERATIONS:
                for index in range(4):
                    steps = algorithm.steps(operation, shape, index)
                    assert steps == alone.steps(operation, shape, index)
    native = find_algorithm("hierarchical/native/shared_memory")
    (step,) = native.steps("all_reduce", AxisShape.of_nodes([0, 0, 0]), 1)
    blocks = ((0,), (1,), (2,))
    assert step == GroupStep("all_reduce", "intra", (0, 1, 2), blocks, "shared_memory")
    (step,) = native.steps("all_gather", AxisShape.of_nodes([2, 1, 0]), 1)
    assert step == GroupStep("all_gather", "inter", (0, 1, 2), blocks, "native")


def test_a_hierarchical_all_reduce_needs_no_shuffle() -> None:
    for nodes in ((0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2)):
        shape = AxisShape.of_nodes(nodes)
        for index in range(6):
            steps = find_algorithm("hierarchical/ring/native").steps("all_reduce", shape, index)
            assert len(steps) == 2 + 2 * (shape.num_nodes - 1)
            for step in (steps[0], steps[-1]):
                assert isinstance(step, GroupStep)
                assert [block for blocks in step.blocks for block in blocks] == [*range(6)]


def test_hierarchical_combinations_do_all_operations() -> None:
    shape = AxisShape.of_nodes([0, 0, 1, 1])
    for name in algorithm_names():
        if name.startswith("hierarchical"):
            assert supported(find_algorithm(name), shape) == [*OPERATIONS], name


# Limitations and errors


LIMITATIONS: list[tuple[str, Operation, tuple[int, ...], str]] = [
    ("doubling", "all_gather", (0, 0, 0), "3 ranks. doubling needs a power of two. Use bruck"),
    ("bruck", "reduce_scatter", (0, 0), "has no reduce_scatter. It implements all_gather. Use fol"),
    ("one_shot", "all_gather", (0, 0), "has no all_gather. It implements all_reduce. Use direct."),
    ("nvrar", "all_gather", (0, 1), "has no all_gather. It implements all_reduce. Use hier"),
    (
        "nvrar",
        "all_reduce",
        (0, 0, 1),
        "have 2, 1 ranks. nvrar needs equally many on each. Use nat",
    ),
    ("hierarchical", "all_gather", (0, 1, 0), "have 2, 1 ranks. hierarchical needs equally many"),
    ("hierarchical/doubling/native", "all_reduce", (0, 1, 2), "3 nodes. doubling needs a power"),
    ("hierarchical/ring/doubling", "all_gather", (1, 1, 1), "3 ranks per node. doubling needs"),
]


@pytest.mark.parametrize(("name", "operation", "nodes", "message"), LIMITATIONS)
def test_limitations_have_a_value_a_rule_and_a_remedy(
    name: str, operation: Operation, nodes: tuple[int, ...], message: str
) -> None:
    shape = AxisShape.of_nodes(nodes)
    limitation = find_algorithm(name).limitation(operation, shape)
    assert message in limitation
    assert limitation.endswith(".") and limitation.count(". ") == 2
    with pytest.raises((AssertionError, KeyError)):
        find_algorithm(name).steps(operation, shape, 0)


def test_limits_of_one_level_do_not_matter_if_only_the_other_is_used() -> None:
    one_node = AxisShape.of_nodes([0, 0, 0])
    assert not find_algorithm("hierarchical/doubling/ring").limitation("all_gather", one_node)
    one_rank_per_node = AxisShape.of_nodes([0, 1, 2])
    algorithm = find_algorithm("hierarchical/ring/doubling")
    assert not algorithm.limitation("all_gather", one_rank_per_node)


def test_native_supports_every_axis() -> None:
    for shape in all_shapes(5):
        assert supported(ALGORITHMS["native"], shape) == [*OPERATIONS]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rng", "ring"),
        ("one-shot", "one_shot"),
        ("Hierarchical", "hierarchical"),
        ("", "ring"),
        ("ring/native", "ring"),
        ("hierarchical/brook/native", "hierarchical/bruck/native"),
        ("hierarchical/ring/shared-memory", "hierarchical/ring/shared_memory"),
        ("hierarchical/shared_memory/native", "hierarchical/"),
        ("hierarchical/ring/ring/ring", "hierarchical/ring/ring"),
        ("hierarchical/nvrar/native", "hierarchical/"),
        ("nvrar/rings", "nvrar/ring"),
        ("nvrar/ring/ring", "nvrar/ring"),
    ],
)
def test_an_unknown_name_is_reported_with_the_closest_one(name: str, near: str) -> None:
    with pytest.raises(PlanError) as error:
        find_algorithm(name)
    message = str(error.value)
    assert message.startswith(f"{name!r} is not an algorithm for collectives. The algorithms are ")
    assert f"Use '{near}" in message
    find_algorithm(message.rpartition("Use '")[2].removesuffix("'."))


def test_defaults_of_names() -> None:
    shape = AxisShape.of_nodes([0, 0, 1, 1, 2, 2])
    for short, long in (
        ("hierarchical", "hierarchical/bruck/native"),
        ("hierarchical/ring", "hierarchical/ring/native"),
        ("nvrar", "nvrar/native"),
    ):
        for operation in find_algorithm(short).operations:
            steps = find_algorithm(short).steps(operation, shape, 3)
            assert steps == find_algorithm(long).steps(operation, shape, 3)


def test_algorithms_need_no_torch() -> None:
    code = (
        "import sys, ranvier.comm.algorithms.registry as r\n"
        "r.find_algorithm('hierarchical/bruck/shared_memory')\n"
        "assert not {'torch', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Negative controls: the checks find what is wrong with a schedule


def change_ring(
    rounds: Callable[[int, int], list[Round]] | None = None,
    *,
    operation: Operation = "all_gather",
    num_rounds: int = 0,
    sent: float = 1.0,
    leaving: float = 1.0,
) -> FlatAlgorithm:
    """A ring with other rounds, or with another cost."""
    (ring,) = RING.phases["all_gather"]
    phase = Phase(
        rounds or ring.rounds,
        lambda size: size - 1 + num_rounds,
        lambda size: ring.sent_bytes(size) * sent,
        lambda shape: {node: count * leaving for node, count in ring.leaving_bytes(shape).items()},
    )
    return FlatAlgorithm("broken", {operation: [phase]})


def wrong_block(size: int, index: int) -> list[Round]:
    rounds = RING.rounds("all_gather", size, index)
    if index == 1:
        (received,) = rounds[0].receives
        rounds[0] = Round(rounds[0].sends, (Transfer(received.peer, ((index + 1) % size,)),))
    return rounds


def no_receive(size: int, index: int) -> list[Round]:
    rounds = RING.rounds("all_gather", size, index)
    if index == 0:
        rounds[-1] = Round(sends=rounds[-1].sends)
    return rounds


def one_round_less(size: int, index: int) -> list[Round]:
    return RING.rounds("all_gather", size, index)[:-1]


def one_round_less_on_one_rank(size: int, index: int) -> list[Round]:
    rounds = RING.rounds("all_gather", size, index)
    return rounds[1:] if index == 1 else rounds


def one_round_more(size: int, index: int) -> list[Round]:
    return [*RING.rounds("all_gather", size, index), Round()]


def too_early(size: int, index: int) -> list[Round]:
    return RING.rounds("all_gather", size, index)[::-1]


def overwrite(size: int, index: int) -> list[Round]:
    """All ranks rotate one block, so that each stores what it sends."""
    return [
        send_receive(target=(index + 1) % size, sends=[0], source=(index - 1) % size, receives=[0])
        for _ in range(size - 1)
    ]


def added_twice(size: int, index: int) -> list[Round]:
    rounds = RING.rounds("reduce_scatter", size, index)
    return [*rounds, *RING.rounds("reduce_scatter", size, index)]


def dissemination(size: int, index: int) -> list[Round]:
    """Sums are right, but every rank adds in another order."""
    return [
        send_receive(
            target=(index + distance) % size,
            sends=range(size),
            source=(index - distance) % size,
            receives=range(size),
            reduce=True,
        )
        for distance in (1, 2)
    ]


BROKEN = {
    "do not match": change_ring(wrong_block),
    r"do not match receives: {\(3, 0, \(1,\), False\)}": change_ring(no_receive),
    "ends without a block": change_ring(one_round_less),
    "different numbers of steps": change_ring(one_round_less_on_one_rank),
    "no messages": change_ring(one_round_more),
    "does not have block": change_ring(too_early),
    "which is in use": change_ring(overwrite, operation="all_reduce"),
    "wrong sum of integers": change_ring(added_twice, operation="reduce_scatter"),
    "different bits": change_ring(dissemination, operation="all_reduce"),
    r"counted \(3, 0.75, 0.75\), closed form \(4,": change_ring(num_rounds=1),
    r"closed form \(3, 1.5,": change_ring(sent=2),
    r"closed form \(3, 0.75, 0.375\)": change_ring(leaving=0.5),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_algorithms_are_found(message: str) -> None:
    algorithm = BROKEN[message]
    shape = AxisShape.of_nodes([0, 0, 1, 1])
    (operation,) = algorithm.operations
    with pytest.raises(ScheduleError, match=message):
        check_collective(algorithm, operation, shape, [3] * 4)


def test_broken_messages_between_two_ranks_are_found() -> None:
    steps = [wrong_block(4, index) for index in range(4)]
    check_pair(2, steps[2], 3, steps[3])
    with pytest.raises(ScheduleError, match="ranks 0 and 1 do not match"):
        check_pair(0, steps[0], 1, steps[1])


def test_groups_whose_members_disagree_are_found() -> None:
    class Broken(Hierarchical):
        def steps(self, operation: Operation, shape: AxisShape, index: int) -> list[Step]:
            steps = super().steps(operation, shape, index)
            if index == 2:
                assert isinstance(steps[-1], GroupStep)
                steps[-1] = replace(steps[-1], blocks=steps[-1].blocks[::-1])
            return steps

    levels = level_algorithms("inter")
    algorithm = Broken("broken", inter=levels["ring"], intra=levels["native"])
    with pytest.raises(ScheduleError, match="members disagree"):
        check_collective(algorithm, "all_gather", AxisShape.of_nodes([0, 0, 1, 1]), [1] * 4)
