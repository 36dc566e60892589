"""CUDA graphs of decode steps: every sequence has one token, and the host only copies its inputs.

There is a graph for each class of batch sizes, captured at its first use. A smaller batch is padded
with rows of length 0, which write to block 0 and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ranvier.infer.step_input import HomeInput, StepInput
from ranvier.models.paged_attention import PagedSequences

FIELDS = 5
"""Numbers of a row before its blocks: token, position, slot, length, known tokens."""
WARMUP_RUNS = 2
ForwardPass = Callable[[Tensor, Tensor, PagedSequences, Tensor], Tensor]
"""Tokens, positions, sequences and rows of logits to logits `[n, v]`."""


def batch_class(size: int) -> int:
    """Returns the smallest captured batch size that is not less than `size`.

    They are 1, 2, 4, 8, then multiples of 8 up to 64, and of 16 above.
    """
    for known in (1, 2, 4, 8):
        if size <= known:
            return known
    step = 8 if size <= 64 else 16
    return -(-size // step) * step


@dataclass
class _CapturedStep:
    """A graph with its inputs and its output."""

    graph: torch.cuda.CUDAGraph
    host: Tensor
    """Numbers of all rows, in pinned memory, `[n, FIELDS + blocks]`."""
    device: Tensor
    """The same on the device."""
    rows: Tensor
    """Index of each row; the graph reads it, so it must stay alive."""
    copied: torch.cuda.Event
    """When the last copy of `host` has ended."""
    logits: Tensor


class DecodeGraphs:
    """Runs decode steps of a model on one GPU as CUDA graphs.

    Args:
        forward: The forward pass of the model.
        block_size: Number of tokens of a block.
        max_blocks: Maximum number of blocks of a sequence.
        max_batch: Maximum number of sequences of a step.
    """

    def __init__(
        self, forward: ForwardPass, *, block_size: int, max_blocks: int, max_batch: int
    ) -> None:
        self._forward = forward
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._max_batch = max_batch
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[int, _CapturedStep] = {}

    def accepts(self, step: StepInput) -> bool:
        """Whether a step is a decode step, with only sampled logits."""
        (home,) = step.homes
        return (
            0 < len(home.chunks) <= self._max_batch
            and not home.scored_rows
            and len(home.sampled_rows) == len(home.chunks)
            and all(len(chunk.tokens) == 1 for chunk in home.chunks)
        )

    def run(self, home: HomeInput) -> Tensor:
        """Returns the logits of all sequences, `[n, v]`; overwritten by the next step."""
        count = len(home.chunks)
        size = batch_class(count)
        if size not in self._steps:
            self._steps[size] = self._capture(size)
        step = self._steps[size]
        # The host must not overwrite what is still being copied.
        step.copied.synchronize()
        self._fill(step.host.numpy(), home)
        step.device.copy_(step.host, non_blocking=True)
        step.copied.record()
        step.graph.replay()
        return step.logits[:count]

    def _fill(self, rows: np.ndarray, home: HomeInput) -> None:
        """Writes the numbers of all sequences; other rows are padding."""
        rows[len(home.chunks) :, :FIELDS] = 0
        for row, chunk in zip(rows, home.chunks, strict=False):
            place = chunk.start
            slot = chunk.blocks[-1] * self._block_size + place % self._block_size
            row[:FIELDS] = (chunk.tokens[0], place, slot, chunk.stop, chunk.num_known_tokens)
            row[FIELDS : FIELDS + len(chunk.blocks)] = chunk.blocks

    def _capture(self, size: int) -> _CapturedStep:
        """Captures the step of a batch size."""
        host = torch.zeros(size, FIELDS + self._max_blocks, dtype=torch.int64).pin_memory()
        device = host.cuda()
        tokens, positions, slots, lengths, known = device[:, :FIELDS].unbind(1)
        rows = torch.arange(size, device="cuda")

        def run() -> Tensor:
            sequences = PagedSequences(
                rows,
                lengths.contiguous(),
                device[:, FIELDS:],
                slots.contiguous(),
                known.unsqueeze(0),
                is_decode=True,
            )
            return self._forward(
                tokens.unsqueeze(0), positions.unsqueeze(0), sequences, rows.unsqueeze(0)
            )

        # Compiles kernels and allocates what libraries need, outside of the graph.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        copied = torch.cuda.Event()
        copied.record()
        return _CapturedStep(graph, host, device, rows, copied, logits)
