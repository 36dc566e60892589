"""The initial state of a recurrent core: the same bits on every grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ranvier.nn.element_numbers import ElementNumbering
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.sharding import Dim, dim_name


class InitialState(ParallelLayer):
    """The state before the first iteration, a function of (seed, sample, token, feature).

    x, y: `[b, s/row, d/col]`.
    Communicates: nothing.

    Args:
        site: Name and context of the layer.
        serial: The `models.recurrent_decoder.InitialState` to replace.
        dims: Name of the feature dim.
    """

    def __init__(self, site: LayerContext, serial: Any, dims: Sequence[Dim] = ("embed",)) -> None:
        super().__init__(site)
        (dim,) = dims
        self.draw_states = serial.draw_states
        self.numbering = ElementNumbering(site, dim_name(dim))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the initial state of the tokens of x.

        positions: of the tokens of an inference engine, `[b, s]`, which all count as tokens of
        sample 0.
        """
        if positions is not None:
            numbers = self.numbering.number_positions(x, positions)
        else:
            # In evaluation a result does not depend on its place in a batch.
            numbers = self.numbering.number_elements(x, same_sample=not self.training)
        seed = self.site.step_context.seed
        states: Tensor = self.draw_states(seed, numbers.counters, x.dtype)
        return states
