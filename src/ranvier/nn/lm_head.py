"""LM head: logits over the vocabulary and their loss, one chunk of tokens at a time.

The logits of a batch are by far its largest tensor, and they are never needed all at once: for each
chunk of tokens they are computed, reduced to a loss, overwritten by their gradient, and multiplied
back into dX and dW before the next chunk reuses their memory. So forward already computes the
gradients; backward only scales them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import collectives
from ranvier.comm.autograd import local_slice
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

ALIGNED_DEVICES = ("cuda", "meta")
"""Devices on which row alignment matters (`cost.linear.ALIGNMENT_BYTES`); meta stands for a GPU."""


class LMHead(Linear):
    """y = x Wᵀ, or with targets the sum of the losses of this rank's tokens.

    x: `[b, s/row, d/col]`; y: `[b/col, s, V/row]` or `[b, s, V/(row·col)]`; targets: `[b, s]`.
    With `step_context.per_token_loss` and targets: log-probability of each target and whether it is
    the most likely token, `[2, b/col, s]`.
    Communicates: all-gather x, reduce-scatter dx; for each chunk reduce-scatter and all-gather of
    its logits, all-reduce of three numbers per token over the axes of vocab.
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site, serial, dims)
        self.vocab_shard = VocabShard.from_context(site, self.out_dim)
        self.cap = float(getattr(serial, "cap", 0.0))
        """Soft cap: logits are cap · tanh(logits / cap); 0 disables it."""
        self.keeps_logits_local = self.comm_axes[1][0].size == 1
        """Whether logits are not scattered; then chunks need not respect sample boundaries."""

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

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or with targets their loss."""
        if targets is None:
            # Without a loss of its own the model does not know the factor of the caller's loss; MoE
            # layers with auxiliary losses then raise instead of using a stale one.
            self.site.step_context.loss_grad_scale = None
            return self._softcap_logits(super().forward(x))
        loss = self._compute_loss(x, targets)
        # The hook runs first in backward, so that all earlier layers see the factor.
        if loss.requires_grad and not torch.compiler.is_compiling():
            loss.register_hook(self._record_loss_grad_scale)
        return loss

    def _record_loss_grad_scale(self, grad: Tensor) -> None:
        """Publish the factor of the loss to earlier layers that add auxiliary losses."""
        self.site.step_context.loss_grad_scale = grad

    def _compute_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        check_range(targets, self.site.units[self.out_dim], self.site.name, ignore=IGNORE_INDEX)
        targets = local_slice(targets, self.vocab_shard.batch_axis, 0)  # (b/col, s)
        if self.site.step_context.per_token_loss:
            with self.trace_scope():
                return self._score_each_token(x, targets)
        with self.trace_scope():
            # The chunked function is neither traceable nor does it handle a bias.
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
                # Gradients of a loss with factor 1; backward multiplies by the real factor unless
                # `loss_scale` is known here already.
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
        """Scores of each target `[2, b/col, s]`, one chunk of tokens at a time."""
        (from_axis, from_dim), _ = self.comm_axes
        whole = collectives.all_gather(x, from_axis, from_dim).wait()  # (b, s, d/col)
        matrix = self.local_matrix(self.handles["weight"].unsharded_data())
        found = list[Tensor]()
        cuts = chunk_slices(whole.shape[1], whole.shape[0] * matrix.shape[0] * x.element_size())
        # Chunks are computed from the unpadded width, as the cost model does; hence padding comes
        # after.
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
        """The matrix `[V/row, d/col]` padded with zero rows, so that rows of logits are aligned.

        The loss ignores the extra columns, as it does where row does not divide the vocabulary.
        """
        if (
            # Scattered logits are packed by their exact width, and a bias has no entries for the
            # padding.
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
        """All-gather x; per chunk its logits and their statistics."""
        return LMHeadCost(
            self.site.name,
            self.site.layout_context,
            (self.linear_weight,),
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
        # Kept as attributes rather than saved tensors: backward scales them in place and frees
        # them.
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
                f"{ctx.leaf.site.name}: backward ran a second time through the same loss. Its "
                "gradients are made once, in forward. Compute the loss again."
            )
        ctx.dx = None
        ctx.dw = None
        ctx.taken = True
        if not ctx.scaled:
            dx, dw = (None if x is None else x.mul_(grad) for x in (dx, dw))
        if dw is not None:
            shape = handle.sharding.unsharded_shape
            # Drop the rows that `align_rows` added.
            handle.accumulate_grad(dw.flatten()[: math.prod(shape)].view(shape))
        return dx, None, None, None, None, None


def _scatter_logits(y: Tensor, leaf: LMHead) -> Tensor:
    """This rank's part of the summed logits `[b, c, V/row]`.

    Communicates: reduce-scatter over col.
    """
    _, (axis, dim) = leaf.comm_axes
    # Packing would copy the logits for nothing.
    if axis.size == 1:
        return y
    sums = collectives.reduce_scatter(
        pack_outputs([y], [leaf], axis, dim), axis, buffer_dim(dim)
    ).wait()
    return unpack_outputs(sums, [leaf], dim)[0]


def _gather_logit_grads(dy: Tensor, leaf: LMHead) -> Tensor:
    """Dual of `_scatter_logits`. Communicates: all-gather over col."""
    _, (axis, dim) = leaf.comm_axes
    if axis.size == 1:
        return dy
    whole = collectives.all_gather(
        pack_output_grads([dy], [leaf], dim), axis, buffer_dim(dim)
    ).wait()
    return unpack_output_grads(whole, [leaf], axis, dim)[0]


def _accumulate_weight_grad(sum_: Tensor | None, dy: Tensor, x: Tensor, leaf: LMHead) -> Tensor:
    """Add dYᵀ·X of a chunk to the sum so far, in the reduce dtype; dy: `[t, n]`, x: `[t, d]`."""
    wide = leaf.site.bucket_scheduler.reduce_dtype
    # Meta tensors stand for those of a GPU, so that a dry run counts the same memory.
    host = x.device.type not in ("cuda", "meta")
    if x.dtype == wide or host or leaf.matmul_backend != PlainMatmul():
        new = leaf.matmul_backend.grad_w(dy, x).to(wide)
        if sum_ is None:
            return new
        return sum_.add_(new)
    if sum_ is None:
        # bf16 operands with an fp32 result: the sum over chunks does not round to bf16 in between,
        # and no widened copy is made.
        return torch.mm(dy.T, x, out_dtype=wide)
    return torch.addmm(sum_, dy.T, x, out_dtype=wide, out=sum_)
