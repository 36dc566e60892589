"""Cross-entropy over a split vocabulary, in chunks.

With logits `[b/col, s, V/row]` each rank reduces its own columns to a maximum, a sum of
exponentials and the target's logit; these three numbers a token are combined over the axes of the
vocabulary:

    loss = log Σ exp(x) - x[target],   summed over the valid tokens of this rank

Logits stay in their type and are widened to fp32 one chunk of tokens at a time, forward and
backward, so they are never whole in fp32. Padded columns are left out; targets of -100 count
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.comm import verbs
from ranvier.comm.pairs import take, total
from ranvier.nn.example import Example
from ranvier.nn.leaf import Flow, Leaf, Site, applied, check_range
from ranvier.sharding import Dim, Sharding
from ranvier.trace import Event

IGNORE = -100
CHUNK = 1 << 22
"""Logits widened to fp32 at once."""


class CrossEntropy(Leaf):
    """Sum over tokens of the negative log-likelihood of their targets.

    Equal on all ranks of the vocabulary.
    logits: `[b/col, s, V/row]` or `[b, s, V/(row·col)]`; targets: `[b, s]`; y: scalar.
    Communicates: all-reduce (max, then sums) of three numbers a token over the axes of vocab;
    backward: nothing.
    """

    def __init__(self, site: Site, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        (dim,) = dims
        assert isinstance(dim, str), dims
        self.dim = dim
        region = site.table.region(dim)
        sharding = Sharding.make([site.units[dim]], dims, region, site.grid.degrees)
        place = sharding.place(site.grid.index)
        self.axis = site.axis(*site.table.axes(dim))
        self.batch_axis = site.axis(*(axis for axis in region["batch"] if axis == "col"))
        self.first, self.valid = place.start[0], place.valid[0]

    @staticmethod
    def examples() -> list[Example]:
        """What the generic tests try."""
        logits, targets = ("batch", "seq", "vocab"), ("batch", "seq")
        return [Example(lambda twin: twin(), ("vocab",), [logits, targets], [()])]

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of my tokens."""
        check_range(targets, self.site.units[self.dim], self.site.name, ignore=IGNORE)
        targets = take(targets, self.batch_axis, 0).flatten()  # (t,)
        logits = logits.flatten(0, 1)  # (t, V/row)
        with self.here():
            if torch.compiler.is_compiling() or not self.site.fast:
                return reference(logits, targets, self)
            loss: Tensor = applied(_Loss, logits, targets, self)
        return loss

    def forward_events(self, flow: Flow) -> list[Event]:
        """The maximum, then sum and target logit together."""
        tokens = self.tokens(flow, self.dim)
        return [
            *self.event("all_reduce", self.axis, tokens, flow.statistics),
            *self.event("all_reduce", self.axis, 2 * tokens, flow.statistics),
        ]


def _local(targets: Tensor, leaf: CrossEntropy) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank, and whether it is here."""
    column = targets - leaf.first
    here = (column >= 0) & (column < leaf.valid)
    return column.clamp(0, max(leaf.valid - 1, 0)), here


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def reference(logits: Tensor, targets: Tensor, leaf: CrossEntropy) -> Tensor:
    """The loss in differentiable pairs."""
    x = _wide(logits)[:, : leaf.valid]
    peak = verbs.all_reduce(_peak(x.detach()), leaf.axis, "max").wait()
    column, here = _local(targets, leaf)
    hit = x.gather(1, column.unsqueeze(1)).squeeze(1) * here if leaf.valid else x.sum(1)
    sums = total(torch.stack([(x - peak.unsqueeze(1)).exp().sum(1), hit]), leaf.axis)
    return ((sums[0].log() + peak - sums[1]) * (targets != IGNORE)).sum()


def _peak(x: Tensor) -> Tensor:
    """Largest logit of each token on this rank; very small where a rank holds only padding."""
    if x.shape[1] == 0:
        return x.new_full((x.shape[0],), torch.finfo(x.dtype).min)
    return x.amax(1)


class _Loss(torch.autograd.Function):
    """The loss in chunks; backward makes the gradient of the logits chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, leaf: CrossEntropy) -> Tensor:
        column, here = _local(targets, leaf)
        peaks, sums, hits = [], [], []
        for rows in _chunks(logits):
            x = _wide(logits[rows])[:, : leaf.valid]
            peak = _peak(x)
            peaks.append(peak)
            sums.append((x - peak.unsqueeze(1)).exp_().sum(1))
            hit = x.gather(1, column[rows].unsqueeze(1)).squeeze(1) if leaf.valid else peak
            hits.append(torch.where(here[rows], hit, 0.0))
        local, axis = torch.cat(peaks), leaf.axis
        peak = verbs.all_reduce(local, axis, "max").wait()
        scaled = torch.cat(sums) * (local - peak).exp()
        both = verbs.all_reduce(torch.stack([scaled, torch.cat(hits)]), axis).wait()
        log_sum = both[0].log() + peak  # (t,)
        counted = targets != IGNORE
        ctx.save_for_backward(logits, log_sum, column, here & counted, counted)
        ctx.valid = leaf.valid
        return ((log_sum - both[1]) * counted).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, log_sum, column, here, counted = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for rows in _chunks(logits):
            x = _wide(logits[rows])[:, : ctx.valid]
            x = (x - log_sum[rows].unsqueeze(1)).exp_() * counted[rows].unsqueeze(1)
            if ctx.valid:
                x.scatter_add_(1, column[rows].unsqueeze(1), -here[rows].unsqueeze(1).to(x.dtype))
            out[rows, : ctx.valid] = (x * grad).to(out.dtype)
        return out, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Ranges of tokens whose logits are at most CHUNK."""
    rows = max(CHUNK // max(logits.shape[1], 1), 1)
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
