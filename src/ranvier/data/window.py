"""Window: one sample of a corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ranvier.nn.cross_entropy import IGNORE_INDEX

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
