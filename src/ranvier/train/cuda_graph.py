"""A whole training step as one CUDA graph, for models that are bound by kernel launches.

Forward, backward and update are captured once and then replayed: the host only copies the batch and
the learning rate into the static inputs of the graph. Every step must do the same work: one rank,
no document masks inside samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import nn

from ranvier.data.batch import SampleBatch
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import StepLimits, StepResult, train_step

WARMUP_STEPS = 3
"""Eager steps before the capture, in which compilers and libraries initialize themselves."""


class CudaGraphStep:
    """`train_step`, captured after a few eager steps and replayed from then on."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps_taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.is_eager = False
        """Whether the step could not be captured."""

    def step(self, batches: Sequence[SampleBatch], lr: float, watch: StepLimits) -> StepResult:
        """Run one step, as `train_step` does."""
        self.steps_taken += 1
        if self.graph is None and not self.is_eager and self.steps_taken > WARMUP_STEPS:
            self._capture_step(batches, watch)
        if self.graph is None:
            return train_step(self.model, self.optimizer, batches, lr, watch)
        # The copies are ordered before the replay, which runs on the same stream.
        for mine, batch in zip(self.static_batches, batches, strict=True):
            for one in fields(batch):
                value = getattr(batch, one.name)
                if value is not None:
                    getattr(mine, one.name).copy_(value, non_blocking=True)
        self.static_lr.fill_(lr)
        self.graph.replay()
        return self.static_result

    def _capture_step(self, batches: Sequence[SampleBatch], watch: StepLimits) -> None:
        """Capture a step without executing it. The tensors of `watch` are read in place."""
        self.static_batches = [batch.map_tensors(lambda x: x.clone()) for batch in batches]
        self.static_lr = torch.zeros((), dtype=torch.float64, device=watch.nonfinite_steps.device)
        torch.cuda.synchronize()
        # The graph has its own memory pool and cannot use blocks that are cached outside of it.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            # The loader's thread pins the next batch meanwhile, which the default mode would
            # forbid.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.static_result = train_step(
                    self.model, self.optimizer, self.static_batches, self.static_lr, watch
                )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            get_parallel_model(self.model).compile_fallback.handle("Training steps", error)
            self.is_eager = True
            return
        self.graph = graph
