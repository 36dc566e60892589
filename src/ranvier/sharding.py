"""Sharding: which part of which tensor is stored on which rank; all index arithmetic is here.

A model names the dims of its weights; four tables map those names to axes of the grid:

* `WEIGHT_RULE`: how a weight is split. Matrices are also split over `GATHER_AXES`, `depth` or
  `context` and `depth`, along dim 0 (expert weights along the dim after the expert dim), and
  gathered over them before use.
* `OUTER_RULES`: the residual stream, norms, messages. Shape on a rank `[b, s/row, d/col]`, or
  `[b, s, d/col]` for few tokens.
* `INNER_RULES`: attention heads, MLP hidden, logits. `[b/col, s, n/row]` or
  `[b, s, n/(row·col)]`.
* `UNSPLIT_RULES`: features that no axis splits (a LoRA rank). `[b/col, s/row, r]` or
  `[b, s/row, r]`; `s` instead of `s/row` for few tokens.

Everything else is derived from them here: the shard of a weight on a rank (`Sharding`, `Shard`),
the ranks that hold the same shard and so sum its gradient (`Sharding.replica_counts`), and what a
linear layer communicates (`ShardingTable.linear_comm`). Two dims need not be divisible: the
vocabulary is padded to a multiple of row·col, and dim 0 to a multiple of depth (or context·depth).
Padding follows the valid elements of a rank, is zero, and never leaves the rank.

An axis splits at most one dim of a tensor. The weight of a *same-dim* layer, from a dim to itself
(`(embed, embed)`, `(mlp, mlp)`), would name its axis twice. Its in dim is split like the features
of its input, and its out dim is not split (`ShardingTable.weight_axes`): the layer is row-parallel
and stays in its region. Any dim may be packed, `(2, "embed")`: then each of the packed dims is
split, in weights and in activations, and a rank has its part of all of them.

`ShardingTable` also describes the local part of an activation: its shape (`local_shape`), what its
samples and tokens are padded to (`batch_multiple`, `seq_multiple`, `padded_vocab`), and which axes
split it inside a replica (`axes_inside_replica`). `local_range` returns which indices of a dim are
on a rank.

`context` splits the tokens of a sample in any order, because all layers but attention treat tokens
alike: `order_tokens` returns which tokens of a sample each rank of context holds (`TokenOrder`), as
segments of documents. `row` splits the tokens of a context rank into consecutive parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ranvier.config.plan import AXES, ContextOrder, InnerSplit, Plan, RowSplit, WeightSplit
from ranvier.errors import ShardingError
from ranvier.token_order import balance_tokens

if TYPE_CHECKING:
    import numpy as np
    import torch

AxisRule = Mapping[str, tuple[str, ...]]
Dim = str | tuple[int, str]
"""A named dim; `(3, "heads")` is three `heads` packed consecutively (fused q, k, v)."""

WEIGHT_RULE: AxisRule = {
    "vocab": ("row",),
    "heads": ("row",),
    "kv_heads": ("row",),
    "mlp": ("row",),
    "embed": ("col",),
    "expert": ("expert",),
    "rank": (),
}
GATHER_AXES: Mapping[WeightSplit, tuple[str, ...]] = {
    "depth": ("depth",),
    "depth_context": ("context", "depth"),
}
"""Axes that split the matrices of layers between their uses. A weight is gathered over them, as one
fused axis, before a layer computes."""
OUTER_RULE: AxisRule = {
    "batch": ("data", "expert", "depth"),
    "seq": ("context", "row"),
    "embed": ("col",),
}
OUTER_RULES: Mapping[RowSplit, AxisRule] = {
    "tokens": OUTER_RULE,
    "none": {**OUTER_RULE, "seq": ("context",)},
}
"""With `none`, the ranks of row hold the same tokens: what enters the inner region is not gathered,
and what leaves it is summed by one all-reduce. It suits the few tokens of a decode step."""
INNER_RULES: Mapping[InnerSplit, AxisRule] = {
    "samples": {"batch": ("data", "expert", "depth", "col"), "seq": ("context",)}
    | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("row",)),
    "features": {"batch": ("data", "expert", "depth"), "seq": ("context",)}
    | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("row", "col")),
}
EXPERT_HIDDEN_AXES = ("row", "col")
"""Axes whose ranks together split the hidden features of an expert."""
REPLICA_AXES = OUTER_RULE["batch"]
"""Axes along which ranks read different samples in every region; one coordinate of them is a
replica."""
TOKEN_AXES = (*REPLICA_AXES, *OUTER_RULES["none"]["seq"])
"""Axes along which ranks have different tokens in every region. Those that do not split a weight
also split its gradient and its optimizer states."""
UNSPLIT_RULES: Mapping[tuple[InnerSplit, RowSplit], AxisRule] = {
    (col_splits, row_splits): {"batch": inner["batch"], "seq": outer["seq"], "rank": ()}
    for col_splits, inner in INNER_RULES.items()
    for row_splits, outer in OUTER_RULES.items()
}
"""Tokens are split as in both the outer and the inner region. If col splits only features, the
ranks of col hold the same values, and the same gradients of them."""
TOKEN_DIMS = {"batch": 0, "seq": 1}
"""Position of these dims in an activation; the features are its last dim."""


MATRIX_DIMS = frozenset({"embed", "heads", "kv_heads", "mlp", "features", "channels"})
"""Features between layers. A weight with two of these dims is a hidden matrix, in contrast to
embeddings, heads, routers and adapters."""
REGION_DIMS = ("embed", "mlp")
"""A feature dim of the outer and of the inner region."""


@dataclass(frozen=True)
class CommStep:
    """One communication of a linear layer: over `axes`, fused, along `dim` of the activation.

    Without axes there is no communication.
    """

    axes: tuple[str, ...] = ()
    dim: int = 0


@dataclass(frozen=True)
class LinearComm:
    """Communication of a linear layer: gather the input, matmul, reduce-scatter the output.

    An axis that splits a dim of the weight may split no dim of the activation: the input is then
    replicated over `copy_axes` (backward sums over them), or the output is summed over
    `reduce_axes` and then replicated.
    """

    gather: CommStep = CommStep()
    scatter: CommStep = CommStep()
    copy_axes: tuple[str, ...] = ()
    reduce_axes: tuple[str, ...] = ()


def count_parts(axes: Iterable[str], degrees: Mapping[str, int]) -> int:
    """Return the number of parts into which these axes split a dim."""
    return math.prod(degrees[axis] for axis in axes)


def local_range(
    size: int, axes: Iterable[str], degrees: Mapping[str, int], index: Mapping[str, int]
) -> range:
    """Return the indices of a dim of `size` elements that are on a rank, with `axes` splitting it.

    The first axis is the outermost: `index` (i, j) of axes (a, b) has the part i · b + j.
    """
    parts = 1
    part = 0
    for axis in axes:
        parts = parts * degrees[axis]
        part = part * degrees[axis] + index[axis]
    each, rest = divmod(size, parts)
    assert rest == 0, (size, parts)
    return range(part * each, (part + 1) * each)


@dataclass(frozen=True)
class ShardingTable:
    """The sharding rules of a run; `col_splits` is what col splits in the inner region."""

    col_splits: InnerSplit = "samples"
    vocab_over_pipe: bool = False
    """Whether the stages of a pipeline also split the vocabulary."""
    row_splits: RowSplit = "tokens"
    """What row splits in the outer region."""
    shard_weights_over: WeightSplit = "depth"
    """What splits matrices between their uses."""

    @property
    def gather_axes(self) -> tuple[str, ...]:
        """Axes over which matrices are gathered before use."""
        return GATHER_AXES[self.shard_weights_over]

    @property
    def weight_rule(self) -> AxisRule:
        """The rule by which weights are split."""
        return self._with_vocab_over_pipe(WEIGHT_RULE)

    def activation_rule(self, dim: str) -> AxisRule:
        """Return the rule of activations whose feature dim is `dim`."""
        if dim == "rank":
            return UNSPLIT_RULES[self.col_splits, self.row_splits]
        if dim == "embed":
            return OUTER_RULES[self.row_splits]
        return self._with_vocab_over_pipe(INNER_RULES[self.col_splits])

    def _with_vocab_over_pipe(self, rule: AxisRule) -> AxisRule:
        if self.vocab_over_pipe:
            return {**rule, "vocab": ("pipe", *rule["vocab"])}
        return rule

    def feature_axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes that split `dim` as the features of an activation."""
        return self.activation_rule(dim).get(dim, ())

    def token_axes(self, dim: str, name: str) -> tuple[str, ...]:
        """Returns the axes that split `name` (batch or seq), with `dim` as the feature dim."""
        return self.activation_rule(dim)[name]

    def num_parts(self, dim: str, name: str, degrees: Mapping[str, int]) -> int:
        """Returns the number of parts of `name` (batch, seq or `dim`), with `dim` as the feature
        dim."""
        return count_parts(self.activation_rule(dim).get(name, ()), degrees)

    def axes_inside_replica(self, dim: str, name: str) -> tuple[str, ...]:
        """Return the axes that split `name` (batch or seq) among the ranks of one replica."""
        return tuple(axis for axis in self.token_axes(dim, name) if axis not in REPLICA_AXES)

    def local_shape(
        self, dim: str, samples: int, seq: int, features: int, degrees: Mapping[str, int]
    ) -> tuple[int, int, int]:
        """Return the shape on a rank of an activation `[samples, seq, features]` of one replica.

        dim: the name of its features, such as embed for the residual stream `[b, s/row, d/col]`.
        """
        sizes = (
            (samples, self.axes_inside_replica(dim, "batch")),
            (seq, self.token_axes(dim, "seq")),
            (features, self.feature_axes(dim)),
        )
        b, s, n = (size // count_parts(axes, degrees) for size, axes in sizes)
        return b, s, n

    def batch_multiple(self, degrees: Mapping[str, int]) -> int:
        """Returns the number that must divide the samples of a micro-batch of one replica."""
        return math.lcm(
            *(count_parts(self.axes_inside_replica(dim, "batch"), degrees) for dim in REGION_DIMS)
        )

    def seq_multiple(self, degrees: Mapping[str, int]) -> int:
        """Returns the number that must divide the tokens of a sample."""
        return math.lcm(*(self.num_parts(dim, "seq", degrees) for dim in REGION_DIMS))

    def tokens_per_block(self, block_size: int, degrees: Mapping[str, int]) -> int:
        """Returns the tokens of a block of the KV cache of which a rank stores `block_size`.

        Ranks that split the tokens of attention store the pages of a block in turn.
        """
        return block_size * self.num_parts("kv_heads", "seq", degrees)

    def padded_vocab(self, size: int, degrees: Mapping[str, int]) -> int:
        """Returns the size of a vocabulary with its padding, which is the same for all splits."""
        return round_up(size, _vocab_multiple(self.feature_axes("vocab"), degrees))

    @classmethod
    def from_plan(cls, plan: Plan) -> ShardingTable:
        """Return the rules of a plan."""
        return cls(
            plan.col_splits, plan.vocab_over_pipe, shard_weights_over=plan.shard_weights_over
        )

    def weight_axes(self, out: str, into: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the axes that split the out dim and the in dim of the matrix that a rank uses.

        Between the regions they are those of `WEIGHT_RULE`. From and to a LoRA rank, the other dim
        is split like its activations. From a dim to itself, the in dim is split like the input, and
        the out dim is not, because an axis can split only one of them.
        """
        if out == into:
            return (), self.feature_axes(into)
        if "rank" in (out, into):
            return self.feature_axes(out), self.feature_axes(into)
        # The static rule, not `weight_rule`: a vocabulary split over pipe adds no communication
        # here, because the head sums over stages itself.
        return WEIGHT_RULE[out], WEIGHT_RULE[into]

    def weight_sharding(
        self,
        shape: Sequence[int],
        dims: Sequence[Dim],
        degrees: Mapping[str, int],
        *,
        units: Mapping[str, int] | None = None,
        is_transposed: bool = False,
    ) -> Sharding:
        """Returns how the weight of a layer is split between its uses.

        It is split by the weight rule and over the gather axes. If two of its dims have the same
        name, the in dim is split as `weight_axes` says, and the out dim only over the gather axes.
        The out dim is the first of them, or the second if the weight is transposed.
        """
        names = [dim_name(dim) for dim in dims]
        rule = self.weight_rule
        same = [i for i, name in enumerate(names) if name and names.count(name) == 2]
        if same:
            out = same[1 if is_transposed else 0]
            rule = {**rule, names[out]: self.weight_axes(names[out], names[out])[1]}
            # A dim without a name is not split.
            dims = [_rename_dim(dim, "") if i == out else dim for i, dim in enumerate(dims)]
        return Sharding.from_dims(
            shape, dims, rule, degrees, units=units, gather_axes=self.gather_axes
        )

    def linear_comm(self, out: str, into: str) -> LinearComm:
        """Returns the communication of a linear layer whose weight is `(out, into)`.

        If the out dim is split over an axis that still splits the input's tokens, they are
        gathered. If the in dim is split over an axis, the product is a partial sum there, which is
        reduce-scattered along the dim that the output region splits over that axis. A layer from
        embed to an inner dim enters the inner region, and a layer in the opposite direction leaves
        it; a LoRA rank is between the two. A same-dim layer stays: nothing is gathered, and its
        features are reduce-scattered.
        """
        _check_linear_dims(out, into)
        out_axes, in_axes = self.weight_axes(out, into)
        gather, copied = _comm_step(self.activation_rule(into), out_axes)
        scatter, reduced = _comm_step(self.activation_rule(out), in_axes)
        return LinearComm(gather, scatter, copied, reduced)


def dim_name(dim: Dim) -> str:
    """Returns the name of a dim, packed or not."""
    if isinstance(dim, str):
        return dim
    return dim[1]


def num_packed_dims(dim: Dim) -> int:
    """Returns how many dims are packed into one; 1 if it is not packed."""
    if isinstance(dim, str):
        return 1
    return dim[0]


def _rename_dim(dim: Dim, name: str) -> Dim:
    if isinstance(dim, str):
        return name
    return dim[0], name


def _check_linear_dims(out: str, into: str) -> None:
    """Raises unless a linear layer changes the region, has a LoRA rank, or stays in a dim."""
    inside = set(WEIGHT_RULE) & set(INNER_RULES["samples"])
    # Logits are padded, but rows of a weight that no axis splits are not.
    staying = ({"embed"} | inside) - {"vocab"}
    outside = {out, into} - inside
    if out == into:
        valid = out in staying
    else:
        valid = bool(outside) and outside <= {"embed", "rank"} and {out, into} != {"vocab", "rank"}
    if not valid:
        raise ShardingError(
            f"A linear layer has the dims ({out!r}, {into!r}). It must map 'embed' to one of "
            f"{sorted(inside)} or back, 'rank' to or from these, or one of {sorted(staying)} to "
            "itself. Rename one of its dims."
        )


def _comm_step(region: AxisRule, axes: Sequence[str]) -> tuple[CommStep, tuple[str, ...]]:
    """Returns the step along the dim that `axes` split in `region`, and the axes that split none.

    The dim of the features is -1.
    """
    dims = {axis: TOKEN_DIMS.get(dim, -1) for dim, split in region.items() for axis in split}
    split = tuple(axis for axis in axes if axis in dims)
    alike = tuple(axis for axis in axes if axis not in dims)
    if not split:
        return CommStep(), alike
    (dim,) = {dims[axis] for axis in split}
    return CommStep(split, dim), alike


@dataclass(frozen=True)
class AxisSplit:
    """Split of one dim over one axis: `replicas` consecutive ranks hold the same `block_size`
    elements."""

    axis: str
    ranks: int
    replicas: int
    block_size: int

    @property
    def is_gathered(self) -> bool:
        """Whether a weight is gathered over the axis before use: other rules never use it."""
        return self.axis in GATHER_AXES["depth_context"]


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, and where its elements are in the shard that holds it."""

    start: tuple[int, ...]
    """First index in each dim of the global tensor."""
    size: tuple[int, ...]
    offset: int
    """Offset of its first element in the flattened shard."""
    strides: tuple[int, ...]
    """Strides in the shard, in elements."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.size)

    @property
    def span(self) -> int:
        """Number of elements of the shard from its first to its last one, inclusive."""
        steps = zip(self.size, self.strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + 1

    def intersection(self, other: Box) -> Box | None:
        """Return the intersection with `other`, with offsets into this shard; None if empty."""
        start = tuple(map(max, self.start, other.start))
        ends = ([a + n for a, n in zip(x.start, x.size, strict=True)] for x in (self, other))
        size = tuple(min(e, f) - a for e, f, a in zip(*ends, start, strict=True))
        if any(n <= 0 for n in size):
            return None
        moved = zip(start, self.start, self.strides, strict=True)
        offset = self.offset + sum((a - b) * stride for a, b, stride in moved)
        return Box(start, size, offset, self.strides)

    def split_to_fit(self, most: int) -> list[Box]:
        """Split the box along its first dims into pieces that span at most `most` elements each."""
        if self.span <= most or not self.size:
            return [self]
        # A first dim of one row cannot be split further, so split along the following dims.
        if self.size[0] == 1:
            inner = Box(self.start[1:], self.size[1:], self.offset, self.strides[1:]).split_to_fit(
                most
            )
            first = self.start[:1]
            stride = self.strides[:1]
            return [Box(first + x.start, (1, *x.size), x.offset, stride + x.strides) for x in inner]
        # Whole rows per piece; a row that is too long itself is split in the recursion.
        rows = max(most // max(self.strides[0], 1), 1)
        return [
            piece
            for row in range(0, self.size[0], rows)
            for piece in Box(
                (self.start[0] + row, *self.start[1:]),
                (min(rows, self.size[0] - row), *self.size[1:]),
                self.offset + row * self.strides[0],
                self.strides,
            ).split_to_fit(most)
        ]


@dataclass(frozen=True)
class Shard:
    """A part of a global tensor: a box, possibly padded at its end, or a flat range of it."""

    global_shape: tuple[int, ...]
    """Shape of the global tensor."""
    global_offset: tuple[int, ...]
    """First index of the box in each dim."""
    valid_shape: tuple[int, ...]
    """Size of the box without padding, in each dim."""
    local_shape: tuple[int, ...]
    """Shape of the box in memory, including padding."""
    flat_range: tuple[int, int] | None = None
    """Range of the flattened, padded box (ZeRO over replicas); None means all of it."""

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(
            slice(a, a + n) for a, n in zip(self.global_offset, self.valid_shape, strict=True)
        )

    def slice_from(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this shard of a global tensor, zero-padded: `local_shape`, or its flat range."""
        part = whole.new_zeros(self.local_shape)
        part[tuple(slice(n) for n in self.valid_shape)] = whole.reshape(self.global_shape)[
            self.global_slices
        ]
        if self.flat_range is None:
            return part
        return part.view(-1)[slice(*self.flat_range)].clone()

    def write_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this shard into a global tensor."""
        # A flat range is not a box of the global tensor, so read the box, fill in the range, and
        # write it back.
        if self.flat_range is not None:
            box = replace(self, flat_range=None)
            filled = box.slice_from(whole)
            filled.view(-1)[slice(*self.flat_range)] = part[
                : self.flat_range[1] - self.flat_range[0]
            ]
            return box.write_into(whole, filled)
        whole.view(self.global_shape)[self.global_slices] = part.reshape(self.local_shape)[
            tuple(slice(n) for n in self.valid_shape)
        ]
        return None

    def to_boxes(self) -> list[Box]:
        """Return the shard as boxes of the global tensor, without padding; several if flat."""
        # The shard is contiguous; offsets count from the start of its flat range.
        strides = tuple(math.prod(self.local_shape[i + 1 :]) for i in range(len(self.local_shape)))
        first, last = self.flat_range or (0, math.prod(self.local_shape))
        found = []
        for corner, extent in _flat_range_boxes(self.local_shape, first, last):
            # Cut off the padding.
            size = tuple(
                min(n, have - a)
                for a, n, have in zip(corner, extent, self.valid_shape, strict=True)
            )
            if all(n > 0 for n in size):
                at = sum(a * stride for a, stride in zip(corner, strides, strict=True))
                start = tuple(a + b for a, b in zip(self.global_offset, corner, strict=True))
                found.append(Box(start, size, at - first, strides))
        return found

    def narrow_flat(self, start: int, stop: int) -> Shard:
        """Return the flat range `[start, stop)` of this box, clipped to its end."""
        size = math.prod(self.local_shape)
        return replace(self, flat_range=(min(start, size), min(stop, size)))


def _flat_range_boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields corner and extent of the boxes that cover elements `[first, last)` of an array.

    These are the end of a row, full rows and the start of a row: at most 2 · dims - 1 boxes.
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    # Rows begun .. ended are the full ones; there may be a partial row before and after them.
    row = math.prod(shape[1:])
    begun = -(-first // row)
    ended = last // row
    # The whole range is inside one row.
    if begun > ended:
        for corner, extent in _flat_range_boxes(shape[1:], first - ended * row, last - ended * row):
            yield (ended, *corner), (1, *extent)
        return
    for corner, extent in _flat_range_boxes(shape[1:], first - begun * row + row, row):
        if first < begun * row:
            yield (begun - 1, *corner), (1, *extent)
    if begun < ended:
        yield (begun, *(0 for _ in shape[1:])), (ended - begun, *shape[1:])
    for corner, extent in _flat_range_boxes(shape[1:], 0, last - ended * row):
        yield (ended, *corner), (1, *extent)


@dataclass(frozen=True)
class Sharding:
    """How a tensor of `shape` is split: for each dim the axes that split it, outermost first."""

    shape: tuple[int, ...]
    splits: tuple[tuple[AxisSplit, ...], ...]

    @classmethod
    def from_dims(
        cls,
        shape: Sequence[int],
        dims: Sequence[Dim],
        rule: AxisRule,
        degrees: Mapping[str, int],
        *,
        units: Mapping[str, int] | None = None,
        gather_axes: Sequence[str] = (),
    ) -> Sharding:
        """Splits `shape`, whose dims are named `dims`, by `rule`, and further over `gather_axes`.

        `units` has the number of indivisible units of a dim (heads). Other dims are divisible to
        the element, and so is mlp, whose size differs for experts. The gather axes split dim 0, or
        the following dim for expert weights, because there may be fewer experts than ranks.
        """
        units = {name: n for name, n in (units or {}).items() if name != "mlp"}
        shape, names = unpack_dims(shape, dims)
        cuts = [
            _split_dim(size, name, rule.get(name, ()), degrees, units.get(name, size))
            for size, name in zip(shape, names, strict=True)
        ]
        # The gather axes are the innermost splits of their dim and may be uneven, so that the last
        # block is padded. Blocks follow each other in the order of the fused axis.
        ranks = count_parts(gather_axes, degrees)
        if ranks > 1:
            dim = next((i for i, name in enumerate(names) if name != "expert"), 0)
            if cuts[dim]:
                size = cuts[dim][-1].block_size
            else:
                size = shape[dim]
            block = round_up(size, ranks)
            for axis in gather_axes:
                block //= degrees[axis]
                if degrees[axis] > 1:
                    cuts[dim] += (AxisSplit(axis, degrees[axis], 1, block),)
        _check_axes_once([cut.axis for of_dim in cuts for cut in of_dim], names)
        return cls(tuple(shape), tuple(cuts))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on a rank, including padding."""
        return tuple(
            cuts[-1].block_size if cuts else n
            for cuts, n in zip(self.splits, self.shape, strict=True)
        )

    @property
    def unsharded_shape(self) -> tuple[int, ...]:
        """Shape on a rank after the weight was gathered, with which a layer computes."""
        return self.gathered_sharding.local_shape

    @property
    def gathered_sharding(self) -> Sharding:
        """The sharding after the weight was gathered."""
        cuts = tuple(tuple(cut for cut in of_dim if not cut.is_gathered) for of_dim in self.splits)
        return Sharding(self.shape, cuts)

    @property
    def gather_dim(self) -> int:
        """The dim along which the weight is gathered; 0 if it is not."""
        cut = (any(cut.is_gathered for cut in of_dim) for of_dim in self.splits)
        return next((dim for dim, here in enumerate(cut) if here), 0)

    @cached_property
    def is_gathered(self) -> bool:
        """Whether the weight is split between its uses and gathered before them."""
        return any(cut.is_gathered for of_dim in self.splits for cut in of_dim)

    @cached_property
    def split_axes(self) -> frozenset[str]:
        """Axes whose ranks hold different shards, possibly in groups of replicas."""
        return frozenset(cut.axis for of_dim in self.splits for cut in of_dim)

    def replica_counts(self, degrees: Mapping[str, int]) -> dict[str, int]:
        """Return the number of consecutive ranks of each axis that hold the same shard.

        This is the gradient rule: the gradient of a parameter is summed over them.
        """
        same = {axis: size for axis, size in degrees.items() if axis not in self.split_axes}
        same |= {cut.axis: cut.replicas for of_dim in self.splits for cut in of_dim}
        return {axis: same[axis] for axis in AXES if same.get(axis, 1) > 1}

    def shard_at(self, index: Mapping[str, int]) -> Shard:
        """Return the shard on the rank with these coordinates."""
        spans = [
            _local_span(n, cuts, index) for n, cuts in zip(self.shape, self.splits, strict=True)
        ]
        starts, valid = zip(*spans, strict=True) if spans else ((), ())
        return Shard(self.shape, tuple(starts), tuple(valid), self.local_shape)


def _check_axes_once(axes: Sequence[str], names: Sequence[str]) -> None:
    """Checks that no axis splits two dims, because only the blocks on the diagonal would be
    stored."""
    for axis in axes:
        if axes.count(axis) > 1:
            raise ShardingError(
                f"{axis} splits two of the dims {tuple(filter(None, names))}. An axis can split at "
                "most one dim of a tensor. Use a name that is not split for one of them."
            )


def unpack_dims(shape: Sequence[int], dims: Sequence[Dim]) -> tuple[list[int], list[str]]:
    """Unpack packed dims of shape and names: `(d, 3n)`, `(embed, (3, heads))` to `(d, 3, n)`."""
    if len(shape) != len(dims):
        raise ShardingError(
            f"The dims {tuple(dims)} name {len(dims)} dims of a tensor of shape {tuple(shape)}. "
            f"Every dim needs a name. Name {len(shape)} dims."
        )
    sizes: list[int] = []
    names: list[str] = []
    for size, dim in zip(shape, dims, strict=True):
        count, name = (None, dim) if isinstance(dim, str) else dim
        if count is not None and size % count:
            raise ShardingError(
                f"{dim} packs {count} {name} into {size} elements. All must have the same size. "
                f"Use a divisor of {size}."
            )
        sizes += [size] if count is None else [count, size // count]
        names += [name] if count is None else ["", name]
    return sizes, names


def matrix_dims(dims: Sequence[Dim]) -> tuple[int, int] | None:
    """Returns which dims of a weight, with packed dims unpacked, form its hidden matrices.

    `((3, "heads"), "embed")` has three matrices, of the unpacked dims 1 and 2, and
    `("expert", "mlp", "embed")` has one per expert. None: the weight is not a hidden matrix.
    """
    _, names = unpack_dims([1 if isinstance(dim, str) else dim[0] for dim in dims], dims)
    named = [i for i, name in enumerate(names) if name not in ("", "expert")]
    if len(named) == 2 and all(names[i] in MATRIX_DIMS for i in named):
        return named[0], named[1]
    return None


def _split_dim(
    size: int, name: str, axes: Sequence[str], degrees: Mapping[str, int], units: int
) -> tuple[AxisSplit, ...]:
    """Split one dim over `axes` evenly; the vocabulary is padded, kv heads may be replicated."""
    padded = False
    # The vocabulary is padded to the same size for all splits of it (row, or row and col).
    if name == "vocab":
        padded_size = round_up(size, _vocab_multiple(axes, degrees))
        padded = padded_size > size
        size = units = padded_size
    if axes and size % units:
        raise ShardingError(
            f"{name} has {size} elements for {units} units. All units must have the same size. "
            f"Use a multiple of {units} elements."
        )
    cuts: list[AxisSplit] = []
    for axis in axes:
        ranks = degrees[axis]
        # A padded dim also has splits over one rank, whose block size is the padded size.
        if ranks == 1 and not padded:
            continue
        # With more ranks than kv heads (GQA), `share` consecutive ranks hold the same head.
        if units % ranks == 0:
            share = 1
        else:
            share = ranks // units
        if units % ranks and (name != "kv_heads" or ranks % units):
            raise ShardingError(
                f"{axis}={ranks} does not divide {name}={units}. A sharded dimension must be a "
                f"multiple of its axis size. Use a divisor of {units}."
            )
        units = units * share // ranks
        size = size * share // ranks
        cuts.append(AxisSplit(axis, ranks, share, size))
    return tuple(cuts)


def _vocab_multiple(axes: Sequence[str], degrees: Mapping[str, int]) -> int:
    return count_parts(("row", "col", *(axis for axis in axes if axis == "pipe")), degrees)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than `size`."""
    return -(-size // multiple) * multiple


def _local_span(size: int, cuts: Sequence[AxisSplit], index: Mapping[str, int]) -> tuple[int, int]:
    """Returns start and number of valid elements of one dim, after all its splits."""
    start = 0
    valid = size
    for cut in cuts:
        offset = index[cut.axis] // cut.replicas * cut.block_size
        start += offset
        valid = min(max(valid - offset, 0), cut.block_size)
    # A block of padding only would start after the end of the dim.
    return min(start, size), valid


ShardedStateDict = dict[str, "tuple[torch.Tensor, Shard]"]
"""Tensors by name, each with its position in the global tensor."""


# ---- order of tokens over context ----------------------------------------------------------------
class TokenSegment(NamedTuple):
    """Consecutive tokens `start` to `stop` of one document of a sample."""

    document: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def num_scores(self, window: int = 0) -> int:
        """Number of keys that its tokens see in all: Σ min(place + 1, window); 0: no window."""
        if not window:
            return _triangle(self.stop) - _triangle(self.start)
        # Tokens before `window` see all tokens up to themselves, the others `window` of them.
        inside = TokenSegment(0, min(self.start, window), min(self.stop, window)).num_scores()
        return inside + window * (max(self.stop, window) - max(self.start, window))


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


@dataclass(frozen=True)
class TokenOrder:
    """Which tokens of a sample each rank of context holds, and in what order."""

    lengths: tuple[int, ...]
    """Number of tokens of each document of the sample."""
    segments: tuple[tuple[TokenSegment, ...], ...]
    """Segments of each rank, in the order of its tokens; all ranks have as many tokens."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of context."""
        return len(self.segments)

    @property
    def num_segments(self) -> tuple[int, ...]:
        """Number of segments of each rank."""
        return tuple(map(len, self.segments))

    def attention_work(self, window: int = 0) -> tuple[int, ...]:
        """Returns the number of scores that each rank computes, per head: the keys that its tokens
        see. window: tokens that a query sees, itself included; 0: all before it."""
        return tuple(sum(one.num_scores(window) for one in rank) for rank in self.segments)

    def num_fetched(self, window: int = 0) -> tuple[int, ...]:
        """Returns the number of keys that each rank fetches: those that its tokens see and that are
        on other ranks, each counted once."""
        return tuple(_count_missing(rank, window) for rank in self.segments)

    @cached_property
    def token_numbers(self) -> np.ndarray:
        """Number in the sample of each token of each rank, int64 `[C, s/C]`."""
        # The commands that only plan import neither torch nor numpy.
        import numpy as np

        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        rows = [
            np.concatenate(
                [starts[one.document] + np.arange(one.start, one.stop) for one in segments]
            )
            for segments in self.segments
        ]
        return np.stack(rows).astype(np.int64)


def order_tokens(lengths: Sequence[int], num_ranks: int, order: ContextOrder) -> TokenOrder:
    """Returns the tokens of a sample with documents of these lengths on each rank of context.

    contiguous: rank c has part c of C. zigzag: parts c and 2 C - 1 - c of 2 C, which balances one
    document. balanced: similar attention work on all ranks for any documents, which are cut as
    seldom as possible (`ranvier.token_order`).
    """
    total = sum(lengths)
    assert total % num_ranks == 0 and min(lengths) > 0, (lengths, num_ranks)
    whole = [TokenSegment(i, 0, length) for i, length in enumerate(lengths)]
    each = total // num_ranks
    if order == "contiguous":
        parts = _cut_segments(whole, [each] * num_ranks)
        return TokenOrder(tuple(lengths), tuple(tuple(part) for part in parts))
    if order == "zigzag":
        # With an odd number of tokens per rank, the first parts are one token shorter.
        sizes = [each // 2] * num_ranks + [each - each // 2] * num_ranks
        parts = _cut_segments(whole, sizes)
        pairs = [(*parts[c], *parts[-1 - c]) for c in range(num_ranks)]
        return TokenOrder(tuple(lengths), tuple(map(_join_segments, pairs)))
    balanced = balance_tokens(lengths, num_ranks)
    segments = (tuple(TokenSegment(*piece[1:]) for piece in rank) for rank in balanced)
    return TokenOrder(tuple(lengths), tuple(segments))


def _count_missing(segments: Sequence[TokenSegment], window: int) -> int:
    """Returns how many keys that these segments see are in none of them."""
    missing = 0
    document, end = -1, 0
    for one in sorted(segments):
        if one.document != document:
            document, end = one.document, 0
        # All before `end` are there or counted already.
        first = max(one.start - window + 1, 0) if window else 0
        missing += max(one.start - max(first, end), 0)
        end = one.stop
    return missing


def _cut_segments(
    segments: Sequence[TokenSegment], sizes: Sequence[int]
) -> list[list[TokenSegment]]:
    """Cuts consecutive segments into parts with these numbers of tokens."""
    parts: list[list[TokenSegment]] = []
    rest = list(reversed(segments))
    for size in sizes:
        part: list[TokenSegment] = []
        while size:
            document, start, stop = rest.pop()
            middle = min(stop, start + size)
            part.append(TokenSegment(document, start, middle))
            size -= middle - start
            if middle < stop:
                rest.append(TokenSegment(document, middle, stop))
        parts.append(part)
    return parts


def _join_segments(segments: Iterable[TokenSegment]) -> tuple[TokenSegment, ...]:
    """Joins segments that continue each other."""
    joined: list[TokenSegment] = []
    for one in segments:
        if joined and joined[-1].document == one.document and joined[-1].stop == one.start:
            joined[-1] = TokenSegment(one.document, joined[-1].start, one.stop)
        elif one.num_tokens:
            joined.append(one)
    return tuple(joined)
