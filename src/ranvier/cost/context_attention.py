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
from typing import TYPE_CHECKING, Literal, NamedTuple

from ranvier.config.plan import ContextAttention, ContextAttentionChoice
from ranvier.errors import PlanError
from ranvier.sharding import TokenOrder, TokenSegment
from ranvier.trace import Event

# The commands that only plan import neither torch nor numpy; they need no row numbers.
if TYPE_CHECKING:
    import numpy as np

KeyCollective = Literal["none", "all_gather", "all_to_all"]
GATHERED_SHARE = 0.95
"""Share of the keys of other ranks from which on all of them are gathered."""
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
    def gathered_rows(self) -> np.ndarray:
        """For each needed key its row if the rows of all ranks are gathered."""
        parts = sorted(self._keys_of_rank[self.rank].parts, key=lambda part: part.key_row)
        return _expand_ranges(
            [(part.source * self.num_rows + part.source_row, part.length) for part in parts]
        )

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
        counts = [order.num_fetched(self.window) for order in self.orders]
        return [sum(several) for several in zip(*counts, strict=True)]

    @cached_property
    def num_sent(self) -> int:
        """Number of keys that this rank sends, counted for each rank that needs them."""
        return sum(_count_sent(order, self.rank, self.window) for order in self.orders)

    @property
    def collective(self) -> KeyCollective:
        """The collective that brings the keys; the same on all ranks."""
        fetched = sum(self.fetched_counts)
        if not fetched:
            return "none"
        # No rank but its own needs the last token of a document, so that never all need all.
        if fetched >= GATHERED_SHARE * self.num_ranks * (self.num_ranks - 1) * self.num_rows:
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
                rows = self.num_sent
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
                rows = self.fetched_counts[self.rank]
                events.append(scope.make_event("all_to_all", rows * row_bytes))
        return events


def _row(part: _KeyPart) -> int:
    return part.source_row


def _expand_ranges(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the numbers of ranges, which are given as first number and length."""
    import numpy as np

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


def _count_sent(order: TokenOrder, rank: int, window: int) -> int:
    """Returns how many keys of a sample a rank sends, counted for each rank that needs them."""
    own: dict[int, list[TokenSegment]] = {}
    for one in order.segments[rank]:
        own.setdefault(one.document, []).append(one)
    sent = 0
    for other, segments in enumerate(order.segments):
        needed: dict[int, list[tuple[int, int]]] = {}
        for one in segments if other != rank else ():
            if one.document in own:
                ranges = needed.setdefault(one.document, [])
                ranges.append((_first_key(one, window), one.stop))
        for document, ranges in needed.items():
            for start, stop in _unite_ranges(ranges):
                for one in own[document]:
                    sent += max(min(stop, one.stop) - max(start, one.start), 0)
    return sent


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


# ---- ring -------------------------------------------------------------------------------


class RingMove(NamedTuple):
    """A block that a rank sends in a hop."""

    way: int
    """1 for blocks that travel to the next rank, -1 for those that travel to the previous one."""
    offset: int
    """Index of the receiver minus that of the sender."""


@dataclass(frozen=True, eq=False)
class RingLayout:
    """Blocks of keys that travel around the ranks of context both ways, one rank at a hop.

    In hop i a rank gets the blocks of the ranks i before and i after it; of the two only the first
    if they are the same. The keys of a block are ordered by sample, document and place.
    """

    orders: tuple[TokenOrder, ...]
    """Order of the tokens of each sample."""
    rank: int
    """Index of the rank on the axis."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of context."""
        return self.orders[0].num_ranks

    @cached_property
    def num_rows(self) -> int:
        """Number of tokens of this rank, and of each block."""
        return sum(count_rank_tokens(order) for order in self.orders)

    @property
    def num_scores(self) -> int:
        """Number of pairs of a query of this rank and a key that it sees."""
        return count_scores(self.orders, self.rank)

    @property
    def num_hops(self) -> int:
        """Number of hops that blocks to the next rank make; the other way may have one less."""
        return self.num_ranks // 2

    def last_hop(self, way: int) -> int:
        """Returns the number of hops of a way."""
        return self.num_ranks // 2 if way > 0 else (self.num_ranks - 1) // 2

    def key_moves(self, hop: int) -> list[RingMove]:
        """Returns what every rank sends in a hop, counted from 1."""
        return [RingMove(way, way) for way in (1, -1) if hop <= self.last_hop(way)]

    def gradient_moves(self, hop: int) -> list[RingMove]:
        """Returns how the gradients of the blocks of a hop travel on: to the next rank that the
        block visits, or home after the last one."""
        moves = []
        for way, offset in self.key_moves(hop):
            last = self.last_hop(way)
            moves.append(RingMove(way, offset if hop < last else -way * last))
        return moves

    def source_of(self, way: int, hop: int) -> int:
        """Returns the rank whose block this rank has after a hop."""
        return (self.rank - way * hop) % self.num_ranks

    @cached_property
    def block_rows(self) -> np.ndarray:
        """Row of this rank that each key of its block is."""
        ranges = []
        rows_before = 0
        for order in self.orders:
            row = rows_before
            held = []
            for one in order.segments[self.rank]:
                held.append((one.document, one.start, row, one.num_tokens))
                row += one.num_tokens
            ranges += [(row, length) for _, _, row, length in sorted(held)]
            rows_before = row
        return _expand_ranges(ranges)

    def block_segments(self, source: int) -> tuple[SegmentRows, ...]:
        """Returns the segments of queries of this rank that see keys of the block of a rank.

        A segment sees all keys of other segments that precede it in its document. In the block of
        the rank itself they are followed by the segment itself, which is causal.
        """
        found = []
        rows_before = 0
        for order in self.orders:
            starts: dict[int, list[int]] = {}
            """Sorted starts of the segments of each document of the block."""
            first_rows: dict[int, list[int]] = {}
            """First row of each of them in the block, and the end of the last."""
            key_row = rows_before
            for document, start, stop in sorted(order.segments[source]):
                starts.setdefault(document, []).append(start)
                rows = first_rows.setdefault(document, [key_row])
                key_row += stop - start
                rows.append(key_row)
            row = rows_before
            for one in order.segments[self.rank]:
                rows = first_rows.get(one.document, [0])
                num_before = bisect_right(starts.get(one.document, []), one.start)
                if num_before:
                    found.append(SegmentRows(row, row + one.num_tokens, rows[0], rows[num_before]))
                row += one.num_tokens
            rows_before = row
        return tuple(found)

    def forward_events(self, shape: KeyShape, scope: EventScope) -> list[Event]:
        """Returns the communication of a forward pass: the hops of the keys."""
        block_bytes = 2 * self.num_rows * shape.kv_heads * shape.head_dim * shape.itemsize
        return [
            scope.make_event("all_to_all", len(self.key_moves(hop)) * block_bytes)
            for hop in range(1, self.num_hops + 1)
        ]

    def backward_events(self, shape: KeyShape, scope: EventScope) -> list[Event]:
        """Returns the communication of a backward pass: keys again, and their gradients."""
        gradients = shape._replace(itemsize=shape.gradient_itemsize)
        return self.forward_events(shape, scope) + self.forward_events(gradients, scope)


def check_ring_window(window: int) -> None:
    """Raises if a layer with a window would use ring attention."""
    if window:
        raise PlanError(
            f"context_attention=ring does not support a layer with a window of {window} tokens. "
            "Blocks of a ring are seen as a whole or not at all. Use context_attention=kv_gather, "
            "which communicates only the keys of windows, or auto."
        )


# ---- ulysses ----------------------------------------------------------------------------


def merge_ranks(order: TokenOrder, near: int) -> TokenOrder:
    """Returns the order where each `near` consecutive ranks are one, with tokens in the order of
    the sample."""
    merged = []
    for first in range(0, order.num_ranks, near):
        joined: list[TokenSegment] = []
        for one in sorted(one for some in order.segments[first : first + near] for one in some):
            if joined and joined[-1].document == one.document and joined[-1].stop == one.start:
                joined[-1] = joined[-1]._replace(stop=one.stop)
            else:
                joined.append(one)
        merged.append(tuple(joined))
    return TokenOrder(order.lengths, tuple(merged))


@dataclass(frozen=True, eq=False)
class UlyssesLayout:
    """Consecutive ranks of context that have all their tokens for a part of the heads each.

    Between groups of them (`near` < number of ranks) keys are communicated by `far`.
    """

    orders: tuple[TokenOrder, ...]
    """Order of the tokens of each sample over all ranks."""
    rank: int
    """Index of the rank on the axis."""
    near: int
    """Number of ranks that split the heads."""
    window: int = 0
    far_method: Literal["kv_gather", "ring"] = "kv_gather"

    @property
    def near_rank(self) -> int:
        """Index among the ranks that split the heads."""
        return self.rank % self.near

    @cached_property
    def num_rows(self) -> int:
        """Number of tokens of this rank outside of attention."""
        return sum(count_rank_tokens(order) for order in self.orders)

    @cached_property
    def far(self) -> KVGatherLayout | RingLayout:
        """Layout of the tokens of all near ranks."""
        orders = tuple(merge_ranks(order, self.near) for order in self.orders)
        if self.far_method == "ring":
            check_ring_window(self.window)
            return RingLayout(orders, self.rank // self.near)
        return KVGatherLayout(orders, self.rank // self.near, self.window)

    @cached_property
    def merged_rows(self) -> np.ndarray:
        """For each row of `far`, the row where it is received: (near rank · samples + sample) · t +
        token."""
        import numpy as np

        first = self.rank // self.near * self.near
        rows = []
        rows_before = 0
        for order in self.orders:
            numbers = order.token_numbers[first : first + self.near]  # (near, t)
            near, token = np.unravel_index(np.argsort(numbers, axis=None), numbers.shape)
            rows.append(near * self.num_rows + rows_before + token)
            rows_before += numbers.shape[1]
        return np.concatenate(rows)

    @property
    def num_scores(self) -> int:
        """Number of pairs of a query and a key that it sees, per head of this rank in attention."""
        return self.far.num_scores

    def head_shape(self, shape: KeyShape) -> KeyShape:
        """Returns the heads of this rank in attention; copies of a kv head count."""
        return shape._replace(
            heads=shape.heads // self.near,
            kv_heads=max(shape.kv_heads, self.near) // self.near,
        )

    def forward_events(
        self, shape: KeyShape, scope: EventScope, far_scope: EventScope | None = None
    ) -> list[Event]:
        """Returns the communication of a forward pass."""
        queries, everything = self._near_events(shape, scope)
        far = self.far.forward_events(self.head_shape(shape), far_scope or scope)
        return [everything, *far, queries]

    def backward_events(
        self, shape: KeyShape, scope: EventScope, far_scope: EventScope | None = None
    ) -> list[Event]:
        """Returns the communication of a backward pass."""
        queries, everything = self._near_events(shape, scope)
        far = self.far.backward_events(self.head_shape(shape), far_scope or scope)
        return [queries, *far, everything]

    def _near_events(self, shape: KeyShape, scope: EventScope) -> tuple[Event, Event]:
        """Returns the all-to-alls of queries (or outputs), and of queries, keys and values."""
        head_bytes = self.num_rows * shape.head_dim * shape.itemsize
        keys = 2 * max(shape.kv_heads, self.near)
        return (
            scope.make_event("all_to_all", shape.heads * head_bytes),
            scope.make_event("all_to_all", (shape.heads + keys) * head_bytes),
        )


def check_ulysses_heads(heads: int, kv_heads: int, near: int) -> None:
    """Raises if a number of ranks cannot split the heads of a rank."""
    if not _can_split_heads(heads, kv_heads, near):
        valid = [n for n in range(1, heads + 1) if _can_split_heads(heads, kv_heads, n)]
        raise PlanError(
            f"context_attention=ulysses cannot split {heads} query heads and {kv_heads} kv heads "
            f"over {near} ranks. Their number must divide the query heads, and divide or be a "
            f"multiple of the kv heads. Use {', '.join(map(str, valid))} ranks, or "
            "context_attention=kv_gather."
        )


def _can_split_heads(heads: int, kv_heads: int, near: int) -> bool:
    return heads % near == 0 and (kv_heads % near == 0 or near % kv_heads == 0)


Layout = KVGatherLayout | RingLayout | UlyssesLayout


def build_layout(
    method: ContextAttention, orders: tuple[TokenOrder, ...], rank: int, window: int = 0
) -> Layout:
    """Returns the layout of attention on a rank of context for samples with these orders."""
    if method == "ring":
        check_ring_window(window)
        return RingLayout(orders, rank)
    if method == "ulysses":
        return UlyssesLayout(orders, rank, orders[0].num_ranks, window)
    return KVGatherLayout(orders, rank, window)


def build_rows(layout: Layout) -> None:
    """Builds the row numbers of a layout, which are otherwise built when they are first used."""
    if isinstance(layout, UlyssesLayout):
        _ = layout.merged_rows
        layout = layout.far
    if isinstance(layout, RingLayout):
        _ = layout.block_rows
    elif layout.collective == "all_gather":
        _ = (layout.own_keys, layout.received_keys, layout.sent_rows, layout.gathered_rows)
    else:
        _ = (layout.own_keys, layout.received_keys, layout.sent_rows)


# ---- choice -----------------------------------------------------------------------------

FLOPS_PER_BYTE = 1e4
"""FLOPs that a device computes in the time of one byte between ranks: 500 TFLOP/s and 50 GB/s."""


def choose_method(
    wanted: ContextAttentionChoice,
    orders: Sequence[TokenOrder],
    shape: KeyShape,
    window: int = 0,
) -> ContextAttention:
    """Returns how attention gets the keys of other ranks; all ranks choose the same.

    auto: kv_gather with a window; otherwise kv_gather or ulysses, whichever is predicted to be
    faster. The slowest rank counts: kv_gather waits for the keys of the first head group, and
    computes the scores of its tokens; ulysses waits for all messages, and has equal work on all
    ranks.
    """
    if wanted != "auto":
        return wanted
    ranks = orders[0].num_ranks
    if window or not _can_split_heads(shape.heads, shape.kv_heads, ranks):
        return "kv_gather"
    flops = 4 * shape.heads * shape.head_dim / FLOPS_PER_BYTE
    scores = [count_scores(orders, rank) for rank in range(ranks)]
    layout = KVGatherLayout(tuple(orders), 0)
    key_bytes = 2 * shape.kv_heads * shape.head_dim * shape.itemsize
    groups = len(layout.head_groups(shape.kv_heads))
    gathers = 0.0
    for rank in range(ranks):
        moved = layout.fetched_counts[rank] * key_bytes
        first = moved / groups
        gathers = max(gathers, first + max(moved - first, scores[rank] * flops))
    tokens = count_rank_tokens(orders[0]) * len(orders)
    swapped = 2 * shape.heads + 2 * max(shape.kv_heads, ranks)
    moves = tokens * swapped * shape.head_dim * shape.itemsize * (ranks - 1) / ranks
    exchanges = moves + sum(scores) / ranks * flops
    return "ulysses" if exchanges < gathers else "kv_gather"
