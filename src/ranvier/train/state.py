"""The training state: everything that steps change and checkpoints store.

The parts of a run (checkpoints, pruning, adapters) take it, or a part of it, instead of the
trainer. Settings and data are not part of it, because steps do not change them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ranvier.grid import Grid
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.train.health.loss_guard import LossGuard


@dataclass
class TrainState:
    """Model, optimizer and counters of a run on this rank."""

    model: nn.Module
    optimizer: Optimizer
    guard: LossGuard
    step: int = 0
    """Number of steps issued."""
    samples: int = 0
    """Number of samples consumed: the position in the data."""
    val_loss: float | None = None
    """The latest validation loss."""

    @property
    def parallel(self) -> ParallelModel:
        """The layers, weights and pipeline of the model."""
        return get_parallel_model(self.model)

    @property
    def grid(self) -> Grid:
        """The grid that the model is parallelized on."""
        return self.parallel.grid

    @property
    def device(self) -> torch.device:
        """The device on which steps run."""
        return self.parallel.pipeline.executor.device
