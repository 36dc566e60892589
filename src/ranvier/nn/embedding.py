"""Embedding: looks up rows of a table that is split over row (vocabulary) and col (features).

A lookup is a matmul with one-hot rows. If the first dim is split (the vocabulary over row), each
rank looks up the rows that it holds and uses zeros for the others; the partial results are
reduce-scattered to the layout of the residual stream. If it is not split (learned positions), each
rank looks up its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import autograd, collectives
from ranvier.cost.layers import EmbeddingCost
from ranvier.errors import ShardingError
from ranvier.nn.example import LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer, apply_autograd, check_range
from ranvier.sharding import WEIGHT_RULE, Dim


class Embedding(ParallelLayer):
    """An embedding table, y = W[ids].

    ids: `[b, s]`; y: `[b, s/row, d/col]`.
    Communicates: reduce-scatter seq over row; backward: all-gather seq over row (nothing if dim 0
    is not split). If row splits no tokens: all-reduce over row.

    Args:
        site: Name and context of the layer.
        serial: The `torch.nn.Embedding` to replace.
        dims: Names of the dims of the weight: ("vocab", "embed") or ("position", "embed").
    """

    weight: torch.nn.Parameter

    def __init__(self, site: LayerContext, serial: torch.nn.Embedding, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        rows, features = dims
        if (
            features != "embed"
            or not isinstance(rows, str)
            or WEIGHT_RULE.get(rows, ("row",)) != ("row",)
        ):
            raise ShardingError(
                f"{site.name} has the dims {tuple(dims)}. The dims of an embedding must be (rows, "
                "'embed'), where rows are split over row ('vocab') or not split ('position'). Use "
                "('vocab', 'embed') or ('position', 'embed')."
            )
        if serial.max_norm is not None or serial.scale_grad_by_freq or serial.sparse:
            raise ShardingError(
                f"{site.name} uses max_norm, scale_grad_by_freq or sparse. These options need the "
                "whole table, which no rank has. Disable them."
            )
        self.padding_idx = serial.padding_idx
        self.rows, self.axis = rows, site.axis(*WEIGHT_RULE.get(rows, ()))
        """The axis over which the rows are split."""
        self.seq_axis = site.axis("row")
        assert isinstance(serial.weight, torch.nn.Parameter), type(serial.weight)
        weight = self.shard_parameter("weight", serial.weight, dims, std=0.02, embedding=True)
        assert weight is not None
        whole = weight.sharding.gathered_sharding
        self.first_row = whole.shard_at(site.grid.index).global_offset[0]
        self.has_split_rows = any(cut.ranks > 1 for cut in whole.splits[0])
        """Whether the rows are split, over ranks or over stages; the pipeline sums over stages."""

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        ids = [("batch", "seq")]
        y = [("batch", "seq", "embed")]
        return [
            LayerExample(lambda twin: twin(29, 16), ("vocab", "embed"), ids, y),
            LayerExample(lambda twin: twin(29, 16, padding_idx=3), ("vocab", "embed"), ids, y),
            LayerExample(lambda twin: twin(31, 16), ("position", "embed"), ids, y),
        ]

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the rows of ids, `[b, s]`."""
        weight = self.handles["weight"]
        check_range(ids, weight.sharding.shape[0], self.site.name, dim=self.rows)
        keeps_tokens = self.site.step_context.row_splits == "none"
        if self.axis.size == 1 and not keeps_tokens:
            # No reduce-scatter will split the sequence, so take this rank's tokens now.
            ids = autograd.local_slice(ids, self.seq_axis, 1)
        with self.trace_scope():
            if keeps_tokens:
                return autograd.reduce_from_axis(
                    self._look_up_rows(weight.unsharded_param(), ids), self.axis
                )
            if torch.compiler.is_compiling() or not self.site.step_context.overlapped_autograd:
                y = autograd.reduce_scatter(
                    self._look_up_rows(weight.unsharded_param(), ids), self.axis, 1
                )
            else:
                y = apply_autograd(_EmbeddingFunction, ids, self, self.weight)
        # Layers after a frozen table may be trained (adapters): they run the same backward pass as
        # after a trained table.
        if weight.trainable:
            return y
        return y.requires_grad_(torch.is_grad_enabled())

    def _local_ids(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        """Returns indices into the local rows, and a mask of the ids that are local; None: all."""
        if not self.has_split_rows:
            return ids.clamp(0, rows - 1), None
        local = ids - self.first_row
        is_local = (local >= 0) & (local < rows)
        # Clamped, so that ids of other ranks stay in bounds; the mask removes their rows.
        return local.clamp(0, rows - 1), is_local

    def _look_up_rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        local, is_local = self._local_ids(ids, weight.shape[0])
        y = F.embedding(local, weight)
        # As in torch, the padding row is read but gets no gradient.
        if self.padding_idx is not None:
            pad = (ids == self.padding_idx).unsqueeze(-1)
            y = torch.where(pad, y.detach(), y)
        return y if is_local is None else y * is_local.unsqueeze(-1)

    @property
    def cost_model(self) -> EmbeddingCost:
        """Cost of the reduce-scatter of rows and, if trained, the all-gather of gradients."""
        weight = self.handles["weight"]
        shape = weight.sharding.shape
        trained = weight.trainable
        return EmbeddingCost(self.site.name, self.site.layout_context, shape, self.rows, trained)


class _EmbeddingFunction(torch.autograd.Function):
    """The lookup; its backward adds the gradient to the weight's bucket."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, leaf: Embedding, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.leaf = leaf
        return collectives.reduce_scatter(
            leaf._look_up_rows(leaf.handles["weight"].unsharded_data(), ids), leaf.axis, 1
        ).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        (ids,), leaf = ctx.saved_tensors, ctx.leaf
        weight = leaf.handles["weight"]
        with leaf.site.grid.trace.named_scope(leaf.site.name):
            dy = collectives.all_gather(dy, leaf.axis, 1).wait()  # (b, s, d/col)
            if weight.trainable:
                rows = weight.sharding.unsharded_shape[0]
                local, is_local = leaf._local_ids(ids, rows)
                if is_local is not None:
                    dy = dy * is_local.unsqueeze(-1)
                if leaf.padding_idx is not None:
                    dy = dy * (ids != leaf.padding_idx).unsqueeze(-1)
                weight.accumulate_grad(
                    _sum_row_grads(dy, local, rows, leaf.site.bucket_scheduler.reduce_dtype)
                )
        return None, None, None


def _sum_row_grads(dy: Tensor, ids: Tensor, rows: int, wide: torch.dtype) -> Tensor:
    """Returns the gradient of a table `[rows, d]`: the sum over tokens, in the reduce dtype."""
    # This kernel sorts the tokens, so the order of additions is deterministic. Meta tensors
    # represent GPU tensors.
    if dy.device.type in ("cuda", "meta") and dy.dtype != wide:
        summed: Tensor = torch.ops.aten.embedding_dense_backward(dy, ids, rows, -1, False)
        return summed
    grad = torch.zeros(rows, dy.shape[-1], dtype=wide, device=dy.device)
    return grad.index_add_(0, ids.flatten(), dy.flatten(0, 1).to(wide))
