"""Model runner: runs the steps of an engine on one rank of a grid.

A home is a place for the keys and values of sequences: a coordinate of the axes that split samples
inside of layers (`ShardingTable.token_axes`). With several homes all of them step together, and one
without work takes part with padding. Keys and values of a home are split over its ranks as the
table says: layers over pipe, kv heads over row (and col).

The leader (rank 0) builds the input of a step and sends it to all ranks; the other ranks follow.
All ranks of a home sample the same tokens, which are then sent to all ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import max_over_ranks, world_axis
from ranvier.config.plan import RowSplit, RowSplitChoice
from ranvier.cost.layers import ActivationShape
from ranvier.grid import ORDERS_CHANNEL
from ranvier.infer.decode_graphs import DecodeGraphs
from ranvier.infer.sampler import TokenScores, sample_tokens, score_tokens
from ranvier.infer.step_input import HomeInput, StepInput, pad_rows, positions_of
from ranvier.launch import has_triton
from ranvier.models.decoder import AttentionCore
from ranvier.models.paged_attention import (
    KVCache,
    PagedAttention,
    PagedSequences,
    paged_attention,
)
from ranvier.nn.lm_head import LMHead
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.pipeline.step import MicroBatch
from ranvier.sharding import Sharding, local_range
from ranvier.trace import Event

KV_CACHE_DIMS = ("page", "kv_heads", "slot", "head_dim")
"""Dims of the keys, and of the values, of a layer."""
RESULT_COLUMNS = 4
"""Token, whether it failed, log-probability and rank; then the most likely tokens."""


@dataclass(frozen=True)
class HomeOutput:
    """Tokens that were sampled and scored for one home, on the host."""

    tokens: list[int]
    """Sampled tokens."""
    failed: list[bool]
    """Whether no token could be sampled."""
    scores: TokenScores | None
    """Log-probabilities of the sampled tokens, then of the scored ones."""


class ModelRunner:
    """Runs steps on one rank: keys and values, forward pass, sampling.

    Args:
        model: A decoder on a grid, in eval mode.
        num_blocks: Number of blocks of each home, including block 0, which holds padding.
        block_size: Number of tokens of a block.
        row_splits: What row splits of the residual stream, or auto.
        max_decode_batch: Maximum number of sequences of a decode step that is run as a CUDA graph;
            0 means no graphs.
        max_model_len: Maximum number of tokens of a sequence, if there are graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_blocks: int,
        block_size: int,
        row_splits: RowSplitChoice = "auto",
        max_decode_batch: int = 0,
        max_model_len: int = 0,
    ) -> None:
        self.model = model
        self._row_splits = row_splits
        self.parallel = get_parallel_model(model)
        self.grid = self.parallel.grid
        self.device = self.parallel.pipeline.executor.device
        self.block_size = block_size
        self.vocab_size = self.parallel.sizes["vocab"]
        table, degrees, index = self.parallel.table, self.grid.degrees, self.grid.index
        home_axes = table.token_axes("heads", "batch")
        self.home_axis = self.grid.axis(*home_axes)
        self.num_homes = self.home_axis.size
        (self.home,) = local_range(self.num_homes, home_axes, degrees, index)
        """Index of the home of this rank."""
        assert self.home == self.home_axis.index, (self.home, self.home_axis)
        self.read_homes = local_range(
            self.num_homes, table.token_axes("embed", "batch"), degrees, index
        )
        """Homes whose tokens this rank reads: those of the ranks of col, if col splits samples."""
        self.pipe_axis = self.grid.axis("pipe")
        self.orders_axis = world_axis(self.grid, ORDERS_CHANNEL)
        heads = [layer for layer in self.parallel.layers.values() if isinstance(layer, LMHead)]
        self.head = heads[0] if heads else None
        """The head, on the last stage."""
        self._cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
        shape = self.kv_cache_shape(model, num_blocks, block_size)
        dtype = self.parallel.bucket_scheduler.buckets[0].data.dtype
        for core in self._cores:
            keys, values = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))
            core.kv_cache = KVCache(keys, values)
            core.attend_paged = choose_paged_attention(core.kv_cache)
        self.decode_graphs: DecodeGraphs | None = None
        if max_decode_batch and self._can_capture():
            self.decode_graphs = DecodeGraphs(
                self._forward_decode,
                block_size=block_size,
                max_blocks=-(-max_model_len // block_size),
                max_batch=max_decode_batch,
            )

    def _can_capture(self) -> bool:
        """Whether decode steps can be CUDA graphs: on one GPU, with kernels that do not wait."""
        has_kernels = all(core.attend_paged is not paged_attention for core in self._cores)
        # Grouped products of experts copy numbers of rows from the host.
        has_experts = self.parallel.load_balancer is not None
        is_one_gpu = self.device.type == "cuda" and self.grid.world_size == 1
        return is_one_gpu and has_kernels and not has_experts

    def _forward_decode(
        self, tokens: Tensor, positions: Tensor, sequences: PagedSequences, rows: Tensor
    ) -> Tensor:
        """Returns the logits of a decode step `[n, v]`."""
        context = self.parallel.step_context
        context.compiles_inference = True
        self.parallel.bucket_scheduler.begin_step("inference")
        try:
            inputs = {
                "tokens": tokens,
                "positions": positions,
                "documents": sequences,
                "logits_to_keep": rows,
            }
            return self.parallel.pipeline.executor.run_forward([MicroBatch(inputs)])[0][0]
        finally:
            context.compiles_inference = False

    def free_cache(self) -> None:
        """Frees the memory of keys and values. Afterwards no step can run."""
        for core in self._cores:
            core.kv_cache = None

    @staticmethod
    def kv_cache_shape(model: nn.Module, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Returns the shape on this rank of the keys of a layer, `[num_blocks, g/row, slot, k]`."""
        parallel = get_parallel_model(model)
        config: Any = model.config
        whole = (num_blocks, config.kv_heads, block_size, config.head_dim)
        rule = parallel.table.activation_rule("kv_heads")
        return Sharding.from_dims(
            whole, KV_CACHE_DIMS, rule, parallel.grid.degrees, units=parallel.sizes
        ).local_shape

    def choose_row_splits(self, num_tokens: int) -> RowSplit:
        """Returns the layout of the residual stream that communicates fewer bytes over row.

        Per layer both move as much, but if row splits tokens, they are padded to a multiple of it.
        """
        if self._row_splits != "auto":
            return self._row_splits
        row = self.grid.degrees["row"]
        # With as many bytes, an all-reduce has half the latency.
        if row == 1 or (num_tokens % row == 0 and num_tokens >= MIN_TOKENS_TO_SPLIT * row):
            return "tokens"
        return "none"

    def token_multiple(self, row_splits: RowSplit) -> int:
        """Returns the number that must divide the tokens of a home in this layout."""
        # Experts always split tokens over row.
        if row_splits == "tokens" or self.parallel.load_balancer is not None:
            return self.parallel.table.seq_multiple(self.grid.degrees)
        return 1

    def predict_bytes(self, step: StepInput) -> Counter[str]:
        """Returns the bytes that the collectives of layers move in a step, by axis."""
        total: Counter[str] = Counter()
        for event in self.predict_events(step):
            total["·".join(event.axis)] += event.bytes
        return total

    def predict_events(self, step: StepInput) -> list[Event]:
        """Predicts the communication of the layers in a step."""
        itemsize = self.parallel.bucket_scheduler.buckets[0].data.element_size()
        shape = ActivationShape(len(self.read_homes), step.num_tokens, itemsize, max(itemsize, 4))
        context = self.parallel.step_context
        context.row_splits = step.row_splits
        try:
            events = [
                event
                for layer in self.parallel.communicating_layers.values()
                if layer is not self.head
                for event in layer.forward_events(shape)
            ]
            if self.head is not None:
                events += self.head.selected_events(shape, step.num_logits)
        finally:
            context.row_splits = "tokens"
        return events

    # ---- all ranks --------------------------------------------------------------------------

    def execute(self, step: StepInput) -> list[HomeOutput]:
        """Runs a step on all ranks and returns the tokens of all homes. Only for the leader.

        Communicates: the step over all axes, then as a forward pass; results over pipe and homes.
        """
        packed = step.pack()
        if self.orders_axis.size > 1:
            max_over_ranks(len(packed), self.grid, "cpu", channel=ORDERS_CHANNEL)
            collectives.broadcast(packed, self.orders_axis).wait()
        return self._run(step)

    def follow(self) -> None:
        """Runs the steps of the leader until it stops."""
        while size := max_over_ranks(0, self.grid, "cpu", channel=ORDERS_CHANNEL):
            packed = torch.zeros(size, dtype=torch.int64)
            self._run(StepInput.unpack(collectives.broadcast(packed, self.orders_axis).wait()))

    def stop(self) -> None:
        """Ends `follow` on the other ranks. Only for the leader."""
        if self.orders_axis.size > 1:
            max_over_ranks(0, self.grid, "cpu", channel=ORDERS_CHANNEL)

    # ---- one rank ---------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, step: StepInput) -> list[HomeOutput]:
        if self.decode_graphs is not None and self.decode_graphs.accepts(step):
            (home,) = step.homes
            results = self._new_results(step)
            self._sample(self.decode_graphs.run(home), step, home, results)
            return [self._read_results(results.cpu(), home, step)]
        read = [step.homes[i] for i in self.read_homes]
        own = step.homes[self.home]
        rows = [[*home.sampled_rows, *home.scored_rows] for home in read]
        inputs: dict[str, Any] = {
            "tokens": pad_rows(
                [[token for chunk in home.chunks for token in chunk.tokens] for home in read],
                step.num_tokens,
            ),
            "positions": pad_rows([[*positions_of(home)] for home in read], step.num_tokens),
            "documents": self._make_sequences(own, step.num_tokens),
            "logits_to_keep": pad_rows(rows, step.num_logits),
        }
        inputs = {
            name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in inputs.items()
        }
        self.parallel.step_context.row_splits = step.row_splits
        self.parallel.bucket_scheduler.begin_step("inference")
        try:
            found = self.parallel.pipeline.executor.run_forward([MicroBatch(inputs)])
        finally:
            self.parallel.step_context.row_splits = "tokens"
        results = self._new_results(step)
        if found:
            self._sample(found[0][0], step, own, results)
        last = self.pipe_axis.size - 1
        results = collectives.broadcast(results, self.pipe_axis, index=last).wait()
        results = collectives.all_gather(results, self.home_axis).wait()
        return [
            self._read_results(rows, home, step)
            for rows, home in zip(results.cpu().split(step.num_logits), step.homes, strict=True)
        ]

    def _new_results(self, step: StepInput) -> Tensor:
        """Returns zeros for the results of a home: token, failed, log-probabilities."""
        columns = RESULT_COLUMNS + 2 * max(step.num_top, 0)
        return torch.zeros(step.num_logits, columns, dtype=torch.float64, device=self.device)

    def _make_sequences(self, own: HomeInput, num_tokens: int) -> PagedSequences:
        """Returns where the tokens of this rank's home are stored."""
        chunks = own.chunks
        query_lens = tuple(len(chunk.tokens) for chunk in chunks)
        slots: list[int] = []
        lengths: list[int] = []
        for chunk in chunks:
            for place in range(chunk.start, chunk.stop):
                block = chunk.blocks[place // self.block_size]
                slots.append(block * self.block_size + place % self.block_size)
            lengths += [chunk.num_known_tokens] * len(chunk.tokens)
        most = max((len(chunk.blocks) for chunk in chunks), default=1)
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        stops = [chunk.stop for chunk in chunks]
        return PagedSequences(
            starts.to(self.device),
            torch.tensor(stops, dtype=torch.int32, device=self.device),
            pad_rows([chunk.blocks for chunk in chunks], most).int().to(self.device),
            pad_rows([slots], num_tokens)[0].to(self.device),
            pad_rows([lengths], num_tokens).to(self.device),
            query_lens,
            tuple(stops),
        )

    def _sample(self, logits: Tensor, step: StepInput, own: HomeInput, results: Tensor) -> None:
        """Samples and scores the rows of logits `[n, V/p]` of this home."""
        assert self.head is not None
        shard = self.head.vocab_shard
        # Fewer rows than in other homes: the collectives over the vocabulary are those of this
        # home only, so that padding need not take part.
        count = len(own.sampled_rows)
        if count:
            found = sample_tokens(logits[:count], own.sampling.to(self.device), shard)
            results[:count, 0] = found.tokens
            results[:count, 1] = found.failed
            _write_scores(results[:count], found.scores)
        if own.scored_rows:
            tokens = torch.tensor(own.scored_tokens, device=self.device)
            some = slice(count, count + len(tokens))
            results[some, 0] = tokens
            scores = score_tokens(logits[some], tokens, shard, num_top=max(step.num_top, 0))
            _write_scores(results[some], scores)

    def _read_results(self, results: Tensor, home: HomeInput, step: StepInput) -> HomeOutput:
        """Returns the results of a home on the host."""
        results = results[: home.num_logits]
        count = len(home.sampled_rows)
        scores = None
        if step.num_top >= 0:
            top_tokens, top_logprobs = results[:, RESULT_COLUMNS:].chunk(2, 1)
            scores = TokenScores(
                results[:, 2], results[:, 3].long(), top_tokens.long(), top_logprobs
            )
        return HomeOutput(
            results[:count, 0].long().tolist(), results[:count, 1].bool().tolist(), scores
        )


MIN_TOKENS_TO_SPLIT = 64
"""Tokens per rank of row from which the work of norms outweighs the latency of two collectives."""


def choose_paged_attention(cache: KVCache) -> PagedAttention:
    """Returns the attention for a cache: Triton kernels where they support it."""
    if not cache.keys.is_cuda or not has_triton():
        return paged_attention
    from ranvier.infer import paged_kernels

    if paged_kernels.supports(cache):
        return paged_kernels.paged_attention
    return paged_attention


def _write_scores(results: Tensor, scores: TokenScores | None) -> None:
    """Writes log-probabilities into rows of results."""
    if scores is None:
        return
    results[:, 2] = scores.logprobs
    results[:, 3] = scores.ranks
    top = scores.top_tokens.shape[1]
    half = (results.shape[1] - RESULT_COLUMNS) // 2
    results[:, RESULT_COLUMNS : RESULT_COLUMNS + top] = scores.top_tokens
    results[:, RESULT_COLUMNS + half : RESULT_COLUMNS + half + top] = scores.top_logprobs
