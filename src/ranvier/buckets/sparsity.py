"""Sparsity masks: the kept elements of a pruned bucket, and dense <-> compressed conversion.

Working weights remain dense, with zeros, as dense matmuls are faster. Gradients, master weights and
moments contain only the kept elements, one after the other (SAMO). The mask is stored once for all
of them, as bits (1/8 byte per element) or as int32 positions (4 bytes per kept element), whichever
is smaller. Positions are derived from bits temporarily, one chunk at a time; the number of kept
elements between two chunk bounds is known on the host, which therefore never waits for a device.

With depth > 1, ranks compress the gradient of the gathered weights `[depth, size]` before its
reduction, so each stores the bits of all depth ranks. All compressed rows have the length of the
longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 2**24
"""Number of elements whose positions are computed at once; limits temporary memory."""


def pack_bits(mask: Tensor) -> Tensor:
    """Packs bools `[n]` into bits `[ceil(n / 8)]`, the first into the lowest bit."""
    places = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    found = []
    for part in mask.split(CHUNK):
        whole = torch.nn.functional.pad(part.to(torch.uint8), (0, -len(part) % 8))
        found.append((whole.view(-1, 8) * places).sum(1, dtype=torch.uint8))
    return torch.cat(found)


def unpack_bits(bits: Tensor) -> Tensor:
    """Unpacks bits `[..., n]` to bools `[..., 8 n]`."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (((bits.unsqueeze(-1) >> places) & 1) > 0).flatten(-2)


@dataclass(frozen=True)
class CompressedTensor:
    """A sparse tensor: the kept values and their positions."""

    values: Tensor
    """The kept values, flat; empty for a mask, whose kept elements are all one."""
    bits: Tensor
    """Bit mask of the kept elements, on the host."""
    size: int
    """Number of elements, including zeros."""


class SparsityMask:
    """The kept elements of a bucket, on all ranks of its depth axis."""

    def __init__(
        self, bits: Tensor, size: int, edges: Sequence[int], *, mine: int, ranks: int
    ) -> None:
        """bits: masks of all depth ranks, `[depth, ceil(size / 8)]`. edges: bounds of the weights.

        mine: row of this rank. ranks: number of equal ranges of a compressed row (replicas).
        """
        self.size = size
        self.row_index = mine
        self.device = bits.device
        self._bits: Tensor | None = bits
        self._index: Tensor | None = None
        self._chunk_bounds = sorted({0, size, *edges, *range(0, size, CHUNK)})
        # The only synchronization with the device: later all counts are available on the host.
        sums = [
            self._mask_window(0, len(bits), a, b).sum(1) for a, b in pairwise(self._chunk_bounds)
        ]
        zero = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
        before = torch.stack([zero, *sums], 1).cumsum(1).tolist()
        self._counts_before: list[dict[int, int]] = [
            dict(zip(self._chunk_bounds, row, strict=True)) for row in before
        ]
        """Number of kept elements before each chunk bound, by row."""
        self.row_counts = [row[-1] for row in before]
        """Number of kept elements of each depth rank."""
        self.compressed_size = -(-max(self.row_counts) // ranks) * ranks
        """Elements of a compressed row: the longest, rounded up to a multiple of `ranks`."""
        # int32 positions are smaller than bits if fewer than 1 in 32 elements are kept.
        if 4 * sum(self.row_counts) < bits.numel() and size < 2**31:
            self._index = self._all_positions().to(torch.int32)
            self._bits = None
        self._position_cache: dict[int, int] = {}
        step = self.compressed_size // ranks
        inner = [self.dense_position(i * step) for i in range(1, ranks)]
        self.shard_bounds = [0, *inner, size]
        """Dense start positions of the equal ranges of this rank's compressed row, then the end."""

    @property
    def num_bytes(self) -> int:
        """Memory of the mask in bytes."""
        return sum(x.nbytes for x in (self._bits, self._index) if x is not None)

    def compressed_offset(self, position: int) -> int:
        """Returns the compressed offset of a weight that begins at `position` of the bucket."""
        return self._counts_before[self.row_index][position]

    # ---- positions ----------------------------------------------------------------------

    def _mask_window(self, first: int, last: int, a: int, b: int) -> Tensor:
        """Returns whether elements `a` to `b` of some rows are kept, from bits."""
        assert self._bits is not None
        # Unpack whole bytes, then remove the bits outside of the range.
        low = a // 8
        return unpack_bits(self._bits[first:last, low : -(-b // 8)])[:, a - 8 * low : b - 8 * low]

    def _all_positions(self) -> Tensor:
        """Returns the positions of the kept elements in their rows, one row after the other."""
        return torch.cat(
            [
                self._positions_between(row, row + 1, a, b) + a
                for row in range(len(self.row_counts))
                for a, b in pairwise(self._chunk_bounds)
            ]
        )

    def _positions_between(self, first: int, last: int, a: int, b: int) -> Tensor:
        """Returns positions of kept elements between chunk bounds, in a flat `[rows, b - a]`."""
        counts = [before[b] - before[a] for before in self._counts_before[first:last]]
        if self._bits is not None:
            mask = self._mask_window(first, last, a, b).reshape(-1)
            # The size is known, so nonzero does not need to synchronize with the host.
            return torch.nonzero_static(mask, size=sum(counts)).reshape(-1)
        assert self._index is not None
        found = []
        for row, count in enumerate(counts):
            start = sum(self.row_counts[: first + row]) + self._counts_before[first + row][a]
            part = self._index[start : start + count].to(torch.int64)
            found.append(part + (row * (b - a) - a))
        return torch.cat(found)

    def _iter_positions(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yields the positions of elements `start` to `stop` of this rank's compressed row.

        Each chunk of positions comes with its bounds in that row.
        """
        before = self._counts_before[self.row_index]
        for a, b in pairwise(self._chunk_bounds):
            low = max(before[a], start)
            high = min(before[b], stop)
            if low < high:
                index = self._positions_between(self.row_index, self.row_index + 1, a, b)
                yield low, high, index[low - before[a] : high - before[a]] + a

    def dense_position(self, number: int) -> int:
        """Returns the dense position of the element `number` of the compressed row, or the end."""
        # Cached, as only a few bounds are needed, and each lookup synchronizes.
        if number not in self._position_cache:
            found = [index for _, _, index in self._iter_positions(number, number + 1)]
            if found:
                self._position_cache[number] = int(found[0])
            else:
                self._position_cache[number] = self.size
        return self._position_cache[number]

    def dense_mask(self, low: int, high: int) -> Tensor:
        """Returns whether the elements `low` to `high` of this rank are kept."""
        found = [torch.zeros(0, dtype=torch.bool, device=self.device)]
        for a, b in pairwise(self._chunk_bounds):
            if a < high and low < b:
                if self._bits is not None:
                    part = self._mask_window(self.row_index, self.row_index + 1, a, b)[0]
                else:
                    index = self._positions_between(self.row_index, self.row_index + 1, a, b)
                    part = torch.zeros(b - a, dtype=torch.bool, device=self.device)
                    part[index] = True
                found.append(part[max(low - a, 0) : high - a])
        return torch.cat(found)

    # ---- dense <-> compressed -----------------------------------------------------------

    @torch.no_grad()
    def compress_range(self, dense: Tensor, origin: int, start: int, stop: int) -> Tensor:
        """Returns elements `start` to `stop` of the compressed row; padding is zero.

        dense: flat tensor that begins at position `origin`.
        """
        out = dense.new_zeros(stop - start)
        for low, high, index in self._iter_positions(start, stop):
            torch.index_select(dense, 0, index - origin, out=out[low - start : high - start])
        return out

    @torch.no_grad()
    def write_dense(self, dense: Tensor, origin: int, start: int, values: Tensor) -> None:
        """Writes elements of the compressed row, from `start`, to a dense tensor."""
        for low, high, index in self._iter_positions(start, start + values.numel()):
            part = values[low - start : high - start].to(dense)
            dense.index_copy_(0, index - origin, part)

    @torch.no_grad()
    def add_to_compressed(self, into: Tensor, dense: Tensor, start: int) -> None:
        """Adds dense elements of all rows, from position `start`, to compressed rows.

        into: `[depth, compressed_size]`; dense: `[depth, n]`.
        """
        stop = start + dense.shape[1]
        rows = len(self.row_counts)
        for a, b in pairwise(self._chunk_bounds):
            # Bounds of weights are chunk bounds, so a chunk is inside or outside of a weight.
            if a < start or b > stop:
                continue
            part = dense[:, a - start : b - start].reshape(-1)[
                self._positions_between(0, rows, a, b)
            ]
            spans = [(before[a], before[b]) for before in self._counts_before]
            for row, one in enumerate(part.split([high - low for low, high in spans])):
                into[row, slice(*spans[row])] += one

    @torch.no_grad()
    def zero_pruned(self, dense: Tensor) -> None:
        """Sets the pruned elements of a tensor `[size]` to zero."""
        for a, b in pairwise(self._chunk_bounds):
            dense[a:b].masked_fill_(~self.dense_mask(a, b).to(dense.device), 0)
