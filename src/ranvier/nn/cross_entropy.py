"""Cross-entropy over a split vocabulary, in chunks.

With logits `[b/col, s, V/row]` each rank reduces its columns to a maximum, a sum of exponentials
and the logit of the target. These three numbers per token are combined over the axes of the
vocabulary:

    loss = log Σ exp(x) - x[target],   summed over the valid tokens of this rank

Logits keep their dtype and are converted to fp32 one chunk of tokens at a time, forward and
backward, so they are never stored in fp32 as a whole. Padded columns and targets of -100 are
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier import launch
from ranvier.comm import collectives
from ranvier.comm.autograd import local_slice, reduce_from_axis
from ranvier.cost.layers import CrossEntropyCost
from ranvier.grid import Axis
from ranvier.nn.example import LayerExample
from ranvier.nn.layer import LayerContext, ParallelLayer, apply_autograd, check_range
from ranvier.sharding import Dim, Sharding

IGNORE_INDEX = -100
CHUNK_LOGITS = 1 << 18
"""Number of logits that are converted and scored at once without the kernel. They stay in the cache
of a CPU between operations."""
TRITON = launch.has_triton()


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary, and the ranks that hold the rest."""

    axis: Axis
    """The axis over which the columns are split."""
    batch_axis: Axis
    """The axis over which the samples of a micro-batch are split."""
    first_column: int
    valid_columns: int
    """Columns that are not padding."""

    @classmethod
    def from_context(cls, site: LayerContext, dim: str) -> VocabShard:
        """Returns this rank's shard of a dim of the model."""
        region = site.table.activation_rule(dim)
        sharding = Sharding.from_dims([site.units[dim]], [dim], region, site.grid.degrees)
        place = sharding.shard_at(site.grid.index)
        batch_axis = site.axis(*site.table.axes_inside_replica("vocab", "batch"))
        return cls(
            site.axis(*site.table.feature_axes(dim)),
            batch_axis,
            place.global_offset[0],
            place.valid_shape[0],
        )


class CrossEntropy(ParallelLayer):
    """Cross-entropy loss over a split vocabulary, summed over the tokens of this rank.

    The result is equal on all ranks that share a vocabulary. Targets of -100 are ignored.
    logits: `[b/col, s, V/row]` or `[b, s, V/(row·col)]`; targets: `[b, s]`; y: scalar.
    Communicates: all-reduce (max, then sums) of three numbers per token over the axes of vocab;
    backward: nothing.
    """

    def __init__(self, site: LayerContext, serial: torch.nn.Module, dims: Sequence[Dim]) -> None:
        super().__init__(site)
        (dim,) = dims
        assert isinstance(dim, str), dims
        self.dim = dim
        self.vocab_shard = VocabShard.from_context(site, dim)

    @staticmethod
    def example_layers() -> list[LayerExample]:
        """Examples for the generic tests."""
        logits = ("batch", "seq", "vocab")
        targets = ("batch", "seq")
        return [LayerExample(lambda twin: twin(), ("vocab",), [logits, targets], [()])]

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the losses of this rank's tokens."""
        check_range(targets, self.site.units[self.dim], self.site.name, ignore=IGNORE_INDEX)
        targets = local_slice(targets, self.vocab_shard.batch_axis, 0).flatten()  # (t,)
        logits = logits.flatten(0, 1)  # (t, V/row)
        with self.trace_scope():
            if torch.compiler.is_compiling() or not self.site.step_context.overlapped_autograd:
                return cross_entropy_reference(logits, targets, self.vocab_shard)
            loss: Tensor = apply_autograd(_CrossEntropyFunction, logits, targets, self.vocab_shard)
        return loss

    @property
    def cost_model(self) -> CrossEntropyCost:
        """Cost of two all-reduces: of the maximum, then of the sum and the target logit."""
        return CrossEntropyCost(self.site.name, self.site.layout_context, self.dim)


def cross_entropy_reference(logits: Tensor, targets: Tensor, mine: VocabShard) -> Tensor:
    """Returns the loss, computed with differentiable collectives."""
    x = _at_least_float32(logits)[:, : mine.valid_columns]
    # The shift by the maximum cancels in the loss, so it needs no gradient.
    peak = collectives.all_reduce(_max_logits(x.detach()), mine.axis, "max").wait()
    column, here = _local_targets(targets, mine)
    # A rank may hold only padding; `x.sum(1)` of no columns is a zero that is part of the graph.
    if mine.valid_columns:
        hit = x.gather(1, column.unsqueeze(1)).squeeze(1) * here
    else:
        hit = x.sum(1)
    sums = reduce_from_axis(torch.stack([(x - peak.unsqueeze(1)).exp().sum(1), hit]), mine.axis)
    return ((sums[0].log() + peak - sums[1]) * (targets != IGNORE_INDEX)).sum()


def score_tokens(
    logits: Tensor, targets: Tensor, mine: VocabShard, gradient: Tensor | None
) -> Tensor:
    """Returns the sum of the token losses.

    If `gradient` is given, logits `[t, V/row]` are overwritten by `gradient` times their gradient.
    Communicates: all-reduce (max, then sums) of three numbers per token over the axes of vocab.
    """
    if mine.axis.size == 1 and not can_use_kernel(logits):
        return _score_full_vocab(logits, targets, mine, gradient)
    # With all columns on this rank one kernel computes statistics and gradient; otherwise the
    # gradient needs the statistics of all ranks first.
    alone = mine.axis.size == 1
    peak, sums, hit = logit_statistics(logits, targets, mine, gradient=gradient if alone else None)
    _, log_sum, hit = _combine_statistics(peak, sums, hit, mine)
    if gradient is not None and not alone:
        logits_to_grads_(logits, targets, log_sum, mine, gradient)
    return ((log_sum - hit) * (targets != IGNORE_INDEX)).sum()


def _score_full_vocab(
    logits: Tensor, targets: Tensor, mine: VocabShard, gradient: Tensor | None
) -> Tensor:
    """`score_tokens` for a rank that has all columns, without the Triton kernel."""
    column = _local_targets(targets, mine)[0].unsqueeze(1)
    counted = (targets != IGNORE_INDEX).unsqueeze(1)
    losses = []
    for rows in _token_chunks(logits):
        here = logits[rows, : mine.valid_columns]
        x = torch.log_softmax(here, 1, dtype=torch.promote_types(here.dtype, torch.float32))
        losses.append(-(x.gather(1, column[rows]) * counted[rows]).sum())
        if gradient is not None:
            factor = (counted[rows] * gradient).to(x.dtype)
            # factor · (softmax - one-hot); `x` holds the log-softmax.
            x.exp_().mul_(factor).scatter_add_(1, column[rows], -factor)
            here.copy_(x)
            logits[rows, mine.valid_columns :] = 0.0
    return torch.stack(losses).sum()


def _combine_statistics(
    peak: Tensor, sums: Tensor, hit: Tensor, mine: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns maximum logit, log-sum-exp and target logit over all columns, `[t]` each."""
    highest = collectives.all_reduce(peak, mine.axis, "max").wait()
    # Rescale the local sum to the global maximum, as in online softmax.
    scaled = sums * (peak - highest).exp()
    both = collectives.all_reduce(torch.stack([scaled, hit]), mine.axis).wait()
    return highest, both[0].log() + highest, both[1]


def score_each_token(logits: Tensor, targets: Tensor, mine: VocabShard) -> Tensor:
    """Returns the log-probability of each target and 1 if it is the most likely token, `[2, t]`.

    Of several maxima the first one counts, as in argmax. logits: `[t, V/row]`.
    Communicates: all-reduce (max, sums, min) of four numbers per token over the axes of vocab.
    """
    peak, sums, hit = logit_statistics(logits, targets, mine)
    highest, log_sum, hit = _combine_statistics(peak, sums, hit, mine)
    # Ranks without the maximum contribute the neutral element of the minimum.
    none = torch.full_like(targets, torch.iinfo(torch.int64).max)
    if mine.valid_columns:
        best = logits[:, : mine.valid_columns].argmax(1) + mine.first_column
    else:
        best = none
    first = collectives.all_reduce(
        torch.where(peak == highest, best, none), mine.axis, "min"
    ).wait()
    return torch.stack([hit - log_sum, (first == targets).to(hit.dtype)])


def can_use_kernel(logits: Tensor) -> bool:
    """Whether the Triton kernel supports these logits."""
    return (
        logits.device.type == "cuda"
        # The kernel computes in fp32, which would lose the precision of float64.
        and logits.dtype != torch.float64
        and logits.stride(-1) == 1
        and TRITON
    )


def logit_statistics(
    logits: Tensor, targets: Tensor, mine: VocabShard, *, gradient: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns per token `[t]`: maximum logit, sum of exponentials relative to it, target logit.

    gradient: if given, the kernel overwrites the logits by `gradient` times their gradient; this
    rank must then have all columns.
    """
    if can_use_kernel(logits):
        from ranvier.nn import triton_kernels

        return triton_kernels.cross_entropy(
            logits, targets, first=mine.first_column, valid=mine.valid_columns, gradient=gradient
        )
    column, here = _local_targets(targets, mine)
    peaks = []
    sums = []
    hits = []
    for rows in _token_chunks(logits):
        x = _at_least_float32(logits[rows])[:, : mine.valid_columns]
        peak = _max_logits(x)
        peaks.append(peak)
        sums.append((x - peak.unsqueeze(1)).exp_().sum(1))
        if mine.valid_columns:
            hit = x.gather(1, column[rows].unsqueeze(1)).squeeze(1)
        else:
            hit = peak
        hits.append(torch.where(here[rows], hit, 0.0))
    tokens = logits.shape[0]
    return _join_chunks(peaks, tokens), _join_chunks(sums, tokens), _join_chunks(hits, tokens)


def logits_to_grads_(
    logits: Tensor, targets: Tensor, log_sum: Tensor, mine: VocabShard, factor: Tensor
) -> None:
    """Overwrites the logits by factor · (softmax - one-hot); 0 for ignored tokens and padding."""
    if can_use_kernel(logits):
        from ranvier.nn import triton_kernels

        triton_kernels.cross_entropy(
            logits,
            targets,
            first=mine.first_column,
            valid=mine.valid_columns,
            log_sums=log_sum,
            gradient=factor,
        )
        return
    column, here = _local_targets(targets, mine)
    counted = targets != IGNORE_INDEX
    for rows in _token_chunks(logits):
        x = _at_least_float32(logits[rows])[:, : mine.valid_columns]
        counts = (counted[rows] * factor).unsqueeze(1).to(x.dtype)
        x = (x - log_sum[rows].unsqueeze(1)).exp_().mul_(counts)
        if mine.valid_columns:
            x.scatter_add_(1, column[rows].unsqueeze(1), -counts * here[rows].unsqueeze(1))
        logits[rows, : mine.valid_columns] = x.to(logits.dtype)
        logits[rows, mine.valid_columns :] = 0.0


class _CrossEntropyFunction(torch.autograd.Function):
    """The loss of stored logits; backward computes their gradient one chunk at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mine: VocabShard) -> Tensor:
        _, log_sum, hit = _combine_statistics(*logit_statistics(logits, targets, mine), mine)
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.mine = mine
        return ((log_sum - hit) * (targets != IGNORE_INDEX)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        # The logits belong to the caller, so they must not be overwritten.
        out = logits.clone()
        logits_to_grads_(out, targets, log_sum, ctx.mine, grad)
        return out, None, None


def _local_targets(targets: Tensor, mine: VocabShard) -> tuple[Tensor, Tensor]:
    """Returns the local column of each target, and whether the target is on this rank."""
    column = targets - mine.first_column
    here = (column >= 0) & (column < mine.valid_columns)
    # Clamped so that a gather with targets of other ranks (or -100) stays in bounds.
    return column.clamp(0, max(mine.valid_columns - 1, 0)), here


def _at_least_float32(x: Tensor) -> Tensor:
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x


def _max_logits(x: Tensor) -> Tensor:
    """Returns the maximum logit of each token on this rank; very small for only padding."""
    if x.shape[1] == 0:
        # Finite, unlike -inf, whose difference with itself is NaN.
        return x.new_full((x.shape[0],), torch.finfo(x.dtype).min)
    return x.amax(1)


def _token_chunks(logits: Tensor) -> list[slice]:
    """Returns ranges of tokens with at most CHUNK_LOGITS logits each; on the meta device only the
    first, because all need the same memory and none has values."""
    rows = max(CHUNK_LOGITS // max(logits.shape[1], 1), 1)
    if logits.is_meta:
        return [slice(0, min(rows, logits.shape[0]))]
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _join_chunks(parts: list[Tensor], tokens: int) -> Tensor:
    """Returns the numbers of all tokens `[t]` from those of chunks."""
    if parts[0].is_meta:
        return parts[0].new_empty(tokens)
    return torch.cat(parts)
