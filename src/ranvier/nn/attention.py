"""Attention core: heads are split over row (or row·col), samples perhaps over col.

No rank communicates. The serial core is used unchanged; only what came in for the whole micro-batch
(positions, documents) is cut to the samples of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ranvier.comm.autograd import local_slice
from ranvier.cost.layers import AttentionCost
from ranvier.nn.example import LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer
from ranvier.sharding import Dim


class AttentionCore(ParallelLayer):
    """Attention of the heads and samples of this rank.

    q: `[b/col, s, h/row, k]`; angles: rotary angles or positions; documents: `[b, s]` or None.
    Communicates: nothing.
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        (dim,) = dims
        assert isinstance(dim, str), dims
        self.dim = dim
        self.serial = serial
        self.batch_axis = site.axis(*site.table.axes_inside_replica(dim, "batch"))

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        q, k = (("batch", "seq", dim, "head_dim") for dim in ("heads", "kv_heads"))
        ids = ("batch", "seq")
        y = ("batch", "seq", "heads")
        config = _example_config()
        return [LayerExample(lambda twin: twin(config), ("heads",), [q, k, k, ids, ids], [y])]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Tensor | None,
        documents: Any,
    ) -> Tensor:
        """Attend; documents: ids, or `Documents`, which can be narrowed to a range of tokens."""
        tokens = q.shape[0] * q.shape[1]
        out: Tensor = self.serial(
            q, k, v, self._local_samples(angles, tokens), self._local_samples(documents, tokens)
        )
        return out

    def _local_samples(self, x: Any, tokens: int) -> Any:
        """The part of x that belongs to this rank's samples, which have `tokens` tokens in all."""
        if isinstance(x, Tensor):
            # Positions that are the same for all samples.
            if x.shape[0] == 1:
                return x
            return local_slice(x, self.batch_axis, 0)
        if x is None or self.batch_axis.size == 1:
            return x
        # `Documents` count tokens of all samples, so a range of samples is a range of tokens.
        return x.narrow(self.batch_axis.index * tokens, tokens)

    @property
    def cost_model(self) -> AttentionCost:
        """Scores and values of the local heads."""
        width, window = (getattr(self.serial, name, 0) for name in ("head_dim", "window"))
        return AttentionCost(self.site.name, self.site.layout_context, self.dim, width, window or 0)


def _example_config() -> Any:
    """The part of a decoder's config that a core reads."""
    rope = dict.fromkeys(("rope_scale", "attention_factor", "partial_rotary_factor"), 1.0)
    plain = {
        "query_pre_attn_scalar": 0.0,
        "attn_logit_softcap": 0.0,
        "window_of_layer": lambda layer: 0,
    }
    return SimpleNamespace(
        head_dim=4, position_embedding="rope", rope="llama3", rope_theta=1e4, **rope, **plain
    )
