"""Layer examples: serial layers with named inputs and outputs.

The generic tests build the parallel layer from each of them and compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ranvier.sharding import Dim

EXAMPLE_SIZES = {
    "batch": 8,
    "seq": 8,
    "embed": 16,
    "heads": 8,
    "kv_heads": 2,
    "mlp": 24,
    "vocab": 29,
    "head_dim": 4,
    "rank": 3,
}
"""Units that every grid of up to 8 ranks can split.

No axis divides 29, so the vocabulary is padded.
"""


@dataclass(frozen=True)
class LayerExample:
    """A layer to test, built from its serial class, with `dims` as in a model.

    inputs, outputs: the dims of each tensor. A tensor without a feature dim (ids, targets) has
    integers below the vocabulary size and is the same on all ranks of row and col. An output
    without dims is a sum over tokens. As the last dim `heads` counts elements; before `head_dim` it
    counts heads.
    """

    make_layer: Callable[[Any], nn.Module]
    dims: Sequence[Dim]
    inputs: Sequence[Sequence[Dim]]
    outputs: Sequence[Sequence[Dim]]
    sizes: Mapping[str, int] = field(default_factory=lambda: EXAMPLE_SIZES)
    """Units of each dim."""
    children: Mapping[str, Sequence[Dim]] | None = None
    """Dims of layers inside the module."""
