"""CUDA graphs of steps, so that the host only copies their inputs.

There is a graph for each class of sizes (`step_sizes`): of decode steps, in which every sequence
has one token, and of mixed steps. A smaller step is padded. Padding tokens write to block 0 and
attend to nothing. Sampling is a second, small graph, because it also depends on the parameters of
the requests; parameters that need tensors of other sizes (masks, biases, penalties,
log-probabilities) are sampled without a graph.

The input tokens of a step may be those that the step before samples; they never leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ranvier.infer.sampler_kernels import resolve_tokens
from ranvier.infer.sampling_inputs import SamplingFlags, SamplingInputs
from ranvier.infer.step_input import HomeInput, SequenceChunk, StepInput
from ranvier.infer.step_sizes import GraphSize, StepSizes
from ranvier.models.paged_attention import PagedSequences, num_split_counters
from ranvier.nn.compile_fallback import CompileFallback

TOKEN_FIELDS = 6
"""Numbers of a token: id, position, slot, known tokens, row of its sequence, tokens it sees."""
SAMPLING_INTEGERS = ("keys", "positions", "top_k")
SAMPLING_FLOATS = ("temperatures", "top_p", "log_min_p")
SEQUENCE_FIELDS = 2 + len(SAMPLING_INTEGERS) + len(SAMPLING_FLOATS)
"""Numbers of a sequence: length, and, of each sampled token, its row and its parameters."""
WARMUP_RUNS = 2
ForwardPass = Callable[[Tensor, Tensor, PagedSequences, Tensor], Tensor | None]
"""Tokens, positions, sequences and rows of logits to logits `[n, v]`."""
Sampler = Callable[[Tensor, SamplingInputs, Tensor], Tensor]
"""Logits, their parameters, and the results to write; returns the tokens."""


Numbers = TypeVar("Numbers", np.ndarray, Tensor)


@dataclass
class _CapturedStep:
    """The forward pass of a class of steps."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    """All fields, int64, flat."""
    sampling_fields: Tensor
    """The parameters of sampled tokens among them, `[fields, num_rows]`."""
    logits: Tensor


@dataclass
class _CapturedSampling:
    """The sampling of a class of steps and of some flags."""

    graph: torch.cuda.CUDAGraph
    inputs: SamplingInputs
    """Its tensors, which must stay alive."""
    results: Tensor


class StepGraphs:
    """Runs steps of a model on one GPU as CUDA graphs.

    Args:
        forward: The forward pass of the model.
        sample: Samples tokens from logits.
        sampled_tokens: Tokens that the last step sampled; every step reads and writes them.
        block_size: Number of tokens of a block.
        max_blocks: Maximum number of blocks of a sequence.
        sizes: The classes of steps.
        kv_heads: Number of kv heads.
        fallback: What happens to a class of steps that cannot be captured.
    """

    def __init__(
        self,
        forward: ForwardPass,
        sample: Sampler,
        sampled_tokens: Tensor,
        *,
        block_size: int,
        max_blocks: int,
        sizes: StepSizes,
        kv_heads: int,
        fallback: CompileFallback,
    ) -> None:
        self._forward = forward
        self._sample = sample
        self._sampled_tokens = sampled_tokens
        self._block_size = block_size
        self.sizes = sizes
        self._fallback = fallback
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[GraphSize, _CapturedStep | None] = {}
        """None for a class that cannot be captured."""
        self._samplings: dict[tuple[GraphSize, SamplingFlags], _CapturedSampling | None] = {}
        self._device = sampled_tokens.device
        num_rows = max(size.num_rows for size in sizes.all_sizes())
        int32 = partial(torch.zeros, dtype=torch.int32, device=self._device)
        self._block_table = int32(num_rows, max_blocks)
        self._split_counters = int32(num_split_counters(num_rows, kv_heads))
        self._host_table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self._written: list[tuple[Sequence[int], int]] = [((), 0)] * num_rows
        """Blocks of each row of the table, and how many of them were written."""
        self.logits = torch.empty(0, device=self._device)
        """Logits of the last step `[n, v]`; overwritten by the next one."""

    def size_of(self, step: StepInput) -> GraphSize | None:
        """Returns the class of a step; None if it must run without a graph."""
        (home,) = step.homes
        count = len(home.chunks)
        if not 0 < count <= self.sizes.max_batch or home.scored_rows or step.has_adapters:
            return None
        num_tokens = home.num_tokens
        if num_tokens == count == len(home.sampled_rows):
            return self.sizes.decode_size(count)
        return self.sizes.mixed_size(num_tokens, count)

    def capture_all(self, report: Callable[[int, int], None] | None = None) -> None:
        """Captures all forward passes, and greedy and plain sampling.

        report: called with the number of captured classes and of all classes.
        """
        sizes = self.sizes.all_sizes()
        for i, size in enumerate(sizes):
            for flags in (SamplingFlags(), SamplingFlags(is_greedy=False)):
                self._sampling_of(size, flags)
            if report is not None:
                report(i + 1, len(sizes))

    def can_run(self, size: GraphSize) -> bool:
        """Whether steps of a class have a graph, which is captured if it is new."""
        return self._step_of(size) is not None

    def run(self, home: HomeInput, size: GraphSize, *, samples: bool) -> Tensor | None:
        """Returns the results of all sampled tokens, `[n, 1]`; the next step overwrites them.

        size: a class for which `can_run` is true. samples: whether tokens may be sampled here. None
        if they are not: the caller samples from `logits`.
        """
        step = self._step_of(size)
        assert step is not None, size
        numbers = torch.from_numpy(self._numbers_of(home, size)).pin_memory()
        step.numbers.copy_(numbers, non_blocking=True)
        self._update_table(home.chunks)
        step.graph.replay()
        flags = home.sampling.flags
        count = len(home.sampled_rows)
        sampling = None
        if samples and not (flags.has_bias or flags.has_masks or flags.has_penalties):
            sampling = self._sampling_of(size, flags)
        if sampling is None:
            self.logits = step.logits[:count]
            return None
        sampling.graph.replay()
        return sampling.results[: max(count, 1)]

    def _numbers_of(self, home: HomeInput, size: GraphSize) -> np.ndarray:
        """Returns all fields as one flat array; what is not set is padding."""
        block_size = self._block_size
        fields: list[tuple[int, ...]] = []
        lengths: list[int] = []
        starts: list[int] = []
        for row, chunk in enumerate(home.chunks):
            blocks, known = chunk.blocks, chunk.num_known_tokens
            starts.append(len(fields))
            lengths.append(chunk.stop)
            for place, token in enumerate(chunk.tokens, chunk.start):
                slot = blocks[place // block_size] * block_size + place % block_size
                fields.append((token, place, slot, known, row, place + 1))
        numbers = np.zeros(_num_fields(size), dtype=np.int64)
        per_token, start_loc, per_row = _split_fields(numbers, size)
        per_token[:, : len(fields)] = np.array(fields, dtype=np.int64).T
        start_loc[:] = len(fields)
        start_loc[: len(starts)] = starts
        per_row[0, : len(lengths)] = lengths
        per_row[1, : len(home.sampled_rows)] = home.sampled_rows
        for i, name in enumerate((*SAMPLING_INTEGERS, *SAMPLING_FLOATS), 2):
            values = getattr(home.sampling, name).view(torch.int64).numpy()
            per_row[i, : len(values)] = values
        return numbers

    def _update_table(self, chunks: Sequence[SequenceChunk]) -> None:
        """Writes the blocks of sequences that have others than in the step before."""
        has_changed = False
        for row, chunk in enumerate(chunks):
            blocks, written = self._written[row]
            count = len(chunk.blocks)
            if blocks is chunk.blocks and written == count:
                continue
            first = written if blocks is chunk.blocks else 0
            self._host_table[row, first:count] = chunk.blocks[first:]
            self._written[row] = (chunk.blocks, count)
            has_changed = True
        if has_changed:
            width = max(len(chunk.blocks) for chunk in chunks)
            part = np.ascontiguousarray(self._host_table[: len(chunks), :width])
            on_device = torch.from_numpy(part).pin_memory().to(self._device, non_blocking=True)
            self._block_table[: len(chunks), :width] = on_device

    def _step_of(self, size: GraphSize) -> _CapturedStep | None:
        if size not in self._steps:
            self._steps[size] = self._capture_step(size)
        return self._steps[size]

    def _sampling_of(self, size: GraphSize, flags: SamplingFlags) -> _CapturedSampling | None:
        if (size, flags) not in self._samplings:
            self._samplings[size, flags] = self._capture_sampling(size, flags)
        return self._samplings[size, flags]

    def _capture_step(self, size: GraphSize) -> _CapturedStep | None:
        """Captures the forward pass of a class of steps."""
        numbers = torch.zeros(_num_fields(size), dtype=torch.int64, device=self._device)
        per_token, start_loc, per_row = _split_fields(numbers, size)
        tokens, positions, slots, known, token_rows, token_lens = per_token.unbind(0)
        seq_lens, sampled_rows = per_row[:2].unbind(0)

        def run() -> Tensor:
            sequences = PagedSequences(
                query_start_loc=start_loc,
                seq_lens=seq_lens,
                block_table=self._block_table[: size.num_rows],
                slot_mapping=slots,
                rope_lengths=known.unsqueeze(0),
                token_rows=token_rows,
                token_lens=token_lens,
                split_counters=self._split_counters,
                is_decode=size.is_decode,
            )
            inputs = resolve_tokens(tokens, self._sampled_tokens)
            logits = self._forward(
                inputs.unsqueeze(0), positions.unsqueeze(0), sequences, sampled_rows.unsqueeze(0)
            )
            assert logits is not None, "one GPU has the last stage"
            return logits

        captured = self._capture(run)
        if captured is None:
            return None
        graph, logits = captured
        return _CapturedStep(graph, numbers, per_row[2:], logits)

    def _capture_sampling(self, size: GraphSize, flags: SamplingFlags) -> _CapturedSampling | None:
        """Captures the sampling of a class of steps."""
        step = self._step_of(size)
        if step is None:
            return None
        names = (*SAMPLING_INTEGERS, *SAMPLING_FLOATS)
        fields = dict(zip(names, step.sampling_fields.unbind(0), strict=True))
        fields |= {name: fields[name].view(torch.float64) for name in SAMPLING_FLOATS}
        inputs = SamplingInputs.without_entries(flags, **fields)
        results = torch.zeros(size.num_rows, 1, dtype=torch.float64, device=self._device)
        count = min(size.num_rows, len(self._sampled_tokens))

        def run() -> Tensor:
            tokens = self._sample(step.logits, inputs, results)
            self._sampled_tokens[:count] = tokens[:count]
            return results

        captured = self._capture(run)
        if captured is None:
            return None
        return _CapturedSampling(captured[0], inputs, results)

    def _capture(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Captures work in a graph, and returns its output; None if it cannot be captured.

        An error of the work itself is raised before the capture, in which nothing is executed.
        """
        # Compiles kernels and allocates what libraries need, outside of the graph.
        stream = _capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        kept = self._sampled_tokens.clone()
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        # A step before this one may have sampled them.
        self._sampled_tokens.copy_(kept)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                out = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._fallback.handle("Steps of the engine", error)
            return None
        return graph, out


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which all graphs of a process are captured.

    cuBLAS keeps a workspace for each stream that it has run on, also when an engine is closed.
    """
    return torch.cuda.Stream(device)


def _num_fields(size: GraphSize) -> int:
    return TOKEN_FIELDS * size.num_tokens + size.num_rows + 1 + SEQUENCE_FIELDS * size.num_rows


def _split_fields(numbers: Numbers, size: GraphSize) -> tuple[Numbers, Numbers, Numbers]:
    """Returns views: fields of tokens `[f, T]`, starts of sequences `[n + 1]`, of rows `[f, n]`."""
    first = TOKEN_FIELDS * size.num_tokens
    second = first + size.num_rows + 1
    return (
        numbers[:first].reshape(TOKEN_FIELDS, size.num_tokens),
        numbers[first:second],
        numbers[second:].reshape(SEQUENCE_FIELDS, size.num_rows),
    )
