"""Generates tokens from a model on a grid, with all its stages, rows and columns.

A simple implementation without a KV cache, as in `generate`: each token takes one forward pass over
all previous tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ranvier import counter_rng
from ranvier.comm import collectives
from ranvier.comm.autograd import local_slice
from ranvier.comm.consensus import max_over_ranks
from ranvier.data.loader import rank_rows
from ranvier.infer.logprobs import check_length, padded_positions, round_up_batch
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.pipeline.step import MicroBatch
from ranvier.sharding import REPLICA_AXES, round_up

TokenSampler = Callable[[Tensor, Sequence[int], int], Tensor]
"""Maps logits `[b, v]`, the indices of their prompts and the number of tokens generated so far to
tokens `[b]`; ranks with the same logits must choose the same tokens."""


def extend_tokens(
    model: nn.Module, tokens: Tensor, count: int, choose: Callable[[Tensor], Tensor]
) -> Tensor:
    """Appends `count` tokens to the tokens `[b, s]`, which are equal on all ranks that read them.

    choose: maps the logits `[b, v]` of the last position to tokens `[b]`; all ranks must choose the
    same. Returns `[b, s + count]`. Communicates: as a forward pass; logits of one token over the
    axes of vocab; tokens over pipe.
    """
    parallel = get_parallel_model(model)
    was = model.training
    model.eval()
    try:
        for _ in range(count):
            tokens = torch.cat(
                [tokens, choose(next_token_logits(parallel, tokens)).unsqueeze(1)], 1
            )
    finally:
        # Also after an error, to restore the mode and drop the gathered weights.
        model.train(was)
        parallel.bucket_scheduler.begin_step("")
    return tokens


def generate_tokens(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    count: int,
    choose: TokenSampler,
    *,
    ended: Callable[[Sequence[int]], bool] = lambda said: False,
    numbers: Sequence[int] | None = None,
    batch: int = 8,
) -> list[list[int]]:
    """Generates at most `count` tokens after each prompt, equal on all ranks.

    All ranks pass the same prompts. ended: whether generation stops after these tokens, of which
    the last is new. numbers: indices of the prompts, passed to `choose` (default 0, 1, 2, ...).
    batch: prompts per micro-batch. Communicates: as `extend_tokens`; per token one number over all
    axes; at the end the generated tokens over the axes of samples.
    """
    parallel = get_parallel_model(model)
    was = model.training
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt has at least one token"
    # `count - 1`, because the last generated token is never an input.
    check_length(model, max((len(prompt) + count - 1 for prompt in prompts), default=0))
    if numbers is None:
        numbers = range(len(prompts))
    # Longest first: prompts of similar length share a round and need little padding.
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    size = round_up_batch(parallel, batch) * parallel.grid.axis(*REPLICA_AXES).size
    found: dict[int, list[int]] = {}
    model.eval()
    try:
        for start in range(0, len(order), size):
            some = order[start : start + size]
            asked = [(numbers[i], prompts[i]) for i in some]
            found |= zip(
                some, _generate_round(parallel, asked, count, choose, ended, batch), strict=True
            )
    finally:
        model.train(was)
        parallel.bucket_scheduler.begin_step("")
    return [found[i] for i in range(len(prompts))]


def _generate_round(
    parallel: ParallelModel,
    asked: Sequence[tuple[int, Sequence[int]]],
    count: int,
    choose: TokenSampler,
    ended: Callable[[Sequence[int]], bool],
    batch: int,
) -> list[list[int]]:
    """Generates for prompts that fit at once; finished replicas continue until all are done."""
    grid = parallel.grid
    device = parallel.pipeline.executor.device
    replicas = grid.axis(*REPLICA_AXES)
    batch = round_up_batch(parallel, min(batch, -(-len(asked) // replicas.size)))
    # A replica without a prompt runs a dummy, because every rank must call the collectives.
    mine = [asked[i] for i in rank_rows(batch * replicas.size, grid) if i < len(asked)] or [
        (0, [0])
    ]
    idle = rank_rows(batch * replicas.size, grid).start >= len(asked)
    lengths = torch.tensor([len(prompt) for _, prompt in mine])
    tokens = torch.zeros(len(mine), int(lengths.max()) + count, dtype=torch.int64)
    for row, (_, prompt) in enumerate(mine):
        tokens[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
    said: list[list[int]] = [[] for _ in mine]
    open_ = [not idle] * len(mine)
    for place in range(count):
        # All ranks must leave the loop at the same token.
        if not max_over_ranks(int(any(open_)), grid, device):
            break
        now = tokens[:, : int(lengths.max()) + place].to(device)
        logits = next_token_logits(parallel, now, (lengths + place).to(device))
        for row, token in enumerate(choose(logits, [n for n, _ in mine], place).tolist()):
            tokens[row, lengths[row] + place] = token
            if open_[row]:
                said[row].append(token)
                open_[row] = not ended(said[row])
    # Rows are padded with -1 to a common length for the all-gather. The extra column ensures that
    # each row ends with at least one -1.
    known = torch.full((batch, count + 1), -1, dtype=torch.int64)
    for row, words in enumerate(said if not idle else []):
        known[row, : len(words)] = torch.tensor(words, dtype=torch.int64)
    whole = collectives.all_gather(known.to(device), replicas, 0).wait().tolist()
    return [words[: words.index(-1)] for words in whole[: len(asked)]]


def make_sampler(
    *, temperature: float, top_k: int = 0, top_p: float = 1.0, seed: int = 0
) -> TokenSampler:
    """Returns a sampler: greedy at temperature 0, else random.

    A draw depends on (seed, index of the prompt, position), not on the grid or the batch. top_k:
    sample from the k most likely tokens (0 means all); top_p: sample from the smallest set of
    tokens whose probabilities sum to at least this.
    """

    def choose(logits: Tensor, numbers: Sequence[int], place: int) -> Tensor:
        if temperature <= 0.0:
            return logits.argmax(-1)
        # float64 and a stable sort, so that the choice does not depend on rounding or ties.
        whole = (logits.double() / temperature).softmax(-1)
        shares, tokens = whole.sort(stable=True, dim=-1, descending=True)
        # Nucleus sampling keeps a token if the tokens before it have less than top_p in total; it
        # always keeps the most likely token.
        before = shares.cumsum(-1) - shares
        kept = before < top_p
        if top_k > 0:
            kept[:, top_k:] = False
        sums = (shares * kept).cumsum(-1)
        # Inverse transform sampling: find the first cumulative sum above u times the total, u in
        # [0, 1).
        keys = [counter_rng.random_key(seed, "draw", number, place) / 2.0**63 for number in numbers]
        mark = torch.tensor(keys, dtype=torch.float64, device=logits.device).unsqueeze(1)
        column = torch.searchsorted(sums, mark * sums[:, -1:], right=True)
        found: Tensor = tokens.gather(1, column.clamp(max=logits.shape[-1] - 1)).squeeze(1)
        return found

    return choose


@torch.no_grad()
def next_token_logits(
    parallel: ParallelModel, tokens: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Returns the logits `[b, v]` of the next token after `[b, s]`, on all ranks that read them.

    lengths: number of valid tokens of each sample `[b]`; None means all.
    """
    grid = parallel.grid
    stage = parallel.pipeline.executor.stage
    samples, length = tokens.shape
    # Padding at the end is safe: attention is causal, so earlier positions do not see it.
    padded = tokens.new_zeros(
        round_up_batch(parallel, samples),
        round_up(length, parallel.table.seq_multiple(grid.degrees)),
    )
    padded[:samples, :length] = tokens
    own = torch.full((len(padded),), length, device=tokens.device)
    if lengths is None:
        own[:samples] = length
    else:
        own[:samples] = lengths
    # Positions are passed only if there is padding; otherwise the model uses 0, 1, 2, ...
    inputs = {"tokens": padded}
    if lengths is not None or padded.shape[1] > length:
        inputs["positions"] = padded_positions(own, padded.shape[1])
    parallel.bucket_scheduler.begin_step("generate")
    found = parallel.pipeline.executor.run_forward([MicroBatch(inputs)])
    region = parallel.table.activation_rule("vocab")
    vocab = grid.axis(*region["vocab"])
    batch = grid.axis(*parallel.table.axes_inside_replica("vocab", "batch"))
    # The logits are on the last stage; other stages allocate a buffer for the broadcast.
    if not found:
        words = parallel.sizes["vocab"]
        y = torch.zeros(samples, words, dtype=_weight_dtype(parallel), device=tokens.device)
    else:
        last = local_slice(own, batch, 0) - 1  # (b/col,)
        y = found[0][torch.arange(len(last), device=tokens.device), last]
        y = collectives.all_gather(pad_vocab_shard(y, parallel), vocab, -1).wait()
        y = collectives.all_gather(y, batch, 0).wait()[:samples, : parallel.sizes["vocab"]]
    axis = grid.axis("pipe")
    # With the vocabulary split over pipe, every stage has computed its part and gathered all parts.
    if stage.vocab_layers:
        return y.contiguous()
    return collectives.broadcast(y.contiguous(), axis, index=axis.size - 1).wait()


def pad_vocab_shard(y: Tensor, parallel: ParallelModel) -> Tensor:
    """Pads my logits with the columns that the LM head leaves out, so that all ranks have as
    many."""
    table = parallel.table
    degrees = parallel.grid.degrees
    each = table.padded_vocab(parallel.sizes["vocab"], degrees)
    each //= table.num_parts("vocab", "vocab", degrees)
    return torch.nn.functional.pad(y, (0, each - y.shape[-1]))


def _weight_dtype(parallel: ParallelModel) -> torch.dtype:
    return parallel.bucket_scheduler.buckets[0].data.dtype
