"""Model runner: runs the steps of an engine on one rank of a grid.

A home is a place for the keys and values of sequences: a coordinate of the axes that split samples
inside of layers (`ShardingTable.token_axes`). With several homes all of them step together, and one
without work takes part with padding. Keys and values of a home are split over its ranks as the
table says: layers over pipe, kv heads over row (and col), pages of a sequence over context. Each
rank of context attends to its own pages (`nn.attention`). Outside of attention the tokens of a step
are split over context, or, if they are few, all its ranks compute all of them.

The leader (rank 0) builds the input of a step and sends it to all ranks; the other ranks follow.
All ranks of a home sample the same tokens, which are then sent to all ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import max_over_ranks, world_axis
from ranvier.config.engine import RecurrenceOptions
from ranvier.config.plan import RowSplit, RowSplitChoice
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.grid import ORDERS_CHANNEL
from ranvier.infer.adapters import find_token_adapters
from ranvier.infer.early_exit import EarlyExit, ExitTest
from ranvier.infer.sampler import TokenScores, sample_tokens, score_tokens
from ranvier.infer.sampling_inputs import SamplingInputs
from ranvier.infer.step_input import (
    HomeInput,
    StepInput,
    adapters_of,
    build_sequences,
    copy_together,
    iterations_of,
    pad_rows,
    positions_of,
    token_ids_of,
)
from ranvier.infer.step_sizes import StepSizes
from ranvier.launch import has_triton
from ranvier.models.decoder import AttentionCore
from ranvier.models.lora import ADAPTER_INFIX
from ranvier.models.paged_attention import (
    KVCache,
    PagedAttention,
    PagedSequences,
    PagePartAttention,
    attend_to_own_pages,
    paged_attention,
)
from ranvier.models.recurrence import Recurrence
from ranvier.models.recurrent_decoder import RecurrentDecoder
from ranvier.nn.attention import AttentionCore as ParallelAttentionCore
from ranvier.nn.compile import MIN_DYNAMIC_SIZE
from ranvier.nn.fused_linear import FusedLinear
from ranvier.nn.inference_matmul import BatchInvariantMatmul, ThinMatmul, can_multiply_thin
from ranvier.nn.layer import ParallelLayer
from ranvier.nn.linear import Linear
from ranvier.nn.lm_head import LMHead
from ranvier.nn.matmul import MatmulBackend, PlainMatmul, choose_cpu_matmul
from ranvier.parallel.parallel_model import calls_of, get_parallel_model
from ranvier.pipeline.step import MicroBatch
from ranvier.planner.time.serving_step import count_own_tokens
from ranvier.sharding import Sharding, local_range
from ranvier.system.terminal import print
from ranvier.trace import Event

if TYPE_CHECKING:
    from ranvier.infer.step_graphs import StepGraphs

KV_CACHE_DIMS = ("page", "kv_heads", "slot", "head_dim")
"""Dims of the keys, and of the values, of a layer."""
SCORE_COLUMNS = 2
"""Columns of results between the token and the most likely tokens: log-probability and rank."""
FAILED = -1
"""Token of a row from which nothing could be sampled."""


@dataclass(frozen=True)
class HomeOutput:
    """Tokens that were sampled and scored for one home, on the host."""

    tokens: list[int]
    """Sampled tokens; `FAILED` where none could be sampled."""
    scores: TokenScores | None
    """Log-probabilities of the sampled tokens, then of the scored ones."""
    iterations: list[int]
    """Number of iterations before each sampled token, then before the scored ones; empty without
    early exits."""


@dataclass(frozen=True, eq=False)
class PendingStep:
    """A step that was launched, and whose results are copied to the host."""

    step: StepInput
    results: Tensor
    """Rows of all homes, on the host: token, log-probabilities, iterations; complete after
    `ready`."""
    ready: torch.cuda.Event | None

    def wait(self) -> list[HomeOutput]:
        """Waits for the device, and returns the results of all homes."""
        if self.ready is not None:
            self.ready.synchronize()
        rows = self.results.split(self.step.num_logits)
        return [
            self._read_home(part, home) for part, home in zip(rows, self.step.homes, strict=True)
        ]

    def _read_home(self, results: Tensor, home: HomeInput) -> HomeOutput:
        results = results[: home.num_logits]
        tokens = results[: len(home.sampled_rows), 0].long().tolist()
        iterations: list[int] = []
        if self.step.has_exits:
            iterations = results[:, -1].long().tolist()
            results = results[:, :-1]
        if self.step.num_top < 0:
            return HomeOutput(tokens, None, iterations)
        _, logprobs, ranks = results[:, : 1 + SCORE_COLUMNS].unbind(1)
        top_tokens, top_logprobs = results[:, 1 + SCORE_COLUMNS :].chunk(2, 1)
        scores = TokenScores(logprobs, ranks.long(), top_tokens.long(), top_logprobs)
        return HomeOutput(tokens, scores, iterations)


class ModelRunner:
    """Runs steps on one rank: keys and values, forward pass, sampling.

    Args:
        model: A decoder on a grid, in eval mode.
        num_blocks: Number of blocks of each home, including block 0, which holds padding.
        block_size: Number of tokens of a block on each rank of context.
        row_splits: What row splits of the residual stream, or auto.
        max_num_seqs: Maximum number of sequences of a home in a step.
        max_num_batched_tokens: Maximum number of tokens of a home in a step.
        max_model_len: Maximum number of tokens of a sequence.
        cuda_graphs: Whether steps may run as CUDA graphs.
        batch_invariant: Whether the logits of a token must not depend on the other tokens of a
            step.
        recurrence: Iterations of a model with recurrent depth.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        row_splits: RowSplitChoice = "auto",
        cuda_graphs: bool = True,
        batch_invariant: bool = False,
        recurrence: RecurrenceOptions | None = None,
    ) -> None:
        self.model = model
        self._row_splits = row_splits
        self.context_splits: RowSplitChoice = "auto"
        """What context splits of a step, or auto."""
        self._is_in_step = False
        """Whether a step was begun and has not ended."""
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
        self.context_axis = self.grid.axis("context")
        self.tokens_per_block = table.tokens_per_block(block_size, degrees)
        """Number of tokens of a block on all ranks of context together."""
        self.orders_axis = world_axis(self.grid, ORDERS_CHANNEL)
        heads = [layer for layer in self.parallel.layers.values() if isinstance(layer, LMHead)]
        self.head = heads[0] if heads else None
        """The head, on the last stage."""
        self._token_adapters = find_token_adapters(model)
        self.step_graphs: StepGraphs | None = None
        self._restore: list[Callable[[], None]] = []
        """What undoes the changes of layers."""
        self._cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
        shape = self.kv_cache_shape(model, num_blocks, block_size)
        dtype = self.parallel.bucket_scheduler.buckets[0].data.dtype
        config: Any = model.config
        recurrence = recurrence or RecurrenceOptions()
        self.num_iterations = recurrence.num_iterations(config.mean_recurrence)
        """Number of iterations of the core of a model with recurrent depth, at most."""
        self._exit_criterion = recurrence.exit_criterion
        self._early_exit: EarlyExit | None = None
        """Early exits of the current step."""
        for core in self._cores:
            core.kv_caches = tuple(
                KVCache(*(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2)))
                for _ in range(count_kv_caches(core, model, recurrence))
            )
            core.attend_paged = choose_paged_attention(core.kv_caches[0], batch_invariant)
            core.attend_own_pages = choose_page_attention(core.kv_caches[0])
        if self._cores and self.grid.rank == 0:
            warn_of_plain_attention(self._cores[0].kv_caches[0])
        has_kernels = all(core.attend_paged is not paged_attention for core in self._cores)
        self._has_kernels = self.device.type == "cuda" and has_kernels
        self._refuse_streams_over_context()
        if batch_invariant:
            self._check_batch_invariant()
        # Graphs of the compiler differ in the order of additions.
        self._compiles = self._can_capture() and not batch_invariant
        self.min_tokens = MIN_DYNAMIC_SIZE if self._compiles else 1
        """Minimum number of tokens of a step: one token would need a compiled graph of its own."""
        if self._has_kernels and can_multiply_thin(self.device):
            self._use_inference_matmuls(BatchInvariantMatmul() if batch_invariant else ThinMatmul())
        elif self.device.type == "cpu":
            self._use_inference_matmuls(choose_cpu_matmul())
        self.max_num_seqs = max_num_seqs
        self.sampled_tokens = torch.zeros(
            self.num_homes * max_num_seqs, dtype=torch.int64, device=self.device
        )
        """Tokens that the last step sampled, of each home: the input of the next step, before the
        host knows them."""
        if cuda_graphs and self._can_capture():
            from ranvier.infer.step_graphs import StepGraphs

            self.step_graphs = StepGraphs(
                self._forward,
                self._sample_rows,
                self.sampled_tokens,
                block_size=block_size,
                max_blocks=-(-max_model_len // block_size),
                sizes=StepSizes(max_num_seqs, max_num_batched_tokens),
                kv_heads=shape[1],
                fallback=self.parallel.compile_fallback,
            )

    def _refuse_streams_over_context(self) -> None:
        """Raises if context would split the pages of a model with streams."""
        config: Any = self.model.config
        if config.streams == 1 or self.context_axis.size == 1:
            return
        self.free_cache()
        raise PlanError(
            f"plan.context={self.context_axis.size} is not supported for generation with "
            f"model.parscale_streams={config.parscale_streams}. The prefix of a stream would be "
            "counted on each rank of context. Use plan.context=1."
        )

    def _check_batch_invariant(self) -> None:
        """Raises if logits cannot be independent of the batch."""
        config: Any = self.model.config
        is_plain = not self._has_experts and config.streams == 1
        if self._has_kernels and self.grid.world_size == 1 and is_plain:
            return
        self.free_cache()
        raise PlanError(
            "engine.batch_invariant=true is not supported here. It needs one GPU with Triton, "
            "bf16, fp16 or fp32, and a model without experts and streams. Use "
            "engine.batch_invariant=false."
        )

    def _use_inference_matmuls(self, backend: MatmulBackend) -> None:
        """Replaces the matmuls of linear layers, and packs layers with the same input."""
        for layer in self.parallel.layers.values():
            if isinstance(layer, Linear) and layer.matmul_backend == PlainMatmul():
                self._restore.append(partial(setattr, layer, "matmul_backend", PlainMatmul()))
                layer.matmul_backend = backend
        for layer in self.parallel.layers.values():
            if isinstance(layer, FusedLinear):
                self._restore.append(partial(setattr, layer, "packed_layers", layer.packed_layers))
                layer.pack_weights(MAX_FEATURES, all_alike=True)

    @property
    def _has_experts(self) -> bool:
        return self.parallel.load_balancer is not None

    def _can_capture(self) -> bool:
        """Whether steps can be CUDA graphs: on one GPU, with kernels that do not wait."""
        # Grouped products of experts copy numbers of rows from the host.
        # Early exits decide on the host after each iteration, and attention to the prefixes of
        # streams is not one operation of a graph.
        config: Any = self.model.config
        is_plain = not self._has_experts and config.streams == 1 and self._exit_criterion is None
        return self._has_kernels and self.grid.world_size == 1 and is_plain

    def _forward(
        self, tokens: Tensor, positions: Tensor, sequences: PagedSequences, rows: Tensor
    ) -> Tensor | None:
        """Returns the logits of some tokens of a step `[n, v]`; None before the last stage.

        tokens, positions: `[b, T]`; rows: index of these tokens, `[b, n]`.
        """
        context = self.parallel.step_context
        has_adapters = self._token_adapters is not None and self._token_adapters.factors is not None
        context.compiles_inference = self._compiles and not has_adapters
        self.parallel.bucket_scheduler.begin_step("inference")
        inputs = {
            "tokens": tokens,
            "positions": positions,
            "documents": sequences,
            "logits_to_keep": rows,
        }
        try:
            found = self.parallel.pipeline.executor.run_forward([MicroBatch(inputs)])
        finally:
            context.compiles_inference = False
        return found[0][0] if found else None

    def capture_graphs(self, report: Callable[[int, int], None] | None = None) -> None:
        """Captures the CUDA graphs of all steps, which otherwise happens at their first use.

        report: called with the number of captured graphs and of all graphs.
        """
        if self.step_graphs is not None:
            with torch.inference_mode():
                self.step_graphs.capture_all(report)

    def free_cache(self) -> None:
        """Frees the memory of keys and values. Afterwards no step can run."""
        for core in self._cores:
            core.kv_caches = ()
        if self.parallel.compiled_blocks is not None:
            self.parallel.compiled_blocks.drop_inference_graphs()
        self.step_graphs = None
        for restore in self._restore:
            restore()

    @staticmethod
    def kv_cache_shape(model: nn.Module, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Returns the shape on this rank of the keys of a layer, `[num_blocks, g/row, slot, k]`.

        With several streams of each token (ParScale), a block has the kv heads of all of them.
        """
        parallel = get_parallel_model(model)
        config: Any = model.config
        whole = (num_blocks, config.kv_heads, block_size, config.head_dim)
        rule = parallel.table.activation_rule("kv_heads")
        blocks, heads, slots, features = Sharding.from_dims(
            whole, KV_CACHE_DIMS, rule, parallel.grid.degrees, units=parallel.sizes
        ).local_shape
        return blocks, heads * config.streams, slots, features

    def choose_context_splits(self, num_tokens: int) -> RowSplit:
        """Returns whether context splits the tokens of a step, or all its ranks compute all.

        Splitting them divides the work of linear layers, and adds a collective to each layer.
        """
        config: Any = self.model.config
        # Experts with a capacity accept the first tokens, of which a rank must have all.
        if self.context_axis.size == 1 or (self._has_experts and config.capacity_factor > 0.0):
            return "none"
        if self.context_splits != "auto":
            return self.context_splits
        is_split = count_own_tokens(num_tokens, self.context_axis.size) < num_tokens
        return "tokens" if is_split else "none"

    def choose_row_splits(self, num_tokens: int, context_splits: RowSplit = "none") -> RowSplit:
        """Returns the layout of the residual stream that communicates fewer bytes over row.

        Per layer both move as much, but if row splits tokens, they are padded to a multiple of it.
        """
        if self._row_splits != "auto":
            return self._row_splits
        if context_splits == "tokens":
            num_tokens = -(-num_tokens // self.context_axis.size)
        row = self.grid.degrees["row"]
        # With as many bytes, an all-reduce has half the latency.
        if row == 1 or (num_tokens % row == 0 and num_tokens >= MIN_TOKENS_TO_SPLIT * row):
            return "tokens"
        return "none"

    def token_multiple(self, row_splits: RowSplit, context_splits: RowSplit = "none") -> int:
        """Returns the number that must divide the tokens of a home in this layout."""
        degrees, _ = self._token_grid(context_splits)
        # Experts always split tokens over row.
        if row_splits == "tokens" or self.parallel.load_balancer is not None:
            return self.parallel.table.seq_multiple(degrees)
        return degrees["context"]

    def _token_grid(self, context_splits: RowSplit) -> tuple[dict[str, int], dict[str, int]]:
        """Returns degrees and coordinates of this rank; without context if it splits no tokens."""
        degrees, index = dict(self.grid.degrees), dict(self.grid.index)
        if context_splits == "none":
            return degrees | {"context": 1}, index | {"context": 0}
        return degrees, index

    def predict_bytes(self, step: StepInput) -> Counter[str]:
        """Returns the bytes that the collectives of layers move in a step, by axis."""
        total: Counter[str] = Counter()
        for event in self.predict_events(step):
            total["·".join(event.axis)] += event.bytes
        return total

    def _count_calls(self, name: str) -> int:
        """Returns the number of calls of a layer per step, without early exits."""
        if not isinstance(self.model, RecurrentDecoder):
            return 1
        calls = self.model.layer_calls(Recurrence(self.num_iterations, 0))
        return int(calls_of(name, calls).total)

    def predict_events(self, step: StepInput) -> list[Event]:
        """Predicts the communication of the layers in a step, of which no token exits early."""
        itemsize = self.parallel.bucket_scheduler.buckets[0].data.element_size()
        seq = step.num_tokens
        if step.context_splits == "none":
            # Layers count the tokens of all ranks, of which each has all.
            seq *= self.context_axis.size
        shape = ActivationShape(len(self.read_homes), seq, itemsize, max(itemsize, 4))
        context = self.parallel.step_context
        context.row_splits = step.row_splits
        context.context_splits = step.context_splits
        try:
            events = [
                event
                for name, layer in self.parallel.communicating_layers.items()
                if layer is not self.head
                if self._token_adapters is None or step.has_adapters or ADAPTER_INFIX not in name
                for event in self._layer_events(layer, shape, step) * self._count_calls(name)
            ]
            if self.head is not None:
                events += self.head.selected_events(shape, step.num_logits)
        finally:
            context.row_splits = context.context_splits = "tokens"
        return events

    @staticmethod
    def _layer_events(layer: ParallelLayer, shape: ActivationShape, step: StepInput) -> list[Event]:
        """Predicts the communication of a layer in a step."""
        if isinstance(layer, ParallelAttentionCore):
            return layer.paged_events(step.num_tokens, shape.itemsize)
        # Other layers communicate over context only for statistics of training.
        return [event for event in layer.forward_events(shape) if "context" not in event.axis]

    # ---- all ranks --------------------------------------------------------------------------

    def launch(self, step: StepInput) -> PendingStep:
        """Starts a step on all ranks. Only for the leader, which waits for the results later.

        Communicates: the step over all axes, then as a forward pass; results over pipe and homes.
        """
        self._is_in_step = True
        if self.orders_axis.size > 1:
            packed = step.pack()
            max_over_ranks(len(packed), self.grid, "cpu", channel=ORDERS_CHANNEL)
            collectives.broadcast(packed, self.orders_axis).wait()
        results = self._run(step)
        self._is_in_step = False
        if self.device.type != "cuda":
            return PendingStep(step, results, None)
        on_host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        on_host.copy_(results, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return PendingStep(step, on_host, ready)

    def follow(self) -> None:
        """Runs the steps of the leader until it stops."""
        while size := max_over_ranks(0, self.grid, "cpu", channel=ORDERS_CHANNEL):
            packed = torch.zeros(size, dtype=torch.int64)
            self._run(StepInput.unpack(collectives.broadcast(packed, self.orders_axis).wait()))

    def stop(self) -> None:
        """Ends `follow` on the other ranks. Only for the leader.

        After a step that has failed, the others wait in the middle of it and do not listen.
        """
        if self.orders_axis.size > 1 and not self._is_in_step:
            max_over_ranks(0, self.grid, "cpu", channel=ORDERS_CHANNEL)

    # ---- one rank ---------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, step: StepInput) -> Tensor:
        """Returns the results of all homes, on the device."""
        size = None if self.step_graphs is None else self.step_graphs.size_of(step)
        if self.step_graphs is not None and size is not None and self.step_graphs.can_run(size):
            (home,) = step.homes
            results = self.step_graphs.run(home, size, samples=step.num_top < 0)
            if results is not None:
                return results
            logits: Tensor | None = self.step_graphs.logits
        else:
            logits = self._run_eagerly(step)
        results = self._new_results(step)
        if logits is not None:
            # Iterations are the last column.
            scores = results[:, : results.shape[1] - step.has_exits]
            self._sample(logits, step, step.homes[self.home], scores)
        if self._early_exit is not None:
            own = self._early_exit.own_iterations
            results[: len(own), -1] = own.double()
            self._early_exit = None
        last = self.pipe_axis.size - 1
        results = collectives.broadcast(results, self.pipe_axis, index=last).wait()
        # Where rounding differs between ranks of context, they could sample different tokens.
        results = collectives.broadcast(results, self.context_axis).wait()
        results = collectives.all_gather(results, self.home_axis).wait()
        tokens = results[:, 0].view(self.num_homes, -1)[:, : self.max_num_seqs]
        self.sampled_tokens.view(self.num_homes, -1)[:, : tokens.shape[1]] = tokens.long().clamp(
            min=0
        )
        return results

    def _run_eagerly(self, step: StepInput) -> Tensor | None:
        """Returns the logits of this rank's home `[n, v]`; None before the last stage."""
        read = [step.homes[i] for i in self.read_homes]
        rows = [[*home.sampled_rows, *home.scored_rows] for home in read]
        arrays = [
            pad_rows([token_ids_of(home) for home in read], step.num_tokens),
            pad_rows([positions_of(home) for home in read], step.num_tokens),
            pad_rows(rows, step.num_logits),
        ]
        own_tokens = self._own_tokens(step)
        arrays[:2] = [array[:, own_tokens] for array in arrays[:2]]
        tokens, positions, logits_to_keep = copy_together(arrays, self.device)
        # Some tokens were sampled by the step before, and the host does not know them yet.
        sampled = self.sampled_tokens[(-1 - tokens).clamp(min=0)]
        tokens = torch.where(tokens < 0, sampled, tokens)
        own = step.homes[self.home]
        sequences = build_sequences(
            own.chunks,
            step.num_tokens,
            self.block_size,
            self.device,
            context_size=self.context_axis.size,
            context_index=self.context_axis.index,
        )
        sequences = replace(sequences, rope_lengths=sequences.rope_lengths[:, own_tokens])
        if step.has_exits:
            self._early_exit = self._build_early_exit(step)
            for core in self._cores:
                for cache in core.kv_caches:
                    # A kernel does not see the tokens that have finished, and clears nothing.
                    cache.clear_new_values(sequences.slot_mapping)
        sequences = replace(
            sequences, num_iterations=self.num_iterations, early_exit=self._early_exit
        )
        context = self.parallel.step_context
        context.row_splits = step.row_splits
        context.context_splits = step.context_splits
        self._select_adapters(step)
        try:
            return self._forward(tokens, positions, sequences, logits_to_keep)
        finally:
            context.row_splits = context.context_splits = "tokens"
            if self._token_adapters is not None:
                self._token_adapters.factors = None

    def _build_early_exit(self, step: StepInput) -> EarlyExit:
        """Returns the early exits of a step."""
        assert self._exit_criterion is not None and self.head is not None
        limits = pad_rows([iterations_of(home) for home in step.homes], step.num_tokens)
        for row, home in zip(limits, step.homes, strict=True):
            row[home.num_tokens :] = 1
        table = replace(self.parallel.table, row_splits=step.row_splits)
        degrees, index = self._token_grid(step.context_splits)
        homes = local_range(self.num_homes, table.token_axes("embed", "batch"), degrees, index)
        tokens = local_range(step.num_tokens, table.token_axes("embed", "seq"), degrees, index)
        own = step.homes[self.home]
        test = ExitTest(self._exit_criterion, self.head.vocab_shard, self.vocab_size)
        return EarlyExit(
            torch.from_numpy(limits),
            [*own.sampled_rows, *own.scored_rows],
            test,
            num_iterations=self.num_iterations,
            home=self.home,
            local_tokens=(slice(homes.start, homes.stop), slice(tokens.start, tokens.stop)),
            home_axis=self.home_axis,
            context_axis=self.context_axis,
            caches=[core.kv_caches for core in self._cores if len(core.kv_caches) > 1],
            device=self.device,
        )

    def _own_tokens(self, step: StepInput) -> slice:
        """Returns which tokens of a step this rank of context has outside of attention."""
        if step.context_splits == "none":
            return slice(None)
        size = step.num_tokens // self.context_axis.size
        return slice(self.context_axis.index * size, (self.context_axis.index + 1) * size)

    def _select_adapters(self, step: StepInput) -> None:
        """Sets the adapter of each token, in the layout of a LoRA rank `[b/col, s/row, r]`."""
        if self._token_adapters is None or not step.has_adapters:
            return
        table = replace(self.parallel.table, row_splits=step.row_splits)
        degrees, index = self._token_grid(step.context_splits)
        homes = local_range(self.num_homes, table.token_axes("rank", "batch"), degrees, index)
        tokens = local_range(step.num_tokens, table.token_axes("rank", "seq"), degrees, index)
        numbers = pad_rows([adapters_of(step.homes[i]) for i in homes], step.num_tokens)
        (indices,) = copy_together([numbers[:, tokens.start : tokens.stop]], self.device)
        config: Any = self.model.config
        self._token_adapters.select(indices.repeat_interleave(config.streams, 0))

    def _new_results(self, step: StepInput) -> Tensor:
        """Returns zeros for the results of a home: token, then log-probabilities if asked for."""
        columns = 1 + step.has_exits
        if step.num_top >= 0:
            columns += SCORE_COLUMNS + 2 * step.num_top
        return torch.zeros(step.num_logits, columns, dtype=torch.float64, device=self.device)

    def _sample_rows(self, logits: Tensor, inputs: SamplingInputs, results: Tensor) -> Tensor:
        """Samples from rows of logits `[n, V/p]` into rows of results, and returns the tokens."""
        assert self.head is not None
        found = sample_tokens(logits, inputs, self.head.vocab_shard)
        results[:, 0] = found.tokens.masked_fill(found.failed, FAILED)
        _write_scores(results, found.scores)
        return found.tokens

    def _sample(self, logits: Tensor, step: StepInput, own: HomeInput, results: Tensor) -> None:
        """Samples and scores the rows of logits `[n, V/p]` of this home."""
        assert self.head is not None
        # Fewer rows than in other homes: the collectives over the vocabulary are those of this
        # home only, so that padding need not take part.
        count = len(own.sampled_rows)
        if count:
            self._sample_rows(logits[:count], own.sampling.to(self.device), results[:count])
        if own.scored_rows:
            tokens = torch.tensor(own.scored_tokens, device=self.device)
            some = slice(count, count + len(tokens))
            results[some, 0] = tokens.double()
            shard = self.head.vocab_shard
            scores = score_tokens(logits[some], tokens, shard, num_top=max(step.num_top, 0))
            _write_scores(results[some], scores)


def count_kv_caches(core: AttentionCore, model: nn.Module, recurrence: RecurrenceOptions) -> int:
    """Returns the number of caches of a layer: one for each stored iteration."""
    config: Any = model.config
    return recurrence.num_caches(config.mean_recurrence) if core.is_recurrent else 1


MIN_TOKENS_TO_SPLIT = 64
"""Tokens per rank of row from which the work of norms outweighs the latency of two collectives."""


MAX_FEATURES = 1 << 62
"""All layers with the same input are packed, however wide they are."""


def choose_paged_attention(cache: KVCache, batch_invariant: bool = False) -> PagedAttention:
    """Returns the attention for a cache: Triton kernels where they support it."""
    if not _supports_kernels(cache):
        return paged_attention
    from ranvier.infer import paged_kernels

    if batch_invariant:
        return paged_kernels.batch_invariant_attention
    return paged_kernels.paged_attention


def choose_page_attention(cache: KVCache) -> PagePartAttention:
    """Returns the attention to the pages of a rank of context."""
    if not _supports_kernels(cache):
        return attend_to_own_pages
    from ranvier.infer import paged_kernels

    return paged_kernels.attend_to_own_pages


def _supports_kernels(cache: KVCache) -> bool:
    """Whether the Triton kernels support a cache."""
    if not cache.keys.is_cuda or not has_triton():
        return False
    from ranvier.infer import paged_kernels

    return not paged_kernels.find_unsupported(cache)


def warn_of_plain_attention(cache: KVCache) -> None:
    """Prints why a GPU attends without the Triton kernels, if it does."""
    if not cache.keys.is_cuda:
        return
    reason = "Triton cannot be imported"
    if has_triton():
        from ranvier.infer import paged_kernels

        unsupported = paged_kernels.find_unsupported(cache)
        if not unsupported:
            return
        reason = f"its kernels do not support {unsupported}"
    print(
        f"warning: attention to the KV cache runs in plain PyTorch and is slower: {reason}",
        file=sys.stderr,
        flush=True,
    )


def _write_scores(results: Tensor, scores: TokenScores | None) -> None:
    """Writes log-probabilities into rows of results."""
    if scores is None:
        return
    results[:, 1] = scores.logprobs
    results[:, 2] = scores.ranks
    first = 1 + SCORE_COLUMNS
    half = (results.shape[1] - first) // 2
    top = scores.top_tokens.shape[1]
    results[:, first : first + top] = scores.top_tokens
    results[:, first + half : first + half + top] = scores.top_logprobs
