"""Balanced order of tokens over context: which segments of documents each rank holds.

Attention work of a token is the number of keys it sees, its position in the document plus one. All
ranks get the same number of tokens and about the same work; a rank that holds part of a document
fetches the keys before it, so documents are cut as seldom as possible.

`balance_tokens` first tries to place every document whole. If it cannot, it fills one rank after
another, each exactly up to the mean work of what is left, starting with the longest documents:

* whole documents, the longest that fits first, as long as the short ones can fill the rest;
* a proportional share of the short documents, which have many tokens and little work;
* the last tokens of one long document, and as many of its first tokens as balance the work. The
  middle is left for the next ranks. For a sample of one document this is the zigzag order.

Ranks that still differ exchange tokens (`_exchange_tokens`). All of it is a pure function of the
lengths, so every rank computes the same order without communication.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

MAX_WORK = 1.05
"""Largest work of a rank relative to the mean with which documents are left whole."""
EXCHANGE_WORK = 1.02
"""Largest work of a rank relative to the mean after exchanges of tokens."""
FILL_WORK = 1.015
"""Largest work of a rank relative to the mean that is aimed at when it is filled."""
EXCHANGE_COST = 0.1
"""Cost of an exchange in addition to the keys it fetches, in tokens of a rank: one large exchange
is better than many small ones."""
SUBSET_DOCUMENTS = {1: 100, 2: 20, 3: 10}
"""Number of documents of a rank of which so many at a time are swapped, to bound the search."""
MAX_SEGMENTS = 48
"""Number of pieces of a rank above which an order with fewer is preferred."""


class _Settings(NamedTuple):
    """Settings of one attempt to fill the ranks."""

    short_work: float
    """A document is short if it has at most this share of the mean work of a rank."""
    share: float
    """Short documents that a rank gets with a cut one, relative to an equal share of them."""
    work: float
    """Work of a rank relative to the mean of the ranks that are not filled yet."""


ATTEMPTS = (
    _Settings(short_work=0.1, share=1.5, work=1.0),
    _Settings(short_work=0.01, share=2.5, work=1.1),
    _Settings(short_work=0.1, share=2.5, work=1.1),
    _Settings(short_work=0.01, share=1.0, work=1.03),
)
"""The best order of them is used; each is the best one for some samples."""


class Piece(NamedTuple):
    """Consecutive tokens `start` to `stop` of a document, with their attention work.

    The work is first because pieces are sorted by it.
    """

    work: int
    document: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def make_piece(document: int, start: int, stop: int) -> Piece:
    """Returns the piece with its work: Σ (position + 1)."""
    return Piece((stop * (stop + 1) - start * (start + 1)) // 2, document, start, stop)


def balance_tokens(lengths: Sequence[int], num_ranks: int) -> list[list[Piece]]:
    """Returns the pieces of each rank: as many tokens each, similar work, few keys to fetch."""
    documents = sorted([Piece(n * (n + 1) // 2, i, 0, n) for i, n in enumerate(lengths)])
    whole = _place_whole(documents, num_ranks)
    if whole is not None:
        return whole
    attempts = [
        _balance(documents, num_ranks, settings)
        for settings in ATTEMPTS[: _num_attempts(len(documents), num_ranks)]
    ]
    return min(attempts, key=_rate_order) if len(attempts) > 1 else attempts[0]


def _num_attempts(num_documents: int, num_ranks: int) -> int:
    """Returns how many attempts are made: as many as take some milliseconds."""
    if num_documents == 1:
        # The first attempt is the zigzag order, whose work is equal.
        return 1
    return max(4000 // (num_documents + 16 * num_ranks), 1)


def _balance(documents: Sequence[Piece], num_ranks: int, settings: _Settings) -> list[list[Piece]]:
    ranks = _RankFiller(documents, num_ranks, settings).fill()
    _exchange_tokens(ranks)
    return [_join_pieces(rank) for rank in ranks]


def _rate_order(ranks: Sequence[Sequence[Piece]]) -> tuple[float, int, int]:
    """Returns what to minimize: work and pieces above their limits, then keys to fetch."""
    work = max(relative_work(ranks), EXCHANGE_WORK)
    return work, max(MAX_SEGMENTS, *map(len, ranks)), count_fetched(ranks)


def relative_work(ranks: Sequence[Sequence[Piece]]) -> float:
    """Returns the largest work of a rank relative to the mean."""
    works = [sum([piece.work for piece in rank]) for rank in ranks]
    return max(works) * len(works) / sum(works)


def count_fetched(ranks: Sequence[Sequence[Piece]]) -> int:
    """Returns the number of keys that all ranks fetch: those before their last token of a document,
    less their own."""
    fetched = 0
    for rank in ranks:
        stops: dict[int, int] = {}
        for _, document, start, stop in rank:
            stops[document] = max(stops.get(document, 0), stop)
            fetched -= stop - start
        fetched += sum(stops.values())
    return fetched


def _join_pieces(pieces: list[Piece]) -> list[Piece]:
    """Sorts the pieces of a rank by document and position, and joins those that are adjacent."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=itemgetter(1, 2)):
        if joined and joined[-1].document == piece.document and joined[-1].stop == piece.start:
            joined[-1] = make_piece(piece.document, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


class _RankFiller:
    """Fills ranks one after another from documents, which are sorted by work."""

    def __init__(self, documents: Sequence[Piece], num_ranks: int, settings: _Settings) -> None:
        self.num_ranks = num_ranks
        self.settings = settings
        self.tokens_each = sum([piece.stop for piece in documents]) // num_ranks
        self.work_left = sum([piece.work for piece in documents])
        self.mean_work = self.work_left / num_ranks
        work = settings.short_work * self.work_left / num_ranks
        most = self.tokens_each // 4
        # Both are sorted by work. What a cut leaves is put into `long`, however short it is.
        self.short = [piece for piece in documents if piece.work <= work and piece.stop <= most]
        self.long = list(documents[len(self.short) :])
        self.short_tokens = sum([piece.stop for piece in self.short])
        self.short_work = sum([piece.work for piece in self.short])

    def fill(self) -> list[list[Piece]]:
        """Returns the pieces of each rank."""
        ranks = []
        for ranks_left in range(self.num_ranks, 1, -1):
            rank = self._fill_rank(ranks_left)
            self.work_left -= sum([piece.work for piece in rank])
            ranks.append(rank)
        return [*ranks, [*self.long, *self.short]]

    def _fill_rank(self, ranks_left: int) -> list[Piece]:
        """Takes the pieces of the next rank."""
        self.tokens = self.tokens_each
        mean = self.work_left / ranks_left
        # Ranks of long documents get more, which spread over fewer ranks then.
        self.work = max(mean, min(mean * self.settings.work, FILL_WORK * self.mean_work))
        self.slack = max(EXCHANGE_WORK * self.mean_work - self.work, 0.0)
        share = int(self.settings.share * self.short_tokens / ranks_left)
        self.share = min(share, self.short_tokens)
        self.rank: list[Piece] = []
        centers = [(start + stop) / 2 for _, _, start, stop in self.long]
        self.lightest = min(centers, default=0.0)
        self._take_whole()
        if self._needs_cut():
            is_first = not self.rank
            self._take_short(self.share)
            self._cut_long(is_first)
            self._take_whole()
        self._take_short(self.tokens)
        if self.tokens > self.short_tokens:
            self._cut_long(is_first=False)
        self._complete()
        return self.rank

    def _take_whole(self) -> None:
        """Takes whole pieces, the longest that fits first."""
        while self.long and self.tokens > self.share:
            i = self._longest_that_fits()
            if i is None:
                break
            self._take(self.long.pop(i))

    def _needs_cut(self) -> bool:
        """Returns whether short documents alone would leave the rank with too little work."""
        enough = self.work <= self._work_to_fill(self.tokens)
        return bool(self.long) and self.tokens > self.share and not enough

    def _take(self, piece: Piece) -> None:
        self.rank.append(piece)
        self.tokens -= piece.stop - piece.start
        self.work -= piece.work

    def _work_to_fill(self, tokens: int) -> float:
        """Returns the least work with which this many tokens can be filled: first with the share of
        the short documents, then with the first halves of the next longer ones."""
        # Short documents may run out before the share of the rank.
        short = min(tokens, self.share, self.short_tokens)
        work = short * self.short_work / self.short_tokens if short else 0.0
        if tokens > short and self.long:
            work += (tokens - short) * self.lightest / 2
        return work

    def _longest_that_fits(self) -> int | None:
        """Returns the index of the longest piece that fits.

        A rank starts with the longest piece of all: if that does not fit, it has to be cut, and
        then while there are short documents to fill its ranks.
        """

        def is_too_large(piece: Piece) -> bool:
            rest = self.tokens - piece.num_tokens
            return rest < 0 or piece.work + self._work_to_fill(rest) > self.work + self.slack

        if not self.rank:
            last = len(self.long) - 1
            return None if is_too_large(self.long[last]) else last
        i = _first_index(self.long, is_too_large) - 1
        return i if i >= 0 and not is_too_large(self.long[i]) else None

    def _cut_long(self, is_first: bool) -> None:
        """Takes the tokens that the rank lacks from one long piece, its first and its last ones.

        Of the pieces whose last tokens have enough work, the one with the least leaves the least to
        fetch. The first piece of a rank is the longest (see `_longest_that_fits`).
        """

        def has_enough_work(piece: Piece) -> bool:
            return _tail(piece, min(self.tokens, piece.num_tokens)).work >= self.work

        last = len(self.long) - 1
        i = last if is_first else min(_first_index(self.long, has_enough_work), last)
        piece = self.long.pop(i)
        _, document, start, stop = piece
        tokens = min(self.tokens, piece.num_tokens)
        first = _count_first_tokens(piece, tokens, self.work)
        if first is None:
            # It is too heavy for so many tokens: fewer of them, and lighter pieces for the rest.
            self.share = self.short_tokens
            first, tokens = (
                0,
                _count_last_tokens(piece, self.work - self._work_to_fill(self.tokens)),
            )
        for begin, end in ((start, start + first), (stop - tokens + first, stop)):
            if end > begin:
                self._take(make_piece(document, begin, end))
        if tokens < piece.num_tokens:
            insort(self.long, make_piece(document, start + first, stop - tokens + first))

    def _take_short(self, tokens: int) -> None:
        """Takes short documents with at most this many tokens, evenly over all their lengths."""
        if not tokens or not self.short:
            return
        step = max(self.short_tokens / tokens, 1.0)
        place = len(self.short) - 0.5 * step
        chosen = []
        while place >= 0:
            length = self.short[int(place)].stop
            if length <= tokens:
                chosen.append(int(place))
                tokens -= length
            place -= step
        # From the last one, so that the indices of the others stay.
        self._take_popped([self.short.pop(i) for i in chosen])

    def _take_popped(self, pieces: list[Piece]) -> None:
        """Takes short documents that are no longer in `short`."""
        tokens = sum([piece.stop for piece in pieces])
        work = sum([piece.work for piece in pieces])
        self.rank += pieces
        self.tokens -= tokens
        self.work -= work
        self.short_tokens -= tokens
        self.short_work -= work

    def _complete(self) -> None:
        """Takes exactly the tokens that the rank still lacks; cuts the last piece if necessary."""
        while self.tokens and self.short:
            # The longest one that fits.
            i = bisect_left(self.short, make_piece(-1, 0, self.tokens + 1)) - 1
            if i < 0:
                piece = self.short.pop(0)
                self._take_popped([piece])
                self._return_last(piece)
            else:
                self._take_popped([self.short.pop(i)])
        while self.tokens:
            piece = min(self.long, key=lambda piece: piece.start + piece.stop)
            self.long.remove(piece)
            self._take(piece)
            if self.tokens < 0:
                self._return_last(piece)

    def _return_last(self, piece: Piece) -> None:
        """Puts back the tokens of the piece taken last that the rank has no room for."""
        self.rank.pop()
        middle = piece.stop + self.tokens
        insort(self.long, make_piece(piece.document, middle, piece.stop))
        self.tokens += piece.num_tokens
        self.work += piece.work
        self._take(make_piece(piece.document, piece.start, middle))


def _first_index(pieces: list[Piece], holds: Callable[[Piece], bool]) -> int:
    """Returns the first index from which `holds` is true, found by bisection."""
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high) // 2
        if holds(pieces[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _tail(piece: Piece, tokens: int) -> Piece:
    return make_piece(piece.document, piece.stop - tokens, piece.stop)


def _count_first_tokens(piece: Piece, tokens: int, work: float) -> int | None:
    """Returns how many of `tokens` are to be first tokens of the piece, so that together with last
    ones they have at most this work; None if even the first ones have more."""
    most = _tail(piece, tokens).work
    if most <= work:
        return 0
    # Each first token replaces a last one that sees `each` keys more.
    each = piece.num_tokens - tokens
    first = round((most - work) / each) if each else tokens + 1
    return first if first <= tokens else None


def _count_last_tokens(piece: Piece, work: float) -> int:
    """Returns how many last tokens of the piece have this work."""
    if work <= 0:
        return 0
    square = piece.stop * (piece.stop + 1) - 2 * int(work)
    start = math.isqrt(square) if square > 0 else 0
    return piece.stop - min(max(start, piece.start), piece.stop)


# ---- documents whole -----------------------------------------------------------------------------


def _place_whole(documents: Sequence[Piece], num_ranks: int) -> list[list[Piece]] | None:
    """Returns an order in which every document is whole on a rank, or None if none was found.

    documents: sorted by work.
    """
    tokens_each = sum([piece.stop for piece in documents]) // num_ranks
    work_each = sum([piece.work for piece in documents]) / num_ranks
    longest = documents[-1]
    if longest.stop > tokens_each or longest.work > MAX_WORK * work_each:
        return None
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, r) for r in range(num_ranks)]
    for piece in reversed(documents):
        load, r = heap[0]
        ranks[r].append(piece)
        load += piece.work / work_each + piece.stop / tokens_each
        heapq.heapreplace(heap, (load, r))
    # Swaps move little work, so the work must be nearly balanced before.
    if relative_work(ranks) > MAX_WORK + 0.01 or not _equalize_tokens(ranks, tokens_each):
        return None
    if relative_work(ranks) <= MAX_WORK:
        return [_join_pieces(rank) for rank in ranks]
    return None


def _equalize_tokens(ranks: list[list[Piece]], tokens_each: int) -> bool:
    """Swaps whole documents between ranks until all have as many tokens; False if it cannot."""
    surplus = [sum(piece.stop for piece in rank) - tokens_each for rank in ranks]
    while any(surplus):
        more = max(range(len(ranks)), key=surplus.__getitem__)
        swap = _find_swap(ranks, surplus, more)
        if swap is None:
            return False
        r, given, taken = swap
        ranks[more] = [piece for piece in ranks[more] if piece not in given] + list(taken)
        ranks[r] = [piece for piece in ranks[r] if piece not in taken] + list(given)
        # One of the two has no surplus afterwards, so there are fewer steps than ranks.
        moved = min(surplus[more], -surplus[r])
        surplus[more] -= moved
        surplus[r] += moved
    return True


def _find_swap(
    ranks: Sequence[list[Piece]], surplus: Sequence[int], more: int
) -> tuple[int, tuple[Piece, ...], tuple[Piece, ...]] | None:
    """Returns another rank, documents to give to it and documents to take from it, so that one of
    the two has no surplus afterwards, and as little work as possible moves."""
    fewer = heapq.nsmallest(4, range(len(ranks)), key=surplus.__getitem__)
    for size in SUBSET_DOCUMENTS:
        subsets = _subsets(ranks[more], size)
        for r in fewer:
            moved = min(surplus[more], -surplus[r])
            others = _subsets(ranks[r], size)
            swaps = [
                (r, given, others[tokens - moved])
                for tokens, given in subsets.items()
                if tokens - moved in others
            ]
            if swaps and moved > 0:
                return min(swaps, key=_work_of_swap)
    return None


def _subsets(rank: list[Piece], size: int) -> dict[int, tuple[Piece, ...]]:
    """Returns up to `size` documents of a rank, some of the shortest, for each sum of tokens."""
    if size == 1:
        return {0: ()} | {piece.stop: (piece,) for piece in rank[-SUBSET_DOCUMENTS[1] :]}
    some = sorted(rank)[: SUBSET_DOCUMENTS[size]]
    return {
        sum([piece.stop for piece in subset]): subset
        for n in range(size, -1, -1)
        for subset in itertools.combinations(some, n)
    }


def _work_of_swap(swap: tuple[int, tuple[Piece, ...], tuple[Piece, ...]]) -> int:
    _, given, taken = swap
    return abs(sum([piece.work for piece in given]) - sum([piece.work for piece in taken]))


# ---- exchange of tokens --------------------------------------------------------------------------


class _Exchange(NamedTuple):
    """Tokens of a rank for as many first tokens of a piece of a rank with less work."""

    cost: float
    """Keys fetched more, per work that moves."""
    partner: int
    given: Piece
    start: int
    """Start of the tokens that are given: the first or the last ones of the piece."""
    taken: Piece
    tokens: int
    work: int
    """Work that moves."""


class _Candidates(NamedTuple):
    """Pieces of a rank that may take part in an exchange."""

    stops: dict[int, int]
    """End of the last piece of each document."""
    longest: list[Piece]
    """Pieces to give from: those that end last."""
    lightest: list[Piece]
    """Pieces to take from: those that start first."""

    @classmethod
    def from_rank(cls, rank: list[Piece]) -> _Candidates:
        stops: dict[int, int] = {}
        for _, document, _, stop in rank:
            stops[document] = max(stops.get(document, 0), stop)
        longest = heapq.nlargest(4, rank, key=itemgetter(3))
        lightest = heapq.nsmallest(2, [(piece.start, -piece.stop, piece) for piece in rank])
        return cls(stops, longest, [piece for _, _, piece in lightest])


def _exchange_tokens(ranks: list[list[Piece]]) -> None:
    """Exchanges tokens of the rank with the most work while it has too much."""
    works = [sum([piece.work for piece in rank]) for rank in ranks]
    mean = sum(works) / len(works)
    limit = EXCHANGE_WORK * mean
    fixed_cost = sum(piece.num_tokens for piece in ranks[0]) * EXCHANGE_COST
    candidates: dict[int, _Candidates] = {}
    for _ in range(4 * len(ranks)):
        most = max(range(len(ranks)), key=works.__getitem__)
        if works[most] <= limit:
            return
        partners = heapq.nsmallest(3, range(len(ranks)), key=works.__getitem__)
        for r in (most, *partners):
            if r not in candidates:
                candidates[r] = _Candidates.from_rank(ranks[r])
        best: _Exchange | None = None
        for r in partners:
            work = min(works[most] - mean, limit - works[r])
            found = _find_exchange(candidates[most], r, candidates[r], work, fixed_cost)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
        if best is None:
            return
        _apply_exchange(ranks[most], ranks[best.partner], best)
        works[most] -= best.work
        works[best.partner] += best.work
        del candidates[most], candidates[best.partner]


def _find_exchange(
    rank: _Candidates, partner: int, other: _Candidates, work: float, fixed_cost: float
) -> _Exchange | None:
    """Returns the cheapest exchange with a rank of less work that moves at most this work."""
    best: _Exchange | None = None
    for given, taken in itertools.product(rank.longest, other.lightest):
        if given.document == taken.document:
            continue
        most = min(given.num_tokens, taken.num_tokens)
        last = min(_count_exchanged_last(given, taken, work), most)
        first = min(_count_exchanged_first(given, taken, work), most)
        for tokens, start in ((last, given.stop - last), (first, given.start)):
            moved = tokens * (start - taken.start)
            if moved <= 0:
                continue
            cost = fixed_cost
            cost += max(start + tokens - other.stops.get(given.document, 0), 0)
            cost += max(taken.start + tokens - rank.stops.get(taken.document, 0), 0)
            # A document that leaves a rank whole need not be fetched there any more.
            if tokens == given.num_tokens and given.start == 0:
                cost -= given.stop
            if tokens == taken.num_tokens and taken.start == 0:
                cost -= taken.stop
            if best is None or cost / moved < best.cost:
                best = _Exchange(cost / moved, partner, given, start, taken, tokens, moved)
    return best


def _count_exchanged_last(given: Piece, taken: Piece, work: float) -> int:
    """Returns how many last tokens of a piece move this work, or as much as possible, in exchange
    for first tokens of another."""
    # n of them move n (difference - n) work.
    difference = given.stop - taken.start
    if difference <= 0:
        return 0
    return int((difference - math.sqrt(max(difference * difference - 4 * work, 0.0))) / 2)


def _count_exchanged_first(given: Piece, taken: Piece, work: float) -> int:
    """Returns how many first tokens of a piece move this work."""
    difference = given.start - taken.start
    return int(work / difference) if difference > 0 else 0


def _apply_exchange(rank: list[Piece], other: list[Piece], exchange: _Exchange) -> None:
    """Exchanges the tokens."""
    _, _, given, start, taken, tokens, _ = exchange
    rank.remove(given)
    other.remove(taken)
    stop, middle = start + tokens, taken.start + tokens
    parts = (
        (rank, given.document, given.start, start),
        (other, given.document, start, stop),
        (rank, given.document, stop, given.stop),
        (rank, taken.document, taken.start, middle),
        (other, taken.document, middle, taken.stop),
    )
    for pieces, document, begin, end in parts:
        if begin < end:
            pieces.append(make_piece(document, begin, end))
