"""Full batch: calls a parallel model in the same way as a model in one process.

Every rank passes the same full inputs and gets back the same full outputs, so a loop written for
one process computes its loss as before:

    y = call_on_full_batch(model, x)        # x, y: the same on every rank
    loss = F.mse_loss(y, target)            # the same on every rank
    loss.backward()                         # gradients accumulate in the model's buckets
    norm = optimizer.step()                 # optimizer: ranvier's Optimizer

Losses, gradients and the gradient norm equal the results of one process on any grid of data,
expert, context, depth, row and col. The cost is that each rank holds the full inputs and outputs,
and that outputs are gathered. A training loop that loads only the samples of its rank calls the
model directly. Context splits the tokens of a sample in the order of the plan. A model that attends
over it has the arguments `positions` and `documents`, as our decoder does; outputs per token return
in window order.

The layout of inputs and outputs is inferred from their dtypes and shapes. Where that is ambiguous,
the model declares it next to its `dims`:

    input_dims = {"x": ("batch", "seq", "mlp")}     # by argument of forward; the default is embed
    output_dims = ("batch", "seq", "mlp")           # the default is inferred from the shape
    output_dims = "mean"                            # or "sum", if forward returns a scalar loss

Pipeline parallelism (pipe > 1) is not supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.comm.autograd import reduce_from_axis
from ranvier.config.plan import AXES
from ranvier.errors import DataError, PlanError, ShardingError
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.nn.layer import ParallelLayer
from ranvier.nn.linear import Linear
from ranvier.nn.lm_head import LMHead
from ranvier.parallel.context_inputs import (
    order_samples,
    permute_tokens,
    restore_window_order,
)
from ranvier.parallel.input_check import InputExpectation, check_inputs
from ranvier.parallel.input_layout import ActivationLayout, default_input_dims
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.sharding import OUTER_RULE, Sharding, round_up

LOSS_REDUCTIONS = ("sum", "mean")
SAME_BATCH_REMEDY = (
    "Pass call_on_full_batch the same full batch on every rank, e.g. with the same seed in the "
    "data loader."
)


def call_on_full_batch(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a parallel model with the full batch and returns the full output on every rank.

    Every rank passes the same inputs and gets the same output, so a training loop for one process
    needs no other change. Losses and gradients equal the results of one process.

    Communicates: the collectives of the model; all-gather of the outputs; backward: all-gather of
    the gradients of inputs that require them. In debug mode (`Grid(..., debug=True)`) also a digest
    of each input over all axes.

    Args:
        model: A model returned by `parallelize`, on a grid with pipe=1.
        *args: Positional arguments of `model.forward`. The first dim of each tensor is the batch:
            integers `[b, s]` (tokens, targets), features `[b, s, d]`, or rows `[b, d]`. A batch
            whose size the grid does not divide is padded with copies of its last sample; the
            output does not include them.
        **kwargs: Keyword arguments of `model.forward`, with the same shapes.

    Returns:
        The output of `model.forward` with all tensors gathered. Tuples, lists and dicts of tensors
        keep their structure. A scalar loss is summed or averaged over the ranks.

    Raises:
        PlanError: The grid has pipe > 1.
        DataError: The inputs disagree in their number of samples or tokens, or the grid cannot
            split them.
        ShardingError: The layout of an input or output cannot be inferred. Declare `input_dims` or
            `output_dims` in the model.
    """
    parallel = get_parallel_model(model)
    _refuse_stages(parallel)
    # The attribute, not the method of the class, as Hugging Face models have another one.
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    inputs = {name: x for name, x in bound.arguments.items() if isinstance(x, Tensor)}
    device = parallel.pipeline.executor.device
    # Debug mode: all ranks must have received the same full batch.
    if parallel.grid.trace.check_collectives:
        same = [InputExpectation(name, equal_over=AXES) for name in inputs]
        check_inputs(inputs, same, parallel.grid, device, remedy=SAME_BATCH_REMEDY)
    feed = FullBatchInputs.from_inputs(model, inputs)
    if feed.context_documents is not None and "positions" in signature.parameters:
        # Positions of local tokens are not 0, 1, 2, ...
        inputs = {"positions": feed.default_positions(), **inputs}
    parts = {name: feed.local_part(name, x.to(device)) for name, x in inputs.items()}
    parallel.step_context.samples = feed.sample_numbers(model)
    bound.arguments.update(parts)
    documents = feed.local_documents(device)
    parallel.step_context.context_documents = documents
    if documents is not None and "documents" in signature.parameters:
        bound.arguments["documents"] = documents
    with _observe_layers(parallel, feed, parts) as seen:
        output = model(*bound.args, **bound.kwargs)
    return _full_output(output, getattr(model, "output_dims", None), feed, seen)


def _refuse_stages(parallel: ParallelModel) -> None:
    stages = parallel.grid.degrees["pipe"]
    if stages > 1:
        raise PlanError(
            f"call_on_full_batch does not support pipe={stages}. With pipeline parallelism the "
            "output is not available when the model is called. Use pipe=1, or run the schedule "
            "with ranvier.train.step.forward_backward."
        )


@dataclass
class FullBatchInputs:
    """How the inputs of one call are split among the ranks."""

    parallel: ParallelModel
    layouts: dict[str, ActivationLayout]
    num_samples: int
    """Number of samples in the batch."""
    padded_samples: int
    """Number of samples after padding."""
    fold_shape: tuple[int, int] | None
    """(samples, tokens) if rows `[b, d]` are folded to `[samples, tokens, d]`, else None."""
    seq_len: int | None
    """Tokens per sample, if an input has a sequence dim."""
    context_documents: ContextDocuments | None = None
    """Order of the tokens of all samples over context, if it splits them."""

    @classmethod
    def from_inputs(cls, model: nn.Module, inputs: Mapping[str, Tensor]) -> FullBatchInputs:
        """Returns how these inputs are split."""
        parallel = get_parallel_model(model)
        named: Mapping[str, Sequence[str]] = getattr(model, "input_dims", {})
        dims = {name: _input_dims(name, x, named, parallel) for name, x in inputs.items()}
        counts = {x.shape[0] for name, x in inputs.items() if "batch" in dims[name][:1]}
        lengths = {x.shape[1] for name, x in inputs.items() if "seq" in dims[name][1:2]}
        if len(counts) != 1 or len(lengths) > 1:
            raise DataError(
                f"The inputs of {type(model).__name__} have different shapes: "
                f"{', '.join(f'{name} {list(x.shape)}' for name, x in inputs.items())}. All inputs "
                "must have the same number of samples (dim 0) and tokens (dim 1). Register a "
                "tensor without a batch dim as a buffer of the model."
            )
        degrees = parallel.grid.degrees
        table = parallel.table
        (batch,) = counts
        # Inside a block the batch is split over most axes; that decides the padding.
        replicas = table.num_parts("mlp", "batch", degrees)
        tokens = table.seq_multiple(degrees)
        # Layers expect a sequence dim as soon as row, context or col is split: fold rows into one.
        folds = not lengths and tokens * table.num_parts("embed", "embed", degrees) > 1
        if folds:
            multiple = replicas * tokens
        else:
            multiple = replicas
        filled = round_up(batch, multiple)
        if folds:
            fold = (replicas, filled // replicas)
        else:
            fold = None
        if fold is None:
            seq = next(iter(lengths), None)
        else:
            seq = fold[1]
        if fold is not None:
            dims = {name: ("batch", "seq", *of[1:]) for name, of in dims.items()}
        _refuse_uneven(parallel, seq, tokens, batch, filled)
        layouts = {name: ActivationLayout.from_dims(of, table) for name, of in dims.items()}
        feed = cls(parallel, layouts, batch, filled, fold, seq)
        if degrees["context"] > 1 and seq is not None and fold is None:
            feed.context_documents = feed._order_samples(inputs, dims)
        return feed

    def _order_samples(
        self, inputs: Mapping[str, Tensor], dims: Mapping[str, tuple[str, ...]]
    ) -> ContextDocuments:
        """Returns the order of the tokens of all samples, padded ones too, over context."""
        assert self.seq_len is not None
        known = {
            name: self._pad_samples(inputs[name])
            for name in ("documents", "positions")
            if name in inputs and dims[name] == ("batch", "seq")
        }
        shape = (self.padded_samples, self.seq_len)
        cpu = torch.device("cpu")
        ids, positions = known.get("documents"), known.get("positions")
        return order_samples(shape, self.parallel, cpu, ids, positions)

    def default_positions(self) -> Tensor:
        """Returns positions 0, 1, 2, ... of the tokens of all samples, `[b, s]`."""
        assert self.seq_len is not None
        self.layouts.setdefault(
            "positions", ActivationLayout.from_dims(("batch", "seq"), self.parallel.table)
        )
        return torch.arange(self.seq_len).expand(self.num_samples, -1)

    def local_documents(self, device: torch.device) -> ContextDocuments | None:
        """Returns the order of the tokens of this rank's samples."""
        documents = self.context_documents
        if documents is None:
            return None
        axis = self.parallel.grid.axis(*OUTER_RULE["batch"])
        each = self.padded_samples // axis.size
        mine = documents.select_samples(slice(axis.index * each, (axis.index + 1) * each))
        return mine.map_tensors(lambda x: x.to(device))

    def _pad_samples(self, x: Tensor) -> Tensor:
        """Returns x with copies of its last sample."""
        more = self.padded_samples - self.num_samples
        return torch.cat([x, x[-1:].expand(more, *x.shape[1:])]) if more else x

    def local_part(self, name: str, x: Tensor) -> Tensor:
        """Returns this rank's part of an input, after padding."""
        layout = self.layouts[name]
        if layout.dims[:1] == ("batch",):
            x = self._pad_samples(x)
        if self.context_documents is not None and layout.dims[:2] == ("batch", "seq"):
            # The tokens of all ranks of context, one after the other, so that each gets its part.
            x = permute_tokens(x, self.context_documents.places.argsort(1))
        if self.fold_shape is not None:
            x = x.unflatten(0, self.fold_shape)
        for dim, parts in enumerate(layout.parts_per_dim(self.parallel.grid)):
            if x.shape[dim] % parts:
                raise ShardingError(
                    f"{'·'.join(layout.axes[dim])}={parts} does not divide dim {dim} "
                    f"({layout.dims[dim]}) of {name}, which has {x.shape[dim]} elements. A sharded "
                    "dimension must be a multiple of the product of its axis sizes. Use another "
                    "size or other degrees."
                )
        return layout.scatter_to_ranks(x, self.parallel.grid)

    def sample_numbers(self, model: nn.Module) -> Tensor | None:
        """Returns the global indices of this rank's samples, which dropout depends on.

        Returns None in evaluation, and for rows `[b, d]`: how rows are folded into samples depends
        on the grid.
        """
        if not model.training or self.fold_shape is not None:
            return None
        first = self.parallel.samples_seen
        # Padding does not count, so that a sample has the same index on every grid.
        self.parallel.samples_seen += self.num_samples
        numbers = torch.arange(first, first + self.padded_samples)
        mine = ActivationLayout.from_dims(("batch",), self.parallel.table)
        return mine.scatter_to_ranks(numbers, self.parallel.grid)

    @property
    def model_samples(self) -> int:
        """Number of samples that the model receives, over all ranks."""
        if self.fold_shape is None:
            return self.padded_samples
        return self.fold_shape[0]


def _input_dims(
    name: str, x: Tensor, named: Mapping[str, Sequence[str]], parallel: ParallelModel
) -> tuple[str, ...]:
    """Returns the dims of an input as declared by the model, or inferred from dtype and shape."""
    dims = tuple(named.get(name, default_input_dims(x)))
    if len(dims) != x.dim():
        raise ShardingError(
            f"input_dims has {len(dims)} names for {name}, which has the shape {list(x.shape)}. "
            f"Every dim must have a name. Give {x.dim()} names; use '' for a dim that is not split."
        )
    # An input that is not as wide as the residual stream probably has another feature dim.
    width = parallel.sizes.get("embed")
    wrong = name not in named and "embed" in dims and width not in (None, x.shape[-1])
    if wrong and parallel.grid.world_size > 1:
        raise ShardingError(
            f"{name} has {x.shape[-1]} features, but embed={width}. The feature dim of an input is "
            "'embed' unless the model declares another one. Add input_dims = "
            f"{{{name!r}: {(*dims[:-1], 'mlp')}}} next to dims."
        )
    return dims


def _refuse_uneven(
    parallel: ParallelModel, seq: int | None, tokens: int, batch: int, filled: int
) -> None:
    if seq is not None and seq % tokens:
        raise DataError(
            f"row·context={tokens} does not divide the {seq} tokens of a sample. Each rank gets an "
            f"equal part of the sequence. Pad it to {-(-seq // tokens) * tokens} tokens that your "
            "model ignores, or use a smaller row."
        )
    # Outputs of padded samples are removed, but their tokens would still be routed and counted.
    if filled > batch and parallel.load_balancer is not None:
        raise DataError(
            f"The batch has {batch} samples, which the grid would pad to {filled}. Padding would "
            "count in the load balance of the experts. Use a batch size that the grid divides, "
            f"e.g. {filled}."
        )


# ---- forward hooks ------------------------------------------------------------------------------


@dataclass
class LastLayerOutput:
    """The layer that ran last, and its output."""

    layer: ParallelLayer | None = None
    output: Any = field(default=None, repr=False)
    has_loss: bool = False
    """Whether a layer returned a vocabulary loss, i.e. the sum over the tokens of this rank."""


@contextmanager
def _observe_layers(
    parallel: ParallelModel, feed: FullBatchInputs, parts: Mapping[str, Tensor]
) -> Iterator[LastLayerOutput]:
    """Checks the layers that read an input and records the last layer; skips compiled blocks."""
    seen = LastLayerOutput()
    # By identity: a layer that reads an input gets the same tensor object as the model.
    names = {id(x): name for name, x in parts.items()}

    def before(leaf: nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            name = names.get(id(args[0]))
        else:
            name = None
        if name is not None and isinstance(leaf, Linear):
            _refuse_other_region(leaf, name, feed)

    def after(leaf: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(leaf, ParallelLayer), type(leaf)
        seen.layer = leaf
        seen.output = output
        seen.has_loss |= isinstance(leaf, (LMHead, CrossEntropy)) and output.dim() == 0

    handles = []
    for name, leaf in parallel.layers.items():
        if parallel.compiled_blocks is None or not parallel.block_of(name):
            handles += [leaf.register_forward_pre_hook(before), leaf.register_forward_hook(after)]
    # Padding repeats a sample, so parts may be equal: skip the check for distinct parts.
    checked, parallel.parts_checked = parallel.parts_checked, True
    try:
        yield seen
    finally:
        parallel.parts_checked = checked
        for handle in handles:
            handle.remove()


def _refuse_other_region(leaf: Linear, name: str, feed: FullBatchInputs) -> None:
    """Raises if the layout of an input differs from the layout that its layer expects."""
    have = feed.layouts[name]
    parallel = feed.parallel
    # Each of the packed dims is split, but the features of an input are split as one.
    if leaf.num_packed_inputs > 1 and have.parts_per_dim(parallel.grid)[-1] > 1:
        raise ShardingError(
            f"{leaf.site.name} reads {name} as {leaf.linear_weight.packed_in_dim}, but it was "
            f"split as {have.dims[-1]!r}. Features of an input cannot be packed. Pass the "
            f"{leaf.num_packed_inputs} parts as inputs, and use torch.cat in the model."
        )
    want = ActivationLayout.from_dims((*have.dims[:-1], leaf.in_dim), parallel.table)
    if have.parts_per_dim(parallel.grid) != want.parts_per_dim(parallel.grid):
        raise ShardingError(
            f"{leaf.site.name} reads {name} as {leaf.in_dim!r}, but it was split as "
            f"{have.dims[-1]!r}. The feature dim of an input is 'embed' unless the model declares "
            f"another one. Add input_dims = {{{name!r}: {want.dims}}} next to dims."
        )


# ---- outputs ------------------------------------------------------------------------------------


def _full_output(output: Any, dims: Any, feed: FullBatchInputs, seen: LastLayerOutput) -> Any:
    """Returns the full output. dims: a tuple for one tensor; a list or dict of them for several."""
    if isinstance(output, Tensor):
        return _full_tensor(output, dims, feed, seen)
    if isinstance(output, Mapping):
        if isinstance(dims, Mapping):
            by_name = dims
        else:
            by_name = {}
        return {key: _full_output(x, by_name.get(key), feed, seen) for key, x in output.items()}
    if isinstance(output, (tuple, list)):
        if isinstance(dims, list):
            each = dims
        else:
            each = [None] * len(output)
        found = [_full_output(x, of, feed, seen) for x, of in zip(output, each, strict=True)]
        if isinstance(output, list):
            return found
        return tuple(found)
    return output


def _full_tensor(y: Tensor, dims: Any, feed: FullBatchInputs, seen: LastLayerOutput) -> Tensor:
    """Returns the full tensor from one part per rank. Communicates: all-gather over its axes."""
    if y.dim() == 0:
        return _full_number(y, dims, feed, seen)
    if dims is None:
        layout = _layout_from_shape(y, feed, seen)
    else:
        layout = _layout_from_dims(y, dims, feed)
    if layout.dims[-1] == "vocab":
        vocab = feed.parallel.sizes["vocab"]
    else:
        vocab = None
    if vocab is not None:
        # A gather needs equal parts: pad the last one, gather, then remove the padding.
        y = _pad_vocabulary(y, feed.parallel)
    y = layout.gather_from_ranks(y, feed.parallel.grid)
    y = y if vocab is None else y[..., :vocab]
    if layout.dims[:2] == ("batch", "seq"):
        y = restore_window_order(y, feed.context_documents)
    if feed.fold_shape is not None and layout.dims[:2] == ("batch", "seq"):
        y = y.flatten(0, 1)
    if layout.dims[0] == "batch":
        return y[: feed.num_samples]
    return y


def _full_number(y: Tensor, dims: Any, feed: FullBatchInputs, seen: LastLayerOutput) -> Tensor:
    """Returns the sum or mean of the losses of all ranks. Communicates: all-reduce."""
    parallel = feed.parallel
    grid = parallel.grid
    if grid.world_size == 1:
        return y
    # A vocabulary loss that is returned unchanged is known to be a sum.
    if dims is None and seen.has_loss and y is seen.output:
        word = "sum"
    else:
        word = dims
    if word not in LOSS_REDUCTIONS:
        raise ShardingError(
            "The model returned a scalar. Each rank has computed it from its own part of the "
            "batch, either as a sum or as a mean. Set output_dims = 'sum' or output_dims = 'mean' "
            "next to dims, or return the outputs and compute the loss after the call."
        )
    # A loss that is already reduced cannot be corrected for padding.
    if feed.padded_samples > feed.num_samples:
        raise DataError(
            f"The batch has {feed.num_samples} samples, which the grid would pad to "
            f"{feed.padded_samples}. Padding would count in the loss. Use a batch size that the "
            f"grid divides, e.g. {feed.padded_samples}, or return the outputs and compute the "
            "loss after the call."
        )
    # A vocabulary loss is identical on the ranks that split the vocabulary; any other number
    # differs on every rank.
    if seen.has_loss:
        axis = parallel.token_axis
    else:
        axis = grid.axis(*AXES)
    return reduce_from_axis(y if word == "sum" else y / axis.size, axis)


def _layout_from_dims(y: Tensor, dims: Sequence[str], feed: FullBatchInputs) -> ActivationLayout:
    """Returns the layout of an output whose dims the model declares."""
    parallel = feed.parallel
    names = tuple(dims)
    if feed.fold_shape is not None and names[:1] == ("batch",) and "seq" not in names:
        names = ("batch", "seq", *names[1:])
    if len(names) != y.dim():
        raise ShardingError(
            f"output_dims is {names}, but the output has the shape {list(y.shape)} on rank "
            f"{parallel.grid.rank}. Every dim must have a name. Give {y.dim()} names; use '' for a "
            "dim that is not split."
        )
    layout = ActivationLayout.from_dims(names, parallel.table)
    missing = layout.missing_axes(parallel.grid, parallel.table)
    if missing:
        raise ShardingError(
            f"output_dims is {names}, but {'·'.join(missing)} splits the tokens that it was "
            "reduced over. Each rank has reduced only its own tokens. Return one output per token "
            "and reduce it after the call."
        )
    return layout


def _layout_from_shape(y: Tensor, feed: FullBatchInputs, seen: LastLayerOutput) -> ActivationLayout:
    """Infers from its shape whether an output is split like the residual stream or a block."""
    parallel = feed.parallel
    if isinstance(seen.layer, Linear):
        # The first guess is the output of the last layer that ran.
        last = seen.layer.out_dim
    else:
        last = "embed"
    expected = []
    for name in dict.fromkeys((last, "embed", "mlp")):
        before = ("batch",) if feed.seq_len is None else ("batch", "seq")
        names = (*before, *("" for _ in range(y.dim() - len(before) - 1)), name)
        layout = ActivationLayout.from_dims(names, parallel.table)
        parts = layout.parts_per_dim(parallel.grid)
        whole = (
            (feed.model_samples,) if feed.seq_len is None else (feed.model_samples, feed.seq_len)
        )
        want = [n // k for n, k in zip(whole, parts, strict=False)]
        if y.dim() == len(names) and [*y.shape[: len(want)]] == want:
            _refuse_packed_output(y, layout, feed, seen)
            return layout
        expected.append(f"[{', '.join(map(str, want))}, ...]")
    raise ShardingError(
        f"The output has the shape {list(y.shape)} on rank {parallel.grid.rank}, for "
        f"{feed.model_samples} "
        f"samples{'' if feed.seq_len is None else f' of {feed.seq_len} tokens'} on all "
        f"ranks. The expected shape is {' or '.join(dict.fromkeys(expected))}; for any other "
        "shape the layout is unknown. Return one output per token and reduce over tokens and "
        "features after the call, or set output_dims, e.g. ('batch', 'seq', 'embed'), next to "
        "dims."
    )


def _refuse_packed_output(
    y: Tensor, layout: ActivationLayout, feed: FullBatchInputs, seen: LastLayerOutput
) -> None:
    """Raises if the output has a part of each of several packed dims on each rank."""
    leaf = seen.layer
    if not isinstance(leaf, Linear) or seen.output is not y or leaf.num_packed == 1:
        return
    if layout.parts_per_dim(feed.parallel.grid)[-1] > 1:
        raise ShardingError(
            f"The output of the model is that of {leaf.site.name}, which packs "
            f"{leaf.linear_weight.packed_out_dim}. The features of an output cannot be packed. "
            f"Return its parts, y.chunk({leaf.num_packed}, -1)."
        )


def _pad_vocabulary(y: Tensor, parallel: ParallelModel) -> Tensor:
    """Pads this rank's part of the vocabulary to the size of a shard; layers omit the padding."""
    degrees = parallel.grid.degrees
    region = parallel.table.activation_rule("vocab")
    sharding = Sharding.from_dims([parallel.sizes["vocab"]], ["vocab"], region, degrees)
    return F.pad(y, (0, sharding.local_shape[0] - y.shape[-1]))
