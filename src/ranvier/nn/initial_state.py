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

    def forward(self, x: Tensor) -> Tensor:
        """Returns the initial state of the tokens of x."""
        counters = self.numbering.number_elements(x).counters
        states: Tensor = self.draw_states(self.site.step_context.seed, counters, x.dtype)
        return states
