"""Bytes of experts: as predicted where loads are even, none twice, none again in recomputation."""

from __future__ import annotations

import pytest

from equivalence import Case
from expert_cases import batch_with_alike, exchanged, reduced_early, traced
from pool import Pool

MODEL = "moe 2 of 8 shared"


@pytest.mark.parametrize(
    "degrees",
    [
        {"expert": 2, "row": 2, "col": 2},
        {"expert": 4},
        pytest.param({"expert": 2, "depth": 2, "col": 2}, marks=pytest.mark.full),
        pytest.param({"pipe": 2, "expert": 2, "row": 2}, marks=pytest.mark.full),
        pytest.param({"data": 2, "expert": 2, "row": 2}, marks=pytest.mark.full),
        pytest.param({"expert": 8}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_even_loads_communicate_what_was_predicted(pool: Pool, degrees: dict[str, int]) -> None:
    for found in pool.on_grid(degrees, traced, Case(MODEL)):
        assert found["lines"] == []
        assert all(len(set(layer)) == 1 for layer in found["loads"])


def test_no_token_is_sent_twice(pool: Pool) -> None:
    """With the samples of a rank, all-to-all bytes fall with row·col; copies would not."""
    case = Case(MODEL, inner="features")
    alone = pool.on_grid({"expert": 2}, traced, case)
    split = pool.on_grid({"expert": 2, "row": 2, "col": 2}, traced, case)
    copied = pool.on_grid({"expert": 2, "row": 2, "col": 2}, traced, case, True)
    for one, four, twice in zip(alone, split, copied, strict=False):
        assert one["all_to_all"] == 4 * four["all_to_all"] > 0
        assert twice["all_to_all"] == one["all_to_all"]


@pytest.mark.parametrize(
    ("degrees", "alike"),
    [
        ({"expert": 2, "row": 2, "col": 2}, 0),
        ({"expert": 2, "row": 2}, 4),
        ({"expert": 2, "row": 2}, 8),
        pytest.param({"expert": 2, "row": 4}, 6, marks=pytest.mark.full),
        pytest.param({"expert": 4, "row": 2}, 4, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_rows_are_gathered_without_padding(pool: Pool, degrees: dict[str, int], alike: int) -> None:
    """Ranks of row gather as many rows as each has: unequal numbers, none of one rank, or none."""
    model = "moe 1 of 8"
    results = pool.on_grid(degrees, exchanged, Case(model), batch_with_alike(model, alike))
    unequal, none_of_one, none_of_all = False, False, False
    for found in results:
        group = [one for one in results if one["index"] | {"row": 0} == found["index"] | {"row": 0}]
        for name, rows in found["layers"].items():
            # Forward and backward; the second all-to-all returns the rows of this rank of row.
            counts = [one["layers"][name]["all_to_all"][1] for one in group]
            assert rows["chosen"] == sum(counts)
            assert rows["all_gather"] == rows["reduce_scatter"] == [sum(counts)] * 2
            unequal |= min(counts) < max(counts)
            none_of_one |= min(counts) == 0 < max(counts)
            none_of_all |= max(counts) == 0
    assert unequal == (alike < 8)
    assert none_of_one == (0 < alike < 8)
    assert none_of_all == (alike == 8)


@pytest.mark.parametrize("kind", ["full", pytest.param("selective", marks=pytest.mark.full)])
def test_recomputation_adds_no_collective(pool: Pool, kind: str) -> None:
    degrees = {"expert": 2, "row": 2}
    plain, again, kept = (
        pool.on_grid(degrees, traced, Case(MODEL, recompute=how, collectives=collectives))
        for how, collectives in (("none", "rerun"), (kind, "rerun"), (kind, "save"))
    )
    for a, b, c in zip(plain, again, kept, strict=True):
        assert (a["lines"], b["lines"], c["lines"]) == ([], [], [])
        assert a["calls"] == c["calls"] < b["calls"]
        assert a["all_to_all"] == c["all_to_all"]


def test_gradients_are_reduced_over_replicas_in_backward(pool: Pool) -> None:
    """Experts are split over expert and reduced over data only; dense weights over both at once."""
    case = Case("moe 2 of 8 deep", micro_batches=2)
    for found in pool.on_grid({"data": 2, "expert": 2}, reduced_early, case):
        blocks = [f"blocks.{i}" for i in range(5, -1, -1)]
        assert [where for where, axis in found if axis == ("data",)] == blocks
        dense = [where for where, axis in found if axis == ("data", "expert")]
        # Routers are not hidden matrices and have buckets of their own.
        assert dense == ["head", *(block for block in blocks for _ in range(2)), "embed"]
        assert len(found) == 20
