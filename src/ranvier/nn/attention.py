"""Attention core: heads lie on row (or row·col), samples perhaps on col, so each rank works alone.

The serial core is kept as it is; only what came in for the whole micro-batch (positions,
documents) is cut to the samples of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ranvier.comm.autograd import take
from ranvier.cost.layers import Attention
from ranvier.nn.example import Example
from ranvier.nn.layer import Leaf, Site
from ranvier.sharding import Dim


class Core(Leaf):
    """Attention of the heads and samples of this rank.

    q: `[b/col, s, h/row, k]`; angles: of positions, or these; documents: `[b, s]` or None.
    Communicates: nothing.
    """

    def __init__(self, site: Site, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        (dim,) = dims
        assert isinstance(dim, str), dims
        self.dim = dim
        self.serial = serial
        region = site.table.region(dim)
        self.batch_axis = site.axis(*(axis for axis in region["batch"] if axis == "col"))

    @staticmethod
    def examples() -> list[Example]:
        """What the generic tests try."""
        q, k = (("batch", "seq", dim, "head_dim") for dim in ("heads", "kv_heads"))
        ids, y = ("batch", "seq"), ("batch", "seq", "heads")
        config = _shape()
        return [Example(lambda twin: twin(config), ("heads",), [q, k, k, ids, ids], [y])]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Tensor | None,
        documents: Any,
    ) -> Tensor:
        """Attend; documents: numbers, or cuts that can be narrowed to some tokens."""
        tokens = q.shape[0] * q.shape[1]
        out: Tensor = self.serial(
            q, k, v, self._mine(angles, tokens), self._mine(documents, tokens)
        )
        return out

    def _mine(self, x: Any, tokens: int) -> Any:
        """What concerns my samples, which have so many tokens."""
        if isinstance(x, Tensor):
            return x if x.shape[0] == 1 else take(x, self.batch_axis, 0)
        if x is None or self.batch_axis.size == 1:
            return x
        return x.narrow(self.batch_axis.index * tokens, tokens)

    @property
    def layer(self) -> Attention:
        """Scores and values of my heads."""
        width, window = (getattr(self.serial, name, 0) for name in ("head_dim", "window"))
        return Attention(self.site.name, self.site.ground, self.dim, width, window or 0)


def _shape() -> Any:
    """As much of a decoder's config as a core reads."""
    rope = dict.fromkeys(("rope_scale", "rope_attention", "rope_share"), 1.0)
    plain = {"attention_scale": 0.0, "attention_cap": 0.0, "window_of": lambda layer: 0}
    return SimpleNamespace(
        head_dim=4, positions="rope", rope="llama3", rope_theta=1e4, **rope, **plain
    )
