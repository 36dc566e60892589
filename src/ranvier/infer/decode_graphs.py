"""CUDA graphs of decode steps: every sequence has one token, and the host only copies its inputs.

There is a graph for each class of batch sizes. A smaller batch is padded with rows of length 0,
which write to block 0 and attend to nothing. Sampling is a second, small graph, because it also
depends on the parameters of the requests; parameters that need tensors of other sizes (masks,
biases, penalties, log-probabilities) are sampled without a graph.

The input tokens of a step may be those that the step before samples; they never leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ranvier.infer.sampling_inputs import SamplingFlags, SamplingInputs
from ranvier.infer.step_input import HomeInput, SequenceChunk, StepInput
from ranvier.models.paged_attention import PagedSequences

STEP_FIELDS = 5
"""Numbers of a sequence: token, position, slot, length and number of known tokens."""
SAMPLING_INTEGERS = ("keys", "positions", "top_k")
SAMPLING_FLOATS = ("temperatures", "top_p", "log_min_p")
NUM_FIELDS = STEP_FIELDS + len(SAMPLING_INTEGERS) + len(SAMPLING_FLOATS)
WARMUP_RUNS = 2
ForwardPass = Callable[[Tensor, Tensor, PagedSequences, Tensor], Tensor | None]
"""Tokens, positions, sequences and rows of logits to logits `[n, v]`."""
Sampler = Callable[[Tensor, SamplingInputs, Tensor], None]
"""Logits, their parameters, and the results to write."""


def batch_class(size: int) -> int:
    """Returns the smallest captured batch size that is not less than `size`.

    They are 1, 2, 4, 8, then multiples of 8 up to 64, and of 16 above.
    """
    for known in (1, 2, 4, 8):
        if size <= known:
            return known
    step = 8 if size <= 64 else 16
    return -(-size // step) * step


def batch_classes(max_batch: int) -> Iterator[int]:
    """Yields all captured batch sizes, the largest first, so that others reuse its memory."""
    size = batch_class(max_batch)
    while size > 0:
        yield size
        smaller = [one for one in range(size) if batch_class(one + 1) == one + 1]
        size = smaller[-1] + 1 if smaller else 0


@dataclass
class _CapturedStep:
    """The forward pass of a batch size."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    """Fields of all sequences, int64 `[NUM_FIELDS, n]`."""
    rows: Tensor
    """Index of each row; the graph reads it, so it must stay alive."""
    logits: Tensor


@dataclass
class _CapturedSampling:
    """The sampling of a batch size and of some flags."""

    graph: torch.cuda.CUDAGraph
    inputs: SamplingInputs
    """Its tensors, which must stay alive."""
    results: Tensor


class DecodeGraphs:
    """Runs decode steps of a model on one GPU as CUDA graphs.

    Args:
        forward: The forward pass of the model.
        sample: Samples tokens from logits.
        sampled_tokens: Tokens that the last step sampled; every step reads and writes them.
        block_size: Number of tokens of a block.
        max_blocks: Maximum number of blocks of a sequence.
        max_batch: Maximum number of sequences of a step.
    """

    def __init__(
        self,
        forward: ForwardPass,
        sample: Sampler,
        sampled_tokens: Tensor,
        *,
        block_size: int,
        max_blocks: int,
        max_batch: int,
    ) -> None:
        self._forward = forward
        self._sample = sample
        self._sampled_tokens = sampled_tokens
        self._block_size = block_size
        self._max_batch = max_batch
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[int, _CapturedStep] = {}
        self._samplings: dict[tuple[int, SamplingFlags], _CapturedSampling] = {}
        size = batch_class(max_batch)
        self._block_table = torch.zeros(size, max_blocks, dtype=torch.int32, device="cuda")
        self._host_table = np.zeros((size, max_blocks), dtype=np.int32)
        self._written: list[tuple[Sequence[int], int]] = [((), 0)] * size
        """Blocks of each row of the table, and how many of them were written."""
        self.logits = torch.empty(0, device="cuda")
        """Logits of the last step `[n, v]`; overwritten by the next one."""

    def accepts(self, step: StepInput) -> bool:
        """Whether a step is a decode step, with only sampled logits."""
        (home,) = step.homes
        return (
            0 < len(home.chunks) <= self._max_batch
            and not home.scored_rows
            and len(home.sampled_rows) == len(home.chunks)
            and all(len(chunk.tokens) == 1 for chunk in home.chunks)
        )

    def capture_all(self, report: Callable[[int, int], None] | None = None) -> None:
        """Captures the forward passes of all batch sizes, and greedy and plain sampling.

        report: called with the number of captured sizes and of all sizes.
        """
        sizes = [*batch_classes(self._max_batch)]
        for i, size in enumerate(sizes):
            step = self._step_of(size)
            for flags in (SamplingFlags(), SamplingFlags(is_greedy=False)):
                self._sampling_of(step, size, flags)
            if report is not None:
                report(i + 1, len(sizes))

    def run(self, home: HomeInput) -> Tensor | None:
        """Returns the results of all sequences, `[n, 1]`: tokens.

        None if they are not sampled yet: the caller samples from `logits`.
        """
        count = len(home.chunks)
        size = batch_class(count)
        step = self._step_of(size)
        numbers = torch.from_numpy(self._numbers_of(home, size)).pin_memory()
        step.numbers.copy_(numbers, non_blocking=True)
        self._update_table(home.chunks)
        step.graph.replay()
        flags = home.sampling.flags
        if flags.has_bias or flags.has_masks or flags.has_penalties or flags.num_logprobs >= 0:
            self.logits = step.logits[:count]
            return None
        sampling = self._sampling_of(step, size, flags)
        sampling.graph.replay()
        # The next step overwrites them, maybe before the host has read them.
        return sampling.results[:count].clone()

    def _numbers_of(self, home: HomeInput, size: int) -> np.ndarray:
        """Returns the fields of all sequences, `[NUM_FIELDS, size]`; other rows are padding."""
        block_size = self._block_size
        numbers = np.zeros((NUM_FIELDS, size), dtype=np.int64)
        numbers[:STEP_FIELDS, : len(home.chunks)] = np.array(
            [
                (
                    chunk.tokens[0],
                    place := chunk.start,
                    chunk.blocks[place // block_size] * block_size + place % block_size,
                    place + 1,
                    chunk.num_known_tokens,
                )
                for chunk in home.chunks
            ]
        ).T
        for row, name in enumerate((*SAMPLING_INTEGERS, *SAMPLING_FLOATS), STEP_FIELDS):
            values = getattr(home.sampling, name).view(torch.int64).numpy()
            numbers[row, : len(values)] = values
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
            on_device = torch.from_numpy(part).pin_memory().to("cuda", non_blocking=True)
            self._block_table[: len(chunks), :width] = on_device

    def _step_of(self, size: int) -> _CapturedStep:
        if size not in self._steps:
            self._steps[size] = self._capture_step(size)
        return self._steps[size]

    def _sampling_of(
        self, step: _CapturedStep, size: int, flags: SamplingFlags
    ) -> _CapturedSampling:
        if (size, flags) not in self._samplings:
            self._samplings[size, flags] = self._capture_sampling(step, size, flags)
        return self._samplings[size, flags]

    def _capture_step(self, size: int) -> _CapturedStep:
        """Captures the forward pass of a batch size."""
        numbers = torch.zeros(NUM_FIELDS, size, dtype=torch.int64, device="cuda")
        tokens, positions, slots, lengths, known = numbers[:STEP_FIELDS].unbind(0)
        rows = torch.arange(size, device="cuda")

        def run() -> Tensor:
            sequences = PagedSequences(
                query_start_loc=rows,
                seq_lens=lengths,
                block_table=self._block_table[:size],
                slot_mapping=slots,
                rope_lengths=known.unsqueeze(0),
                token_rows=rows,
                token_lens=lengths,
            )
            sampled = self._sampled_tokens[(-1 - tokens).clamp(min=0)]
            inputs = torch.where(tokens < 0, sampled, tokens)
            logits = self._forward(
                inputs.unsqueeze(0), positions.unsqueeze(0), sequences, rows.unsqueeze(0)
            )
            assert logits is not None, "one GPU has the last stage"
            return logits

        graph, logits = self._capture(run)
        return _CapturedStep(graph, numbers, rows, logits)

    def _capture_sampling(
        self, step: _CapturedStep, size: int, flags: SamplingFlags
    ) -> _CapturedSampling:
        """Captures the sampling of a batch size."""
        names = (*SAMPLING_INTEGERS, *SAMPLING_FLOATS)
        fields = dict(zip(names, step.numbers[STEP_FIELDS:].unbind(0), strict=True))
        fields |= {name: fields[name].view(torch.float64) for name in SAMPLING_FLOATS}
        inputs = SamplingInputs.without_entries(flags, **fields)
        results = torch.zeros(size, 1, dtype=torch.float64, device="cuda")
        count = min(size, len(self._sampled_tokens))

        def run() -> Tensor:
            self._sample(step.logits, inputs, results)
            self._sampled_tokens[:count] = results[:count, 0].long().clamp(min=0)
            return results

        graph, results = self._capture(run)
        return _CapturedSampling(graph, inputs, results)

    def _capture(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures work in a graph, and returns its output."""
        # Compiles kernels and allocates what libraries need, outside of the graph.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        kept = self._sampled_tokens.clone()
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        # A step before this one may have sampled them.
        self._sampled_tokens.copy_(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        return graph, out
