"""Batch: the samples of a step or of a part of it, as tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ranvier.grid import Grid


@dataclass(frozen=True)
class Batch:
    """Samples of a step or of a part of it; all `[b, s]` but `samples`, `[b]`."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    samples: Tensor | None = None
    """Number in the run of each sample."""

    def select(self, rows: slice) -> Batch:
        """Some of the samples."""
        return Batch(*(None if x is None else x[rows] for x in self._tensors()))  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        return Batch(*(None if x is None else x.to(device) for x in self._tensors()))  # type: ignore[arg-type]

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, one.name) for one in fields(self)]

    def inputs(self) -> dict[str, Tensor]:
        """What the model is called with."""
        names = ("tokens", "targets", "positions", "documents")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def micro_batches(self, grid: Grid, size: int) -> list[Batch]:
        """The micro-batches of this rank: its contiguous share of the samples, `size` at a time."""
        axis = grid.axis("data", "expert", "depth")
        share, rest = divmod(self.tokens.shape[0], axis.size)
        assert rest == 0 and share % size == 0, (self.tokens.shape, axis.size, size)
        mine = self.select(slice(axis.index * share, (axis.index + 1) * share))
        return [mine.select(slice(i, i + size)) for i in range(0, share, size)]
