"""Outputs of linear layers whose reduction over ranks is pending while the next module computes.

No activation and no gradient of an activation is pending at the boundary of a module, except what
its signature names. Two signatures name one, both of blocks with a ladder residual:

    attention of a ladder block    its output, added after the MLP of the block
    a block before a ladder block  its second value, added after the attention of the next block

    y = layer(x)     all-gather x, multiply, start the reduction; y is a `PendingOutput`
    ...              the next module
    stream + y       any operation of torch waits for the reduction first

Backward has the reverse order: the all-gather of dy starts where forward waited, overlaps with the
backward pass of the module in between, and is waited for where forward started. In autograd a link
connects both ends, a tensor without elements.

A recomputed block does not need outputs that are added later, so it neither multiplies nor
communicates for them again. The value that it received from the block before is one of its inputs,
and is saved like those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from ranvier.comm import collectives
from ranvier.comm.collectives import PendingTensor
from ranvier.grid import Axis
from ranvier.memory.saved_results import ActivationStore, detach_with_version
from ranvier.nn.layer import apply_autograd


@dataclass(eq=False)
class PendingReduction:
    """A reduction of the output of a layer over ranks, and the all-gather of its gradient."""

    scatter_axis: Axis
    dim: int
    """Dim of the output that the reduction scatters and the gather of the gradient restores."""
    reduce_axis: Axis
    """Ranks that all get the same sum; used instead of `scatter_axis` if row splits no tokens."""
    allow_overlap: bool
    """Whether other work may run between start and wait."""
    where: str = field(init=False)
    pending: PendingTensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # A block scatters tokens or sums them, and never does both.
        assert min(self.scatter_axis.size, self.reduce_axis.size) == 1, self
        # Backward runs outside of the trace scope of the layer, so its name is stored here.
        self.where = self.scatter_axis.trace.where

    def start_reduction(self, y: Tensor) -> None:
        """Starts the reduction of y. Communicates: reduce-scatter (or all-reduce) over row."""
        if self.scatter_axis.size > 1:
            self._start(lambda: collectives.reduce_scatter(y, self.scatter_axis, self.dim))
        else:
            self._start(lambda: collectives.all_reduce(y, self.reduce_axis))

    def start_gather(self, dy: Tensor) -> None:
        """Starts the all-gather of the gradient. Communicates: all-gather over row."""
        self._start(lambda: collectives.all_gather(dy, self.scatter_axis, self.dim))

    def _start(self, issue: Callable[[], PendingTensor]) -> None:
        with self.scatter_axis.trace.named_scope(self.where):
            self.pending = issue()
            # With overlap disabled the collective completes before any other work starts.
            if not self.allow_overlap:
                self.pending.wait()

    def wait(self) -> Tensor:
        """Waits for the collective and returns its result; keeps no reference to it."""
        assert self.pending is not None, f"nothing is pending at {self.where}"
        # Reset first: backward reuses this object for the gradient.
        pending = self.pending
        self.pending = None
        return pending.wait()


class PendingOutput:
    """The output of a linear layer whose reduction may be pending, `[b, s/row, d/col]`.

    Operations of torch accept it as a tensor, and wait for the reduction first. It is read once,
    and once more by the recomputation of the block that has read it.
    Communicates: waits for the reduction; backward: starts the all-gather of the gradient.

    Args:
        reduction: The reduction, which has been started.
        link: Connects both ends of the reduction in autograd; None without gradients.
        bias: Added to the result, `[d/col]`.
        unneeded: Used instead of the result by a recomputation, which does not need it.
    """

    def __init__(
        self,
        reduction: PendingReduction,
        link: Tensor | None,
        bias: Tensor | None,
        unneeded: Tensor | None = None,
    ) -> None:
        self._reduction: PendingReduction | None = reduction
        self._link = link
        self._bias = bias
        self._unneeded = unneeded
        self._store: ActivationStore | None = None
        self._packed: Any = None

    def save_for_recomputation(self, store: ActivationStore) -> None:
        """Makes `wait` save the value in a store, for the recomputation of the reading block."""
        self._store = store

    def wait(self) -> Tensor:
        """Returns the output, after its reduction."""
        if self._unneeded is not None:
            return self._unneeded
        if self._reduction is None:
            return self._take_saved_value()
        reduction = self._reduction
        link = self._link
        # The checkpoint of the reading block keeps this object, but must not keep the graph.
        self._reduction = self._link = None
        y: Tensor
        if link is None:
            y = reduction.wait()
        else:
            y = apply_autograd(_FinishReduction, link, reduction)
        if self._bias is not None:
            y = y + self._bias
        if self._store is not None:
            self._packed = self._store.pack(detach_with_version(y))
        return y

    def _take_saved_value(self) -> Tensor:
        """Returns the saved value in the recomputation of the reading block, and drops it."""
        if self._store is None or self._packed is None:
            raise RuntimeError(
                "The output of a module of a ladder block was read twice. It is kept for one "
                "forward pass and one recomputation. Compute the loss again."
            )
        packed = self._packed
        self._packed = None
        return self._store.unpack(packed)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation of torch on the complete outputs."""
        done, options = tree_map_only(cls, cls.wait, (tuple(args), dict(kwargs or {})))
        return func(*done, **options)


class _FinishReduction(torch.autograd.Function):
    """End of a reduction; backward starts the all-gather of the gradient."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, reduction: PendingReduction) -> Tensor:
        ctx.reduction = reduction
        return reduction.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.reduction.start_gather(dy)
        # The gradient of the link only makes autograd run the backward pass of the layer.
        return dy.new_empty(0), None
