"""Places of random tensors on random grids: disjoint, covering, padded with zeros, shared alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ranvier.config.plan import AXES, InnerSplit, Plan, RowSplit
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.sharding import (
    GATHER_AXES,
    INNER_RULES,
    OUTER_RULE,
    REPLICA_AXES,
    WEIGHT_RULE,
    CommStep,
    Dim,
    LinearComm,
    Shard,
    Sharding,
    ShardingTable,
    local_range,
    round_up,
)

RULES = {
    "weights": WEIGHT_RULE,
    "outer": OUTER_RULE,
    **{f"inner {k}": v for k, v in INNER_RULES.items()},
}


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
    gather_axes: tuple[str, ...]

    @property
    def sharding(self) -> Sharding:
        return Sharding.from_dims(
            self.shape,
            self.dims,
            RULES[self.rule],
            self.degrees,
            units=self.units,
            gather_axes=self.gather_axes,
        )

    @property
    def places(self) -> list[Shard]:
        return [self.sharding.shard_at(index) for index in coordinates(self.degrees)]


@st.composite
def tensors(draw: st.DrawFn) -> Drawn:
    """A tensor whose dims can be cut: units are multiples of their ranks, or kv heads shared."""
    degrees = degrees_of(
        data=draw(st.integers(1, 2)),
        context=draw(st.integers(1, 2)),
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
        split = [d for d, axes in RULES[rule].items() if set(axes) <= free and d not in OUTER_RULE]
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
    gathers = [(), *GATHER_AXES.values()] if rule == "weights" else [()]
    return Drawn(shape, dims, units, degrees, rule, draw(st.sampled_from(gathers)))


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
    over = sharding.replica_counts(drawn.degrees)
    holders: dict[int, list[int]] = {}
    flat = torch.arange(math.prod(drawn.shape)).view(drawn.shape)
    for rank, place in enumerate(drawn.places):
        for element in flat.view(place.global_shape)[place.global_slices].flatten().tolist():
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
    over = drawn.sharding.replica_counts(drawn.degrees)
    for rank, place in enumerate(places):
        if math.prod(place.valid_shape):
            same = [other for other, at in enumerate(places) if at == place]
            assert same == sorted(Grid(drawn.degrees, rank=rank).axis(share=over).ranks)


@given(tensors())
def test_take_and_put_return_the_whole_and_padding_is_zero(drawn: Drawn) -> None:
    whole = torch.arange(1.0, math.prod(drawn.shape) + 1).view(drawn.shape)
    back = torch.zeros_like(whole)
    for place in drawn.places:
        part = place.slice_from(whole)
        assert tuple(part.shape) == drawn.sharding.local_shape == place.local_shape
        inside = torch.zeros(place.local_shape, dtype=torch.bool)
        inside[tuple(slice(n) for n in place.valid_shape)] = True
        assert (part[~inside] == 0).all()
        assert (part[inside] != 0).all()
        place.write_into(back, part)
    assert torch.equal(back, whole)


@given(tensors(), st.integers(1, 5))
def test_flat_ranges_over_data_cover_the_box(drawn: Drawn, ranks: int) -> None:
    """Ranges of equal length, the last cut to the end; also those wholly behind it."""
    whole = torch.arange(1.0, math.prod(drawn.shape) + 1).view(drawn.shape)
    back = torch.zeros_like(whole)
    for place in drawn.places:
        size = math.prod(place.local_shape)
        step = -(-size // ranks) + 1
        parts = [place.narrow_flat(i * step, (i + 1) * step) for i in range(ranks)]
        taken = [part.slice_from(whole) for part in parts]
        assert all(
            0 <= a <= b <= size for a, b in (part.flat_range for part in parts if part.flat_range)
        )
        assert torch.equal(torch.cat(taken), place.slice_from(whole).flatten())
        for part, values in zip(parts, taken, strict=True):
            part.write_into(back, values)
    assert torch.equal(back, whole)


def test_putting_a_range_leaves_the_rest() -> None:
    place = Sharding.from_dims([4, 6], ["whole", "embed"], WEIGHT_RULE, degrees_of(col=2)).shard_at(
        dict.fromkeys(AXES, 0) | {"col": 1}
    )
    whole = torch.zeros(4, 6)
    place.narrow_flat(2, 5).write_into(whole, torch.ones(3))
    expected = torch.zeros(4, 6)
    expected[0, 5] = expected[1, 3] = expected[1, 4] = 1
    assert torch.equal(whole, expected)


def parts(sharding: Sharding, degrees: dict[str, int], whole: Tensor) -> dict[tuple[int, int], Any]:
    """What the ranks hold, by (row, col)."""
    return {
        (index["row"], index["col"]): sharding.shard_at(index).slice_from(whole).tolist()
        for index in coordinates(degrees)
    }


def test_more_rows_than_kv_heads() -> None:
    """Two heads of two elements on four rows: neighbours share."""
    degrees = degrees_of(row=4)
    sharding = Sharding.from_dims([4], ["kv_heads"], WEIGHT_RULE, degrees, units={"kv_heads": 2})
    held = parts(sharding, degrees, torch.arange(4))
    assert list(held.values()) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert sharding.replica_counts(degrees) == {"row": 2}


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
        sharding = Sharding.from_dims([heads], ["kv_heads"], INNER_RULES["features"], degrees)
        assert list(parts(sharding, degrees, torch.arange(heads)).values()) == held
        assert sharding.replica_counts(degrees) == over


def test_vocabulary_is_padded_and_some_ranks_hold_only_padding() -> None:
    degrees = degrees_of(row=4)
    sharding = Sharding.from_dims([5], ["vocab"], WEIGHT_RULE, degrees)
    held = parts(sharding, degrees, torch.arange(1, 6))
    assert list(held.values()) == [[1, 2], [3, 4], [5, 0], [0, 0]]
    empty = sharding.shard_at(dict.fromkeys(AXES, 0) | {"row": 3})
    assert (empty.global_offset, empty.valid_shape) == (
        (5,),
        (0,),
    )  # no token of the model is "mine" there


def test_vocabulary_is_padded_for_col_as_well() -> None:
    """Embedding and head (row) and the logits (row·col) agree on the padded size."""
    degrees = degrees_of(row=2, col=2)
    weight = Sharding.from_dims([5], ["vocab"], WEIGHT_RULE, degrees)
    logits = Sharding.from_dims([5], ["vocab"], INNER_RULES["features"], degrees)
    assert weight.local_shape == (4,)
    assert logits.local_shape == (2,)
    assert Sharding.from_dims([5], ["vocab"], WEIGHT_RULE, degrees_of(col=2)).local_shape == (6,)
    assert Sharding.from_dims([6], ["vocab"], WEIGHT_RULE, degrees_of(col=2)).local_shape == (6,)


def test_depth_pads_what_row_has_left() -> None:
    degrees = degrees_of(depth=2, row=2)
    sharding = Sharding.from_dims([6], ["mlp"], WEIGHT_RULE, degrees, gather_axes=("depth",))
    held = [
        sharding.shard_at(i).slice_from(torch.arange(1, 7)).tolist() for i in coordinates(degrees)
    ]
    assert held == [[1, 2], [4, 5], [3, 0], [6, 0]]  # depth is outside row on the grid
    assert (sharding.local_shape, sharding.unsharded_shape) == ((2,), (3,))
    assert sharding.gathered_sharding == Sharding.from_dims([6], ["mlp"], WEIGHT_RULE, degrees)


def test_context_and_depth_split_as_one_fused_axis() -> None:
    """Parts of five elements over 2 · 2 ranks follow each other; only the last ones are padded."""
    degrees = degrees_of(context=2, depth=2)
    gather_axes = ShardingTable(shard_weights_over="depth_context").gather_axes
    sharding = Sharding.from_dims([5], ["mlp"], WEIGHT_RULE, degrees, gather_axes=gather_axes)
    whole = torch.arange(1, 6)
    held = [sharding.shard_at(i).slice_from(whole).tolist() for i in coordinates(degrees)]
    assert held == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert (sharding.unsharded_shape, sharding.gather_dim) == ((5,), 0)
    assert sharding.replica_counts(degrees) == {}


def test_packed_dims_are_cut_one_by_one() -> None:
    """A fused q, k, v of two elements each: every rank gets its part of all three."""
    degrees = degrees_of(row=2)
    sharding = Sharding.from_dims([6, 1], [(3, "heads"), "embed"], WEIGHT_RULE, degrees)
    assert sharding.shape == (3, 2, 1)
    whole = torch.arange(6).view(6, 1)
    held = [sharding.shard_at(i).slice_from(whole).flatten().tolist() for i in coordinates(degrees)]
    assert held == [[0, 2, 4], [1, 3, 5]]
    across = Sharding.from_dims([1, 6], ["embed", (3, "heads")], WEIGHT_RULE, degrees)
    held = [across.shard_at(i).slice_from(whole.T).flatten().tolist() for i in coordinates(degrees)]
    assert held == [[0, 2, 4], [1, 3, 5]]


def test_whole_tensors_lie_on_all_ranks() -> None:
    degrees = degrees_of(data=2, row=2)
    scalar = Sharding.from_dims([], [], WEIGHT_RULE, degrees)
    assert scalar.replica_counts(degrees) == {"data": 2, "row": 2}
    place = scalar.shard_at(next(coordinates(degrees)))
    assert place.slice_from(torch.tensor(3.0)).item() == 3.0


def test_rank_counts_once_on_every_part() -> None:
    """The number of ranks is the number of parts times those that share each."""
    degrees = degrees_of(data=2, depth=2, row=4, col=2)
    sharding = Sharding.from_dims(
        [4, 8],
        ["kv_heads", "embed"],
        WEIGHT_RULE,
        degrees,
        units={"kv_heads": 2},
        gather_axes=("depth",),
    )
    count = Counter(sharding.shard_at(index) for index in coordinates(degrees))
    assert set(count.values()) == {math.prod(sharding.replica_counts(degrees).values())} == {4}


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
        Sharding.from_dims(shape, dims, WEIGHT_RULE, degrees_of(row=4, col=2))


def test_elements_that_are_no_multiple_of_the_units() -> None:
    with pytest.raises(ShardingError, match="heads has 10 elements for 4 units"):
        Sharding.from_dims([10], ["heads"], WEIGHT_RULE, degrees_of(row=4), units={"heads": 4})


@pytest.mark.parametrize("name", ["heads", "kv_heads", "mlp", "vocab"])
def test_layers_enter_and_leave(name: str) -> None:
    samples, features = ShardingTable("samples"), ShardingTable("features")
    assert samples.linear_comm(name, "embed").gather == features.linear_comm(name, "embed").gather
    assert samples.linear_comm(name, "embed").gather == CommStep(("row",), 1)
    assert samples.linear_comm(name, "embed").scatter == CommStep(("col",), 0)
    assert features.linear_comm(name, "embed").scatter == CommStep(("col",), -1)
    assert samples.linear_comm("embed", name).gather == CommStep(("col",), 0)
    assert features.linear_comm("embed", name).gather == CommStep(("col",), -1)
    assert samples.linear_comm("embed", name).scatter == CommStep(("row",), 1)
    assert features.linear_comm("embed", name).scatter == CommStep(("row",), 1)


@pytest.mark.parametrize(
    "dims",
    [
        ("vocab", "vocab"),
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
        ShardingTable().linear_comm(*dims)
    assert str(dims) in str(error.value)


@pytest.mark.parametrize(
    ("inner", "dim", "axes"),
    [
        ("samples", "embed", ("col",)),
        ("features", "embed", ("col",)),
        ("samples", "heads", ("row",)),
        ("features", "mlp", ("row", "col")),
    ],
)
def test_a_layer_from_a_dim_to_itself_stays(
    inner: InnerSplit, dim: str, axes: tuple[str, ...]
) -> None:
    """Its features are summed and scattered over the axes that split them; nothing is gathered."""
    for row_splits in get_args(RowSplit):
        table = ShardingTable(inner, row_splits=row_splits)
        assert table.weight_axes(dim, dim) == ((), axes)
        assert table.linear_comm(dim, dim) == LinearComm(scatter=CommStep(axes, -1))


def test_the_in_dim_of_a_same_dim_weight_is_split() -> None:
    degrees = degrees_of(data=2, depth=2, row=2, col=2)
    whole = torch.arange(3 * 4).view(3, 4)
    weight = ShardingTable().weight_sharding([3, 4], ["embed", "embed"], degrees)
    assert (weight.shape, weight.local_shape, weight.unsharded_shape) == ((3, 4), (2, 2), (3, 2))
    assert weight.replica_counts(degrees) == {"data": 2, "row": 2}
    held = {
        (index["depth"], index["col"]): weight.shard_at(index).slice_from(whole).tolist()
        for index in coordinates(degrees)
    }
    assert held == {
        (0, 0): [[0, 1], [4, 5]],
        (0, 1): [[2, 3], [6, 7]],
        (1, 0): [[8, 9], [0, 0]],
        (1, 1): [[10, 11], [0, 0]],
    }


@pytest.mark.parametrize("inner", ["samples", "features"])
def test_packed_dims_of_a_same_dim_weight(inner: InnerSplit) -> None:
    """Each of the packed in dims is split as the activations are; the out dims are whole."""
    degrees = degrees_of(row=2, col=2)
    table = ShardingTable(inner)
    weight = table.weight_sharding([12, 8], [(3, "mlp"), (2, "mlp")], degrees)
    turned = table.weight_sharding([8, 12], [(2, "mlp"), (3, "mlp")], degrees, is_transposed=True)
    ranks = 2 if inner == "samples" else 4
    assert (weight.shape, weight.local_shape) == ((3, 4, 2, 4), (3, 4, 2, 4 // ranks))
    assert (turned.shape, turned.local_shape) == ((2, 4, 3, 4), (2, 4 // ranks, 3, 4))
    x = Sharding.from_dims([8], [(2, "mlp")], table.activation_rule("mlp"), degrees)
    columns = torch.arange(8).expand(12, 8)
    for index in coordinates(degrees):
        mine = x.shard_at(index).slice_from(torch.arange(8))
        assert (weight.shard_at(index).slice_from(columns) == mine).all()


def test_other_dims_of_a_weight_are_split_as_before() -> None:
    degrees = degrees_of(expert=2, depth=2, row=2, col=2)
    for dims in (["expert", "mlp", "embed"], ["vocab", "embed"], [(3, "heads"), "embed"]):
        shape = [12] * len(dims)
        want = Sharding.from_dims(shape, dims, WEIGHT_RULE, degrees, gather_axes=("depth",))
        assert ShardingTable().weight_sharding(shape, dims, degrees) == want


def test_regions() -> None:
    table = ShardingTable("features")
    assert table.feature_axes("embed") == ("col",)
    assert table.feature_axes("heads") == ("row", "col")
    assert table.feature_axes("whole") == ()
    assert table.token_axes("embed", "seq") == ("context", "row")
    assert table.token_axes("heads", "seq") == ("context",)
    assert ShardingTable("samples").token_axes("mlp", "batch") == ("data", "expert", "depth", "col")


@pytest.mark.parametrize(
    ("inner", "dims", "move"),
    [
        ("samples", ("rank", "embed"), LinearComm(scatter=CommStep(("col",), 0))),
        ("samples", ("heads", "rank"), LinearComm(gather=CommStep(("row",), 1))),
        ("samples", ("rank", "mlp"), LinearComm(scatter=CommStep(("row",), 1))),
        ("samples", ("embed", "rank"), LinearComm(gather=CommStep(("col",), 0))),
        ("features", ("rank", "embed"), LinearComm(reduce_axes=("col",))),
        (
            "features",
            ("heads", "rank"),
            LinearComm(gather=CommStep(("row",), 1), copy_axes=("col",)),
        ),
        (
            "features",
            ("rank", "mlp"),
            LinearComm(scatter=CommStep(("row",), 1), reduce_axes=("col",)),
        ),
        ("features", ("embed", "rank"), LinearComm(copy_axes=("col",))),
    ],
)
def test_a_rank_is_whole(inner: InnerSplit, dims: tuple[str, str], move: LinearComm) -> None:
    """Only its own activations are moved, to where the tokens of the other side lie."""
    assert ShardingTable(inner).linear_comm(*dims) == move


# ---- local parts of activations ------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> tuple[ShardingTable, dict[str, int]]:
    """A table, and a grid."""
    degrees = {axis: draw(st.sampled_from((1, 1, 2, 3))) for axis in AXES}
    inner: InnerSplit = draw(st.sampled_from(("samples", "features")))
    return ShardingTable(inner, draw(st.booleans())), degrees


def split_by_hand(
    table: ShardingTable, dim: str, shape: tuple[int, int, int], rank: dict[str, int], grid: Any
) -> Tensor:
    """The elements of a rank, cut axis after axis as the rules say; of all replicas together."""
    x = torch.arange(math.prod(shape)).view(shape)
    rule = table.activation_rule(dim)
    for place, name in enumerate(("batch", "seq", dim)):
        for axis in rule.get(name, ()):
            x = x.chunk(grid[axis], place)[rank[axis]]
    return x


DIMS = ("embed", "heads", "mlp", "vocab", "rank")


@given(drawn=tables(), dim=st.sampled_from(DIMS), sizes=st.tuples(*[st.integers(1, 3)] * 3))
def test_local_shapes_and_indices_are_those_of_cutting(
    drawn: tuple[ShardingTable, dict[str, int]], dim: str, sizes: tuple[int, int, int]
) -> None:
    table, degrees = drawn
    rule = table.activation_rule(dim)
    parts = [math.prod(degrees[axis] for axis in rule.get(n, ())) for n in ("batch", "seq", dim)]
    shape = tuple(size * count for size, count in zip(sizes, parts, strict=True))
    replicas = math.prod(degrees[axis] for axis in REPLICA_AXES)
    # The corners of the grid are enough: every index is 0 or the last one.
    corners = product(*({0, n - 1} for n in degrees.values()))
    for corner in corners:
        rank = dict(zip(AXES, corner, strict=True))
        mine = split_by_hand(table, dim, shape, rank, degrees)  # type: ignore[arg-type]
        inside = shape[0] // replicas, shape[1], shape[2]
        assert table.local_shape(dim, *inside, degrees) == tuple(mine.shape)
        for place, name in enumerate(("batch", "seq", dim)):
            held = local_range(shape[place], rule.get(name, ()), degrees, rank)
            index = mine.flatten() // math.prod(shape[place + 1 :]) % shape[place]
            assert sorted({*index.tolist()}) == [*held]
            assert table.num_parts(dim, name, degrees) == parts[place]


@given(drawn=tables(), size=st.integers(1, 100))
def test_multiples_are_the_smallest_that_every_region_can_split(
    drawn: tuple[ShardingTable, dict[str, int]], size: int
) -> None:
    table, degrees = drawn

    def cuts(name: str, *, without: tuple[str, ...] = ()) -> list[int]:
        """Ranks that split a dim of tokens, region by region."""
        rules = [table.activation_rule(dim) for dim in DIMS]
        return [math.prod(degrees[a] for a in rule[name] if a not in without) for rule in rules]

    def smallest(counts: list[int]) -> int:
        return next(n for n in range(1, 10**6) if all(n % count == 0 for count in counts))

    assert table.seq_multiple(degrees) == smallest(cuts("seq"))
    assert table.batch_multiple(degrees) == smallest(cuts("batch", without=REPLICA_AXES))
    # As the head and the embedding are padded.
    found = table.padded_vocab(size, degrees)
    for rule in (table.weight_rule, table.activation_rule("vocab")):
        sharding = Sharding.from_dims([size], ["vocab"], rule, degrees)
        ranks = math.prod(degrees[axis] for axis in rule["vocab"])
        assert sharding.local_shape[0] * ranks == found >= size
    assert round_up(size, 7) == min(n for n in range(0, 200, 7) if n >= size)


def test_a_table_has_the_rules_of_its_plan() -> None:
    plan = Plan(pipe=2, col=2, col_splits="features", vocab_over_pipe=True)
    assert ShardingTable.from_plan(plan) == ShardingTable("features", vocab_over_pipe=True)
    assert plan.ranks_per_copy == 4 and not plan.has_whole_blocks
    assert Plan(pipe=4, data=8, expert=2).has_whole_blocks
