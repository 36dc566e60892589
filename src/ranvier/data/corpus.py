"""The embedded corpus: the sources of the running Python's standard library, as bytes.

A document is a file, ended by the token END. Sample number k of a run is a window of the stream;
which one depends on (seed, k) only, so every grid and every batch size read the same samples in the
same order.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.errors import DataError
from ranvier.init import key

END = 256
"""Token that ends a document."""
VOCAB = 257
"""Bytes and END."""


@dataclass(frozen=True)
class Corpus:
    """A stream of tokens, cut into windows of `seq` tokens and their successors."""

    stream: np.ndarray
    seq: int

    @classmethod
    def of(cls, stream: np.ndarray, *, seq: int) -> Corpus:
        """A corpus that holds at least one window."""
        if len(stream) <= seq:
            raise DataError(
                f"The corpus has {len(stream)} tokens. A sample needs {seq + 1} (data.seq={seq} "
                "and the last target). "
                f"Use a longer corpus or data.seq below {max(len(stream), 1)}."
            )
        return cls(stream, seq)

    @property
    def windows(self) -> int:
        """Different samples."""
        return (len(self.stream) - 1) // self.seq

    def window(self, number: int, seed: int) -> int:
        """Which window sample `number` of a run is: a new order of all windows in each epoch."""
        epoch, position = divmod(number, self.windows)
        drawn = key(seed, "order", epoch)
        stride = 1 + drawn % self.windows
        while math.gcd(stride, self.windows) > 1:
            stride += 1
        return (drawn // self.windows + stride * position) % self.windows

    def sample(self, number: int, seed: int) -> np.ndarray:
        """Sample `number` with the token that follows it, `[seq + 1]`."""
        start = self.window(number, seed) * self.seq
        return self.stream[start : start + self.seq + 1]

    def batch(self, first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets `[count, seq]` of samples `first`, `first + 1`, ..."""
        rows = np.stack([self.sample(first + i, seed) for i in range(count)]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def packing(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the document and position in it of each token `[b, s]`.

    END belongs to what it ends.
    """
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == END
    documents = starts.long().cumsum(1)
    index = torch.arange(tokens.shape[1]).expand_as(tokens)
    return documents, index - torch.where(starts, index, 0).cummax(1).values


SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Directories that are no part of the corpus."""


def standard_library(max_bytes: int) -> np.ndarray:
    """The stream of the standard library's modules, sorted by path, at most `max_bytes`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in _sources(root):
        if size >= max_bytes:
            break
        try:
            text = path.read_bytes()[: max_bytes - size]
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}. The default corpus needs it."
            ) from None
        parts += [np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.array([END], "u2")]
        size += len(text)
    if not parts:
        raise DataError(
            f"No Python source under {root}. The default corpus is the standard library's source."
        )
    return np.concatenate(parts)


def _sources(root: Path) -> Iterator[Path]:
    """Python files of a directory, then of the folders below it, sorted."""
    entries = sorted(root.iterdir())
    yield from (path for path in entries if path.suffix == ".py" and path.is_file())
    for folder in entries:
        if folder.name not in SKIPPED and folder.is_dir() and not folder.is_symlink():
            yield from _sources(folder)
