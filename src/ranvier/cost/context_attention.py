"""Attention over the context axis: which keys each rank needs, messages, events and work.

Context splits the tokens of samples; their order over ranks is any `TokenOrder`. All of this
follows from the orders of a micro-batch, which every rank knows, so ranks agree on the size of each
message without communication. Everything is host integers, without torch.

- kv_gather: a rank gets exactly the keys that its queries see (Llama 3 gathers all of them).
- ring: blocks of keys travel around both ways (ring self-attention, Li et al. 2021; TokenRing).
- ulysses: attention heads are split instead of tokens (DeepSpeed-Ulysses), over all ranks or over
  consecutive ones, with kv_gather or ring over the rest.

Rows are tokens of the samples of a rank one after the other: row = sample · t + token, t = s/C.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from ranvier.sharding import TokenOrder, TokenSegment
from ranvier.trace import Event

KeyCollective = Literal["none", "all_gather", "all_to_all"]
MAX_HEAD_GROUPS = 2
"""Groups of kv heads, of which one is computed while the keys of the next one are on their way."""


class SegmentRows(NamedTuple):
    """Rows of a segment of queries, and of the keys that it attends to."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int


class KeyShape(NamedTuple):
    """Size of one key or query on a rank."""

    heads: int
    """Query heads of the rank."""
    kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of an element of activations."""
    gradient_itemsize: int
    """Bytes of an element of a gradient that is summed over ranks."""


class EventScope(NamedTuple):
    """Names of an axis, and of the layer that communicates over it."""

    axis: tuple[str, ...]
    where: str

    def make_event(self, op: str, num_bytes: int) -> Event:
        """Returns a predicted event."""
        return Event(op, self.axis, num_bytes, self.where)


# ---- kv_gather --------------------------------------------------------------------------


class _KeyPart(NamedTuple):
    """Consecutive keys that a rank needs, on the rank that has them."""

    source: int
    source_row: int
    key_row: int
    """First row among the keys that the rank needs."""
    length: int


class _RankKeys(NamedTuple):
    """The keys that a rank needs, ordered by sample, document and place."""

    parts: list[_KeyPart]
    segments: list[SegmentRows]
    num_keys: int


@dataclass(frozen=True, eq=False)
class KVGatherLayout:
    """The keys that a rank of context needs, and who sends them."""

    orders: tuple[TokenOrder, ...]
    """Order of the tokens of each sample."""
    rank: int
    """Index of the rank on the axis."""
    window: int = 0
    """Number of tokens that a token attends to; 0 for all previous tokens."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of context."""
        return self.orders[0].num_ranks

    @cached_property
    def num_rows(self) -> int:
        """Number of tokens of this rank."""
        return sum(count_rank_tokens(order) for order in self.orders)

    @cached_property
    def _keys_of_rank(self) -> list[_RankKeys]:
        held = [_segments_by_document(order) for order in self.orders]
        return [_find_keys(self.orders, held, rank, self.window) for rank in range(self.num_ranks)]

    @property
    def num_keys(self) -> int:
        """Number of keys that this rank needs, including its own."""
        return self._keys_of_rank[self.rank].num_keys

    @property
    def segments(self) -> tuple[SegmentRows, ...]:
        """Segments of queries of this rank, and the rows of their keys among those it needs."""
        return tuple(self._keys_of_rank[self.rank].segments)

    @cached_property
    def own_keys(self) -> np.ndarray:
        """Row among the needed keys of each row of this rank."""
        own = [part for part in self._keys_of_rank[self.rank].parts if part.source == self.rank]
        # A token sees itself, so all rows of this rank are among the keys.
        return _expand_ranges([(part.key_row, part.length) for part in sorted(own, key=_row)])

    def _parts_to_receive(self, rank: int, source: int) -> list[_KeyPart]:
        """Returns what a rank gets from another one, in the order of the rows of the sender."""
        return sorted(self._parts_by_source[rank][source], key=_row)

    @cached_property
    def _parts_by_source(self) -> list[list[list[_KeyPart]]]:
        table: list[list[list[_KeyPart]]] = []
        for keys in self._keys_of_rank:
            row: list[list[_KeyPart]] = [[] for _ in range(self.num_ranks)]
            for part in keys.parts:
                row[part.source].append(part)
            table.append(row)
        return table

    @cached_property
    def received_keys(self) -> list[np.ndarray]:
        """Rows among the needed keys of what each rank sends to this one; none of its own."""
        return [
            _expand_ranges(
                [
                    (part.key_row, part.length)
                    for part in self._parts_to_receive(self.rank, source)
                    if source != self.rank
                ]
            )
            for source in range(self.num_ranks)
        ]

    @cached_property
    def sent_rows(self) -> list[np.ndarray]:
        """Rows of this rank that each rank needs; none for itself."""
        return [
            _expand_ranges(
                [
                    (part.source_row, part.length)
                    for part in self._parts_to_receive(rank, self.rank)
                    if rank != self.rank
                ]
            )
            for rank in range(self.num_ranks)
        ]

    @cached_property
    def fetched_counts(self) -> list[int]:
        """Number of keys that each rank gets from others."""
        return [keys.num_keys - self.num_rows for keys in self._keys_of_rank]

    @property
    def collective(self) -> KeyCollective:
        """The collective that brings the keys; the same on all ranks."""
        counts = set(self.fetched_counts)
        if counts == {0}:
            return "none"
        # All ranks need all keys.
        if counts == {(self.num_ranks - 1) * self.num_rows}:
            return "all_gather"
        return "all_to_all"

    @property
    def num_scores(self) -> int:
        """Number of pairs of a query of this rank and a key that it sees."""
        return count_scores(self.orders, self.rank, self.window)

    def head_groups(self, kv_heads: int) -> list[tuple[int, int]]:
        """Returns ranges of kv heads that are communicated and computed one after the other."""
        groups = min(kv_heads, 1 if self.collective == "none" else MAX_HEAD_GROUPS)
        bounds = [kv_heads * i // groups for i in range(groups + 1)]
        return list(pairwise(bounds))

    def forward_events(self, shape: KeyShape, scope: EventScope) -> list[Event]:
        """Returns the communication of a forward pass of this rank."""
        if self.collective == "none":
            return []
        events = []
        for first, end in self.head_groups(shape.kv_heads):
            row_bytes = 2 * (end - first) * shape.head_dim * shape.itemsize
            if self.collective == "all_gather":
                rows = self.num_ranks * self.num_rows
            else:
                rows = sum(map(len, self.sent_rows))
            events.append(scope.make_event(self.collective, rows * row_bytes))
        return events

    def backward_events(self, shape: KeyShape, scope: EventScope) -> list[Event]:
        """Returns the communication of a backward pass: keys again, and their gradients back."""
        events = self.forward_events(shape, scope)
        if self.collective == "none":
            return events
        for first, end in self.head_groups(shape.kv_heads):
            row_bytes = 2 * (end - first) * shape.head_dim * shape.gradient_itemsize
            if self.collective == "all_gather":
                rows = self.num_ranks * self.num_rows
                events.append(scope.make_event("reduce_scatter", rows * row_bytes))
            else:
                rows = sum(map(len, self.received_keys))
                events.append(scope.make_event("all_to_all", rows * row_bytes))
        return events


def _row(part: _KeyPart) -> int:
    return part.source_row


def _expand_ranges(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the numbers of ranges, which are given as first number and length."""
    if not ranges:
        return np.empty(0, dtype=np.int64)
    starts, lengths = np.array(ranges, dtype=np.int64).T
    # The start of each range minus the numbers before it, plus 0, 1, 2, ...
    offsets = starts - np.concatenate([[0], np.cumsum(lengths)[:-1]])
    numbers: np.ndarray = np.repeat(offsets, lengths) + np.arange(lengths.sum())
    return numbers


def count_rank_tokens(order: TokenOrder) -> int:
    """Returns the number of tokens of a sample on each rank."""
    return sum(order.lengths) // order.num_ranks


def count_scores(orders: Sequence[TokenOrder], rank: int, window: int = 0) -> int:
    """Returns the number of pairs of a query of a rank and a key that it sees."""
    return sum(one.num_scores(window) for order in orders for one in order.segments[rank])


def _find_keys(
    orders: Sequence[TokenOrder],
    held: Sequence[list[list[_HeldSegment]]],
    rank: int,
    window: int,
) -> _RankKeys:
    """Returns the keys that the queries of a rank see: [max(0, start - window + 1), stop) of the
    document of each segment. held: `_segments_by_document` of each sample."""
    found = _RankKeys([], [], 0)
    rows_before = 0
    for order, holders in zip(orders, held, strict=True):
        found = _find_sample_keys(order, holders, rank, window, rows_before, found)
        rows_before += count_rank_tokens(order)
    return found


def _find_sample_keys(
    order: TokenOrder,
    holders: list[list[_HeldSegment]],
    rank: int,
    window: int,
    rows_before: int,
    found: _RankKeys,
) -> _RankKeys:
    """Adds the keys of a sample to those of the samples before it."""
    parts, segments, num_keys = found
    # Documents in the order in which they first occur, so that those that are whole on the rank
    # need not be copied.
    needed: dict[int, list[tuple[int, int]]] = {}
    for one in order.segments[rank]:
        needed.setdefault(one.document, []).append((_first_key(one, window), one.stop))
    first_rows: dict[int, tuple[list[int], list[int]]] = {}
    for document, ranges in needed.items():
        union = _unite_ranges(ranges)
        rows = []
        for start, stop in union:
            rows.append(num_keys)
            for source, row, length in _find_holders(holders[document], start, stop):
                parts.append(_KeyPart(source, rows_before + row, num_keys, length))
                num_keys += length
        first_rows[document] = ([start for start, _ in union], rows)
    row = rows_before
    for one in order.segments[rank]:
        starts, rows = first_rows[one.document]
        first = _first_key(one, window)
        i = bisect_right(starts, first) - 1
        key = rows[i] + first - starts[i]
        segments.append(SegmentRows(row, row + one.num_tokens, key, key + one.stop - first))
        row += one.num_tokens
    return _RankKeys(parts, segments, num_keys)


def _first_key(segment: TokenSegment, window: int) -> int:
    if window:
        return max(0, segment.start - window + 1)
    return 0


def _unite_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns disjoint, sorted ranges with the same numbers."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


class _HeldSegment(NamedTuple):
    """A segment of a document, the rank that holds it, and its first row in the sample there."""

    start: int
    stop: int
    rank: int
    row: int


def _segments_by_document(order: TokenOrder) -> list[list[_HeldSegment]]:
    """Returns the segments of each document in the order of places."""
    held: list[list[_HeldSegment]] = [[] for _ in order.lengths]
    for rank, segments in enumerate(order.segments):
        row = 0
        for one in segments:
            held[one.document].append(_HeldSegment(one.start, one.stop, rank, row))
            row += one.num_tokens
    for some in held:
        some.sort()
    return held


def _find_holders(
    held: Sequence[_HeldSegment], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yields rank, first row and length of the parts of the range [start, stop) of a document."""
    i = bisect_right(held, start, key=lambda one: one.start) - 1
    while i < len(held) and held[i].start < stop:
        one = held[i]
        first = max(start, one.start)
        yield one.rank, one.row + first - one.start, min(stop, one.stop) - first
        i += 1
