"""Hugging Face forward: calls a model on a grid like a transformers model.

Each (data, expert, depth) coordinate is called with its own samples, all its ranks with the same
ones. Outputs are complete on all ranks of the coordinate:

    loss      the mean over the targets of all coordinates, which may differ in number
    logits    [b, s, v] of my samples; their gradient is treated as the gradient of the mean over
              the coordinates, as data-parallel loops expect

Inputs are padded to samples and tokens that the grid can divide; padding is removed from outputs.
Training with labels does not return logits, which are never gathered then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.autograd import gather_from_axis, local_slice, reduce_from_axis
from ranvier.errors import DataError, PlanError
from ranvier.grid import Axis
from ranvier.infer.logprobs import (
    check_length,
    pad_vocab_shard,
    padded_positions,
    round_up_batch,
)
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.parallel.context_inputs import restore_window_order, split_over_context
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.pipeline.step import MicroBatch
from ranvier.sharding import REPLICA_AXES

PADDING_DOCUMENT = -1
"""Document number of padding tokens."""


class CausalLMOutput(OrderedDict[str, Tensor]):
    """Output of a call: by name (`out.loss`, `out["loss"]`) or by index (`out[0]`)."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in ("loss", "logits"):
            raise AttributeError(f"An output has loss and logits, but not {name!r}.")
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        """Returns a tensor by its name, or by index or slice."""
        if isinstance(key, str):
            return super().__getitem__(key)
        return tuple(self.values())[key]


def hf_forward(
    model: nn.Module,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    samples: Tensor | None = None,
) -> CausalLMOutput:
    """Returns the loss of labels, each compared with the previous logits, or logits without labels.

    The label -100 is ignored. All inputs are `[b, s]` except samples `[b]`, the index of each
    sample in the run, which dropout depends on. Communicates: as the model; for the loss two
    numbers over the axes of tokens; for logits the parts of the vocabulary, and of samples over
    col.
    """
    parallel = get_parallel_model(model)
    shape = input_ids.shape
    if position_ids is None:
        check_length(model, shape[1])
    inputs = {"tokens": input_ids, "documents": documents_from_mask(attention_mask, labels)}
    inputs["positions"] = resolve_positions(input_ids, position_ids, attention_mask)
    even = pad_inputs({k: x for k, x in inputs.items() if x is not None}, parallel)
    if samples is not None:
        given = pad_to_grid(samples, parallel)
    else:
        given = None
    if labels is None:
        return CausalLMOutput(logits=compute_logits(model, even, shape, given))
    # Labels are aligned with tokens, and targets with the logits that predict them: shift by one.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    # Padding tokens predict nothing.
    if attention_mask is not None:
        targets = targets.masked_fill(attention_mask == 0, IGNORE_INDEX)
    # Only evaluation returns logits with the loss; in training they are never gathered.
    if not torch.is_grad_enabled():
        logits = compute_logits(model, even, shape, given)
        return CausalLMOutput(loss=mean_loss_from_logits(logits, targets, parallel), logits=logits)
    if parallel.grid.degrees["pipe"] > 1:
        raise PlanError(
            f"pipe={parallel.grid.degrees['pipe']} with a loss that needs gradients. The stages of "
            "a pipeline run their own schedule, so a single backward() cannot work. Use pipe=1, "
            "`ranvier train`, or ranvier.train.step; inside torch.no_grad() any grid works."
        )
    even["targets"] = pad_to_grid(targets, parallel, value=IGNORE_INDEX)
    return CausalLMOutput(loss=compute_mean_loss(model, even, given))


def compute_mean_loss(
    model: nn.Module, inputs: Mapping[str, Tensor], samples: Tensor | None
) -> Tensor:
    """Returns the mean over the targets of all ranks, equal on all ranks; inputs must be padded.

    Communicates: as the model; two numbers over the axes of tokens.
    """
    parallel = get_parallel_model(model)
    local, _ = split_over_context(inputs, parallel)
    mine = local_slice(local["targets"], batch_axis(parallel), 0)
    count = collectives.all_reduce((mine != IGNORE_INDEX).sum(), parallel.token_axis).wait()
    parallel.step_context.samples = samples
    loss: Tensor = model(**local)
    # A batch without any target has loss 0, not NaN.
    return reduce_from_axis(loss, parallel.token_axis) / count.clamp(min=1).to(loss.dtype)


def compute_logits(
    model: nn.Module, inputs: Mapping[str, Tensor], shape: torch.Size, samples: Tensor | None
) -> Tensor:
    """Returns logits `[b, s, v]` of the samples before padding (`shape`); inputs must be padded.

    Communicates: as the model; parts of the vocabulary, of samples over col, and from the last
    stage to all.
    """
    parallel = get_parallel_model(model)
    grid = parallel.grid
    runtime = parallel.pipeline.executor
    words = parallel.sizes["vocab"]
    parallel.step_context.samples = samples
    local, documents = split_over_context(inputs, parallel)

    def gather(y: Tensor) -> Tensor:
        y = restore_window_order(_gather_logits(y, parallel), documents)
        return y[: shape[0], : shape[1], :words]

    if grid.degrees["pipe"] == 1:
        y = gather(model(**local))
        return scale_gradient(y, 1.0 / grid.axis(*REPLICA_AXES).size)
    with torch.no_grad():
        found = runtime.run_forward([MicroBatch(local, samples)])
        if found:
            y = gather(found[0])
        # Another stage has the logits; this tensor receives the broadcast.
        else:
            dtype = parallel.bucket_scheduler.buckets[0].data.dtype
            device = runtime.device
            y = torch.zeros(*shape, words, dtype=dtype, device=device)
        axis = grid.axis("pipe")
        # With the vocabulary split over pipe, all stages already have the logits.
        if runtime.stage.vocab_layers:
            return y.contiguous()
        return collectives.broadcast(y.contiguous(), axis, index=axis.size - 1).wait()


def _gather_logits(y: Tensor, parallel: ParallelModel) -> Tensor:
    """Returns all logits of this coordinate, from my part of samples, tokens and vocabulary.

    Tokens are in the order of the ranks of context.
    """
    region = parallel.table.activation_rule("vocab")
    grid = parallel.grid
    # Vocabulary shards are padded first, because a gather needs equal parts.
    y = gather_from_axis(pad_vocab_shard(y, parallel), grid.axis(*region["vocab"]), -1)
    y = gather_from_axis(y, batch_axis(parallel), 0)
    return gather_from_axis(y, grid.axis(*region["seq"]), 1)


def mean_loss_from_logits(logits: Tensor, targets: Tensor, parallel: ParallelModel) -> Tensor:
    """Returns the mean over the targets `[b, s]` of all coordinates, from the full logits of mine.

    Communicates: two numbers over the axes of samples.
    """
    # A sum over many tokens needs fp32.
    if logits.dtype in (torch.bfloat16, torch.float16):
        wide = logits.float()
    else:
        wide = logits
    flat = targets.flatten().to(logits.device)
    loss = F.cross_entropy(wide.flatten(0, 1), flat, reduction="sum", ignore_index=IGNORE_INDEX)
    both = torch.stack([loss, (flat != IGNORE_INDEX).sum().to(loss.dtype)])
    sums = collectives.all_reduce(both, parallel.grid.axis(*REPLICA_AXES)).wait()
    return sums[0] / sums[1].clamp(min=1.0)


def batch_axis(parallel: ParallelModel) -> Axis:
    """Returns the ranks over which the head splits the samples of a coordinate."""
    return parallel.grid.axis(*parallel.table.axes_inside_replica("vocab", "batch"))


def pad_to_grid(x: Tensor, parallel: ParallelModel, *, value: int = 0) -> Tensor:
    """Returns inputs `[b, s]` or `[b]`, padded to samples and tokens that the grid can divide."""
    degrees = parallel.grid.degrees
    device = parallel.pipeline.executor.device
    more = [0, round_up_batch(parallel, x.shape[0]) - x.shape[0]]
    if x.dim() == 2:
        more = [0, -x.shape[1] % parallel.table.seq_multiple(degrees), *more]
    if any(more):
        return F.pad(x, more, value=value).to(device)
    return x.to(device)


def pad_inputs(inputs: Mapping[str, Tensor], parallel: ParallelModel) -> dict[str, Tensor]:
    """Returns inputs of a model `[b, s]` by name, padded as in `pad_to_grid`.

    Padding tokens have no targets, a separate document, and a position that every sample has.
    Samples without positions get explicit ones if tokens are added.
    """
    values = {"targets": IGNORE_INDEX, "documents": PADDING_DOCUMENT}
    even = {name: pad_to_grid(x, parallel, value=values.get(name, 0)) for name, x in inputs.items()}
    (samples, seq), tokens = inputs["tokens"].shape, even["tokens"]
    if "positions" not in even and tokens.shape[1] > seq:
        # Added samples consist of padding only; they count as one token long.
        lengths = torch.ones(len(tokens), dtype=torch.int64, device=tokens.device)
        lengths[:samples] = seq
        even["positions"] = padded_positions(lengths, tokens.shape[1])
    return even


def resolve_positions(
    tokens: Tensor, positions: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Returns the given positions `[b, s]`, or None; padding at the end gets none beyond the text.

    The number of tokens in the mask is the length of a sample, regardless of the rest of the batch.
    """
    if mask is None or not bool((mask[:, 0] != 0).all()) or bool((mask != 0).all()):
        return positions
    if positions is None:
        return padded_positions((mask != 0).sum(1), tokens.shape[1])
    return positions.masked_fill(mask.to(positions.device) == 0, 0)


def documents_from_mask(mask: Tensor | None, labels: Tensor | None = None) -> Tensor | None:
    """Returns documents `[b, s]` that restrict attention according to a mask `[b, s]` of 0 and 1.

    None if no restriction is needed, because causal attention never reads padding at the end.
    """
    if mask is None or bool((mask != 0).all()):
        return None
    if mask.dim() != 2:
        raise DataError(
            f"attention_mask has the shape {list(mask.shape)}. It must have the shape [samples, "
            "tokens], with 1 for each token and 0 for padding. Remove it for causal attention."
        )
    ones = (mask != 0).long()
    # +1 where a text starts, -1 after its end.
    steps = torch.diff(F.pad(ones, (1, 0)), dim=1)
    if bool(((steps > 0).sum(1) > 1).any()):
        raise DataError(
            "attention_mask has gaps between tokens. Samples may be padded only at their start and "
            "end. Pass samples without gaps."
        )
    if labels is not None and bool((labels[ones == 0] != IGNORE_INDEX).any()):
        raise DataError(
            "labels are set for tokens whose attention_mask is 0. Padding cannot be a target. Set "
            f"these labels to {IGNORE_INDEX}."
        )
    if bool((ones[:, 0] == 1).all()):
        return None
    # Number the runs of equal mask values; each run becomes a document.
    return steps.abs().cumsum(1)


class _ScaleGradient(torch.autograd.Function):
    """y = x; backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns the same value; its gradient is multiplied by a factor. Communicates: nothing."""
    if factor == 1.0:
        return x
    y: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return y
