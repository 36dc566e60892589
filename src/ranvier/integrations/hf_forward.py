"""Called: a model on a grid, called as models of transformers are.

Each (data, expert, depth) coordinate is called with samples of its own, all its ranks with the same
ones. Whatever comes out is whole on all ranks of the coordinate:

    loss      the mean over the targets of all coordinates, whatever their number on each
    logits    [b, s, v] of my samples; a gradient that comes back to them is that of the mean over
              the coordinates, as data-parallel loops expect

Samples and tokens that the grid needs beyond those that came are added and left out again. With
labels, in training, there are no logits: they are never whole then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.autograd import join, take, total
from ranvier.errors import DataError, PlanError
from ranvier.grid import Axis
from ranvier.infer.generate_distributed import evened
from ranvier.infer.logprobs import REPLICAS, check_length, own_positions, whole_batch
from ranvier.nn.cross_entropy import IGNORE
from ranvier.parallel.parallelize import Parallel, parallel_of
from ranvier.pipeline.executor import Micro

ADDED = -1
"""The document of tokens that the grid needs beyond those that came."""


class Output(OrderedDict[str, Tensor]):
    """What a call gives: by name (`out.loss`, `out["loss"]`) or by place (`out[0]`)."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in ("loss", "logits"):
            raise AttributeError(f"An output has loss and logits, not {name!r}.")
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        """A tensor by its name, or those at some places."""
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def called(
    model: nn.Module,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    samples: Tensor | None = None,
) -> Output:
    """The loss of labels (-100: none), each compared with the logits before it, or logits.

    All inputs `[b, s]` but samples, the number in the run of each `[b]`, on which dropout depends.
    Communicates: as the model; of the loss two numbers over the axes of tokens; of logits the parts
    of the vocabulary, and of samples over col.
    """
    parallel = parallel_of(model)
    shape = input_ids.shape
    if position_ids is None:
        check_length(model, shape[1])
    inputs = {"tokens": input_ids, "documents": documents_of(attention_mask, labels)}
    inputs["positions"] = positions_of(input_ids, position_ids, attention_mask)
    even = filled_inputs({k: x for k, x in inputs.items() if x is not None}, parallel)
    given = filled(samples, parallel) if samples is not None else None
    if labels is None:
        return Output(logits=logits_of(model, even, shape, given))
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if attention_mask is not None:  # what fills up foretells nothing
        targets = targets.masked_fill(attention_mask == 0, IGNORE)
    if not torch.is_grad_enabled():
        logits = logits_of(model, even, shape, given)
        return Output(loss=mean_of(logits, targets, parallel), logits=logits)
    if parallel.grid.degrees["pipe"] > 1:
        raise PlanError(
            f"pipe={parallel.grid.degrees['pipe']} with a loss of which gradients are wanted. "
            "Stages take turns, so no rank has it before all have computed. Use pipe=1, `ranvier "
            "train`, or ranvier.train.step; inside torch.no_grad() any grid gives the loss."
        )
    even["targets"] = filled(targets, parallel, value=IGNORE)
    return Output(loss=loss_of(model, even, given))


def loss_of(model: nn.Module, inputs: Mapping[str, Tensor], samples: Tensor | None) -> Tensor:
    """Mean over the targets of all ranks, the same on all; inputs fit the grid.

    Communicates: as the model; two numbers over the axes of tokens.
    """
    parallel = parallel_of(model)
    mine = take(inputs["targets"], batch_axis(parallel), 0)
    count = collectives.all_reduce((mine != IGNORE).sum(), parallel.token_axis).wait()
    parallel.moment.samples = samples
    loss: Tensor = model(**inputs)
    return total(loss, parallel.token_axis) / count.clamp(min=1).to(loss.dtype)


def logits_of(
    model: nn.Module, inputs: Mapping[str, Tensor], shape: torch.Size, samples: Tensor | None
) -> Tensor:
    """Logits `[b, s, v]` of the samples that came in this shape; inputs fit the grid.

    Communicates: as the model; parts of the vocabulary, of samples over col, and from the last
    stage to all.
    """
    parallel = parallel_of(model)
    grid, runtime, words = parallel.grid, parallel.pipeline.runtime, parallel.sizes["vocab"]
    parallel.moment.samples = samples
    if grid.degrees["pipe"] == 1:
        y = _joined(model(**inputs), parallel)[: shape[0], : shape[1], :words]
        return averaged(y, 1.0 / grid.axis(*REPLICAS).size)
    with torch.no_grad():
        found = runtime.forward([Micro(dict(inputs), samples)])
        if found:
            y = _joined(found[0], parallel)[: shape[0], : shape[1], :words]
        else:  # another stage has them
            dtype, device = parallel.queue.buckets[0].data.dtype, runtime.device
            y = torch.zeros(*shape, words, dtype=dtype, device=device)
        axis = grid.axis("pipe")
        if runtime.stage.vocabulary:
            return y.contiguous()
        return collectives.broadcast(y.contiguous(), axis, index=axis.size - 1).wait()


def _joined(y: Tensor, parallel: Parallel) -> Tensor:
    """All logits of this coordinate, from my part of samples, tokens and vocabulary."""
    region, grid = parallel.table.region("vocab"), parallel.grid
    y = join(evened(y, parallel), grid.axis(*region["vocab"]), -1)
    y = join(y, batch_axis(parallel), 0)
    return join(y, grid.axis(*region["seq"]), 1)


def mean_of(logits: Tensor, targets: Tensor, parallel: Parallel) -> Tensor:
    """Mean over the targets `[b, s]` of all coordinates, from the whole logits of mine.

    Communicates: two numbers over the axes of samples.
    """
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    flat = targets.flatten().to(logits.device)
    loss = F.cross_entropy(wide.flatten(0, 1), flat, reduction="sum", ignore_index=IGNORE)
    both = torch.stack([loss, (flat != IGNORE).sum().to(loss.dtype)])
    sums = collectives.all_reduce(both, parallel.grid.axis(*REPLICAS)).wait()
    return sums[0] / sums[1].clamp(min=1.0)


def batch_axis(parallel: Parallel) -> Axis:
    """Ranks among which the head divides the samples of a coordinate."""
    batch = parallel.table.region("vocab")["batch"]
    return parallel.grid.axis(*(axis for axis in batch if axis == "col"))


def filled(x: Tensor, parallel: Parallel, *, value: int = 0) -> Tensor:
    """Inputs `[b, s]` or `[b]`, filled up to samples and tokens that the grid can divide."""
    degrees, device = parallel.grid.degrees, parallel.pipeline.runtime.device
    more = [0, whole_batch(parallel, x.shape[0]) - x.shape[0]]
    if x.dim() == 2:
        more = [0, -x.shape[1] % (degrees["row"] * degrees["context"]), *more]
    return F.pad(x, more, value=value).to(device) if any(more) else x.to(device)


def filled_inputs(inputs: Mapping[str, Tensor], parallel: Parallel) -> dict[str, Tensor]:
    """Inputs of a model `[b, s]` by name, filled up as `filled` does.

    Added tokens are no part of a text: they have no targets, a document of their own, and a
    position that each text has. Texts without positions get theirs, if tokens are added.
    """
    values = {"targets": IGNORE, "documents": ADDED}
    even = {name: filled(x, parallel, value=values.get(name, 0)) for name, x in inputs.items()}
    (samples, seq), tokens = inputs["tokens"].shape, even["tokens"]
    if "positions" not in even and tokens.shape[1] > seq:
        lengths = torch.ones(len(tokens), dtype=torch.int64, device=tokens.device)
        lengths[:samples] = seq
        even["positions"] = own_positions(lengths, tokens.shape[1])
    return even


def positions_of(tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Positions `[b, s]` as they were given, or None; what fills up at the end has none beyond.

    As many tokens as the mask lets in are a text, whatever else is in the batch.
    """
    if mask is None or not bool((mask[:, 0] != 0).all()) or bool((mask != 0).all()):
        return positions
    if positions is None:
        return own_positions((mask != 0).sum(1), tokens.shape[1])
    return positions.masked_fill(mask.to(positions.device) == 0, 0)


def documents_of(mask: Tensor | None, labels: Tensor | None = None) -> Tensor | None:
    """Documents `[b, s]` that keep attention where a mask `[b, s]` of 0 and 1 allows it.

    None: nothing has to be kept apart, as what is filled up at the end is seen by nothing before.
    """
    if mask is None or bool((mask != 0).all()):
        return None
    if mask.dim() != 2:
        raise DataError(
            f"attention_mask has the shape {list(mask.shape)}. It says of each token whether it is "
            "one: [samples, tokens]. Leave it out for causal attention."
        )
    ones = (mask != 0).long()
    steps = torch.diff(F.pad(ones, (1, 0)), dim=1)
    if bool(((steps > 0).sum(1) > 1).any()):
        raise DataError(
            "attention_mask has tokens before and behind others that are left out. Here samples "
            "are filled up at one end or both. Give them without gaps."
        )
    if labels is not None and bool((labels[ones == 0] != IGNORE).any()):
        raise DataError(
            f"labels of tokens whose attention_mask is 0. What fills up a sample is not learned. "
            f"Set them to {IGNORE}."
        )
    if bool((ones[:, 0] == 1).all()):
        return None
    return steps.abs().cumsum(1)


class _Averaged(torch.autograd.Function):
    """y = x; backward: times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def averaged(x: Tensor, factor: float) -> Tensor:
    """The same value, whose gradient is multiplied by a factor. Communicates: nothing."""
    if factor == 1.0:
        return x
    y: Tensor = _Averaged.apply(x, factor)  # type: ignore[no-untyped-call]
    return y
