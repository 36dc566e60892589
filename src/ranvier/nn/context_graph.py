"""Attention over context as one operation of a compiled graph.

What attention computes and communicates depends on the documents of a micro-batch, so no size of it
may be a part of the graph. The graph has one operation, which gets the number of a `BlockAttention`
as a tensor: the attention layers of the block that runs, and the documents of the micro-batch.
Equal blocks share a graph, and another micro-batch needs no other one.

The operation also keeps what only its backward pass needs, because its sizes depend on the
documents: log-sum-exps, and for `ulysses` the heads of other ranks' tokens.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ranvier.nn.context_documents import ContextDocuments

SavedRows = tuple[Tensor, ...]


class ContextAttentionLayer(Protocol):
    """A layer whose attention can be one operation of a graph, `nn.attention.AttentionCore`."""

    def forward_rows(
        self, q: Tensor, k: Tensor, v: Tensor, documents: ContextDocuments
    ) -> tuple[Tensor, SavedRows]:
        """Returns the output `[b, t, h, k]`, and what else `backward_rows` needs."""

    def backward_rows(
        self,
        dy: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        y: Tensor,
        saved: SavedRows,
        documents: ContextDocuments,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of q `[b, t, h, k]`, k and v `[b, t, g, k]`."""


class BlockAttention:
    """The attention layers of a block, and the documents of a micro-batch, for its graph.

    Args:
        documents: The documents of the micro-batch, which keep this object.
        layers: The attention layers of the block, by their names in the block.
    """

    def __init__(
        self, documents: ContextDocuments, layers: Mapping[str, ContextAttentionLayer]
    ) -> None:
        self.documents = weakref.ref(documents)
        self.layers = layers
        self.saved: dict[int, SavedRows] = {}
        """What the backward pass of each call needs."""
        number = next(_numbers)
        _attention_by_number[number] = self
        self.number = torch.tensor(number)
        """The number of this object, on the host: a graph does not depend on its value."""

    @classmethod
    def of_block(
        cls, documents: ContextDocuments, block: str, layers: Mapping[str, ContextAttentionLayer]
    ) -> BlockAttention:
        """Returns the object of a block and a micro-batch, which is built once."""
        return documents.get_or_build(("graph", block), lambda: cls(documents, layers))

    def forward(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output of a layer, and the number of the call."""
        documents = self._find_documents()
        y, saved = self.layers[name].forward_rows(q, k, v, documents)
        number = next(_numbers)
        self.saved[number] = saved
        call = torch.tensor(number)
        # The graph saves this tensor for backward: what belongs to the call lives as long as it,
        # also if a loop runs other batches in between.
        call.owner = (self, documents)  # type: ignore[attr-defined]
        return y, call

    def backward(
        self,
        name: str,
        dy: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        y: Tensor,
        call: int,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k and v of a call."""
        saved = self.saved.pop(call)
        return self.layers[name].backward_rows(dy, inputs, y, saved, self._find_documents())

    def _find_documents(self) -> ContextDocuments:
        documents = self.documents()
        assert documents is not None, "the documents of a micro-batch were freed before backward"
        return documents


_numbers = itertools.count()
# An operation has only tensors and numbers as inputs. c10d finds its groups by name in this way.
_attention_by_number: weakref.WeakValueDictionary[int, BlockAttention] = (
    weakref.WeakValueDictionary()
)


@torch.library.custom_op("ranvier::attend_over_context", mutates_args=())
def attend_over_context(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, layer: str
) -> tuple[Tensor, Tensor]:
    """Attention of a layer of the block with a number; also returns the number of the call.

    q, y: `[b, t, h, k]`; k, v: `[b, t, g, k]`.
    Communicates: as `nn.context_attention`.
    """
    return _attention_by_number[int(number)].forward(layer, q, k, v)


@attend_over_context.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, number: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return y, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("ranvier::attend_over_context_backward", mutates_args=())
def attend_over_context_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    number: Tensor,
    call: Tensor,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v. Communicates: as `nn.context_attention`."""
    found = _attention_by_number[int(number)].backward(layer, dy, (q, k, v), y, int(call))
    dq, dk, dv = (x.contiguous() for x in found)
    return dq, dk, dv


@attend_over_context_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | str
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, number, layer = inputs
    y, call = output
    ctx.mark_non_differentiable(call)
    ctx.save_for_backward(q, k, v, y, number, call)
    ctx.layer = layer


def _backward(ctx, dy, _):  # type: ignore[no-untyped-def]
    grads = attend_over_context_backward(dy, *ctx.saved_tensors, ctx.layer)
    return *grads, None, None


attend_over_context.register_autograd(_backward, setup_context=_setup_context)
