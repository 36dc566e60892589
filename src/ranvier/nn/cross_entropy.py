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
"""Logits that are widened and scored at once where there is no kernel: they stay in the cache of a
CPU from one operation to the next."""
TRITON = launch.has_triton()


@dataclass(frozen=True)
class VocabShard:
    """My part of the vocabulary, and who has the rest."""

    axis: Axis
    """Ranks that hold the other columns."""
    batch_axis: Axis
    """Ranks among which the samples of a micro-batch are divided."""
    first_column: int
    valid_columns: int
    """Columns that are no padding."""

    @classmethod
    def from_context(cls, site: LayerContext, dim: str) -> VocabShard:
        """Those of a dim of a model on this rank."""
        region = site.table.activation_rule(dim)
        sharding = Sharding.from_dims([site.units[dim]], [dim], region, site.grid.degrees)
        place = sharding.shard_at(site.grid.index)
        batch_axis = site.axis(*(axis for axis in region["batch"] if axis == "col"))
        return cls(
            site.axis(*site.table.feature_axes(dim)),
            batch_axis,
            place.global_offset[0],
            place.valid_shape[0],
        )


class CrossEntropy(ParallelLayer):
    """Sum over tokens of the negative log-likelihood of their targets.

    Equal on all ranks of the vocabulary.
    logits: `[b/col, s, V/row]` or `[b, s, V/(row·col)]`; targets: `[b, s]`; y: scalar.
    Communicates: all-reduce (max, then sums) of three numbers a token over the axes of vocab;
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
        """What the generic tests try."""
        logits = ("batch", "seq", "vocab")
        targets = ("batch", "seq")
        return [LayerExample(lambda twin: twin(), ("vocab",), [logits, targets], [()])]

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of my tokens."""
        check_range(targets, self.site.units[self.dim], self.site.name, ignore=IGNORE_INDEX)
        targets = local_slice(targets, self.vocab_shard.batch_axis, 0).flatten()  # (t,)
        logits = logits.flatten(0, 1)  # (t, V/row)
        with self.trace_scope():
            if torch.compiler.is_compiling() or not self.site.overlapped_autograd:
                return cross_entropy_reference(logits, targets, self.vocab_shard)
            loss: Tensor = apply_autograd(_CrossEntropyFunction, logits, targets, self.vocab_shard)
        return loss

    @property
    def cost_model(self) -> CrossEntropyCost:
        """The maximum, then sum and target logit together."""
        return CrossEntropyCost(self.site.name, self.site.layout_context, self.dim)


def cross_entropy_reference(logits: Tensor, targets: Tensor, mine: VocabShard) -> Tensor:
    """The loss in differentiable pairs."""
    x = _at_least_float32(logits)[:, : mine.valid_columns]
    peak = collectives.all_reduce(_max_logits(x.detach()), mine.axis, "max").wait()
    column, here = _local_targets(targets, mine)
    if mine.valid_columns:
        hit = x.gather(1, column.unsqueeze(1)).squeeze(1) * here
    else:
        hit = x.sum(1)
    sums = reduce_from_axis(torch.stack([(x - peak.unsqueeze(1)).exp().sum(1), hit]), mine.axis)
    return ((sums[0].log() + peak - sums[1]) * (targets != IGNORE_INDEX)).sum()


def score_tokens(
    logits: Tensor, targets: Tensor, mine: VocabShard, gradient: Tensor | None
) -> Tensor:
    """Sum of the losses of tokens; logits `[t, V/row]` become theirs times `gradient`, in place.

    Communicates: all-reduce (max, then sums) of three numbers a token over the axes of vocab.
    """
    if mine.axis.size == 1 and not can_use_kernel(logits):
        return _score_full_vocab(logits, targets, mine, gradient)
    alone = mine.axis.size == 1
    peak, sums, hit = logit_statistics(logits, targets, mine, gradient=gradient if alone else None)
    _, log_sum, hit = _combine_statistics(peak, sums, hit, mine)
    if gradient is not None and not alone:
        logits_to_grads_(logits, targets, log_sum, mine, gradient)
    return ((log_sum - hit) * (targets != IGNORE_INDEX)).sum()


def _score_full_vocab(
    logits: Tensor, targets: Tensor, mine: VocabShard, gradient: Tensor | None
) -> Tensor:
    """`score` where a rank has all columns and there is no kernel."""
    column = _local_targets(targets, mine)[0].unsqueeze(1)
    counted = (targets != IGNORE_INDEX).unsqueeze(1)
    losses = []
    for rows in _token_chunks(logits):
        here = logits[rows, : mine.valid_columns]
        x = torch.log_softmax(here, 1, dtype=torch.promote_types(here.dtype, torch.float32))
        losses.append(-(x.gather(1, column[rows]) * counted[rows]).sum())
        if gradient is not None:
            factor = (counted[rows] * gradient).to(x.dtype)
            x.exp_().mul_(factor).scatter_add_(1, column[rows], -factor)
            here.copy_(x)
            logits[rows, mine.valid_columns :] = 0.0
    return torch.stack(losses).sum()


def _combine_statistics(
    peak: Tensor, sums: Tensor, hit: Tensor, mine: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, logarithm of the sum of exponentials, target's logit: of all columns `[t]`."""
    highest = collectives.all_reduce(peak, mine.axis, "max").wait()
    scaled = sums * (peak - highest).exp()
    both = collectives.all_reduce(torch.stack([scaled, hit]), mine.axis).wait()
    return highest, both[0].log() + highest, both[1]


def score_each_token(logits: Tensor, targets: Tensor, mine: VocabShard) -> Tensor:
    """Log-probability of each target, and 1 where it is the likeliest token: `[2, t]`.

    Of equally likely tokens the first counts, as in argmax. logits: `[t, V/row]`.
    Communicates: all-reduce (max, sums, min) of four numbers a token over the axes of vocab.
    """
    peak, sums, hit = logit_statistics(logits, targets, mine)
    highest, log_sum, hit = _combine_statistics(peak, sums, hit, mine)
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
    """Whether the kernel runs here."""
    return (
        logits.device.type == "cuda"
        and logits.dtype != torch.float64
        and logits.stride(-1) == 1
        and TRITON
    )


def logit_statistics(
    logits: Tensor, targets: Tensor, mine: VocabShard, *, gradient: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exponentials below it and the target's logit of each token `[t]`.

    gradient: the kernel, which has all columns, leaves theirs times it in the place of the logits.
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
    return torch.cat(peaks), torch.cat(sums), torch.cat(hits)


def logits_to_grads_(
    logits: Tensor, targets: Tensor, log_sum: Tensor, mine: VocabShard, factor: Tensor
) -> None:
    """factor · (softmax - one-hot) in the place of the logits; 0 where nothing counts."""
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
    """The loss of whole logits; backward makes their gradient chunk by chunk."""

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
        out = logits.clone()
        logits_to_grads_(out, targets, log_sum, ctx.mine, grad)
        return out, None, None


def _local_targets(targets: Tensor, mine: VocabShard) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank, and whether it is here."""
    column = targets - mine.first_column
    here = (column >= 0) & (column < mine.valid_columns)
    return column.clamp(0, max(mine.valid_columns - 1, 0)), here


def _at_least_float32(x: Tensor) -> Tensor:
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x


def _max_logits(x: Tensor) -> Tensor:
    """Largest logit of each token on this rank; very small where a rank holds only padding."""
    if x.shape[1] == 0:
        return x.new_full((x.shape[0],), torch.finfo(x.dtype).min)
    return x.amax(1)


def _token_chunks(logits: Tensor) -> list[slice]:
    """Ranges of tokens whose logits are at most CHUNK."""
    rows = max(CHUNK_LOGITS // max(logits.shape[1], 1), 1)
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
