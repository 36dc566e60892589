"""Sharding: which part of which tensor lies on which rank. The only index arithmetic there is.

A model names the dims of its weights; three tables map those names to axes of the grid:

* `WEIGHTS`: where a weight is split. Matrices are also split over `depth` along dim 0 (of
  experts, along the dim behind them).
* `OUTER`: the residual stream, norms, messages. Shape on a rank `[b, s/row, d/col]`.
* `INNER`: attention heads, MLP hidden, logits. `[b/col, s, n/row]` or `[b, s, n/(row·col)]`.
* `WHOLE`: features that nothing splits (a LoRA rank). `[b/col, s/row, r]` or `[b, s/row, r]`.

Everything else is derived from them here: the part of a weight on a rank (`Sharding`, `Place`), the
ranks that hold the same part and so sum its gradient (`Sharding.over`), and what a linear layer
communicates (`Table.move`). Two dims need not divide: the vocabulary is padded to a multiple of
row·col, and a dim 0 to a multiple of depth. Padding lies behind the valid elements of a rank, is
zero, and never leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ranvier.config.plan import AXES, InnerSplit
from ranvier.errors import ShardingError

if TYPE_CHECKING:
    import torch

AxisRule = Mapping[str, tuple[str, ...]]
Dim = str | tuple[int, str]
"""A named dim; `(3, "heads")` is three `heads` packed one after the other (a fused q, k, v)."""

WEIGHT_RULE: AxisRule = {
    "vocab": ("row",),
    "heads": ("row",),
    "kv_heads": ("row",),
    "mlp": ("row",),
    "embed": ("col",),
    "expert": ("expert",),
    "rank": (),
}
OUTER_RULE: AxisRule = {
    "batch": ("data", "expert", "depth"),
    "seq": ("context", "row"),
    "embed": ("col",),
}
INNER_RULES: Mapping[InnerSplit, AxisRule] = {
    "samples": {"batch": ("data", "expert", "depth", "col"), "seq": ("context",)}
    | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("row",)),
    "features": {"batch": ("data", "expert", "depth"), "seq": ("context",)}
    | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("row", "col")),
}
UNSPLIT_RULES: Mapping[InnerSplit, AxisRule] = {
    "samples": {"batch": INNER_RULES["samples"]["batch"], "seq": OUTER_RULE["seq"], "rank": ()},
    "features": {"batch": OUTER_RULE["batch"], "seq": OUTER_RULE["seq"], "rank": ()},
}
"""Tokens lie as they do in both regions around it; where only features lie on col, its ranks have
the same values, and the same gradients of them."""
TOKEN_DIMS = {"batch": 0, "seq": 1}
"""Where these dims stand in an activation; the features are its last dim."""


@dataclass(frozen=True)
class CommStep:
    """One communication of a linear layer: over `axis`, along `dim` of the activation.

    Without an axis there is none.
    """

    axis: str = ""
    dim: int = 0


@dataclass(frozen=True)
class LinearComm:
    """What a linear layer does to its input and output: gather, matmul, reduce-scatter.

    Where one of its dims is whole, col may have a step without a dim of an activation: an input
    that all its ranks have (`share`, backward sums), an output that all get (`total`, the sum).
    """

    gather: CommStep = CommStep()
    scatter: CommStep = CommStep()
    copy_axis: str = ""
    reduce_axis: str = ""


@dataclass(frozen=True)
class ShardingTable:
    """The three rules of a run; `inner` is the row that says what col splits inside."""

    col_splits: InnerSplit = "samples"
    vocab_over_pipe: bool = False
    """Whether the stages of a pipeline split the vocabulary, too."""

    @property
    def weight_rule(self) -> AxisRule:
        """Where weights are split."""
        return self._with_vocab_over_pipe(WEIGHT_RULE)

    def activation_rule(self, dim: str) -> AxisRule:
        """The rule of the activations that carry `dim` as their features."""
        if dim == "rank":
            return UNSPLIT_RULES[self.col_splits]
        if dim == "embed":
            return OUTER_RULE
        return self._with_vocab_over_pipe(INNER_RULES[self.col_splits])

    def _with_vocab_over_pipe(self, rule: AxisRule) -> AxisRule:
        if self.vocab_over_pipe:
            return {**rule, "vocab": ("pipe", *rule["vocab"])}
        return rule

    def feature_axes(self, dim: str) -> tuple[str, ...]:
        """Axes that split `dim` as the features of an activation."""
        return self.activation_rule(dim).get(dim, ())

    def token_axes(self, dim: str, name: str) -> tuple[str, ...]:
        """Axes that split the batch or the sequence where `dim` is the features."""
        return self.activation_rule(dim)[name]

    def linear_comm(self, out: str, into: str) -> LinearComm:
        """Communication of a linear layer whose weight is `(out, into)`.

        The out dim lies on an axis over which the input is still split: gather it. The in dim lies
        on an axis over which the product is a partial sum: scatter it to where the output region
        wants it. From embed to an inner dim the layer enters, the other way it leaves; a rank lies
        between the two.
        """
        inside = set(WEIGHT_RULE) & set(INNER_RULES[self.col_splits])
        pair = {out, into} - inside
        wrong = len({out, into}) < 2 or not pair or not pair <= {"embed", "rank"}
        if wrong or {out, into} == {"vocab", "rank"}:
            raise ShardingError(
                f"A linear layer has the dims ({out!r}, {into!r}). It goes from 'embed' to one of "
                f"{sorted(inside)} or back, or between 'rank' and these. Rename one of its dims."
            )
        if "rank" in pair:
            return self._unsplit_dim_comm(out, into)
        (out_axis,), (in_axis,) = WEIGHT_RULE[out], WEIGHT_RULE[into]
        return LinearComm(
            gather=CommStep(out_axis, _activation_dim(self.activation_rule(into), out_axis)),
            scatter=CommStep(in_axis, _activation_dim(self.activation_rule(out), in_axis)),
        )

    def _unsplit_dim_comm(self, out: str, into: str) -> LinearComm:
        """The same for a layer from or to a dim that nothing splits.

        The axes of the other dim split tokens on the side of the rank, or nothing.
        """
        rank = self.activation_rule("rank")
        other = into if out == "rank" else out
        steps = {axis: _token_dim(rank, axis) for axis in self.feature_axes(other)}
        moved = [CommStep(axis, dim) for axis, dim in steps.items() if dim is not None]
        alike = "".join(axis for axis, dim in steps.items() if dim is None)
        step = moved[0] if moved else CommStep()
        if out == "rank":
            return LinearComm(scatter=step, reduce_axis=alike)
        return LinearComm(gather=step, copy_axis=alike)


def _token_dim(region: AxisRule, axis: str) -> int | None:
    """The dim of tokens that `axis` splits in `region`, if any."""
    return next((TOKEN_DIMS[dim] for dim in TOKEN_DIMS if axis in region[dim]), None)


def _activation_dim(region: AxisRule, axis: str) -> int:
    """The dim of an activation that `axis` splits in `region`."""
    return next((TOKEN_DIMS.get(dim, -1) for dim, axes in region.items() if axis in axes), -1)


@dataclass(frozen=True)
class AxisSplit:
    """One axis cuts one dim: consecutive `share` ranks hold the same block of `block` elements."""

    axis: str
    ranks: int
    replicas: int
    block_size: int


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor, and where its elements lie in the part that holds it."""

    start: tuple[int, ...]
    """First index in each dim of the whole."""
    size: tuple[int, ...]
    offset: int
    """Place of its first element in the flattened part."""
    strides: tuple[int, ...]
    """Elements of the part from one index to the next, in each dim."""

    @property
    def num_elements(self) -> int:
        """How many it has."""
        return math.prod(self.size)

    @property
    def span(self) -> int:
        """Elements of the part from its first to its last, both included."""
        steps = zip(self.size, self.strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + 1

    def intersection(self, other: Box) -> Box | None:
        """What of this box the other one has, too, as it lies in this part; None: nothing."""
        start = tuple(map(max, self.start, other.start))
        ends = ([a + n for a, n in zip(x.start, x.size, strict=True)] for x in (self, other))
        size = tuple(min(e, f) - a for e, f, a in zip(*ends, start, strict=True))
        if any(n <= 0 for n in size):
            return None
        moved = zip(start, self.start, self.strides, strict=True)
        offset = self.offset + sum((a - b) * stride for a, b, stride in moved)
        return Box(start, size, offset, self.strides)

    def split_to_fit(self, most: int) -> list[Box]:
        """The box in pieces along its first dims, so that none spans more than `most` elements."""
        if self.span <= most or not self.size:
            return [self]
        if self.size[0] == 1:
            inner = Box(self.start[1:], self.size[1:], self.offset, self.strides[1:]).split_to_fit(
                most
            )
            first = self.start[:1]
            stride = self.strides[:1]
            return [Box(first + x.start, (1, *x.size), x.offset, stride + x.strides) for x in inner]
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
    """A part of a whole tensor: a box, perhaps padded behind, perhaps only a flat range of it."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    global_offset: tuple[int, ...]
    """First index of the box in each dim."""
    valid_shape: tuple[int, ...]
    """Elements of the box that exist in the whole, in each dim."""
    local_shape: tuple[int, ...]
    """Shape of the box in memory, padding included."""
    flat_range: tuple[int, int] | None = None
    """Range of the flattened box (ZeRO over data); None: all of it."""

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole."""
        return tuple(
            slice(a, a + n) for a, n in zip(self.global_offset, self.valid_shape, strict=True)
        )

    def slice_from(self, whole: torch.Tensor) -> torch.Tensor:
        """My part of a whole tensor, padding zero: `local`, or the flat range of it."""
        part = whole.new_zeros(self.local_shape)
        part[tuple(slice(n) for n in self.valid_shape)] = whole.reshape(self.global_shape)[
            self.global_slices
        ]
        if self.flat_range is None:
            return part
        return part.view(-1)[slice(*self.flat_range)].clone()

    def write_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write my part into a whole tensor."""
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
        """The part as boxes of the whole, padding left out: a flat range has a few of them."""
        strides = tuple(math.prod(self.local_shape[i + 1 :]) for i in range(len(self.local_shape)))
        first, last = self.flat_range or (0, math.prod(self.local_shape))
        found = []
        for corner, extent in _flat_range_boxes(self.local_shape, first, last):
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
        """The flat range `[start, stop)` of this box, cut to its end."""
        size = math.prod(self.local_shape)
        return replace(self, flat_range=(min(start, size), min(stop, size)))


def _flat_range_boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Corner and extent of the boxes that elements `first` to `last` of an array form.

    A row begun, whole rows, a row not ended: 2 · dims - 1 boxes at most.
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    begun = -(-first // row)
    ended = last // row
    if begun > ended:  # inside one row
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
    """How a tensor of `shape` is cut: for each dim the axes that cut it, outermost first."""

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
        depth: bool = False,
    ) -> Sharding:
        """Cut `shape`, whose dims are named `dims`, by `rule`; with `depth` dim 0 over depth too.

        `units` counts the indivisible units of a dim (heads); others are divisible to the element,
        as those of mlp, of which experts have another number. Of experts depth cuts the next dim:
        there may be fewer of them than ranks.
        """
        units = {name: n for name, n in (units or {}).items() if name != "mlp"}
        shape, names = _unpack_dims(shape, dims)
        cuts = [
            _split_dim(size, name, rule.get(name, ()), degrees, units.get(name, size))
            for size, name in zip(shape, names, strict=True)
        ]
        if depth and degrees["depth"] > 1:
            dim = next((i for i, name in enumerate(names) if name != "expert"), 0)
            if cuts[dim]:
                block = cuts[dim][-1].block_size
            else:
                block = shape[dim]
            cuts[dim] += (AxisSplit("depth", degrees["depth"], 1, -(-block // degrees["depth"])),)
        _check_axes_once([cut.axis for of_dim in cuts for cut in of_dim], names)
        return cls(tuple(shape), tuple(cuts))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on a rank, padding included."""
        return tuple(
            cuts[-1].block_size if cuts else n
            for cuts, n in zip(self.splits, self.shape, strict=True)
        )

    @property
    def unsharded_shape(self) -> tuple[int, ...]:
        """Shape on a rank once gathered over depth: what a layer computes with."""
        return self.without_axis("depth").local_shape

    def without_axis(self, axis: str) -> Sharding:
        """The sharding with `axis` gathered."""
        cuts = tuple(tuple(cut for cut in of_dim if cut.axis != axis) for of_dim in self.splits)
        return Sharding(self.shape, cuts)

    @property
    def depth_dim(self) -> int:
        """The dim that depth cuts."""
        cut = (any(cut.axis == "depth" for cut in of_dim) for of_dim in self.splits)
        return next((dim for dim, here in enumerate(cut) if here), 0)

    @cached_property
    def split_axes(self) -> frozenset[str]:
        """Axes whose ranks hold different parts, at least in groups."""
        return frozenset(cut.axis for of_dim in self.splits for cut in of_dim)

    def replica_counts(self, degrees: Mapping[str, int]) -> dict[str, int]:
        """The ranks that hold the same part, as how many consecutive ranks of each axis.

        This is the gradient rule: the gradient of a parameter is summed over them.
        """
        same = {axis: size for axis, size in degrees.items() if axis not in self.split_axes}
        same |= {cut.axis: cut.replicas for of_dim in self.splits for cut in of_dim}
        return {axis: same[axis] for axis in AXES if same.get(axis, 1) > 1}

    def shard_at(self, index: Mapping[str, int]) -> Shard:
        """The part on the rank with these coordinates."""
        spans = [
            _local_span(n, cuts, index) for n, cuts in zip(self.shape, self.splits, strict=True)
        ]
        starts, valid = zip(*spans, strict=True) if spans else ((), ())
        return Shard(self.shape, tuple(starts), tuple(valid), self.local_shape)


def _check_axes_once(axes: Sequence[str], names: Sequence[str]) -> None:
    """An axis that cut two dims would leave only the blocks on the diagonal."""
    for axis in axes:
        if axes.count(axis) > 1:
            raise ShardingError(
                f"{axis} splits two of the dims {tuple(filter(None, names))}. An axis splits at "
                "most one dim of a tensor. Give one of them a name that is not split."
            )


def _unpack_dims(shape: Sequence[int], dims: Sequence[Dim]) -> tuple[list[int], list[str]]:
    """Shape and names with packed dims spread: `(d, 3n)`, `(embed, (3, heads))` to `(d, 3, n)`."""
    if len(shape) != len(dims):
        raise ShardingError(
            f"The dims {tuple(dims)} name {len(dims)} dims of a tensor of shape {tuple(shape)}. "
            f"Every dim has a name. Name {len(shape)} dims."
        )
    sizes: list[int] = []
    names: list[str] = []
    for size, dim in zip(shape, dims, strict=True):
        count, name = (None, dim) if isinstance(dim, str) else dim
        if count is not None and size % count:
            raise ShardingError(
                f"{dim} packs {count} {name} into {size} elements. All have the same size. "
                f"Use a divisor of {size}."
            )
        sizes += [size] if count is None else [count, size // count]
        names += [name] if count is None else ["", name]
    return sizes, names


def _split_dim(
    size: int, name: str, axes: Sequence[str], degrees: Mapping[str, int], units: int
) -> tuple[AxisSplit, ...]:
    """Cut one dim over `axes`: evenly, vocabulary padded, shared kv heads held by several ranks."""
    padded = False
    if name == "vocab":
        multiple = degrees["row"] * degrees["col"] * (degrees["pipe"] if "pipe" in axes else 1)
        padded = size % multiple > 0
        size = units = -(-size // multiple) * multiple
    if axes and size % units:
        raise ShardingError(
            f"{name} has {size} elements for {units} units. All units have the same size. "
            f"Use a multiple of {units} elements."
        )
    cuts: list[AxisSplit] = []
    for axis in axes:
        ranks = degrees[axis]
        if ranks == 1 and not padded:
            continue
        if units % ranks == 0:
            share = 1
        else:
            share = ranks // units
        if units % ranks and (name != "kv_heads" or ranks % units):
            raise ShardingError(
                f"{axis}={ranks} does not divide {name}={units}. A split dimension must be a "
                f"multiple of its axis. Use a divisor of {units}."
            )
        units = units * share // ranks
        size = size * share // ranks
        cuts.append(AxisSplit(axis, ranks, share, size))
    return tuple(cuts)


def _local_span(size: int, cuts: Sequence[AxisSplit], index: Mapping[str, int]) -> tuple[int, int]:
    """Start and number of valid elements of one dim: each cut takes its block of what was left."""
    start = 0
    valid = size
    for cut in cuts:
        offset = index[cut.axis] // cut.replicas * cut.block_size
        start += offset
        valid = min(max(valid - offset, 0), cut.block_size)
    return min(start, size), valid  # only padding: it starts behind the end


ShardedStateDict = dict[str, "tuple[torch.Tensor, Shard]"]
"""Tensors by name, each with the part of the whole that it is."""
