"""The input of a step: small integer tensors on the host, which the leader sends to all ranks.

The sequences of a step are divided by their home: the ranks that store their keys and values. The
tokens of each home are concatenated and padded at the end, `[homes, T]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ranvier.config.plan import RowSplit
from ranvier.infer.sampling_inputs import SamplingInputs

ROW_SPLITS: tuple[RowSplit, ...] = ("tokens", "none")


@dataclass(frozen=True, eq=False)
class SequenceChunk:
    """Some consecutive tokens of a sequence."""

    tokens: Sequence[int]
    start: int
    """Position of the first one."""
    num_known_tokens: int
    """Number of known tokens of the sequence, which LongRoPE depends on."""
    blocks: Sequence[int]
    """Blocks of all tokens up to the last one of the chunk."""

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class HomeInput:
    """The part of a step that belongs to one home."""

    chunks: Sequence[SequenceChunk]
    sampling: SamplingInputs
    """How the next token of some chunks is sampled."""
    sampled_rows: Sequence[int] = ()
    """Token of the step after which each of them is sampled."""
    scored_rows: Sequence[int] = ()
    """Tokens of the step after which the log-probability of a known token is computed."""
    scored_tokens: Sequence[int] = ()
    """These known tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_logits(self) -> int:
        """Number of tokens whose logits are computed."""
        return len(self.sampled_rows) + len(self.scored_rows)


@dataclass(frozen=True, eq=False)
class StepInput:
    """The input of a step, equal on all ranks."""

    homes: Sequence[HomeInput]
    num_tokens: int
    """Number of tokens of each home, with padding."""
    row_splits: RowSplit = "tokens"
    num_top: int = -1
    """Number of most likely tokens whose log-probabilities are returned; -1 returns none."""

    @property
    def num_logits(self) -> int:
        """Number of logits of each home, with padding; at least one, so that no tensor is empty."""
        return max(1, *(home.num_logits for home in self.homes))

    def pack(self) -> Tensor:
        """Returns everything as one int64 tensor, for a broadcast."""
        numbers: list[int] = [
            len(self.homes),
            self.num_tokens,
            ROW_SPLITS.index(self.row_splits),
            self.num_top,
        ]
        parts: list[Tensor] = []
        for home in self.homes:
            numbers += [len(home.chunks), len(home.sampled_rows), len(home.scored_rows)]
            for chunk in home.chunks:
                sizes = (len(chunk.tokens), chunk.start, chunk.num_known_tokens, len(chunk.blocks))
                numbers += [*sizes, *chunk.tokens, *chunk.blocks]
            numbers += [*home.sampled_rows, *home.scored_rows, *home.scored_tokens]
            integers, floats = home.sampling.pack()
            numbers += [len(integers), len(floats)]
            parts += [integers, floats.view(torch.int64)]
        return torch.cat([torch.tensor([len(numbers), *numbers]), *parts])

    @classmethod
    def unpack(cls, packed: Tensor) -> StepInput:
        """Returns the input that was packed into a tensor on the host."""
        count = int(packed[0])
        numbers = _NumberReader(packed[1 : 1 + count].tolist())
        rest = packed[1 + count :]
        num_homes, num_tokens, row_splits, num_top = numbers.take(4)
        homes = []
        for _ in range(num_homes):
            num_chunks, num_sampled, num_scored = numbers.take(3)
            chunks = []
            for _ in range(num_chunks):
                size, start, known, num_blocks = numbers.take(4)
                tokens, blocks = numbers.take(size), numbers.take(num_blocks)
                chunks.append(SequenceChunk(tokens, start, known, blocks))
            rows = [numbers.take(n) for n in (num_sampled, num_scored, num_scored)]
            num_integers, num_floats = numbers.take(2)
            integers, floats, rest = rest.split(
                [num_integers, num_floats, len(rest) - num_integers - num_floats]
            )
            sampling = SamplingInputs.unpack(integers, floats.view(torch.float64))
            homes.append(HomeInput(chunks, sampling, *rows))
        return cls(homes, num_tokens, ROW_SPLITS[row_splits], num_top)


@dataclass
class _NumberReader:
    """Reads a list of numbers from its start."""

    numbers: list[int]
    place: int = field(default=0, init=False)

    def take(self, count: int) -> list[int]:
        """Returns the next numbers."""
        self.place += count
        return self.numbers[self.place - count : self.place]


def pad_rows(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """Returns rows of numbers as one tensor, padded with zeros at their end."""
    padded = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor([*row], dtype=torch.int64)
    return padded


def positions_of(home: HomeInput) -> Iterator[int]:
    """Yields the position of each token of a home."""
    for chunk in home.chunks:
        yield from range(chunk.start, chunk.stop)
