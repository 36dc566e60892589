"""Batch: samples of a step or of a micro-batch as tensors.

Window: one sample of a corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ranvier.grid import Grid
from ranvier.models.document_attention import Documents
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.sharding import REPLICA_AXES

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Window:
    """A sample; all int64 `[seq]`."""

    tokens: Ints
    targets: Ints
    """The next token; IGNORE_INDEX where there is none."""
    positions: Ints
    """Position within the document, counted from its first token in this window."""
    documents: Ints
    """Index of the document within this window."""

    @classmethod
    def without_targets(cls, seq: int) -> Window:
        """A window without any target."""
        zeros = np.zeros(seq, np.int64)
        return cls(zeros, np.full(seq, IGNORE_INDEX, np.int64), np.arange(seq), zeros)


@dataclass(frozen=True)
class Batch:
    """Samples of a step or of a micro-batch; all `[b, s]` but `samples`, `[b]`."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Documents | Tensor | None = None
    """Document ids, equal for neighbours in one document; on a device the boundaries themselves."""
    samples: Tensor | None = None
    """Index of each sample in the run."""

    def select(self, rows: slice) -> Batch:
        """A slice of the samples."""
        return self._map_tensors(
            lambda x: x.select_samples(rows) if isinstance(x, Documents) else x[rows]
        )

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        batch = self
        if isinstance(self.documents, Tensor):
            batch = replace(self, documents=Documents.from_ids(self.documents, device))
        return batch._map_tensors(
            lambda x: x if isinstance(x, Documents) else x.to(device, non_blocking=True)
        )

    def pin_memory(self) -> Batch:
        """The batch in pinned memory, for asynchronous copies to a device."""
        return self._map_tensors(lambda x: x if isinstance(x, Documents) else x.pin_memory())

    def _map_tensors(self, change: Callable[[Any], Any]) -> Batch:
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        changed: Any = {name: x if x is None else change(x) for name, x in values}
        return Batch(**changed)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        names = ("tokens", "targets", "positions", "documents")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def split_micro_batches(self, grid: Grid, size: int) -> list[Batch]:
        """This rank's micro-batches: its contiguous share of the samples, `size` at a time."""
        axis = grid.axis_without_group(*REPLICA_AXES)
        share, rest = divmod(self.tokens.shape[0], axis.size)
        assert rest == 0 and share % size == 0, (self.tokens.shape, axis.size, size)
        mine = self.select(slice(axis.index * share, (axis.index + 1) * share))
        return [mine.select(slice(i, i + size)) for i in range(0, share, size)]
