"""Log-probabilities that a model on a grid assigns to given tokens.

Sequences are sorted by length, distributed over the ranks that read different samples, and padded
at their ends, which does not change the results (`padded_positions`). Logits are never gathered:
the LM head returns only the log-probability of each token, and whether it was the most likely. If
context splits the tokens of a sequence, their scores are put back in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.data.batch import Batch
from ranvier.data.loader import rank_rows
from ranvier.errors import DataError
from ranvier.grid import Grid
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.pipeline.step import MicroBatch
from ranvier.sharding import REPLICA_AXES, count_parts, order_tokens, round_up


@dataclass(frozen=True)
class TokenLogprobs:
    """Scores of a sequence of n tokens: of each token but the first, given all previous tokens."""

    logprobs: Tensor
    """Log-probabilities, float64 `[n - 1]`."""
    is_greedy: Tensor
    """Whether the token was the most likely one, bool `[n - 1]`."""


def sequences_per_round(parallel: ParallelModel, batch: int) -> int:
    """Returns the number of sequences that all ranks score at once, with `batch` per
    micro-batch."""
    pipe = parallel.grid.degrees["pipe"]
    replicas = count_parts(REPLICA_AXES, parallel.grid.degrees)
    # Two micro-batches per stage keep a pipeline mostly filled.
    return round_up_batch(parallel, batch) * replicas * (1 if pipe == 1 else 2 * pipe)


def round_up_batch(parallel: ParallelModel, batch: int) -> int:
    """Rounds a micro-batch up to a number of samples that the grid can split."""
    return round_up(batch, parallel.table.batch_multiple(parallel.grid.degrees))


def padded_positions(lengths: Tensor, seq: int) -> Tensor:
    """Returns positions 0, 1, 2, ... of sequences of `lengths` tokens `[b]`, padded to `[b, seq]`.

    Padding repeats the last position, so that a model whose frequencies depend on the length
    (LongRoPE) sees only the length of the text, and no position beyond those of the model is looked
    up.
    """
    places = torch.arange(seq, device=lengths.device)
    return torch.minimum(places, lengths.unsqueeze(1).clamp(min=1) - 1)


def check_length(model: nn.Module, length: int) -> None:
    """Raises for sequences that are longer than the learned positions, before any is read."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "position_embedding", "") == "learned" and length > config.max_seq:
        raise DataError(
            f"A text has {length:,} tokens, but the model has {config.max_seq:,} learned positions "
            "(model.max_seq). It cannot read more tokens. Use shorter texts; generated tokens "
            "count as well."
        )


def score_sequences(
    model: nn.Module, sequences: Sequence[Sequence[int]], *, batch: int = 8
) -> list[TokenLogprobs]:
    """Scores each sequence; all ranks pass the same sequences and get the same result.

    batch: sequences per micro-batch. Communicates: as forward passes; per token two numbers over
    the axes of samples and over pipe.
    """
    parallel = get_parallel_model(model)
    was = model.training
    assert all(len(one) > 0 for one in sequences), "a sequence has at least one token"
    check_length(model, max((len(one) - 1 for one in sequences), default=0))
    # Longest first: sequences of similar length share a round and need little padding.
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    found: dict[int, TokenLogprobs] = {}
    model.eval()
    # The LM head returns log-probability and greediness per token instead of the summed loss.
    parallel.step_context.per_token_loss = True
    try:
        size = sequences_per_round(parallel, batch)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            found |= zip(
                some, _score_round(parallel, [sequences[i] for i in some], batch), strict=True
            )
    finally:
        parallel.step_context.per_token_loss = False
        model.train(was)
        parallel.bucket_scheduler.begin_step("")
    return [found[i] for i in range(len(sequences))]


@torch.no_grad()
def _score_round(
    parallel: ParallelModel, sequences: Sequence[Sequence[int]], batch: int
) -> Iterator[TokenLogprobs]:
    """Scores sequences that fit at once, sorted longest first."""
    grid = parallel.grid
    runtime = parallel.pipeline.executor
    replicas = grid.axis(*REPLICA_AXES)
    batch = round_up_batch(parallel, min(batch, -(-len(sequences) // replicas.size)))
    micros = -(-len(sequences) // (batch * replicas.size))
    # The first sequence is the longest, and a sequence of one token still needs a position.
    multiple = parallel.table.seq_multiple(grid.degrees)
    length = round_up(max(len(sequences[0]) - 1, 1), multiple)
    # Rows of this rank within each global micro-batch.
    mine = rank_rows(batch * replicas.size, grid)
    batches = []
    for micro in range(micros):
        some = [micro * batch * replicas.size + row for row in mine]
        known = [sequences[i] for i in some if i < len(sequences)]
        batches.append(_shard_sequences(_pad_sequences(known, batch, length), known, grid))
    # The number of micro-batches is part of the kind, because it changes the recorded order of
    # weight gathers.
    parallel.bucket_scheduler.begin_step(f"score {micros}")
    found = runtime.run_forward(
        [MicroBatch(one.to(runtime.device).model_inputs()) for one in batches]
    )
    region = parallel.table.activation_rule("vocab")
    if found:
        y = torch.stack(found)  # (m, 2, b/col, s)
        y = collectives.all_gather(
            y, grid.axis(*parallel.table.axes_inside_replica("vocab", "batch")), 2
        ).wait()
        y = collectives.all_gather(y, grid.axis(*region["seq"]), 3).wait()
        y = torch.stack([_restore_order(part, one) for part, one in zip(y, batches, strict=True)])
    # The scores are on the last stage; other stages allocate a buffer for the broadcast.
    else:
        shape = (micros, 2, batch, length)
        y = torch.zeros(shape, dtype=parallel.bucket_scheduler.reduce_dtype, device=runtime.device)
    pipe = grid.axis("pipe")
    y = collectives.broadcast(y.contiguous(), pipe, index=pipe.size - 1).wait()
    y = collectives.all_gather(y.transpose(1, 2).contiguous(), replicas, 1).wait()  # (m, R·b, 2, s)
    # Not strict: the last rows are padding without a sequence.
    for one, (log, greedy) in zip(sequences, y.flatten(0, 1).cpu(), strict=False):
        count = len(one) - 1
        yield TokenLogprobs(log[:count].double(), greedy[:count] > 0.0)


def _pad_sequences(sequences: Sequence[Sequence[int]], batch: int, length: int) -> Batch:
    """Returns tokens, targets and positions `[b, s]` of sequences, padded at the end."""
    lengths = torch.ones(batch, dtype=torch.int64)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    targets = torch.full((batch, length), IGNORE_INDEX, dtype=torch.int64)
    for row, one in enumerate(sequences):
        known = torch.as_tensor(one, dtype=torch.int64)
        # Shifted by one: each token predicts the next. Padding has no target and is not scored.
        tokens[row, : len(one) - 1] = known[:-1]
        targets[row, : len(one) - 1] = known[1:]
        lengths[row] = len(one) - 1
    if bool((lengths < length).any()):
        return Batch(tokens, targets, padded_positions(lengths, length))
    return Batch(tokens, targets)


def _shard_sequences(batch: Batch, sequences: Sequence[Sequence[int]], grid: Grid) -> Batch:
    """Returns this rank's tokens of padded sequences, if context splits them."""
    ranks = grid.degrees["context"]
    if ranks == 1:
        return batch
    rows, length = batch.tokens.shape
    counts = [len(one) - 1 for one in sequences] + [0] * (rows - len(sequences))
    # Padding is a document of its own, so that LongRoPE sees only the length of the text.
    lengths = [tuple(n for n in (count, length - count) if n) for count in counts]
    orders = [order_tokens(one, ranks, "balanced") for one in lengths]
    return batch.shard_by_orders(orders, grid.index["context"])


def _restore_order(y: Tensor, batch: Batch) -> Tensor:
    """Returns scores of the tokens of all ranks of context `[2, b, s]` in the order of tokens."""
    if not isinstance(batch.documents, ContextDocuments):
        return y
    return y.take_along_dim(batch.documents.places.to(y.device).unsqueeze(0), 2)


def pad_vocab_shard(y: Tensor, parallel: ParallelModel) -> Tensor:
    """Pads my logits with the columns that the LM head leaves out, so that all ranks have as
    many."""
    table = parallel.table
    degrees = parallel.grid.degrees
    each = table.padded_vocab(parallel.sizes["vocab"], degrees)
    each //= table.num_parts("vocab", "vocab", degrees)
    return torch.nn.functional.pad(y, (0, each - y.shape[-1]))
