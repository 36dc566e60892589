"""Differentiable pairs: value and gradient on ranks against one process that has all their tensors.

`TWINS` holds for each pair what one process computes from the tensors of all ranks. Where a pair
starts from (or ends in) one value that all ranks have, the twin has it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import Pool
from ranvier.comm import autograd
from ranvier.grid import Axis, Grid

LIMIT = 1e-14
N = 4
SHAPE = (4, 8, 12)
COUNTS = [[(3 * of + to) % 4 for to in range(N)] for of in range(N)]
"""Rows that each rank sends to each other."""
PARTS = [3, 0, 4, 1]
"""Sizes of unequal parts along a dim."""
Pair = Callable[[Tensor, Axis, int], Tensor]
Twin = Callable[[list[Tensor], int], list[Tensor]]


def ragged(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return autograd.all_to_all(x, axis, COUNTS[axis.index], [row[axis.index] for row in COUNTS])


def ragged_twin(xs: list[Tensor], dim: int) -> list[Tensor]:
    split = [x.split(COUNTS[of]) for of, x in enumerate(xs)]
    return [torch.cat([parts[to] for parts in split]) for to in range(N)]


def part_shape(rank: int, dim: int) -> tuple[int, ...]:
    """The shape of a rank's unequal part along a dim."""
    shape = [2, 3, 2]
    shape[dim] = PARTS[rank]
    return tuple(shape)


PAIRS: dict[str, Pair] = {
    "gather": lambda x, axis, dim: autograd.all_gather(x, axis, dim),
    "sum_scatter": lambda x, axis, dim: autograd.reduce_scatter(x, axis, dim),
    "share": lambda x, axis, dim: autograd.copy_to_axis(x, axis),
    "total": lambda x, axis, dim: autograd.reduce_from_axis(x, axis),
    "split": lambda x, axis, dim: autograd.scatter_to_axis(x, axis, dim),
    "join": lambda x, axis, dim: autograd.gather_from_axis(x, axis, dim),
    "swap": lambda x, axis, dim: autograd.all_to_all(x, axis),
    "ragged swap": ragged,
    "ragged gather": lambda x, axis, dim: autograd.all_gather(x, axis, dim, counts=PARTS),
    "ragged sum_scatter": lambda x, axis, dim: autograd.reduce_scatter(x, axis, dim, counts=PARTS),
    "ragged join": lambda x, axis, dim: autograd.gather_from_axis(x, axis, dim, counts=PARTS),
}
TWINS: dict[str, Twin] = {
    "gather": lambda xs, dim: [torch.cat(xs, dim)] * N,
    "sum_scatter": lambda xs, dim: list(torch.stack(xs).sum(0).chunk(N, dim)),
    "share": lambda xs, dim: [xs[0]] * N,
    "total": lambda xs, dim: [torch.stack(xs).sum(0)],
    "split": lambda xs, dim: list(xs[0].chunk(N, dim)),
    "join": lambda xs, dim: [torch.cat(xs, dim)],
    "swap": lambda xs, dim: [torch.cat([x.chunk(N)[to] for x in xs]) for to in range(N)],
    "ragged swap": ragged_twin,
    "ragged gather": lambda xs, dim: [torch.cat(xs, dim)] * N,
    "ragged sum_scatter": lambda xs, dim: list(torch.stack(xs).sum(0).split(PARTS, dim)),
    "ragged join": lambda xs, dim: [torch.cat(xs, dim)],
}
ONE_INPUT, ONE_OUTPUT = {"share", "split"}, {"total", "join", "ragged join"}
BREAKS = {
    "gather": ("_AllGather", autograd._run_all_gather, autograd._clone_local_slice),
    "sum_scatter": (
        "_ReduceScatter",
        autograd._run_reduce_scatter,
        lambda x, axis, dim, counts: torch.cat([x] * N, dim),
    ),
    "share": ("_CopyToAxis", autograd._view_identity, autograd._view_identity),
    "total": ("_ReduceFromAxis", autograd._run_all_reduce, autograd._run_all_reduce),
    "split": (
        "_ScatterToAxis",
        autograd._clone_local_slice,
        lambda x, axis, dim, counts: torch.cat([x] * N, dim),
    ),
    "join": ("_GatherFromAxis", autograd._run_all_gather, autograd._run_reduce_scatter),
    "swap": ("_AllToAll", autograd._run_all_to_all, lambda x, axis, send, receive: x),
    "ragged swap": (
        "_AllToAll",
        autograd._run_all_to_all,
        lambda x, axis, send, receive: torch.zeros(sum(send), 3),
    ),
    "ragged gather": ("_AllGather", autograd._run_all_gather, autograd._clone_local_slice),
    "ragged sum_scatter": (
        "_ReduceScatter",
        autograd._run_reduce_scatter,
        lambda x, axis, dim, counts: torch.zeros(sum(counts), 3, 2),
    ),
    "ragged join": ("_GatherFromAxis", autograd._run_all_gather, autograd._run_reduce_scatter),
}
"""For each pair a backward that is not its dual."""


def random(seed: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(name: str, dim: int) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [SHAPE] * N
    if name == "ragged swap":
        shapes = [(sum(row), 3) for row in COUNTS]
    elif name in ("ragged gather", "ragged join"):
        shapes = [part_shape(of, dim) for of in range(N)]
    elif name == "ragged sum_scatter":
        whole = [2, 3, 2]
        whole[dim] = sum(PARTS)
        shapes = [tuple(whole)] * N
    seeds = [0] * N if name in ONE_INPUT else range(N)
    return [random(seed, shape) for seed, shape in zip(seeds, shapes, strict=True)]


def compare(axis: Axis, name: str, dim: int) -> list[str]:
    """Run a pair between two nonlinear functions here, and its twin for all ranks."""
    i = axis.index
    x = inputs(name, dim)[i].requires_grad_()
    y = PAIRS[name](x.sin(), axis, dim)
    seed = 50 if name in ONE_OUTPUT else 50 + i
    (random(seed, y.shape) * y.square()).sum().backward()

    xs = [x.requires_grad_() for x in inputs(name, dim)]
    ys = TWINS[name]([x.sin() for x in xs], dim)
    loss = [(random(50 + j, y.shape) * y.square()).sum() for j, y in enumerate(ys)]
    torch.stack(loss).sum().backward()
    want = xs[0 if name in ONE_INPUT else i].grad
    assert x.grad is not None and want is not None
    return [
        f"{what} of {name} along {dim} on index {i} differs by {error}"
        for what, a, b in (("value", y, ys[0 if name in ONE_OUTPUT else i]), ("grad", x.grad, want))
        if a.shape != b.shape or (error := greatest(a - b)) > LIMIT * greatest(b)
    ]


def greatest(x: Tensor) -> float:
    """The largest magnitude; 0 for no elements."""
    return x.abs().max().item() if x.numel() else 0.0


def all_pairs(grid: Grid) -> list[str]:
    axis = grid.axis("row")
    dims = (0, 1, -1)
    return [line for name in PAIRS for dim in dims for line in compare(axis, name, dim)]


def test_pairs_equal_one_process(pool: Pool) -> None:
    assert pool.on_grid({"row": N}, all_pairs) == [[]] * N


def broken(grid: Grid) -> dict[str, list[str]]:
    """What the comparison says of each pair with a wrong dual."""
    found = {}
    for name, (attribute, forward, backward) in BREAKS.items():
        right = getattr(autograd, attribute)
        setattr(autograd, attribute, autograd._make_dual_function("Broken", forward, backward))
        try:
            found[name] = compare(grid.axis("row"), name, 0)
        finally:
            setattr(autograd, attribute, right)
    return found


def test_wrong_duals_are_caught(pool: Pool) -> None:
    """The negative control: each wrong gradient is seen, and only the gradient."""
    for rank, found in enumerate(pool.on_grid({"row": N}, broken)):
        for name, lines in found.items():
            # A rank without elements has no gradient that could be wrong.
            if name in ("ragged gather", "ragged join") and PARTS[rank] == 0:
                continue
            assert len(lines) == 1, (rank, name, lines)
            assert lines[0].startswith(f"grad of {name}")


def composed(grid: Grid) -> list[float]:
    """A column- and a row-parallel layer with sequence parallelism, and a statistic over ranks."""
    axis = grid.axis("row")
    x, up, down = random(1, (2, 8, 6)), random(2, (6, 8)), random(3, (8, 6))
    part = [
        autograd.local_slice(x, axis, 1).clone().requires_grad_(),
        autograd.local_slice(up, axis, 1).clone().requires_grad_(),
        autograd.local_slice(down, axis, 0).clone().requires_grad_(),
    ]

    def mean(y: Tensor) -> Tensor:
        return autograd.copy_to_axis(autograd.reduce_from_axis(y.sum(), axis), axis) / 8

    def model(x: Tensor, up: Tensor, down: Tensor, on_ranks: bool) -> Tensor:
        h = (autograd.all_gather(x, axis, 1) if on_ranks else x) @ up
        y = h.tanh() @ down
        y = autograd.reduce_scatter(y, axis, 1) if on_ranks else y
        return (y.sin() * (mean(y) if on_ranks else y.sum() / 8)).sum()

    model(*part, on_ranks=True).backward()  # type: ignore[call-arg]
    whole = [t.requires_grad_() for t in (x, up, down)]
    model(*whole, on_ranks=False).backward()  # type: ignore[call-arg]
    errors = []
    for mine, serial, dim in zip(part, whole, (1, 1, 0), strict=True):
        assert mine.grad is not None and serial.grad is not None
        want = autograd.local_slice(serial.grad, axis, dim)
        errors.append(((mine.grad - want).abs().max() / want.abs().max()).item())
    return errors


def test_pairs_compose(pool: Pool) -> None:
    for errors in pool.on_grid({"row": 2}, composed):
        assert max(errors) < 1e-12


DUALS = {
    "gather": ["all_gather", "reduce_scatter"],
    "sum_scatter": ["reduce_scatter", "all_gather"],
    "share": ["all_reduce"],
    "total": ["all_reduce"],
    "split": ["all_gather"],
    "join": ["all_gather"],
    "swap": ["all_to_all", "all_to_all"],
    "ragged swap": ["all_to_all", "all_to_all"],
    "ragged gather": ["all_gather", "reduce_scatter"],
    "ragged sum_scatter": ["reduce_scatter", "all_gather"],
    "ragged join": ["all_gather"],
}


def recorded(grid: Grid) -> dict[str, Any]:
    """What each pair communicates forward and backward, and where."""
    axis, found = grid.axis("row"), {}
    for name, pair in PAIRS.items():
        x = inputs(name, 0)[axis.index].requires_grad_()
        with grid.trace.record_events() as events:
            with grid.trace.named_scope(name):
                y = pair(x, axis, 0)
            y.sum().backward()
        found[name] = [(event.op, event.where, event.bytes) for event in events]
    return found


def test_events_of_backward_are_of_the_same_place(pool: Pool) -> None:
    size = 8 * 4 * 8 * 12
    for rank, found in enumerate(pool.on_grid({"row": N}, recorded)):
        for name, ops in DUALS.items():
            assert [(op, where) for op, where, _ in found[name]] == [(op, name) for op in ops]
        assert [size for *_, size in found["gather"]] == [N * size] * 2
        assert [size for *_, size in found["sum_scatter"]] == [size] * 2
        rows = [sum(COUNTS[rank]), sum(row[rank] for row in COUNTS)]
        assert [size for *_, size in found["ragged swap"]] == [8 * 3 * n for n in rows]
        # Of the parts as they are, not of parts padded to the largest.
        for name in ("ragged gather", "ragged sum_scatter"):
            assert [size for *_, size in found[name]] == [8 * 6 * sum(PARTS)] * 2


def test_one_rank_does_nothing() -> None:
    axis = Grid({}).axis("row")
    x = torch.ones(4, 4, 4)
    for name, pair in PAIRS.items():
        if name != "ragged swap":
            assert pair(x, axis, 0) is x
    assert autograd.local_slice(x, axis, 1) is not None


def test_parts_must_be_equal() -> None:
    """A rest would be dropped without a word."""
    axis = Grid({"row": 2}).axis("row")
    with pytest.raises(AssertionError):
        autograd.local_slice(torch.ones(5), axis, 0)
    with pytest.raises(AssertionError):
        autograd.local_slice(torch.ones(5), axis, 0, [2, 2])
