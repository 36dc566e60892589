"""Load of the owners of whole matrices: FLOPs, elements and memory of the ranks of a stage.

Which matrix a rank owns depends on shapes and the number of ranks alone, so that all layouts with
as many ranks per stage share the result. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ranvier.buckets.matrix_owners import assign_owners
from ranvier.cost.matrix_optimizers import MatrixRuleCost, tile_bounds
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.errors import PlanError
from ranvier.planner.cluster import Device
from ranvier.planner.comm_volume import CACHE_SIZE, StageBlocks, matrix_shapes
from ranvier.planner.model_spec import BlockSpec, ModelSpec
from ranvier.sharding import MATRIX_DIMS

Shape = tuple[int, int]
"""Rows and columns of a matrix or tile."""
MAX_ASSIGNED = 1 << 15
"""Maximum number of matrices or tiles that are assigned to ranks one by one."""


@dataclass(frozen=True)
class MatrixLoad:
    """What the ranks of a stage own, per step."""

    num_ranks: int
    num_elements: int
    """Elements of all hidden matrices of the stage."""
    num_owned: int
    """Number of matrices or tiles."""
    num_idle: int
    """Number of ranks that own nothing."""
    total_flops: float
    max_flops: float
    """FLOPs of the busiest rank."""
    max_elements: int
    """Elements of the matrices of the rank with most of them."""
    max_owner_states: int
    """Elements of the states that only owners have, on the rank with most of them."""
    max_temporaries: int
    """Elements of the matrices of a rank and of the temporary tensors of their update."""

    @property
    def mean_flops(self) -> float:
        """FLOPs per rank."""
        return self.total_flops / self.num_ranks

    @property
    def update_elements(self) -> int:
        """Elements of the temporary tensors of an update on the fullest rank.

        These are the values of its optimizer shards, and its matrices; and during the exchange both
        again, as messages, or during the update the temporary tensors of that.
        """
        shards = -(-self.num_elements // self.num_ranks)
        here = shards + self.max_elements
        travelling = here * (self.num_ranks - 1) // self.num_ranks
        return max(here + travelling, shards + self.max_temporaries)


def check_hidden_matrices(model: ModelSpec, optimizer: OptimizerSpec) -> None:
    """Raises if an optimizer of whole matrices would update none of a model."""
    if optimizer.matrix_rule is None or any(matrix_shapes(model, part) for part in model.parts):
        return
    raise PlanError(
        f"optim.name={optimizer.name!r} for the model {model.name!r}, which has no trainable "
        f"hidden matrix. {optimizer.name} updates matrices between features ("
        f"{', '.join(sorted(MATRIX_DIMS))}), and AdamW all other weights. Use optim.name='adamw'."
    )


def matrix_seconds(
    device: Device, load: MatrixLoad, rule: MatrixRuleCost, *, mean: bool = False
) -> float:
    """Returns the seconds of the update of whole matrices on the busiest rank: its products.

    mean: on a rank with an equal share of all FLOPs instead.
    """
    # Elements of 2 bytes are bf16; others are multiplied at the rate of fp32.
    rate = device.best_matmul_rate("bf16" if rule.itemsize == 2 else "fp32")
    return (load.mean_flops if mean else load.max_flops) / (rate * device.reach.matmul)


@lru_cache(CACHE_SIZE)
def stage_matrix_load(
    model: ModelSpec, stage: StageBlocks, num_ranks: int, rule: MatrixRuleCost
) -> MatrixLoad:
    """Returns the load of the ranks of a stage."""
    shapes = _owned_shapes(model, stage, rule.tile_size)
    costs = {shape: rule.flops(*shape) for shape in shapes}
    total = sum(costs[shape] * count for shape, count in shapes.items())
    if shapes.total() > MAX_ASSIGNED:
        # So many are balanced up to the last one.
        owned = [Counter({shape: -(-n // num_ranks) for shape, n in shapes.items()})]
        loads = [total / num_ranks + max(costs.values())]
        num_idle = max(num_ranks - shapes.total(), 0)
    else:
        order = [*_owned_in_order(model, stage, rule.tile_size)]
        owned = [Counter[Shape]() for _ in range(num_ranks)]
        loads = [0.0] * num_ranks
        for owner, shape in zip(
            assign_owners([costs[one] for one in order], num_ranks, rule), order, strict=True
        ):
            owned[owner][shape] += 1
            loads[owner] += costs[shape]
        num_idle = sum(not one for one in owned)
    return MatrixLoad(
        num_ranks,
        _num_elements(shapes),
        shapes.total(),
        num_idle,
        total,
        max(loads),
        max(map(_num_elements, owned)),
        max(
            sum(rule.owner_state_elements(*shape) * n for shape, n in one.items()) for one in owned
        ),
        max(
            _num_elements(one)
            + max((rule.temporary_elements(*shape, n) for shape, n in one.items()), default=0)
            for one in owned
        ),
    )


def _num_elements(shapes: Counter[Shape]) -> int:
    return sum(rows * cols * count for (rows, cols), count in shapes.items())


def _owned_shapes(model: ModelSpec, stage: StageBlocks, tile: int) -> Counter[Shape]:
    """Returns the number of matrices or tiles of a stage by shape."""
    found = Counter[Shape]()
    for part, number in stage.block_counts:
        for shape in _part_shapes(model, part, tile):
            found[shape] += number
    return found


def _owned_in_order(model: ModelSpec, stage: StageBlocks, tile: int) -> Iterator[Shape]:
    """Yields the shapes of the matrices or tiles of a stage in the order of its parts."""
    for part in stage.blocks:
        yield from _part_shapes(model, part, tile)


@lru_cache(CACHE_SIZE)
def _part_shapes(model: ModelSpec, part: BlockSpec, tile: int) -> tuple[Shape, ...]:
    """Returns the shapes of the matrices of a part, or of their tiles if `tile` is not 0."""
    found = list[Shape]()
    for rows, cols, count in matrix_shapes(model, part):
        tiles = [
            (bottom - top, right - left)
            for top, bottom in tile_bounds(rows, tile or rows)
            for left, right in tile_bounds(cols, tile or cols)
        ]
        found += tiles * count
    return tuple(found)
