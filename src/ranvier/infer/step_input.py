"""The input of a step: small integer tensors on the host, which the leader sends to all ranks.

The sequences of a step are divided by their home: the ranks that store their keys and values. The
tokens of each home are concatenated and padded at the end, `[homes, T]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ranvier.config.plan import RowSplit
from ranvier.infer.sampling_inputs import SamplingInputs
from ranvier.models.paged_attention import PagedSequences

ROW_SPLITS: tuple[RowSplit, ...] = ("tokens", "none")


@dataclass(frozen=True, eq=False)
class SequenceChunk:
    """Some consecutive tokens of a sequence."""

    tokens: Sequence[int]
    """A negative one, -1 - i, is the i-th token that the step before samples."""
    start: int
    """Position of the first one."""
    num_known_tokens: int
    """Number of known tokens of the sequence, which LongRoPE depends on."""
    blocks: Sequence[int]
    """Blocks of the sequence, at least those of all tokens up to the last one of the chunk. A list
    that only grows: another list has other blocks."""
    adapter: int = 0
    """Number of the adapter of the sequence, from 1; 0 for none."""
    num_iterations: Sequence[int] = ()
    """Number of iterations of each token in a model with recurrent depth; 0 where an early exit
    decides. Empty if all tokens have all iterations."""

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
    has_adapters: bool = False
    """Whether a chunk has an adapter."""
    context_splits: RowSplit = "none"
    """What context splits: the tokens of the step, or nothing."""

    @property
    def num_logits(self) -> int:
        """Number of logits of each home, with padding; at least one, so that no tensor is empty."""
        return max(1, *(home.num_logits for home in self.homes))

    @property
    def has_exits(self) -> bool:
        """Whether the number of iterations differs between tokens."""
        return any(chunk.num_iterations for home in self.homes for chunk in home.chunks)

    def pack(self) -> Tensor:
        """Returns everything as one int64 tensor, for a broadcast."""
        numbers: list[int] = [
            len(self.homes),
            self.num_tokens,
            ROW_SPLITS.index(self.row_splits),
            self.num_top,
            int(self.has_adapters),
            ROW_SPLITS.index(self.context_splits),
        ]
        parts: list[Tensor] = []
        for home in self.homes:
            numbers += [len(home.chunks), len(home.sampled_rows), len(home.scored_rows)]
            for chunk in home.chunks:
                sizes = (len(chunk.tokens), chunk.start, chunk.num_known_tokens, len(chunk.blocks))
                numbers += sizes
                numbers += [chunk.adapter, len(chunk.num_iterations)]
                numbers += chunk.tokens
                numbers += chunk.blocks
                numbers += chunk.num_iterations
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
        num_homes, num_tokens, row_splits, num_top, has_adapters, context_splits = numbers.take(6)
        homes = []
        for _ in range(num_homes):
            num_chunks, num_sampled, num_scored = numbers.take(3)
            chunks = []
            for _ in range(num_chunks):
                size, start, known, num_blocks, adapter, num_limits = numbers.take(6)
                parts_of_chunk = [numbers.take(n) for n in (size, num_blocks, num_limits)]
                tokens, blocks, iterations = parts_of_chunk
                chunks.append(SequenceChunk(tokens, start, known, blocks, adapter, iterations))
            rows = [numbers.take(n) for n in (num_sampled, num_scored, num_scored)]
            num_integers, num_floats = numbers.take(2)
            integers, floats, rest = rest.split(
                [num_integers, num_floats, len(rest) - num_integers - num_floats]
            )
            sampling = SamplingInputs.unpack(integers, floats.view(torch.float64))
            homes.append(HomeInput(chunks, sampling, *rows))
        return cls(
            homes,
            num_tokens,
            ROW_SPLITS[row_splits],
            num_top,
            bool(has_adapters),
            ROW_SPLITS[context_splits],
        )


@dataclass
class _NumberReader:
    """Reads a list of numbers from its start."""

    numbers: list[int]
    place: int = field(default=0, init=False)

    def take(self, count: int) -> list[int]:
        """Returns the next numbers."""
        self.place += count
        return self.numbers[self.place - count : self.place]


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    """Returns rows of numbers as one array, padded with zeros at their end."""
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def token_ids_of(home: HomeInput) -> list[int]:
    """Returns the tokens of all chunks of a home."""
    return [token for chunk in home.chunks for token in chunk.tokens]


def adapters_of(home: HomeInput) -> list[int]:
    """Returns the number of the adapter of each token of a home."""
    return [chunk.adapter for chunk in home.chunks for _ in chunk.tokens]


def iterations_of(home: HomeInput) -> list[int]:
    """Returns the number of iterations of each token of a home; 0 where an early exit decides."""
    return [count for chunk in home.chunks for count in chunk.num_iterations]


def positions_of(home: HomeInput) -> np.ndarray:
    """Returns the position of each token of a home."""
    return _concatenate([np.arange(chunk.start, chunk.stop) for chunk in home.chunks])


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def build_sequences(
    chunks: Sequence[SequenceChunk],
    num_tokens: int,
    block_size: int,
    device: torch.device,
    *,
    context_size: int = 1,
    context_index: int = 0,
) -> PagedSequences:
    """Returns where the tokens of chunks are stored.

    num_tokens: number of tokens with padding. A compiled graph treats a size of one as a special
    case, so that there are always at least two rows. block_size: tokens of a block on this rank.
    context_size, context_index: as in `PagedSequences`.
    """
    num_rows = max(len(chunks), 2)
    table = np.zeros((num_rows, max([len(chunk.blocks) for chunk in chunks] + [2])), np.int64)
    lens = np.zeros((2, num_rows), dtype=np.int64)
    per_token = np.zeros((4, num_tokens), dtype=np.int64)
    first = 0
    for row, chunk in enumerate(chunks):
        table[row, : len(chunk.blocks)] = chunk.blocks
        lens[:, row] = len(chunk.tokens), chunk.stop
        places = np.arange(chunk.start, chunk.stop)
        own = slice(first, first + len(places))
        page, offset = np.divmod(places, block_size)
        slots = table[row, page // context_size] * block_size + offset
        # The keys of other ranks are written to block 0.
        per_token[0, own] = np.where(page % context_size == context_index, slots, 0)
        per_token[1, own] = chunk.num_known_tokens
        per_token[2, own] = row
        per_token[3, own] = places + 1
        first += len(places)
    arrays = [per_token, lens[1], table, _starts_of(lens[0])]
    (slot_mapping, known, rows, visible), seq_lens, blocks, starts = copy_together(arrays, device)
    return PagedSequences(
        query_start_loc=starts.int(),
        seq_lens=seq_lens.int(),
        block_table=blocks.int(),
        slot_mapping=slot_mapping,
        rope_lengths=known.unsqueeze(0),
        token_rows=rows.int(),
        token_lens=visible.int(),
        host_lens=torch.from_numpy(lens),
        context_size=context_size,
        context_index=context_index,
    )


def _starts_of(lengths: np.ndarray) -> np.ndarray:
    """Returns where each of consecutive parts starts, then the end."""
    return np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])


def copy_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies int64 arrays to a device with one transfer, which does not wait for the device."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
