"""Graph: a whole step as one CUDA graph, for models whose kernels end before the next is launched.

Forward, backward and update are recorded once and then replayed: the host only copies the batch and
the learning rate to where the graph reads them. A step must always be the same work: one rank, no
documents inside samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import nn

from ranvier.data.batch import Batch
from ranvier.optim.optimizer import Optimizer
from ranvier.train.step import StepLimits, StepResult, train_step

WARMUP_STEPS = 3
"""Steps taken one kernel at a time before one is recorded: compilers and libraries settle."""


class CudaGraphStep:
    """`train_step`, recorded after a few steps and replayed from then on."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps_taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, batches: Sequence[Batch], lr: float, watch: StepLimits) -> StepResult:
        """One update, as `train_step`."""
        self.steps_taken += 1
        if self.steps_taken <= WARMUP_STEPS:
            return train_step(self.model, self.optimizer, batches, lr, watch)
        if self.graph is None:
            self._capture_step(batches, watch)
        for mine, batch in zip(self.static_batches, batches, strict=True):
            for one in fields(batch):
                value = getattr(batch, one.name)
                if value is not None:
                    getattr(mine, one.name).copy_(value, non_blocking=True)
        self.static_lr.fill_(lr)
        assert self.graph is not None
        self.graph.replay()
        return self.static_result

    def _capture_step(self, batches: Sequence[Batch], watch: StepLimits) -> None:
        """Record a step; recording it does not take it. What it watches is read where it lies."""
        self.static_batches = [batch._map_tensors(lambda x: x.clone()) for batch in batches]
        self.static_lr = torch.zeros((), dtype=torch.float64, device=watch.nonfinite_steps.device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has memory of its own
        self.graph = torch.cuda.CUDAGraph()
        # other threads, which pin the next batch, may go on meanwhile
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.static_result = train_step(
                self.model, self.optimizer, self.static_batches, self.static_lr, watch
            )
