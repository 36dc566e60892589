"""Packs whole conversations into windows, and truncates or splits the ones that do not fit.

The longest is placed first, each in the fullest window with enough room (best fit decreasing) or,
with `packing = balanced`, in the one with the least attention work: no conversation is cut only to
pack it, and windows end with padding. The first puts conversations of similar length together, so
that windows of long ones take much longer than others, and ranks wait for them. In a packed window
attention and positions stay within a conversation; otherwise each conversation has its own window.
Only tokens in the loss mask are targets; a conversation without any is left out. Lengths and masks
determine everything, so all ranks pack alike.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ranvier.data.batch import Batch, Ints, Window, read_windows
from ranvier.nn.cross_entropy import IGNORE_INDEX

if TYPE_CHECKING:
    from ranvier.data.corpus import Corpus

Truncate = Literal["right", "left", "drop", "split"]
Packing = Literal["balanced", "full"]

TOKENS_BY_WORK = 0.8
"""Fraction of the tokens, in the longest pieces, that `balanced` places by attention work."""
MAX_MORE_WINDOWS = 0.01
"""How many more windows, as a fraction, `balanced` may fill; beyond that it packs as `full`."""


@dataclass(frozen=True)
class ConversationPieces:
    """Pieces of conversations that windows are made of; all `[pieces]`."""

    starts: Ints
    """First token of each piece in the corpus."""
    lengths: Ints
    continues: NDArray[np.bool_]
    """Whether the conversation continues after the piece: its last token has a target too."""
    num_conversations: int
    num_long: int
    """Number of conversations longer than a window."""
    num_unlearned: int
    """Number of conversations left out because nothing in them is learned."""


def split_conversations(
    corpus: Corpus, chosen: Ints, seq: int, truncate: Truncate, *, learn_all: bool
) -> ConversationPieces:
    """The pieces of the given documents of a corpus that have something to learn."""
    starts = corpus.document_starts[chosen]
    lengths = corpus.document_lengths[chosen]
    long = lengths > seq
    if truncate == "drop":
        starts = starts[~long]
        lengths = lengths[~long]
        owners = np.flatnonzero(~long)
    elif truncate == "split":
        # Repeat each conversation per piece and number its pieces 0, 1, ...
        counts = -(-lengths // seq)
        owners = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = starts[owners] + number * seq
        rest = lengths[owners] - number * seq
        lengths = np.minimum(rest, seq)
    else:
        # `left` drops the beginning of a long conversation, `right` its end.
        starts = starts + (np.maximum(lengths - seq, 0) if truncate == "left" else 0)
        lengths, owners = np.minimum(lengths, seq), np.arange(len(lengths))
    follows = np.zeros(len(owners), bool)
    if truncate == "split":
        follows = rest > seq
    # The first token of a piece is not a target: nothing precedes it.
    heard = corpus.count_learned(starts + 1, lengths - 1 + follows, learn_all=learn_all) > 0
    there = np.zeros(len(chosen), bool)
    there[owners[heard]] = True
    # Dropped conversations are counted as long, not as unlearned.
    silent = len(chosen) - int(there.sum()) - (int(long.sum()) if truncate == "drop" else 0)
    kept = (starts[heard], lengths[heard], follows[heard])
    return ConversationPieces(*kept, int(there.sum()), int(long.sum()), silent)


def pack_pieces(lengths: Ints, seq: int, packing: Packing = "full") -> tuple[Ints, Ints]:
    """Pieces in window order, and the offset of each window in that order."""
    # A stable sort makes the result the same on all ranks.
    order = np.argsort(-lengths, kind="stable").tolist()
    sizes: list[int] = lengths.tolist()
    windows = list[list[int]]()
    _fill_by_best_fit(windows, order, sizes, seq)
    if packing == "balanced":
        balanced = _pack_balanced(order, sizes, seq, len(windows))
        if len(balanced) <= len(windows) * (1 + MAX_MORE_WINDOWS):
            windows = balanced
    counts = np.array([0, *map(len, windows)], np.int64)
    return np.array([x for window in windows for x in window], np.int64), np.cumsum(counts)


def _fill_by_best_fit(
    windows: list[list[int]], order: Sequence[int], sizes: Sequence[int], seq: int
) -> None:
    """Adds pieces to windows, in descending order of size: each to the fullest one with room.

    Best fit decreasing; ties keep their order.
    """
    # Open windows by their free space.
    by_space: dict[int, list[list[int]]] = {}
    for window in windows:
        free = seq - sum(sizes[piece] for piece in window)
        if free > 0:
            by_space.setdefault(free, []).append(window)
    # Free space of open windows, distinct and sorted.
    spaces = sorted(by_space)
    for piece in order:
        size = sizes[piece]
        # The smallest space that is large enough: the fullest window.
        at = bisect_left(spaces, size)
        if at < len(spaces):
            space = spaces[at]
            some = by_space[space]
            window = some.pop()
            if not some:
                del by_space[space], spaces[at]
        else:
            space = seq
            window = []
            windows.append(window)
        window.append(piece)
        left = space - size
        if left > 0:
            if left not in by_space:
                by_space[left] = []
                insort(spaces, left)
            by_space[left].append(window)


def _pack_balanced(
    order: Sequence[int], sizes: Sequence[int], seq: int, count: int
) -> list[list[int]]:
    """Returns windows with similar attention work, `Σ n²`; some more than `count` if necessary.

    Each of the longest pieces is placed in the window with the least work that has room. The
    shortest ones hardly change the work, and fill the gaps instead.
    """
    windows: list[list[int]] = [[] for _ in range(count)]
    free = [seq] * count
    # Windows as (work, index). One that is too full for a piece is left to the shortest ones.
    usable = [(0, i) for i in range(count)]
    longest = int(
        np.searchsorted(np.cumsum([sizes[i] for i in order]), TOKENS_BY_WORK * sum(sizes))
    )
    for piece in order[:longest]:
        size = sizes[piece]
        while usable and free[usable[0][1]] < size:
            heappop(usable)
        if usable:
            work, i = heappop(usable)
        else:
            work, i = 0, len(windows)
            windows.append([])
            free.append(seq)
        windows[i].append(piece)
        free[i] -= size
        heappush(usable, (work + size * size, i))
    _fill_by_best_fit(windows, order[longest:], sizes, seq)
    return [window for window in windows if window]


class ConversationStream:
    """The conversations of a split, in windows."""

    def __init__(
        self,
        corpus: Corpus,
        chosen: Ints,
        seq: int,
        *,
        packed: bool,
        truncate: Truncate,
        learn_all: bool,
        packing: Packing = "full",
    ) -> None:
        self.corpus = corpus
        self.seq = seq
        self.document_mask = packed
        self.truncate = truncate
        self.learn_all = learn_all
        self.pieces = split_conversations(corpus, chosen, seq, truncate, learn_all=learn_all)
        count = len(self.pieces.lengths)
        self._order, self._bounds = np.arange(count), np.arange(count + 1)
        if packed:
            self._order, self._bounds = pack_pieces(self.pieces.lengths, seq, packing)

    @property
    def num_documents(self) -> int:
        """Number of conversations with something to learn."""
        return self.pieces.num_conversations

    @property
    def num_left_out(self) -> int:
        """Number of conversations that are left out."""
        return self.pieces.num_unlearned + (self.pieces.num_long if self.truncate == "drop" else 0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all pieces."""
        return int(self.pieces.lengths.sum())

    @property
    def num_windows(self) -> int:
        """Number of windows, each padded."""
        return len(self._bounds) - 1

    @property
    def summary_line(self) -> str:
        """A summary: conversations that were packed, cut and left out."""
        found = self.pieces
        done = {"drop": "dropped", "split": "split"}
        share = self.num_tokens / max(self.num_windows * self.seq, 1)
        if self.document_mask:
            where = "packed into"
        else:
            where = "in one each of"
        what = done.get(self.truncate, f"cut on the {self.truncate}")
        return (
            f"{found.num_conversations:,} conversations {where} {self.num_windows:,} windows of "
            f"{self.seq} tokens ({share:.1%} filled), {found.num_long:,} longer ones {what}, "
            f"{found.num_unlearned:,} dropped without a target"
        )

    def read_sample(self, number: int) -> Window:
        """The window with this number."""
        return self.read_window(number)

    def read_batch(self, numbers: Sequence[int], end: int | None = None) -> Batch:
        """The windows with these numbers; windows from `end` on have no targets."""
        return read_windows(self, numbers, end)

    def window_lengths(self, number: int) -> tuple[int, ...]:
        """Number of tokens of each conversation of a window; padding is a document."""
        if not self.document_mask:
            return (self.seq,)
        mine = self._order[self._bounds[number] : self._bounds[number + 1]]
        lengths = self.pieces.lengths[mine].tolist()
        padding = self.window_padding(number)
        return (*lengths, padding) if padding else tuple(lengths)

    def window_padding(self, number: int) -> int:
        """Number of tokens of padding of a window."""
        mine = self._order[self._bounds[number] : self._bounds[number + 1]]
        return self.seq - int(self.pieces.lengths[mine].sum())

    def read_window(self, number: int) -> Window:
        """The conversations of a window, concatenated and padded."""
        assert 0 <= number < self.num_windows, (number, self.num_windows)
        tokens = np.zeros(self.seq, np.int64)
        targets = np.full(self.seq, IGNORE_INDEX, np.int64)
        positions = np.arange(self.seq)
        documents = np.zeros(self.seq, np.int64)
        at = 0
        mine = self._order[self._bounds[number] : self._bounds[number + 1]]
        for count, piece in enumerate(mine.tolist()):
            size = int(self.pieces.lengths[piece])
            more = int(self.pieces.continues[piece])
            start = int(self.pieces.starts[piece])
            # One token more where the conversation continues: it is the last target of the piece.
            read, mask = self.corpus.read_with_mask(np.arange(start, start + size + more))
            here = slice(at, at + size)
            tokens[here] = read[:size]
            if self.learn_all:
                known = read[1:]
            else:
                known = np.where(mask[1:], read[1:], IGNORE_INDEX)
            targets[at : at + len(known)] = known
            positions[here] = np.arange(size)
            documents[here] = count
            at += size
        # Padding is a separate document with its own positions.
        positions[at:], documents[at:] = np.arange(self.seq - at), len(mine)
        if not self.document_mask:
            positions = np.arange(self.seq)
        return Window(tokens, targets, positions, documents)
