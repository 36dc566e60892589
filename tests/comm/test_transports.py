"""Every algorithm of collectives, executed: equal to the plain result, the same bits on all ranks.

Nodes are pretended by the number of ranks per node of the grid, and ranks are placed in any order.
A new algorithm is tested as soon as it is in the table of algorithms.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from pool import Pool
from ranvier.comm import collectives
from ranvier.comm.algorithm_table import SHARED_MEMORY
from ranvier.comm.algorithms.registry import algorithm_names, find_algorithm
from ranvier.comm.algorithms.schedule import OPERATIONS, AxisShape
from ranvier.comm.transports import shared_memory
from ranvier.grid import Axis, Grid
from ranvier.trace import Event, diff_sent_bytes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
SIZES = (0, 1, 7, 1000)
"""Elements of a part."""
LARGE = 2**20
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.int64: 0.0}
"""Relative error of a sum for each rounding."""
NAMES = [*algorithm_names(), SHARED_MEMORY]
Result = tuple[list[str], dict[str, str]]
"""Differences from the plain result, and digests of values that all ranks must have alike."""


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The tensor of a rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (count,), generator=generator)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def compare(name: str, have: Tensor, parts: Sequence[Tensor], size: int) -> list[str]:
    """Compares a sum with the plain one, up to one rounding for each rank."""
    if have.dtype == torch.int64:
        want = sum(parts, torch.zeros_like(parts[0]))
        return [] if torch.equal(have, want) else [f"{name}: {have[:4]} instead of {want[:4]}"]
    wide = [part.double() for part in parts]
    want = sum(wide, torch.zeros_like(wide[0]))
    scale = sum((part.abs() for part in wide), torch.zeros_like(want))
    wrong = (have.double() - want).abs() > TOLERANCES[have.dtype] * size * scale
    return [f"{name}: {int(wrong.sum())} of {want.numel()} values differ"] if wrong.any() else []


def check_sizes(
    grid: Grid, sizes: Sequence[int], dtypes: Sequence[torch.dtype], operations: Sequence[str]
) -> Result:
    """All collectives of an algorithm for some sizes and dtypes."""
    axis = grid.axis("row")
    lines: list[str] = []
    digests: dict[str, str] = {}
    for dtype in dtypes:
        for count in sizes:
            for op in operations:
                label = f"{op} of {count} {dtype}"
                first = check_one(axis, op, count, dtype, label, lines)
                again = check_one(axis, op, count, dtype, label, lines)
                if digest(first) != digest(again):
                    lines.append(f"{label}: other bits in a second call")
                if op != "reduce_scatter":
                    digests[label] = digest(first)
    return lines, digests


def check_one(
    axis: Axis, op: str, count: int, dtype: torch.dtype, label: str, lines: list[str]
) -> Tensor:
    """One collective against its plain result."""
    every = [values(rank, count * axis.size, dtype) for rank in axis.ranks]
    own = every[axis.index]
    if op == "all_gather":
        parts = [x[:count] for x in every]
        have = collectives.all_gather(own[:count].clone(), axis).wait()
        if not torch.equal(have, torch.cat(parts)):
            lines.append(f"{label}: not the parts of all ranks")
    elif op == "reduce_scatter":
        have = collectives.reduce_scatter(own, axis).wait()
        mine = slice(axis.index * count, (axis.index + 1) * count)
        lines += compare(label, have, [x[mine] for x in every], axis.size)
    else:
        # One element more, so that blocks are unequal.
        every = [values(rank, count * axis.size + bool(count), dtype) for rank in axis.ranks]
        have = collectives.all_reduce(every[axis.index], axis).wait()
        lines += compare(label, have, every, axis.size)
    return have


def check_ragged(grid: Grid) -> list[str]:
    """All-gather and reduce-scatter of unequal parts, some of them empty, along dims 0 and 1."""
    axis = grid.axis("row")
    lines: list[str] = []
    for counts in ([(3 * i) % 5 for i in range(axis.size)], [0] * (axis.size - 1) + [4]):
        for dim in (0, 1):
            for dtype in DTYPES:
                shape = [2, 3]
                shape.insert(dim, sum(counts))
                every = [values(r, 6 * sum(counts), dtype).view(shape) for r in axis.ranks]
                mine = [x.split(counts, dim)[i].contiguous() for i, x in enumerate(every)]
                part = mine[axis.index]
                have = collectives.all_gather(part, axis, dim, counts=counts).wait()
                if not torch.equal(have, torch.cat(mine, dim)):
                    lines.append(f"all_gather {counts} along {dim} of {dtype}")
                own = every[axis.index]
                have = collectives.reduce_scatter(own, axis, dim, counts=counts).wait()
                label = f"reduce_scatter {counts} along {dim} of {dtype}"
                want = [x.split(counts, dim)[axis.index] for x in every]
                lines += compare(label, have, want, axis.size)
    return lines


def check_in_flight(grid: Grid, rounds: int) -> list[str]:
    """Three collectives of one axis at once, waited for in every order."""
    axis, lines = grid.axis("row"), list[str]()
    chooser = random.Random(5)
    for seed in range(rounds):
        every = [values(rank, 12 * axis.size, torch.float64, seed) for rank in axis.ranks]
        own = every[axis.index]
        started = {
            "all_gather": collectives.all_gather(own, axis),
            "reduce_scatter": collectives.reduce_scatter(own, axis),
            "all_reduce": collectives.all_reduce(own, axis),
        }
        # Every rank waits in an order of its own.
        order = [*started]
        random.Random(chooser.random() + axis.index).shuffle(order)
        found = {name: started[name].wait() for name in order}
        if not torch.equal(found["all_gather"], torch.cat(every)):
            lines.append(f"all_gather {seed}")
        lines += compare(f"all_reduce {seed}", found["all_reduce"], every, axis.size)
        mine = slice(axis.index * 12, (axis.index + 1) * 12)
        part = [x[mine] for x in every]
        lines += compare(f"reduce_scatter {seed}", found["reduce_scatter"], part, axis.size)
    return lines


def random_delay(seed: int, source: int, target: int) -> float:
    """Up to two milliseconds, different for each message."""
    return random.Random(hash((seed, source, target))).random() * 2e-3


def recorded(grid: Grid) -> list[tuple[str, str, int | None, int | None]]:
    """Algorithm, bytes sent and rounds of each collective, as recorded."""
    axis = grid.axis("row")
    x = torch.ones(32 * axis.size)
    with grid.trace.record_events() as events:
        collectives.all_gather(x[:32].clone(), axis).wait()
        collectives.reduce_scatter(x, axis).wait()
        collectives.all_reduce(x, axis).wait()
    assert all(event.done_time and event.done_time >= (event.issue_time or 0) for event in events)
    return [(one.op, one.algorithm, one.sent_bytes, one.num_rounds) for one in events]


def run(
    pool: Pool, name: str, ranks: int, per_node: int, seed: int, work: Callable[..., Result]
) -> None:
    """Checks an algorithm on pretended nodes, with ranks in a random order."""
    order = list(range(ranks))
    random.Random(seed).shuffle(order)
    results = pool.on_grid(
        {"row": ranks}, work, order=order, algorithm=name, ranks_per_node=per_node
    )
    assert [line for lines, _ in results for line in lines] == []
    assert all(digests == results[0][1] for _, digests in results)


def shapes() -> list[tuple[int, int]]:
    """Numbers of ranks, and ranks per node, also such that divide unevenly."""
    return [(ranks, per) for ranks in range(1, 9) for per in range(1, ranks + 1)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The product of algorithms and shapes with `--full`; else each algorithm with some shape."""
    if metafunc.function is test_every_algorithm_equals_the_plain_result:
        every = shapes()
        cases = [(name, shape) for name in NAMES for shape in every]
        if not metafunc.config.getoption("--full"):
            # A step that shares no factor with their number reaches all shapes.
            cases = [(name, every[5 * i % len(every)]) for i, name in enumerate(NAMES)]
        ids = [f"{name}-{ranks}ranks-{per_node}per_node" for name, (ranks, per_node) in cases]
        metafunc.parametrize(("name", "shape"), cases, ids=ids)


@pytest.mark.sample(4)
def test_every_algorithm_equals_the_plain_result(
    pool: Pool, name: str, shape: tuple[int, int]
) -> None:
    work = partial(check_sizes, sizes=SIZES, dtypes=DTYPES, operations=OPERATIONS)
    run(pool, name, *shape, seed=len(name) + 8 * shape[0] + shape[1], work=work)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_large_tensors(pool: Pool, name: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    work = partial(check_sizes, sizes=[LARGE // 8 + 3], dtypes=dtypes, operations=OPERATIONS)
    run(pool, name, 4, 2, seed=3, work=work)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_unequal_parts(pool: Pool, name: str) -> None:
    results = pool.on_grid(
        {"row": 4}, check_ragged, order=[2, 0, 3, 1], algorithm=name, ranks_per_node=2
    )
    assert results == [[]] * 4


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_three_in_flight(pool: Pool, name: str) -> None:
    results = pool.on_grid({"row": 4}, check_in_flight, 8, algorithm=name, ranks_per_node=2)
    assert results == [[]] * 4


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("native", SHARED_MEMORY)])
def test_random_delays(pool: Pool, name: str, pytestconfig: pytest.Config) -> None:
    for seed in range(200 if pytestconfig.getoption("--full") else 2):
        results = pool.on_grid(
            {"row": 4},
            check_in_flight,
            2,
            algorithm=name,
            ranks_per_node=2,
            message_delay=partial(random_delay, seed),
        )
        assert results == [[]] * 4


@pytest.mark.parametrize("name", ["ring", "bruck", "direct", "one_shot", "folded"])
def test_bytes_and_rounds_are_those_of_the_formula(pool: Pool, name: str) -> None:
    algorithm = find_algorithm(name)
    total = 4 * 32 * 4
    for axis_rank, events in enumerate(pool.on_grid({"row": 4}, recorded, algorithm=name)):
        for op, chosen, sent, rounds in events:
            assert op in OPERATIONS
            if op not in algorithm.operations:
                assert chosen == "native"
                continue
            cost = algorithm.cost(op, shape_of(4))
            assert (chosen, rounds) == (name, cost.rounds), (axis_rank, op)
            assert sent == pytest.approx(cost.sent_bytes * total), (axis_rank, op)


def record_all(grid: Grid) -> tuple[list[Event], dict[tuple[str, ...], AxisShape]]:
    """Collectives over plain and fused axes, and the shapes of those."""
    axes = [grid.axis("row"), grid.axis("col"), grid.axis("row", "col")]
    with grid.trace.record_events() as events:
        # Also two sizes that shared memory sends in several chunks and in two phases.
        for axis, count in itertools.product(axes, (6, 50_000)):
            x = torch.ones(count * axis.size)
            collectives.all_gather(x[:count].clone(), axis).wait()
            collectives.reduce_scatter(x, axis).wait()
            collectives.all_reduce(x, axis).wait()
            collectives.all_to_all(x, axis).wait()
            collectives.broadcast(x, axis, index=1).wait()
    return events, {axis.names: axis.shape for axis in axes}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name",
    [
        *("ring", "folded", "one_shot", "shared_memory"),
        *("hierarchical/bruck/native", "hierarchical/ring/shared_memory"),
        *("hierarchical/doubling/direct", "nvrar/shared_memory"),
    ],
)
def test_what_a_grid_records_is_the_closed_form(pool: Pool, name: str) -> None:
    """2 x 4 ranks on nodes of 2; shared memory needs one node."""
    results = pool.on_grid(
        {"row": 2, "col": 4},
        record_all,
        algorithm=name,
        ranks_per_node=8 if name == SHARED_MEMORY else 2,
    )
    events = [event for rank, _ in results for event in rank]
    counted = [event for event in events if event.sent_bytes is not None]
    assert {event.algorithm for event in counted} == {name}
    operations = 5 if name == SHARED_MEMORY else len(find_algorithm(name).operations)
    assert len({(event.op, event.axis, event.bytes) for event in counted}) == 6 * operations
    assert diff_sent_bytes(events, results[0][1]) == []
    # Negative control: one byte too many, or a round too few, is noticed.
    counted[-1].sent_bytes = max(event.sent_bytes or 0 for event in counted) + 1000
    assert counted[0].num_rounds is not None
    counted[0].num_rounds -= 1
    assert len(diff_sent_bytes(events, results[0][1])) == 2


def shape_of(ranks: int) -> AxisShape:
    """Ranks of one node."""
    return AxisShape.of_nodes([0] * ranks)


def test_a_host_says_why_its_ranks_cannot_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory.find_host_limitation() == ""

    def refuse(*arguments: object) -> int:
        raise OSError("no memory files here")

    monkeypatch.setattr("os.memfd_create", refuse)
    assert "no memory files here" in shared_memory.find_host_limitation()
    monkeypatch.undo()
    monkeypatch.setattr("os.pidfd_open", refuse, raising=False)
    assert "cannot be mapped" in shared_memory.find_host_limitation()
