"""Input layout: which part of the full input or output of a model each rank has.

The dims of an activation have names, as the dims of weights do: `("batch", "seq", "embed")`. The
sharding table gives the axes that split each dim, depending on the feature dim:

    integers          ("batch", "seq")            tokens: whole sequences on ranks of row and col
    residual stream   ("batch", "seq", "embed")   [b/(data·expert·depth), s/(context·row), d/col]
    inside a block    ("batch", "seq", "mlp")     [b/(...·col), s/context, n/row], or features
    rows              ("batch", "embed")          only if no axis splits the sequence
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ranvier.comm.autograd import gather_from_axis, scatter_to_axis
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.sharding import OUTER_RULE, WEIGHT_RULE, ShardingTable

TOKEN_AXES: Mapping[str, tuple[str, ...]] = {"batch": OUTER_RULE["batch"], "seq": ("context",)}
"""Axes that split integer inputs. Embeddings, losses and positions read whole sequences."""
FEATURE_DIMS = (*(name for name in WEIGHT_RULE if name not in ("expert", "kv_heads")),)


@dataclass(frozen=True)
class ActivationLayout:
    """Names of the dims of an activation, and the axes that split each of them."""

    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]

    @classmethod
    def from_dims(cls, dims: tuple[str, ...], table: ShardingTable) -> ActivationLayout:
        """Returns the layout of an activation with these dims."""
        features = [dim for dim in dims if dim in FEATURE_DIMS]
        known = all(dim in ("batch", "seq", "", *FEATURE_DIMS) for dim in dims)
        # No unknown name, at most one feature dim, and no duplicates except ''.
        if not known or len(features) > 1 or len({*dims} - {""}) < len([d for d in dims if d]):
            raise ShardingError(
                f"{dims} are not valid dims of an input or output. Valid names are 'batch', 'seq', "
                f"at most one of {', '.join(FEATURE_DIMS)}, and '' for a dim that is not split; "
                "only '' may repeat. Change input_dims or output_dims of the model."
            )
        if not features:
            region = {**TOKEN_AXES}
        else:
            region = {**table.activation_rule(features[0])}
        return cls(dims, tuple(region.get(dim, ()) for dim in dims))

    def scatter_to_ranks(self, x: Tensor, grid: Grid) -> Tensor:
        """Returns this rank's part of a tensor that all ranks have.

        Communicates: backward: all-gather over each axis that splits it.
        """
        for dim, axes in enumerate(self.axes):
            x = scatter_to_axis(x, grid.axis(*axes), dim)
        return x

    def gather_from_ranks(self, x: Tensor, grid: Grid) -> Tensor:
        """Gathers the full tensor from all ranks. Communicates: all-gather over each axis."""
        for dim, axes in enumerate(self.axes):
            x = gather_from_axis(x, grid.axis(*axes), dim)
        return x

    def parts_per_dim(self, grid: Grid) -> tuple[int, ...]:
        """Returns the number of parts of each dim."""
        return tuple(grid.axis_without_group(*axes).size for axes in self.axes)

    def missing_axes(self, grid: Grid, table: ShardingTable) -> list[str]:
        """Returns the axes with several ranks that split tokens but none of the layout's dims."""
        features = [dim for dim in self.dims if dim in FEATURE_DIMS]
        if not features:
            region = TOKEN_AXES
        else:
            region = table.activation_rule(features[0])
        held = {axis for axes in self.axes for axis in axes}
        # Each rank of such an axis has other tokens, which a gather over the remaining axes would
        # lose.
        needed = (axis for name in ("batch", "seq") for axis in region[name])
        return [axis for axis in needed if axis not in held and grid.degrees[axis] > 1]


def default_input_dims(x: Tensor) -> tuple[str, ...]:
    """Returns the default dims of an input: tokens, or features of the residual stream.

    x: integers `[b]`, `[b, s]`, `[b, s, ...]`; floats `[b, d]`, `[b, s, d]`, `[b, s, ..., d]`.
    """
    if x.dim() < 2:
        return ("batch",)[: x.dim()]
    if not x.is_floating_point():
        return ("batch", "seq", *("" for _ in range(x.dim() - 2)))
    if x.dim() == 2:
        return ("batch", "embed")
    return ("batch", "seq", *("" for _ in range(x.dim() - 3)), "embed")
