"""Places of random tensors on random grids: disjoint, covering, padded with zeros, shared alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ranvier.config.plan import AXES, Inner
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.sharding import INNER, OUTER, WEIGHTS, Dim, Move, Place, Sharding, Step, Table

RULES = {"weights": WEIGHTS, "outer": OUTER, **{f"inner {k}": v for k, v in INNER.items()}}


def degrees_of(**sizes: int) -> dict[str, int]:
    return dict.fromkeys(AXES, 1) | sizes


def coordinates(degrees: dict[str, int]) -> Iterator[dict[str, int]]:
    """The index of every rank, in rank order."""
    for place in product(*(range(n) for n in degrees.values())):
        yield dict(zip(degrees, place, strict=True))


@dataclass
class Drawn:
    """A tensor on a grid."""

    shape: list[int]
    dims: list[Dim]
    units: dict[str, int]
    degrees: dict[str, int]
    rule: str
    depth: bool

    @property
    def sharding(self) -> Sharding:
        return Sharding.make(
            self.shape,
            self.dims,
            RULES[self.rule],
            self.degrees,
            units=self.units,
            depth=self.depth,
        )

    @property
    def places(self) -> list[Place]:
        return [self.sharding.place(index) for index in coordinates(self.degrees)]


@st.composite
def tensors(draw: st.DrawFn) -> Drawn:
    """A tensor whose dims can be cut: units are multiples of their ranks, or kv heads shared."""
    degrees = degrees_of(
        data=draw(st.integers(1, 2)),
        depth=draw(st.integers(1, 3)),
        row=draw(st.integers(1, 4)),
        col=draw(st.integers(1, 3)),
    )
    rule = draw(st.sampled_from(list(RULES)))
    dims: list[Dim] = []
    shape: list[int] = []
    units: dict[str, int] = {}
    free = set(degrees)
    for _ in range(draw(st.integers(1, 3))):
        split = [d for d, axes in RULES[rule].items() if set(axes) <= free and d not in OUTER]
        split += ["embed"] if set(RULES[rule].get("embed", ())) <= free else []
        name = draw(st.sampled_from([*split, "whole"]))
        axes = RULES[rule].get(name, ())
        free -= set(axes)
        ranks = math.prod(degrees[axis] for axis in axes)
        count = draw(st.integers(1, 3))
        if name == "vocab":
            size = draw(st.integers(1, 3 * ranks))
        elif name == "kv_heads" and draw(st.booleans()):
            # shared: as many heads as divide each axis in turn
            count = draw(
                st.sampled_from([n for n in range(1, ranks + 1) if _fits(n, axes, degrees)])
            )
            size, units[name] = count * draw(st.integers(1, 3)), count
        elif name == "whole":
            size = count
        else:
            units[name] = count * ranks
            size = units[name] * draw(st.integers(1, 3))
        packed = draw(st.booleans()) and name not in ("vocab", "whole")
        shape.append(size * 3 if packed else size)
        dims.append((3, name) if packed else name)
    return Drawn(shape, dims, units, degrees, rule, draw(st.booleans()) and rule == "weights")


def _fits(heads: int, axes: tuple[str, ...], degrees: dict[str, int]) -> bool:
    for axis in axes:
        if heads % degrees[axis] and degrees[axis] % heads:
            return False
        heads = max(heads // degrees[axis], 1)
    return True


@given(tensors())
def test_places_cover_the_whole_and_over_says_who_shares(drawn: Drawn) -> None:
    """Each element lies on exactly the ranks of one axis `over`; two such axes share no element."""
    sharding = drawn.sharding
    over = sharding.over(drawn.degrees)
    holders: dict[int, list[int]] = {}
    flat = torch.arange(math.prod(drawn.shape)).view(drawn.shape)
    for rank, place in enumerate(drawn.places):
        for element in flat.view(place.whole)[place.box].flatten().tolist():
            holders.setdefault(element, []).append(rank)
    assert sorted(holders) == list(range(flat.numel()))
    for ranks in set(map(tuple, holders.values())):
        for rank in ranks:
            axis = Grid(drawn.degrees, rank=rank).axis(share=over)
            assert sorted(axis.ranks) == list(ranks)


@given(tensors())
def test_equal_places_are_the_axis_of_over(drawn: Drawn) -> None:
    """Also seen from the ranks: who has the same (not empty) place as I have."""
    places = drawn.places
    over = drawn.sharding.over(drawn.degrees)
    for rank, place in enumerate(places):
        if math.prod(place.valid):
            same = [other for other, at in enumerate(places) if at == place]
            assert same == sorted(Grid(drawn.degrees, rank=rank).axis(share=over).ranks)


@given(tensors())
def test_take_and_put_return_the_whole_and_padding_is_zero(drawn: Drawn) -> None:
    whole = torch.arange(1.0, math.prod(drawn.shape) + 1).view(drawn.shape)
    back = torch.zeros_like(whole)
    for place in drawn.places:
        part = place.take(whole)
        assert tuple(part.shape) == drawn.sharding.local == place.local
        inside = torch.zeros(place.local, dtype=torch.bool)
        inside[tuple(slice(n) for n in place.valid)] = True
        assert (part[~inside] == 0).all()
        assert (part[inside] != 0).all()
        place.put(back, part)
    assert torch.equal(back, whole)


@given(tensors(), st.integers(1, 5))
def test_flat_ranges_over_data_cover_the_box(drawn: Drawn, ranks: int) -> None:
    """Ranges of equal length, the last cut to the end; also those wholly behind it."""
    whole = torch.arange(1.0, math.prod(drawn.shape) + 1).view(drawn.shape)
    back = torch.zeros_like(whole)
    for place in drawn.places:
        size = math.prod(place.local)
        step = -(-size // ranks) + 1
        parts = [place.narrow(i * step, (i + 1) * step) for i in range(ranks)]
        taken = [part.take(whole) for part in parts]
        assert all(0 <= a <= b <= size for a, b in (part.flat for part in parts if part.flat))
        assert torch.equal(torch.cat(taken), place.take(whole).flatten())
        for part, values in zip(parts, taken, strict=True):
            part.put(back, values)
    assert torch.equal(back, whole)


def test_putting_a_range_leaves_the_rest() -> None:
    place = Sharding.make([4, 6], ["whole", "embed"], WEIGHTS, degrees_of(col=2)).place(
        dict.fromkeys(AXES, 0) | {"col": 1}
    )
    whole = torch.zeros(4, 6)
    place.narrow(2, 5).put(whole, torch.ones(3))
    expected = torch.zeros(4, 6)
    expected[0, 5] = expected[1, 3] = expected[1, 4] = 1
    assert torch.equal(whole, expected)


def parts(sharding: Sharding, degrees: dict[str, int], whole: Tensor) -> dict[tuple[int, int], Any]:
    """What the ranks hold, by (row, col)."""
    return {
        (index["row"], index["col"]): sharding.place(index).take(whole).tolist()
        for index in coordinates(degrees)
    }


def test_more_rows_than_kv_heads() -> None:
    """Two heads of two elements on four rows: neighbours share."""
    degrees = degrees_of(row=4)
    sharding = Sharding.make([4], ["kv_heads"], WEIGHTS, degrees, units={"kv_heads": 2})
    held = parts(sharding, degrees, torch.arange(4))
    assert list(held.values()) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert sharding.over(degrees) == {"row": 2}


def test_kv_heads_on_row_and_col() -> None:
    """Three ways: split by row and shared on col, shared on both, split by both."""
    degrees = degrees_of(row=2, col=4)
    expected = {
        8: ([[0], [1], [2], [3], [4], [5], [6], [7]], {}),
        4: ([[0], [0], [1], [1], [2], [2], [3], [3]], {"col": 2}),
        2: ([[0]] * 4 + [[1]] * 4, {"col": 4}),
        1: ([[0]] * 8, {"row": 2, "col": 4}),
    }
    for heads, (held, over) in expected.items():
        sharding = Sharding.make([heads], ["kv_heads"], INNER["features"], degrees)
        assert list(parts(sharding, degrees, torch.arange(heads)).values()) == held
        assert sharding.over(degrees) == over


def test_vocabulary_is_padded_and_some_ranks_hold_only_padding() -> None:
    degrees = degrees_of(row=4)
    sharding = Sharding.make([5], ["vocab"], WEIGHTS, degrees)
    held = parts(sharding, degrees, torch.arange(1, 6))
    assert list(held.values()) == [[1, 2], [3, 4], [5, 0], [0, 0]]
    empty = sharding.place(dict.fromkeys(AXES, 0) | {"row": 3})
    assert (empty.start, empty.valid) == ((5,), (0,))  # no token of the model is "mine" there


def test_vocabulary_is_padded_for_col_as_well() -> None:
    """Embedding and head (row) and the logits (row·col) agree on the padded size."""
    degrees = degrees_of(row=2, col=2)
    weight = Sharding.make([5], ["vocab"], WEIGHTS, degrees)
    logits = Sharding.make([5], ["vocab"], INNER["features"], degrees)
    assert weight.local == (4,)
    assert logits.local == (2,)
    assert Sharding.make([5], ["vocab"], WEIGHTS, degrees_of(col=2)).local == (6,)
    assert Sharding.make([6], ["vocab"], WEIGHTS, degrees_of(col=2)).local == (6,)


def test_depth_pads_what_row_has_left() -> None:
    degrees = degrees_of(depth=2, row=2)
    sharding = Sharding.make([6], ["mlp"], WEIGHTS, degrees, depth=True)
    held = [sharding.place(i).take(torch.arange(1, 7)).tolist() for i in coordinates(degrees)]
    assert held == [[1, 2], [4, 5], [3, 0], [6, 0]]  # depth is outside row on the grid
    assert (sharding.local, sharding.gathered) == ((2,), (3,))
    assert sharding.without("depth") == Sharding.make([6], ["mlp"], WEIGHTS, degrees)


def test_packed_dims_are_cut_one_by_one() -> None:
    """A fused q, k, v of two elements each: every rank gets its part of all three."""
    degrees = degrees_of(row=2)
    sharding = Sharding.make([6, 1], [(3, "heads"), "embed"], WEIGHTS, degrees)
    assert sharding.shape == (3, 2, 1)
    whole = torch.arange(6).view(6, 1)
    held = [sharding.place(i).take(whole).flatten().tolist() for i in coordinates(degrees)]
    assert held == [[0, 2, 4], [1, 3, 5]]
    across = Sharding.make([1, 6], ["embed", (3, "heads")], WEIGHTS, degrees)
    held = [across.place(i).take(whole.T).flatten().tolist() for i in coordinates(degrees)]
    assert held == [[0, 2, 4], [1, 3, 5]]


def test_whole_tensors_lie_on_all_ranks() -> None:
    degrees = degrees_of(data=2, row=2)
    scalar = Sharding.make([], [], WEIGHTS, degrees)
    assert scalar.over(degrees) == {"data": 2, "row": 2}
    place = scalar.place(next(coordinates(degrees)))
    assert place.take(torch.tensor(3.0)).item() == 3.0


def test_rank_counts_once_on_every_part() -> None:
    """The number of ranks is the number of parts times those that share each."""
    degrees = degrees_of(data=2, depth=2, row=4, col=2)
    sharding = Sharding.make(
        [4, 8], ["kv_heads", "embed"], WEIGHTS, degrees, units={"kv_heads": 2}, depth=True
    )
    count = Counter(sharding.place(index) for index in coordinates(degrees))
    assert set(count.values()) == {math.prod(sharding.over(degrees).values())} == {4}


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ([6], ["heads"], r"row=4 does not divide heads=6.*Use a divisor of 6"),
        ([6], ["kv_heads"], r"row=4 does not divide kv_heads=6"),
        ([8, 8], ["heads", "mlp"], r"row splits two of the dims \('heads', 'mlp'\).*at most one"),
        ([8, 8], ["embed", "embed"], "col splits two of the dims"),
        ([8, 8], ["embed"], r"name 1 dims of a tensor of shape \(8, 8\).*Name 2 dims"),
        ([8], [(3, "heads")], r"packs 3 heads into 8 elements"),
    ],
)
def test_tensors_that_cannot_be_cut(shape: list[int], dims: list[Dim], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        Sharding.make(shape, dims, WEIGHTS, degrees_of(row=4, col=2))


def test_elements_that_are_no_multiple_of_the_units() -> None:
    with pytest.raises(ShardingError, match="heads has 10 elements for 4 units"):
        Sharding.make([10], ["heads"], WEIGHTS, degrees_of(row=4), units={"heads": 4})


@pytest.mark.parametrize("name", ["heads", "kv_heads", "mlp", "vocab"])
def test_layers_enter_and_leave(name: str) -> None:
    samples, features = Table("samples"), Table("features")
    assert samples.move(name, "embed").gather == features.move(name, "embed").gather
    assert samples.move(name, "embed").gather == Step("row", 1)
    assert samples.move(name, "embed").scatter == Step("col", 0)
    assert features.move(name, "embed").scatter == Step("col", -1)
    assert samples.move("embed", name).gather == Step("col", 0)
    assert features.move("embed", name).gather == Step("col", -1)
    assert samples.move("embed", name).scatter == Step("row", 1)
    assert features.move("embed", name).scatter == Step("row", 1)


@pytest.mark.parametrize(
    "dims",
    [
        ("embed", "embed"),
        ("heads", "mlp"),
        ("expert", "embed"),
        ("embed", "expert"),
        ("batch", "heads"),
        ("seq", "mlp"),
        ("rank", "rank"),
        ("vocab", "rank"),
    ],
)
def test_layers_that_go_nowhere(dims: tuple[str, str]) -> None:
    with pytest.raises(
        ShardingError, match=r"'heads', 'kv_heads', 'mlp', 'vocab'.*Rename"
    ) as error:
        Table().move(*dims)
    assert str(dims) in str(error.value)


def test_regions() -> None:
    table = Table("features")
    assert table.axes("embed") == ("col",)
    assert table.axes("heads") == ("row", "col")
    assert table.axes("whole") == ()
    assert table.tokens("embed", "seq") == ("context", "row")
    assert table.tokens("heads", "seq") == ("context",)
    assert Table("samples").tokens("mlp", "batch") == ("data", "expert", "depth", "col")


@pytest.mark.parametrize(
    ("inner", "dims", "move"),
    [
        ("samples", ("rank", "embed"), Move(scatter=Step("col", 0))),
        ("samples", ("heads", "rank"), Move(gather=Step("row", 1))),
        ("samples", ("rank", "mlp"), Move(scatter=Step("row", 1))),
        ("samples", ("embed", "rank"), Move(gather=Step("col", 0))),
        ("features", ("rank", "embed"), Move(total="col")),
        ("features", ("heads", "rank"), Move(gather=Step("row", 1), share="col")),
        ("features", ("rank", "mlp"), Move(scatter=Step("row", 1), total="col")),
        ("features", ("embed", "rank"), Move(share="col")),
    ],
)
def test_a_rank_is_whole(inner: Inner, dims: tuple[str, str], move: Move) -> None:
    """Only its own activations are moved, to where the tokens of the other side lie."""
    assert Table(inner).move(*dims) == move
