"""Costs of optimizers of whole matrices: FLOPs, and how Jorge cuts a matrix into tiles.

Muon iterates on a whole matrix, Jorge preconditions tiles of it. Both know a matrix by its shape
alone, so that the assignment of matrices to ranks and the planner need no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

MUON_BATCH_ELEMENTS = 1 << 27
"""Maximum number of elements of the matrices that Muon iterates together on a GPU, unless a single
matrix has more."""
JORGE_BATCH_ELEMENTS = 1 << 26
"""Maximum number of elements of the sides that Jorge updates together, unless one side has more."""


def muon_flops(rows: int, cols: int, steps: int) -> float:
    """Returns the FLOPs of the orthogonalization of a matrix: steps · (4 m² n + 2 m³), m ≤ n.

    These are the FLOPs of full products. Two of the three products of a step are symmetric, and a
    kernel may compute only half of them.
    """
    m = min(rows, cols)
    n = max(rows, cols)
    return float(steps * (4 * m * m * n + 2 * m**3))


def jorge_flops(rows: int, cols: int, *, precondition_interval: int = 1) -> float:
    """Returns the mean FLOPs per step of Jorge for one tile: statistics, sides, and L G R.

    A side of m updates with 5 products of m³ (L̂², two products to X, X², and the last one), its
    statistics G Gᵀ take m² n. Both happen once in `precondition_interval` steps, L G R in each.
    """
    statistics = 2 * rows * cols * (rows + cols)
    updates = 5 * 2 * (rows**3 + cols**3)
    precondition = 2 * rows * cols * (rows + cols)
    return (statistics + updates) / precondition_interval + precondition


def tile_bounds(size: int, max_preconditioner_dim: int) -> list[tuple[int, int]]:
    """Returns first and last + 1 of the tiles along one dim of a matrix; the last may be shorter.

    Example:
        >>> tile_bounds(2500, 1024)
        [(0, 1024), (1024, 2048), (2048, 2500)]
    """
    starts = range(0, size, max_preconditioner_dim)
    return [(start, min(start + max_preconditioner_dim, size)) for start in starts]


@dataclass(frozen=True)
class MuonCost:
    """What Muon computes and communicates for a matrix."""

    itemsize: int
    """Bytes of an element of the iteration, in which updates travel."""
    steps: int = 5

    tile_size = 0
    """Side of the tiles that are updated; 0 means whole matrices."""
    has_owner_states = False
    """Whether the owner of a matrix has states that other ranks do not have."""
    grafted_itemsize = 0
    """Bytes of each of the two norms of a matrix that are summed over ranks; 0: none are."""

    num_passes = 2
    """Passes over the states: momentum, and after the exchange weights."""

    def owner_state_elements(self, rows: int, cols: int) -> int:
        """Returns the elements of the states of a matrix that only its owner has: none."""
        return 0

    def temporary_elements(self, rows: int, cols: int, count: int) -> int:
        """Returns the elements of the temporary tensors for `count` matrices of one shape.

        These are the result, and of a batch X before and after a product, and two products of the
        smaller side.
        """
        m = min(rows, cols)
        one = rows * cols
        batch = min(max(MUON_BATCH_ELEMENTS // one, 1), count)
        return count * one + batch * 2 * (one + m * m)

    def flops(self, rows: int, cols: int) -> float:
        """Returns the FLOPs of the update of a matrix."""
        return muon_flops(rows, cols, self.steps)


@dataclass(frozen=True)
class JorgeCost:
    """What Jorge computes and communicates for a tile."""

    itemsize: int
    """Bytes of an element of a gradient."""
    tile_size: int = 1024
    """Side of the tiles that are updated."""
    precondition_interval: int = 1
    grafting: bool = True

    has_owner_states = True
    """Whether the owner of a matrix has states that other ranks do not have."""

    @property
    def grafted_itemsize(self) -> int:
        """Bytes of each of the two norms of a matrix that are summed over ranks; 0: none are."""
        return self.itemsize * self.grafting

    num_passes = 3
    """Passes over the states: both momenta, and weights."""

    def temporary_elements(self, rows: int, cols: int, count: int) -> int:
        """Returns the elements of the temporary tensors for `count` tiles of one shape.

        These are the sides before and after their update, the statistics of one side, and up to
        five products of a batch.
        """
        side = max(rows, cols) ** 2
        batch = min(max(JORGE_BATCH_ELEMENTS // side, 1), count)
        return count * (rows**2 + cols**2 + 2 * side) + 5 * batch * side

    def owner_state_elements(self, rows: int, cols: int) -> int:
        """Returns the elements of the states of a tile that only its owner has: r² + c²."""
        return rows * rows + cols * cols

    def flops(self, rows: int, cols: int) -> float:
        """Returns the mean FLOPs per step of the update of a tile."""
        return jorge_flops(rows, cols, precondition_interval=self.precondition_interval)


MatrixRuleCost = MuonCost | JorgeCost
"""The cost of a rule that updates whole matrices."""
