"""Owners of matrices: who updates what, and that each element travels exactly once each way."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from ranvier.buckets.matrix_owners import MatrixOwners
from ranvier.buckets.spec import BucketSpec, ParamSpec, build_bucket_specs
from ranvier.config.plan import AXES
from ranvier.cost.matrix_optimizers import JorgeCost, MatrixRuleCost, MuonCost
from ranvier.sharding import WEIGHT_RULE, Dim, Sharding, matrix_dims

WEIGHTS: dict[str, tuple[tuple[int, ...], tuple[Dim, ...]]] = {
    "q": ((16, 12), ("heads", "embed")),
    "kv": ((16, 12), ((2, "kv_heads"), "embed")),
    "up": ((24, 12), ("mlp", "embed")),
    "experts": ((4, 8, 12), ("expert", "mlp", "embed")),
    "router": ((4, 12), ("choice", "embed")),
}
GRIDS = [
    {},
    {"data": 3},
    {"row": 2, "depth": 3},
    {"row": 2, "col": 2, "depth": 2},
    {"expert": 2, "data": 2},
    {"row": 4},
    {"context": 2, "depth": 2},
    {"data": 2, "expert": 2, "col": 2},
]


def bucket_specs(degrees: dict[str, int]) -> list[BucketSpec]:
    params = []
    for layer, (name, (shape, dims)) in itertools.product(range(2), WEIGHTS.items()):
        sharding = Sharding.from_dims(
            shape,
            dims,
            WEIGHT_RULE,
            degrees,
            units={"heads": 4, "kv_heads": 2},
            gather_axes=("depth",),
        )
        params.append(
            ParamSpec(
                f"{layer}.{name}", str(layer), sharding, "matrix", matrix_dims=matrix_dims(dims)
            )
        )
    return build_bucket_specs(params, degrees)


@pytest.mark.parametrize("rule", [MuonCost(8), JorgeCost(8, 8)], ids=["muon", "jorge"])
@pytest.mark.parametrize("given", GRIDS, ids=str)
def test_every_element_travels_once_each_way(given: dict[str, int], rule: MatrixRuleCost) -> None:
    degrees = {axis: given.get(axis, 1) for axis in AXES}
    owners = MatrixOwners.assign(bucket_specs(degrees), degrees, rule)
    num_ranks = owners.num_ranks
    # Two packed kv matrices and four experts are separate matrices; the router is none.
    assert owners.num_whole == 2 * (1 + 2 + 1 + 4)
    total = sum(matrix.num_elements for matrix in owners.matrices)
    assert total == 2 * (16 * 12 + 16 * 12 + 24 * 12 + 4 * 8 * 12)
    sent: Counter[tuple[int, int]] = Counter()
    for rank in range(num_ranks):
        for piece in owners.pieces_of_rank(rank):
            if owners.is_sent_by(piece, rank):
                for at in _elements(owners, piece.in_matrix.start, piece.in_matrix.size):
                    sent[piece.weight, at] += 1
    assert len(sent) == total and set(sent.values()) <= {1}
    # Both sides of a message list the same pieces in the same order.
    for owner, rank in itertools.product(range(num_ranks), repeat=2):
        mine = [p for p in owners.pieces_of_rank(rank) if owners.owners[p.matrix] == owner]
        assert mine == owners.pieces_of_owner(owner)[rank]
    there, back = zip(*(owners.sent_elements(rank) for rank in range(num_ranks)), strict=True)
    received = [owners.received_elements(rank) for rank in range(num_ranks)]
    assert sum(there) == sum(as_owner for as_owner, _ in received)
    assert sum(back) == sum(returned for _, returned in received)


def _elements(owners: MatrixOwners, start: tuple[int, ...], size: tuple[int, ...]) -> list[int]:
    """Flat numbers of the elements of a box, in a space that is large enough for all."""
    found = []
    for at in itertools.product(*(range(a, a + n) for a, n in zip(start, size, strict=True))):
        number = 0
        for index in at:
            number = number * 64 + index
        found.append(number)
    return found


def test_owners_have_similar_loads_and_few_matrices_leave_ranks_idle() -> None:
    degrees = dict.fromkeys(AXES, 1) | {"data": 4}
    owners = MatrixOwners.assign(bucket_specs(degrees), degrees, MuonCost(2))
    assert max(owners.loads) < 1.5 * sum(owners.loads) / 4
    assert owners.num_idle == 0
    many = dict.fromkeys(AXES, 1) | {"data": 32}
    assert MatrixOwners.assign(bucket_specs(many), many, MuonCost(2)).num_idle == 32 - 16


def test_tiles_of_a_rank_are_consecutive() -> None:
    degrees = dict.fromkeys(AXES, 1) | {"data": 3}
    owners = MatrixOwners.assign(bucket_specs(degrees), degrees, JorgeCost(8, 4))
    assert list(owners.owners) == sorted(owners.owners)
    assert {(matrix.rows, matrix.cols) for matrix in owners.matrices} == {(4, 4)}
