"""LM head: logits over the vocabulary and their loss, one chunk of tokens at a time.

The logits of a batch are by far its largest tensor, and they are never needed all at once. For each
chunk of tokens they are computed, reduced to a loss, overwritten by their gradient, and multiplied
into dX and dW before the next chunk reuses their memory. Forward thus computes the gradients;
backward only scales them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import collectives
from ranvier.comm.autograd import local_slice
from ranvier.cost.layers import ActivationShape
from ranvier.cost.linear import LMHeadCost, align_columns, chunk_slices
from ranvier.nn.cross_entropy import (
    IGNORE_INDEX,
    VocabShard,
    cross_entropy_reference,
    score_each_token,
    score_tokens,
)
from ranvier.nn.example import LayerExample
from ranvier.nn.layer import LayerContext, apply_autograd, check_range
from ranvier.nn.linear import (
    Linear,
    buffer_dim,
    pack_output_grads,
    pack_outputs,
    unpack_output_grads,
    unpack_outputs,
)
from ranvier.nn.matmul import PlainMatmul
from ranvier.sharding import Dim
from ranvier.trace import Event

ALIGNED_DEVICES = ("cuda", "meta")
"""Devices on which rows are aligned (`cost.linear.ALIGNMENT_BYTES`); meta represents a GPU."""


class LMHead(Linear):
    """The language-model head, y = x Wᵀ, with a fused cross-entropy loss.

    Without targets it returns logits; with targets it returns the sum of the losses of this rank's
    tokens and never stores all logits at once.
    x: `[b, s/row, d/col]`; y: `[b/col, s, V/row]` or `[b, s, V/(row·col)]`; targets: `[b, s]`.
    With targets and `step_context.per_token_loss` it returns, for each target, its log-probability
    and whether it is the most likely token, `[2, b/col, s]`.
    Communicates: all-gather x, reduce-scatter dx; for each chunk reduce-scatter and all-gather of
    its logits, all-reduce of three numbers per token over the axes of vocab.
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site, serial, dims)
        self.vocab_shard = VocabShard.from_context(site, self.out_dim)
        self.cap = float(getattr(serial, "cap", 0.0))
        """Soft cap: logits become cap · tanh(logits / cap); 0 disables it."""
        self.keeps_logits_local = self.comm_axes[1][0].size == 1
        """Whether logits are not scattered; chunks may then cross sample boundaries."""

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        x = ("batch", "seq", "embed")
        targets = ("batch", "seq")
        return [
            LayerExample(lambda twin: twin(16, 29), ("vocab", "embed"), [x, targets], [()]),
            LayerExample(
                lambda twin: twin(16, 29, cap=0.5), ("vocab", "embed"), [x, targets], [()]
            ),
        ]

    def forward(
        self, x: Tensor, targets: Tensor | None = None, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        """Returns the logits, or the sum of the losses if targets are given.

        logits_to_keep: the tokens of each sample whose logits are computed, `[b, n]`.
        """
        if logits_to_keep is not None:
            return self._selected_logits(x, logits_to_keep)
        if targets is None:
            # If the caller computes the loss, its factor is unknown here; MoE layers with auxiliary
            # losses then raise an error instead of using an old factor.
            self.site.step_context.loss_grad_scale = None
            return self._softcap_logits(super().forward(x))
        loss = self._compute_loss(x, targets)
        # The hook runs first in backward, so that all earlier layers can read the factor.
        if loss.requires_grad and not torch.compiler.is_compiling():
            loss.register_hook(self._record_loss_grad_scale)
        return loss

    @torch.no_grad()
    def _selected_logits(self, x: Tensor, logits_to_keep: Tensor) -> Tensor:
        """Returns the logits of some tokens `[b/col, n, V/row]`, including padding columns."""
        with self.trace_scope():
            (from_axis, from_dim), _ = self.comm_axes
            whole = collectives.all_gather(x, from_axis, from_dim).wait()  # (b, s, d/col)
            kept = self._select_tokens(whole, logits_to_keep)  # (b, n, d/col)
            matrix = self.local_matrix(self.handles["weight"].unsharded_data())
            y = self.matmul_backend.forward(kept.flatten(0, 1), matrix).unflatten(0, kept.shape[:2])
            y = _scatter_logits(y, self)
        return self._softcap_logits(y if self.bias is None else y + self.bias.flatten())

    def _select_tokens(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Returns some tokens of x `[b, s/context, d]`; numbers: of all tokens, `[b, n]`.

        Communicates: all-reduce over context, if it splits tokens.
        """
        axis = self.site.axis("context")
        if axis.size == 1 or self.site.step_context.context_splits == "none":
            if len(x) == 1:
                # The tokens of a step of the engine. The other kernel takes four times as long.
                return x.index_select(1, numbers[0])
            return x.take_along_dim(numbers.unsqueeze(-1), 1)
        # One rank has the token, and the others add zeros.
        local = (numbers - axis.index * x.shape[1]).unsqueeze(-1)
        is_local = (local >= 0) & (local < x.shape[1])
        kept = x.take_along_dim(local.clamp(0, x.shape[1] - 1), 1)
        return collectives.all_reduce(kept.masked_fill(~is_local, 0.0), axis).wait()

    def selected_events(self, flow: ActivationShape, num_logits: int) -> list[Event]:
        """Predicts the communication of a forward pass with `num_logits` logits per sample.

        flow: without context, whose ranks have all tokens or equal parts of them.
        """
        cost = self.fused_cost_model([self])
        # All tokens are gathered, and the logits of some are scattered.
        events = [e for e in cost.forward_events(flow) if e.op == "all_gather"]
        context = self.site.axis("context").size
        if context > 1 and self.site.step_context.context_splits == "tokens":
            embed = self.site.layout_context.feature_sharding(self.site.units["embed"], "embed")
            size = flow.samples * num_logits * embed.local_shape[0] * flow.itemsize
            events.append(Event("all_reduce", ("context",), size, self.site.name))
        kept = replace(flow, seq=num_logits * context)
        return events + [e for e in cost.forward_events(kept) if e.op == "reduce_scatter"]

    def _record_loss_grad_scale(self, grad: Tensor) -> None:
        """Publishes the factor of the loss to earlier layers that add auxiliary losses."""
        self.site.step_context.loss_grad_scale = grad

    def _compute_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        check_range(targets, self.site.units[self.out_dim], self.site.name, ignore=IGNORE_INDEX)
        targets = local_slice(targets, self.vocab_shard.batch_axis, 0)  # (b/col, s)
        if self.site.step_context.per_token_loss:
            with self.trace_scope():
                return self._score_each_token(x, targets)
        with self.trace_scope():
            # The chunked function cannot be traced and does not support a bias.
            if (
                torch.compiler.is_compiling()
                or not self.site.step_context.overlapped_autograd
                or self.bias is not None
            ):
                logits = self._softcap_logits(super().forward(x))
                return cross_entropy_reference(
                    logits.flatten(0, 1), targets.flatten(), self.vocab_shard
                )
            needed = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
            if needed:
                # Gradients are computed for a loss factor of 1, and backward multiplies them by the
                # actual factor, unless `loss_scale` is already known.
                factor = torch.ones((), device=x.device)
                known = self.site.step_context.loss_scale
            else:
                factor = None
                known = None
            loss: Tensor = apply_autograd(
                _ChunkedLoss, x, targets, self, factor, known, self.weight
            )
        return loss

    def _softcap_logits(self, logits: Tensor) -> Tensor:
        if self.cap > 0.0:
            return torch.tanh(logits / self.cap) * self.cap
        return logits

    @torch.no_grad()
    def _score_each_token(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns the scores of each target `[2, b/col, s]`, one chunk of tokens at a time."""
        (from_axis, from_dim), _ = self.comm_axes
        whole = collectives.all_gather(x, from_axis, from_dim).wait()  # (b, s, d/col)
        matrix = self.local_matrix(self.handles["weight"].unsharded_data())
        found = list[Tensor]()
        cuts = chunk_slices(whole.shape[1], whole.shape[0] * matrix.shape[0] * x.element_size())
        # As in the cost model, chunks depend on the unpadded width, so padding comes after.
        matrix = self.align_rows(matrix)
        for cut in cuts:
            part = whole[:, cut]
            y = self.matmul_backend.forward(part.flatten(0, 1), matrix).unflatten(0, part.shape[:2])
            y = _scatter_logits(y, self)  # (b/col, c, V/row)
            y = self._softcap_logits(y if self.bias is None else y + self.bias.flatten())
            shape = targets[:, cut].shape
            some = score_each_token(y.flatten(0, 1), targets[:, cut].flatten(), self.vocab_shard)
            found.append(some.unflatten(1, shape))  # (2, b/col, c)
        return torch.cat(found, 2)

    def align_rows(self, matrix: Tensor) -> Tensor:
        """Pads the matrix `[V/row, d/col]` with zero rows, so that rows of logits are aligned.

        The loss ignores the extra columns, like the padding of a vocabulary that row does not
        divide.
        """
        if (
            # Scattered logits are packed with their exact width, and a bias has no padding.
            not self.keeps_logits_local
            or self.bias is not None
            or matrix.device.type not in ALIGNED_DEVICES
        ):
            return matrix
        missing = align_columns(matrix.shape[0], matrix.element_size()) - matrix.shape[0]
        if missing:
            return F.pad(matrix, (0, 0, 0, missing))
        return matrix

    @property
    def cost_model(self) -> LMHeadCost:
        """Cost of the all-gather of x and, per chunk, of the logits and their statistics."""
        return LMHeadCost(
            self.site.name,
            self.site.layout_context,
            (self.weight_in_layout,),
            False,
            self.site.whole_sequence,
        )


class _ChunkedLoss(torch.autograd.Function):
    """The loss of a head in chunks; forward computes the gradients, backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        targets: Tensor,
        leaf: LMHead,
        one: Tensor | None,
        known: Tensor | None,
        weight: Tensor,
    ) -> Tensor:
        (from_axis, from_dim), _ = leaf.comm_axes
        whole = collectives.all_gather(x, from_axis, from_dim).wait()  # (b, s, d/col)
        handle = leaf.handles["weight"]
        matrix = leaf.local_matrix(handle.unsharded_data())  # (V/row, d/col)
        needed = one is not None
        factor = one if known is None else known
        if needed and x.requires_grad:
            dx = whole.new_empty(whole.shape)
        else:
            dx = None
        dw: Tensor | None = None
        loss = torch.zeros((), dtype=leaf.site.bucket_scheduler.reduce_dtype, device=x.device)
        shape = whole.shape
        # All tokens in one row, so that a chunk can hold tokens of several samples.
        if leaf.keeps_logits_local:
            whole = whole.flatten(0, 1).unsqueeze(0)
            targets = targets.flatten().unsqueeze(0)
        samples, tokens, _ = whole.shape
        if dx is not None:
            dx = dx.view(whole.shape)
        cuts = chunk_slices(tokens, samples * matrix.shape[0] * x.element_size())
        matrix = leaf.align_rows(matrix)
        for cut in cuts:
            part = whole[:, cut].flatten(0, 1)  # (b · c, d/col)
            y = _scatter_logits(
                leaf.matmul_backend.forward(part, matrix).unflatten(0, (samples, -1)), leaf
            )
            # Soft cap in place. d(cap · tanh(z / cap))/dz = 1 - tanh²(z / cap), taken before tanh
            # is scaled.
            slope = None
            if leaf.cap > 0.0:
                y = y.div_(leaf.cap).tanh_()
                slope = 1.0 - y * y if needed else None
                y.mul_(leaf.cap)
            # With a factor, `score_tokens` overwrites the logits in `y` by their gradient.
            loss += score_tokens(
                y.flatten(0, 1), targets[:, cut].flatten(), leaf.vocab_shard, factor
            )
            if needed:
                y = y if slope is None else y.mul_(slope)
                dy = _gather_logit_grads(y, leaf).flatten(0, 1)  # (b · c, V/row)
                if dx is not None:
                    dx[:, cut] = leaf.matmul_backend.grad_x(dy, matrix).unflatten(0, (samples, -1))
                if handle.trainable:
                    dw = _accumulate_weight_grad(dw, dy, part, leaf)
                del dy
            # Free this chunk's logits before the next chunk allocates as much.
            del y
        if dx is not None:
            dx = collectives.reduce_scatter(dx.view(shape), from_axis, from_dim).wait()
        ctx.leaf = leaf
        # Attributes instead of saved tensors: backward scales them in place and frees them.
        ctx.dx = dx
        ctx.dw = dw
        ctx.taken = False
        ctx.scaled = known is not None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.dx
        dw = ctx.dw
        handle = ctx.leaf.handles["weight"]
        if ctx.taken:
            raise RuntimeError(
                f"{ctx.leaf.site.name}: backward() ran a second time for the same loss. Its "
                "gradients are computed once, in the forward pass. Compute the loss again before "
                "calling backward()."
            )
        ctx.dx = None
        ctx.dw = None
        ctx.taken = True
        if not ctx.scaled:
            dx, dw = (None if x is None else x.mul_(grad) for x in (dx, dw))
        if dw is not None:
            shape = handle.sharding.unsharded_shape
            # Remove the rows that `align_rows` added.
            handle.accumulate_grad(dw.flatten()[: math.prod(shape)].view(shape))
        return dx, None, None, None, None, None


def _scatter_logits(y: Tensor, leaf: LMHead) -> Tensor:
    """Returns this rank's part of the summed logits `[b, c, V/row]`.

    Communicates: reduce-scatter over col.
    """
    _, (axis, dim) = leaf.comm_axes
    # Avoid an unnecessary copy of the logits.
    if axis.size == 1:
        return y
    sums = collectives.reduce_scatter(
        pack_outputs([y], [leaf], axis, dim), axis, buffer_dim(dim)
    ).wait()
    return unpack_outputs(sums, [leaf], dim)[0]


def _gather_logit_grads(dy: Tensor, leaf: LMHead) -> Tensor:
    """The backward of `_scatter_logits`. Communicates: all-gather over col."""
    _, (axis, dim) = leaf.comm_axes
    if axis.size == 1:
        return dy
    whole = collectives.all_gather(
        pack_output_grads([dy], [leaf], dim), axis, buffer_dim(dim)
    ).wait()
    return unpack_output_grads(whole, [leaf], axis, dim)[0]


def _accumulate_weight_grad(sum_: Tensor | None, dy: Tensor, x: Tensor, leaf: LMHead) -> Tensor:
    """Adds dYᵀ·X of a chunk to the sum so far, in the reduce dtype; dy: `[t, n]`, x: `[t, d]`."""
    wide = leaf.site.bucket_scheduler.reduce_dtype
    # Meta tensors represent GPU tensors, so that a dry run counts the same memory.
    host = x.device.type not in ("cuda", "meta")
    if x.dtype == wide or host or leaf.matmul_backend != PlainMatmul():
        new = leaf.matmul_backend.grad_w(dy, x).to(wide)
        if sum_ is None:
            return new
        return sum_.add_(new)
    if sum_ is None:
        # bf16 operands with an fp32 result: partial sums are not rounded to bf16, and no fp32 copy
        # of the operands is needed.
        return torch.mm(dy.T, x, out_dtype=wide)
    return torch.addmm(sum_, dy.T, x, out_dtype=wide, out=sum_)
