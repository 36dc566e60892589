"""Window: a sample of a corpus."""

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
    """The next token; IGNORE where there is none."""
    positions: Ints
    """Place in the document, as far as it lies in this window."""
    documents: Ints
    """Number of the document in this window."""

    @classmethod
    def without_targets(cls, seq: int) -> Window:
        """A window without any target."""
        zeros = np.zeros(seq, np.int64)
        return cls(zeros, np.full(seq, IGNORE_INDEX, np.int64), np.arange(seq), zeros)
